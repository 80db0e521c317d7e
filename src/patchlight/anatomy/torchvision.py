"""Anatomy of torchvision's VisionTransformer (`vit_b_16` and its kin)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, Parts
from patchlight.anatomy.timm import imagenet_labels
from patchlight.errors import PatchlightError
from patchlight.images import Preprocess


class TorchvisionAnatomy(Anatomy):
    """torchvision's ViT: attention is torch's MultiheadAttention, seen at its outer function."""

    library = "torchvision"

    def __init__(self, model: Any, name: str | None = None, labels: Sequence[str] | None = None, **about: Any) -> None:
        last = [m for m in model.heads.modules() if isinstance(m, nn.Linear)]
        if not last:
            raise PatchlightError(f"{name or 'this model'} has no classifier; nothing to explain")
        classes, side = last[-1].out_features, int(model.image_size)
        about.setdefault("preprocess", Preprocess((side, side), crop_pct=0.875, interpolation="bilinear"))
        super().__init__(
            model,
            name=name or type(model).__name__,
            grid=(side // model.patch_size, side // model.patch_size),
            prefix=1,
            pooling="cls",
            heads=model.encoder.layers[0].num_heads,
            classes=classes,
            labels=labels if labels is not None else imagenet_labels(classes),
            **about,
        )

    @property
    def _net(self) -> Any:
        return self.model

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self._net.encoder.layers)

    def embed(self, images: Tensor) -> Tensor:
        patches = self._net._process_input(images)
        cls = self._net.class_token.expand(patches.shape[0], -1, -1)
        return cast(Tensor, torch.cat([cls, patches], 1) + self._net.encoder.pos_embedding)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.blocks[index](tokens))

    def readout(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self._net.heads(self._net.encoder.ln(tokens)[:, 0]))

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        return Parts(block.ln_1, block.ln_2, block.self_attention.out_proj)


def read_torchvision(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of a torchvision VisionTransformer, or None."""
    from torchvision.models import VisionTransformer

    return TorchvisionAnatomy(model, **about) if isinstance(model, VisionTransformer) else None
