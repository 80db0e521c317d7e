"""Blocks of a plain ViT written out, of which the attention can be differentiated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy


class Opened:
    """timm's plain blocks written out, with as many heads as given.

    `attention` [B,H,N,N] of the last block run is part of a graph; q, k, v are its [B,H,N,d], o its output [B,N,D], all
    heads side by side.
    """

    def __init__(self, vit: Anatomy, batch: Tensor, heads: int | None = None) -> None:
        self.vit, self.net, self.heads = vit, vit.model, vit.heads if heads is None else heads
        self.x = vit.embed(batch).detach()

    def norm(self, x: Tensor, module: Any) -> Tensor:
        if isinstance(module, torch.nn.Identity):
            return x
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (variance + module.eps).sqrt() * module.weight + module.bias

    def block(self, layer: int, x: Tensor) -> Tensor:
        block: Any = self.net.blocks[layer]  # type: ignore[index,union-attr]
        scaled = (getattr(block, name, None) for name in ("ls1", "ls2"))
        scale1, scale2 = (getattr(scale, "gamma", 1.0) for scale in scaled)
        n, width = self.norm(x, block.norm1), x.shape[-1] // self.heads
        qkv = n @ block.attn.qkv.weight.T + block.attn.qkv.bias
        q, k, v = (t.unflatten(-1, (self.heads, width)).transpose(1, 2) for t in qkv.chunk(3, -1))
        self.q, self.k, self.v = q, k, v
        self.attention = (q @ k.mT / math.sqrt(width)).softmax(-1)
        if not self.attention.requires_grad:
            self.attention.requires_grad_()
        self.o = (self.attention @ v).transpose(1, 2).flatten(2)
        u = x + scale1 * (self.o @ block.attn.proj.weight.T + block.attn.proj.bias)
        h = self.norm(u, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        return u + scale2 * (F.gelu(h) @ block.mlp.fc2.weight.T + block.mlp.fc2.bias)

    def head(self, pooled: Tensor) -> Tensor:
        """Logits of one vector that stands for all tokens: with equal tokens, norm and pooling commute."""
        net: Any = self.net
        return self.norm(self.norm(pooled, net.norm), net.fc_norm) @ net.head.weight.T + net.head.bias

    def pooled(self, y: Tensor) -> Tensor:
        """Logits as the model pools, its norm where it has it."""
        net: Any = self.net
        y = self.norm(y, net.norm)
        pooled = y[:, 0] if net.global_pool == "token" else y[:, self.vit.prefix :].mean(1)
        return self.norm(pooled, net.fc_norm) @ net.head.weight.T + net.head.bias
