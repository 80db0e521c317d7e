"""Collects the values of a run from its units: a column for each model, method and metric.

Units are read one at a time. Only numbers and the indices of texts stay in memory; curves are summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    def undefined(self) -> int:
        return len(self) - self.count - self.failed - self.undone


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
    names, newer = manifest.images.names, list[str]()
    collector = _Collector(manifest.resolved, names)
    for table in tables:
        unknown = sorted(set(table.column_names) - set(SCHEMA.names))
        newer += [f"column '{n}' was written by a newer version of Patchlight and is left out" for n in unknown[:1]]
        collector.add(table)
    columns = dict(collector.columns())
    images = {model: names for model, _, _ in columns}
    return Results(images, columns, tuple(dict.fromkeys([*sorted(notes), *newer])))


class _Collector:
    """The values of a run as arrays [model, method, metric, image]; errors and reasons are indices of `words`."""

    def __init__(self, recipe: Recipe, images: Sequence[str]) -> None:
        axes: dict[str, Collection[str]]
        axes = {"model": recipe.models, "method": recipe.methods, "metric": recipe.metrics, "image": images}
        shape = tuple(map(len, axes.values()))
        self.recipe = recipe
        self.places = {axis: {name: i for i, name in enumerate(names)} for axis, names in axes.items()}
        self.facts: dict[str, Facts] = {}
        self.facts_texts: set[bytes] = set()
        self.words = {"": 0}
        self.values, self.explain_seconds, self.measure_seconds = (np.full(shape, np.nan) for _ in range(3))
        self.done = np.zeros(shape, dtype=bool)
        self.errors, self.reasons = (np.zeros(shape, dtype=np.int32) for _ in range(2))
        self.shared_by = np.ones(shape[:3], dtype=np.int64)
        self.curves: dict[str, Array] = {}
        self.parts: dict[tuple[str, str], Array] = {}

    def add(self, table: Any) -> None:
        """Add the rows of a table; rows that are not in the plan are skipped."""
        text = (table.schema.metadata or {}).get(b"facts", b"")
        if text not in self.facts_texts:  # most tables have the same facts
            self.facts_texts.add(text)
            self.facts |= facts_of(table)
        places = [self._place(table[axis], axis) for axis in self.places]
        planned = np.logical_and.reduce([place >= 0 for place in places])
        if not planned.all():
            table = table.filter(pa.array(planned))
            places = [place[planned] for place in places]
        model, method, metric, image = cells = tuple(places)
        self.done[cells] = True
        self.values[cells] = values = _numbers(table["value"])
        for name in TIMING:
            getattr(self, name)[cells] = _numbers(table[name])
        self.errors[cells] = errors = self._word_indices(table["error"])
        self.reasons[cells] = np.where(errors > 0, errors, self._word_indices(table["note"]))
        np.maximum.at(self.shared_by, (model, method, metric), _numbers(table["shared_by"], 1).astype(np.int64))
        for name, facts in self.facts.items():
            rows = np.flatnonzero(metric == self.places["metric"].get(name, -1))
            if facts.x is not None:
                defined = rows[np.isfinite(values[rows])]
                self._add_curves(name, table["curve"].combine_chunks(), defined, model, method, len(facts.x))
            for part, shape in facts.parts.items():
                size = int(np.prod(shape))
                self._add_parts((name, part), table["parts"].combine_chunks(), rows, (model, method, image), size)

    def _place(self, column: Any, axis: str) -> Array:
        """The index of each row's name on an axis; -1 if it is not in the plan."""
        return _map_words(column, lambda name: self.places[axis].get(name or "", -1))

    def _word_indices(self, column: Any) -> Array:
        return _map_words(column, lambda word: self.words.setdefault(word or "", len(self.words)))

    def _add_curves(self, metric: str, lists: Any, rows: Array, model: Array, method: Array, points: int) -> None:
        """Add the curves of these rows to the sums and counts of each method, point by point."""
        complete, curves = _lists_of_size(lists, rows, points)
        models, methods = self.shared_by.shape[:2]
        total, count = self.curves.setdefault(metric, np.zeros((2, models, methods, points)))
        model, method = model[rows[complete]], method[rows[complete]]
        for m in np.unique(model):
            mine = model == m
            belongs = (method[mine] == np.arange(methods)[:, None]).astype(np.float64)
            total[m] += belongs @ np.nan_to_num(curves[mine])
            count[m] += belongs @ np.isfinite(curves[mine])

    def _add_parts(
        self, key: tuple[str, str], maps: Any, rows: Array, cells: tuple[Array, Array, Array], size: int
    ) -> None:
        """Store one part of these rows, by model, method and image."""
        models, methods, _, images = self.values.shape
        stored = self.parts.setdefault(key, np.zeros((models, methods, images, size), dtype=EXACT[0]))
        offsets = maps.offsets.to_numpy()
        owner = np.repeat(np.arange(len(maps)), np.diff(offsets))
        named = pc.equal(maps.keys, key[1]).to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        entries = np.flatnonzero(named & np.isin(owner, rows))
        complete, numbers = _lists_of_size(maps.items, entries + offsets[0], size)
        exact = next(kind for kind in EXACT if kind is EXACT[-1] or _holds(kind, numbers))
        self.parts[key] = stored = stored.astype(np.promote_types(stored.dtype, exact), copy=False)
        row = owner[entries[complete]]
        stored[tuple(place[row] for place in cells)] = numbers

    def columns(self) -> Iterator[tuple[tuple[str, str, str], Column]]:
        """The columns of every model that has values, by model, method and metric."""
        words = pa.array(list(self.words), pa.string())
        for x, model in enumerate(self.recipe.models):
            if self.done[x].any():
                for y, (method, spec) in enumerate(self.recipe.methods.items()):
                    for z, (metric, metric_spec) in enumerate(self.recipe.metrics.items()):
                        column = self._column((x, y, z), metric, spec.measured_by(metric_spec), words)
                        yield (model, method, metric), column

    def _column(self, at: tuple[int, int, int], name: str, request: MetricRequest, words: Any) -> Column:
        facts = self.facts.get(name)
        if facts is None:  # no value of the metric exists
            facts = Facts(None, request.metric.rises(request.settings), request.metric.limits(request.settings))
        low, high = facts.bounds
        return Column(
            metric=request.metric.name,
            values=torch.from_numpy(self.values[at]),
            higher_is_better=facts.higher_is_better,
            bounds=(low, high),
            x=None if facts.x is None else torch.tensor(facts.x, dtype=torch.float64),
            reasons=pa.DictionaryArray.from_arrays(self.reasons[at], words),
            settings=request.settings,
            parts={
                part: torch.from_numpy(self.parts[name, part][at[:2]]).view(-1, *shape)
                for part, shape in facts.parts.items()
                if (name, part) in self.parts
            },
            combine=request.metric.combine,
            errors=pa.DictionaryArray.from_arrays(self.errors[at], words),
            undone=int((~self.done[at]).sum()),
            shared_by=int(self.shared_by[at]),
            explain_seconds=torch.from_numpy(self.explain_seconds[at]),
            measure_seconds=torch.from_numpy(self.measure_seconds[at]),
            mean_curve=_mean(*self.curves[name][:, *at[:2]]) if name in self.curves else None,
        )


def _map_words(column: Any, place: Callable[[str | None], int]) -> Array:
    """A number for each row of a column of words; each distinct word is looked up once."""
    coded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    numbers = np.array([place(word) for word in coded.dictionary.to_pylist()], dtype=np.int32)
    mapped: Array = numbers[coded.indices.to_numpy(zero_copy_only=False)]
    return mapped


def _numbers(column: Any, nothing: float = np.nan) -> npt.NDArray[np.float64]:
    """The numbers of a column in float64; `nothing` for a missing one."""
    numbers: npt.NDArray[np.float64] = pc.fill_null(column.cast(pa.float64()), nothing).to_numpy()
    return numbers


def _lists_of_size(lists: Any, rows: Array, size: int) -> tuple[Array, Array]:
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
