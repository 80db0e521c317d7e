"""The numbers of the tables against closed forms and scipy."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from patchlight.bench.statistics import Ranks, critical_difference, extremes
from patchlight.core import statistics
from patchlight.core.statistics import Resamples, bootstrap_weights


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_the_critical_difference_is_that_of_demsars_table(k: int, q: float) -> None:
    assert critical_difference(k, 25) == pytest.approx(q * math.sqrt(k * (k + 1) / 150), abs=1e-3)


def test_groups_are_the_largest_sets_within_the_critical_difference() -> None:
    means = {"a": 1.0, "b": 1.4, "c": 2.0, "d": 4.0, "e": 4.1}
    ranks = Ranks("m", "n", means, 10, 1.0, 0.1, critical=0.65)
    assert ranks.groups == [["a", "b"], ["b", "c"], ["d", "e"]]
    assert Ranks("m", "n", means, 10, 1.0, 0.1, critical=9).groups == [["a", "b", "c", "d", "e"]]


def test_the_bootstrap_spreads_as_the_standard_error() -> None:
    values = drawn(400)
    weights = bootstrap_weights(400, 4000)
    sample = (weights @ values) / 400
    assert float(sample.std()) == pytest.approx(float(values.std(correction=0)) / 20, rel=0.05)


def test_statistics_of_nothing_do_not_raise() -> None:
    assert critical_difference(1, 5) == critical_difference(3, 0) == math.inf
    assert bootstrap_weights(0, 5).shape == (5, 0)


def test_the_bootstrap_in_parts_is_the_bootstrap() -> None:
    weights = bootstrap_weights(7, 50)
    assert torch.equal(weights.sum(1), torch.full((50,), 7.0, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    drawn_at_once = torch.randint(7, (50, 7), generator=generator)
    whole = torch.stack([row.bincount(minlength=7) for row in drawn_at_once]).double()
    assert torch.equal(weights, whole)
    values = drawn(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "AT_ONCE", 20)
        assert torch.equal(bootstrap_weights(7, 50), whole)
        resamples = Resamples(7, 50)
        for _ in range(2):  # the second time they are kept
            sums = list(resamples.sums([values[:, None], torch.stack([values, values**2], 1)]))
            torch.testing.assert_close(sums[0][:, 0], whole @ values, rtol=1e-13, atol=0)
            torch.testing.assert_close(sums[1][:, 1], whole @ values**2, rtol=1e-13, atol=0)
            assert [tuple(own.shape) for own in sums] == [(50, 1), (50, 2)]
        patch.setattr(statistics, "CACHED", 7)
        drawn_again = Resamples(7, 50)
        for _ in range(2):
            assert torch.equal(torch.cat([counts.double() for counts in drawn_again.counts()]), whole)


def test_extremes_leave_out_what_has_no_value() -> None:
    values = torch.tensor([0.3, math.nan, 0.9, 0.1, 0.5])
    assert extremes(values, True, 2) == ([2, 4], [3, 0])
    assert extremes(values, False, 2) == ([3, 0], [2, 4])
    assert extremes(torch.tensor([0.5, 0.1, 0.5, 0.1]), True, 2) == ([0, 2], [3, 1]), "of equal ones, the first"
