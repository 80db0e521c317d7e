"""Table of docs/results/answers.md: ``python -m tools.answers_page --scenes 60 --out FILE``.

New scenes with the question "what color is the …" are asked of the bundled `pocket-vlm`. For each method: how often the
highest patch of the map of the colour lies on the object, and deletion, from 0 without the image to 1 with it.
Brackets are 95 % bootstrap intervals over scenes; one line per scene goes to ``FILE.jsonl``, from which a run resumes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.statistics import bootstrap_weights, percentiles
from tools.train_vlm import WORDS, ask, normalise

METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "tower": {
        "random": {},
        "rawatt": {},
        "genatt": {},
        "grad": {},
        "ixg": {},
        "fullgrad-plus.libra": {},
        "gradcam": {},
        "token-activation": {},
        "occlusion": {"unit": "token", "level": "token"},
        "tis": {},
        "posterior": {"samples": 256},
    },
    "language": {"rawatt": {}, "genatt": {}, "ixg": {}},
}
"""Methods with their settings, by the place where the model is opened."""


def scenes(count: int) -> list[tuple[Tensor, Tensor, str, str]]:
    """New scenes with a question about a colour: image [1,3,H,W], mask [H,W], question and colour."""
    asked, chosen = ask(8 * count, torch.Generator().manual_seed(3 * 10**6)), []
    for i in (asked.there & (asked.kinds == 0)).nonzero().flatten().tolist()[:count]:
        words, begin = [WORDS[k] for k in asked.ids[i].tolist()], int(asked.begin[i])
        colour = words[words.index("</s>") - 1]
        chosen.append((normalise(asked.images[i : i + 1]), asked.masks[i], " ".join(words[:begin]), colour))
    return chosen


def measure(places: dict[str, Any], image: Tensor, mask: Tensor, question: str, colour: str) -> dict[str, Any]:
    """For each method: whether the highest patch lies on the object, and deletion; empty for a wrong answer."""
    head, tower = pl.heads.Answer(question), places["tower"]
    words = tower.ask(head).prepared(tower.batch(image)).question
    if words.words[-1].word != colour or colour not in words.labels:
        return {}
    covered = torch.nn.functional.max_pool2d(mask[None, None].float(), 8)[0, 0] > 0
    rows = {}
    for place, methods in METHODS.items():
        for name, settings in methods.items():
            att = pl.explain(places[place], image, name, head=head, target=colour, progress=False, **settings)
            row, column = att.top_patches(1)[0, 0].tolist()
            value = pl.evaluate(
                tower,
                image,
                att.scores,
                "deletion",
                unit="token",
                steps=16,
                head=head,
                target=colour,
                progress=False,
            )
            rows[f"{place} {name}"] = [float(covered[row, column]), float(value.values[0])]
    return {"gain": words.words[-1].gain, "methods": rows}


def table(lines: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    right = [line["methods"] for line in lines if line]
    weights = bootstrap_weights(len(right)) / len(right)
    values = {key: torch.tensor([each[key] for each in right], dtype=torch.float64) for key in right[0]}

    def interval(each: Tensor, form: str) -> str:
        low, high = percentiles(weights @ each)
        return f"{each.mean():{form}} [{low:{form}}, {high:{form}}]"

    rows = [
        f"{len(right)} of {len(lines)} answers name the right colour, with a gain above 0.5 nats; these are measured.",
        "",
        "| place | method | highest patch on the object | deletion ↓ | random minus method |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in sorted(values, key=lambda key: float(values[key][:, 1].mean())):
        place, name = key.split()
        on, deletion = values[key].unbind(1)
        gap = interval(values["tower random"][:, 1] - deletion, ".3f") if name != "random" else "–"
        rows.append(f"| {place} | `{name}` | {interval(on, '.0%')} | {interval(deletion, '.3f')} | {gap} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    record = options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    places = {place: pl.load("pocket-vlm", device=device, place=place) for place in METHODS}
    for scene in scenes(options.scenes)[len(lines) :]:
        lines.append(measure(places, *scene))
        with record.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    options.out.write_text(table(lines), encoding="utf-8")
    print(table(lines))


if __name__ == "__main__":
    main()
