"""The random map: a baseline for all methods."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from patchlight.methods.base import Ask, own_passes


@own_passes("random", paper="baseline", ignores_class=True, stochastic=True, nonnegative=True, cost="none")
def random(ask: Ask) -> Tensor:
    """Uniform random values: a baseline for all methods.

    The generator of each image is seeded by `seed` and a checksum of its pixels, so images have different maps, and the
    map changes completely with any change of the image.
    """

    def random_map(image: Tensor) -> Tensor:
        checksum = zlib.crc32(image.float().cpu().contiguous().numpy().tobytes(), ask.seed % 2**32)
        return torch.rand(ask.vit.grid, generator=torch.Generator().manual_seed(checksum), dtype=torch.float64)

    return torch.stack([random_map(image) for image in ask.images.detach()]).to(ask.images)
