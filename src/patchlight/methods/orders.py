"""Searches for an order of regions, guided by a set function and a prior; used by `search` and `mda`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SetFunction = Callable[[Tensor], Tensor]
"""Returns the values [R,k] of sets of regions, given as indices [R,k,m]; row r is an image with a class."""


class Order(NamedTuple):
    """An order of regions [R,n], and the number of sets that were valued for each row.

    The regions from `first` to before `last` were not searched; they are in the order of the prior.
    """

    regions: Tensor
    valued: int
    first: int
    last: int


class _End:
    """One end of an order: the regions placed there so far, and the last known values of the other regions."""

    def __init__(self, prior: Tensor, sign: int) -> None:
        self.sign = sign
        self.placed = torch.empty(len(prior), 0, dtype=torch.long, device=prior.device)
        self.stale = torch.full_like(prior, torch.inf)
        """Last known value minus the best value of that step; infinity for a region that was never valued."""

    def candidates(self, window: Tensor, count: int) -> Tensor:
        """The `count` regions of a window [R,w] with the largest last known values, in the order of the window."""
        stale = self.stale.gather(1, window)
        places = stale.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values
        return window.gather(1, places)

    def place(self, candidates: Tensor, values: Tensor) -> Tensor:
        """Place the best candidate, and return it [R,1]."""
        worth = (self.sign * values).to(self.stale)
        top, at = worth.max(1, keepdim=True)
        self.stale.scatter_(1, candidates, worth - top)
        best = candidates.gather(1, at)
        self.placed = torch.cat([self.placed, best], 1)
        return best


def extended_sets(members: Tensor, candidates: Tensor) -> Tensor:
    """The sets [R,k,m+1] of the members [R,m] and one candidate [R,k] each."""
    return torch.cat([members[:, None].expand(-1, candidates.shape[1], -1), candidates[..., None]], -1)


def complements(sets: Tensor, count: int) -> Tensor:
    """The regions [R,k,count-m] that are not in sets [R,k,m] of `count` regions."""
    inside = torch.zeros(*sets.shape[:2], count, dtype=torch.uint8, device=sets.device).scatter_(2, sets, 1)
    return inside.argsort(dim=2, stable=True)[..., : count - sets.shape[2]]


def _drop(remaining: Tensor, best: Tensor) -> Tensor:
    """Remove one region [R,1] of each row from regions [R,m]."""
    at = (remaining == best).to(torch.uint8).argmax(1, keepdim=True)
    index = torch.arange(remaining.shape[1] - 1, device=remaining.device)
    return remaining.gather(1, index + (index >= at))


def guided_order(
    value: SetFunction,
    prior: Tensor,
    width: int,
    fresh: int | None = None,
    two_ended: bool = False,
    budget: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> Order:
    """Order regions by a greedy search.

    Each step values the shown regions together with each of the `width` remaining regions with the largest prior, and
    shows the best one. Ties, and the regions that remain when the budget is spent, are in the order of the prior.

    Args:
        value: The set function.
        prior: Values of the regions [R,n].
        width: Number of candidates in each step; with n, the search is plain greedy.
        fresh: Number of candidates that are valued in each step after the first: those that were never valued, and
            those with the largest last known values (lazy greedy). None: all.
        two_ended: Whether each step also places one region at the other end of the order: of the `width` with the
            smallest prior, the one with the smallest value together with those placed there (Chen et al., LiMA, 2025).
        budget: Maximum number of sets that are valued for each row; None: no limit.
        stop: Returns whether the search ends before the next step, as if the budget were spent.
    """
    remaining = prior.argsort(dim=1, descending=True, stable=True)
    front, back, valued = _End(prior, 1), _End(prior, -1), 0

    def candidates(end: _End) -> Tensor:
        window = remaining[:, :width] if end is front else remaining[:, -width:].flip(1)
        return end.candidates(window, width if fresh is None or end.placed.shape[1] == 0 else fresh)

    spent = False
    while remaining.shape[1] > 1 and not spent and not (stop is not None and stop()):
        ends = [front, back] if two_ended and remaining.shape[1] > width + 1 else [front]
        overlap = remaining.shape[1] < 2 * width  # both ends have the same candidates, so the second end has to wait
        for step in [[end] for end in ends] if overlap else [ends]:
            tried = [(end, candidates(end)) for end in step]
            counts = [regions.shape[1] for _, regions in tried]
            spent = budget is not None and valued + sum(counts) > budget
            if spent:
                break
            values = value(torch.cat([extended_sets(end.placed, regions) for end, regions in tried], 1))
            valued += sum(counts)
            for (end, regions), worth in zip(tried, values.split(counts, 1), strict=True):
                remaining = _drop(remaining, end.place(regions, worth))
    first, unplaced = front.placed.shape[1], remaining.shape[1]
    regions = torch.cat([front.placed, remaining, back.placed.flip(1)], 1)
    return Order(regions, valued, first, first + (unplaced if unplaced > 1 else 0))


WINDOW, SELECT, PARK, ACCEPT, SLOPE, LAST = 0.3, 0.6, 0.05, 0.99, 0.02, 0.98
"""PhaseWin: the size of the window as a share of the regions; the shares of a phase's best value from which a region is
a candidate, and below which it is parked; the share of the window's best value from which a region is accepted; how
much faster values may fall from window to window; and the smallest ratio of the last window's value to the previous
one."""


class _Spent(Exception):
    """The budget is spent."""


def phased_order(value: SetFunction, prior: Tensor, budget: int | None = None) -> Order:
    """Order regions by a search in phases (PhaseWin, our reading).

    A phase values all remaining regions and shows the best one, then values the others again: regions with small values
    are parked, regions with large values are candidates. A window over the candidates is valued, all regions close to
    its best one are shown together, and the next candidates fill the window, until values fall faster. At the end,
    parked regions follow in the order of their values.

    Args:
        value: The set function, not negative; only ratios of its values matter.
        prior: Values of the regions [1,n]; it orders ties and the regions that remain when the budget is spent.
        budget: Maximum number of sets that are valued; None: no limit.
    """
    ranked = prior.argsort(dim=1, descending=True, stable=True)
    shown, remaining, parked = ranked[:, :0], ranked, ranked[:, :0]
    width, valued = max(1, round(WINDOW * ranked.shape[1])), 0

    def worth(regions: Tensor) -> Tensor:
        nonlocal valued
        if budget is not None and valued + regions.shape[1] > budget:
            raise _Spent
        valued += regions.shape[1]
        return value(extended_sets(shown, regions)).to(prior)[0]

    def show(regions: Tensor) -> None:
        nonlocal shown, remaining
        shown = torch.cat([shown, regions], 1)
        remaining = remaining[:, torch.isin(remaining[0], regions[0], invert=True)]

    try:
        while remaining.shape[1] > 1:
            show(remaining[:, worth(remaining).argmax().view(1)])
            values = worth(remaining)
            top = values.max()
            chosen = (values >= SELECT * top).nonzero()[:, 0]
            pool = remaining[:, chosen[values[chosen].argsort(descending=True, stable=True)]]
            parked = torch.cat([parked, remaining[:, values < PARK * top]], 1)
            remaining = remaining[:, values >= PARK * top]
            bests: list[float] = []
            while pool.shape[1]:
                window = pool[:, :width]
                values = worth(window)
                best = max(float(values.max()), torch.finfo(values.dtype).tiny)
                steep = len(bests) > 1 and bests[-1] / best - bests[-2] / bests[-1] > SLOPE
                good = values >= max(SELECT * float(top), best if steep else ACCEPT * best)
                if steep and best < LAST * bests[-1]:
                    break
                order = values.argsort(descending=True, stable=True)
                accepted = window[:, order[good[order]]]
                show(accepted)
                pool = pool[:, torch.isin(pool[0], accepted[0], invert=True)]
                bests.append(best)
                if steep or accepted.shape[1] == 0:
                    break
        last = torch.cat([remaining, parked], 1)
        if last.shape[1] > 1:
            last = last[:, worth(last).argsort(descending=True, stable=True)]
        regions, first = torch.cat([shown, last], 1), ranked.shape[1]
    except _Spent:
        unsearched = ranked[:, torch.isin(ranked[0], shown[0], invert=True)]
        regions, first = torch.cat([shown, unsearched], 1), shown.shape[1]
    return Order(regions, valued, first, ranked.shape[1])
