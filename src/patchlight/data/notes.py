"""What a file says of an image, and boxes as CSV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from patchlight.core.errors import PatchlightError
from patchlight.data.base import read_number, read_table


@dataclass(frozen=True)
class Note:
    """What a file says of one image: its synset or class index, boxes, and the size of the image they were drawn on."""

    label: str
    boxes: list[tuple[float, ...]] = field(default_factory=list)
    size: tuple[float, float] | None = None


def read_boxes(path: Path, called: Callable[[str], str]) -> dict[str, Note]:
    """A CSV file with a line a box: image, xmin, ymin, xmax, ymax, and perhaps class, and the image's width and height.

    `called` makes the name that images are looked up by of the one in the file.
    """
    rows = read_table(path, ("image", "xmin", "ymin", "xmax", "ymax"))
    notes: dict[str, Note] = {}
    for row in rows:
        label = row.get("class_index") or row.get("synset") or ""
        size = None
        if row.get("width") and row.get("height"):
            size = (read_number(row["width"], path), read_number(row["height"], path))
        note = notes.setdefault(called(row["image"]), Note(label, size=size))
        note.boxes.append(tuple(read_number(row[side], path) for side in ("xmin", "ymin", "xmax", "ymax")))
    return notes


def scaled(note: Note, size: tuple[int, int], name: str) -> torch.Tensor:
    """The boxes in the pixels of the image; they may have been drawn on a copy of another size, but not shape."""
    boxes = torch.tensor(note.boxes)
    width, height = size
    if note.size is None or min(note.size) <= 0 or note.size == (width, height):
        return boxes
    x, y = width / note.size[0], height / note.size[1]
    if abs(x / y - 1) > 0.02:
        raise PatchlightError(
            f"the boxes of '{name}' were drawn on {note.size[0]:g} x {note.size[1]:g} pixels, which is not the shape "
            f"of its image of {width} x {height}"
        )
    return boxes * boxes.new_tensor([x, y, x, y])
