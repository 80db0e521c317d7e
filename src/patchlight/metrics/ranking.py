"""Which method a metric calls best, and which are statistically tied with it; every image counts for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from patchlight.metrics.base import Evaluation
from patchlight.statistics import FEWEST, Mark, average_ranks, bootstrapped, percentiles

SAMPLES, ALPHA = 2000, 0.05


def compared(columns: Mapping[str, Evaluation], samples: int = SAMPLES) -> dict[str, Mark]:
    """Which method is best, and which are statistically tied with it.

    None is marked where Friedman's test does not tell the methods apart at 5 %, or has fewer than six images to do so.
    A method is tied where the 95 % interval of its paired bootstrap difference to the best contains 0: both are
    resampled on the same images, those on which both have a value.
    """
    means = {m: column.mean for m, column in columns.items()}
    exist = {m: mean for m, mean in means.items() if mean == mean}
    _, ranks = placed({m: columns[m] for m in exist})
    if ranks is None or friedman(ranks)[1] > ALPHA:
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


def placed(columns: Mapping[str, Evaluation]) -> tuple[list[str], Tensor | None]:
    """The methods with a value, and their ranks [N,k] on the images where all have one; None where that is too few."""
    known = {m: c for m, c in columns.items() if c.count}
    if len(known) < 2:
        return list(known), None
    higher = next(iter(known.values())).higher_is_better
    values = torch.stack([c.values for c in known.values()], 1)
    values = values[values.isfinite().all(1)]
    return list(known), average_ranks(-values if higher else values) if len(values) >= FEWEST else None


def friedman(ranks: Tensor) -> tuple[float, float]:
    """Friedman's statistic, corrected for ties, and its p-value: do the methods of ranks [N,k] differ at all?

    Of two methods it is the chi-squared test of how often each is first, (a - b)^2 / (a + b).
    """
    from scipy.stats import chisquare, friedmanchisquare

    n, k = ranks.shape
    if n < 1 or k < 2 or bool((ranks == ranks[:, :1]).all()):
        return 0.0, 1.0
    if k == 2:
        found = chisquare([int((ranks[:, 0] < ranks[:, 1]).sum()), int((ranks[:, 0] > ranks[:, 1]).sum())])
    else:
        found = friedmanchisquare(*ranks.T.numpy())
    return float(found.statistic), float(found.pvalue)
