"""The random map: the baseline that every method has to beat."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from patchlight.methods.base import Ask, own_passes


@own_passes("random", paper="baseline", ignores_class=True, stochastic=True, nonnegative=True, cost="none")
def random(ask: Ask) -> Tensor:
    """Uniform random values: the baseline that every method has to beat.

    The values are sampled for each image from `seed` and a checksum of its pixels. The same sample for all images would
    make every mean over a data set that of a single map. So this map is as sensitive to its input as a map can be.
    """

    def one(image: Tensor) -> Tensor:
        checksum = zlib.crc32(image.float().cpu().contiguous().numpy().tobytes(), ask.seed % 2**32)
        return torch.rand(ask.vit.grid, generator=torch.Generator().manual_seed(checksum), dtype=torch.float64)

    return torch.stack([one(image) for image in ask.images.detach()]).to(ask.images)
