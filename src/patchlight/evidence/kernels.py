"""Tiles of attention and its gradient, recomputed on the fly and summed: the CUDA side of `rows.py`.

Each program has a block of tokens of one image and head and iterates over all other tokens, like the backward of fused
attention: nothing of size N x N is written, there are no atomics, and the result is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchlight.evidence.rows import Entry, FusedAttention

_SIGN = {"A": 0, "G": 0, "AG": 0, "relu(G)": 1, "relu(AG)": 1, "abs(G)": 2, "abs(AG)": 2}


def summed(seen: FusedAttention, entry: Entry, weights: Tensor, over_rows: bool) -> Tensor:
    """sum_i w_h[i] f_h[i,j], or over the columns sum_j f_h[i,j] w_h[j]: [B,H,N] in float32, of weights [B,H,N]."""
    batch, heads, tokens, width = seen.q.shape
    out = torch.empty(batch, heads, tokens, device=seen.q.device, dtype=torch.float32)
    dO = seen.v if seen.dO is None else seen.dO
    q, k, v, dO = (t if t.stride(-1) == 1 else t.contiguous() for t in (seen.q, seen.k, seen.v, dO.to(seen.v.dtype)))
    there, here = ((q, dO), (k, v)) if over_rows else ((k, v), (q, dO))
    weights = weights.float()
    strides = [s for t in (*here, *there, weights) for s in t.stride()[:3]]
    own, other, warps, stages = TILE
    with torch.cuda.device(out.device):
        _sum_tiles[(triton.cdiv(tokens, own), batch * heads)](
            *here, *there, seen.lse, weights, seen.unscale if "G" in entry else None, out,
            tokens, heads, width, seen.scale * _LOG2_E, *strides,
            PADDED=max(16, triton.next_power_of_2(width)), OWN=own, OTHER=other,
            ATTENTION="A" in entry, GRADIENT="G" in entry, SIGN=_SIGN[entry], OVER_ROWS=over_rows,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


TILE = (128, 32, 4, 3)
"""Tokens of a program, tokens per iteration, warps, and pipeline stages."""
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["tokens", "heads"])
def _sum_tiles(
    here_1, here_2, there_1, there_2, lse, weights, unscale, out, tokens, heads, width, scale,
    h1b, h1h, h1n, h2b, h2h, h2n, t1b, t1h, t1n, t2b, t2h, t2n, wb, wh, wn,
    PADDED: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr,
    ATTENTION: tl.constexpr, GRADIENT: tl.constexpr, SIGN: tl.constexpr, OVER_ROWS: tl.constexpr,
):  # fmt: skip
    """`here`: (k, v) of the program's tokens and `there` (q, dO) of all; swapped for sums across columns."""
    image, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    here_1 += image * h1b + head * h1h
    here_2 += image * h2b + head * h2h
    there_1 += image * t1b + head * t1h
    there_2 += image * t2b + head * t2h
    weights += image * wb + head * wh
    lse += (image * heads + head) * tokens
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    channel = tl.arange(0, PADDED)
    inside = (own[None, :] < tokens) & (channel[:, None] < width)
    if ATTENTION:
        k = tl.load(here_1 + own[None, :] * h1n + channel[:, None], mask=inside, other=0.0)
        if not OVER_ROWS:
            own_lse = tl.load(lse + own, mask=own < tokens, other=0.0) * 1.4426950408889634
    if GRADIENT:
        v = tl.load(here_2 + own[None, :] * h2n + channel[:, None], mask=inside, other=0.0)
    stop = 0  # after the last token with a weight: if only CLS is read, one tile is left
    for begin in range(0, tokens, OTHER):
        w = tl.load(weights + (begin + tl.arange(0, OTHER)) * wn, mask=begin + tl.arange(0, OTHER) < tokens, other=0.0)
        stop = tl.where(tl.max((w != 0).to(tl.int32)) > 0, begin + OTHER, stop)
    total = tl.zeros([OWN], tl.float32)
    for begin in range(0, stop, OTHER):
        other = begin + tl.arange(0, OTHER)
        valid = other < tokens
        rows = valid[:, None] & (channel[None, :] < width)
        w = tl.load(weights + other * wn, mask=valid, other=0.0)
        f = tl.full([OTHER, OWN], 1.0, tl.float32)
        if ATTENTION:
            q = tl.load(there_1 + other[:, None] * t1n + channel[None, :], mask=rows, other=0.0)
            s = tl.dot(q, k) * scale
            if OVER_ROWS:
                f = tl.exp2(s - tl.load(lse + other, mask=valid, other=0.0)[:, None] * 1.4426950408889634)
            else:
                f = tl.where(valid[:, None], tl.exp2(s - own_lse[None, :]), 0.0)
        if GRADIENT:
            d = tl.load(there_2 + other[:, None] * t2n + channel[None, :], mask=rows, other=0.0)
            f *= tl.dot(d, v)
        if SIGN == 1:
            f = tl.maximum(f, 0.0)
        if SIGN == 2:
            f = tl.abs(f)
        total += tl.sum(f * w[:, None], 0)
    if unscale is not None:
        total *= tl.load(unscale + image)
    tl.store(out + (image * heads + head) * tokens + own, total, mask=own < tokens)


def dots(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a.a, a.b and b.b over the last axis, reading both once."""
    a, b = a.contiguous(), b.contiguous()
    width, out = a.shape[-1], torch.empty(3, *a.shape[:-1], device=a.device, dtype=torch.float32)
    count, block = out[0].numel(), triton.next_power_of_2(width)
    rows = max(1, 2048 // block)
    with torch.cuda.device(out.device):
        _dots[(triton.cdiv(count, rows),)](a, b, out, count, width, ROWS=rows, BLOCK=block)
    return out[0], out[1], out[2]


@triton.jit
def _dots(a, b, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    inside = (row[:, None] < count) & (channel[None, :] < width)
    x = tl.load(a + row[:, None] * width + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b + row[:, None] * width + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(x * x, 1), mask=row < count)
    tl.store(out + count + row, tl.sum(x * y, 1), mask=row < count)
    tl.store(out + 2 * count + row, tl.sum(y * y, 1), mask=row < count)


def times_ndtr(gradient: Tensor, h: Tensor) -> Tensor:
    """gradient * Phi(h), Phi the normal distribution function, in one kernel."""
    h, gradient = h.contiguous(), gradient.contiguous()
    out = torch.empty_like(gradient)
    with torch.cuda.device(out.device):
        _times_ndtr[(triton.cdiv(h.numel(), 1024),)](gradient, h, out, h.numel(), BLOCK=1024)
    return out


@triton.jit
def _times_ndtr(gradient, h, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(h + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, g * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)), mask=at < count)
