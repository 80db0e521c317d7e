"""What every data set is, a sequence of samples read when asked for, and how samples become a batch for a model."""

from __future__ import annotations

import csv
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
from patchlight.core.registry import Entry, Registry

T = TypeVar("T")
SLACK = 1.0
"""Pixels by which a box may leave its image: annotations count from 0 or from 1, and were rounded."""


@dataclass(frozen=True)
class Sample:
    """One image with what is known of it, in the pixels of `image`.

    `boxes` [n,4] are xmin, ymin, xmax, ymax; `mask` [H,W] int8 is 1 on the object, 0 on the background and -1 where
    nobody labelled; `regions` [H,W] int16 are class indices and -1, where several classes are drawn: `mask` is then
    the class with the largest area.
    """

    name: str
    image: Image.Image
    label: int | None = None
    boxes: Tensor | None = None
    mask: Tensor | None = None
    regions: Tensor | None = None


@dataclass(frozen=True)
class Sources:
    """What a sample is made of, told without opening its files: equal sources give equal samples.

    `files` are its own (image, mask, boxes); `values` all else that reading it depends on, as plain values (boxes from
    a table); `label` its class, where that is known before the mask is read; `known` its annotations besides: boxes,
    masks, and labels that a mask tells.
    """

    files: Sequence[Path]
    label: int | None = None
    values: Any = None
    known: AbstractSet[str] = frozenset()

    @property
    def annotations(self) -> set[str]:
        """Which it has, of labels, boxes and masks."""
        return {*self.known, *(() if self.label is None else ("labels",))}


@dataclass(frozen=True)
class Data:
    """A sequence of samples: `data[i]` is `read(names[i])`; names are unique and stable, `labels` name the classes.

    `sources` says by name what `read` reads, for kinds of data that lie in files; the benchmark then knows a sample by
    its files, and does not decode it to see whether it has changed.
    """

    name: str
    names: Sequence[str]
    read: Callable[[str], Sample]
    labels: Sequence[str] | None = None
    sources: Callable[[str], Sources] | None = None

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            twice = Counter(self.names).most_common(1)[0][0]
            raise PatchlightError(f"data set '{self.name}' has two samples called '{twice}'; give each its own name")

    @classmethod
    def of_files(
        cls,
        name: str,
        names: Sequence[str],
        sources: Callable[[str], Sources],
        labels: Sequence[str] | None = None,
        annotate: Callable[[Sample, Sources], Sample] | None = None,
    ) -> Data:
        """Samples in files, the first of which is the image; `annotate` adds to it what the others say."""
        return cls(name, names, partial(_read_files, sources, annotate), labels, sources)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        return _checked(self.read(self.names[index]), self)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Iterable[int] | None = None, every: int = 1) -> Data:
        """The samples at `indices` (default: all), of these every n-th."""
        if every < 1:
            raise PatchlightError(f"every={every} is not a step; give 1 or more")
        chosen = list(range(len(self)) if indices is None else indices)
        wrong = next((i for i in chosen if not 0 <= i < len(self)), None)
        if wrong is not None:
            raise PatchlightError(f"no sample {wrong} in data set '{self.name}'; it has 0 to {len(self) - 1}")
        return replace(self, names=[self.names[i] for i in chosen[::every]])

    def listed(self, file: str | Path) -> Data:
        """The samples that a file lists, in its order: see `read_list`."""
        return self.select(read_list(file, self.names))


@dataclass(frozen=True)
class Batch:
    """Samples as a model and a metric take them, boxes and masks on the model's input.

    `images` [B,C,H,W] preprocessed; `labels` [B] int64, -1 where a sample has none; `boxes` per image [n,4], [0,4]
    where it has none or the crop cut them all away; `masks` [B,H,W] int8, all -1 where a sample has none; each is None
    where no sample has any. `failures`: the (name, sentence) of samples that could not be read and are not among the B.
    """

    names: list[str]
    images: Tensor
    labels: Tensor | None
    boxes: list[Tensor] | None
    masks: Tensor | None
    failures: list[tuple[str, str]]


def _read_files(
    sources: Callable[[str], Sources], annotate: Callable[[Sample, Sources], Sample] | None, name: str
) -> Sample:
    own = sources(name)
    sample = Sample(name, open_image(own.files[0]), own.label)
    return sample if annotate is None else annotate(sample, own)


def load_batch(data: Data, indices: Iterable[int], vit: Anatomy | Preprocess, workers: int = 0) -> Batch:
    """The samples at `indices`, preprocessed for a model (or by a `Preprocess`), read by this many threads."""
    return next(_batches(data, [list(indices)], vit, workers))


def batches(data: Data, vit: Anatomy | Preprocess, size: int = 32, workers: int = 2) -> Iterator[Batch]:
    """All samples in batches of `size`; threads read the next batch while this one is worked on."""
    if size < 1:
        raise PatchlightError(f"a batch of size {size} was asked; give 1 or more")
    chunks = [list(range(i, min(i + size, len(data)))) for i in range(0, len(data), size)]
    return _batches(data, chunks, vit, workers)


def _batches(data: Data, chunks: Sequence[Sequence[int]], vit: Anatomy | Preprocess, workers: int) -> Iterator[Batch]:
    preprocess, channels = (vit, 3) if isinstance(vit, Preprocess) else (vit.preprocess, vit.channels)

    def load(index: int) -> _Item:
        try:
            return _prepared(data[index], preprocess, channels)
        except PatchlightError as error:
            return data.names[index], str(error)

    def stacked(items: Iterable[_Item]) -> Batch:
        return _stacked(list(items), (channels, *preprocess.size))

    if workers <= 0:
        yield from (stacked(map(load, chunk)) for chunk in chunks)
        return
    pool = ThreadPoolExecutor(workers)
    ahead: deque[Iterator[_Item]] = deque()
    try:
        for chunk in chunks:
            ahead.append(pool.map(load, chunk))
            if len(ahead) > 1:
                yield stacked(ahead.popleft())
        while ahead:
            yield stacked(ahead.popleft())
    finally:
        pool.shutdown(cancel_futures=True)  # whoever stops early need not wait for what was read ahead


@dataclass(frozen=True)
class _Prepared:
    """A sample on the model's input."""

    name: str
    image: Tensor
    label: int | None
    boxes: Tensor | None
    mask: Tensor | None


_Item = _Prepared | tuple[str, str]


def _prepared(sample: Sample, preprocess: Preprocess, channels: int) -> _Prepared:
    label, boxes, mask = sample.label, sample.boxes, sample.mask
    if boxes is not None:
        boxes = preprocess.boxes(boxes, sample.image.size)
    if sample.regions is not None:
        mask, label = largest_region(preprocess.mask(sample.regions), sample.name)
    elif mask is not None:
        mask = preprocess.mask(mask)
        if not bool((mask == 1).any()):
            raise PatchlightError(f"the mask of '{sample.name}' has no object left inside the model's crop")
    return _Prepared(sample.name, to_batch(sample.image, preprocess, channels)[0], label, boxes, mask)


def _stacked(items: Sequence[_Item], shape: tuple[int, int, int]) -> Batch:
    good = [item for item in items if isinstance(item, _Prepared)]
    labels = [-1 if item.label is None else item.label for item in good]
    boxes = [torch.empty(0, 4) if item.boxes is None else item.boxes for item in good]
    blank = torch.full(shape[1:], -1, dtype=torch.int8)
    masks = [blank if item.mask is None else item.mask for item in good]
    return Batch(
        names=[item.name for item in good],
        images=torch.stack([item.image for item in good]) if good else torch.empty(0, *shape),
        labels=torch.tensor(labels) if any(item.label is not None for item in good) else None,
        boxes=boxes if any(item.boxes is not None for item in good) else None,
        masks=torch.stack(masks) if any(item.mask is not None for item in good) else None,
        failures=[item for item in items if not isinstance(item, _Prepared)],
    )


def labelled(batch: Batch) -> Batch:
    """The batch less its samples without a class, which become failures."""
    known = [] if batch.labels is None else (batch.labels >= 0).nonzero().flatten().tolist()
    if len(known) == len(batch.names):
        return batch
    without = [(name, f"'{name}' has no label") for i, name in enumerate(batch.names) if i not in known]
    return Batch(
        [batch.names[i] for i in known],
        batch.images[known],
        None if batch.labels is None else batch.labels[known],
        None if batch.boxes is None else [batch.boxes[i] for i in known],
        None if batch.masks is None else batch.masks[known],
        [*batch.failures, *without],
    )


def largest_region(regions: Tensor, name: str) -> tuple[Tensor, int]:
    """The class with the most pixels in `regions` [H,W] (the first of equals) as a mask of 1 and 0, and its index."""
    areas = torch.bincount(regions[regions >= 0].long())
    if not len(areas):
        raise PatchlightError(f"the mask of '{name}' has no object in it; leave the image out")
    label = int(areas.argmax())
    return (regions == label).to(torch.int8), label


def _checked(sample: Sample, data: Data) -> Sample:
    """The sample, its boxes clipped to its image; refused where its annotations cannot be of this image."""
    width, height = sample.image.size
    if sample.label is not None and data.labels is not None and not 0 <= sample.label < len(data.labels):
        raise PatchlightError(
            f"'{sample.name}' has class {sample.label}; the classes of '{data.name}' are 0 to {len(data.labels) - 1}"
        )
    for drawn in (sample.mask, sample.regions):
        if drawn is not None and tuple(drawn.shape) != (height, width):
            raise PatchlightError(
                f"the mask of '{sample.name}' is {drawn.shape[1]} x {drawn.shape[0]}, but its image {width} x {height}"
            )
    if sample.mask is not None and not bool((sample.mask == 1).any()):
        raise PatchlightError(f"the mask of '{sample.name}' has no object in it; leave the image out")
    if sample.boxes is None:
        return sample
    for box in sample.boxes.tolist():
        x0, y0, x1, y1 = box
        told = ", ".join(f"{v:g}" for v in box)
        if not (x0 < x1 and y0 < y1):
            raise PatchlightError(f"a box of '{sample.name}' is ({told}); give xmin < xmax and ymin < ymax")
        if x0 < -SLACK or y0 < -SLACK or x1 > width + SLACK or y1 > height + SLACK:
            raise PatchlightError(f"a box of '{sample.name}' is ({told}), outside its image of {width} x {height}")
    limit = sample.boxes.new_tensor([width, height, width, height])
    return replace(sample, boxes=torch.minimum(sample.boxes.clamp(min=0), limit))


def existing_folder(path: str | Path, what: str) -> Path:
    """`path`, if it is a folder."""
    path = Path(path)
    if not path.is_dir():
        why = "is not a folder" if path.exists() else "does not exist"
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
    """The rows of a CSV file with a header, which must have these columns."""
    try:
        rows = csv.DictReader(read_text(path).splitlines(), restval="")
        missing = [column for column in columns if column not in (rows.fieldnames or [])]
        if missing:
            raise PatchlightError(f"'{path}' has no column {missing[0]}; its header must name {', '.join(columns)}")
        return list(rows)
    except csv.Error as error:
        raise PatchlightError(f"'{path}' is not a CSV file: {error}") from error


def read_number(text: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise PatchlightError(f"'{path}' has '{text}' where a number should stand") from error


def read_pairs(path: Path) -> dict[str, str]:
    """A label file, by image: lines `name,label` or `name label`; a header and lines with # are passed over."""
    pairs: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines()):
        words = next(csv.reader([line])) if "," in line else line.split(maxsplit=1)
        name, label = (word.strip() for word in (*words, "", "")[:2])
        header = number == 0 and name.lower() in {"name", "image", "file", "filename"}
        if header or not name or name.startswith("#"):
            continue
        if not label:
            raise PatchlightError(f"line {number + 1} of '{path}' is '{line.strip()}'; write name,label")
        pairs[bare(name)] = label
    return pairs


def read_list(file: str | Path, names: Sequence[str]) -> list[int]:
    """The indices of the images that a file lists, in its order; `names` are all images of the data set.

    A line is the name of an image or its index, its place among `names` from 0 on. A file has either names or indices:
    indices where every line is a whole number, unless each of them is also a name. A name may be written without its
    suffix or its folders where that leaves one image. Blank lines and lines that begin with # do not count, and a line
    may begin with "- ", as in a YAML list.
    """
    path = Path(file)
    every = ((number, line.strip()) for number, line in enumerate(read_text(path).split("\n"), 1))
    lines = {number: line.removeprefix("- ").strip() for number, line in every if line and not line.startswith("#")}
    if not lines:
        raise PatchlightError(f"'{path}' lists no image; write one name or index per line")
    numbers = all(line.isascii() and line.isdecimal() for line in lines.values())
    find = _by_index(len(names)) if numbers and not set(lines.values()) <= set(names) else _by_name(names)
    seen: dict[int, int] = {}
    for number, line in lines.items():
        try:
            index = find(line)
        except PatchlightError as error:
            raise PatchlightError(f"'{path}', line {number}: {error}") from error
        if index in seen:
            raise PatchlightError(
                f"'{path}', line {number}: '{line}' is on line {seen[index]} already; list each image once"
            )
        seen[index] = number
    return list(seen)


def _by_index(count: int) -> Callable[[str], int]:
    def find(line: str) -> int:
        index = int(line) if len(line) < 20 else count  # Python refuses to read numbers of thousands of digits
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
        found = [exact[line]] if line in exact else short.get(line, [])
        if not found:
            raise PatchlightError(f"no image is called '{line}'; {nearest(line, names)}")
        if len(found) > 1:
            one, other = (names[index] for index in found[:2])
            raise PatchlightError(f"'{line}' may be '{one}' or '{other}'; write the whole name")
        return found[0]

    return find


def look_up(
    names: Iterable[str],
    table: Mapping[str, T],
    path: Path,
    what: str = "line",
    endings: Mapping[str, str] | None = None,
) -> dict[str, T]:
    """What a file says of images, which it may call by path or by file name, with or without suffix.

    `endings` are ends of paths, and what the table has for them. What is said of one image is said of no other.
    """
    found: dict[str, T] = {}
    named: dict[str, str] = {}
    for name in names:
        keys = ((endings or {}).get(bare(name)), bare(name), bare(Path(name).name))
        key = next((key for key in keys if key in table), None)
        if key is None:
            raise PatchlightError(f"'{path}' has no {what} for image '{name}'; add one or take the image away")
        other = named.setdefault(key, name)
        if bare(other) != bare(name):
            raise PatchlightError(
                f"'{path}' has one {what}, '{key}', for two images, '{other}' and '{name}'; give each its own, by path"
            )
        found[name] = table[key]
    return found


def bare(name: str) -> str:
    """An image's name without its suffix."""
    stem, dot, suffix = name.rpartition(".")
    return stem if f"{dot}{suffix}".lower() in SUFFIXES else name


@dataclass(frozen=True)
class Kind(Entry):
    """A kind of data set: a function of a path and options to Data; one that is `made_up` needs no path."""

    made_up: bool = False


KINDS: Registry[Kind] = Registry(
    "data set", [f"patchlight.data.{room}" for room in ("cifar", "files", "imagenet", "mura", "segmentation")]
)
Opener = TypeVar("Opener", bound=Callable[..., Any])


def register_data(name: str, *, aliases: tuple[str, ...] = (), made_up: bool = False) -> Callable[[Opener], Opener]:
    """Register a kind of data set: a function of a path, whose keyword arguments, typed, are its options."""

    def register(function: Opener) -> Opener:
        KINDS.add(Kind(name, function, aliases=aliases, made_up=made_up))
        return function

    return register
