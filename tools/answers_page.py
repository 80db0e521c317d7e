"""Table of docs/results/answers.md: ``python -m tools.answers_page --scenes 60 --out FILE``.

The bundled `pocket-vlm` answers "what color is the …" on held-out scenes. The table shows for each method how often the
highest patch is on the object, and deletion, scaled from 0 (no image) to 1 (the image). Brackets are 95 % bootstrap
intervals over scenes. Each scene is a line of ``FILE.jsonl``, from which an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import patchlight as pl
from tools.scene_tables import Line, interval, make_table
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


def measure(places: dict[str, Any], image: Tensor, mask: Tensor, question: str, colour: str) -> Line:
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


def table(lines: Sequence[Line]) -> str:
    """The table in Markdown."""
    right = [line["methods"] for line in lines if line]
    values = {key: torch.tensor([each[key] for each in right], dtype=torch.float64) for key in right[0]}
    rows = [
        f"{len(right)} of {len(lines)} answers name the right colour, with a gain above 0.5 nats; these were measured.",
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
    def measure_on(device: str) -> Callable[[Any], Line]:
        places = {place: pl.load("pocket-vlm", device=device, place=place) for place in METHODS}
        return lambda scene: measure(places, *scene)

    make_table(__doc__, scenes, measure_on, table)


if __name__ == "__main__":
    main()
