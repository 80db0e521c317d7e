"""What the images of a run say together: means with intervals, which methods are tied with the best, and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.metrics.base import Evaluation, intervals
from patchlight.statistics import FEWEST, average_ranks, bootstrapped, percentiles

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
    for model in results.images:
        columns = {(m, n): results.columns[model, m, n] for m in recipe.methods for n in recipe.metrics}
        bounds = intervals(columns, samples=samples)
        marks = {n: compared({m: columns[m, n] for m in recipe.methods}, samples) for n in recipe.metrics}
        for (method, metric), column in columns.items():
            low, high = bounds[method, metric]
            found.append(
                Cell(
                    model=model,
                    method=method,
                    metric=metric,
                    mean=column.mean,
                    low=low,
                    high=high,
                    images=column.count,
                    undefined=len(column) - column.count - column.failed,
                    failed=column.failed,
                    mark=marks[metric][method],
                    published=recipe.number(model, method, metric),
                    explain_seconds=float(column.explain_seconds.nanmean()),
                    measure_seconds=float(column.measure_seconds.nanmean()),
                )
            )
    return found


def compared(columns: Mapping[str, Evaluation], samples: int = SAMPLES) -> dict[str, Mark]:
    """Which method is best, and which are statistically tied with it.

    None is marked where Friedman's test does not tell the methods apart at 5 %, or has fewer than six images to do so.
    A method is tied where the 95 % interval of its paired bootstrap difference to the best contains 0: both are
    resampled on the same images, those on which both have a value.
    """
    means = {m: column.mean for m, column in columns.items()}
    exist = {m: mean for m, mean in means.items() if mean == mean}
    _, placed = _placed({m: columns[m] for m in exist})
    if placed is None or friedman(placed)[1] > ALPHA:
        return dict.fromkeys(columns, "")
    sign = 1.0 if columns[next(iter(exist))].higher_is_better else -1.0
    best = max(exist, key=lambda m: sign * exist[m])
    marks: dict[str, Mark] = dict.fromkeys(columns, "")
    differences = bootstrapped(
        {m: partial(paired_difference, columns[best], columns[m]) for m in exist}, len(columns[best]), samples
    )
    for method in exist:
        low, high = percentiles(differences[method])
        if method == best or exist[method] == exist[best]:
            marks[method] = "best"
        elif low <= 0 <= high:
            marks[method] = "tied"
    return marks


def paired_difference(first: Evaluation, second: Evaluation, weights: Tensor) -> Tensor:
    """The data set's number of `first` less that of `second` [S] under the same weights [S,B] of the same images."""
    shared = weights * (first.values.isfinite() & second.values.isfinite())
    return first.resampled(shared) - second.resampled(shared)


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


def _placed(columns: Mapping[str, Evaluation]) -> tuple[list[str], Tensor | None]:
    """The methods with a value, and their ranks [N,k] on the images where all have one; None where that is too few."""
    known = {m: c for m, c in columns.items() if c.count}
    if len(known) < 2:
        return list(known), None
    higher = next(iter(known.values())).higher_is_better
    values = torch.stack([c.values for c in known.values()], 1)
    values = values[values.isfinite().all(1)]
    return list(known), average_ranks(-values if higher else values) if len(values) >= FEWEST else None


def friedman(placed: Tensor) -> tuple[float, float]:
    """Friedman's statistic, corrected for ties, and its p-value: do the methods of ranks [N,k] differ at all?

    Of two methods it is the chi-squared test of how often each is first, (a - b)^2 / (a + b).
    """
    from scipy.stats import chisquare, friedmanchisquare

    n, k = placed.shape
    if n < 1 or k < 2 or bool((placed == placed[:, :1]).all()):
        return 0.0, 1.0
    if k == 2:
        found = chisquare([int((placed[:, 0] < placed[:, 1]).sum()), int((placed[:, 0] > placed[:, 1]).sum())])
    else:
        found = friedmanchisquare(*placed.T.numpy())
    return float(found.statistic), float(found.pvalue)


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
