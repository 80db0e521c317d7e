"""Statistics over images: the bootstrap, as weights of images, so that any ratio of sums can be resampled at once."""

from __future__ import annotations

import torch
from torch import Tensor


def bootstrap_weights(images: int, samples: int = 1000, seed: int = 0) -> Tensor:
    """How often each image is drawn in each resample [S,B] float64: B draws with replacement."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(images, (samples, images), generator=generator)
    weights = torch.zeros(samples, images, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights))


def percentiles(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The central interval of a sample, undefined values left out; NaN where nothing is left."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
