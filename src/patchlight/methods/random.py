"""The random map: the floor every method has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from patchlight.registry import Ask, method


@method("random", paper="baseline", class_specific=False, stochastic=True, nonnegative=True, cost="none")
def random(ask: Ask) -> Tensor:
    """Uniform noise on the patch grid, the same for every image: its generator is seeded by `seed` alone."""
    generator = torch.Generator().manual_seed(ask.seed)
    noise = torch.rand(ask.vit.grid, generator=generator, dtype=torch.float64)
    return noise.to(ask.images).expand(len(ask.images), -1, -1)
