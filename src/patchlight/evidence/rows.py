"""Rows of token-to-token matrices that are never written.

Fused attention keeps no matrix, but its inputs define it: A_ij = exp(scale q_i.k_j - lse_i), and the gradient of A is
G_ij = dO_i.v_j with the gradient dO of the attention's output, under every backward rule. A method whose map is one row
of a product or sum of the blocks' matrices needs them only as operators: a row times the matrix, and the sums of its
rows. Both are computed from tiles that are summed and dropped: on CUDA by a kernel (`kernels.py`), elsewhere by
products of a few rows, small enough for a processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from patchlight.anatomy.windows import Reach

Entry = Literal["A", "G", "AG", "relu(G)", "relu(AG)", "abs(G)", "abs(AG)"]
"""Entry of one head's matrix at (to, from): attention, its gradient, their product, or a part of these."""


@dataclass(frozen=True, eq=False)
class Local:
    """The matrix [B,N,N] of the values in the windows of a block's attention [B,W,n,m], as an operator."""

    values: Tensor
    reach: Reach

    def pull(self, row: Tensor) -> Tensor:
        """row [B,N] times the matrix: [B,N]."""
        return self.reach.pull((self.reach.queries(row)[..., None, :] @ self.values)[..., 0, :])

    def sums(self) -> Tensor:
        """The sum of each row [B,N]."""
        return self.reach.sums(self.values)

    def mean_row(self) -> Tensor:
        """The mean of its rows [B,N]."""
        return self.pull(self.values.new_full((len(self.values), self.reach.tokens), 1 / self.reach.tokens))

    def written(self) -> Tensor:
        """The matrix itself [B,N,N]."""
        return self.reach.written(self.values)


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """One block's fused attention: its inputs q, k, v [B,H,N,d], and the log-sum-exp of its scores [B,H,N].

    `dO` [B,H,N,d] is the gradient of its output, to be multiplied by `unscale` [B]; None is a gradient of zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    scale: float
    dO: Tensor | None = None
    unscale: Tensor | None = None

    @property
    def A(self) -> Tensor:
        """The attention matrices [B,H,N,N], written out."""
        scores = _wide(self.q) @ _wide(self.k).mT
        return scores.mul_(self.scale).sub_(self.lse[..., None]).exp_()

    @property
    def G(self) -> Tensor:
        """The gradients of the attention matrices [B,H,N,N], written out."""
        if self.dO is None:
            return torch.zeros_like(self.A)
        return self._unscaled(_wide(self.dO) @ _wide(self.v).mT)

    def tiles(self, entry: Entry, read: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The matrices of an entry in tiles: the heads of all images [B*H], the rows among `read` [n], and the values.

        Values are [heads,rows,N]; they may be changed.
        """
        q, k, v, dO = (_wide(t).flatten(0, 1) for t in (self.q, self.k, self.v, self.output_gradient))
        lse, tokens = self.lse.flatten(0, 1)[..., None], k.shape[1]
        heads_at_once, rows_at_once = (max(1, TILE // n) for n in (tokens * max(1, len(read)), tokens))
        for begin in range(0, len(q), heads_at_once):
            heads = slice(begin, begin + heads_at_once)
            keys, values = k[heads].mT, v[heads].mT
            for rows in read.split(rows_at_once):
                A = (q[heads, rows] @ keys).mul_(self.scale).sub_(lse[heads, rows]).exp_() if "A" in entry else None
                G = dO[heads, rows] @ values if "G" in entry else None
                product = A if G is None else G if A is None else G.mul_(A)
                assert product is not None
                yield heads, rows, signed(entry, product)

    @property
    def output_gradient(self) -> Tensor:
        """dO, unscaled [B,H,N,d]."""
        return torch.zeros_like(self.v) if self.dO is None else self._unscaled(_wide(self.dO))

    def _unscaled(self, gradient: Tensor) -> Tensor:
        factors = self.unscale
        return gradient if factors is None else gradient * factors.view(-1, *[1] * (gradient.ndim - 1))

    def entries(self, entry: Entry) -> Tensor:
        """The matrices [B,H,N,N] of an entry, written out."""
        return signed(entry, self.A * self.G if "AG" in entry else self.G if "G" in entry else self.A)

    def gradient_mean(self, cells: slice) -> Tensor:
        """The mean of G over these attended tokens [B,H,N], without G."""
        if self.dO is None:
            return torch.zeros_like(self.lse)
        return self._unscaled((_wide(self.dO) @ _wide(self.v[:, :, cells]).mean(2)[..., None])[..., 0])


def signed(entry: Entry, values: Tensor) -> Tensor:
    """The part of A, G or A * G that an entry names: all, the positive part or the absolute value."""
    return values.relu() if entry.startswith("relu") else values.abs() if entry.startswith("abs") else values


def head_mean(values: Tensor, columns: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """mean_h rows_h[i] values_h[i,j] columns_h[j] [B,N,N] of values [B,H,N,N], without a second tensor of that size."""
    if columns is None and rows is None:
        return values.mean(1)
    heads = values.shape[1]
    weights = torch.ones((), device=values.device, dtype=values.dtype) / heads
    weights = weights if columns is None else weights * columns[:, :, None]
    weights = (weights if rows is None else weights * rows[..., None]).expand(-1, heads, -1, -1)
    total = values[:, 0] * weights[:, 0]
    for h in range(1, heads):
        total.addcmul_(values[:, h], weights[:, h])
    return total


@dataclass(frozen=True, eq=False)
class Rows:
    """The matrix [B,N,N] mean_h rows_h[i] f(A_h, G_h)[i,j] columns_h[j], f an entry, as an operator.

    `rows` and `columns` are [B,H,N], or [B,1,N] for all heads; None is 1.
    """

    attention: FusedAttention
    entry: Entry
    columns: Tensor | None = None
    rows: Tensor | None = None

    def pull(self, row: Tensor) -> Tensor:
        """row [B,N] times the matrix: [B,N]."""
        weights = row[:, None] if self.rows is None else row[:, None] * self.rows
        return _scaled(self._summed(weights, over_rows=True), self.columns).mean(1)

    def sums(self) -> Tensor:
        """The sum of each row [B,N]."""
        ones = torch.ones_like(self.attention.lse)
        if self.columns is None and self.entry == "A":
            return _scaled(ones, self.rows).mean(1)
        return _scaled(self._summed(ones if self.columns is None else self.columns, over_rows=False), self.rows).mean(1)

    def written(self) -> Tensor:
        """The matrix itself [B,N,N]."""
        return head_mean(self.attention.entries(self.entry), self.columns, self.rows)

    def _summed(self, weights: Tensor, over_rows: bool) -> Tensor:
        """sum_i w_h[i] f_h[i,j], or over the columns sum_j f_h[i,j] w_h[j]: [B,H,N], of weights [B,H or 1,N]."""
        seen = self.attention
        weights = weights.expand(seen.lse.shape)
        if "G" in self.entry and seen.dO is None:
            return torch.zeros_like(seen.lse)
        if seen.q.is_cuda:
            from patchlight.evidence.kernels import summed

            return summed(seen, self.entry, weights, over_rows)
        out = _wide(seen.q).new_zeros(seen.lse.shape).flatten(0, 1)
        weights = weights.to(out).flatten(0, 1)
        read = weights.any(0) if over_rows else weights.new_ones(weights.shape[1])  # a row of weight 0 adds nothing
        for heads, rows, values in seen.tiles(self.entry, read.nonzero().flatten()):
            if over_rows:
                out[heads] += (weights[heads, None, rows] @ values)[:, 0]
            else:
                out[heads, rows] = (values @ weights[heads, :, None])[..., 0]
        return out.view_as(seen.lse)


Matrix = Tensor | Rows | Local
"""A matrix [B,N,N] (to, from), written or not."""


def times(row: Tensor, matrix: Matrix) -> Tensor:
    """row [B,N] times a matrix: [B,N]."""
    return (row[:, None] @ matrix)[:, 0] if isinstance(matrix, Tensor) else matrix.pull(row)


def mean_row(matrix: Matrix) -> Tensor:
    """The mean of a matrix's rows [B,N]."""
    if isinstance(matrix, Tensor):
        return matrix.mean(1)
    if isinstance(matrix, Local):
        return matrix.mean_row()
    lse = matrix.attention.lse
    return matrix.pull(torch.full_like(lse[:, 0], 1 / lse.shape[-1]))


def row_sums(matrix: Matrix) -> Tensor:
    """The sums of a matrix's rows [B,N]."""
    return matrix.sum(-1) if isinstance(matrix, Tensor) else matrix.sums()


def written(matrix: Matrix) -> Tensor:
    """A matrix as a tensor [B,N,N]."""
    return matrix if isinstance(matrix, Tensor) else matrix.written()


def lengths(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """||a||, ||b|| and a.b over the last axis."""
    if a.is_cuda and a.dtype == b.dtype == torch.float32 and has_tiles():
        from patchlight.evidence.kernels import dots

        aa, ab, bb = dots(a, b)
        return aa.sqrt(), bb.sqrt(), ab
    return a.norm(dim=-1), b.norm(dim=-1), (a * b).sum(-1)


@cache
def has_tiles() -> bool:
    """Whether Triton, in which the tiles are written, is installed."""
    return find_spec("triton") is not None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    """Fused attention [B,H,N,d] by the kernel that torch would choose, and the log-sum-exp of its scores [B,H,N].

    None if that kernel does not return it.
    """
    ops = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        return out, lse.to(q.dtype) if q.dtype == torch.float64 else lse
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, False, scale=scale)
    if choice == _FLASH:
        out, lse, *_ = ops._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)
    elif choice == _CUDNN:
        out, lse, *_ = ops._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, scale=scale)
    else:
        return None
    return out, lse.view(lse.shape[:3])


TILE = 2**17
"""Numbers of a tile, which with its factors fits into a processor's cache."""
_FLASH, _CUDNN = 1, 3
"""The numbers of `torch.nn.attention.SDPBackend`."""


def _scaled(values: Tensor, factors: Tensor | None) -> Tensor:
    return values if factors is None else values * factors


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
