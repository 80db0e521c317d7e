"""Annotations of an image in a file, and boxes in CSV files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from patchlight.core.errors import PatchlightError
from patchlight.data.base import read_number, read_table


@dataclass(frozen=True)
class Note:
    """The annotations of one image: its synset or class index, boxes, and the size of the image that they refer to."""

    label: str
    boxes: list[tuple[float, ...]] = field(default_factory=list)
    size: tuple[float, float] | None = None


def read_boxes(path: Path, key: Callable[[str], str]) -> dict[str, Note]:
    """Read a CSV file with one line per box: image, xmin, ymin, xmax, ymax, optionally class, width and height.

    Args:
        path: The file.
        key: Returns the key of an image from its name in the file.
    """
    rows = read_table(path, ("image", "xmin", "ymin", "xmax", "ymax"))
    notes: dict[str, Note] = {}
    for row in rows:
        label = row.get("class_index") or row.get("synset") or ""
        size = None
        if row.get("width") and row.get("height"):
            size = (read_number(row["width"], path), read_number(row["height"], path))
        note = notes.setdefault(key(row["image"]), Note(label, size=size))
        note.boxes.append(tuple(read_number(row[side], path) for side in ("xmin", "ymin", "xmax", "ymax")))
    return notes


def scale_boxes(note: Note, size: tuple[int, int], name: str) -> torch.Tensor:
    """Boxes in the pixels of the image; the note may refer to a copy of another size with the same proportions."""
    boxes = torch.tensor(note.boxes)
    width, height = size
    if note.size is None or min(note.size) <= 0 or note.size == (width, height):
        return boxes
    x, y = width / note.size[0], height / note.size[1]
    if abs(x / y - 1) > 0.02:
        raise PatchlightError(
            f"the boxes of '{name}' refer to an image of {note.size[0]:g} x {note.size[1]:g} pixels, but it has "
            f"{width} x {height}, with other proportions"
        )
    return boxes * boxes.new_tensor([x, y, x, y])
