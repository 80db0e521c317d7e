"""Lloyd's k-means on batches of point sets, on the device: distances by matrix products, no wait in an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Empty = Literal["reseed", "zero"]
_CHECK = 5
"""Iterations between two looks from the host at whether all have converged."""


def draw_initial(points: int, clusters: int, generator: torch.Generator) -> Tensor:
    """The indices of distinct points to start from [K]; a small draw on the CPU."""
    return torch.randperm(points, generator=generator)[:clusters]


def kmeans(
    points: Tensor, initial: Tensor, iterations: int = 100, tolerance: float = 1e-4, empty: Empty = "reseed"
) -> Tensor:
    """Centroids [B,K,N] of points [B,P,N], from the points at `initial` ([K] for every set, or [B,K]).

    Lloyd: assign to the nearest centroid (Euclidean), move each centroid to its points' mean, until the squared shift
    summed over a set's centroids is at most `tolerance`. A set that has converged stays, whatever others still do. An
    empty cluster starts again at the point farthest from its own centroid, the next empty one at the next farthest;
    `empty="zero"` puts it at 0.
    """
    initial = initial.to(points.device).expand(len(points), -1)
    parts = _parts(points, initial.shape[1])
    return torch.cat([_lloyd(points[p], initial[p], iterations, tolerance, empty) for p in parts])


def _parts(points: Tensor, clusters: int) -> Iterator[slice]:
    """Sets at once: as many as keep the distances in 1 GB on an accelerator, 128 MB elsewhere."""
    room = 2**28 if points.device.type == "cuda" else 2**25
    size = max(1, room // (points.shape[1] * clusters))
    return (slice(begin, begin + size) for begin in range(0, len(points), size))


def _lloyd(points: Tensor, initial: Tensor, iterations: int, tolerance: float, empty: Empty) -> Tensor:
    rows = torch.arange(len(points), device=points.device)[:, None]
    centroids = points[rows, initial]
    norms = points.square().sum(-1)
    converged = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    for step in range(iterations):
        moved = _moved(points, norms, centroids, rows, empty)
        shift = (moved - centroids).square().sum((1, 2))
        centroids = torch.where(converged[:, None, None], centroids, moved)
        converged = converged | (shift <= tolerance)
        if step % _CHECK == _CHECK - 1 and bool(converged.all()):
            break
    return centroids


def _moved(points: Tensor, norms: Tensor, centroids: Tensor, rows: Tensor, empty: Empty) -> Tensor:
    """One iteration: the means [B,K,N] of the points nearest to each centroid."""
    batch, clusters, size = centroids.shape
    shorter = torch.baddbmm(centroids.square().sum(-1)[:, None], points, centroids.mT, alpha=-2)
    distance, nearest = shorter.min(-1)
    flat = (nearest + clusters * rows).flatten()
    # sums in float64: an accelerator adds in any order, and float32 would keep the difference
    sums = torch.zeros(batch * clusters, size, dtype=torch.float64, device=points.device)
    sums.index_add_(0, flat, points.flatten(0, 1).double())
    counts = torch.zeros(batch * clusters, dtype=torch.float64, device=points.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.float64))
    means = (sums / counts.clamp_min(1)[:, None]).to(points.dtype).view(batch, clusters, size)
    if empty == "zero":
        return means
    missing = counts.view(batch, clusters) == 0
    farthest = (distance + norms).topk(clusters, 1).indices
    order = (missing.cumsum(1) - 1).clamp_min(0)
    return torch.where(missing[..., None], points[rows, farthest.gather(1, order)], means)
