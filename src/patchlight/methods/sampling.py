"""Sampling: masks are scored in rounds until the order is stable, with a standard error per value.

Each round doubles the masks. The error is a jackknife over 16 groups of masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.statistics import spearman
from patchlight.methods.base import Ask, Estimate

Tolerance = Annotated[
    float,
    Field(
        gt=0,
        lt=1,
        description="Samples are scored in rounds, and an image has enough when the rank correlation of its map with "
        "that of half of them is at least 1 minus this; None: all samples.",
    ),
]
GROUPS = 16
FIRST = 32
"""Masks of the first round, at least."""


def rounds(samples: int, tolerance: float | None, first: int = FIRST) -> list[slice]:
    """The masks of each round, as many as in all rounds before; without a tolerance all at once.

    >>> [part.stop for part in rounds(1024, 0.05)]
    [32, 64, 128, 256, 512, 1024]
    """
    ends = [samples]
    while tolerance is not None and ends[0] >= 2 * first:
        ends.insert(0, -(-ends[0] // 2))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def in_rounds(
    ask: Ask,
    samples: int,
    tolerance: float | None,
    score: Callable[[Tensor, slice], Tensor],
    estimate: Callable[[Tensor, Tensor], Estimate],
    first: int = FIRST,
) -> Estimate:
    """The maps [B,T,h,w] of every image, from as many of its `samples` masks as its order needs.

    `score(images, part)` scores a part of the masks of some images [b,n,T]; `estimate(images, scores)` turns all scores
    so far into maps. An image whose order is stable for every class stops, independently of the others.
    """
    images, scores, before = torch.arange(len(ask.images)), torch.empty(0), torch.empty(0)
    done: list[tuple[Tensor, Estimate]] = []
    for part in rounds(samples, tolerance, first):
        found = score(images, part)
        scores = found if part.start == 0 else torch.cat([scores, found], 1)
        now = estimate(images, scores)
        stay = torch.full((len(images),), part.stop < samples)
        if part.start > 0 and tolerance is not None:
            stay &= (stability(before, now.maps) < 1 - tolerance).cpu()
        counted = replace(now, samples=torch.full((len(images),), part.stop))
        done.append((images[~stay], counted.select(~stay)))
        here = stay.to(scores.device)
        images, scores, before = images[stay], scores[here], now.maps[here]
        if len(images) == 0:
            break
    back = torch.cat([some for some, _ in done]).argsort()
    return Estimate.concat([found for _, found in done]).select(back)


def stability(before: Tensor, now: Tensor) -> Tensor:
    """The rank correlation of maps [b,T,h,w] with those of the round before, for the class where it is lowest [b]."""
    cells = now[0, 0].numel()
    before, now = (maps.cpu() if maps.device.type == "mps" else maps for maps in (before, now))  # ranks are in float64
    return spearman(before.reshape(-1, cells), now.reshape(-1, cells)).view(now.shape[:2]).amin(1)


def jackknife(fit: Callable[[Tensor], Tensor], n: int, like: Tensor, together: int = 1) -> Estimate:
    """Maps fit(weights) of n masks of weight 1, with the jackknife's error.

    Mask k belongs to group k mod 16; `together` successive masks that are not independent share a group. With m_g the
    map without group g of G: error^2 = (G - 1) / G sum_g (m_g - mean of them)^2. With fewer than two groups it is NaN.
    """
    groups = min(GROUPS, -(-n // together))
    of = torch.arange(n, device=like.device) // together % max(groups, 1)
    maps = fit(like.new_ones(n))
    return Estimate(maps, spread(maps, (fit((of != group).to(like)) for group in range(groups)), groups))


def spread(whole: Tensor, left_out: Iterable[Tensor], groups: int) -> Tensor:
    """The jackknife's error of a map, from the maps without each of its groups."""
    if groups < 2:
        return torch.full_like(whole, torch.nan)
    total, square = torch.zeros_like(whole), torch.zeros_like(whole)
    for left in left_out:
        apart = left - whole
        total, square = total + apart, square + apart**2
    return ((groups - 1) / groups * (square - total**2 / groups)).clamp_min(0).sqrt()
