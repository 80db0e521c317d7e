"""What the shards of a run hold together: a column of values for each model, method and metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Facts, facts_of, known_columns
from patchlight.metrics.base import Evaluation, MetricRequest


@dataclass(frozen=True, eq=False)
class Column(Evaluation):
    """One method under one metric on one model: an evaluation with seconds [B], and why an image failed.

    `reasons` say why a value does not exist, or is worth little; `curve` [B,P] is float32.
    """

    errors: tuple[str, ...] = ()
    explain_seconds: Tensor = field(default_factory=lambda: torch.empty(0))
    measure_seconds: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def failed(self) -> int:
        return sum(map(bool, self.errors))


@dataclass(frozen=True, eq=False)
class Results:
    """All that a store holds of its plan: the images of each model that are done, and a column for each cell."""

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


def columns_of(tables: Sequence[Any], recipe: Recipe) -> Iterator[tuple[tuple[str, str], Column]]:
    """By method and metric, the columns of one model's tables, one below the other."""
    facts: dict[str, Facts] = {}
    for table in tables:
        facts |= facts_of(table)
    whole = pa.concat_tables([known_columns(table).replace_schema_metadata() for table in tables])
    method = pc.index_in(whole["method"], pa.array(list(recipe.methods))).to_numpy()
    metric = pc.index_in(whole["metric"], pa.array(list(recipe.metrics))).to_numpy()
    for i, (m, own) in enumerate(recipe.methods.items()):
        for j, (n, spec) in enumerate(recipe.metrics.items()):
            rows = whole.take(np.flatnonzero((method == i) & (metric == j)))
            yield (m, n), _column(rows, own.measured_by(spec), facts.get(n))


def _column(table: Any, asked: MetricRequest, facts: Facts | None) -> Column:
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
