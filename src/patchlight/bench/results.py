"""Collects the values of a run from its units: a column for each model, method and metric.

Units are read one at a time. Only numbers and the indices of texts stay in memory; curves are summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import SCHEMA, TIMING, Facts, facts_of
from patchlight.core.text import plural
from patchlight.metrics.base import Evaluation, MetricRequest

Array = npt.NDArray[Any]
EXACT = (np.uint8, np.float32, np.float64)
"""Number types of parts; the first that represents all of them exactly is used. Most parts are counts."""


@dataclass(frozen=True, eq=False, repr=False)
class Column(Evaluation):
    """One method under one metric on one model, for all images.

    `errors` and `reasons` are pyarrow dictionary arrays, "" for none. `undone` images have not been measured.
    `shared_by` methods share the pass of `explain_seconds`. `mean_curve` [P] is the mean over images with a value;
    `Store.curves` reads the curves of single images.
    """

    errors: Any = field(default_factory=lambda: pa.array([""]).dictionary_encode()[:0])
    undone: int = 0
    shared_by: int = 1
    explain_seconds: Tensor = field(default_factory=lambda: torch.empty(0))
    measure_seconds: Tensor = field(default_factory=lambda: torch.empty(0))
    mean_curve: Tensor | None = None

    @property
    def failed(self) -> int:
        return int(np.count_nonzero(self.errors.indices))

    @property
    def left_out(self) -> dict[str, int]:
        """The number of images without a value, by cause."""
        undefined = len(self) - self.count - self.failed - self.undone
        return {"undefined": undefined, "failed": self.failed, "not done": self.undone}


@dataclass(frozen=True, eq=False, repr=False)
class Results:
    """The values of a run: the images of each model that has values, and a column per model, method and metric."""

    images: Mapping[str, Sequence[str]]
    columns: Mapping[tuple[str, str, str], Column]
    notes: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """The number of measured values."""
        return sum(len(column) - column.undone for column in self.columns.values())

    @property
    def failures(self) -> dict[str, int]:
        """The number of failed values by reason, most frequent first."""
        return sum_counts(word_counts(column.errors) for column in self.columns.values())

    def on_shared_images(self) -> Results:
        """For each model and metric, the same values on the images that all methods with a value have."""
        shared: dict[tuple[str, str], Tensor] = {}
        for (model, _, metric), column in self.columns.items():
            if column.count:
                shared[model, metric] = column.exist & shared.get((model, metric), column.exist)
        columns = {}
        for (model, method, metric), column in self.columns.items():
            values = column.values.where(shared.get((model, metric), column.exist), torch.nan)
            columns[model, method, metric] = replace(column, values=values, mean_curve=None)
        return replace(self, columns=columns)

    def __repr__(self) -> str:
        total = sum(map(len, self.columns.values()))
        models = ", ".join(f"{model} on {plural(len(images), 'image')}" for model, images in self.images.items())
        return f"<Results of {models or 'nothing'}: {len(self.columns)} columns, {self.done} of {total} values done>"


def sum_counts(errors: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counts of errors, most frequent first."""
    total: Counter[str] = Counter()
    for counts in errors:
        total.update(counts)
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))


def word_counts(column: Any) -> dict[str, int]:
    """How often each word of a column occurs, without ""."""
    return {pair["values"]: pair["counts"] for pair in pc.value_counts(column).to_pylist() if pair["values"]}


def collect_results(tables: Iterable[Any], manifest: Manifest, notes: Collection[str] = ()) -> Results:
    """Collect the columns of a run from tables of rows; reading the tables may add to `notes`."""
    recipe = manifest.resolved
    gathered: dict[str, _Model] = {}
    index = _PlanIndex(recipe, manifest.images.names)
    newer: list[str] = []
    for table in tables:
        unknown = sorted(set(table.column_names) - set(SCHEMA.names))
        newer += [
            f"column '{name}' was written by a newer version of Patchlight and is left out" for name in unknown[:1]
        ]
        index.learn(table)
        for label, rows in _by_model(table):
            if label in recipe.models:
                if label not in gathered:
                    gathered[label] = _Model(index)
                gathered[label].take(rows)
    columns: dict[tuple[str, str, str], Column] = {}
    models = [label for label in recipe.models if label in gathered]
    for label in models:
        columns |= {(label, *pair): column for pair, column in gathered.pop(label).columns()}
    images = dict.fromkeys(models, manifest.images.names)
    return Results(images, columns, tuple(dict.fromkeys([*sorted(notes), *newer])))


def _by_model(table: Any) -> Iterator[tuple[str, Any]]:
    """The rows of each model; most tables have one."""
    labels = pc.unique(table["model"]).to_pylist()
    for label in labels:
        yield label, table if len(labels) == 1 else table.filter(pc.equal(table["model"], label))


class _PlanIndex:
    """Indices of images, methods and metrics in the plan, facts about metrics, and all words so far."""

    def __init__(self, recipe: Recipe, images: Sequence[str]) -> None:
        self.recipe = recipe
        self.places = {
            "image": {name: i for i, name in enumerate(images)},
            "method": {name: i for i, name in enumerate(recipe.methods)},
            "metric": {name: i for i, name in enumerate(recipe.metrics)},
        }
        self.shape = (len(recipe.methods), len(recipe.metrics), len(images))
        self.facts: dict[str, Facts] = {}
        self.words = [""]
        self._known = {"": 0}
        self._read: set[bytes] = set()

    def learn(self, table: Any) -> None:
        """Read the facts about metrics; most tables have the same."""
        text = (table.schema.metadata or {}).get(b"facts", b"")
        if text not in self._read:
            self._read.add(text)
            self.facts |= facts_of(table)

    def place(self, table: Any, name: str) -> Array:
        """The index of each row's image, method or metric; -1 if it is not in the plan."""
        return _mapped(table[name], lambda word: self.places[name].get(word or "", -1))

    def word(self, table: Any, name: str) -> Array:
        """The index of each row's word among all words."""

        def add_word(word: str | None) -> int:
            place = self._known.setdefault(word or "", len(self.words))
            if place == len(self.words):
                self.words.append(word or "")
            return place

        return _mapped(table[name], add_word)

    def words_at(self, places: Array) -> Any:
        """The words at these indices, as a pyarrow dictionary array."""
        return pa.DictionaryArray.from_arrays(places, self.dictionary)

    @cached_property
    def dictionary(self) -> Any:
        return pa.array(self.words, pa.string())


def _mapped(column: Any, place: Callable[[str | None], int]) -> Array:
    """A number for each row of a column of words; each distinct word is looked up once."""
    coded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    numbers = np.array([place(word) for word in coded.dictionary.to_pylist()], dtype=np.int32)
    mapped: Array = numbers[coded.indices.to_numpy(zero_copy_only=False)]
    return mapped


class _Model:
    """The values of one model as arrays [method, metric, image]."""

    def __init__(self, index: _PlanIndex) -> None:
        self.index = index
        self.values, self.explain_seconds, self.measure_seconds = (np.full(index.shape, np.nan) for _ in range(3))
        self.done = np.zeros(index.shape, dtype=bool)
        self.errors, self.reasons = (np.zeros(index.shape, dtype=np.int32) for _ in range(2))
        self.shared_by = np.ones(index.shape[:2], dtype=np.int64)
        self.curves: dict[str, tuple[Array, Array]] = {}
        self.parts: dict[tuple[str, str], Array] = {}

    def take(self, table: Any) -> None:
        """Add the rows of a table."""
        places = [self.index.place(table, name) for name in ("method", "metric", "image")]
        planned = np.logical_and.reduce([place >= 0 for place in places])
        if not planned.all():
            table = table.filter(pa.array(planned))
            places = [place[planned] for place in places]
        method, metric, image = places
        there = (method, metric, image)
        self.done[there] = True
        self.values[there] = values = _numbers(table["value"])
        for name in TIMING:
            getattr(self, name)[there] = _numbers(table[name])
        self.errors[there] = errors = self.index.word(table, "error")
        self.reasons[there] = np.where(errors > 0, errors, self.index.word(table, "note"))
        np.maximum.at(self.shared_by, (method, metric), _numbers(table["shared_by"], 1).astype(np.int64))
        for name, facts in self.index.facts.items():
            rows = np.flatnonzero(metric == self.index.places["metric"].get(name, -1))
            if facts.x is not None:
                counts = rows[np.isfinite(values[rows])]
                self._add_curves(name, table["curve"].combine_chunks(), counts, method[counts], len(facts.x))
            for part, shape in facts.parts.items():
                self._put_parts((name, part), table["parts"].combine_chunks(), rows, method, image, int(np.prod(shape)))

    def _add_curves(self, metric: str, lists: Any, rows: Array, method: Array, points: int) -> None:
        """Add the curves of these rows to the sums and counts of each method, point by point."""
        drawn, curves = _listed(lists, rows, points)
        if metric not in self.curves:
            self.curves[metric] = tuple(np.zeros((self.index.shape[0], points)) for _ in range(2))  # type: ignore[assignment]
        belongs = (method[drawn] == np.arange(self.index.shape[0])[:, None]).astype(np.float64)
        total, count = self.curves[metric]
        total += belongs @ np.nan_to_num(curves)
        count += belongs @ np.isfinite(curves)

    def _put_parts(self, key: tuple[str, str], maps: Any, rows: Array, method: Array, image: Array, size: int) -> None:
        """Store one part of these rows."""
        if key not in self.parts:
            self.parts[key] = np.zeros((self.index.shape[0], self.index.shape[2], size), dtype=EXACT[0])
        offsets = maps.offsets.to_numpy()
        owner = np.repeat(np.arange(len(maps)), np.diff(offsets))
        named = pc.equal(maps.keys, key[1]).to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        entries = np.flatnonzero(named & np.isin(owner, rows))
        drawn, found = _listed(maps.items, entries + offsets[0], size)
        kept = self.parts[key]
        exact = next(kind for kind in EXACT if kind is EXACT[-1] or _holds(kind, found))
        if np.promote_types(kept.dtype, exact) != kept.dtype:
            self.parts[key] = kept = kept.astype(np.promote_types(kept.dtype, exact))
        whose = owner[entries[drawn]]
        kept[method[whose], image[whose]] = found

    def columns(self) -> Iterator[tuple[tuple[str, str], Column]]:
        """The columns by method and metric."""
        recipe = self.index.recipe
        for i, (m, method) in enumerate(recipe.methods.items()):
            for j, (n, metric) in enumerate(recipe.metrics.items()):
                yield (m, n), self._column(i, j, n, method.measured_by(metric))

    def _column(self, i: int, j: int, name: str, request: MetricRequest) -> Column:
        facts = self.index.facts.get(name)
        if facts is None:  # no value of the metric exists
            facts = Facts(None, request.metric.rises(request.settings), request.metric.limits(request.settings))
        low, high = facts.bounds
        total, count = self.curves.get(name, (None, None))
        done = int(self.done[i, j].sum())
        return Column(
            metric=request.metric.name,
            values=torch.from_numpy(self.values[i, j]),
            higher_is_better=facts.higher_is_better,
            bounds=(low, high),
            x=None if facts.x is None else torch.tensor(facts.x, dtype=torch.float64),
            reasons=self.index.words_at(self.reasons[i, j]),
            settings=request.settings,
            parts={
                part: torch.from_numpy(self.parts[name, part][i]).view(-1, *shape)
                for part, shape in facts.parts.items()
                if (name, part) in self.parts
            },
            combine=request.metric.combine,
            errors=self.index.words_at(self.errors[i, j]),
            undone=self.index.shape[2] - done,
            shared_by=int(self.shared_by[i, j]),
            explain_seconds=torch.from_numpy(self.explain_seconds[i, j]),
            measure_seconds=torch.from_numpy(self.measure_seconds[i, j]),
            mean_curve=None if total is None or count is None else _mean(total[i], count[i]),
        )


def _numbers(column: Any, nothing: float = np.nan) -> npt.NDArray[np.float64]:
    """The numbers of a column in float64; `nothing` for a missing one."""
    numbers: npt.NDArray[np.float64] = pc.fill_null(column.cast(pa.float64()), nothing).to_numpy()
    return numbers


def _listed(lists: Any, rows: Array, size: int) -> tuple[Array, Array]:
    """Which of these rows have a list of this size, and their lists [r,size] in float64."""
    offsets = lists.offsets.to_numpy()
    complete = np.flatnonzero(np.diff(offsets)[rows] == size) if size else np.arange(0)
    if not len(complete):
        return complete, np.zeros((0, size))
    flat = lists.values.to_numpy(zero_copy_only=False)
    return complete, flat[offsets[rows[complete]][:, None] + np.arange(size)].astype(np.float64)


def _holds(kind: Any, numbers: Array) -> bool:
    """Whether a type represents these numbers exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.array_equal(numbers.astype(kind).astype(np.float64), numbers, equal_nan=kind is not np.uint8))


def _mean(total: Array, count: Array) -> Tensor:
    with np.errstate(invalid="ignore", divide="ignore"):
        return torch.from_numpy(total / count)
