"""Statistics over images: the bootstrap as weights, so that any ratio of sums can be resampled at once; and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

Mark = Literal["best", "tied", ""]
"""How a method stands to the best."""
SIGNS: dict[Mark, str] = {"best": "*", "tied": "†", "": ""}
FEWEST = 6
"""Images from which on an interval or a difference can be claimed at 95 %.

Of fewer, even all on one side are no evidence: 2 / 2^5 = 6 %.
"""
AT_ONCE = 2**22
"""Numbers of weights that are held at a time."""
KEPT = 2**28
"""Bytes of counts that are kept; more are drawn whenever they are asked for."""


class Summed(Protocol):
    """Something whose number for a data set is made of sums over its images."""

    @property
    def exist(self) -> Tensor:
        """Which images have a value [B]."""

    def summed(self, images: Tensor | None = None) -> Tensor:
        """What is summed [n,k], of all images or of those at these places; 0 where there is no value."""

    def number(self, sums: Tensor) -> Tensor:
        """The number [S] of sums [S,k]."""


class Resamples:
    """Bootstrap resamples of some images: how often each is drawn, B draws with replacement, S times.

    They are drawn when they are first asked for, and kept as bytes where these are not too many: no image of a resample
    is ever drawn 256 times. Sums that were made are known from then on.
    """

    def __init__(self, images: int, samples: int = 1000, seed: int = 0) -> None:
        self.images, self.samples, self.seed = images, samples, seed
        self._kept: Tensor | None = None
        self._sums: dict[int, tuple[Summed, Tensor]] = {}
        self._rooms: dict[torch.dtype, Tensor] = {}

    def numbers(self, asked: Sequence[tuple[Summed, Tensor]]) -> list[Tensor]:
        """For each of these, its number [S] of every resample, of the images [B] that count and have a value."""
        missing = {id(own): own for own, _ in asked if id(own) not in self._sums}
        made = self.sums(own.summed() for own in missing.values())
        self._sums |= {key: (own, sums) for (key, own), sums in zip(missing.items(), made, strict=True)}
        left_out = [(own.exist & ~counts).nonzero().flatten() for own, counts in asked]
        fewer = [(own, places) for (own, _), places in zip(asked, left_out, strict=True) if len(places)]
        less = iter(self._of_some(fewer))
        return [
            own.number(self._sums[id(own)][1] - next(less) if len(places) else self._sums[id(own)][1])
            for (own, _), places in zip(asked, left_out, strict=True)
        ]

    def sums(self, columns: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each of these columns [B,k], their sums [S,k] in float64 over the images of every resample."""
        for some in _within(columns, AT_ONCE):
            joined = some[0] if len(some) == 1 else torch.cat(some, 1)
            widths = [own.shape[1] for own in some]
            some.clear()  # they may be large, and are not needed beside what they make together
            made = torch.empty(self.samples, joined.shape[1], dtype=torch.float64)
            begin = 0
            for counts in self.counts():
                weights = self._room(joined.dtype)[: len(counts)].copy_(counts)
                made[begin : begin + len(counts)] = weights @ joined
                begin += len(counts)
            del joined
            yield from made.split(widths, 1)

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Room for counts as weights, the same each time: freed and taken by turns, it would lie about in pieces."""
        if dtype not in self._rooms:
            self._rooms[dtype] = torch.empty(self._at_once, self.images, dtype=dtype)
        return self._rooms[dtype]

    @property
    def _at_once(self) -> int:
        return max(1, min(AT_ONCE // max(self.images, 1), self.samples))

    def _of_some(self, asked: Sequence[tuple[Summed, Tensor]]) -> list[Tensor]:
        """For each of these, its sums [S,k] over the images at these places: few of all."""
        columns = [own.summed(places).double() for own, places in asked]
        made: list[list[Tensor]] = [[] for _ in asked]
        for counts in self.counts() if asked else ():
            for (_, places), own, sums in zip(asked, columns, made, strict=True):
                sums.append(counts[:, places].double() @ own)
        return [torch.cat(sums) for sums in made]

    def counts(self) -> Iterator[Tensor]:
        """How often each image is drawn [s,B] uint8, some resamples at a time; each is good until the next is there."""
        if self._kept is not None:
            yield from self._kept.split(self._at_once)
            return
        keep = self.images * self.samples <= KEPT
        whole = torch.zeros(self.samples if keep else self._at_once, self.images, dtype=torch.uint8)
        drawn = torch.empty(self._at_once, self.images, dtype=torch.int64)
        one = torch.ones((), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(self.seed)
        for begin in range(0, self.samples, self._at_once):
            size = min(self._at_once, self.samples - begin)
            counts = whole[begin : begin + size] if keep else whole[:size].zero_()
            if self.images:
                torch.randint(self.images, (size, self.images), generator=generator, out=drawn[:size])
                counts.scatter_add_(1, drawn[:size], one.expand_as(counts))
            yield counts
        self._kept = whole if keep else None


def _within(columns: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """These tensors in lists, as many at once as have no more numbers than the limit."""
    some: list[Tensor] = []
    for own in columns:
        if some and sum(map(Tensor.numel, some)) + own.numel() > limit:
            yield some
            some = []
        some.append(own)
    if some:
        yield some


def bootstrap_weights(images: int, samples: int = 1000, seed: int = 0) -> Tensor:
    """How often each image is drawn in each resample [S,B] float64: B draws with replacement."""
    return torch.cat([counts.double() for counts in Resamples(images, samples, seed).counts()])


def constant(maps: Tensor) -> Tensor:
    """Which maps [...,n] have one value, rounding aside: max - min <= 64 eps max |map|."""
    return maps.amax(-1) - maps.amin(-1) <= 64 * torch.finfo(maps.dtype).eps * maps.abs().amax(-1)


def average_ranks(values: Tensor) -> Tensor:
    """The rank of each value in its row [B,n], 1 the lowest, equal ones sharing their mean rank, in float64."""
    order = values.argsort(1)
    first, last = tied(values.gather(1, order))
    ranks = (first + last).double() / 2 + 1
    return torch.empty_like(ranks).scatter_(1, order, ranks)


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation [B] of rows [B,n]; 0 where one of them is constant and so has no order."""
    a, b = (r - r.mean(1, keepdim=True) for r in (average_ranks(a), average_ranks(b)))
    norm = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return (a * b).sum(1) / torch.where(norm > 0, norm, 1)


def tied(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """For each element of sorted rows [B,n], the places of the first and the last one equal to it."""
    return ordered.shape[1] - 1 - tie_ends(ordered.flip(1)).flip(1), tie_ends(ordered)


def tie_ends(ordered: Tensor) -> Tensor:
    """For each element of sorted rows [B,n], the place of the last one equal to it."""
    places = torch.arange(ordered.shape[1], device=ordered.device).expand_as(ordered)
    last = F.pad(ordered[:, 1:] != ordered[:, :-1], (0, 1), value=True)
    ends = torch.where(last, places, ordered.shape[1])
    return ends.flip(1).cummin(1).values.flip(1)


def percentiles(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    """The central interval of a sample, undefined values left out; NaN where nothing is left."""
    values = values[values.isfinite()]
    if len(values) == 0:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
