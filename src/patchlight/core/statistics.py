"""Statistics over images: bootstrap resampling of any function of sums, ranks and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Mark = Literal["best", "tied", ""]
"""Whether a method is the best one or does not differ significantly from it."""
SIGNS: dict[Mark, str] = {"best": "*", "tied": "†", "": ""}
FEWEST = 6
"""The smallest number of images for an interval or a difference at 95 %.

With five, even if all agree, the p-value is 2 / 2^5 = 6 %.
"""
AT_ONCE = 2**22
"""Maximum number of weights in memory at a time."""
CACHED = 2**28
"""Maximum bytes of counts that are cached; more are sampled again each time."""


class Summed(Protocol):
    """A quantity of a data set: a function of sums over its images."""

    @property
    def exist(self) -> Tensor:
        """Which images have a value [B]."""

    def summed(self, images: Tensor | None = None) -> Tensor:
        """The columns to sum [n,k] of the images at these indices (default: all); 0 for an image without a value."""

    def number(self, sums: Tensor) -> Tensor:
        """The quantity [S] computed from sums [S,k]."""


class Resamples:
    """S bootstrap resamples of B images: how often each image is sampled, with replacement.

    Counts are sampled when they are first needed and cached as bytes if they fit into memory (no image is ever sampled
    256 times). Sums are cached.
    """

    def __init__(self, images: int, samples: int = 1000, seed: int = 0) -> None:
        self.images, self.samples, self.seed = images, samples, seed
        self._counts: Tensor | None = None
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
        for parts in _within(columns, AT_ONCE):
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            widths = [part.shape[1] for part in parts]
            parts.clear()  # frees memory: the parts may be large
            sums = torch.empty(self.samples, joined.shape[1], dtype=torch.float64)
            begin = 0
            for counts in self.counts():
                weights = self._buffer(joined.dtype)[: len(counts)].copy_(counts)
                sums[begin : begin + len(counts)] = weights @ joined
                begin += len(counts)
            del joined
            yield from sums.split(widths, 1)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        """A buffer for counts as weights, which is reused because repeated allocation fragments memory."""
        if dtype not in self._buffers:
            self._buffers[dtype] = torch.empty(self._at_once, self.images, dtype=dtype)
        return self._buffers[dtype]

    @property
    def _at_once(self) -> int:
        return max(1, min(AT_ONCE // max(self.images, 1), self.samples))

    def _sums_of_rows(self, pairs: Sequence[tuple[Summed, Tensor]]) -> list[Tensor]:
        """For each quantity and the indices of a few images, the sums [S,k] over these images."""
        columns = [quantity.summed(rows).double() for quantity, rows in pairs]
        parts: list[list[Tensor]] = [[] for _ in pairs]
        for counts in self.counts() if pairs else ():
            for (_, rows), column, sums in zip(pairs, columns, parts, strict=True):
                sums.append(counts[:, rows].double() @ column)
        return [torch.cat(sums) for sums in parts]

    def counts(self) -> Iterator[Tensor]:
        """How often each image is sampled, in chunks [s,B] uint8 of resamples; each is valid until the next one."""
        if self._counts is not None:
            yield from self._counts.split(self._at_once)
            return
        cached = self.images * self.samples <= CACHED
        buffer = torch.zeros(self.samples if cached else self._at_once, self.images, dtype=torch.uint8)
        sampled = torch.empty(self._at_once, self.images, dtype=torch.int64)
        unit = torch.ones((), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self.seed)
        for begin in range(0, self.samples, self._at_once):
            size = min(self._at_once, self.samples - begin)
            counts = buffer[begin : begin + size] if cached else buffer[:size].zero_()
            if self.images:
                torch.randint(self.images, (size, self.images), generator=generator, out=sampled[:size])
                counts.scatter_add_(1, sampled[:size], unit.expand_as(counts))
            yield counts
        self._counts = buffer if cached else None


def _within(columns: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The tensors in lists with at most `limit` numbers each, or one tensor."""
    parts: list[Tensor] = []
    for column in columns:
        if parts and sum(map(Tensor.numel, parts)) + column.numel() > limit:
            yield parts
            parts = []
        parts.append(column)
    if parts:
        yield parts


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
