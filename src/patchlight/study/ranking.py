"""The best method by a metric, and the methods without a significant difference to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from patchlight.core.statistics import FEWEST, Mark, Resamples, average_ranks, percentiles, tie_spans
from patchlight.metrics.base import Evaluation

SAMPLES, ALPHA = 2000, 0.05


def mark_best(columns: Mapping[str, Evaluation], resamples: Resamples | None = None) -> dict[str, Mark]:
    """Mark the best method and those statistically tied with it.

    Only images on which every method has a value are compared. Nothing is marked when Friedman's test does not
    separate the methods at 5 %, or when fewer than six images are shared. A method is tied when the 95 % interval of
    its paired bootstrap difference to the best contains 0.
    """
    with_value = {m: column for m, column in columns.items() if column.mean == column.mean}
    _, ranks = shared_ranks(with_value)
    marks: dict[str, Mark] = dict.fromkeys(columns, "")
    if ranks is None or friedman(ranks)[1] > ALPHA:
        return marks
    shared = torch.stack([column.exist for column in with_value.values()]).all(0)
    numbers = {m: mean_on(column, shared) for m, column in with_value.items()}
    sign = 1.0 if columns[next(iter(numbers))].higher_is_better else -1.0
    best = max(numbers, key=lambda m: sign * numbers[m])
    resamples = resamples or Resamples(len(columns[best]), SAMPLES)
    differences = paired_differences(columns[best], with_value, resamples, shared)
    for method, number in numbers.items():
        low, high = percentiles(differences[method])
        if method == best or number == numbers[best]:
            marks[method] = "best"
        elif low <= 0 <= high:
            marks[method] = "tied"
    return marks


def mean_on(column: Evaluation, images: Tensor) -> float:
    """The mean on the images of a mask [B]."""
    if not bool((column.exist & ~images).any()):
        return column.mean
    return float(column.resampled(images.double()[None])[0])


def paired_differences(
    best: Evaluation, others: Mapping[str, Evaluation], resamples: Resamples, images: Tensor | None = None
) -> dict[str, Tensor]:
    """The best method's mean minus that of each other [S], on the images of a mask, or on those that both have."""
    both = {m: best.exist & other.exist if images is None else images for m, other in others.items()}
    first = resamples.numbers([(best, both[m]) for m in others])
    second = resamples.numbers([(other, both[m]) for m, other in others.items()])
    return {m: a - b for m, a, b in zip(others, first, second, strict=True)}


def shared_ranks(columns: Mapping[str, Evaluation]) -> tuple[list[str], Tensor | None]:
    """The methods with a value, and their ranks [N,k] on the images that all have; None for fewer than six."""
    with_value = {m: c for m, c in columns.items() if c.count}
    if len(with_value) < 2:
        return list(with_value), None
    higher = next(iter(with_value.values())).higher_is_better
    values = torch.stack([c.values for c in with_value.values()], 1)
    values = values[values.isfinite().all(1)]
    return list(with_value), average_ranks(-values if higher else values) if len(values) >= FEWEST else None


def friedman(ranks: Tensor) -> tuple[float, float]:
    """Friedman's test of ranks [N,k], corrected for ties: the statistic and its p-value.

    (12 / (N k (k+1)) sum_j R_j^2 - 3 N (k+1)) / (1 - sum (t^3 - t) / (N k (k^2-1))), with the rank sums R_j and the
    sizes of ties t. For two methods it is the chi-squared test of how often each is first, (a - b)^2 / (a + b).
    """
    from scipy.stats import chi2

    n, k = ranks.shape
    if n < 1 or k < 2 or bool((ranks == ranks[:, :1]).all()):
        return 0.0, 1.0
    first, last = tie_spans(ranks.sort(1).values)
    ties = float(((last - first + 1).double().square() - 1).sum())  # t^3 - t for each tie of t values
    plain = 12 / (n * k * (k + 1)) * float(ranks.sum(0).square().sum()) - 3 * n * (k + 1)
    statistic = plain / (1 - ties / (n * k * (k * k - 1)))
    return statistic, float(chi2.sf(statistic, k - 1))
