"""The plain ViT that `pocket` is: the state dict, operations and initial weights of timm's `VisionTransformer`."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PocketPatches(nn.Module):
    """Square patches, side by side, projected to tokens."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.img_size, self.patch_size = (img_size, img_size), (patch_size, patch_size)
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)

    def feat_ratio(self, as_scalar: bool = False) -> tuple[int, int]:
        return self.patch_size

    def dynamic_feat_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self.patch_size[0], size[1] // self.patch_size[1]

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.img_size:
            raise ValueError(f"Images have size {list(x.shape[2:])}; this model takes {list(self.img_size)}.")
        return cast(Tensor, self.proj(x)).flatten(2).transpose(1, 2)


class PocketAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0))
        return cast(Tensor, self.proj(mixed.transpose(1, 2).reshape(x.shape)))


class PocketMlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(self.act(self.fc1(x))))


class PocketBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, dim: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = PocketAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = PocketMlp(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class PocketViT(nn.Module):
    """A ViT with a class token, learned positions and a linear classifier; the arguments are timm's."""

    global_pool, num_prefix_tokens = "token", 1

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
    ) -> None:
        super().__init__()
        self.num_classes, self.num_features = num_classes, embed_dim
        self.patch_embed = PocketPatches(img_size, patch_size, in_chans, embed_dim)
        rows, columns = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + rows * columns, embed_dim))
        hidden = int(embed_dim * mlp_ratio)
        self.blocks = nn.Sequential(*(PocketBlock(embed_dim, num_heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)
        _init_normal(self.pos_embed)
        nn.init.normal_(self.cls_token, std=1e-6)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                _init_normal(layer.weight)
                nn.init.zeros_(layer.bias)

    def get_classifier(self) -> nn.Module:
        return self.head

    def embed(self, images: Tensor) -> Tensor:
        """The tokens [B,N,D] that enter the first block."""
        patches = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1) + self.pos_embed

    def forward_features(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.blocks(self.embed(images))))

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        return tokens[:, 0] if pre_logits else cast(Tensor, self.head(tokens[:, 0]))

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))


def _init_normal(weight: Tensor) -> None:
    """Normally distributed numbers within [-2, 2], sampled in timm's order, which differs from torch's."""
    with torch.no_grad():
        weight.uniform_(-1, 1).erfinv_().mul_(0.02 * math.sqrt(2)).clamp_(-2, 2)
