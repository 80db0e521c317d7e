"""The plan: a recipe cut into shards of images. A shard says all that its rows depend on, and its key is their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchlight.bench.recipe import Method, Metric, Model, Recipe, Source
from patchlight.errors import PatchlightError
from patchlight.metrics.base import resolve_metric
from patchlight.registry import resolve

if TYPE_CHECKING:
    from patchlight.data import Data


@dataclass(frozen=True)
class Shard:
    """Some images of the data, one model, all methods and metrics: whoever runs it gets the same rows.

    `names` are the images at `indices` of the data; `digest` is that of the weights file. Paths say where things are
    and are not part of the key.
    """

    label: str
    model: Model
    digest: str
    data: Source
    indices: tuple[int, ...]
    names: tuple[str, ...]
    methods: Mapping[str, Method]
    metrics: Mapping[str, Metric]
    target: str
    seed: int

    @cached_property
    def place(self) -> str:
        """The hash of model, images, class policy and seed: all but methods and metrics."""
        from patchlight import __version__

        model = self.model.model_dump(mode="json", exclude={"weights", "stands_for"})
        about = [__version__, model, self.digest, self.data.kind, self.data.options, self.names, self.target, self.seed]
        return digest_of(about)

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


def plan(recipe: Recipe, data: Data | None = None) -> Plan:
    """Cut the recipe's images into shards of `recipe.shard`, for each of its models."""
    data = opened(recipe.data) if data is None else data
    chosen, notes = _chosen(recipe, data)
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


def _file_digest(path: str | None) -> str:
    """The SHA-256 of a weights file; empty for weights that go by the model's name."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PatchlightError(f"the weights '{path}' cannot be read: {error.strerror or error}") from error
