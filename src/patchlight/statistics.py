"""Statistics over images: the bootstrap as weights, so that any ratio of sums can be resampled at once; and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

K = TypeVar("K")
Mark = Literal["best", "tied", ""]
"""How a method stands to the best."""
SIGNS: dict[Mark, str] = {"best": "*", "tied": "†", "": ""}
FEWEST = 6
"""Images from which on an interval or a difference can be claimed at 95 %.

Of fewer, even all on one side are no evidence: 2 / 2^5 = 6 %.
"""
AT_ONCE = 2**18
"""Numbers of weights that are held at a time."""


def bootstrap_weights(images: int, samples: int = 1000, seed: int = 0) -> Tensor:
    """How often each image is drawn in each resample [S,B] float64: B draws with replacement."""
    return torch.cat(list(_weights(images, samples, seed)))


def bootstrapped(
    statistics: Mapping[K, Callable[[Tensor], Tensor]], images: int, samples: int = 1000, seed: int = 0
) -> dict[K, Tensor]:
    """By name, each statistic [S] of the same resamples; a function gets their weights [s,B], some at a time."""
    found: dict[K, list[Tensor]] = {name: [] for name in statistics}
    for weights in _weights(images, samples, seed):
        for name, statistic in statistics.items():
            found[name].append(statistic(weights))
    return {name: torch.cat(parts) for name, parts in found.items()}


def _weights(images: int, samples: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = max(1, AT_ONCE // max(images, 1))
    for begin in range(0, samples, size):
        weights = torch.zeros(min(size, samples - begin), images, dtype=torch.float64)
        if images:
            drawn = torch.randint(images, tuple(weights.shape), generator=generator)
            weights.scatter_add_(1, drawn, torch.ones((), dtype=torch.float64).expand_as(weights))
        yield weights


def constant(maps: Tensor) -> Tensor:
    """Which maps [...,n] have one value, rounding aside: max - min <= 64 eps max |map|."""
    return maps.amax(-1) - maps.amin(-1) <= 64 * torch.finfo(maps.dtype).eps * maps.abs().amax(-1)


def average_ranks(values: Tensor) -> Tensor:
    """The rank of each value in its row [B,n], 1 the lowest, equal ones sharing their mean rank, in float64."""
    order = values.argsort(1)
    ordered = values.gather(1, order)
    last = tie_ends(ordered)
    first = values.shape[1] - 1 - tie_ends(ordered.flip(1)).flip(1)
    ranks = (first + last).double() / 2 + 1
    return torch.empty_like(ranks).scatter_(1, order, ranks)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation [B] of rows [B,n]; 0 where one of them is constant and so has no order."""
    a, b = (r - r.mean(1, keepdim=True) for r in (average_ranks(a), average_ranks(b)))
    norm = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return (a * b).sum(1) / torch.where(norm > 0, norm, 1)


def tie_ends(ordered: Tensor) -> Tensor:
    """For each element of sorted rows [B,n], the place of the last one equal to it."""
    places = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
    last = F.pad(ordered[:, 1:] != ordered[:, :-1], (0, 1), value=True)
    ends = torch.where(last, places, ordered.shape[1])
    return ends.flip(1).cummin(1).values.flip(1)


def percentiles(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The central interval of a sample, undefined values left out; NaN where nothing is left."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
