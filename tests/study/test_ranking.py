"""Which method is best, and which are tied with it: against closed forms and scipy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from patchlight.core.statistics import Resamples, average_ranks, bootstrap_weights
from patchlight.metrics.base import Evaluation, Sums
from patchlight.study.ranking import friedman, mark_best, paired_differences


def column(
    values: Tensor, higher: bool = True, combine: Callable[[Sums], Tensor] | None = None, **parts: Tensor
) -> Evaluation:
    return Evaluation("test", values.double(), higher, (0.0, 1.0), parts=parts, combine=combine)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def literal_friedman(placed: Tensor) -> tuple[float, float]:
    """chi2 = (12 / (N k (k+1)) sum_j R_j^2 - 3 N (k+1)) / (1 - sum (t^3 - t) / (N k (k^2-1))), R_j the rank sums."""
    n, k = placed.shape
    ties = sum(float((c.double() ** 3 - c).sum()) for c in (row.unique(return_counts=True)[1] for row in placed))
    plain = 12 / (n * k * (k + 1)) * float((placed.sum(0) ** 2).sum()) - 3 * n * (k + 1)
    statistic = plain / (1 - ties / (n * k * (k * k - 1)))
    return statistic, float(stats.chi2.sf(statistic, k - 1))


@pytest.mark.parametrize("methods", [2, 3, 6])
@pytest.mark.parametrize("levels", [1000, 4])
def test_friedman_is_the_formula(levels: int, methods: int) -> None:
    ours = average_ranks((drawn(30, methods) * levels).round())
    assert friedman(ours) == pytest.approx(literal_friedman(ours), rel=1e-10)


@pytest.mark.parametrize("levels", [1000, 4])
def test_ranks_and_friedman_agree_with_scipy(levels: int) -> None:
    values = (drawn(30, 6) * levels).round()
    ours = average_ranks(values)
    assert torch.equal(ours, torch.from_numpy(stats.rankdata(values.numpy(), axis=1)))
    expected = stats.friedmanchisquare(*values.T.numpy())
    assert friedman(ours) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-10)


def test_friedman_of_equal_and_of_perfectly_ordered_methods() -> None:
    assert friedman(average_ranks(torch.ones(5, 3))) == (0.0, 1.0)
    ordered = average_ranks(torch.arange(4.0).expand(10, 4))
    assert friedman(ordered)[0] == pytest.approx(10 * 3)


def test_best_and_tied_come_from_paired_differences() -> None:
    base = drawn(200)
    noise = drawn(200, seed=1) - 0.5
    columns = {
        "best": column(base + 0.010),
        "paired worse": column(base),
        "tied": column(base + 0.009 + 0.05 * noise),
        "none": column(torch.full((200,), math.nan)),
    }
    marks = mark_best(columns)
    assert marks["none"] == ""
    assert marks["paired worse"] == "", "0.01 lower on every image is a sure difference, though intervals overlap"
    assert sorted(marks.values()) == ["", "", "best", "tied"]
    lower = {name: column(c.values, higher=False) for name, c in columns.items() if name != "none"}
    assert mark_best(lower)["paired worse"] == "best"
    (difference,) = paired_differences(columns["best"], {"": columns["paired worse"]}, Resamples(200)).values()
    assert torch.allclose(difference, torch.full_like(difference, 0.01))


def test_differences_are_of_the_images_that_both_have() -> None:
    """Against loops: each resample image by image, means and micro averages."""
    values = drawn(2, 40)
    values[0, :5], values[1, 3:9] = math.nan, math.nan
    parts = {"hits": drawn(40, seed=1), "cells": drawn(40, 2, seed=2)}
    means = [column(own) for own in values]
    micro = [column(own, combine=lambda s: s["hits"] / s["cells"].sum(1), **parts) for own in values]
    shared = [i for i in range(40) if not values[:, i].isnan().any()]
    found = paired_differences(means[0], {"": means[1]}, Resamples(40, 30))[""]
    combined = paired_differences(micro[0], {"": means[1]}, Resamples(40, 30))[""]
    for counts, difference, other in zip(bootstrap_weights(40, 30).tolist(), found, combined, strict=True):
        total = sum(counts[i] for i in shared)
        first, second = (sum(counts[i] * float(own[i]) for i in shared) / total for own in values)
        hits = sum(counts[i] * float(parts["hits"][i]) for i in shared)
        cells = sum(counts[i] * float(parts["cells"][i].sum()) for i in shared)
        assert float(difference) == pytest.approx(first - second, abs=1e-13)
        assert float(other) == pytest.approx(hits / cells - second, abs=1e-13)


def test_equal_columns_are_both_best_and_a_lone_one_is_not_marked() -> None:
    base = drawn(20)
    three = {"a": column(base), "b": column(base), "c": column(base - 1)}
    assert mark_best(three) == {"a": "best", "b": "best", "c": ""}
    assert mark_best({"a": column(base)}) == {"a": ""}


def test_nothing_is_best_where_the_methods_do_not_differ_or_images_are_too_few() -> None:
    base = drawn(20)
    assert mark_best({"a": column(base), "b": column(base)}) == {"a": "", "b": ""}
    for images in range(8):
        marks = mark_best({"a": column(base[:images]), "b": column(base[:images] - 1)})
        assert marks == ({"a": "best", "b": ""} if images >= 6 else {"a": "", "b": ""})


def test_ranks_of_nothing_do_not_raise() -> None:
    assert friedman(torch.ones(0, 3)) == (0.0, 1.0)
    assert friedman(torch.ones(3, 1)) == (0.0, 1.0)


def test_micro_averages_are_combined_from_sums() -> None:
    hits, cells = torch.tensor([1.0, 9.0]), torch.tensor([10.0, 10.0])
    parts = {"hits": hits, "cells": torch.tensor([10.0, 90.0])}
    micro = column(hits / cells, combine=lambda sums: sums["hits"] / sums["cells"], **parts)
    assert micro.mean == pytest.approx(0.1)
    assert column(hits / cells, **parts).mean == pytest.approx(0.5)
    nothing = column(torch.full((2,), math.nan), combine=lambda sums: sums["hits"], **parts)
    assert math.isnan(nothing.mean)
