"""Tiles of attention and its gradient, recomputed on the fly and summed up: the CUDA side of `rows.py`.

One program has a block of tokens of one image and head, and goes over all other tokens, as the backward of fused
attention does: nothing of the size N x N is written, there are no atomics, and the result is the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchlight.evidence.rows import Attention, Entry

_SIGN = {"A": 0, "G": 0, "AG": 0, "relu(G)": 1, "relu(AG)": 1, "abs(G)": 2, "abs(AG)": 2}


def summed(seen: Attention, entry: Entry, weights: Tensor, over_rows: bool) -> Tensor:
    """sum_i w_h[i] f_h[i,j], or over the columns sum_j f_h[i,j] w_h[j]: [B,H,N] in float32, of weights [B,H,N]."""
    batch, heads, tokens, width = seen.q.shape
    out = torch.empty(batch, heads, tokens, device=seen.q.device, dtype=torch.float32)
    dO = seen.v if seen.dO is None else seen.dO
    q, k, v, dO = (t if t.stride(-1) == 1 else t.contiguous() for t in (seen.q, seen.k, seen.v, dO.to(seen.v.dtype)))
    there, here = ((q, dO), (k, v)) if over_rows else ((k, v), (q, dO))
    weights = weights.float()
    block = 64 if tokens > 32 else 32
    strides = [s for t in (*here, *there, weights) for s in t.stride()[:3]]
    _sum_tiles[(triton.cdiv(tokens, block), batch * heads)](
        *here, *there, seen.lse, weights, out, tokens, heads, seen.scale * _LOG2_E, *strides,
        WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)), BLOCK=block,
        ATTENTION="A" in entry, GRADIENT="G" in entry, SIGN=_SIGN[entry], OVER_ROWS=over_rows, num_warps=4,
    )  # fmt: skip
    return out


_LOG2_E = 1.4426950408889634


@triton.jit
def _sum_tiles(
    here_1, here_2, there_1, there_2, lse, weights, out, tokens, heads, scale,
    h1b, h1h, h1n, h2b, h2h, h2n, t1b, t1h, t1n, t2b, t2h, t2n, wb, wh, wn,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ATTENTION: tl.constexpr, GRADIENT: tl.constexpr, SIGN: tl.constexpr, OVER_ROWS: tl.constexpr,
):  # fmt: skip
    """`here`: (k, v) of a program's own tokens and `there` (q, dO) of all; or the other way round across columns."""
    image, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    image = image.to(tl.int64)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, PADDED)
    inside = (own[None, :] < tokens) & (channel[:, None] < WIDTH)
    lse += (image * heads + head) * tokens
    if ATTENTION:
        k = tl.load(here_1 + image * h1b + head * h1h + own[None, :] * h1n + channel[:, None], mask=inside, other=0.0)
    if GRADIENT:
        v = tl.load(here_2 + image * h2b + head * h2h + own[None, :] * h2n + channel[:, None], mask=inside, other=0.0)
    if ATTENTION and not OVER_ROWS:
        own_lse = tl.load(lse + own, mask=own < tokens, other=0.0) * 1.4426950408889634
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, tokens, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        valid = other < tokens
        rows = valid[:, None] & (channel[None, :] < WIDTH)
        w = tl.load(weights + image * wb + head * wh + other * wn, mask=valid, other=0.0)
        if tl.max(tl.abs(w)) > 0:
            f = tl.full([BLOCK, BLOCK], 1.0, tl.float32)
            if ATTENTION:
                q = tl.load(
                    there_1 + image * t1b + head * t1h + other[:, None] * t1n + channel[None, :], mask=rows, other=0.0
                )
                s = tl.dot(q, k, input_precision="ieee") * scale
                if OVER_ROWS:
                    f = tl.exp2(s - tl.load(lse + other, mask=valid, other=0.0)[:, None] * 1.4426950408889634)
                else:
                    f = tl.exp2(s - own_lse[None, :])
            if GRADIENT:
                d = tl.load(
                    there_2 + image * t2b + head * t2h + other[:, None] * t2n + channel[None, :], mask=rows, other=0.0
                )
                f *= tl.dot(d, v, input_precision="ieee")
            if SIGN == 1:
                f = tl.maximum(f, 0.0)
            if SIGN == 2:
                f = tl.abs(f)
            total += tl.sum(tl.where(valid[:, None], f, 0.0) * w[:, None], 0)
    tl.store(out + tl.program_id(1).to(tl.int64) * tokens + own, total, mask=own < tokens)
