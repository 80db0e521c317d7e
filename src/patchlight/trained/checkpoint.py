"""The files of a training: its checkpoint, which is written atomically, and `metrics.csv`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_atomic

Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the part of the training they belong to."""


def write_checkpoint(path: Path, about: Mapping[str, Any], parts: Parts) -> None:
    """Write the parts of a training as one safetensors file, with `about` as JSON in its header."""
    from safetensors.torch import save

    tensors = {f"{a}/{b}": t.detach().cpu().contiguous() for a, part in parts.items() for b, t in part.items()}
    write_atomic(path, save(tensors, {"about": json.dumps(about)}))


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Parts]:
    """Read the header and the parts of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            for key in file.keys():  # noqa: SIM118
                part, _, name = key.partition("/")
                parts[part][name] = file.get_tensor(key)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PatchlightError(f"'{path}' is damaged; remove it to start again") from error
    return about, parts


def append_metrics(path: Path, row: Mapping[str, float]) -> None:
    """Append a report to `metrics.csv`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if first:
            file.write(",".join(row) + "\n")
        file.write(",".join(f"{value:.6g}" for value in row.values()) + "\n")


def cut_metrics(path: Path, step: int, restarts: int = 0) -> None:
    """Remove the reports after a checkpoint, and an incomplete last line."""
    if not path.is_file():
        return
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    names = head.split(",")

    def is_before(row: str) -> bool:
        values = dict(zip(names, row.split(","), strict=False))
        if len(values) < len(names):
            return False
        attempt = int(values.get("restarts", 0))
        return attempt < restarts or (attempt == restarts and float(values["step"]) <= step)

    write_atomic(path, ("\n".join([head, *filter(is_before, rows)]) + "\n").encode())
