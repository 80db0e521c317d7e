"""What the images of a run say together: means with intervals, which methods are tied with the best, and ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from torch import Tensor

from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.statistics import FEWEST, Mark, Resamples, percentiles
from patchlight.metrics.base import Evaluation, intervals
from patchlight.study.ranking import ALPHA, SAMPLES, compared, friedman, placed

K = TypeVar("K", bound=Hashable)
Standing = Literal["better", "worse", ""]
"""How a number stands to the one it is compared with; nothing where the interval of the difference contains 0."""
SIGNS: dict[Standing, str] = {"better": " ▲", "worse": " ▼", "": ""}


def standing(low: float, high: float, higher_is_better: bool) -> Standing:
    """Better or worse, from the interval of a difference."""
    if low <= 0 <= high or math.isnan(low):
        return ""
    return "better" if (low > 0) == higher_is_better else "worse"


@dataclass(frozen=True)
class TableCell:
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
    shared_by: int
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


def cells(results: Results, recipe: Recipe, samples: int = SAMPLES) -> list[TableCell]:
    """Every cell of the tables, by model, method and metric in the recipe's order."""
    found: list[TableCell] = []
    for model in results.images:
        columns = {(m, n): results.columns[model, m, n] for m in recipe.methods for n in recipe.metrics}
        resamples = Resamples(len(results.images[model]), samples)
        bounds = intervals(columns, resamples)
        marks = {n: compared({m: columns[m, n] for m in recipe.methods}, resamples) for n in recipe.metrics}
        for (method, metric), column in columns.items():
            low, high = bounds[method, metric]
            found.append(
                TableCell(
                    model=model,
                    method=method,
                    metric=metric,
                    mean=column.mean,
                    low=low,
                    high=high,
                    images=column.count,
                    undefined=column.left_out["undefined"],
                    failed=column.failed,
                    mark=marks[metric][method],
                    published=recipe.number(model, method, metric),
                    shared_by=column.shared_by,
                    explain_seconds=float(column.explain_seconds.nanmean()),
                    measure_seconds=float(column.measure_seconds.nanmean()),
                )
            )
    return found


@dataclass(frozen=True)
class Gap:
    """Two numbers on the `images` where both have a value, their difference, and its interval.

    `difference` is the second minus the first; `standing` says how the second stands to the first. The interval is the
    95 % interval of the paired bootstrap over images, NaN with fewer than six.
    """

    first: float
    second: float
    difference: float
    low: float
    high: float
    images: int
    standing: Standing


def paired_gaps(pairs: Mapping[K, tuple[Evaluation, Evaluation]], resamples: Resamples) -> dict[K, Gap]:
    """The gap of each of these pairs of evaluations of the same images, from the same resamples."""
    both = {key: first.exist & second.exist for key, (first, second) in pairs.items()}
    firsts, seconds = (resamples.numbers([(pair[i], both[key]) for key, pair in pairs.items()]) for i in (0, 1))
    gaps = {}
    for (key, pair), one, other in zip(pairs.items(), firsts, seconds, strict=True):
        first, second = (float(own.resampled(both[key].double()[None])[0]) for own in pair)
        count = int(both[key].sum())
        low, high = percentiles(other - one) if count >= FEWEST else (math.nan, math.nan)
        stands = standing(low, high, pair[0].higher_is_better)
        gaps[key] = Gap(first, second, second - first, low, high, count, stands)
    return gaps


def gaps(
    results: Results, recipe: Recipe, model: str, against: str, samples: int = SAMPLES
) -> dict[tuple[str, str], Gap]:
    """The gap of every method to the method `against`, by method and metric."""
    if against not in recipe.methods:
        raise PatchlightError(f"the run has no method '{against}'; {nearest(against, recipe.methods)}")
    resamples = Resamples(len(results.images[model]), samples)
    found: dict[tuple[str, str], Gap] = {}
    for metric in recipe.metrics:
        first = results.columns[model, against, metric]
        others = [method for method in recipe.methods if method != against]
        pairs = {(method, metric): (first, results.columns[model, method, metric]) for method in others}
        found |= paired_gaps(pairs, resamples)
    return found


def ranks(results: Results, recipe: Recipe, model: str, metric: str) -> Ranks | None:
    """The methods' ranks on each image; None with fewer than two methods, or six images that all have values for.

    Methods without any value are left out.
    """
    names, places = placed({m: results.columns[model, m, metric] for m in recipe.methods})
    if places is None:
        return None
    statistic, p = friedman(places)
    means = dict(zip(names, places.mean(0).tolist(), strict=True))
    return Ranks(model, metric, means, len(places), statistic, p, critical_difference(len(names), len(places)))


def critical_difference(methods: int, images: int, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of mean ranks: q sqrt(k (k+1) / (6 N)), q the studentized range over sqrt 2."""
    if methods < 2 or images < 1:
        return math.inf
    return _studentized(methods, alpha) / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * images))


@cache
def _studentized(methods: int, alpha: float) -> float:
    """The range of so many standard normal numbers that is passed with probability alpha; an integral, and slow."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - alpha, methods, math.inf))


def extremes(values: Tensor, higher_is_better: bool, count: int) -> tuple[Sequence[int], Sequence[int]]:
    """The images with the best and the worst values, at most `count` of each, best and worst first."""
    known = values.isfinite().nonzero().flatten()
    order = known[(-values[known] if higher_is_better else values[known]).argsort(stable=True)].tolist()
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]
