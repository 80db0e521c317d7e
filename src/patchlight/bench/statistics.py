"""What the images of a run say together: means with intervals, which methods are tied with the best, and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from patchlight.bench.recipe import Recipe
from patchlight.bench.store import Column, Results
from patchlight.metrics.base import Sums, resample, resolve_metric
from patchlight.statistics import FEWEST, average_ranks, bootstrapped, percentiles

Combine = Callable[[Sums], Tensor] | None
Mark = Literal["best", "tied", ""]
SAMPLES, ALPHA = 2000, 0.05


@dataclass(frozen=True)
class Cell:
    """A method under a metric on a model: the data set's number, its interval, and how it stands to the best.

    The interval is NaN where fewer than six images have a value; methods are marked only where they differ at all.
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
    explain_seconds: float
    measure_seconds: float


@dataclass(frozen=True)
class Ranks:
    """Mean ranks (1 the best) over the images on which every method has a value; Friedman's test; Nemenyi's difference.

    Two methods differ significantly where their mean ranks differ by more than `critical`.
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


def cells(results: Results, recipe: Recipe, samples: int = SAMPLES) -> list[Cell]:
    """Every cell of the tables, by model, method and metric in the recipe's order."""
    found: list[Cell] = []
    combines = {n: resolve_metric(m.metric, m.settings).metric.combine for n, m in recipe.metrics.items()}
    for model, images in results.images.items():
        columns = {(m, n): results.columns[model, m, n] for m in recipe.methods for n in combines}
        spread = bootstrapped(
            {(m, n): partial(_number_of, column, combines[n]) for (m, n), column in columns.items()},
            len(images),
            samples,
        )
        marks = {
            n: compared({m: columns[m, n] for m in recipe.methods}, combine, samples) for n, combine in combines.items()
        }
        for method in recipe.methods:
            for metric, combine in combines.items():
                column = columns[method, metric]
                failed = sum(bool(e) for e in column.errors)
                count = int(column.values.isfinite().sum())
                low, high = percentiles(spread[method, metric]) if count >= FEWEST else (math.nan, math.nan)
                found.append(
                    Cell(
                        model,
                        method,
                        metric,
                        number(column, combine),
                        low,
                        high,
                        count,
                        len(column.values) - count - failed,
                        failed,
                        marks[metric][method],
                        recipe.number(model, method, metric),
                        mean_of(column.explain_seconds),
                        mean_of(column.measure_seconds),
                    )
                )
    return found


def _number_of(column: Column, combine: Combine, weights: Tensor) -> Tensor:
    return resample(column.values, column.parts, combine, weights)


def number(column: Column, combine: Combine) -> float:
    """The data set's number of a column; NaN where no image has a value."""
    if not bool(column.values.isfinite().any()):
        return math.nan
    return float(resample(column.values, column.parts, combine, torch.ones(1, len(column.values), dtype=torch.float64)))


def mean_of(values: Tensor) -> float:
    values = values[values.isfinite()]
    return float(values.mean()) if len(values) else math.nan


def compared(columns: Mapping[str, Column], combine: Combine, samples: int = SAMPLES) -> dict[str, Mark]:
    """Which method is best, and which are statistically tied with it.

    None is marked where Friedman's test does not tell the methods apart at 5 %, or has fewer than six images to do so.
    A method is tied where the 95 % interval of its paired bootstrap difference to the best contains 0: both are
    resampled on the same images, those on which both have a value.
    """
    means = {m: number(c, combine) for m, c in columns.items()}
    exist = {m: v for m, v in means.items() if v == v}
    _, placed = _placed({m: columns[m] for m in exist})
    if placed is None or friedman(placed)[1] > ALPHA:
        return dict.fromkeys(columns, "")
    sign = 1.0 if next(iter(columns[m].higher_is_better for m in exist)) else -1.0
    best = max(exist, key=lambda m: sign * exist[m])
    marks: dict[str, Mark] = dict.fromkeys(columns, "")
    differences = bootstrapped(
        {m: partial(paired_difference, columns[best], columns[m], combine) for m in exist},
        len(columns[best].values),
        samples,
    )
    for method in exist:
        low, high = percentiles(differences[method])
        if method == best or exist[method] == exist[best]:
            marks[method] = "best"
        elif low <= 0 <= high:
            marks[method] = "tied"
    return marks


def paired_difference(first: Column, second: Column, combine: Combine, weights: Tensor) -> Tensor:
    """The data set's number of `first` less that of `second` [S] under the same weights [S,B] of the same images."""
    both = first.values.isfinite() & second.values.isfinite()
    shared = weights * both
    return resample(first.values, first.parts, combine, shared) - resample(second.values, second.parts, combine, shared)


def ranks(results: Results, recipe: Recipe, model: str, metric: str) -> Ranks | None:
    """The methods' ranks on each image; None with fewer than two methods, or six images that all have values for.

    Methods without any value are left out.
    """
    names, placed = _placed({m: results.columns[model, m, metric] for m in recipe.methods})
    if placed is None:
        return None
    statistic, p = friedman(placed)
    means = dict(zip(names, placed.mean(0).tolist(), strict=True))
    return Ranks(model, metric, means, len(placed), statistic, p, critical_difference(len(names), len(placed)))


def _placed(columns: Mapping[str, Column]) -> tuple[list[str], Tensor | None]:
    """The methods with a value, and their ranks [N,k] on the images where all have one; None where that is too few."""
    known = {m: c for m, c in columns.items() if bool(c.values.isfinite().any())}
    if len(known) < 2:
        return list(known), None
    higher = next(iter(known.values())).higher_is_better
    values = torch.stack([c.values for c in known.values()], 1)
    values = values[values.isfinite().all(1)]
    return list(known), average_ranks(-values if higher else values) if len(values) >= FEWEST else None


def friedman(placed: Tensor) -> tuple[float, float]:
    """Friedman's statistic, corrected for ties, and its p-value: do the methods of ranks [N,k] differ at all?

    chi2 = (12 / (N k (k+1)) sum_j R_j^2 - 3 N (k+1)) / (1 - sum (t^3 - t) / (N k (k^2-1))), R_j the rank sums.
    """
    from scipy.stats import chi2

    n, k = placed.shape
    if n < 1 or k < 2:
        return 0.0, 1.0
    sums = placed.sum(0)
    ties = 0.0
    for row in placed:
        _, counts = row.unique(return_counts=True)
        ties += float((counts.double() ** 3 - counts).sum())
    correction = 1 - ties / (n * k * (k * k - 1))
    if correction <= 0:
        return 0.0, 1.0
    statistic = (12 / (n * k * (k + 1)) * float((sums**2).sum()) - 3 * n * (k + 1)) / correction
    return statistic, float(chi2.sf(statistic, k - 1))


def critical_difference(methods: int, images: int, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of mean ranks: q sqrt(k (k+1) / (6 N)), q the studentized range over sqrt 2."""
    from scipy.stats import studentized_range

    if methods < 2 or images < 1:
        return math.inf
    q = float(studentized_range.ppf(1 - alpha, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * images))


def extremes(values: Tensor, higher_is_better: bool, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The images with the best and the worst values, at most `count` of each, best and worst first."""
    known = [i for i in range(len(values)) if bool(values[i].isfinite())]
    order = sorted(known, key=lambda i: (-float(values[i]) if higher_is_better else float(values[i]), i))
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]
