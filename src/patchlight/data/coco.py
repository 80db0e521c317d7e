"""Annotations in COCO's JSON format: classes, boxes and outlines of objects; pycocotools is not needed."""

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
    """A mask of `size` (height, width) as run lengths down its columns, starting with 0, or in compressed form."""

    size: tuple[int, int]
    counts: list[int] | str


Outline = list[list[float]] | Runs
"""The outline of an object: polygons x, y, x, y, …, or the runs of a mask."""


@dataclass(frozen=True)
class Thing:
    """One annotation: the name of a category, and optionally a box (xmin, ymin, xmax, ymax) and an outline.

    A `crowd` is a group of objects that are not annotated one by one.
    """

    category: str
    area: float
    box: tuple[float, ...] | None = None
    outline: Outline | None = None
    crowd: bool = False


@dataclass(frozen=True)
class Scene:
    """The annotations of one image, and its `size` (width, height) if the file has it."""

    size: tuple[int, int] | None = None
    things: list[Thing] = field(default_factory=list)

    def category(self) -> str | None:
        """The category of the largest object (ties: the first), or None."""
        objects = [thing for thing in self.things if not thing.crowd]
        return max(objects, key=lambda thing: thing.area).category if objects else None

    def of(self, category: str | None) -> Scene:
        """The annotations of this category; all for None."""
        return Scene(self.size, [thing for thing in self.things if category in (None, thing.category)])

    def boxes(self) -> Tensor | None:
        """The boxes [n,4] of its objects, or None."""
        boxes = [thing.box for thing in self.things if thing.box is not None and not thing.crowd]
        return torch.tensor(boxes) if boxes else None

    def values(self) -> Any:
        """All dependencies of boxes and mask, as plain values."""
        things = [(thing.box, thing.crowd, thing.outline) for thing in self.things]
        return [self.size, [(box, crowd, o.model_dump() if isinstance(o, Runs) else o) for box, crowd, o in things]]

    def annotations(self) -> set[str]:
        """The available annotations: "boxes", "masks"."""
        objects = [thing for thing in self.things if not thing.crowd]
        boxes = {"boxes" for thing in objects if thing.box is not None}
        return boxes | {"masks" for thing in objects if thing.outline is not None}

    def mask(self, size: tuple[int, int], name: str) -> Tensor | None:
        """A mask of this size: 1 in objects, -1 in crowds, 0 elsewhere; None without outlines of objects."""
        areas = [(thing.crowd, draw(thing.outline, size, name)) for thing in self.things if thing.outline is not None]
        if all(crowd for crowd, _ in areas):
            return None
        mask = np.zeros((size[1], size[0]), np.int8)
        for crowd, inside in sorted(areas, key=lambda area: not area[0]):  # objects overwrite crowds
            mask[inside] = -1 if crowd else 1
        return torch.from_numpy(mask)


@dataclass(frozen=True)
class Coco:
    """A file of annotations: its categories in the order of their ids, and a scene for each image.

    `endings` maps each unique end of a path to its image: 'val/1.jpg' has the ends 'val/1' and '1'.
    """

    path: Path
    categories: tuple[str, ...]
    scenes: Mapping[str, Scene]
    endings: Mapping[str, str]

    def of(self, names: Iterable[str]) -> dict[str, Scene]:
        """The scenes of images; the file has their paths, possibly longer ones, or file names."""
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
    """Read a file of annotations."""
    file = _parse(path)
    for what, entries in (("images", file.images), ("categories", file.categories)):
        twice = _duplicate(entry.id for entry in entries)
        if twice is not None:
            raise PatchlightError(f"'{path}' has two {what} with the id {twice!r}")
    names = {c.id: c.name for c in sorted(file.categories, key=lambda c: (isinstance(c.id, str), c.id))}
    if (twice := _duplicate(names.values())) is not None:
        raise PatchlightError(f"'{path}' has two categories called '{twice}'")
    scenes = {i.id: Scene((i.width, i.height) if i.width and i.height else None) for i in file.images}
    for number, annotation in enumerate(file.annotations):
        image, category = annotation.image_id, annotation.category_id
        for what, key, known in (("image", image, scenes), ("category", category, names)):
            if key not in known:
                raise PatchlightError(f"annotations[{number}] of '{path}' has the unknown {what} id {key!r}")
        scenes[image].things.append(annotation.thing(names[category]))
    by_name = {bare(image.file_name.replace("\\", "/")): scenes[image.id] for image in file.images}
    return Coco(path, tuple(names.values()), by_name, _endings(by_name))


def _parse(path: Path) -> _File:
    try:
        return _File.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise PatchlightError(f"'{path}' is not valid JSON: {first['ctx']['error']}") from error
        where = ".".join(str(key) for key in first["loc"] if not isinstance(key, str) or key.isidentifier())
        raise PatchlightError(f"'{path}' is not COCO's JSON: {where}: {first['msg']}") from error


def _duplicate(values: Iterable[Id]) -> Id | None:
    """A value that occurs more than once, or None."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _endings(scenes: Mapping[str, Scene]) -> dict[str, str]:
    owners: dict[str, list[str]] = {}
    for name in scenes:
        parts = name.split("/")
        for begin in range(len(parts)):
            owners.setdefault("/".join(parts[begin:]), []).append(name)
    return {ending: names[0] for ending, names in owners.items() if len(names) == 1}


def draw(outline: Outline, size: tuple[int, int], name: str) -> Mask:
    """The inside of an outline [H,W] on an image of this size (width, height)."""
    width, height = size
    if isinstance(outline, Runs):
        if outline.size != (height, width):
            shape = f"{outline.size[1]} x {outline.size[0]}"
            raise PatchlightError(f"the mask of '{name}' is {shape}, but its image {width} x {height}")
        counts = unpack_counts(outline.counts, name) if isinstance(outline.counts, str) else outline.counts
        return from_runs(counts, size, name)
    joined: Mask = np.logical_or.reduce([inside(_points(polygon, name), size) for polygon in outline])
    return joined


def _points(polygon: Sequence[float], name: str) -> npt.NDArray[np.float64]:
    if len(polygon) % 2:
        raise PatchlightError(f"a polygon of '{name}' has {len(polygon)} coordinates; give x, y, x, y, …")
    if len(polygon) < 6:
        raise PatchlightError(f"a polygon of '{name}' has {len(polygon) // 2} corners; give at least three")
    points = np.array(polygon, np.float64).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise PatchlightError(f"a polygon of '{name}' contains NaN or infinity; give finite coordinates")
    return points


def inside(corners: npt.NDArray[np.float64], size: tuple[int, int]) -> Mask:
    """The pixels [H,W] whose centre (column + 0.5, row + 0.5) is in a polygon with corners [n,2] (even-odd rule).

    A pixel is inside if the sides of the polygon cross its row of centres an odd number of times to its left.
    """
    width, height = size
    (x, y), (next_x, next_y) = corners.T, np.roll(corners, -1, 0).T
    middle = np.arange(height)[:, None] + 0.5
    row, side = np.nonzero((y <= middle) != (next_y <= middle))
    slope = (next_x[side] - x[side]) / (next_y[side] - y[side])
    crossing = x[side] + (row + 0.5 - y[side]) * slope
    first = np.ceil(crossing - 0.5).clip(0, width).astype(np.int64)  # the first pixel with its centre at or right of it
    flips = np.zeros((height, width + 1), np.uint8)
    np.add.at(flips, (row, first), 1)
    odd: Mask = flips.cumsum(1, dtype=np.uint8)[:, :width] % 2 == 1  # an overflow keeps the parity
    return odd


def from_runs(counts: Sequence[int], size: tuple[int, int], name: str) -> Mask:
    """The mask [H,W] with these run lengths down its columns, starting with 0."""
    width, height = size
    if min(counts, default=0) < 0:
        raise PatchlightError(f"the mask of '{name}' has a run of {min(counts)} pixels")
    if sum(counts) != width * height:
        raise PatchlightError(
            f"the runs of the mask of '{name}' have {sum(counts)} pixels; {width} x {height} are {width * height}"
        )
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(width, height).T


def unpack_counts(word: str, name: str) -> list[int]:
    """Decode run lengths in COCO's compressed form.

    A number has five bits per character, lowest first, encoded in the characters from '0' on; 32 is added to all but
    the last, whose bit 16 is the sign. From the fourth on, a number is the difference to the one two places before.
    """
    counts: list[int] = []
    number = shift = 0
    for character in word:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            raise PatchlightError(f"the runs of the mask of '{name}' contain {character!r}, which is not valid")
        number |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            number -= 1 << shift if bits & 16 else 0
            counts.append(number + (counts[-2] if len(counts) > 2 else 0))
            number = shift = 0
    if shift:
        raise PatchlightError(f"the runs of the mask of '{name}' are truncated")
    return counts
