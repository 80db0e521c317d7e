"""The plan: a recipe cut into shards of images. A shard says all that its rows depend on, and its key is their hash."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.anatomy.base import Anatomy
from patchlight.bench.code import described
from patchlight.bench.events import Listener, Planning
from patchlight.bench.recipe import Recipe
from patchlight.errors import PatchlightError
from patchlight.fingerprints import identity
from patchlight.specs import DataSpec, MethodSpec, MetricSpec, ModelSpec

if TYPE_CHECKING:
    from patchlight.data import Data, Sample

PATIENCE = 2.0
"""Seconds of planning that need no word."""
NOT_MEASURING = ("cli", "viz", *(f"bench/{room}.py" for room in ("events", "html", "results", "statistics", "tables")))
"""Parts of the package that may change without any map or value changing."""
Pair = tuple[str, str]
"""The labels of a method and of a metric."""


@dataclass(frozen=True)
class Shard:
    """Some images of the data, one model, all methods and metrics: whoever runs it gets the same rows.

    `names` are the images at `indices` of the data, `contents` the hashes of what is in them (pixels, boxes and mask,
    then the class), `classes` the hash of the names of all classes; `digest` is that of the model as it was loaded, and
    `made` that of each method under each metric: names, settings and code. Paths of data and weights say where things
    are and are not part of the key.
    """

    label: str
    model: ModelSpec
    digest: str
    data: DataSpec
    indices: tuple[int, ...]
    names: tuple[str, ...]
    contents: tuple[str, ...]
    classes: str
    methods: Mapping[str, MethodSpec]
    metrics: Mapping[str, MetricSpec]
    made: Mapping[Pair, str]
    target: str
    seed: int

    @cached_property
    def place(self) -> str:
        """The hash of code, model, images, class policy and seed: all but methods and metrics."""
        from patchlight import __version__

        model = self.model.model_dump(mode="json", exclude={"weights", "labels", "stands_for"})
        images = [self.data.kind, self.data.options, self.names, self.contents, self.classes]
        return digest_of([__version__, source_digest(), model, self.digest, images, self.target, self.seed])

    @cached_property
    def cells(self) -> dict[Pair, str]:
        """By method and metric, the hash of what the one's values under the other depend on."""
        return {pair: digest_of([self.place, made]) for pair, made in self.made.items()}

    @cached_property
    def key(self) -> str:
        return digest_of([self.label, *([*pair, cell] for pair, cell in self.cells.items())])


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
        if name.parts[0] not in NOT_MEASURING and name.as_posix() not in NOT_MEASURING:
            hashed.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


@lru_cache(maxsize=1)
def load_model(model: ModelSpec, device: str) -> Anatomy:
    """A recipe's model; the last one is kept."""
    return model.load(device)


def model_digest(vit: Anatomy) -> str:
    """The hash of a model as it was loaded: weights, modules, configuration, and how it is shown an image."""
    config: Any = getattr(vit.model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else None
    about = [vit.grid, vit.prefix, vit.pooling, vit.classes, vit.labels, asdict(vit.outputs), vit.channels]
    modules = re.sub(r"0x[0-9a-fA-F]+", "", repr(vit.model))
    return digest_of([identity(vit), modules, told, about, asdict(vit.preprocess)])


def _made(recipe: Recipe) -> dict[Pair, str]:
    """By method and metric, the hash of what is asked and of what it does that names and settings do not say."""
    methods = {}
    for label, method in recipe.methods.items():
        asked = method.request
        depends = asked.method.depends(asked.settings) if asked.method.depends is not None else None
        code = described([asked.method, asked.composition, asked.rule])
        methods[label] = digest_of([asked.name, described(asked.settings), described(asked.score), code, depends])
    found = {}
    for label, made in methods.items():
        for name, metric in recipe.metrics.items():
            measured = recipe.methods[label].measured_by(metric)
            found[label, name] = digest_of([made, described(measured.metric), described(measured.settings)])
    return found


def plan(recipe: Recipe, data: Data | None = None, listen: Listener = lambda event: None, device: str = "cpu") -> Plan:
    """Cut the recipe's images into shards of `recipe.shard`, for each of its models.

    Every image is read once and every model loaded, for their hashes; where that takes long, `listen` is told how far
    it is.
    """
    made = _made(recipe)
    data = recipe.data.open() if data is None else data
    chosen, notes = _chosen(recipe, data)
    read = _contents(data, chosen, recipe.data.path, listen)
    contents = {index: digest for index, (digest, _) in zip(chosen, read, strict=True)}
    notes += _missing(recipe, [known for _, known in read if known is not None])
    chunks = [chosen[i : i + recipe.shard] for i in range(0, len(chosen), recipe.shard)]
    shards = []
    classes = digest_of(data.labels and list(data.labels))
    load_model.cache_clear()  # weights may have changed since this process last looked
    for label, model in recipe.models.items():
        digest = model_digest(load_model(model, device))
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
                    classes,
                    recipe.methods,
                    recipe.metrics,
                    made,
                    recipe.target,
                    recipe.seed,
                )
            )
    return Plan(recipe, tuple(shards), tuple(notes))


def as_planned(data: Data, shard: Shard) -> Data:
    """The shard's samples; one that has changed since the plan was made is refused when it is read."""
    planned = dict(zip(shard.names, zip(shard.indices, shard.contents, strict=True), strict=True))

    def read(name: str) -> Sample:
        index, content = planned[name]
        there = index < len(data) and data.names[index] == name
        sample = data[index] if there else None
        if sample is None or drawn_digest(sample) != content.partition("-")[0]:
            raise PatchlightError(f"'{name}' has changed since the run was planned; run the same command again")
        return sample

    return replace(data, names=shard.names, read=read)


def _chosen(recipe: Recipe, data: Data) -> tuple[Sequence[int], list[str]]:
    """Indices of the images to use, and a note where there are fewer than asked for."""
    chosen, wanted = recipe.data.chosen(len(data), recipe.seed), recipe.data.images
    if wanted is None or len(chosen) == wanted:
        return chosen, []
    return chosen, [f"{wanted} images were asked for; the data has {len(chosen)}, and all are used"]


def _missing(recipe: Recipe, known: Sequence[set[str]]) -> list[str]:
    """A note for each metric whose annotations no image has; refused where that is so of all of them."""
    have = set().union(*known)
    if not known:
        return []
    if recipe.target == "label" and "labels" not in have:
        raise PatchlightError("the recipe explains the images' labels, and the data has none; give --target prediction")
    lacking = {}
    for label, own in recipe.metrics.items():
        lacking[label] = [need for need in sorted(own.request.metric.needs) if not have & set(need.split(" or "))]
    told = [f"'{label}' needs {' and '.join(needs)}" for label, needs in lacking.items() if needs]
    where = f"the '{recipe.data.kind}' data at '{recipe.data.path}' has none"
    if len(told) == len(lacking):
        raise PatchlightError(f"{told[0]}, and {where}; give data that has (--data KIND:DIR)")
    return [f"{each}, and {where}: it will have no value" for each in told]


Read = tuple[str, set[str] | None]
"""The hash of a sample, and which annotations it has; None of one that cannot be read."""


def _contents(data: Data, chosen: Sequence[int], path: str, listen: Listener) -> list[Read]:
    """Every image once; of one that cannot be read, the hash is that of the sentence that says why, less the path."""

    def read(index: int) -> Read:
        try:
            sample = data[index]
        except PatchlightError as error:
            return digest_of(str(error).replace(path, "") if path else str(error)), None
        label = None if sample.label is None else [sample.label, data.labels[sample.label] if data.labels else ""]
        drawn = {"labels": sample.label, "boxes": sample.boxes, "masks": sample.mask}
        known = {kind for kind, value in drawn.items() if value is not None}
        known |= {"labels", "masks"} if sample.regions is not None else set()
        return f"{drawn_digest(sample)}-{digest_of(label)}", known

    found, told = [], time.monotonic()
    pool = ThreadPoolExecutor(4)
    try:
        for digest in pool.map(read, chosen):
            found.append(digest)
            if time.monotonic() - told > PATIENCE:
                told = time.monotonic()
                listen(Planning(len(found), len(chosen)))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted plan need not read the rest
    return found


def drawn_digest(sample: Sample) -> str:
    """The hash of a sample's pixels, boxes and mask; its class, which may be numbered otherwise, is not in it."""
    drawn = [sample.boxes, sample.mask, sample.regions]
    shapes = [None if t is None else [str(t.dtype), *t.shape] for t in drawn]
    hashed = hashlib.sha256(json.dumps([sample.image.mode, sample.image.size, shapes]).encode())
    hashed.update(sample.image.tobytes())
    for tensor in drawn:
        if tensor is not None:
            hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]
