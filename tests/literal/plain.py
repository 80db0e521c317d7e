"""A Vision Transformer written out in plain torch, slowly: what the literal versions of gradient methods are made from.

`Written` repeats timm's pre-norm block operation by operation and keeps each tensor to which a bias is added. `Toy` is
an anatomy with blocks so simple that closed forms hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.images import Preprocess
from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve


def maps(
    vit: Anatomy, batch: Tensor, name: str, target: Sequence[int] | None = None, seed: int = 0, **s: Any
) -> Tensor:
    """A method's maps [B,h,w] in the model's own precision."""
    targets = None if target is None else Targets(torch.tensor(target)[:, None])
    return compute(vit, batch, [resolve(name, s)], targets, seed)[1][0][:, 0]


def states(vit: Anatomy, batch: Tensor, target: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """x_0..x_L and their gradients by autograd alone, nothing tapped."""
    xs = [vit.embed(batch).detach().requires_grad_()]
    for layer in range(vit.depth):
        xs.append(vit.block(layer, xs[-1]))
    logits = vit.readout(xs[-1])
    score = torch.stack([logits[b, c] for b, c in enumerate(target)]).sum()
    gs = torch.autograd.grad(score, xs)
    return [x.detach() for x in xs], list(gs)


def grid(vit: Anatomy, values: Tensor) -> Tensor:
    """Per-token values to the patch grid, prefix tokens dropped one by one."""
    rows, columns = vit.grid
    out = torch.empty(len(values), rows, columns, dtype=values.dtype)
    for i in range(rows):
        for j in range(columns):
            out[:, i, j] = values[:, vit.prefix + i * columns + j]
    return out


class Written:
    """timm's ViT from the input of block `start` on, with the plain or the libra backward.

    `biased[k]` lists (z, b) for every bias b added in block k (k = depth: behind the last block); `attention` and
    the GELU's `ratio`, by block, are what the libra rule holds constant; `x`, `u` and `pooled` the states of the pass.
    """

    def __init__(self, vit: Anatomy, tokens: Tensor, start: int = 0, libra: bool = False) -> None:
        self.vit, self.libra = vit, libra
        self.net: Any = vit.model
        self.biased: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(vit.depth + 1)]
        self.x: dict[int, Tensor] = {}
        self.attention: dict[int, Tensor] = {}
        self.ratio: dict[int, Tensor] = {}
        self.u: dict[int, Tensor] = {}
        x = tokens.detach().requires_grad_()
        for k in range(start, vit.depth):
            self.x[k] = x
            x = self.block(k, x)
        self.x[vit.depth] = x
        self.logits = self.head(x)

    def keep(self, k: int, z: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            self.biased[k].append((z, bias.detach()))
        return z

    def norm(self, k: int, x: Tensor, module: Any) -> Tensor:
        if isinstance(module, nn.Identity):
            return x
        mean = x.mean(-1, keepdim=True)
        deviation = (((x - mean) ** 2).mean(-1, keepdim=True) + module.eps).sqrt()
        if self.libra:
            deviation = deviation.detach()
        return self.keep(k, (x - mean) / deviation * module.weight + module.bias, module.bias)

    def linear(self, k: int, x: Tensor, module: Any) -> Tensor:
        return self.keep(k, x @ module.weight.T + module.bias, module.bias)

    def block(self, k: int, x: Tensor) -> Tensor:
        block: Any = self.vit.blocks[k]
        heads, (batch, n, width) = self.vit.heads, x.shape
        qkv = self.linear(k, self.norm(k, x, block.norm1), block.attn.qkv)
        q, key, v = (t.reshape(batch, n, heads, width // heads).transpose(1, 2) for t in qkv.split(width, -1))
        attention = (q @ key.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
        if self.libra:
            attention = attention.detach()
        self.attention[k] = attention.detach()
        mixed = (attention @ v).transpose(1, 2).reshape(batch, n, width)
        u = x + self.scale(self.linear(k, mixed, block.attn.proj), block.ls1)
        self.u[k] = u
        h = self.linear(k, self.norm(k, u, block.norm2), block.mlp.fc1)
        cdf = 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        self.ratio[k] = cdf.detach()
        active = h * (cdf.detach() if self.libra else cdf)
        return u + self.scale(self.linear(k, active, block.mlp.fc2), block.ls2)

    @staticmethod
    def scale(x: Tensor, module: Any) -> Tensor:
        return x * module.gamma if hasattr(module, "gamma") else x

    def head(self, x: Tensor) -> Tensor:
        net, end = self.net, self.vit.depth
        x = self.norm(end, x, net.norm)
        pooled = x[:, 0] if net.global_pool == "token" else x[:, self.vit.prefix :].mean(1)
        self.pooled = pooled.detach()
        return self.linear(end, self.norm(end, pooled, net.fc_norm), net.head)

    def score(self, target: Sequence[int]) -> Tensor:
        return torch.stack([self.logits[b, c] for b, c in enumerate(target)])

    def bias_maps(self, target: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """For each block, and the end, the map sum_b sum_d b_d (ds/dz)[i,d]; and what belongs to no token."""
        score = self.score(target).sum()
        per_block = []
        rest = torch.zeros(len(target), dtype=score.dtype)
        for pairs in self.biased:
            total = torch.zeros(self.x[self.vit.depth].shape[:2], dtype=score.dtype)
            for z, b in pairs:
                (g,) = torch.autograd.grad(score, z, retain_graph=True, allow_unused=True)
                if g is None:
                    continue
                if z.ndim == 3:
                    total = total + (g * b).sum(-1)
                else:
                    rest = rest + (g * b).sum(-1)
            per_block.append(total)
        return per_block, rest

    def cat(self, target: Sequence[int]) -> list[Tensor]:
        """sum_d x_l g_l for every block from the start on."""
        layers = sorted(k for k in self.x if k < self.vit.depth)
        gs = torch.autograd.grad(self.score(target).sum(), [self.x[k] for k in layers], retain_graph=True)
        return [(self.x[k] * g).sum(-1).detach() for k, g in zip(layers, gs, strict=True)]


class _ReluBlock(nn.Module):
    """x + W_2 ReLU(W_1 x + b_1) + b_2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.relu(self.fc1(x)))


class Toy(Anatomy):
    """An image's pixels are its tokens (D = channels); blocks are the identity or ReLU MLPs without a norm.

    The head is a linear map of all tokens together (`pooled=False`), or of their mean.
    """

    library = "tests"

    def __init__(self, size: tuple[int, int], width: int = 4, relu: bool = False, pooled: bool = False) -> None:
        torch.manual_seed(3)
        blocks = [_ReluBlock(width) if relu else nn.Identity() for _ in range(2)]
        head = nn.Linear(width * (1 if pooled else size[0] * size[1]), 3)
        net = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": head}).double().eval()
        preprocess = Preprocess(size=size, mean=(0.0,) * width, std=(1.0,) * width)
        super().__init__(
            net,
            name="toy",
            grid=size,
            prefix=0,
            pooling="avg",
            heads=1,
            classes=3,
            preprocess=preprocess,
            channels=width,
        )
        self.pooled = pooled

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.model["blocks"])  # type: ignore[index]

    def embed(self, images: Tensor) -> Tensor:
        return images.flatten(2).transpose(1, 2)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.blocks[index](tokens)

    def features(self, tokens: Tensor) -> Tensor:
        return self.model["head"](tokens.mean(1) if self.pooled else tokens.flatten(1))  # type: ignore[index]

    def images(self, count: int = 2, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, self.channels, *self.grid, generator=generator, dtype=torch.float64)
