"""The plan: a recipe cut into shards of images. A shard says all that its rows depend on, and its key is their hash."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchlight.bench.recipe import Method, Metric, Model, Recipe, Source
from patchlight.errors import PatchlightError
from patchlight.metrics.base import resolve_metric
from patchlight.registry import resolve

if TYPE_CHECKING:
    from patchlight.data import Data

PATIENCE = 2.0
"""Seconds of planning that need no word."""
NOT_MEASURING = ("cli", "viz", "bench", "zoo")
"""Parts of the package that may change without any map or value changing."""
Event = dict[str, Any]
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Shard:
    """Some images of the data, one model, all methods and metrics: whoever runs it gets the same rows.

    `names` are the images at `indices` of the data, `contents` the hashes of what is in them (pixels, class, boxes,
    mask); `digest` is that of the weights file. Paths say where things are and are not part of the key.
    """

    label: str
    model: Model
    digest: str
    data: Source
    indices: tuple[int, ...]
    names: tuple[str, ...]
    contents: tuple[str, ...]
    methods: Mapping[str, Method]
    metrics: Mapping[str, Metric]
    target: str
    seed: int

    @cached_property
    def place(self) -> str:
        """The hash of code, model, images, class policy and seed: all but methods and metrics."""
        from patchlight import __version__

        model = self.model.model_dump(mode="json", exclude={"weights", "stands_for"})
        images = [self.data.kind, self.data.options, self.names, self.contents]
        return digest_of([__version__, source_digest(), model, self.digest, images, self.target, self.seed])

    @cached_property
    def cells(self) -> dict[tuple[str, str], str]:
        """By method and metric, the hash of what the one's values under the other depend on."""
        asked = {label: resolve(m.method, m.settings) for label, m in self.methods.items()}
        measured = {label: resolve_metric(m.metric, m.settings) for label, m in self.metrics.items()}
        return {
            (m, n): digest_of([self.place, a.name, a.settings, a.score, b.metric.name, b.settings])
            for m, a in asked.items()
            for n, b in measured.items()
        }

    @cached_property
    def key(self) -> str:
        return digest_of([[*pair, cell] for pair, cell in self.cells.items()])


@dataclass(frozen=True)
class Plan:
    """All shards, in order, and what a reader should know about the choice of images."""

    recipe: Recipe
    shards: tuple[Shard, ...]
    notes: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        return sum(len(s.names) for s in self.shards if s.label == self.shards[0].label)


def digest_of(value: Any) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a value's JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


@cache
def source_digest() -> str:
    """The hash of the package's own source, of all that maps and values come from: changed code has its own rows."""
    package = Path(__file__).parents[1]
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in NOT_MEASURING:
            hashed.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


def plan(recipe: Recipe, data: Data | None = None, listen: Listener = lambda event: None) -> Plan:
    """Cut the recipe's images into shards of `recipe.shard`, for each of its models.

    Every image is read once, for its hash; where that takes long, `listen` is told how far it is.
    """
    data = opened(recipe.data) if data is None else data
    chosen, notes = _chosen(recipe, data)
    contents = dict(zip(chosen, _contents(data, chosen, recipe.data.path, listen), strict=True))
    chunks = [chosen[i : i + recipe.shard] for i in range(0, len(chosen), recipe.shard)]
    shards = []
    for label, model in recipe.models.items():
        digest = _file_digest(model.weights)
        for chunk in chunks:
            names = tuple(data.names[i] for i in chunk)
            shards.append(
                Shard(
                    label,
                    model,
                    digest,
                    recipe.data,
                    tuple(chunk),
                    names,
                    tuple(contents[i] for i in chunk),
                    recipe.methods,
                    recipe.metrics,
                    recipe.target,
                    recipe.seed,
                )
            )
    return Plan(recipe, tuple(shards), tuple(notes))


def opened(source: Source) -> Data:
    """The data set of a recipe."""
    from patchlight.data import open_data

    if not source.path and source.kind != "counting":
        raise PatchlightError(f"the recipe needs '{source.kind}' data; say where with --data DIR (or --data KIND:DIR)")
    return open_data(source.kind, source.path, **source.options)


def _chosen(recipe: Recipe, data: Data) -> tuple[Sequence[int], list[str]]:
    """Indices of the images to use, and a note where there are fewer than asked for."""
    total, wanted = len(data), recipe.data.images
    if total == 0:
        raise PatchlightError(f"there are no images in '{recipe.data.path}'")
    if wanted is None or wanted >= total:
        short = wanted is not None and wanted > total
        return range(total), [
            f"{wanted} images were asked for; the data has {total}, and all are used"
        ] if short else []
    if recipe.data.pick == "first":
        return range(wanted), []
    if recipe.data.pick == "random":
        drawn = torch.randperm(total, generator=torch.Generator().manual_seed(recipe.seed))[:wanted]
        return sorted(drawn.tolist()), []
    return [i * total // wanted for i in range(wanted)], []


def _contents(data: Data, chosen: Sequence[int], path: str, listen: Listener) -> list[str]:
    """The hash of what is in each image; of one that cannot be read, of the sentence that says why, less the path."""

    def read(index: int) -> str:
        try:
            return _sample_digest(data, index)
        except PatchlightError as error:
            return digest_of(str(error).replace(path, "") if path else str(error))

    found, told = [], time.monotonic()
    pool = ThreadPoolExecutor(4)
    try:
        for digest in pool.map(read, chosen):
            found.append(digest)
            if time.monotonic() - told > PATIENCE:
                told = time.monotonic()
                listen({"event": "plan", "read": len(found), "images": len(chosen)})
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted plan need not read the rest
    return found


def _sample_digest(data: Data, index: int) -> str:
    """The hash of a sample's pixels, class (number and name), boxes and mask."""
    sample = data[index]
    label = None if sample.label is None else [sample.label, data.labels[sample.label] if data.labels else ""]
    drawn = [sample.boxes, sample.mask, sample.regions]
    shapes = [None if t is None else [str(t.dtype), *t.shape] for t in drawn]
    hashed = hashlib.sha256(json.dumps([sample.image.mode, sample.image.size, label, shapes]).encode())
    hashed.update(sample.image.tobytes())
    for tensor in drawn:
        if tensor is not None:
            hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def _file_digest(path: str | None) -> str:
    """The SHA-256 of a weights file; empty for weights that go by the model's name."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PatchlightError(f"the weights '{path}' cannot be read: {error.strerror or error}") from error
