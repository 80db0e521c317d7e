"""k-means on batches of point sets: scikit-learn's, a slow Lloyd's, and cases whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchlight.evidence import kmeans as room
from patchlight.evidence.kmeans import draw_initial, kmeans
from tests.evidence.literal import slow_lloyd


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def line(*values: float) -> Tensor:
    """One set of points on a line [1,P,1]."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def inertia(points: Tensor, centroids: Tensor) -> Tensor:
    return torch.cdist(points, centroids).square().min(-1).values.sum(-1)


@pytest.mark.parametrize("empty", ["reseed", "zero"])
def test_kmeans_is_lloyds(empty: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(3, 60, 5, generator=generator) + 4
    points[:, 40:] *= 0.02
    points[:, 1] = points[:, 0]
    initial = torch.tensor([0, 1, *range(20, 30)])
    found = kmeans(points, initial, empty=empty)
    for one, centroids in zip(points, found, strict=True):
        expected = slow_lloyd(one.double().numpy(), initial.numpy(), 100, empty)
        torch.testing.assert_close(centroids.double(), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)
        alone = kmeans(one[None], initial, empty=empty)[0]
        torch.testing.assert_close(alone, centroids, atol=1e-6, rtol=0)
    zeros = (found == 0).all(-1).sum(1)
    assert (zeros == (0 if empty == "reseed" else 1)).all(), "two equal starts leave one cluster empty"


@pytest.mark.parametrize(("clusters", "size"), [(2, 3), (7, 3), (20, 12)])
def test_kmeans_is_scikit_learns(clusters: int, size: int) -> None:
    from sklearn.cluster import KMeans

    points = drawn(3, 90, size) + 2 * drawn(3, 1, size, seed=1)
    initial = torch.stack([draw_initial(90, clusters, seed) for seed in range(3)])
    found = kmeans(points, initial, tolerance=0.0)
    for one, start, centroids in zip(points, initial, found, strict=True):
        theirs = KMeans(clusters, init=one[start].numpy(), n_init=1, max_iter=100, tol=0.0).fit(one.numpy())
        assert 2 < theirs.n_iter_ < 100
        np.testing.assert_allclose(centroids, theirs.cluster_centers_, rtol=0, atol=1e-12)
        assert float(inertia(one, centroids)) == pytest.approx(theirs.inertia_, rel=1e-12)


def test_steps_are_scikit_learns() -> None:
    from sklearn.cluster import KMeans

    points, initial = drawn(1, 60, 4), draw_initial(60, 6, 0)
    before = float("inf")
    for steps in (1, 2, 3):
        found = kmeans(points, initial, iterations=steps, tolerance=0.0)
        theirs = KMeans(6, init=points[0][initial].numpy(), n_init=1, max_iter=steps, tol=0.0).fit(points[0].numpy())
        np.testing.assert_allclose(found[0], theirs.cluster_centers_, rtol=0, atol=1e-12)
        now = float(inertia(points[0], found[0]))
        assert now < before
        before = now


def test_one_cluster_is_the_mean_and_none_moves_without_iterations() -> None:
    points = drawn(2, 9, 3)
    torch.testing.assert_close(kmeans(points, torch.tensor([4])), points.mean(1, keepdim=True))
    assert torch.equal(kmeans(points, torch.tensor([4, 2]), iterations=0), points[:, [4, 2]])


def test_each_set_may_start_elsewhere_and_stays_where_it_converged() -> None:
    points = torch.cat([line(0, 1, 10, 11), line(*range(4))])
    starts = torch.tensor([[0, 3], [1, 0]])
    together = kmeans(points, starts)
    for one, start, found in zip(points, starts, together, strict=True):
        assert torch.equal(kmeans(one[None], start)[0], found)
    assert together[0].flatten().tolist() == [0.5, 10.5]


@pytest.mark.parametrize(("tolerance", "expected"), [(72.0, [0, 9]), (71.0, [7 / 3, 20])])
def test_the_tolerance_is_of_the_squared_shift_summed_over_centroids(tolerance: float, expected: list[float]) -> None:
    """Of two groups that lie far apart each moves one of its centroids from 3 to 9 first, and both to an end then."""
    points = torch.cat([line(0, 3, 4, 20), 1000 + line(0, 3, 4, 20)], 1)
    found = kmeans(points, torch.tensor([0, 1, 4, 5]), tolerance=tolerance).flatten()
    assert found.tolist() == pytest.approx([*expected, *(1000 + e for e in expected)])


def test_an_empty_cluster_starts_again_at_the_farthest_point() -> None:
    """Three equal starts at 0 own all points but leave two clusters empty: 9 and then -7 are the farthest."""
    points = line(0, 0, 0, 1, 9, -7)
    start = torch.tensor([0, 1, 2])
    assert kmeans(points, start, iterations=1).flatten().tolist() == [0.5, 9, -7]
    assert kmeans(points, start, iterations=1, empty="zero").flatten().tolist() == [0.5, 0, 0]
    assert kmeans(points, start).flatten().tolist() == [0.25, 9, -7]


def test_of_many_empty_clusters_the_last_share_a_point() -> None:
    points = torch.cat([torch.zeros(1, 70, 1), torch.arange(1.0, 81)[None, :, None]], 1)
    once = kmeans(points, torch.arange(70), iterations=1).flatten()
    assert once[1:65].tolist() == list(range(80, 16, -1))
    assert set(once[65:].tolist()) == {17.0}


def test_sets_in_parts_are_sets_together(monkeypatch: pytest.MonkeyPatch) -> None:
    points, initial = drawn(5, 30, 3), draw_initial(30, 4, 0)
    whole = kmeans(points, initial)
    monkeypatch.setattr(room, "_parts", lambda points, clusters: iter([slice(0, 2), slice(2, 4), slice(4, 6)]))
    assert torch.equal(kmeans(points, initial), whole)


def test_the_result_is_in_the_points_type_and_does_not_touch_them() -> None:
    points = drawn(2, 20, 3).float()
    before = points.clone()
    found = kmeans(points, draw_initial(20, 3, 0))
    assert found.dtype == torch.float32
    assert found.shape == (2, 3, 3)
    assert torch.equal(points, before)


def test_starts_are_distinct_and_drawn_from_the_seed_alone() -> None:
    for seed in (0, 1, 2**32 - 12345):
        expected = np.random.RandomState((12345 + seed) % 2**32).choice(50, 20, replace=False)
        assert draw_initial(50, 20, seed).tolist() == expected.tolist()
    assert len(set(draw_initial(50, 20, 0).tolist())) == 20
    assert draw_initial(50, 20, 0).tolist() != draw_initial(50, 20, 1).tolist()
