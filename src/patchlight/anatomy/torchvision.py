"""Anatomy of torchvision's VisionTransformer (`vit_b_16` and related)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Ends, Parts
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.timm import imagenet_labels
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import Preprocess


class TorchvisionAnatomy(Anatomy):
    """torchvision's ViT, whose attention is torch's MultiheadAttention."""

    library = "torchvision"

    def __init__(self, model: Any, name: str | None = None, labels: Sequence[str] | None = None, **about: Any) -> None:
        last = [m for m in model.heads.modules() if isinstance(m, nn.Linear)]
        classes, side = last[-1].out_features if last else 0, int(model.image_size)
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
    def blocks(self) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self.net.encoder.layers)

    def embed(self, images: Tensor) -> Tensor:
        patches = self.net._process_input(images)
        cls = self.net.class_token.expand(patches.shape[0], -1, -1)
        return cast(Tensor, torch.cat([cls, patches], 1) + self.net.encoder.pos_embedding)

    def projection(self) -> nn.Module | None:
        return cast(nn.Module, self.net.conv_proj)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.blocks[index](tokens))

    def features(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.net.encoder.ln(tokens)[:, 0])

    def classify(self, features: Tensor) -> Tensor:
        return cast(Tensor, self.net.heads(features))

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        attention = block.self_attention
        return Parts(
            block.ln_1,
            block.ln_2,
            attention.out_proj,
            lambda: attention.in_proj_weight.chunk(3)[2],
            qkv=lambda: (attention.in_proj_weight, attention.in_proj_bias),
            fc1=block.mlp[0],
            activation=block.mlp[1],
            fc2=block.mlp[3],
        )

    def own_ends(self) -> Ends | None:
        net = self.net
        heads = list(net.heads) if isinstance(net.heads, nn.Sequential) else [net.heads]
        known = len(heads) == 1 and isinstance(heads[0], nn.Linear | nn.Identity)
        if not isinstance(net.conv_proj, nn.Conv2d) or not known:
            return None
        return Ends(net.conv_proj, net.class_token, net.encoder.pos_embedding, net.encoder.ln, heads[0])


def create_torchvision(request: LoadRequest) -> nn.Module:
    """Build one of torchvision's Vision Transformers by its name."""
    from torchvision import models

    names = [n for n in models.list_models() if n.startswith("vit_")]
    if request.name not in names:
        hint = nearest(request.name, names)
        raise PatchlightError(f"torchvision has no Vision Transformer called '{request.name}'; {hint}")
    options = request.with_classes("num_classes", "heads.head.weight")
    model: nn.Module = models.get_model(request.name, weights="DEFAULT" if request.pretrained else None, **options)
    return model


@register_family("torchvision", package="torchvision", prefix="torchvision", create=create_torchvision)
def read_torchvision(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of a torchvision VisionTransformer, or None."""
    from torchvision.models import VisionTransformer

    return TorchvisionAnatomy(model, **about) if isinstance(model, VisionTransformer) else None
