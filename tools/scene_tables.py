"""A table of docs/results that is measured on generated scenes: its command line, its records, its intervals."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.core.statistics import bootstrap_weights, percentiles

Line = dict[str, Any]
"""What was measured on one scene."""


def interval(values: Tensor, form: str) -> str:
    """The mean of values [n] over scenes, and its 95 % bootstrap interval."""
    values = values.double()
    low, high = percentiles(bootstrap_weights(len(values)) / len(values) @ values)
    return f"{values.mean():{form}} [{low:{form}}, {high:{form}}]"


def make_table(
    description: str | None,
    scenes: Callable[[int], Sequence[Any]],
    measure: Callable[[str], Callable[[Any], Line]],
    table: Callable[[Sequence[Line]], str],
) -> None:
    """Measure scenes that are not yet in ``FILE.jsonl``, and write their table.

    Args:
        description: The help of the command.
        scenes: Generate a number of scenes.
        measure: For a device, the function that measures one scene.
        table: The table of all scenes, in Markdown.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scenes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    record = options.out.with_suffix(".jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    measure_one = measure("cuda" if torch.cuda.is_available() else "cpu")
    for scene in scenes(options.scenes)[len(lines) :]:
        lines.append(measure_one(scene))
        with record.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    options.out.write_text(table(lines), encoding="utf-8")
    print(table(lines))
