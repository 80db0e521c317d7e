"""Statistics over the images of a run: means with intervals, paired differences, ties and ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import torch
from torch import Tensor

from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.statistics import FEWEST, Mark, Resamples, percentiles
from patchlight.metrics.base import Evaluation, intervals
from patchlight.study.ranking import ALPHA, SAMPLES, friedman, mark_best, mean_on, shared_ranks

K = TypeVar("K", bound=Hashable)
Standing = Literal["better", "worse", ""]
"""How a number compares with another; empty where the interval of the difference contains 0."""
SIGNS: dict[Standing, str] = {"better": " ▲", "worse": " ▼", "": ""}


@dataclass(frozen=True)
class TableCell:
    """One method under one metric on one model.

    The interval is NaN with fewer than six images. `mark` compares the methods on the images that all of them share.
    """

    model: str
    method: str
    metric: str
    mean: float
    low: float
    high: float
    images: int
    undefined: int
    failed: int
    mark: Mark
    published: float | None
    shared_by: int
    explain_seconds: float
    measure_seconds: float


@dataclass(frozen=True)
class Ranks:
    """Mean ranks (1 is best) on the images that all methods share, with Friedman's test.

    Two methods differ significantly when their mean ranks differ by more than `critical` (Nemenyi).
    """

    model: str
    metric: str
    means: dict[str, float]
    images: int
    statistic: float
    p: float
    critical: float

    @property
    def groups(self) -> list[list[str]]:
        """The largest sets of neighbouring methods that do not differ significantly."""
        order = sorted(self.means, key=lambda m: (self.means[m], m))
        spans: list[tuple[int, int]] = []
        for i, first in enumerate(order):
            j = max(k for k, m in enumerate(order) if self.means[m] - self.means[first] <= self.critical)
            if j > i and not any(a <= i and j <= b for a, b in spans):
                spans.append((i, j))
        return [order[a : b + 1] for a, b in spans]


@dataclass(frozen=True)
class Gap:
    """Two numbers on the images where both have a value, and the second minus the first.

    `low` and `high` are the 95 % interval of the paired bootstrap over images, NaN with fewer than six images.
    `standing` compares the second with the first.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    images: int
    standing: Standing


def table_cells(results: Results, recipe: Recipe, samples: int = SAMPLES) -> list[TableCell]:
    """Every cell of the tables, by model, method and metric in the recipe's order."""
    cells: list[TableCell] = []
    for model in results.images:
        columns = {(m, n): results.columns[model, m, n] for m in recipe.methods for n in recipe.metrics}
        resamples = Resamples(len(results.images[model]), samples)
        bounds = intervals(columns, resamples)
        marks = {n: mark_best({m: columns[m, n] for m in recipe.methods}, resamples) for n in recipe.metrics}
        for (method, metric), column in columns.items():
            cells.append(
                TableCell(
                    model,
                    method,
                    metric,
                    column.mean,
                    *bounds[method, metric],
                    images=column.count,
                    undefined=column.undefined,
                    failed=column.failed,
                    mark=marks[metric][method],
                    published=recipe.number(model, method, metric),
                    shared_by=column.shared_by,
                    explain_seconds=float(column.explain_seconds.nanmean()),
                    measure_seconds=float(column.measure_seconds.nanmean()),
                )
            )
    return cells


def paired_gaps(pairs: Mapping[K, tuple[Evaluation, Evaluation]], resamples: Resamples) -> dict[K, Gap]:
    """The gap of each pair of evaluations of the same images, from the same resamples."""
    both = {key: first.exist & second.exist for key, (first, second) in pairs.items()}
    firsts, seconds = (resamples.numbers([(pair[i], both[key]) for key, pair in pairs.items()]) for i in (0, 1))
    gaps = {}
    for (key, pair), one, other in zip(pairs.items(), firsts, seconds, strict=True):
        first, second = (float(column.resampled(both[key].double()[None])[0]) for column in pair)
        count = int(both[key].sum())
        low, high = percentiles(other - one) if count >= FEWEST else (math.nan, math.nan)
        standing: Standing = ""
        if low > 0 or high < 0:
            standing = "better" if (low > 0) == pair[0].higher_is_better else "worse"
        gaps[key] = Gap(first, second, second - first, low, high, count, standing)
    return gaps


def method_gaps(results: Results, recipe: Recipe, model: str, against: str) -> dict[tuple[str, str], Gap]:
    """The gap of every other method to the method `against`, by method and metric."""
    if against not in recipe.methods:
        raise PatchlightError(f"the run has no method '{against}'; {nearest(against, recipe.methods)}")
    resamples = Resamples(len(results.images[model]), SAMPLES)
    gaps: dict[tuple[str, str], Gap] = {}
    for metric in recipe.metrics:
        columns = {method: results.columns[model, method, metric] for method in recipe.methods}
        first = columns.pop(against)
        gaps |= paired_gaps({(method, metric): (first, column) for method, column in columns.items()}, resamples)
    return gaps


def rank_methods(results: Results, recipe: Recipe, model: str, metric: str) -> Ranks | None:
    """The methods' mean ranks; None with fewer than two methods or six shared images.

    Methods without any value are left out.
    """
    names, places = shared_ranks({m: results.columns[model, m, metric] for m in recipe.methods})
    if places is None:
        return None
    means = dict(zip(names, places.mean(0).tolist(), strict=True))
    critical = critical_difference(len(names), len(places))
    return Ranks(model, metric, means, len(places), *friedman(places), critical)


def leading_method(columns: Mapping[str, Evaluation]) -> str | None:
    """The method with the best number on the images that all methods with a value share; None without any."""
    columns = {method: column for method, column in columns.items() if column.count}
    shared = torch.stack([column.exist for column in columns.values()]).all(0) if columns else torch.zeros(1)
    if not bool(shared.any()):
        return None
    sign = 1 if next(iter(columns.values())).higher_is_better else -1
    return max(columns, key=lambda method: sign * mean_on(columns[method], shared))


def critical_difference(methods: int, images: int) -> float:
    """Nemenyi's critical difference of mean ranks: q sqrt(k (k+1) / (6 N)), q the studentized range over sqrt 2."""
    if methods < 2 or images < 1:
        return math.inf
    return _studentized_range(methods) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * images))


@cache
def _studentized_range(methods: int) -> float:
    """Upper quantile of the studentized range; cached because the integral is slow."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - ALPHA, methods, math.inf))


def extremes(values: Tensor, higher_is_better: bool, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The images with the best and the worst values, at most `count` of each, best and worst first."""
    defined = values.isfinite().nonzero().flatten()
    order = defined[(-values[defined] if higher_is_better else values[defined]).argsort(stable=True)].tolist()
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]
