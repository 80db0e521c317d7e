"""Layer-wise relevance propagation through plain ViTs: LRP, partial LRP and TransAtt.

The rules are applied block by block to tensors that are computed again in float64 from the tokens entering a block: on
real weights the relevance pass is chaotic in float32. Methods based on layer-wise relevance propagation may be covered
by patents in some places; see to it that your use is allowed where you are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.base import Affine, Anatomy, Ends, Parts, affine, linear
from patchlight.evidence.passes import Pass
from patchlight.methods.base import Ask, Level, register_method
from patchlight.methods.compositions import ADDITIVE, LAST
from patchlight.registry import Settings
from patchlight.targets import score_of

Rules = Literal["ours", "orig"]
STABILISER = 1e-9


def over(a: Tensor, b: Tensor) -> Tensor:
    """a / (b + 1e-9), whatever the sign of b; 0 where b is 0."""
    return a / torch.where(b == 0, torch.inf, b + STABILISER)


def linear_rule(x: Tensor, weight: Tensor, R: Tensor, rules: Rules) -> Tensor:
    """The alpha = 1 rule of z = W x, biases ignored: only products x_i W_ji > 0 carry relevance.

    `ours`: R_i = sum_j (x_i W_ji)^+ R_j / sum_k (x_k W_jk)^+. `orig` has one denominator for positive and one for
    negative inputs, so that it gives about twice R.
    """
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    positive, negative = F.linear(x.clamp(min=0), up), F.linear(x.clamp(max=0), down)
    if rules == "ours":
        share = over(R, positive.add_(negative))
        return x * torch.where(x > 0, share @ up, share @ down)
    return x * torch.where(x > 0, over(R, positive) @ up, over(R, negative) @ down)


def add_rule(a: Tensor, b: Tensor, R: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Relevance of the terms of a + b: a R / (a + b) and b R / (a + b).

    `ours` rescales each to its share of |sum r_a| + |sum r_b|, of sum R in all; the sums are over one sample.
    """
    share = over(R, a + b)
    ra, rb = a * share, b * share
    if rules == "orig":
        return ra, rb
    axes = tuple(range(1, R.ndim))
    sa, sb, total = (t.sum(axes, keepdim=True) for t in (ra, rb, R))
    both = sa.abs() + sb.abs()
    return ra * over(over(sa.abs(), both) * total, sa), rb * over(over(sb.abs(), both) * total, sb)


def clone_rule(x: Tensor, *R: Tensor) -> Tensor:
    """Relevance of a tensor that was used several times."""
    return x * sum(over(r, x) for r in R)


def product_rule(X: Tensor, Y: Tensor, Z: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of the factors of Z = X Y, half to each: X (S Y^T) / 2 and Y (X^T S) / 2 with S = R / Z."""
    share = over(R, Z) / 2
    return X * (share @ Y.transpose(-2, -1)), Y * (X.transpose(-2, -1) @ share)


def pixel_rule(images: Tensor, weight: Tensor, R: Tensor, stride: Any) -> Tensor:
    """The z^B rule of the patch projection, from R [B,D,h,w]; its bounds are an image's smallest and largest value."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    up, down = weight.clamp(min=0), weight.clamp(max=0)
    terms = ((images, weight), (-low.expand_as(images), up), (-high.expand_as(images), down))
    share = R / (sum(F.conv2d(x, w, stride=stride) for x, w in terms) + STABILISER)
    return torch.stack([x * F.conv_transpose2d(share, w, stride=stride) for x, w in terms]).sum(0)


class Inside(NamedTuple):
    """What a block computes, from the tokens x that enter it to y."""

    x: Tensor
    n: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    products: Tensor
    A: Tensor
    o: Tensor
    mixed: Tensor
    attended: Tensor
    u: Tensor
    m: Tensor
    a: Tensor
    added: Tensor
    y: Tensor


class Block:
    """A pre-norm block by its parts, with their weights in the pass's type; the model's own are never touched.

    It is written out, and not run as the model has it under taps whose backward is relevance: the rules are those of
    whole maps (an adapter's several products are one), of products before they are scaled, and of skips, which the
    functions a block calls do not tell apart; what a tap does not know would pass a gradient on in silence, where
    `Parts` refuses; and the weights of one block at a time, not of the model, are held in float64.
    """

    def __init__(self, parts: Parts, heads: int, like: Tensor) -> None:
        assert parts.qkv is not None
        self.parts, self.heads = parts, heads
        self.qkv = Affine(*parts.qkv()).to(like)
        self.out, self.fc1, self.fc2 = (linear(p).to(like) for p in (parts.out, parts.fc1, parts.fc2))
        self.scale1, self.scale2 = (1.0 if s is None else s.detach().to(like) for s in (parts.scale1, parts.scale2))

    def __call__(self, x: Tensor) -> Inside:
        assert self.parts.activation is not None
        n = _norm(self.parts.norm1, x)
        q, k, v = self.qkv(n).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        products = q @ k.transpose(-2, -1)
        A = (products * q.shape[-1] ** -0.5).softmax(-1)
        o = A @ v
        mixed = o.transpose(1, 2).flatten(2)
        attended = self.out(mixed) * self.scale1
        u = x + attended
        m = _norm(self.parts.norm2, u)
        a = self.parts.activation(self.fc1(m))
        added = self.fc2(a) * self.scale2
        return Inside(x, n, q, k, v, products, A, o, mixed, attended, u, m, a, added, u + added)

    def relevance(self, t: Inside, R: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
        """From the relevance of y to that of A and of x; norms, activation, softmax and scales pass it on as it is."""
        Ru, Ra = add_rule(t.u, t.added, R, rules)
        Rm = linear_rule(t.m, self.fc1.weight, linear_rule(t.a, self.fc2.weight, Ra, rules), rules)
        Rx, Rt = add_rule(t.x, t.attended, clone_rule(t.u, Ru, Rm), rules)
        Ro = linear_rule(t.mixed, self.out.weight, Rt, rules).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        RA, Rv = product_rule(t.A, t.v, t.o, Ro)
        Rq, Rk = product_rule(t.q, t.k.transpose(-2, -1), t.products, RA)
        together = torch.stack([Rq, Rk.transpose(-2, -1), Rv]).permute(1, 3, 0, 2, 4).flatten(2)
        return RA, clone_rule(t.x, Rx, linear_rule(t.n, self.qkv.weight, together, rules))


class Step(NamedTuple):
    """One block of a relevance pass: relevance R_A and gradient G of its attention, relevance of its input tokens."""

    layer: int
    RA: Tensor
    G: Tensor | None
    R: Tensor


class Relevance:
    """A float64 forward over `ask.images`; `steps` then walks from the last block down, in memory of one block."""

    def __init__(self, ask: Ask, rules: Rules) -> None:
        vit, ends = ask.vit, ask.vit.ends()
        assert ends is not None
        self.ask, self.vit, self.ends, self.rules = ask, vit, ends, rules
        device = torch.device("cpu") if vit.device.type == "mps" else vit.device
        self.like = torch.empty(0, device=device, dtype=torch.float64)
        self.images = ask.images.detach().to(self.like)
        with torch.no_grad():
            self.embedded, self.positions = _embedded(ends, self.images)
            self.tokens = [self.embedded + self.positions]
            for layer in range(vit.depth):
                self.tokens.append(self.block(layer)(self.tokens[-1]).y)

    def block(self, layer: int) -> Block:
        return Block(self.vit.parts(layer), self.vit.heads, self.like)

    def start(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, scores [B,1], and relevance and gradient of the last tokens.

        Relevance starts as 1 at the target's logit, a - b for a pair and -y for label 0 of a one-output head.
        """
        head = linear(self.ends.head).to(self.like)
        x = self.tokens[-1].detach().requires_grad_()
        with torch.enable_grad():
            n = _norm(self.ends.norm, x)[:, 0]
            logits = head(n)
            target = score_of(logits, self.ask.targets, "logit", self.vit.sigmoid)
            (row,) = torch.autograd.grad(target.sum(), logits, retain_graph=True)
            scores = score_of(logits, self.ask.targets, self.ask.score, self.vit.sigmoid)
            (g,) = torch.autograd.grad(scores.sum(), x)
        n = n.detach()
        carried = (n * (row @ head.weight)).clamp(min=0)
        groups = (carried,) if self.rules == "ours" else (carried * (n > 0), carried * (n < 0))
        read = torch.stack([over(c, c.sum(1, keepdim=True)) for c in groups]).sum(0)
        R = torch.zeros_like(self.tokens[-1])
        R[:, 0] = clone_rule(n, read)
        return logits.detach(), scores.detach(), R, g

    def steps(self, R: Tensor, g: Tensor | None, first: int) -> Iterator[Step]:
        """Blocks from the last to `first`; with the gradient g of the last tokens, also G."""
        for layer in reversed(range(first, self.vit.depth)):
            block, G = self.block(layer), None
            x = self.tokens.pop(layer).detach().requires_grad_(g is not None)
            with torch.set_grad_enabled(g is not None):
                inside = block(x)
            if g is not None:
                g, G = torch.autograd.grad(inside.y, (x, inside.A), g)
            inside = Inside(*(t.detach() for t in inside))
            with torch.no_grad():
                RA, R = block.relevance(inside, R, self.rules)
            yield Step(layer, RA, G, R)

    def pixels(self, R: Tensor) -> Tensor:
        """Relevance of the image [B,C,H,W] from that of x_0."""
        with torch.no_grad():
            R, _ = add_rule(self.embedded, self.positions.expand_as(self.embedded), R, self.rules)
            grid = R[:, self.vit.prefix :].transpose(1, 2).unflatten(2, self.vit.grid)
            weight = self.ends.projection.weight.detach().to(self.like)
            return pixel_rule(self.images, weight, grid, self.ends.projection.stride)


def _norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = (None if t is None else t.detach().to(x) for t in (norm.weight, norm.bias))
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _embedded(ends: Ends, images: Tensor) -> tuple[Tensor, Tensor]:
    conv = ends.projection
    bias = None if conv.bias is None else conv.bias.detach().to(images)
    patches = F.conv2d(images, conv.weight.detach().to(images), bias, conv.stride).flatten(2).transpose(1, 2)
    prefix = ends.prefix.detach().to(images).expand(len(images), -1, -1)
    return torch.cat([prefix, patches], 1), ends.positions.detach().to(images)


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    for layer in range(vit.depth):
        parts = vit.parts(layer)
        if parts.beyond:
            return f"the relevance rules know plain ViT blocks, and those of {vit.name} are not: {parts.beyond}"
        known = isinstance(parts.norm1, nn.LayerNorm) and isinstance(parts.norm2, nn.LayerNorm)
        maps = (parts.out, parts.fc1, parts.fc2)
        if not known or any(affine(p) is None for p in maps) or parts.qkv is None or parts.activation is None:
            return f"the relevance rules know blocks of layer norms and linear maps, and {vit.name} has others"
    if vit.pooling != "cls":
        return f"the relevance rules read one CLS token, and {vit.name} has {vit.pooling} pooling"
    if vit.ends() is None:
        return f"{vit.name} does more between image and blocks, or blocks and logits, than the relevance rules know"
    return None


def _attention_maps(ask: Ask, rules: Rules, gradient: bool) -> Pass:
    """mean_h ReLU(R_A), times G inside with `gradient`, of the blocks asked for."""
    seen = Relevance(ask, rules)
    logits, scores, R, g = seen.start()
    maps: dict[int, Any] = {}
    for step in seen.steps(R, g if gradient else None, min(ask.layers)):
        weighed = step.RA if step.G is None else step.RA * step.G
        maps[step.layer] = weighed.clamp_(min=0).mean(1).to(ask.images)
    return Pass(logits.to(ask.images), ask.targets, scores.to(ask.images), [[maps]])


@register_method(
    "lrp",
    paper="Bach et al., 2015, on ViTs as in Chefer et al., CVPR 2021",
    aliases=("full-lrp",),
    levels=("pixel", "token"),
    ruled=False,
    refuses=_refuses,
    cost="2 forwards + relevance pass of about 4 forwards, float64",
)
def lrp(ask: Ask, rules: Rules = "orig", level: Level = "pixel") -> Tensor:
    """Layer-wise relevance propagation to the pixels, summed over colours. Signed.

    Relevance 1 at the target's logit goes down by the alpha = 1 rule at linear maps, a / (a + b) at skips, half to each
    factor at matrix products, z^B at the patch projection; norms, GELU, softmax and scales pass it on. `rules="orig"`
    (default) are the paper's LRP baseline, which conserves nothing and reaches 1e9 and more; `rules="ours"` are those
    of TransAtt, whose sum stays 1. `level="token"` is the relevance of x_0, summed over channels.
    """
    seen = Relevance(ask, rules)
    _, _, R, _ = seen.start()
    for step in seen.steps(R, None, 0):
        R = step.R
    if level == "token":
        return ask.vit.patches(R.sum(-1)).to(ask.images)
    return seen.pixels(R).sum(1).to(ask.images)


@register_method(
    "partial-lrp",
    paper="Voita et al., ACL 2019, on ViTs as in Chefer et al., CVPR 2021",
    combine=LAST,
    matrix=True,
    nonnegative=True,
    ruled=False,
    refuses=_refuses,
    cost="1 forward + relevance pass of the blocks read, float64",
)
def partial_lrp(ask: Ask, rules: Rules = "orig") -> Pass:
    """Relevance of one block's attention, the last by default: the CLS row of mean_h ReLU(R_A).

    No gradient; the class enters through the one-hot start. `rules` as in `lrp`.
    """
    return _attention_maps(ask, rules, gradient=False)


@register_method(
    "transatt",
    paper="Chefer et al., CVPR 2021",
    aliases=("chefer1", "cgw1"),
    combine=ADDITIVE,
    matrix=True,
    nonnegative=True,
    ruled=False,
    refuses=_refuses,
    presets={"scripts": {"start": 1}},
    cost="2 forwards + 1 backward + relevance pass of about 4 forwards, float64",
)
def transatt(ask: Ask, rules: Rules = "ours", gradient: bool = True) -> Pass:
    """Transformer attribution: the CLS row of prod_l (I + mean_h ReLU(G_l * R_A,l)), from block `start`.

    Nothing is normalised. R_A,l is the relevance of the attention [B,H,N,N] under the conserving rules, G_l the
    gradient of the score. The library and the paper start at block 0 (default); preset `scripts` at block 1, as the
    evaluation scripts do.
    `gradient=False` leaves G out, the authors' rollout of relevance.
    """
    return _attention_maps(ask, rules, gradient)
