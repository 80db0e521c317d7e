"""What the units of a run hold together: a column of values for each model, method and metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest
from patchlight.bench.rows import SCHEMA, Facts, facts_of, known_columns
from patchlight.metrics.base import Evaluation, MetricRequest


@dataclass(frozen=True, eq=False)
class Column(Evaluation):
    """One method under one metric on one model: an evaluation with seconds [B], and why an image failed.

    `reasons` say why a value does not exist, or is worth little; `curve` [B,P] is float32. `undone` of the images are
    still to be measured. `explain_seconds` are those of the pass that `shared_by` so many methods have in common.
    """

    errors: tuple[str, ...] = ()
    undone: int = 0
    shared_by: int = 1
    explain_seconds: Tensor = field(default_factory=lambda: torch.empty(0))
    measure_seconds: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def failed(self) -> int:
        return sum(map(bool, self.errors))


@dataclass(frozen=True, eq=False)
class Results:
    """All that a store holds of its plan: the images of each model of which something is done, and every column."""

    images: Mapping[str, Sequence[str]]
    columns: Mapping[tuple[str, str, str], Column]
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> dict[str, int]:
        """How many values failed, by reason, the commonest first."""
        return counted(error for column in self.columns.values() for error in column.errors)


def counted(errors: Iterable[str]) -> dict[str, int]:
    """How often each error occurs, the commonest first."""
    return dict(sorted(Counter(filter(None, errors)).items(), key=lambda item: (-item[1], item[0])))


def results_of(tables: Iterable[Any], manifest: Manifest, notes: Sequence[str] = ()) -> Results:
    """The columns of tables of rows, in the manifest's order."""
    recipe, told = manifest.resolved, list(notes)
    facts: dict[str, Facts] = {}
    parts = []
    for table in tables:
        facts |= facts_of(table)
        unknown = sorted(set(table.column_names) - set(SCHEMA.names))
        if unknown:
            told.append(f"column '{unknown[0]}' was written by a newer Patchlight and is left out")
        parts.append(known_columns(table).replace_schema_metadata())
    notes = tuple(dict.fromkeys(told))
    if not parts:
        return Results({}, {}, notes)
    whole = pa.concat_tables(parts)
    model, method, metric, image = (
        pc.fill_null(pc.index_in(whole[name], pa.array(list(names))), -1).to_numpy()
        for name, names in (
            ("model", recipe.models),
            ("method", recipe.methods),
            ("metric", recipe.metrics),
            ("image", manifest.images.names),
        )
    )
    images: dict[str, Sequence[str]] = {}
    columns: dict[tuple[str, str, str], Column] = {}
    for k, label in enumerate(recipe.models):
        if not (model == k).any():
            continue
        images[label] = manifest.images.names
        for i, (m, own) in enumerate(recipe.methods.items()):
            for j, (n, spec) in enumerate(recipe.metrics.items()):
                there = np.flatnonzero((model == k) & (method == i) & (metric == j) & (image >= 0))
                rows = np.full(len(manifest.images.names), -1)
                rows[image[there]] = there
                table = whole.take(pa.array(rows, mask=rows < 0))
                columns[label, m, n] = _column(table, own.measured_by(spec), facts.get(n), int((rows < 0).sum()))
    return Results(images, columns, notes)


def _column(table: Any, asked: MetricRequest, facts: Facts | None, undone: int) -> Column:
    def numbers(name: str) -> Tensor:
        return torch.from_numpy(table[name].to_numpy().astype(np.float64))

    def words(name: str) -> list[str]:
        return [word or "" for word in table[name].to_pylist()]

    if facts is None:  # nothing of it was measured
        facts = Facts(None, asked.metric.rises(asked.settings), asked.metric.limits(asked.settings))
    low, high = facts.bounds
    x = None if facts.x is None else torch.tensor(facts.x, dtype=torch.float64)
    errors = words("error")
    return Column(
        metric=asked.metric.name,
        values=numbers("value"),
        higher_is_better=facts.higher_is_better,
        bounds=(low, high),
        curve=None if x is None else _curve(table, len(x)),
        x=x,
        reasons=tuple(error or note for error, note in zip(errors, words("note"), strict=True)),
        settings=asked.settings,
        parts=_parts(table, facts),
        combine=asked.metric.combine,
        errors=tuple(errors),
        undone=undone,
        shared_by=int(pc.max(table["shared_by"]).as_py() or 1),
        explain_seconds=numbers("explain_seconds"),
        measure_seconds=numbers("measure_seconds"),
    )


def _curve(table: Any, points: int) -> Tensor:
    """The curves [B,P]; NaN where an image has none."""
    lists = table["curve"].combine_chunks()
    drawn = (pc.list_value_length(lists).fill_null(0).to_numpy() == points).nonzero()[0]
    curve = torch.full((len(table), points), torch.nan)
    curve[torch.from_numpy(drawn)] = torch.from_numpy(lists.take(drawn).flatten().to_numpy().reshape(-1, points).copy())
    return curve


def _parts(table: Any, facts: Facts) -> dict[str, Tensor]:
    """The parts [B,...]; zero where an image has none."""
    rows = [dict(parts or ()) for parts in table["parts"].to_pylist()]
    return {
        name: torch.tensor([r.get(name) or [0.0] * int(np.prod(shape)) for r in rows], dtype=torch.float64).view(
            -1, *shape
        )
        for name, shape in facts.parts.items()
    }
