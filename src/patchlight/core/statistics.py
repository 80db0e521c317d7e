"""Statistics over images: bootstrap resampling of any function of sums, ranks and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Mark = Literal["best", "tied", ""]
"""How a method compares with the best one."""
SIGNS: dict[Mark, str] = {"best": "*", "tied": "†", "": ""}
FEWEST = 6
"""The smallest number of images for an interval or a difference at 95 %.

With five, even if all agree, the p-value is 2 / 2^5 = 6 %.
"""
AT_ONCE = 2**22
"""Weights in memory at a time."""
KEPT = 2**28
"""Bytes of counts that are kept; more are sampled again whenever they are needed."""


class Summed(Protocol):
    """A quantity of a data set that is a function of sums over its images."""

    @property
    def exist(self) -> Tensor:
        """Which images have a value [B]."""

    def summed(self, images: Tensor | None = None) -> Tensor:
        """The columns to sum [n,k], of all images or of those with these indices; 0 where there is no value."""

    def number(self, sums: Tensor) -> Tensor:
        """The quantity [S] computed from sums [S,k]."""


class Resamples:
    """Bootstrap resamples: how often each of B images is sampled with replacement, S times.

    Counts are sampled when they are first needed and kept as bytes if they fit into memory (no image is ever sampled
    256 times). Sums are cached.
    """

    def __init__(self, images: int, samples: int = 1000, seed: int = 0) -> None:
        self.images, self.samples, self.seed = images, samples, seed
        self._kept: Tensor | None = None
        self._sums: dict[int, tuple[Summed, Tensor]] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}

    def numbers(self, pairs: Sequence[tuple[Summed, Tensor]]) -> list[Tensor]:
        """For each quantity and mask of images [B], the quantity [S] in every resample of these images."""
        missing = {id(quantity): quantity for quantity, _ in pairs if id(quantity) not in self._sums}
        new = self.sums(quantity.summed() for quantity in missing.values())
        self._sums |= {key: (quantity, sums) for (key, quantity), sums in zip(missing.items(), new, strict=True)}
        excluded = [(quantity.exist & ~mask).nonzero().flatten() for quantity, mask in pairs]
        partial = [(quantity, rows) for (quantity, _), rows in zip(pairs, excluded, strict=True) if len(rows)]
        excluded_sums = iter(self._sums_of_rows(partial))
        return [
            q.number(self._sums[id(q)][1] - next(excluded_sums) if len(rows) else self._sums[id(q)][1])
            for (q, _), rows in zip(pairs, excluded, strict=True)
        ]

    def sums(self, columns: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each tensor of columns [B,k], the sums [S,k] in float64 over the images of every resample."""
        for some in _within(columns, AT_ONCE):
            joined = some[0] if len(some) == 1 else torch.cat(some, 1)
            widths = [own.shape[1] for own in some]
            some.clear()  # frees memory: the parts may be large
            sums = torch.empty(self.samples, joined.shape[1], dtype=torch.float64)
            begin = 0
            for counts in self.counts():
                weights = self._buffer(joined.dtype)[: len(counts)].copy_(counts)
                sums[begin : begin + len(counts)] = weights @ joined
                begin += len(counts)
            del joined
            yield from sums.split(widths, 1)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        """A buffer for counts as weights; it is reused, as allocating it again and again fragments memory."""
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self._at_once, self.images, dtype=dtype)
        return self._buffers[dtype]

    @property
    def _at_once(self) -> int:
        return max(1, min(AT_ONCE // max(self.images, 1), self.samples))

    def _sums_of_rows(self, pairs: Sequence[tuple[Summed, Tensor]]) -> list[Tensor]:
        """For each quantity and a few images, given by index, the sums [S,k] over these images."""
        columns = [quantity.summed(rows).double() for quantity, rows in pairs]
        parts: list[list[Tensor]] = [[] for _ in pairs]
        for counts in self.counts() if pairs else ():
            for (_, rows), column, sums in zip(pairs, columns, parts, strict=True):
                sums.append(counts[:, rows].double() @ column)
        return [torch.cat(sums) for sums in parts]

    def counts(self) -> Iterator[Tensor]:
        """How often each image is sampled [s,B] uint8, for some resamples at a time; valid until the next one."""
        if self._kept is not None:
            yield from self._kept.split(self._at_once)
            return
        keep = self.images * self.samples <= KEPT
        buffer = torch.zeros(self.samples if keep else self._at_once, self.images, dtype=torch.uint8)
        sampled = torch.empty(self._at_once, self.images, dtype=torch.int64)
        one = torch.ones((), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self.seed)
        for begin in range(0, self.samples, self._at_once):
            size = min(self._at_once, self.samples - begin)
            counts = buffer[begin : begin + size] if keep else buffer[:size].zero_()
            if self.images:
                torch.randint(self.images, (size, self.images), generator=generator, out=sampled[:size])
                counts.scatter_add_(1, sampled[:size], one.expand_as(counts))
            yield counts
        self._kept = buffer if keep else None


def _within(columns: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The tensors in lists with at most `limit` numbers each, or one tensor."""
    some: list[Tensor] = []
    for own in columns:
        if some and sum(map(Tensor.numel, some)) + own.numel() > limit:
            yield some
            some = []
        some.append(own)
    if some:
        yield some


def bootstrap_weights(images: int, samples: int = 1000, seed: int = 0) -> Tensor:
    """How often each image is sampled in each resample [S,B], in float64."""
    return torch.cat([counts.double() for counts in Resamples(images, samples, seed).counts()])


def constant(maps: Tensor) -> Tensor:
    """Which maps [...,n] are constant up to rounding: max - min <= 64 eps max |map|."""
    return maps.amax(-1) - maps.amin(-1) <= 64 * torch.finfo(maps.dtype).eps * maps.abs().amax(-1)


def average_ranks(values: Tensor) -> Tensor:
    """The rank of each value in its row [B,n] in float64, 1 being the lowest; ties share their mean rank."""
    order = values.argsort(1)
    first, last = tie_spans(values.gather(1, order))
    ranks = (first + last).double() / 2 + 1
    return torch.empty_like(ranks).scatter_(1, order, ranks)


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of the rows of a and b [B,R]; NaN where a row is constant."""
    a, b = (values - values.mean(1, keepdim=True) for values in (a, b))
    correlation: Tensor = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return correlation


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation [B] of rows [B,n]; 0 if one of them is constant."""
    a, b = (r - r.mean(1, keepdim=True) for r in (average_ranks(a), average_ranks(b)))
    norm = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return (a * b).sum(1) / torch.where(norm > 0, norm, 1)


def tie_spans(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """For each element of sorted rows [B,n], the indices of the first and last element equal to it."""
    return ordered.shape[1] - 1 - tie_ends(ordered.flip(1)).flip(1), tie_ends(ordered)


def tie_ends(ordered: Tensor) -> Tensor:
    """For each element of sorted rows [B,n], the index of the last element equal to it."""
    index = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
    last = F.pad(ordered[:, 1:] != ordered[:, :-1], (0, 1), value=True)
    ends = torch.where(last, index, ordered.shape[1])
    return ends.flip(1).cummin(1).values.flip(1)


def percentiles(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The central interval of the finite values of a sample; NaN if there are none."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
