"""Data sets as sequences of samples that are read when needed, and batches of samples for a model."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import SUFFIXES, Preprocess, open_image, to_batch
from patchlight.core.registry import Entry, Registry, make_decorator

T = TypeVar("T")
SLACK = 1.0
"""Pixels by which a box may exceed its image, because annotations are rounded and start at 0 or 1."""


@dataclass(frozen=True)
class Sample:
    """One image and its annotations, in the pixels of the image.

    Attributes:
        name: The name of the sample.
        image: The image.
        label: The class.
        boxes: Boxes [n,4]: xmin, ymin, xmax, ymax.
        mask: A mask [H,W] int8: 1 object, 0 background, -1 not labelled.
        regions: Class indices [H,W] int16, or -1, if several classes are annotated; `mask` is then the largest class.
    """

    name: str
    image: Image.Image
    label: int | None = None
    boxes: Tensor | None = None
    mask: Tensor | None = None
    regions: Tensor | None = None


@dataclass(frozen=True)
class Sources:
    """The origin of a sample, without opening its files: equal sources give equal samples.

    Attributes:
        files: The files of the sample: image, mask, boxes.
        label: Its class, if it is known before the mask is read.
        values: All other dependencies of the sample as plain values, such as boxes from a table.
        present: Its other annotations: "boxes", "masks", and "labels" if the mask determines the class.
    """

    files: Sequence[Path]
    label: int | None = None
    values: Any = None
    present: AbstractSet[str] = frozenset()

    @property
    def annotations(self) -> set[str]:
        """The available annotations: "labels", "boxes", "masks"."""
        return {*self.present, *(() if self.label is None else ("labels",))}


@dataclass(frozen=True)
class Data:
    """A sequence of samples: `data[i]` is `read(names[i])`.

    Attributes:
        name: The name of the data set.
        names: The names of the samples, unique and stable.
        read: Reads a sample by name.
        labels: The names of the classes.
        sources: Returns the origin of a sample by name, for data in files; the benchmark detects changes with it
            without decoding images.
    """

    name: str
    names: Sequence[str]
    read: Callable[[str], Sample]
    labels: Sequence[str] | None = None
    sources: Callable[[str], Sources] | None = None

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = Counter(self.names).most_common(1)[0][0]
            raise PatchlightError(f"data set '{self.name}' has two samples called '{twice}'; names must be unique")

    @classmethod
    def of_files(
        cls,
        name: str,
        names: Sequence[str],
        sources: Callable[[str], Sources],
        labels: Sequence[str] | None = None,
        annotate: Callable[[Sample, Sources], Sample] | None = None,
    ) -> Data:
        """Samples in files, the first of which is the image; `annotate` adds the annotations from the other files."""
        return cls(name, names, partial(_read_files, sources, annotate), labels, sources)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        return _check(self.read(self.names[index]), self)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Iterable[int] | None = None, every: int = 1) -> Data:
        """Every n-th of the samples with these indices (default: all)."""
        if every < 1:
            raise PatchlightError(f"every={every} is not a valid step; give at least 1")
        selected = list(range(len(self)) if indices is None else indices)
        wrong = next((i for i in selected if not 0 <= i < len(self)), None)
        if wrong is not None:
            raise PatchlightError(f"no sample {wrong} in data set '{self.name}'; it has 0 to {len(self) - 1}")
        return replace(self, names=[self.names[i] for i in selected[::every]])

    def listed(self, file: str | Path) -> Data:
        """The samples listed in a file, in its order: see `read_list`."""
        return self.select(read_list(file, self.names))


@dataclass(frozen=True)
class Batch:
    """Preprocessed samples; annotations are None if no sample has any.

    Attributes:
        names: The names of the samples.
        images: Preprocessed images [B,C,H,W].
        labels: Classes [B] int64; -1 for samples without one.
        boxes: Boxes [n,4] of each image on the model's input, [0,4] if there are none inside.
        masks: Masks [B,H,W] int8 on the model's input; all -1 for samples without one.
        failures: Name and reason of the samples that could not be read, which are not in the batch.
    """

    names: list[str]
    images: Tensor
    labels: Tensor | None
    boxes: list[Tensor] | None
    masks: Tensor | None
    failures: list[tuple[str, str]]

    def select(self, rows: Sequence[int]) -> Batch:
        """The samples with these indices."""
        labels, masks = (None if values is None else values[rows] for values in (self.labels, self.masks))
        boxes = None if self.boxes is None else [self.boxes[i] for i in rows]
        names = [self.names[i] for i in rows]
        return replace(self, names=names, images=self.images[rows], labels=labels, boxes=boxes, masks=masks)


def _read_files(
    sources: Callable[[str], Sources], annotate: Callable[[Sample, Sources], Sample] | None, name: str
) -> Sample:
    origin = sources(name)
    sample = Sample(name, open_image(origin.files[0]), origin.label)
    return sample if annotate is None else annotate(sample, origin)


def load_batch(data: Data, indices: Iterable[int], vit: Anatomy | Preprocess, workers: int = 0) -> Batch:
    """The samples with these indices, preprocessed for a model; `workers` threads read them."""
    return next(_batches(data, [list(indices)], vit, workers))


def batches(data: Data, vit: Anatomy | Preprocess, size: int = 32, workers: int = 2) -> Iterator[Batch]:
    """All samples in batches; threads read the next batch in advance."""
    if size < 1:
        raise PatchlightError(f"batch size {size} is not possible; give at least 1")
    chunks = [list(range(i, min(i + size, len(data)))) for i in range(0, len(data), size)]
    return _batches(data, chunks, vit, workers)


def _batches(data: Data, chunks: Sequence[Sequence[int]], vit: Anatomy | Preprocess, workers: int) -> Iterator[Batch]:
    preprocess, channels = (vit, 3) if isinstance(vit, Preprocess) else (vit.preprocess, vit.channels)

    def load(index: int) -> _Item:
        try:
            return _prepare(data[index], preprocess, channels)
        except PatchlightError as error:
            return data.names[index], str(error)

    def stack(items: Iterable[_Item]) -> Batch:
        return _stack(list(items), (channels, *preprocess.size))

    if workers <= 0:
        yield from (stack(map(load, chunk)) for chunk in chunks)
        return
    pool = ThreadPoolExecutor(workers)
    ahead: deque[Iterator[_Item]] = deque()
    try:
        for chunk in chunks:
            ahead.append(pool.map(load, chunk))
            if len(ahead) > 1:
                yield stack(ahead.popleft())
        while ahead:
            yield stack(ahead.popleft())
    finally:
        pool.shutdown(cancel_futures=True)  # if the caller stops early


@dataclass(frozen=True)
class _Prepared:
    """A sample with its annotations on the model's input."""

    name: str
    image: Tensor
    label: int | None
    boxes: Tensor | None
    mask: Tensor | None


_Item = _Prepared | tuple[str, str]


def _prepare(sample: Sample, preprocess: Preprocess, channels: int) -> _Prepared:
    label, boxes, mask = sample.label, sample.boxes, sample.mask
    if boxes is not None:
        boxes = preprocess.boxes(boxes, sample.image.size)
    if sample.regions is not None:
        mask, label = largest_region(preprocess.mask(sample.regions), sample.name)
    elif mask is not None:
        mask = preprocess.mask(mask)
        if not bool((mask == 1).any()):
            raise PatchlightError(f"the mask of '{sample.name}' has no object inside the model's crop")
    return _Prepared(sample.name, to_batch(sample.image, preprocess, channels)[0], label, boxes, mask)


def _stack(items: Sequence[_Item], shape: tuple[int, int, int]) -> Batch:
    prepared = [item for item in items if isinstance(item, _Prepared)]
    labels = [-1 if item.label is None else item.label for item in prepared]
    boxes = [torch.empty(0, 4) if item.boxes is None else item.boxes for item in prepared]
    blank = torch.full(shape[1:], -1, dtype=torch.int8)
    masks = [blank if item.mask is None else item.mask for item in prepared]
    return Batch(
        names=[item.name for item in prepared],
        images=torch.stack([item.image for item in prepared]) if prepared else torch.empty(0, *shape),
        labels=torch.tensor(labels) if any(item.label is not None for item in prepared) else None,
        boxes=boxes if any(item.boxes is not None for item in prepared) else None,
        masks=torch.stack(masks) if any(item.mask is not None for item in prepared) else None,
        failures=[item for item in items if not isinstance(item, _Prepared)],
    )


def labelled(batch: Batch) -> Batch:
    """The samples of a batch that have a class; all others become failures."""
    rows = [] if batch.labels is None else (batch.labels >= 0).nonzero().flatten().tolist()
    if len(rows) == len(batch.names):
        return batch
    unlabelled = [(name, f"'{name}' has no label") for i, name in enumerate(batch.names) if i not in rows]
    return replace(batch.select(rows), failures=[*batch.failures, *unlabelled])


def largest_region(regions: Tensor, name: str) -> tuple[Tensor, int]:
    """The class with the most pixels in `regions` [H,W], as a mask of 1 and 0, and its index (ties: the lowest)."""
    areas = torch.bincount(regions[regions >= 0].long())
    if not len(areas):
        raise PatchlightError(f"the mask of '{name}' has no object; remove the image")
    label = int(areas.argmax())
    return (regions == label).to(torch.int8), label


def _check(sample: Sample, data: Data) -> Sample:
    """Check the annotations of a sample, and clip its boxes to the image."""
    width, height = sample.image.size
    if sample.label is not None and data.labels is not None and not 0 <= sample.label < len(data.labels):
        raise PatchlightError(
            f"'{sample.name}' has class {sample.label}; the classes of '{data.name}' are 0 to {len(data.labels) - 1}"
        )
    for mask in (sample.mask, sample.regions):
        if mask is not None and tuple(mask.shape) != (height, width):
            raise PatchlightError(
                f"the mask of '{sample.name}' is {mask.shape[1]} x {mask.shape[0]}, but its image {width} x {height}"
            )
    if sample.mask is not None and not bool((sample.mask == 1).any()):
        raise PatchlightError(f"the mask of '{sample.name}' has no object; remove the image")
    if sample.boxes is None:
        return sample
    for box in sample.boxes.tolist():
        x0, y0, x1, y1 = box
        sides = ", ".join(f"{v:g}" for v in box)
        if not (x0 < x1 and y0 < y1):
            raise PatchlightError(f"a box of '{sample.name}' is ({sides}); give xmin < xmax and ymin < ymax")
        if x0 < -SLACK or y0 < -SLACK or x1 > width + SLACK or y1 > height + SLACK:
            raise PatchlightError(f"a box of '{sample.name}' is ({sides}), outside its image of {width} x {height}")
    limit = sample.boxes.new_tensor([width, height, width, height])
    return replace(sample, boxes=torch.minimum(sample.boxes.clamp(min=0), limit))


def existing_folder(path: str | Path, what: str) -> Path:
    """The path of an existing folder; `what` is its content in errors."""
    path = Path(path)
    if not os.path.isdir(path):
        why = "is not a folder" if os.path.exists(path) else "does not exist"
        raise PatchlightError(f"'{path}' {why}; give the folder of {what}")
    return path


def first_existing(paths: Iterable[Path]) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PatchlightError(f"'{path}' is not a text file in UTF-8") from error
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be read: {error.strerror or error}") from error


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file with a header that has these columns."""
    try:
        rows = csv.DictReader(read_text(path).splitlines(), restval="")
        missing = [column for column in columns if column not in (rows.fieldnames or [])]
        if missing:
            raise PatchlightError(f"'{path}' has no column {missing[0]}; its header must name {', '.join(columns)}")
        return list(rows)
    except csv.Error as error:
        raise PatchlightError(f"'{path}' is not a CSV file: {error}") from error


def read_number(text: str, path: Path) -> float:
    """A finite number in a file."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PatchlightError(f"'{path}' has '{text[:40]}' instead of a number")
    return value


def as_index(word: str) -> int | None:
    """A word of at most nine digits as an index; None for any other word."""
    return int(word) if word.isdecimal() and len(word) < 10 else None


def read_pairs(path: Path) -> dict[str, str]:
    """Labels by image from lines `name,label` or `name label`, without a header and lines that begin with #."""
    pairs: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines()):
        try:
            words = next(csv.reader([line])) if "," in line else line.split(maxsplit=1)
        except csv.Error as error:
            raise PatchlightError(f"line {number + 1} of '{path}' is not CSV: {error}") from error
        name, label = (word.strip() for word in (*words, "", "")[:2])
        header = number == 0 and name.lower() in {"name", "image", "file", "filename"}
        if header or not name or name.startswith("#"):
            continue
        if not label:
            raise PatchlightError(f"line {number + 1} of '{path}' is '{line.strip()}'; write name,label")
        pairs[bare(name)] = label
    return pairs


def read_list(file: str | Path, names: Sequence[str]) -> list[int]:
    """The indices of the images listed in a file, in its order.

    Each line is the name of an image, or each line is an index from 0. Lines are indices if all are integers, unless
    all of them are names. Suffix and folders of a name may be omitted if one image remains. Blank lines and lines that
    begin with # are skipped; a line may begin with "- ", as in YAML.

    Args:
        file: The file.
        names: The names of all images of the data set.
    """
    path = Path(file)
    stripped = ((number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1))
    lines = {number: line.removeprefix("- ").strip() for number, line in stripped if line and not line.startswith("#")}
    if not lines:
        raise PatchlightError(f"'{path}' lists no images; write one name or index per line")
    numbers = all(line.isascii() and line.isdecimal() for line in lines.values())
    find = _by_index(len(names)) if numbers and not set(lines.values()) <= set(names) else _by_name(names)
    line_numbers: dict[int, int] = {}
    for number, line in lines.items():
        try:
            index = find(line)
        except PatchlightError as error:
            raise PatchlightError(f"'{path}', line {number}: {error}") from error
        if index in line_numbers:
            raise PatchlightError(
                f"'{path}', line {number}: '{line}' is already on line {line_numbers[index]}; list each image once"
            )
        line_numbers[index] = number
    return list(line_numbers)


def _by_index(count: int) -> Callable[[str], int]:
    def find(line: str) -> int:
        index = int(line) if len(line) < 20 else count  # Python cannot parse numbers with thousands of digits
        if index >= count:
            raise PatchlightError(f"there is no image {line[:20]}; indices are 0 to {count - 1}")
        return index

    return find


def _by_name(names: Sequence[str]) -> Callable[[str], int]:
    exact = {name: index for index, name in enumerate(names)}
    short: dict[str, list[int]] = {}
    for name, index in exact.items():
        for key in {bare(name), Path(name).name, bare(Path(name).name)}:
            short.setdefault(key, []).append(index)

    def find(line: str) -> int:
        matches = [exact[line]] if line in exact else short.get(line, [])
        if not matches:
            raise PatchlightError(f"no image is called '{line}'; {nearest(line, names)}")
        if len(matches) > 1:
            first, second = (names[index] for index in matches[:2])
            raise PatchlightError(f"'{line}' may be '{first}' or '{second}'; write the full name")
        return matches[0]

    return find


def look_up(
    names: Iterable[str],
    table: Mapping[str, T],
    path: Path,
    what: str = "line",
    endings: Mapping[str, str] | None = None,
) -> dict[str, T]:
    """The entries of a table by image; the table has paths or file names, with or without suffix.

    Args:
        names: The images.
        table: The entries, each of one image.
        path: The file of the table in errors.
        what: What an entry is called in errors.
        endings: Keys of the table by the ends of their paths.
    """
    entries: dict[str, T] = {}
    named: dict[str, str] = {}
    for name in names:
        keys = ((endings or {}).get(bare(name)), bare(name), bare(Path(name).name))
        key = next((key for key in keys if key in table), None)
        if key is None:
            raise PatchlightError(f"'{path}' has no {what} for image '{name}'; add one or remove the image")
        other = named.setdefault(key, name)
        if bare(other) != bare(name):
            raise PatchlightError(
                f"'{path}' has one {what}, '{key}', for two images, '{other}' and '{name}'; give each its own, by path"
            )
        entries[name] = table[key]
    return entries


def bare(name: str) -> str:
    """The name of an image without its suffix."""
    stem, dot, suffix = name.rpartition(".")
    return stem if f"{dot}{suffix}".lower() in SUFFIXES else name


@dataclass(frozen=True)
class Kind(Entry):
    """A kind of data set: a function of a path and options that returns Data; if `made_up`, it is generated."""

    made_up: bool = False


KINDS: Registry[Kind] = Registry(
    "data set",
    [
        f"patchlight.data.{room}"
        for room in ("cifar", "files", "ground_truth", "imagenet", "mosaic", "mura", "segmentation")
    ],
)
register_data = make_decorator(KINDS, Kind)
