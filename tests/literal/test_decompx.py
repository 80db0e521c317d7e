"""DecompX as its paper runs it, forward over N x (N+1) x D vectors, against the one backward (float64, 1e-10)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from tests.families import images, shared
from tests.literal.plain import Written, grid, maps

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
TARGET = [2, 5]
FAMILIES = ["vit", "vit-wide", "deit3", "reg4-gap"]


def model(family: str) -> tuple[Anatomy, Tensor]:
    vit = shared(family, torch.float64)
    return vit, images(vit, 2)


class Forward:
    """V[b,i,j,:]: the part of token i's state that comes from source j; the last source is the bias slot.

    Every module is linear in V once attention, deviations and GELU ratios are held at their values.
    """

    def __init__(self, vit: Anatomy, batch: Tensor, start: int, factor: Tensor | None = None) -> None:
        with torch.no_grad():
            self.vit, self.net = vit, vit.model
            self.run = Written(vit, vit.embed(batch))
            x = self.run.x[start]
            tokens = x.shape[1]
            self.V = torch.zeros(len(x), tokens, tokens + 1, x.shape[2], dtype=x.dtype)
            for j in range(tokens):
                self.V[:, j, j] = x[:, j] if factor is None else x[:, j] * factor[j]
            for k in range(start, vit.depth):
                self.block(k)
                if factor is None:
                    torch.testing.assert_close(self.V.sum(2), self.run.x[k + 1], **CLOSE)
            self.logits = self.head()

    def norm(self, V: Tensor, state: Tensor, module: Any) -> Tensor:
        """(V_j - mean_d V_j) / sqrt(var(x_i) + eps) * gamma; beta to the bias slot."""
        if isinstance(module, torch.nn.Identity):
            return V
        deviation = (state.var(-1, unbiased=False) + module.eps).sqrt()
        out = (V - V.mean(-1, keepdim=True)) / deviation[..., None, None] * module.weight
        return self.with_bias(out, module.bias)

    @staticmethod
    def with_bias(V: Tensor, bias: Tensor) -> Tensor:
        V = V.clone()
        V[..., -1, :] += bias
        return V

    def linear(self, V: Tensor, module: Any) -> Tensor:
        return self.with_bias(V @ module.weight.T, module.bias)

    def block(self, k: int) -> None:
        block: Any = self.vit.blocks[k]
        width, heads = self.V.shape[-1], self.vit.heads
        z = self.norm(self.V, self.run.x[k], block.norm1)
        values = self.with_bias(z @ block.attn.qkv.weight[2 * width :].T, block.attn.qkv.bias[2 * width :])
        mixed = torch.zeros_like(values)
        for h in range(heads):
            part = slice(h * width // heads, (h + 1) * width // heads)
            mixed[..., part] = torch.einsum("bis,bsjd->bijd", self.run.attention[k][:, h], values[..., part])
        self.V = self.V + Written.scale(self.linear(mixed, block.attn.proj), block.ls1)
        z = self.linear(self.norm(self.V, self.run.u[k], block.norm2), block.mlp.fc1)
        z = z * self.run.ratio[k][:, :, None]
        self.V = self.V + Written.scale(self.linear(z, block.mlp.fc2), block.ls2)

    def head(self) -> Tensor:
        """Each source's part of the logits [B,N+1,C]."""
        net: Any = self.net
        V = self.norm(self.V, self.run.x[self.vit.depth], net.norm)
        V = V[:, :1] if net.global_pool == "token" else V[:, self.vit.prefix :].mean(1, keepdim=True)
        return self.linear(self.norm(V, self.run.pooled[:, None], net.fc_norm), net.head)[:, 0]


def sources(vit: Anatomy, batch: Tensor, start: int) -> Tensor:
    logits = Forward(vit, batch, start).logits
    return torch.stack([logits[b, :, c] for b, c in enumerate(TARGET)])


@pytest.mark.parametrize("family", FAMILIES)
def test_reverse_mode_is_the_forward_decomposition(family: str) -> None:
    vit, batch = model(family)
    y = vit.logits(batch)[[0, 1], TARGET]
    forward = {}
    for start in sorted({0, vit.depth // 2, vit.depth - 1}):
        parts = forward[start] = sources(vit, batch, start)
        torch.testing.assert_close(parts.sum(1), y, **CLOSE)
        torch.testing.assert_close(maps(vit, batch, "decompx", TARGET, start=start), grid(vit, parts), **CLOSE)
        assert float(parts[:, -1].abs().min()) > 1e-6
    torch.testing.assert_close(maps(vit, batch, "decompx.plus", TARGET), grid(vit, sum(forward.values())), **CLOSE)
    torch.testing.assert_close(maps(vit, batch, "decompx.skipplus", TARGET), grid(vit, forward[2]), **CLOSE)
    plain = maps(vit, batch, "ixg", TARGET)
    assert float((plain - grid(vit, forward[0])).abs().max()) > 0.05 * float(forward[0].abs().max())


def test_doubling_a_source_doubles_its_part_alone() -> None:
    vit, batch = model("vit")
    factor = torch.ones(vit.tokens, dtype=torch.float64)
    factor[3] = 2
    once, twice = Forward(vit, batch, 1).logits, Forward(vit, batch, 1, factor).logits
    torch.testing.assert_close(twice[:, 3], 2 * once[:, 3], **CLOSE)
    others = [j for j in range(vit.tokens) if j != 3]
    torch.testing.assert_close(twice[:, others], once[:, others], rtol=0, atol=0)


@pytest.mark.parametrize("family", ["vit", "deit3", "siglip", "eva02", "hf-clip"])
def test_equivalences(family: str) -> None:
    """decompx.plus = libra CAT; FullGrad+ under libra = decompx.plus + bias maps; skipplus alike."""
    vit, batch = model(family)

    def same(one: str, other: str) -> None:
        torch.testing.assert_close(maps(vit, batch, one, TARGET), maps(vit, batch, other, TARGET), **CLOSE)

    same("decompx.plus", "ixg.plus.libra")
    same("decompx.plus", "hirescam.plus.libra")
    same("decompx.skipplus", "ixg.skipplus.libra")
    same("decompx.libra", "ixg.libra")
    bias = maps(vit, batch, "fullgrad.libra", TARGET) - maps(vit, batch, "decompx", TARGET)
    total = maps(vit, batch, "decompx.plus", TARGET) + bias
    torch.testing.assert_close(maps(vit, batch, "fullgrad-plus.libra", TARGET), total, **CLOSE)


def test_sum_of_plus_is_depth_times_the_logit_less_the_bias_shares() -> None:
    vit, batch = model("vit-wide")
    y = vit.logits(batch)[[0, 1], TARGET]
    parts = [sources(vit, batch, start) for start in range(vit.depth)]
    prefix = sum(p[:, : vit.prefix].sum(1) for p in parts)
    total = maps(vit, batch, "decompx.plus", TARGET).sum((1, 2)) + prefix
    torch.testing.assert_close(total, vit.depth * y - sum(p[:, -1] for p in parts), **CLOSE)
