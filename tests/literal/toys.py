"""A model that is linear in its pixels: logit c is the sum over the shown patches of <w_c, patch>."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.images import Preprocess


class Linear(Anatomy):
    """No blocks; token i of an image is what its patch adds to each logit, and the readout sums the tokens."""

    hierarchical = True

    def __init__(self, weight: Tensor, patch: int = 4) -> None:
        classes, channels, height, width = weight.shape
        model = nn.Module()
        model.weight = nn.Parameter(weight.double())
        grid, preprocess = (height // patch, width // patch), Preprocess(size=(height, width))
        super().__init__(
            model,
            name="linear",
            grid=grid,
            prefix=0,
            pooling="avg",
            heads=1,
            classes=classes,
            preprocess=preprocess,
            channels=channels,
        )
        self.patch = patch

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        each = images[:, None] * self.model.weight
        return each.unflatten(-2, (-1, self.patch)).unflatten(-1, (-1, self.patch)).sum((2, 4, 6)).flatten(2).mT

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(index)

    def features(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1)


def linear(classes: int = 5, height: int = 12, width: int = 16, seed: int = 0) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    return Linear(torch.randn(classes, 3, height, width, generator=generator, dtype=torch.float64))
