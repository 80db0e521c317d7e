"""Lloyd's k-means for batches of point sets, with distances from matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Empty = Literal["reseed", "zero"]
_CHECK = 2
"""Iterations between convergence checks by the host."""
_RESTARTS = 64
"""Maximum number of empty clusters of a set that restart at distant points in each iteration."""


def draw_initial(points: int, clusters: int, seed: int) -> Tensor:
    """Indices [K] of distinct initial points, sampled as by TIS's scripts (12345 is their seed)."""
    generator = np.random.RandomState((12345 + seed) % 2**32)
    return torch.from_numpy(generator.choice(points, min(clusters, points), replace=False))


def kmeans(
    points: Tensor, initial: Tensor, iterations: int = 100, tolerance: float = 1e-4, empty: Empty = "reseed"
) -> Tensor:
    """Centroids [B,K,N] of points [B,P,N], from the points at `initial` ([K] for every set, or [B,K]).

    A set has converged when the squared shifts of its centroids sum to at most `tolerance`, independently of the other
    sets. An empty cluster restarts at the point farthest from its centroid, the next empty one at the next farthest
    point, up to 64 points; with `empty="zero"` it is set to 0.
    """
    initial = initial.to(points.device).expand(len(points), -1)
    parts = _parts(points, initial.shape[1])
    return torch.cat([_lloyd(points[p], initial[p], iterations, tolerance, empty) for p in parts])


def _parts(points: Tensor, clusters: int) -> Iterator[slice]:
    """Split the sets so that the distances take at most 1 GB on CUDA, 128 MB elsewhere."""
    numbers = 2**28 if points.device.type == "cuda" else 2**25
    size = max(1, numbers // (points.shape[1] * clusters))
    return (slice(begin, begin + size) for begin in range(0, len(points), size))


@dataclass(frozen=True)
class _Points:
    """Points [B,P,N] in the forms that an iteration reads.

    `longer` has an additional coordinate 1, and is padded with zeros, so that |c|^2 - 2 <x, c> is one product. `wide`
    is in float64, because an accelerator adds in any order.
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
    """Iterate until all sets have converged; converged sets are removed at every check."""
    sets = torch.arange(len(points), device=points.device)
    result = centroids = points[sets[:, None], initial]
    active = _Points.of(points)
    converged = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for step in range(iterations):
        means = _means(active, centroids, empty)
        shift = (means - centroids).square().sum((1, 2))
        centroids = torch.where(converged[:, None, None], centroids, means)
        converged = converged | (shift <= tolerance)
        if step % _CHECK == _CHECK - 1 or step == iterations - 1:
            result = result.index_copy(0, sets, centroids)
            index = (~converged).nonzero()[:, 0]
            if len(index) == 0:
                break
            if len(index) < len(sets):
                sets, active, centroids, converged = sets[index], active[index], centroids[index], converged[index]
    return result


def _means(points: _Points, centroids: Tensor, empty: Empty) -> Tensor:
    """One iteration: the means [B,K,N] of the points nearest to each centroid."""
    batch, clusters, size = centroids.shape
    rows = torch.arange(batch, device=centroids.device)[:, None]
    longer = centroids.new_zeros(batch, clusters, points.longer.shape[-1])
    longer[..., :size] = -2 * centroids
    longer[..., size] = centroids.square().sum(-1)
    distance, nearest = (points.longer @ longer.mT).min(-1)
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
