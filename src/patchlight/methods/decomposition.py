"""Norms of forward decompositions: the contribution of each token to each other token in a block's attention.

V[i,j] is the part of token i after attention that comes from token j before it: sum_h A_h[i,j] w_j^h with w_j^h = W_O^h
v_j^h, plus x_i if i = j. No [N,N,D] tensor is created: l2 norms are quadratic forms in A, and l1 distances are computed
for a few rows at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.contract import linear
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, warn
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.methods.base import Composition, LayerMaps, layer_map
from patchlight.methods.compositions import LAST, ROLLOUT, Readout, Residual, Scale, Start

FFN = Annotated[
    Literal["skip", "norm2"],
    Field(description="'skip' uses V; 'norm2' uses V + LN2(V), as in the implementation of the SkipPLUS authors."),
]
ValueBias = Annotated[bool, Field(description="Whether V includes the bias of the values; it has no other biases.")]
_CHUNK = 32_000_000
"""Numbers in memory at once for an l1 distance."""


def _product(
    maps: LayerMaps, start: Start = 0, residual: Residual = 0.0, scale: Scale = 1.0, readout: Readout = "pooling"
) -> Tensor:
    """r <- r ((1 - residual) scale M_l + residual I) from the last block to `start`, without normalisation."""
    return ROLLOUT.function(maps, start, residual, "none", scale, readout)


PRODUCT = Composition(_product, ROLLOUT.span, matrices_only=True)
_PLAIN_PRODUCT = {"residual": 0.0, "normalise": "none"}


def head_vectors(b: Evidence, value_bias: bool) -> Tensor:
    """w_j^h = W_O^h v_j^h [B,N,H,D], including layer scale; `value_bias` keeps W_V beta + b_V in v."""
    values = b.v
    if not value_bias:
        weight, bias = b.parts.qkv()
        beta = getattr(b.parts.norm1, "bias", None)
        constant = F.linear(torch.zeros_like(weight[0]) if beta is None else beta, weight, bias).chunk(3)[2]
        values = values - constant.unflatten(0, (values.shape[1], 1, -1))
    weight = linear(b.parts.out).weight.unflatten(1, (values.shape[1], -1))
    vectors = torch.einsum("bhnd,ehd->bnhe", values, weight)
    return vectors if b.parts.scale1 is None else vectors * b.parts.scale1


def _quadratic(A: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """<sum_h A_h[i,j] left_j^h, sum_h A_h[i,j] right_j^h> [B,N,N], through the Gram matrices [H,H] of each j."""
    weights = A.permute(0, 3, 2, 1)
    return ((weights @ (left @ right.transpose(-2, -1))) * weights).sum(-1).transpose(1, 2)


def _second_norm(b: Evidence) -> tuple[Tensor, Tensor]:
    """gamma of the second norm [D], and 1/std of the tokens that enter it [B,N,1]."""
    norm = b.parts.norm2
    gamma = torch.ones_like(b.u[0, 0]) if norm.weight is None else norm.weight
    return gamma, (b.u.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()


def l2_norms(b: Evidence, w: Tensor, skip: bool, ffn: Literal["skip", "norm", "norm2"]) -> Tensor:
    """||T_i V[i,j]|| [B,N,N], with or without the skip's x_i in V[i,i].

    T_i is the identity (`skip`), the second norm's linear part gamma (V - mean V) / std_i (`norm`), or their sum
    (`norm2`).
    """
    itself = torch.einsum("bhnn,bnhe->bne", b.A, w)  # V[i,i]
    itself = itself + b.x if skip else itself
    if ffn == "skip":
        squares, diagonal = _quadratic(b.A, w, w), itself
    else:
        gamma, inverse = _second_norm(b)
        normed = gamma * (w - w.mean(-1, keepdim=True))
        squares = _quadratic(b.A, normed, normed) * inverse**2
        diagonal = gamma * (itself - itself.mean(-1, keepdim=True)) * inverse
        if ffn == "norm2":
            squares = squares + 2 * inverse * _quadratic(b.A, w, normed) + _quadratic(b.A, w, w)
            diagonal = diagonal + itself
    norms = squares.clamp(min=0).sqrt()
    norms.diagonal(dim1=1, dim2=2).copy_(torch.linalg.vector_norm(diagonal, dim=-1))
    return norms


def l1_distances(b: Evidence, w: Tensor, y: Tensor, ffn: FFN) -> Tensor:
    """||y_i - T_i V[i,j]||_1 [B,N,N] with x_i in V[i,i], for a few rows i at a time."""
    B, N, D = b.x.shape
    size = max(1, _CHUNK // (B * N * D))
    result = b.x.new_empty(B, N, N)
    if ffn == "norm2":
        gamma, inverse = _second_norm(b)
        gain = gamma * inverse
    for tokens in torch.arange(N, device=b.x.device).split(size):
        weights = b.A[:, :, tokens].permute(0, 3, 2, 1)
        vectors = weights @ w
        vectors[:, tokens, torch.arange(len(tokens))] += b.x[:, tokens]
        if ffn == "norm2":
            mean = vectors.mean(-1, keepdim=True)
            vectors.mul_(1 + gain[:, None, tokens]).addcmul_(mean, gain[:, None, tokens], value=-1)
        result[:, tokens] = vectors.sub_(y[:, None, tokens]).abs_().sum(-1).transpose(1, 2)
    return result


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    parts, reason = vit.parts(0), vit.no_linear_values()
    if reason is not None:
        return reason
    if parts.norm1 is None and settings.get("vectors") != "attention":
        return f"{vit.name} has no norm before attention, so its tokens do not pass the block unchanged"
    normed = settings.get("vectors") == "norm" or settings.get("ffn") == "norm2"
    if normed and not isinstance(parts.norm2, nn.LayerNorm):
        return f"the second norm of {vit.name}'s blocks is not a layer norm"
    return None


def _needs(settings: Settings) -> frozenset[str]:
    uses_u = settings.get("vectors") == "norm" or settings.get("ffn") == "norm2"
    uses_u = uses_u or settings.get("reference") == "attn_out"
    return frozenset({"x", "y", "A", "v"} | ({"u"} if uses_u else set()))


_norms = partial(
    layer_map,
    needs=_needs,
    matrix=True,
    nonnegative=True,
    refuses=_refuses,
    cost="1 forward, attention matrices written out",
)


@_norms("attin", paper="Kobayashi et al., EMNLP 2020 and 2021", aliases=("attention-norm",), combine=LAST)
def attin(
    b: Evidence, vectors: Literal["attention", "residual", "norm"] = "attention", value_bias: ValueBias = True
) -> Tensor:
    """Norms of the vectors that attention adds to the CLS token in the last block; ignores the class.

        M[i,j] = || sum_h A_h[i,j] W_O^h v_j^h ||

    The map is the CLS row of M. The bias of the output projection is left out.

    Args:
        vectors: "attention" is the formula. "residual" adds x_i to the vector if i = j. "norm" also applies the linear
            part of the second norm, gamma (V - mean V) / std(u_i).
    """
    w = head_vectors(b, value_bias)
    return l2_norms(b, w, skip=vectors != "attention", ffn="norm" if vectors == "norm" else "skip")


@_norms(
    "globenc",
    paper="Modarressi et al., NAACL 2022",
    combine=PRODUCT,
    composed=_PLAIN_PRODUCT,
    presets={"skipplus": {"ffn": "norm2", "rounding": "floor"}},
)
def globenc(b: Evidence, ffn: FFN = "skip", value_bias: ValueBias = False) -> Tensor:
    """Norms of the vectors that tokens contribute to each other, multiplied over the blocks; ignores the class.

        R = prod_l M_l,   M_l[i,j] = ||V[i,j]||,   V with the skip connection, without the MLP

    The map is the CLS row of R. Nothing is normalised, so the product may explode in deep models; `scale` multiplies
    each matrix. Preset `skipplus` is the implementation of the SkipPLUS authors, with L // 2.
    """
    return l2_norms(b, head_vectors(b, value_bias), skip=True, ffn=ffn)


@_norms(
    "alti",
    paper="Ferrando et al., EMNLP 2022",
    combine=PRODUCT,
    composed=_PLAIN_PRODUCT,
    presets={"skipplus": {"ffn": "norm2", "reference": "block_out", "rounding": "floor"}},
)
def alti(
    b: Evidence,
    ffn: FFN = "skip",
    reference: Literal["attn_out", "block_out"] = "attn_out",
    value_bias: ValueBias = False,
) -> Tensor:
    """Contributions of each token to each other token, multiplied over the blocks; ignores the class.

        R = prod_l C_l,   C_l[i,j] = ReLU(||y_i||_1 - ||y_i - V[i,j]||_1),   rows of C_l divided by their sum

    The map is the CLS row of R, and V is that of `globenc`. A row of zeros remains zero, with a warning. Preset
    `skipplus` is the implementation of the SkipPLUS authors: y_i is the output of the block, V + LN2(V) replaces V, and
    the upper half starts at L // 2; many rows are then zero.

    Args:
        reference: y_i: "attn_out", the token after attention and its skip connection, or "block_out", the output of the
            block.
    """
    y = b.u if reference == "attn_out" else b.y
    scores = (y.abs().sum(-1, keepdim=True) - l1_distances(b, head_vectors(b, value_bias), y, ffn)).clamp_(min=0)
    total = scores.sum(-1, keepdim=True)
    empty = int((total == 0).sum())
    if empty:
        warn(
            f"alti: {empty} of {total.numel()} tokens of block {b.index} have no contributing source, so their rows "
            f"are zero; reference='attn_out' with ffn='skip' has the fewest such rows",
            DegenerateMap,
        )
    return scores / total.where(total > 0, 1.0)
