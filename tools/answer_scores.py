"""Second table of docs/results/answers.md: ``python -m tools.answer_scores --scenes 60 --out FILE``.

Why are signed maps poor for answers? The scenes of `tools.answers_page`, with maps of the log-probability of the
colour, maps of its logit minus the mean logit, and the absolute values of the former. Each scene is a line of
``FILE.jsonl``, from which an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.vlm import AnswersAnatomy
from patchlight.core.statistics import bootstrap_weights, percentiles
from tools.answers_page import scenes

METHODS = ("ixg", "fullgrad-plus.libra")


def centred(self: AnswersAnatomy, logits: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits [B,T] of the tokens of an answer minus the mean logit, in place of their log-probabilities."""
    logits = logits - logits.mean(-1, keepdim=True)
    return logits.gather(2, ids[None, :, None].expand(len(logits), -1, 1))[..., 0]


def measure(vlm: Any, image: Tensor, mask: Tensor, question: str, colour: str) -> dict[str, list[float]]:
    """For each map: whether its highest patch lies on the object, deletion, and the share of the object below 0."""
    head = pl.heads.Answer(question)
    ready = vlm.ask(head).prepared(vlm.batch(image))
    if ready.question.words[-1].word != colour or colour not in ready.question.labels:
        return {}
    covered = torch.nn.functional.max_pool2d(mask[None, None].float(), 8)[0, 0] > 0
    rows = {}
    for method in METHODS:
        found = pl.explain(ready, image, method, target=colour, progress=False).scores
        with mock.patch.object(AnswersAnatomy, "_logs_of", centred):
            other = pl.explain(ready, image, method, target=colour, progress=False).scores
        absolute = found.abs()
        maps = {"log-probability": found, "logit minus mean logit": other, "log-probability, absolute values": absolute}
        for score, scores in maps.items():
            deletion = pl.evaluate(
                vlm, image, scores, "deletion", unit="token", steps=16, head=head, target=colour, progress=False
            )
            below = float((scores[0][covered] < 0).float().mean())
            rows[f"`{method}` | {score}"] = [
                float(covered.flatten()[scores[0].argmax()]),
                float(deletion.values[0]),
                below,
            ]
    return rows


def table(lines: list[dict[str, list[float]]]) -> str:
    """The table in Markdown."""
    right = [line for line in lines if line]
    weights = bootstrap_weights(len(right)) / len(right)
    rows = [
        "| method | score | highest patch on the object | deletion ↓ | patches of the object below 0 |",
        "| --- " * 5 + "|",
    ]
    for key in right[0]:
        cells = []
        for each, form in zip(
            torch.tensor([line[key] for line in right]).double().T, (".0%", ".3f", ".0%"), strict=True
        ):
            low, high = percentiles(weights @ each)
            cells.append(f"{each.mean():{form}} [{low:{form}}, {high:{form}}]")
        rows.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    record = options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    vlm = pl.load("pocket-vlm")
    for scene in scenes(options.scenes)[len(lines) :]:
        lines.append(measure(vlm, *scene))
        with record.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    options.out.write_text(table(lines), encoding="utf-8")
    print(table(lines))


if __name__ == "__main__":
    main()
