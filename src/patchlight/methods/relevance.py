"""Layer-wise relevance propagation through plain ViTs: LRP, partial LRP and TransAtt.

Relevance is divided by values of the forward (sums at skips, A v and q k^T), some of which nearly cancel, so maps of a
float32 forward are arbitrary. The forward is therefore always in float64. The backward pass is well conditioned: it is
in float64 for `precision="full"`, the reference, and otherwise in float32, whose products may round to TF32 on CUDA.
Methods based on layer-wise relevance propagation may be covered by patents in some countries; make sure that your use
is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.contract import Affine, Ends, Parts, affine, linear
from patchlight.anatomy.opened import Anatomy
from patchlight.core.progress import current_watcher
from patchlight.core.registry import Settings
from patchlight.core.targets import target_scores
from patchlight.evidence.passes import Pass
from patchlight.evidence.precision import Decided, rounding
from patchlight.methods.base import Ask, Level, own_passes
from patchlight.methods.compositions import ADDITIVE, LAST

Rules = Literal["ours", "orig"]
STABILISER = 1e-9


def over(a: Tensor, b: Tensor) -> Tensor:
    """a / (b + 1e-9), or 0 if b is 0."""
    return a / torch.where(b == 0, torch.inf, b + STABILISER)


def linear_rule(
    x: Tensor, weight: Tensor, R: Tensor, rules: Rules, z: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The alpha = 1 rule of z = W x without biases: only products x_i W_ji > 0 carry relevance.

    `ours`: R_i = sum_j (x_i W_ji)^+ R_j / sum_k (x_k W_jk)^+. `orig` has separate denominators for positive and
    negative inputs, so the result sums to about twice R. z = W x + bias may be given if known.
    """
    if rules == "orig":
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        positive, negative = F.linear(x.clamp(min=0), up), F.linear(x.clamp(max=0), down)
        return torch.where(x > 0, over(R, positive) @ up, over(R, negative) @ down).mul_(x)
    # 2 sum (xW)^+ = sum |x||W| + W x and 2 W^+ = |W| + W need one product fewer than the positive and negative parts.
    # If no product is positive, no relevance is carried, whatever the value of the denominator.
    z, size, least = F.linear(x, weight) if z is None else z, weight.abs(), 2 * STABILISER
    offset = weight.new_full(weight.shape[:1], least) if bias is None else least - bias
    positive = F.linear(x.abs(), size, offset).add_(z).clamp_(min=least)
    up, down = ((R / positive) @ torch.cat([weight + size, weight - size], 1)).chunk(2, -1)
    return torch.where(x > 0, up, down).mul_(x)


def add_rule(a: Tensor, b: Tensor, R: Tensor, rules: Rules, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Relevance of the terms of a + b: a R / (a + b) and b R / (a + b); `total` is a + b if known more precisely.

    `ours` rescales both, so that their sums over a sample are proportional to |sum r_a| and |sum r_b| and add up to
    sum R.
    """
    share = over(R, a + b if total is None else total)
    ra, rb = a * share, b * share
    if rules == "orig":
        return ra, rb
    axes = tuple(range(1, R.ndim))
    sa, sb, sr = (t.sum(axes, keepdim=True) for t in (ra, rb, R))
    sizes = sa.abs() + sb.abs()
    return ra.mul_(over(over(sa.abs(), sizes) * sr, sa)), rb.mul_(over(over(sb.abs(), sizes) * sr, sb))


def clone_rule(x: Tensor, R: Tensor) -> Tensor:
    """Relevance of a tensor that is used several times, from the sum R over its uses."""
    return over(R, x).mul_(x)


def product_rule(X: Tensor, Y: Tensor, Z: Tensor, R: Tensor, stabiliser: float = STABILISER) -> tuple[Tensor, Tensor]:
    """Relevance of the factors of Z = X Y, half to each: X (S Y^T) / 2 and Y (X^T S) / 2 with S = R / Z.

    If Z is 0 because a row of X or a column of Y is 0, that factor gets 0.
    """
    share, half = R / (Z + stabiliser), Y / 2
    return (share @ half.transpose(-2, -1)).mul_(X), (X.transpose(-2, -1) @ share).mul_(half)


def pixel_rule(images: Tensor, conv: nn.Conv2d, R: Tensor) -> Tensor:
    """The z^B rule of the patch projection for R [B,P,D]; the bounds are the smallest and largest value of an image."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    weight = conv.weight.detach().to(images).flatten(1)
    terms = [
        (_patches(conv, x.expand_as(images)), w)
        for x, w in ((images, weight), (-low, weight.clamp(min=0)), (-high, weight.clamp(max=0)))
    ]
    share = R / (sum(x @ w.mT for x, w in terms) + STABILISER)
    carried = torch.stack([x * (share @ w) for x, w in terms]).sum(0)
    return F.fold(carried.mT, images.shape[-2:], conv.kernel_size, stride=conv.stride)


class Inside(NamedTuple):
    """The values of a block that the backward pass reads, for input tokens x [B,N,D].

    In the last block, o [B,H,r,d], attended, u, hidden and added [B,r,D or 4D] have one row, that of the token which
    the classifier reads; elsewhere r = N. attended and added are before layer scale, hidden is before the activation.
    qkv [B,N,3D] is in float64, because q k^T must be computed in float64.
    """

    x: Tensor
    qkv: Tensor
    o: Tensor
    attended: Tensor
    u: Tensor
    hidden: Tensor
    added: Tensor

    def to(self, like: Tensor) -> Inside:
        """All tensors except qkv in another type."""
        return Inside(*(t.to(like) for t in self))._replace(qkv=self.qkv)


class Attention(NamedTuple):
    """A block's scaled q [B,H,r,d], k and v [B,H,N,d], q k^T and its softmax A [B,H,r,N]; qkv [B,N,3D], not scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    products: Tensor
    A: Tensor
    qkv: Tensor


class Block:
    """A pre-norm block by its parts, with weights in the type of `like`; the model's weights are not changed.

    It is written out, not run under taps whose backward is relevance, for three reasons. The rules apply to whole maps
    (an adapter's several products are one), to products before scaling, and to skips, which the functions that a block
    calls do not distinguish. A tap would silently pass a gradient through unknown operations, where `Parts` refuses.
    And only the weights of one block at a time are in float64.
    """

    def __init__(self, parts: Parts, heads: int, like: Tensor) -> None:
        assert parts.qkv is not None
        assert parts.activation is not None
        self.heads, self.like, self.activation = heads, like, parts.activation
        self.norm1, self.norm2 = partial(_norm, parts.norm1), partial(_norm, parts.norm2)
        self.qkv = Affine(*parts.qkv()).to(like)
        self.out, self.fc1, self.fc2 = (linear(p).to(like) for p in (parts.out, parts.fc1, parts.fc2))
        self.scale1, self.scale2 = (None if s is None else s.detach().to(like) for s in (parts.scale1, parts.scale2))
        self.factor = (len(self.qkv.weight) // 3 // heads) ** -0.5

    def __call__(self, x: Tensor, rows: int) -> tuple[Inside, Tensor]:
        """The forward to y [B,r,D]: keys and values of all tokens, but only the first `rows` tokens after attention."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = self._split_heads(qkv)
        o = (q[:, :, :rows] * self.factor @ k.mT).softmax(-1) @ v
        attended = self.out(o.transpose(1, 2).flatten(2))
        u = x[:, :rows] + _scale(attended, self.scale1)
        hidden = self.fc1(self.norm2(u))
        added = self.fc2(self.activation(hidden))
        return Inside(x, qkv, o, attended, u, hidden, added), u + _scale(added, self.scale2)

    def attention(self, t: Inside) -> Attention:
        """Queries, keys, values and their products, computed in float64 and then rounded."""
        q, k, _ = self._split_heads(t.qkv)
        products = (q[:, :, : t.u.shape[1]] * self.factor @ k.mT).to(self.like)
        qkv = t.qkv.to(self.like)
        q, k, v = self._split_heads(qkv)
        return Attention(q[:, :, : t.u.shape[1]] * self.factor, k, v, products, products.softmax(-1), qkv)

    def gradient(self, t: Inside, s: Attention, g: Tensor, down: bool) -> tuple[Tensor, Tensor]:
        """The gradients of A (G = do v^T) and of x (with `down`; otherwise of u), from the gradient g of y."""
        g_hidden = _pull_gradient(self.activation, t.hidden, _scale(g, self.scale2) @ self.fc2.weight)
        g = _pull_gradient(self.norm2, t.u, g_hidden @ self.fc1.weight).add_(g)
        g_o = (_scale(g, self.scale1) @ self.out.weight).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        G = g_o @ s.v.mT
        if not down:
            return G, g
        # the sum over j of A_ij G_ij is o_i do_i
        inner = (G - (t.o * g_o).sum(-1, keepdim=True)).mul_(s.A)
        g_qkv = self._join_heads(inner @ s.k * self.factor, inner.mT @ s.q, s.A.mT @ g_o)
        g_x = _pull_gradient(self.norm1, t.x, g_qkv @ self.qkv.weight)
        g_x[:, : g.shape[1]] += g
        return G, g_x

    def relevance(
        self, t: Inside, s: Attention, y: Tensor, R: Tensor, rules: Rules, down: bool
    ) -> tuple[Tensor, Tensor]:
        """The relevance of A and of x (with `down`; otherwise of the skip around attention), from the relevance R of y.

        Norms, activation, softmax and scales do not change relevance.
        """
        Ru, Ra = add_rule(t.u, _scale(t.added, self.scale2), R, rules, y)
        Rh = linear_rule(self.activation(t.hidden), self.fc2.weight, Ra, rules, t.added, self.fc2.bias)
        Rm = linear_rule(self.norm2(t.u), self.fc1.weight, Rh, rules, t.hidden, self.fc1.bias)
        x, attended = t.x[:, : t.u.shape[1]], _scale(t.attended, self.scale1)
        Rx, Rt = add_rule(x, attended, clone_rule(t.u, Ru.add_(Rm)), rules, t.u)
        mixed = t.o.transpose(1, 2).flatten(2)
        Ro = linear_rule(mixed, self.out.weight, Rt, rules, t.attended, self.out.bias)
        RA, Rv = product_rule(s.A, s.v, t.o, Ro.unflatten(-1, (self.heads, -1)).transpose(1, 2))
        if not down:
            return RA, Rx
        Rq, Rk = product_rule(s.q, s.k.mT, s.products, RA, STABILISER * self.factor)
        R_qkv = self._join_heads(Rq, Rk.mT, Rv)
        Rn = linear_rule(self.norm1(t.x), self.qkv.weight, R_qkv, rules, s.qkv, self.qkv.bias)
        Rn[:, : Rx.shape[1]] += Rx
        return RA, clone_rule(t.x, Rn)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _join_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B,H,r,d], [B,H,N,d] and [B,H,N,d] as [B,N,3D], with zeros where q has no row."""
        B, H, N, d = k.shape
        joined = k.new_zeros(B, N, 3, H, d)
        for i, part in enumerate((q, k, v)):
            joined[:, : part.shape[2], i] = part.transpose(1, 2)
        return joined.flatten(2)


class RelevanceStep(NamedTuple):
    """One block of a relevance pass: relevance R_A and gradient G of attention, and relevance R of the input tokens."""

    layer: int
    RA: Tensor
    G: Tensor | None
    R: Tensor


class Relevance:
    """A float64 forward over `ask.images`, and a relevance pass from the last block to the first (`steps`).

    With `full` precision, the relevance pass is in float64 and recomputes each block from its input tokens. Otherwise
    it is in float32 and reads values saved by the forward: 60 N D bytes per block and image, 110 MB in total for a
    ViT-B/16 at 224.
    """

    def __init__(self, ask: Ask, rules: Rules, precision: Decided = "full") -> None:
        vit, ends = ask.vit, ask.vit.ends()
        assert ends is not None
        self.ask, self.vit, self.ends, self.rules, self.full = ask, vit, ends, rules, precision == "full"
        device = torch.device("cpu") if vit.device.type == "mps" else vit.device
        self.exact = torch.empty(0, device=device, dtype=torch.float64)
        self.like = self.exact if self.full else self.exact.float()
        self.images = ask.images.detach().to(self.exact)
        first = min(ask.layers, default=0)
        self.tokens: dict[int, Tensor] = {}
        self.saved: dict[int, Inside] = {}
        with torch.no_grad():
            self.embedded, self.positions = _embed(ends, self.images)
            x = self.embedded + self.positions
            for layer in range(vit.depth):
                current_watcher().check()
                inside, y = self.block(layer, self.exact)(x, self.rows(layer))
                if self.full:
                    self.tokens[layer] = x
                elif layer >= first:
                    self.saved[layer] = inside.to(self.like)
                x = y
        self.last = x

    def block(self, layer: int, like: Tensor) -> Block:
        return Block(self.vit.parts(layer), self.vit.heads, like)

    def rows(self, layer: int) -> int:
        """Number of tokens that are read after a block's attention: in the last block, only CLS."""
        return 1 if layer == self.vit.depth - 1 else self.vit.tokens

    def start(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits, scores [B,1], and the relevance and gradient of the last tokens.

        The relevance of the target's logit is 1; of a pair, it is a - b; of label 0 of a one-output head, -y.
        """
        head = linear(self.ends.head).to(self.exact)
        x = self.last.detach().requires_grad_()
        with torch.enable_grad():
            n = _norm(self.ends.norm, x)[:, 0]
            logits = head(n)
            target = target_scores(logits, self.ask.targets, "logit", self.vit.outputs)
            (row,) = torch.autograd.grad(target.sum(), logits, retain_graph=True)
            scores = target_scores(logits, self.ask.targets, self.ask.score, self.vit.outputs)
            (g,) = torch.autograd.grad(scores.sum(), x)
        n = n.detach()
        carried = (n * (row @ head.weight)).clamp(min=0)
        groups = (carried,) if self.rules == "ours" else (carried * (n > 0), carried * (n < 0))
        read = torch.stack([over(c, c.sum(1, keepdim=True)) for c in groups]).sum(0)
        R = clone_rule(n, read)[:, None]
        return logits.detach(), scores.detach(), self._all_rows(R), self._all_rows(g)

    def steps(self, R: Tensor, g: Tensor | None, first: int, down: bool = True) -> Iterator[RelevanceStep]:
        """Propagate relevance from the last block to `first`, and the gradient g of the last tokens, if given.

        Without `down`, block `first` ends at its attention, and its R is that of the skip only.
        """
        R, g, y = R.to(self.like), None if g is None else g.to(self.like), self.last.to(self.like)
        for layer in reversed(range(first, self.vit.depth)):
            current_watcher().check()
            block, G, rows = self.block(layer, self.like), None, self.rows(layer)
            further = down or layer > first
            with torch.no_grad(), rounding(self.vit, "full" if self.full else "tf32"):
                inside = block(self.tokens.pop(layer), rows)[0] if self.full else self.saved.pop(layer)
                attention = block.attention(inside)
                if g is not None:
                    G, g = block.gradient(inside, attention, g[:, :rows], further)
                    G = self._all_rows(G)
                RA, R = block.relevance(inside, attention, y, R[:, :rows], self.rules, further)
            y = inside.x
            yield RelevanceStep(layer, self._all_rows(RA), G, R)

    def pixels(self, R: Tensor) -> Tensor:
        """The relevance of the image [B,C,H,W], from the relevance R of x_0."""
        with torch.no_grad():
            R, _ = add_rule(self.embedded, self.positions.expand_as(self.embedded), R.to(self.exact), self.rules)
            return pixel_rule(self.images, self.ends.projection, self.vit.layout.of_cells(R))

    def _all_rows(self, rows: Tensor) -> Tensor:
        """Pad [..., r, D] to [..., N, D] with zeros."""
        missing = self.vit.tokens - rows.shape[-2]
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _norm(norm: nn.Module | None, x: Tensor) -> Tensor:
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = (None if t is None else t.detach().to(x) for t in (norm.weight, norm.bias))
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def _scale(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale


def _pull_gradient(function: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Tensor:
    """The gradient of <function(x), g>."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(x), x, g)[0]


def _patches(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """The patches [B,P,C*h*w] of a projection, computed as a product, because float64 convolutions are slow on CUDA."""
    return F.unfold(images, conv.kernel_size, stride=conv.stride).mT


def _embed(ends: Ends, images: Tensor) -> tuple[Tensor, Tensor]:
    conv = ends.projection
    bias = None if conv.bias is None else conv.bias.detach().to(images)
    patches = F.linear(_patches(conv, images), conv.weight.detach().to(images).flatten(1), bias)
    prefix = ends.prefix.detach().to(images).expand(len(images), -1, -1)
    return torch.cat([prefix, patches], 1), ends.positions.detach().to(images)


def refuse_blocks(settings: Settings, vit: Anatomy) -> str | None:
    """Why a model is not a plain ViT with a CLS token and readable parts; None if it is."""
    for layer in range(vit.depth):
        parts = vit.parts(layer)
        if parts.beyond:
            return f"the relevance rules cover plain ViT blocks, and those of {vit.name} are not plain: {parts.beyond}"
        known = isinstance(parts.norm1, nn.LayerNorm) and isinstance(parts.norm2, nn.LayerNorm)
        maps = (parts.out, parts.fc1, parts.fc2)
        if not known or any(affine(p) is None for p in maps) or parts.qkv is None or parts.activation is None:
            return f"the relevance rules cover blocks of layer norms and linear maps, and {vit.name} has others"
    if vit.pooling != "cls":
        return f"the relevance rules read one CLS token, and {vit.name} has {vit.pooling} pooling"
    if vit.ends() is None:
        return f"{vit.name} does more between image and blocks, or blocks and logits, than the relevance rules cover"
    return None


def _attention_maps(ask: Ask, rules: Rules, gradient: bool) -> Pass:
    """mean_h ReLU(R_A), or with `gradient` mean_h ReLU(R_A * G), for the blocks `ask.layers`."""
    relevance = Relevance(ask, rules, ask.precision)
    logits, scores, R, g = relevance.start()
    maps: dict[int, Any] = {}
    for step in relevance.steps(R, g if gradient else None, min(ask.layers), down=False):
        weighted = step.RA if step.G is None else step.RA.mul_(step.G)
        maps[step.layer] = weighted.clamp_(min=0).mean(1).to(ask.images)
    return Pass(logits.to(ask.images), ask.targets, scores.to(ask.images), [[maps]])


@own_passes(
    "lrp",
    paper="Bach et al., 2015, on ViTs as in Chefer et al., CVPR 2021",
    aliases=("full-lrp",),
    levels=("pixel", "token"),
    ruled=False,
    precision="full",
    refuses=refuse_blocks,
    cost="2 forwards in float64 + relevance pass of about 4 forwards",
)
def lrp(ask: Ask, rules: Rules = "orig", level: Level = "pixel") -> Tensor:
    """Layer-wise relevance propagation from the logit of the class to the pixels.

    The relevance of the target's logit is 1. It is propagated by the alpha = 1 rule at linear maps, by a / (a + b) at
    skip connections, by halves to the factors of matrix products, and by z^B at the patch projection; norms, GELU,
    softmax and scales do not change it. The map is summed over colours and signed.

    `precision="auto"` is `full` on CUDA too, because signed relevance nearly cancels. With TF32 rounding, one image of
    16 loses its order on `deit_tiny`: Spearman 0.997, and 0.11 with `rules="ours"`, where the sum at a skip connection
    changes sign.

    Args:
        rules: "orig": the paper's LRP baseline, which does not conserve relevance and reaches 1e9 and more. "ours": the
            rules of TransAtt, whose sum is 1.
        level: "pixel", or "token": the relevance of x_0, summed over channels.
    """
    relevance = Relevance(ask, rules, ask.precision)
    _, _, R, _ = relevance.start()
    for step in relevance.steps(R, None, 0):
        R = step.R
    if level == "token":
        return ask.vit.patches(R.sum(-1)).to(ask.images)
    return relevance.pixels(R).sum(1).to(ask.images)


@own_passes(
    "partial-lrp",
    paper="Voita et al., ACL 2019, on ViTs as in Chefer et al., CVPR 2021",
    combine=LAST,
    matrix=True,
    nonnegative=True,
    ruled=False,
    precision="tf32",
    refuses=refuse_blocks,
    cost="1 forward in float64 + relevance pass of the blocks read",
)
def partial_lrp(ask: Ask, rules: Rules = "orig") -> Pass:
    """Relevance of the last block's attention, averaged over its heads.

        M = mean_h ReLU(R_A)

    The map is the CLS row of M. No gradient is used; relevance starts at the logit of the class.

    Args:
        rules: "orig": the paper's LRP baseline, which does not conserve relevance. "ours": the rules of TransAtt, whose
            sum is 1.
    """
    return _attention_maps(ask, rules, gradient=False)


@own_passes(
    "transatt",
    paper="Chefer et al., CVPR 2021",
    aliases=("chefer1", "cgw1"),
    combine=ADDITIVE,
    matrix=True,
    nonnegative=True,
    ruled=False,
    precision="tf32",
    refuses=refuse_blocks,
    presets={"scripts": {"start": 1}},
    cost="2 forwards in float64 + 1 backward + relevance pass of about 3 forwards",
)
def transatt(ask: Ask, rules: Rules = "ours", gradient: bool = True) -> Pass:
    """Transformer attribution: relevance of attention times its gradient, accumulated over the blocks.

        R = prod_l (I + mean_h ReLU(G_l * R_A,l))   from block `start` on

    The map is the CLS row of R; nothing is normalised. R_A,l is the relevance of attention under the conserving rules,
    and G_l is the gradient of the score. Preset `scripts` starts at block 1, as in the evaluation scripts; the library
    and the paper start at block 0.

    Args:
        rules: "ours" conserves relevance. "orig" does not, and can lose the order of the patches in TF32;
            `precision="full"` keeps it.
        gradient: Whether G is included; without it, this is the authors' rollout of relevance.
    """
    return _attention_maps(ask, rules, gradient)
