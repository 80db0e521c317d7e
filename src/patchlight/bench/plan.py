"""Cuts a recipe into units of work. A unit contains everything that its rows depend on; its key is a hash of that."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.spec import ModelSpec
from patchlight.bench.code import describe_value
from patchlight.bench.contents import contents, read_planned, same_classes
from patchlight.bench.events import Listener
from patchlight.bench.recipe import Recipe
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import identity, json_digest

if TYPE_CHECKING:
    from patchlight.data import Data, Sample

NOT_MEASURING = (
    *("cli", "web", "callbacks", "report", "core/drawing", "core/extras.py"),
    *("study/recommend", "study/faithfulness.py", "study/compare.py", "study/ranking.py", "study/cost.py"),
)
"""Parts of the package on which no map or value depends."""
MEASURING = tuple(Path("bench", name) for name in ("code.py", "contents.py", "plan.py", "recipe.py", "unit.py"))
"""Modules of the benchmark on which values depend."""
TOGETHER = 4
"""Most methods of a shared pass per unit, if metrics run the model: measuring then takes longer than the pass."""
Pair = tuple[str, str]
"""The labels of a method and of a metric."""


@dataclass(frozen=True, repr=False)
class Images:
    """Images of a data set: their indices in it, names, and content hashes."""

    indices: tuple[int, ...]
    names: tuple[str, ...]
    contents: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<{len(self)} images from '{self.names[0]}' on>" if self.names else "<0 images>"

    def __len__(self) -> int:
        return len(self.names)

    def at(self, places: Sequence[int]) -> Images:
        return Images(
            tuple(self.indices[i] for i in places),
            tuple(self.names[i] for i in places),
            tuple(self.contents[i] for i in places),
        )


@dataclass(frozen=True)
class Group:
    """Methods that are explained together on one model, in batches, and measured by all metrics.

    Paths of data and weights are not part of any hash.

    Attributes:
        recipe: The recipe.
        label: The model's label in the recipe.
        methods: The methods' labels in the recipe.
        hashes: Hash of each method under each metric: names, settings and code.
        digest: Hash of the model as it was loaded.
        classes: Hash of the data's class names.
    """

    recipe: Recipe
    label: str
    methods: tuple[str, ...]
    hashes: Mapping[Pair, str]
    digest: str
    classes: str
    batch_size: int

    @property
    def model(self) -> ModelSpec:
        return self.recipe.models[self.label]

    @cached_property
    def place(self) -> str:
        """The hash of code, model, data, target and seed: everything except images, methods and metrics."""
        from patchlight import __version__

        model = self.model.model_dump(mode="json", exclude={"weights", "labels", "similar_to", "stands_for"})
        spec = self.recipe.data_for(self.label)
        data = [spec.kind, spec.meaning, self.classes]
        policy = [self.recipe.target, self.recipe.seed]
        return json_digest([__version__, source_digest(), model, self.digest, data, *policy])

    @cached_property
    def key(self) -> str:
        hashes = [[*pair, digest] for pair, digest in self.hashes.items()]
        return json_digest([self.label, self.place, hashes, self.batch_size])


@dataclass(frozen=True)
class Unit:
    """A group and consecutive images of the run, from `start`; every process computes the same rows for it."""

    group: Group
    start: int
    images: Images

    @cached_property
    def key(self) -> str:
        """`GROUP.START.STOP.IMAGES`: the unit's place in the plan, and a hash of its images."""
        return f"{self.group.key}.{self.start}.{self.stop}.{json_digest([self.images.names, self.images.contents])}"

    def cells(self, pair: Pair) -> list[str]:
        """For each image, the hash of everything that the method's value under the metric depends on."""
        common = f"{self.group.place} {self.group.hashes[pair]} "
        images = zip(self.images.names, self.images.contents, strict=True)
        return [hashlib.sha256(f"{common}{content} {name}".encode()).hexdigest()[:16] for name, content in images]

    @property
    def stop(self) -> int:
        return self.start + len(self.images)

    @property
    def values(self) -> int:
        return len(self.images) * len(self.group.hashes)


@dataclass(frozen=True)
class Shard:
    """One of `count` equal parts of every group's batches; `number` starts at 1."""

    number: int = 1
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        """Parse `3/16`, the third of sixteen shards.

        >>> Shard.parse("3/16")
        Shard(number=3, count=16)
        """
        number, slash, count = text.partition("/")
        if len(text) > 40 or not (slash and number.strip().isdecimal() and count.strip().isdecimal() and int(count)):
            raise PatchlightError(f"--shard '{text}' is not valid; give I/N, for example 3/16")
        shard = Shard(int(number), int(count))
        if not 1 <= shard.number <= shard.count:
            raise PatchlightError(
                f"--shard '{text}' is not valid; with {count} shards, give 1/{count} to {count}/{count}"
            )
        return shard

    def span(self, images: int, batch_size: int) -> tuple[int, int]:
        """The first image of this shard and the one after its last, in complete batches."""
        batches = -(-images // batch_size)
        begin, end = (-(-place * batches // self.count) * batch_size for place in (self.number - 1, self.number))
        return min(begin, images), min(end, images)


WHOLE = Shard()


@dataclass(frozen=True)
class Plan:
    """The groups of a recipe in order, its images, and notes on how they were chosen."""

    recipe: Recipe
    groups: tuple[Group, ...]
    images: Images
    notes: tuple[str, ...] = ()

    def unit(self, group: Group, start: int, stop: int) -> Unit:
        """The unit of a group from image `start` to `stop`, exclusive."""
        return Unit(group, start, self.images.at(range(start, stop)))

    def unit_of(self, key: str) -> Unit | None:
        """The unit with this key; None if it belongs to another plan."""
        group_key, _, rest = key.partition(".")
        group = self._by_key.get(group_key)
        span = re.fullmatch(r"(\d+)\.(\d+)\.\w+", rest)
        if group is None or span is None or not int(span[1]) < int(span[2]) <= len(self.images):
            return None
        unit = self.unit(group, int(span[1]), int(span[2]))
        return unit if unit.key == key else None

    @cached_property
    def _by_key(self) -> dict[str, Group]:
        return {group.key: group for group in self.groups}

    @property
    def values(self) -> int:
        return len(self.images) * sum(len(group.hashes) for group in self.groups)

    @cached_property
    def key(self) -> str:
        return json_digest([[group.key for group in self.groups], self.images.names, self.images.contents])


@cache
def source_digest() -> str:
    """The hash of all source files on which maps and values depend; after a change, values are measured again."""
    package = Path(__file__).parents[1]
    hashed = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name in MEASURING or not any(name.is_relative_to(part) for part in (*NOT_MEASURING, "bench")):
            hashed.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]


@lru_cache(maxsize=1)
def load_model(model: ModelSpec, device: str) -> Anatomy:
    """Load a recipe's model; the last one is cached."""
    return model.load(device)


def model_digest(vit: Anatomy) -> str:
    """The hash of a model as it was loaded: weights, modules, configuration and preprocessing."""
    config: Any = getattr(vit.model, "config", None)
    configuration = config.to_dict() if hasattr(config, "to_dict") else None
    properties = [vit.grid, vit.prefix, vit.pooling, vit.classes, vit.labels, asdict(vit.outputs), vit.channels]
    modules = re.sub(r"0x[0-9a-fA-F]+", "", repr(vit.model))
    return json_digest([identity(vit), modules, configuration, properties, asdict(vit.preprocess)])


def hash_pairs(recipe: Recipe) -> dict[Pair, str]:
    """By method and metric, the hash of names, settings and code, and of files that a method depends on."""
    methods = {}
    for label, spec in recipe.methods.items():
        request = spec.request
        depends = request.method.depends(request.settings) if request.method.depends is not None else None
        code = describe_value([request.method, request.composition, request.rule])
        settings, score = describe_value(request.settings), describe_value(request.score)
        methods[label] = json_digest([request.name, settings, score, code, depends])
    pairs = {}
    for label, digest in methods.items():
        for name, metric in recipe.metrics.items():
            measure = recipe.methods[label].measured_by(metric)
            pairs[label, name] = json_digest([digest, describe_value(measure.metric), describe_value(measure.settings)])
    return pairs


def plan(
    recipe: Recipe,
    data: Data | None = None,
    listen: Listener = lambda event: None,
    device: str = "cpu",
    earlier_images: Images | None = None,
) -> Plan:
    """Cut a recipe into groups of methods for each of its models.

    Every image is hashed and every model is loaded, for its hash.

    Args:
        recipe: The recipe.
        data: A data set in Python that replaces the recipe's data.
        listen: Called with a `Planning` event every two seconds.
        device: Where models are loaded.
        earlier_images: Images of an earlier plan, whose hashes are reused; each image is checked when it is read.
    """
    pair_hashes = hash_pairs(recipe)
    data = recipe.data.open() if data is None else data
    chosen, notes = _choose_images(recipe, data)
    names = tuple(data.names[i] for i in chosen)
    same = earlier_images is not None and (earlier_images.names, earlier_images.indices) == (names, tuple(chosen))
    if earlier_images is None or not same or not same_classes(data, chosen, earlier_images.contents):
        read = contents(data, chosen, recipe.data.path, listen)
        earlier_images = Images(tuple(chosen), names, tuple(content for content, _ in read))
        notes += _missing(recipe, [annotations for _, annotations in read if annotations is not None])
    classes = json_digest(data.labels and list(data.labels))
    load_model.cache_clear()  # weights may have changed
    groups = []
    for label, model in recipe.models.items():
        vit = load_model(model, device)
        digest = model_digest(vit)
        for methods in group_methods(recipe):
            hashes = {pair: value for pair, value in pair_hashes.items() if pair[0] in methods}
            size = _batch_size(recipe, methods, vit.device.type)
            groups.append(Group(recipe, label, tuple(methods), hashes, digest, classes, size))
    return Plan(recipe, tuple(groups), earlier_images, tuple(notes))


def _metrics_run_model(recipe: Recipe) -> bool:
    """Whether a metric runs the model on variants of the images, which takes longer than a pass."""
    metrics = [spec.request.metric for spec in recipe.metrics.values()]
    return any(metric.ablates or metric.explains for metric in metrics)


def group_methods(recipe: Recipe) -> list[list[str]]:
    """The methods of each group, in the order of their first methods.

    Methods that share a pass form groups, of at most `TOGETHER` if metrics take longer; other methods are alone.
    """
    shared = [label for label, spec in recipe.methods.items() if spec.request.in_pass]
    most = TOGETHER if _metrics_run_model(recipe) else max(1, len(shared))
    groups = [shared[i : i + most] for i in range(0, len(shared), most)]
    groups += [[label] for label in recipe.methods if label not in shared]
    order = {label: i for i, label in enumerate(recipe.methods)}
    return sorted(groups, key=lambda group: order[group[0]])


def _batch_size(recipe: Recipe, methods: Sequence[str], device: str) -> int:
    """Images explained at once. A CPU gains little from batches, except for passes that are the main cost."""
    shared = recipe.methods[methods[0]].request.in_pass and not _metrics_run_model(recipe)
    return recipe.batch_size if shared or device != "cpu" else 1


def as_planned(data: Data, images: Images) -> Data:
    """These images of the data; an image that changed since planning is refused when it is read."""
    planned = dict(zip(images.names, zip(images.indices, images.contents, strict=True), strict=True))

    def read(name: str) -> Sample:
        index, content = planned[name]
        if not (index < len(data) and data.names[index] == name):
            raise PatchlightError(f"'{name}' has changed since the run was planned; run the same command again")
        return read_planned(data, index, content)

    return replace(data, names=images.names, read=read)


def _choose_images(recipe: Recipe, data: Data) -> tuple[Sequence[int], list[str]]:
    """Indices of the images to use, and a note if there are fewer than requested."""
    chosen, requested = recipe.data.select_indices(data.names, recipe.seed), recipe.data.images
    if requested is None or len(chosen) == requested:
        return chosen, []
    where = "data" if recipe.data.list is None else "list"
    return chosen, [f"{requested} images were requested; the {where} has {len(chosen)}, and all are used"]


def _missing(recipe: Recipe, annotations: Sequence[set[str]]) -> list[str]:
    """A note for each metric whose annotations are missing; an error if those of all metrics are."""
    available = set().union(*annotations)
    if not annotations:
        return []
    if recipe.target == "label" and "labels" not in available:
        raise PatchlightError("the recipe explains the images' labels, but the data has none; use --target prediction")
    lacking = {}
    for label, spec in recipe.metrics.items():
        lacking[label] = [need for need in sorted(spec.request.metric.needs) if not available & set(need.split(" or "))]
    needs = [f"'{label}' needs {' and '.join(missing)}" for label, missing in lacking.items() if missing]
    where = f"the '{recipe.data.kind}' data at '{recipe.data.path}' has none"
    if len(needs) == len(lacking):
        raise PatchlightError(f"{needs[0]}, but {where}; use data that has them (--images FOLDER --data KIND)")
    return [f"{sentence}, but {where}: it will have no value" for sentence in needs]
