"""LRP through timm's ViT, slowly: one image at a time, each operation's relevance from autograd on that operation.

The fast version applies closed forms per block to a whole batch; here every rule is the paper's sentence about one
operation, sums run over the whole tensor of the one image, and nothing is shared between operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy


def divide(a: Tensor, b: Tensor) -> Tensor:
    out = a / (b + 1e-9)
    out[b == 0] = 0
    return out


def through(operation: Callable[..., Tensor], inputs: list[Tensor], R: Tensor) -> list[Tensor]:
    """The z-rule: x * d<Z, S>/dx with S = R / Z, for every input of Z = operation(*inputs)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    Z = operation(*leaves)
    S = divide(R, Z.detach())
    return [x.detach() * g for x, g in zip(leaves, torch.autograd.grad(Z, leaves, S), strict=True)]


def linear(x: Tensor, W: Tensor, R: Tensor, rules: str, alpha: float = 1.0) -> Tensor:
    def part(w1: Tensor, w2: Tensor) -> Tensor:
        px, nx = x.clamp(min=0).requires_grad_(), x.clamp(max=0).requires_grad_()
        Z1, Z2 = F.linear(px, w1), F.linear(nx, w2)
        first, second = (Z1 + Z2, Z1 + Z2) if rules == "ours" else (Z1, Z2)
        S1, S2 = divide(R, first.detach()), divide(R, second.detach())
        (g1,), (g2,) = torch.autograd.grad(Z1, px, S1), torch.autograd.grad(Z2, nx, S2)
        return (px * g1 + nx * g2).detach()

    up, down = W.clamp(min=0), W.clamp(max=0)
    return alpha * part(up, down) - (alpha - 1) * part(down, up)


def add(a: Tensor, b: Tensor, R: Tensor, rules: str) -> tuple[Tensor, Tensor]:
    ra, rb = through(torch.add, [a, b], R)
    if rules == "orig":
        return ra, rb
    sa, sb = ra.sum(), rb.sum()
    fa = divide(sa.abs(), sa.abs() + sb.abs()) * R.sum()
    fb = divide(sb.abs(), sa.abs() + sb.abs()) * R.sum()
    return ra * divide(fa, sa), rb * divide(fb, sb)


def clone(x: Tensor, *R: Tensor) -> Tensor:
    return x * sum(divide(r, x) for r in R)


class Literal:
    """One image [1,C,H,W] of a CLS-pooled timm ViT in float64: forward, G by autograd, then relevance block by block.

    `R[l]` is the relevance of x_l, `RA[l]` and `G[l]` relevance and gradient of attention [H,N,N].
    """

    def __init__(self, vit: Anatomy, image: Tensor, target: int, rules: str) -> None:
        self.vit, self.net, self.image, self.rules = vit, vit.model, image, rules
        net: Any = self.net
        patches = net.patch_embed.proj(image).flatten(2).transpose(1, 2)
        self.tokens = torch.cat([net.cls_token, patches], 1).detach()
        x = (self.tokens + net.pos_embed).detach().requires_grad_()
        self.seen = []
        for block in net.blocks:
            self.seen.append(self._block(block, x))
            x = self.seen[-1]["y"]
        final = net.norm(x)
        logits = net.head(final[:, 0])
        attention = [s["A"] for s in self.seen]
        self.G = [g[0] for g in torch.autograd.grad(logits[0, target], attention)]
        R = torch.zeros_like(logits)
        R[0, target] = 1
        R = linear(final[:, 0].detach(), net.head.weight.detach(), R, rules)
        (R,) = through(lambda t: t[:, 0], [final], R)
        self.R, self.RA = {vit.depth: R}, {}
        for layer in reversed(range(vit.depth)):
            R = self._relevance(net.blocks[layer], {k: t.detach() for k, t in self.seen[layer].items()}, layer, R)
            self.R[layer] = R

    def _block(self, block: Any, x: Tensor) -> dict[str, Tensor]:
        n = block.norm1(x)
        q, k, v = block.attn.qkv(n).reshape(1, x.shape[1], 3, self.vit.heads, -1).permute(2, 0, 3, 1, 4)
        A = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5, -1)
        o = torch.einsum("bhij,bhjd->bhid", A, v)
        mixed = o.transpose(1, 2).reshape(x.shape)
        attended = block.ls1(block.attn.proj(mixed))
        u = x + attended
        m = block.norm2(u)
        a = block.mlp.act(block.mlp.fc1(m))
        added = block.ls2(block.mlp.fc2(a))
        seen = {"x": x, "n": n, "q": q, "k": k, "v": v, "A": A, "o": o, "mixed": mixed, "attended": attended}
        return seen | {"u": u, "m": m, "a": a, "added": added, "y": u + added}

    def _relevance(self, block: Any, t: dict[str, Tensor], layer: int, R: Tensor) -> Tensor:
        def weight(part: Any) -> Tensor:
            return part.weight.detach()

        Ru, Ra = add(t["u"], t["added"], R, self.rules)
        Ra = linear(t["a"], weight(block.mlp.fc2), Ra, self.rules)
        Ra = linear(t["m"], weight(block.mlp.fc1), Ra, self.rules)
        Rx, Rt = add(t["x"], t["attended"], clone(t["u"], Ru, Ra), self.rules)
        Ro = linear(t["mixed"], weight(block.attn.proj), Rt, self.rules)
        Ro = Ro.reshape(1, Ro.shape[1], self.vit.heads, -1).transpose(1, 2)
        RA, Rv = through(lambda A, v: torch.einsum("bhij,bhjd->bhid", A, v), [t["A"], t["v"]], Ro)
        RA, Rv = RA / 2, Rv / 2
        self.RA[layer] = RA[0]
        Rq, Rk = through(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), [t["q"], t["k"]], RA)
        parts = [r.transpose(1, 2).reshape(t["x"].shape) for r in (Rq / 2, Rk / 2, Rv)]
        Rn = linear(t["n"], weight(block.attn.qkv), torch.cat(parts, -1), self.rules)
        return clone(t["x"], Rx, Rn)

    def transatt(self, start: int = 0, gradient: bool = True) -> Tensor:
        """The CLS row of prod (I + mean_h ReLU(G R_A)) as full matrices, patches only."""
        C = torch.eye(self.vit.tokens, dtype=self.image.dtype)
        for layer in range(start, self.vit.depth):
            weighed = self.G[layer] * self.RA[layer] if gradient else self.RA[layer]
            C = (torch.eye(len(C), dtype=C.dtype) + weighed.clamp(min=0).mean(0)) @ C
        return C[0, self.vit.prefix :].reshape(self.vit.grid)

    def partial(self, layer: int) -> Tensor:
        return self.RA[layer].clamp(min=0).mean(0)[0, self.vit.prefix :].reshape(self.vit.grid)

    def pixels(self) -> Tensor:
        """z^B through the patch projection, one output channel's worth of products at a time by autograd."""
        net: Any = self.net
        R, _ = add(self.tokens, net.pos_embed.detach(), self.R[0], self.rules)
        R = R[:, self.vit.prefix :].transpose(1, 2).reshape(1, -1, *self.vit.grid)
        W, stride = net.patch_embed.proj.weight.detach(), net.patch_embed.proj.stride
        lowest, highest = float(self.image.min()), float(self.image.max())
        x, low, high = self.image.clone(), torch.full_like(self.image, lowest), torch.full_like(self.image, highest)
        for t in (x, low, high):
            t.requires_grad_()
        Z = F.conv2d(x, W, stride=stride) - F.conv2d(low, W.clamp(min=0), stride=stride)
        Z = Z - F.conv2d(high, W.clamp(max=0), stride=stride) + 1e-9
        gradients = torch.autograd.grad(Z, [x, low, high], R / Z.detach())
        return sum(t.detach() * g for t, g in zip((x, low, high), gradients, strict=True)).sum(1)[0]
