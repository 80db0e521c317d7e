"""COCO's JSON: classes, boxes and outlines of objects, which are drawn here and need no library of COCO's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.data.base import bare, look_up, read_text

Id = int | str
Mask = npt.NDArray[np.bool_]


class Runs(BaseModel):
    """A mask of `size` (height, width) as lengths of runs down its columns, of 0 and of 1 in turn, or as a word."""

    size: tuple[int, int]
    counts: list[int] | str


Outline = list[list[float]] | Runs
"""An object: polygons x, y, x, y, …, or the runs of a mask."""


@dataclass(frozen=True)
class Thing:
    """One annotation: a category's name, a box (xmin, ymin, xmax, ymax) and an outline, where it has them.

    A `crowd` is a group of objects that nobody told apart.
    """

    category: str
    area: float
    box: tuple[float, ...] | None = None
    outline: Outline | None = None
    crowd: bool = False


@dataclass(frozen=True)
class Scene:
    """What is drawn on one image, which is of this `size` (width, height) where the file says so."""

    size: tuple[int, int] | None = None
    things: list[Thing] = field(default_factory=list)

    def category(self) -> str | None:
        """That of the largest object, the first of equals; None where there is none."""
        objects = [thing for thing in self.things if not thing.crowd]
        return max(objects, key=lambda thing: thing.area).category if objects else None

    def of(self, category: str | None) -> Scene:
        """Only things of this category; all of them for None."""
        return Scene(self.size, [thing for thing in self.things if category in (None, thing.category)])

    def boxes(self) -> Tensor | None:
        """The boxes [n,4] of its objects; None where there is none."""
        found = [thing.box for thing in self.things if thing.box is not None and not thing.crowd]
        return torch.tensor(found) if found else None

    def values(self) -> Any:
        """All that boxes and mask are made of, as plain values."""
        drawn = [(one.box, one.crowd, one.outline) for one in self.things]
        return [self.size, [(*each, o.model_dump() if isinstance(o, Runs) else o) for *each, o in drawn]]

    def known(self) -> set[str]:
        """Which it has, of boxes and masks."""
        objects = [thing for thing in self.things if not thing.crowd]
        boxes = {"boxes" for thing in objects if thing.box is not None}
        return boxes | {"masks" for thing in objects if thing.outline is not None}

    def mask(self, size: tuple[int, int], name: str) -> Tensor | None:
        """1 in its objects, -1 in crowds, 0 elsewhere, on an image of this size; None where no object is drawn."""
        drawn = [(thing.crowd, draw(thing.outline, size, name)) for thing in self.things if thing.outline is not None]
        if all(crowd for crowd, _ in drawn):
            return None
        mask = np.zeros((size[1], size[0]), np.int8)
        for crowd, inside in sorted(drawn, key=lambda each: not each[0]):  # objects lie over crowds
            mask[inside] = -1 if crowd else 1
        return torch.from_numpy(mask)


@dataclass(frozen=True)
class Coco:
    """A file of annotations: the names of its categories, in the order of their numbers, and a scene for each image.

    `endings` has the image of every end of a path that is no other's: 'val/1.jpg' is 'val/1' and '1'.
    """

    path: Path
    categories: tuple[str, ...]
    scenes: Mapping[str, Scene]
    endings: Mapping[str, str]

    def of(self, names: Iterable[str]) -> dict[str, Scene]:
        """Those of images, which the file may call by longer paths, or by their file names."""
        return look_up(names, self.scenes, self.path, "entry", self.endings)


class _Image(BaseModel):
    id: Id
    file_name: str
    width: int | None = None
    height: int | None = None


class _Annotation(BaseModel):
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float] | None = None
    area: float | None = None
    segmentation: Outline | None = None
    iscrowd: bool = False

    def thing(self, category: str) -> Thing:
        x, y, width, height = self.bbox or (0.0, 0.0, 0.0, 0.0)
        box = None if self.bbox is None else (x, y, x + width, y + height)
        area = width * height if self.area is None else self.area
        return Thing(category, area, box, self.segmentation or None, self.iscrowd)


class _Category(BaseModel):
    id: Id
    name: str


class _File(BaseModel):
    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def read_coco(path: Path) -> Coco:
    """The annotations in a file; one sentence about what is wrong with it."""
    file = _validated(path)
    for what, entries in (("images", file.images), ("categories", file.categories)):
        twice = _twice(entry.id for entry in entries)
        if twice is not None:
            raise PatchlightError(f"'{path}' has two {what} of the id {twice!r}")
    names = {one.id: one.name for one in sorted(file.categories, key=lambda one: (isinstance(one.id, str), one.id))}
    if (twice := _twice(names.values())) is not None:
        raise PatchlightError(f"'{path}' has two categories called '{twice}'")
    scenes = {one.id: Scene((one.width, one.height) if one.width and one.height else None) for one in file.images}
    for number, one in enumerate(file.annotations):
        for what, wanted, known in (("image", one.image_id, scenes), ("category", one.category_id, names)):
            if wanted not in known:
                raise PatchlightError(
                    f"annotations[{number}] of '{path}' is of {what} {wanted!r}, which is not listed there"
                )
        scenes[one.image_id].things.append(one.thing(names[one.category_id]))
    called = {bare(one.file_name.replace("\\", "/")): scenes[one.id] for one in file.images}
    return Coco(path, tuple(names.values()), called, _endings(called))


def _validated(path: Path) -> _File:
    try:
        return _File.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise PatchlightError(f"'{path}' is not sound JSON: {first['ctx']['error']}") from error
        where = ".".join(str(key) for key in first["loc"] if not isinstance(key, str) or key.isidentifier())
        raise PatchlightError(f"'{path}' is not COCO's JSON: {where}: {first['msg']}") from error


def _twice(values: Iterable[Id]) -> Id | None:
    """One that is there more than once."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _endings(scenes: Mapping[str, Scene]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for name in scenes:
        parts = name.split("/")
        for begin in range(len(parts)):
            found.setdefault("/".join(parts[begin:]), []).append(name)
    return {ending: names[0] for ending, names in found.items() if len(names) == 1}


def draw(outline: Outline, size: tuple[int, int], name: str) -> Mask:
    """What lies inside an outline [H,W], on an image of this size (width, height)."""
    width, height = size
    if isinstance(outline, Runs):
        if outline.size != (height, width):
            told = f"{outline.size[1]} x {outline.size[0]}"
            raise PatchlightError(f"the mask of '{name}' is {told}, but its image {width} x {height}")
        counts = unpacked(outline.counts, name) if isinstance(outline.counts, str) else outline.counts
        return from_runs(counts, size, name)
    joined: Mask = np.logical_or.reduce([inside(_points(polygon, name), size) for polygon in outline])
    return joined


def _points(polygon: Sequence[float], name: str) -> npt.NDArray[np.float64]:
    if len(polygon) % 2:
        raise PatchlightError(f"a polygon of '{name}' has {len(polygon)} coordinates; give x, y, x, y, …")
    if len(polygon) < 6:
        raise PatchlightError(f"a polygon of '{name}' has {len(polygon) // 2} corners; give three or more")
    points = np.array(polygon, np.float64).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise PatchlightError(f"a polygon of '{name}' has NaN or infinity in it; give finite coordinates")
    return points


def inside(corners: npt.NDArray[np.float64], size: tuple[int, int]) -> Mask:
    """The pixels [H,W] whose centre, at (column + 0.5, row + 0.5), lies in a polygon of corners [n,2], by even and odd.

    A row of centres enters or leaves the polygon wherever it crosses a side, so a pixel is inside if an odd number of
    crossings lies to its left.
    """
    width, height = size
    (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, 0).T
    middle = np.arange(height)[:, None] + 0.5
    row, side = np.nonzero((y <= middle) != (next_y <= middle))
    slope = (next_x[side] - x[side]) / (next_y[side] - y[side])
    crossing = x[side] + (row + 0.5 - y[side]) * slope
    first = np.ceil(crossing - 0.5).clip(0, width).astype(np.int64)  # the first pixel whose centre is not left of it
    flips = np.zeros((height, width + 1), np.uint8)
    np.add.at(flips, (row, first), 1)
    odd: Mask = flips.cumsum(1, dtype=np.uint8)[:, :width] % 2 == 1  # where a sum is over 255, it stays odd or even
    return odd


def from_runs(counts: Sequence[int], size: tuple[int, int], name: str) -> Mask:
    """The mask [H,W] whose columns, one after the other, are runs of these lengths, of 0 and of 1 in turn."""
    width, height = size
    if min(counts, default=0) < 0:
        raise PatchlightError(f"the mask of '{name}' has a run of {min(counts)} pixels")
    if sum(counts) != width * height:
        raise PatchlightError(
            f"the mask of '{name}' has runs of {sum(counts)} pixels in all; {width} x {height} are {width * height}"
        )
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(width, height).T


def unpacked(word: str, name: str) -> list[int]:
    """The lengths of runs in COCO's compressed form.

    A number is written five bits a character, the lowest first, in the characters from '0' on; 32 is added to all but
    its last, whose bit 16 is the sign. From the fourth on, a number is the difference to the last but one.
    """
    counts: list[int] = []
    number = shift = 0
    for character in word:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise PatchlightError(
                f"the mask of '{name}' has {character!r} in its runs, which COCO's form does not have"
            )
        number |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            number -= 1 << shift if bits & 16 else 0
            counts.append(number + (counts[-2] if len(counts) > 2 else 0))
            number = shift = 0
    if shift:
        raise PatchlightError(f"the runs of the mask of '{name}' are broken off")
    return counts
