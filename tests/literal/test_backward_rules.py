"""Backward rules on a tiny ViT: the relevance of every token, passed down as the papers say.

One image at a time, in float64 and without a gradient: R starts as the class's logit, and each operation hands its R on
by its rule. Input times gradient under a rule must be the R that arrives at the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.rules import gamma_product
from tests.close import close
from tests.completeness import totals
from tests.families import CLASSES, images, randomise
from tests.literal.plain import maps
from tests.reference import deit_tiny, inputs, reference

RULES = ("libra", "conservative", "attnlrp", "gamma", "lxt")
GAMMAS = {"gamma": (0.05, 100.0), "lxt": (0.05, 0.25)}
TARGET = [1, 4]
CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}


@cache
def model() -> tuple[Anatomy, Tensor]:
    torch.manual_seed(0)
    sizes = {"img_size": (32, 48), "embed_dim": 12, "depth": 3, "num_heads": 2, "mlp_ratio": 2, "init_values": 0.5}
    made = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **sizes)
    vit = pl.wrap(randomise(made).double(), name="tiny")
    return vit, images(vit, 2)


class Passed:
    """The relevance R[l] [N,D] of the tokens entering each block, R_image [C,H,W], and attention A[l], G[l] [H,N,N].

    G = ds/dA is the relevance of the attention's product with the values, R_A / A, before a rule halves it.
    """

    def __init__(self, vit: Anatomy, image: Tensor, target: int, rule: str) -> None:
        self.net: Any = vit.model
        self.rule, self.heads = rule, vit.heads
        self.gamma, self.conv_gamma = GAMMAS.get(rule, (0.0, 0.0))
        self.R: dict[int, Tensor] = {}
        self.A: dict[int, Tensor] = {}
        self.G: dict[int, Tensor] = {}
        with torch.no_grad():
            patches = image.unfold(1, 16, 16).unfold(2, 16, 16).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
            projection = self.net.patch_embed.proj
            x = patches @ projection.weight.flatten(1).T + projection.bias
            x = torch.cat([self.net.cls_token[0], x]) + self.net.pos_embed[0]
            seen = []
            for block in self.net.blocks:
                seen.append(self.forward(block, x))
                x = seen[-1]["y"]
            pooled = self.net.norm(x)[:1]
            logits = self.net.head(pooled)
            R = torch.zeros_like(logits)
            R[0, target] = logits[0, target]
            R = self.linear(pooled, self.net.head, R, self.gamma)
            R = torch.cat([self.norm(x[:1], self.net.norm, R), torch.zeros_like(x[1:])])
            for layer in reversed(range(vit.depth)):
                R = self.block(layer, self.net.blocks[layer], seen[layer], R)
                self.R[layer] = R
            weight, positioned = projection.weight.flatten(1), seen[0]["x"][1:]
            embedded = patches @ weight.T + projection.bias
            share = self.weighted(patches, weight, projection.bias, R[1:] * embedded / positioned, self.conv_gamma)
            rows, columns = vit.grid
            folded = share.view(rows, columns, 3, 16, 16).permute(2, 0, 3, 1, 4)
            self.R_image = folded.reshape(3, 16 * rows, 16 * columns)

    def forward(self, block: Any, x: Tensor) -> dict[str, Tensor]:
        n = block.norm1(x)
        q, k, v = block.attn.qkv(n).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        S = q @ k.mT / math.sqrt(q.shape[-1])
        A = S.exp() / S.exp().sum(-1, keepdim=True)
        o = A @ v
        mixed = o.transpose(0, 1).flatten(1)
        attended = block.attn.proj(mixed) * block.ls1.gamma
        u = x + attended
        m = block.norm2(u)
        h = block.mlp.fc1(m)
        a = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        added = block.mlp.fc2(a) * block.ls2.gamma
        parts = {"x": x, "n": n, "q": q, "k": k, "v": v, "S": S, "A": A, "o": o, "mixed": mixed, "attended": attended}
        return parts | {"u": u, "m": m, "h": h, "a": a, "added": added, "y": u + added}

    @staticmethod
    def share(x: Tensor, weight: Tensor, z: Tensor, R: Tensor) -> Tensor:
        """The z-rule: R_i = sum_j x_i W_ji / z_j R_j, z with all that was added to it."""
        return x * ((R / z) @ weight)

    @staticmethod
    def weighted(x: Tensor, weight: Tensor, bias: Tensor, R: Tensor, gamma: float) -> Tensor:
        """The gamma rule: R_i = sum_j P_ji / z_j R_j; P_ji = x_i W_ji, 1 + gamma times if it has the sign of y_j."""
        y = x @ weight.T + bias
        P = x[:, None] * weight
        P = P * (1 + gamma * (P * y[..., None] > 0).double())
        z = P.sum(-1) + bias * (1 + gamma * (bias * y > 0).double())
        return torch.einsum("nji,nj->ni", P, R / z)

    def linear(self, x: Tensor, part: Any, R: Tensor, gamma: float = 0.0) -> Tensor:
        if gamma:
            return self.weighted(x, part.weight, part.bias, R, gamma)
        return self.share(x, part.weight, x @ part.weight.T + part.bias, R)

    def norm(self, x: Tensor, part: Any, R: Tensor) -> Tensor:
        """The LN-rule, R(x_i) = sum_j x_i (d_ij - 1/D) / (x_j - mean) R_j; the bias keeps its share before it."""
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + part.eps).sqrt() * part.weight
        R = R * scaled / (scaled + part.bias)
        each = torch.eye(x.shape[-1], dtype=x.dtype) - 1 / x.shape[-1]
        return x * ((R / centred) @ each)

    def activation(self, h: Tensor, a: Tensor, R: Tensor) -> Tensor:
        """The identity rule; Ali et al. have none, so that a GELU passes its derivative, h f'(h) / f(h)."""
        if self.rule != "conservative":
            return R
        density = (-h.square() / 2).exp() / math.sqrt(2 * math.pi)
        return h * (a / h + h * density) / a * R

    def attention(self, layer: int, t: dict[str, Tensor], R: Tensor) -> Tensor:
        """From R of the heads' outputs to R of queries, keys and values, side by side as the linear map has them."""
        q, k, v, S, A, o = (t[name] for name in "qkvSAo")
        R = R.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        R_A = A * torch.einsum("hid,hjd->hij", R / o, v)
        self.A[layer], self.G[layer] = A, R_A / A
        R_v = v * torch.einsum("hij,hid->hjd", A, R / o)
        if self.rule != "attnlrp":  # the attention is a constant
            R_q = R_k = torch.zeros_like(q)
        else:  # half of a product to each factor, twice; a softmax by its Taylor expansion
            R_A, R_v = R_A / 2, R_v / 2
            R_S = S * (R_A - A * R_A.sum(-1, keepdim=True))
            each = R_S / (2 * S) / math.sqrt(q.shape[-1])
            R_q = q * torch.einsum("hij,hjd->hid", each, k)
            R_k = k * torch.einsum("hij,hid->hjd", each, q)
        return torch.cat([one.transpose(0, 1).flatten(1) for one in (R_q, R_k, R_v)], 1)

    def block(self, layer: int, part: Any, t: dict[str, Tensor], R: Tensor) -> Tensor:
        """A sum shares R out in proportion to its terms; a scale passes it on."""
        R_u, R_added = t["u"] / t["y"] * R, t["added"] / t["y"] * R
        R_h = self.activation(t["h"], t["a"], self.linear(t["a"], part.mlp.fc2, R_added, self.gamma))
        R_u = R_u + self.norm(t["u"], part.norm2, self.linear(t["m"], part.mlp.fc1, R_h, self.gamma))
        R_x, R_attended = t["x"] / t["u"] * R_u, t["attended"] / t["u"] * R_u
        R_qkv = self.attention(layer, t, self.linear(t["mixed"], part.attn.proj, R_attended))
        return R_x + self.norm(t["x"], part.norm1, self.linear(t["n"], part.attn.qkv, R_qkv))


@cache
def passed(rule: str) -> list[Passed]:
    vit, batch = model()
    return [Passed(vit, image, target, rule) for image, target in zip(batch, TARGET, strict=True)]


def on_patches(rows: list[Tensor]) -> Tensor:
    return torch.stack([row[1:].view(2, 3) for row in rows])


@pytest.mark.parametrize("rule", RULES)
def test_input_times_gradient_is_the_relevance_that_arrives(rule: str) -> None:
    vit, batch = model()
    for layer in range(vit.depth):
        expected = on_patches([one.R[layer].sum(-1) for one in passed(rule)])
        found = maps(vit, batch, f"ixg.{rule}", TARGET, start=layer)
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_plus_sums_it_over_the_blocks(rule: str) -> None:
    vit, batch = model()
    each = [torch.stack([R.sum(-1) for R in one.R.values()]) for one in passed(rule)]
    torch.testing.assert_close(
        maps(vit, batch, f"ixg.plus.{rule}", TARGET), on_patches([rows.sum(0) for rows in each]), **CLOSE
    )
    later = on_patches([one.R[2].sum(-1) for one in passed(rule)])
    torch.testing.assert_close(maps(vit, batch, f"ixg.skipplus.{rule}", TARGET), later, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_pixels_have_their_share_of_it(rule: str) -> None:
    vit, batch = model()
    expected = torch.stack([one.R_image.sum(0) for one in passed(rule)])
    torch.testing.assert_close(maps(vit, batch, f"ixg.{rule}", TARGET, level="pixel"), expected, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_attention_has_the_gradient_of_the_rule(rule: str) -> None:
    """genatt: r <- r + r mean_h(relu(A G)), from the last block to the first, r at first the class token."""
    vit, batch = model()
    rows = []
    for one in passed(rule):
        row = torch.eye(vit.tokens, dtype=torch.float64)[0]
        for layer in reversed(range(vit.depth)):
            row = row + row @ (one.A[layer] * one.G[layer]).relu().mean(0)
        rows.append(row)
    torch.testing.assert_close(maps(vit, batch, f"genatt.{rule}", TARGET), on_patches(rows), **CLOSE)


def test_the_rules_differ() -> None:
    """Else the comparisons above could all be of one rule."""
    vit, batch = model()
    names = [f"ixg{rule}" for rule in ("", *(f".{rule}" for rule in RULES))]
    found = [maps(vit, batch, name, TARGET, level="pixel") for name in names]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert (one - other).abs().max() > 0.02 * one.abs().max()


def by_gamma(
    x: list[float],
    weight: list[list[float]],
    gamma: float,
    bias: list[float] | None = None,
    seen: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The relevance of each input of a linear map, if that of each output is the output."""
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    constant = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    y = gamma_product(
        torch.nn.functional.linear, leaf, torch.tensor(weight, dtype=torch.float64), constant, gamma, seen
    )
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    return leaf.detach() * gradient


@pytest.mark.parametrize(
    ("weight", "x", "gamma", "relevance"),
    [
        ([2, -1], [1, 1], 1.0, [4 / 3, -1 / 3]),
        ([2, -1], [1, 1], 0.0, [2, -1]),
        ([2, -1], [1, 1], 1e9, [1, 0]),
        ([2, -1], [1, -1], 7.0, [2, 1]),
        ([-2, 1], [1, 1], 1.0, [-4 / 3, 1 / 3]),
        ([1, -1], [1, 1], 1.0, [0, 0]),
    ],
)
def test_the_gamma_rule_by_hand(weight: list[float], x: list[float], gamma: float, relevance: list[float]) -> None:
    torch.testing.assert_close(by_gamma(x, [weight], gamma), torch.tensor(relevance).double(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("gamma", [0.05, 1.0, 100.0])
def test_the_gamma_rule_keeps_the_sum_and_the_bias_its_share(gamma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).double() for shape in ((6,), (4, 6), (4,)))
    y = weight @ x
    torch.testing.assert_close(by_gamma(x.tolist(), weight.tolist(), gamma).sum(), y.sum())
    y = y + bias
    expected = Passed.weighted(x[None], weight, bias, y[None], gamma)[0]
    shares: list[Tensor] = []
    found = by_gamma(x.tolist(), weight.tolist(), gamma, bias.tolist(), shares.append)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum() + shares[0].sum(), y.sum())


@pytest.mark.parametrize("rule", ["libra", "gamma", "lxt"])
def test_tokens_and_biases_add_up_to_the_score(rule: str) -> None:
    vit, batch = model()
    found, score = totals(vit, batch, rule)
    torch.testing.assert_close(found, score, **CLOSE)


@pytest.mark.parametrize("operator", ["plain", "libra", "attnlrp"])
def test_positions_complete_the_pixels(operator: str) -> None:
    vit, batch = model()
    tokens = maps(vit, batch, "ixg" if operator == "plain" else f"ixg.{operator}", TARGET)

    def pooled(position: str) -> Tensor:
        found = maps(vit, batch, "pa-lrp", TARGET, operator=operator, position=position)
        return found.unflatten(1, (2, 16)).unflatten(3, (3, 16)).sum((2, 4))

    torch.testing.assert_close(pooled("add"), tokens, **CLOSE)
    torch.testing.assert_close(pooled("only") + pooled("drop"), tokens, **CLOSE)
    net: Any = vit.model
    gradient = torch.stack([torch.autograd.grad(score, leaf)[0][0, 1:] for score, leaf in _scores(vit, batch)])
    added = (net.pos_embed[0, 1:] + net.patch_embed.proj.bias).detach()
    if operator == "plain":
        torch.testing.assert_close(pooled("only").flatten(1), (gradient * added).sum(-1), **CLOSE)


def _scores(vit: Anatomy, batch: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The explained logit of each image, and the tokens that enter block 0."""
    leaves = [vit.embed(image[None]).detach().requires_grad_() for image in batch]
    return [(vit.readout(vit.run(leaf))[0, target], leaf) for leaf, target in zip(leaves, TARGET, strict=True)]


@pytest.mark.parametrize("image", range(4))
def test_lxt_is_what_its_authors_code_gives(image: int) -> None:
    saved = reference("lxt_cplrp_gamma_conv0.25_lin0.05")
    one, target = inputs()[image : image + 1], [int(saved["target"][image])]
    close(maps(deit_tiny(), one, "ixg.lxt", target, level="pixel"), saved["maps"][image], 5e-5)
