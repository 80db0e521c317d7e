"""Searches for an order of regions that a set function and a prior guide: `search` and `mda` use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SetFunction = Callable[[Tensor], Tensor]
"""From sets of regions, as indices [R,k,m], to their values [R,k]; row r is an image with a class."""


class Order(NamedTuple):
    """An order of regions [R,n] and how many sets were valued for each row.

    Its regions from `first` to before `last` were not searched; the prior orders them.
    """

    regions: Tensor
    valued: int
    first: int
    last: int


class _End:
    """One end of an order: the regions placed there so far, and what the others were worth when last valued."""

    def __init__(self, prior: Tensor, sign: int) -> None:
        self.sign = sign
        self.placed = torch.empty(len(prior), 0, dtype=torch.long, device=prior.device)
        self.stale = torch.full_like(prior, torch.inf)
        """Value minus the best of the same step; infinity for a region that was never valued."""

    def candidates(self, window: Tensor, count: int) -> Tensor:
        """The `count` regions of a window [R,w] that were worth most when last valued, in the window's order."""
        stale = self.stale.gather(1, window)
        some = stale.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values
        return window.gather(1, some)

    def sets(self, candidates: Tensor) -> Tensor:
        """The placed regions with each of the candidates [R,k,m]."""
        return extended_sets(self.placed, candidates)

    def place(self, candidates: Tensor, values: Tensor) -> Tensor:
        """The best candidate [R,1], which is placed."""
        worth = (self.sign * values).to(self.stale)
        top, at = worth.max(1, keepdim=True)
        self.stale.scatter_(1, candidates, worth - top)
        best = candidates.gather(1, at)
        self.placed = torch.cat([self.placed, best], 1)
        return best


def extended_sets(members: Tensor, candidates: Tensor) -> Tensor:
    """A set [R,m] with each of its candidates [R,k]: sets [R,k,m+1]."""
    return torch.cat([members[:, None].expand(-1, candidates.shape[1], -1), candidates[..., None]], -1)


def complements(sets: Tensor, count: int) -> Tensor:
    """The regions [R,k,count-m] that are not in sets [R,k,m] of `count` regions."""
    inside = torch.zeros(*sets.shape[:2], count, dtype=torch.uint8, device=sets.device).scatter_(2, sets, 1)
    return inside.argsort(dim=2, stable=True)[..., : count - sets.shape[2]]


def _drop(remaining: Tensor, best: Tensor) -> Tensor:
    """Regions [R,m] without one of each row [R,1]."""
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
    """Regions in the order of a greedy search.

    Each step values the shown regions together with each of the `width` remaining regions that the prior [R,n] ranks
    highest, and shows the best one. Equal values, and regions that are left when the budget is spent, follow the prior.

    Args:
        value: The set function.
        prior: Values of the regions [R,n].
        width: Candidates of a step; n of them make the search plain greedy.
        fresh: Value only so many of the candidates in each step after the first: those that were never valued, and
            those that were worth most when last valued (lazy greedy). None: all.
        two_ended: In each step, also place one region at the other end of the order: of the `width` lowest by the
            prior, the one that is worth least together with those already placed there (Chen et al., LiMA, 2025).
        budget: Most sets to value for each row; None: no limit.
        stop: Whether to end before the next step, as if the budget were spent.
    """
    remaining = prior.argsort(dim=1, descending=True, stable=True)
    front, back, valued = _End(prior, 1), _End(prior, -1), 0

    def candidates(end: _End) -> Tensor:
        window = remaining[:, :width] if end is front else remaining[:, -width:].flip(1)
        return end.candidates(window, width if fresh is None or end.placed.shape[1] == 0 else fresh)

    spent = False
    while remaining.shape[1] > 1 and not spent and not (stop is not None and stop()):
        ends = [front, back] if two_ended and remaining.shape[1] > width + 1 else [front]
        if remaining.shape[1] < 2 * width:  # both ends have the same candidates, so the second end has to wait
            steps = [[end] for end in ends]
        else:
            steps = [ends]
        for step in steps:
            tried = [candidates(end) for end in step]
            count = sum(some.shape[1] for some in tried)
            spent = budget is not None and valued + count > budget
            if spent:
                break
            values = value(torch.cat([end.sets(some) for end, some in zip(step, tried, strict=True)], 1))
            valued += count
            for end, some, own in zip(step, tried, values.split([t.shape[1] for t in tried], 1), strict=True):
                remaining = _drop(remaining, end.place(some, own))
    first, unplaced = front.placed.shape[1], remaining.shape[1]
    regions = torch.cat([front.placed, remaining, back.placed.flip(1)], 1)
    return Order(regions, valued, first, first + (unplaced if unplaced > 1 else 0))


WINDOW, SELECT, PARK, ACCEPT, SLOPE, LAST = 0.3, 0.6, 0.05, 0.99, 0.02, 0.98
"""PhaseWin: candidates that its window holds, as a share of the regions; and the shares of the best value of a phase at
which a region becomes a candidate or is parked, of the best value in the window at which it is accepted, how much
faster values may fall from window to window, and the share of the value before that the last one must have."""


class _Spent(Exception):
    """The budget does not allow these values."""


def phased_order(value: SetFunction, prior: Tensor, budget: int | None = None) -> Order:
    """The order of a search in phases (PhaseWin, our reading).

    A phase values all remaining regions and shows the best one, then values all others again: those that are worth
    little are parked, those that are worth much are candidates. A window over the candidates is valued; all regions
    close to its best one are shown together, and the next candidates fill it, until values fall faster. In the end,
    parked regions follow by their value.

    Args:
        value: The set function, not negative; its ratios count.
        prior: Values of the regions [1,n]; equal values, and regions left when the budget is spent, follow it.
        budget: Most sets to value; None: no limit.
    """
    ranked = prior.argsort(dim=1, descending=True, stable=True)
    shown, rest, parked = ranked[:, :0], ranked, ranked[:, :0]
    width, valued = max(1, round(WINDOW * ranked.shape[1])), 0

    def worth(some: Tensor) -> Tensor:
        nonlocal valued
        if budget is not None and valued + some.shape[1] > budget:
            raise _Spent
        valued += some.shape[1]
        return value(extended_sets(shown, some)).to(prior)[0]

    def show(some: Tensor) -> None:
        nonlocal shown, rest
        shown = torch.cat([shown, some], 1)
        rest = rest[:, torch.isin(rest[0], some[0], invert=True)]

    try:
        while rest.shape[1] > 1:
            show(rest[:, worth(rest).argmax().view(1)])
            values = worth(rest)
            top = values.max()
            chosen = (values >= SELECT * top).nonzero()[:, 0]
            pool = rest[:, chosen[values[chosen].argsort(descending=True, stable=True)]]
            parked = torch.cat([parked, rest[:, values < PARK * top]], 1)
            rest = rest[:, values >= PARK * top]
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
        last = torch.cat([rest, parked], 1)
        if last.shape[1] > 1:
            last = last[:, worth(last).argsort(descending=True, stable=True)]
        regions, first = torch.cat([shown, last], 1), ranked.shape[1]
    except _Spent:
        left = ranked[:, torch.isin(ranked[0], shown[0], invert=True)]
        regions, first = torch.cat([shown, left], 1), shown.shape[1]
    return Order(regions, valued, first, ranked.shape[1])
