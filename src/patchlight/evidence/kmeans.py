"""Lloyd's k-means on batches of point sets, on the device: matrix-product distances, no host synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Empty = Literal["reseed", "zero"]
_CHECK = 2
"""Iterations between two convergence checks by the host."""
_RESTARTS = 64
"""Empty clusters of one set that restart at far points per iteration."""


def draw_initial(points: int, clusters: int, seed: int) -> Tensor:
    """Indices of distinct initial points [K].

    Sampled like fast-pytorch-kmeans after `numpy.random.seed(12345 + seed)`: 12345 is the seed of TIS's scripts.
    """
    drawn = np.random.RandomState((12345 + seed) % 2**32).choice(points, min(clusters, points), replace=False)
    return torch.from_numpy(drawn)


def kmeans(
    points: Tensor, initial: Tensor, iterations: int = 100, tolerance: float = 1e-4, empty: Empty = "reseed"
) -> Tensor:
    """Centroids [B,K,N] of points [B,P,N], from the points at `initial` ([K] for every set, or [B,K]).

    Lloyd: assign to the nearest centroid (Euclidean), move each centroid to its points' mean, until the squared shift
    summed over a set's centroids is at most `tolerance`. A converged set does not change, regardless of the others. An
    empty cluster restarts at the point farthest from its own centroid, the next empty one at the next farthest (64 of
    them; any more share the last until the next iteration); `empty="zero"` puts it at 0.
    """
    initial = initial.to(points.device).expand(len(points), -1)
    parts = _parts(points, initial.shape[1])
    return torch.cat([_lloyd(points[p], initial[p], iterations, tolerance, empty) for p in parts])


def _parts(points: Tensor, clusters: int) -> Iterator[slice]:
    """Split the sets so that the distances take at most 1 GB on an accelerator, 128 MB elsewhere."""
    room = 2**28 if points.device.type == "cuda" else 2**25
    size = max(1, room // (points.shape[1] * clusters))
    return (slice(begin, begin + size) for begin in range(0, len(points), size))


@dataclass(frozen=True)
class _Points:
    """Points [B,P,N] in the form that an iteration reads.

    `longer` has an additional coordinate 1, and zeros to a length that suits the hardware, so that |c|^2 - 2 <x, c> is
    one product. `wide` is in float64: an accelerator adds in any order, which would show in float32 sums.
    """

    plain: Tensor
    longer: Tensor
    wide: Tensor
    norms: Tensor

    @staticmethod
    def of(points: Tensor) -> _Points:
        extra = points.new_zeros(*points.shape[:2], -(points.shape[2] + 1) % 8 + 1)
        extra[..., 0] = 1
        return _Points(points, torch.cat([points, extra], -1), points.double(), points.square().sum(-1))

    def __getitem__(self, sets: Tensor) -> _Points:
        return _Points(self.plain[sets], self.longer[sets], self.wide[sets], self.norms[sets])


def _lloyd(points: Tensor, initial: Tensor, iterations: int, tolerance: float, empty: Empty) -> Tensor:
    """Iterate; converged sets are removed whenever the host checks."""
    sets = torch.arange(len(points), device=points.device)
    result = centroids = points[sets[:, None], initial]
    these = _Points.of(points)
    converged = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for step in range(iterations):
        moved = _moved(these, centroids, empty)
        shift = (moved - centroids).square().sum((1, 2))
        centroids = torch.where(converged[:, None, None], centroids, moved)
        converged = converged | (shift <= tolerance)
        if step % _CHECK == _CHECK - 1 or step == iterations - 1:
            result = result.index_copy(0, sets, centroids)
            going = (~converged).nonzero()[:, 0]
            if len(going) == 0:
                break
            if len(going) < len(sets):
                sets, these, centroids, converged = sets[going], these[going], centroids[going], converged[going]
    return result


def _moved(points: _Points, centroids: Tensor, empty: Empty) -> Tensor:
    """One iteration: the means [B,K,N] of the points nearest to each centroid."""
    batch, clusters, size = centroids.shape
    rows = torch.arange(batch, device=centroids.device)[:, None]
    against = centroids.new_zeros(batch, clusters, points.longer.shape[-1])
    against[..., :size] = -2 * centroids
    against[..., size] = centroids.square().sum(-1)
    distance, nearest = (points.longer @ against.mT).min(-1)
    flat = (nearest + clusters * rows).flatten()
    sums = points.wide.new_zeros(batch * clusters, size).index_add_(0, flat, points.wide.flatten(0, 1))
    counts = sums.new_zeros(batch * clusters).index_add_(0, flat, torch.ones_like(flat, dtype=sums.dtype))
    means = (sums / counts.clamp_min(1)[:, None]).to(centroids.dtype).view(batch, clusters, size)
    if empty == "zero":
        return means
    missing = counts.view(batch, clusters) == 0
    farthest = (distance + points.norms).topk(min(clusters, _RESTARTS), 1).indices
    order = (missing.cumsum(1) - 1).clamp(0, farthest.shape[1] - 1)
    return torch.where(missing[..., None], points.plain[rows, farthest.gather(1, order)], means)
