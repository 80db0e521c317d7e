"""Lloyd's k-means on batches of point sets, on the device: distances by matrix products, only of what has moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Empty = Literal["reseed", "zero"]
_RESTARTS = 64
"""Far points that empty clusters of one set start again from in an iteration; any more wait for the next."""


def draw_initial(points: int, clusters: int, seed: int) -> Tensor:
    """The indices of distinct points to start from [K].

    Drawn as fast-pytorch-kmeans does after `numpy.random.seed(12345 + seed)`: 12345 is the seed of TIS's own scripts.
    """
    drawn = np.random.RandomState((12345 + seed) % 2**32).choice(points, min(clusters, points), replace=False)
    return torch.from_numpy(drawn)


def kmeans(
    points: Tensor, initial: Tensor, iterations: int = 100, tolerance: float = 1e-4, empty: Empty = "reseed"
) -> Tensor:
    """Centroids [B,K,N] of points [B,P,N], from the points at `initial` ([K] for every set, or [B,K]).

    Lloyd: assign to the nearest centroid (Euclidean), move each centroid to its points' mean, until the squared shift
    summed over a set's centroids is at most `tolerance`. A set that has converged stays, whatever others still do. An
    empty cluster starts again at the point farthest from its own centroid, the next empty one at the next farthest (64
    of them; any more share the last until the next iteration); `empty="zero"` puts it at 0.
    """
    initial = initial.to(points.device).expand(len(points), -1)
    parts = _parts(points, initial.shape[1])
    return torch.cat([_lloyd(points[p], initial[p], iterations, tolerance, empty) for p in parts])


def _parts(points: Tensor, clusters: int) -> Iterator[slice]:
    """Sets at once: as many as keep the distances in 1 GB on an accelerator, 128 MB elsewhere."""
    room = 2**28 if points.device.type == "cuda" else 2**25
    size = max(1, room // (points.shape[1] * clusters))
    return (slice(begin, begin + size) for begin in range(0, len(points), size))


@dataclass(frozen=True)
class _Points:
    """Points [B,P,N] as an iteration reads them.

    `longer` has a coordinate 1 more, and zeros to a length that suits the hardware, so that |c|^2 - 2 <x, c> is one
    product. `wide` is in float64: an accelerator adds in any order, and sums in float32 would keep the difference.
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

    def against(self, centroids: Tensor) -> Tensor:
        """What `longer` is multiplied with [B,K+1,n]; the last is of no centroid, infinitely far from everything."""
        batch, clusters, size = centroids.shape
        rows = centroids.new_zeros(batch, clusters + 1, self.longer.shape[-1])
        rows[:, :-1, :size] = -2 * centroids
        rows[:, :-1, size] = centroids.square().sum(-1)
        rows[:, -1, size] = torch.inf
        return rows


@dataclass(frozen=True)
class Nearest:
    """The nearest centroid of each point [B,P], of equally near ones the first, and |c|^2 - 2 <x, c> of it."""

    distance: Tensor
    index: Tensor

    @staticmethod
    def of(points: _Points, centroids: Tensor) -> Nearest:
        return Nearest(*(points.longer @ points.against(centroids)[:, :-1].mT).min(-1))

    def __getitem__(self, sets: Tensor) -> Nearest:
        return Nearest(self.distance[sets], self.index[sets])

    def renewed(self, points: _Points, centroids: Tensor, moved: Tensor, most: int) -> Nearest:
        """The same after some centroids, `moved` [B,K], at most `most` of a set, have moved.

        Points are compared with those alone. One whose own centroid has moved, and that none of them is nearer to than
        its own was, is compared with all: others may be nearer now.
        """
        against = points.against(centroids)
        some = _places(moved, most, centroids.shape[1])
        distance, at = (points.longer @ _rows(against, some).mT).min(-1)
        index = some.gather(1, at)
        nearer, own = distance < self.distance, moved.gather(1, self.index)
        takes = own | nearer | ((distance == self.distance) & (index < self.index))
        distance = torch.where(takes, distance, self.distance)
        index = torch.where(takes, index, self.index)
        lost = own & ~nearer
        count = int(lost.sum(1).amax())
        if count == 0:
            return Nearest(distance, index)
        which = _places(lost, count, 0)
        far, to = (_rows(points.longer, which) @ against[:, :-1].mT).min(-1)
        return Nearest(distance.scatter(1, which, far), index.scatter(1, which, to))


def _places(chosen: Tensor, count: int, other: int) -> Tensor:
    """Where `chosen` [B,n] holds, in order [B,count], and `other` behind."""
    places = torch.full((len(chosen), count + 1), other, device=chosen.device)
    slot = torch.where(chosen, chosen.cumsum(1) - 1, count)  # the last slot takes all that is not chosen
    return places.scatter_(1, slot, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))[:, :-1]


def _rows(of: Tensor, which: Tensor) -> Tensor:
    """The rows [B,k,n] at `which` [B,k] of each matrix [B,m,n]."""
    return of.gather(1, which[..., None].expand(-1, -1, of.shape[2]))


def _lloyd(points: Tensor, initial: Tensor, iterations: int, tolerance: float, empty: Empty) -> Tensor:
    """Iterations after the first ones compare points with the centroids that moved; sets leave when half have ended."""
    sets = torch.arange(len(points), device=points.device)
    result = centroids = points[sets[:, None], initial]
    these = _Points.of(points)
    converged = torch.zeros(len(points), dtype=torch.bool, device=points.device)
    moved, most = torch.ones_like(initial, dtype=torch.bool), initial.shape[1]
    nearest: Nearest | None = None
    for step in range(iterations):
        if nearest is None or 2 * most > initial.shape[1]:
            nearest = Nearest.of(these, centroids)
        else:
            nearest = nearest.renewed(these, centroids, moved, most)
        before, centroids = centroids, _means(these, nearest, initial.shape[1], empty)
        shift = (centroids - before).square().sum((1, 2))
        centroids = torch.where(converged[:, None, None], before, centroids)
        moved = (centroids != before).any(-1)
        converged = converged | (shift <= tolerance)
        most, going = torch.stack([moved.sum(1).amax(), (~converged).sum()]).tolist()
        if going == 0 or step == iterations - 1:
            break
        if 2 * going <= len(sets):
            result = result.index_copy(0, sets, centroids)
            still = (~converged).nonzero()[:, 0]
            sets, these, nearest, centroids = sets[still], these[still], nearest[still], centroids[still]
            moved, converged = moved[still], converged[still]
    return result.index_copy(0, sets, centroids)


def _means(points: _Points, nearest: Nearest, clusters: int, empty: Empty) -> Tensor:
    """The means [B,K,N] of the points nearest to each centroid."""
    batch, _, size = points.plain.shape
    rows = torch.arange(batch, device=points.plain.device)[:, None]
    flat = (nearest.index + clusters * rows).flatten()
    sums = points.wide.new_zeros(batch * clusters, size).index_add_(0, flat, points.wide.flatten(0, 1))
    counts = sums.new_zeros(batch * clusters).index_add_(0, flat, torch.ones_like(flat, dtype=sums.dtype))
    means = (sums / counts.clamp_min(1)[:, None]).to(points.plain.dtype).view(batch, clusters, size)
    if empty == "zero":
        return means
    missing = counts.view(batch, clusters) == 0
    farthest = (nearest.distance + points.norms).topk(min(clusters, _RESTARTS), 1).indices
    order = (missing.cumsum(1) - 1).clamp(0, farthest.shape[1] - 1)
    return torch.where(missing[..., None], points.plain[rows, farthest.gather(1, order)], means)
