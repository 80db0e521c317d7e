"""What a training leaves on disk: the checkpoint, whole or not at all, and the rows of `metrics.csv`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.files import write_whole
from patchlight.trained.diffmask.settings import Progress

Parts = Mapping[str, Mapping[str, Tensor]]


def write_checkpoint(path: Path, about: Mapping[str, Any], parts: Parts) -> None:
    """Named tensors by part, and what there is to say about them, as one safetensors file."""
    from safetensors.torch import save

    tensors = {f"{a}/{b}": t.detach().cpu().contiguous() for a, part in parts.items() for b, t in part.items()}
    write_whole(path, save(tensors, {"about": json.dumps(about)}))


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["about"])
            parts: dict[str, dict[str, Tensor]] = {"gates": {}, "optimiser": {}, "multipliers": {}}
            for key in file.keys():  # noqa: SIM118
                part, _, name = key.partition("/")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise PatchlightError(f"'{path}' is damaged; remove it to start again") from error
    return about, parts


_COLUMNS = [f.name for f in fields(Progress)]


def append_metrics(path: Path, now: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write(",".join(_COLUMNS) + "\n")
        file.write(",".join(f"{getattr(now, c):.6g}" for c in _COLUMNS) + "\n")


def cut_metrics(path: Path, step: int) -> None:
    """Drop what was reported after the checkpoint, and a line that was cut short."""
    if not path.is_file():
        return
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    whole = [r for r in rows if r.count(",") == head.count(",") and float(r.split(",")[0]) <= step]
    write_whole(path, ("\n".join([head, *whole]) + "\n").encode())
