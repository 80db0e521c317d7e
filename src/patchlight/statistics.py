"""Statistics over images: the bootstrap as weights, so that any ratio of sums can be resampled at once; and ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def bootstrap_weights(images: int, samples: int = 1000, seed: int = 0) -> Tensor:
    """How often each image is drawn in each resample [S,B] float64: B draws with replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(images, (samples, images), generator=generator)
    weights = torch.zeros(samples, images, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights))


def average_ranks(values: Tensor) -> Tensor:
    """The rank of each value in its row [B,n], 1 the lowest, equal ones sharing their mean rank, in float64."""
    order = values.argsort(1)
    ordered = values.gather(1, order)
    last = tie_ends(ordered)
    first = values.shape[1] - 1 - tie_ends(ordered.flip(1)).flip(1)
    ranks = (first + last).double() / 2 + 1
    return torch.empty_like(ranks).scatter_(1, order, ranks)


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
