"""Rows through a hierarchical model: attention within windows or to pooled tokens, and merged patches between stages.

Attention within windows is a matrix over a stage's tokens that is zero outside them; attention to pooled tokens is a
rectangular matrix times the composition of each pooled token. Where tokens are merged (2 x 2 in Swin), a row is pulled
through the mean: the share of a merged token is split equally among its children, so the sum of a row is preserved. The
model mixes children by a linear map of all their channels, which favours none of them; any other split would be a
separate method.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Grid = tuple[int, int]


@dataclass(frozen=True)
class Merging:
    """Tokens of a `coarse` grid, each made of `kernel` x `kernel` children on a `fine` grid, `stride` apart.

    The first child of the first token is `padding` before the grid; children outside the grid do not count.
    """

    fine: Grid
    coarse: Grid
    kernel: int = 2
    stride: int = 2
    padding: int = 0

    def pull(self, row: Tensor) -> Tensor:
        """A row [...,M] over the coarse tokens as one over the fine tokens [...,N]: each share is split equally.

        A token that joins in front of the coarse ones has no children, and its share is dropped.
        """
        row = row[..., -math.prod(self.coarse) :]
        shares = (row / self.children(row)).reshape(-1, 1, row.shape[-1]).expand(-1, self.kernel**2, -1)
        whole = F.fold(shares, self._padded_size, self.kernel, stride=self.stride)
        return F.pad(whole, [-side for side in self._sides]).reshape(*row.shape[:-1], -1)

    def per_token(self, values: Tensor, batch: int) -> Tensor:
        """Values of all coarse tokens, in any shape, as values [B,N] of the fine tokens; values of fine tokens stay."""
        values = values.reshape(batch, -1)
        return values if values.shape[1] == self.fine[0] * self.fine[1] else self.pull(values)

    @property
    def _padded_size(self) -> Grid:
        rows, columns = ((side - 1) * self.stride + self.kernel for side in self.coarse)
        return rows, columns

    @property
    def _sides(self) -> list[int]:
        """Padding of the children's grid beyond the fine grid: left, right, top, bottom."""
        (rows, columns), (fine_rows, fine_columns) = self._padded_size, self.fine
        pad = self.padding
        return [pad, columns - fine_columns - pad, pad, rows - fine_rows - pad]

    def children(self, like: Tensor) -> Tensor:
        """Number of children of each coarse token [M], in the type of `like`."""
        there = F.pad(like.new_ones(1, 1, *self.fine), self._sides)
        return F.unfold(there, self.kernel, stride=self.stride).sum(1)[0]


@dataclass(frozen=True)
class Bins(Merging):
    """Tokens of a coarse grid, each the mean of a bin of the fine grid, as in adaptive pooling: bins may overlap.

    `kernel`, `stride` and `padding` are not used.
    """

    def pull(self, row: Tensor) -> Tensor:
        rows, columns = self._means(row)
        pulled: Tensor = rows.mT @ row.unflatten(-1, self.coarse) @ columns
        return pulled.flatten(-2)

    def children(self, like: Tensor) -> Tensor:
        rows, columns = ((means > 0).to(like.dtype).sum(1) for means in self._means(like))
        return (rows[:, None] * columns).flatten()

    def _means(self, like: Tensor) -> list[Tensor]:
        """The cells of the fine grid that each bin averages [bins, cells], along each side."""
        sides = zip(self.fine, self.coarse, strict=True)
        return [F.adaptive_avg_pool1d(torch.eye(cells).to(like)[None], bins)[0].mT for cells, bins in sides]


class Reach(ABC):
    """Which of N tokens an attention connects: W windows of n queries and m keys, A [B*W,H,n,m]."""

    tokens: int
    shape: tuple[int, int, int]
    """W, n and m."""

    def to(self, device: torch.device) -> Reach:
        """The same on a device."""
        return self

    def misses(self, matrix: Tensor) -> str | None:
        """Why it does not describe attention [B*W,H,n,m] of one image; None if it does."""
        windows, queries, keys = self.shape
        if (len(matrix), *matrix.shape[-2:]) == self.shape:
            return None
        return f"its attention is {list(matrix.shape)}, not {windows} times of {queries} tokens to {keys}"

    @abstractmethod
    def queries(self, values: Tensor) -> Tensor:
        """Values [...,N] of the tokens arranged as the queries of the windows [...,W,n]; padding has 0."""

    @abstractmethod
    def keys(self, values: Tensor) -> Tensor | None:
        """Values [...,N] of the tokens arranged as keys [...,W,m]; None if a key is several tokens."""

    @abstractmethod
    def pull(self, rows: Tensor) -> Tensor:
        """Rows over the keys [B,W,m] as one over the tokens [B,N]."""

    @abstractmethod
    def sums(self, values: Tensor) -> Tensor:
        """The sums [B,N] of the rows of matrices [B,W,n,m], over keys that are tokens."""

    @abstractmethod
    def written(self, values: Tensor) -> Tensor:
        """Matrices [...,W,n,m] as one [...,N,N]."""

    @abstractmethod
    def gradients(self, values: Tensor) -> Tensor:
        """Gradients of attention [...,W,n,m] in the form that `pull` and `written` expect.

        They are not shares, so each token gets the full value; 0 where attention is impossible.
        """

    @abstractmethod
    def means(self, values: Tensor) -> Tensor:
        """The means [B,N] of the rows of gradients [B,W,n,m], over the tokens that a row can attend to."""

    @abstractmethod
    def per_token(self, values: Tensor, batch: int) -> Tensor:
        """Values of all queries or keys, in any shape, as values [B,N] of the tokens, with the same sum."""


class Windows(Reach):
    """Attention within windows: `slots` [W,n] are the tokens of each, in order, with -1 for padding.

    `allowed` [W,n,n] is which tokens may attend to which, where a mask splits a window that was shifted over the
    edge.
    """

    def __init__(self, slots: Tensor, allowed: Tensor | None = None) -> None:
        self._slots, self._real = slots, slots >= 0
        self._allowed = self._real[:, None] if allowed is None else self._real[:, None] & allowed
        self.tokens = int(self._real.sum())
        self.shape = (*slots.shape, slots.shape[1])
        self._places = slots.flatten().argsort()[slots.numel() - self.tokens :]

    def to(self, device: torch.device) -> Windows:
        return Windows(self._slots.to(device), self._allowed.to(device))

    def queries(self, values: Tensor) -> Tensor:
        return values[..., self._slots] * self._real.to(values.dtype)

    def keys(self, values: Tensor) -> Tensor:
        return self.queries(values)

    def pull(self, rows: Tensor) -> Tensor:
        return rows.flatten(1)[:, self._places]

    def sums(self, values: Tensor) -> Tensor:
        return self.pull((values * self._real[:, None]).sum(-1))

    def written(self, values: Tensor) -> Tensor:
        whole = values.new_zeros(*values.shape[:-3], self.tokens + 1, self.tokens + 1)
        whole[..., self._slots[:, :, None], self._slots[:, None]] = values  # -1, the last, is padding
        return whole[..., :-1, :-1]

    def gradients(self, values: Tensor) -> Tensor:
        return values * self._allowed

    def means(self, values: Tensor) -> Tensor:
        return self.pull(self.gradients(values).sum(-1) / self._allowed.sum(-1).clamp_min(1))

    def per_token(self, values: Tensor, batch: int) -> Tensor:
        """Values in padding are shared equally by the tokens of the window."""
        values = values.reshape(batch, *self._slots.shape)
        lost = (values * ~self._real).sum(-1, keepdim=True)
        return self.pull(values + lost / self._real.sum(-1, keepdim=True).clamp_min(1))


class Pooled(Reach):
    """Attention of all tokens to pooled ones: one window, whose keys are merged tokens."""

    def __init__(self, merging: Merging) -> None:
        self._merging = merging
        self.tokens = merging.fine[0] * merging.fine[1]
        self.shape = (1, self.tokens, merging.coarse[0] * merging.coarse[1])

    def queries(self, values: Tensor) -> Tensor:
        return values[..., None, :]

    def keys(self, values: Tensor) -> None:
        return None

    def pull(self, rows: Tensor) -> Tensor:
        return self._merging.pull(rows[:, 0])

    def sums(self, values: Tensor) -> Tensor:
        return values[:, 0].sum(-1)

    def written(self, values: Tensor) -> Tensor:
        return self._merging.pull(values[..., 0, :, :])

    def gradients(self, values: Tensor) -> Tensor:
        return values * self._merging.children(values)

    def means(self, values: Tensor) -> Tensor:
        return self.gradients(values)[:, 0].sum(-1) / self._merging.children(values).sum()

    def per_token(self, values: Tensor, batch: int) -> Tensor:
        return self._merging.per_token(values, batch)
