"""Sampling in rounds until the order of the patches is stable, with a standard error of each value.

Each round doubles the number of masks. The error is a jackknife estimate over 16 groups of masks.
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
        description="Sampling stops early for an image when the rank correlation of its map with the map of half of "
        "the samples is at least 1 minus this; None: all samples are used.",
    ),
]
GROUPS = 16
FIRST = 32
"""Smallest number of masks in the first round."""


def rounds(samples: int, tolerance: float | None, first: int = FIRST) -> list[slice]:
    """The masks of each round: as many as in all earlier rounds; without a tolerance, one round.

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
    """Maps [B,T,h,w] from at most `samples` masks of each image.

    An image stops when its order is stable for all classes, independently of the other images.

    Args:
        ask: The images and classes.
        samples: Number of masks.
        tolerance: The setting `tolerance`.
        score: Computes the scores [b,n,T] of the images with these indices under a part of the masks.
        estimate: Computes maps from the scores of all rounds so far.
        first: Smallest number of masks in the first round.
    """
    images, scores, before = torch.arange(len(ask.images)), torch.empty(0), torch.empty(0)
    finished: list[tuple[Tensor, Estimate]] = []
    for part in rounds(samples, tolerance, first):
        new_scores = score(images, part)
        scores = new_scores if part.start == 0 else torch.cat([scores, new_scores], 1)
        now = estimate(images, scores)
        stay = torch.full((len(images),), part.stop < samples)
        if part.start > 0 and tolerance is not None:
            stay &= (stability(before, now.maps) < 1 - tolerance).cpu()
        now = replace(now, samples=torch.full((len(images),), part.stop))
        finished.append((images[~stay], now.select(~stay)))
        keep = stay.to(scores.device)
        images, scores, before = images[stay], scores[keep], now.maps[keep]
        if len(images) == 0:
            break
    order = torch.cat([indices for indices, _ in finished]).argsort()
    return Estimate.concat([part for _, part in finished]).select(order)


def stability(before: Tensor, now: Tensor) -> Tensor:
    """Rank correlation [b] of maps [b,T,h,w] with those of the previous round; the lowest of all classes."""
    cells = now[0, 0].numel()
    before, now = (maps.cpu() if maps.device.type == "mps" else maps for maps in (before, now))  # ranks are in float64
    return spearman(before.reshape(-1, cells), now.reshape(-1, cells)).view(now.shape[:2]).amin(1)


def jackknife(fit: Callable[[Tensor], Tensor], n: int, like: Tensor, together: int = 1) -> Estimate:
    """Maps fit(weights) of n masks with weights 1, and their jackknife error.

    Mask k belongs to group k mod 16; `together` successive masks that are not independent share a group. With m_g the
    map without group g of G: error^2 = (G - 1) / G sum_g (m_g - mean_g m_g)^2. It is NaN with fewer than two groups.
    """
    groups = min(GROUPS, -(-n // together))
    group_of = torch.arange(n, device=like.device) // together % max(groups, 1)
    maps = fit(like.new_ones(n))
    return Estimate(maps, jackknife_error(maps, (fit((group_of != g).to(like)) for g in range(groups)), groups))


def jackknife_error(maps: Tensor, left_out: Iterable[Tensor], groups: int) -> Tensor:
    """The jackknife error of maps, from the maps without each group."""
    if groups < 2:
        return torch.full_like(maps, torch.nan)
    total, square = torch.zeros_like(maps), torch.zeros_like(maps)
    for without in left_out:
        difference = without - maps
        total, square = total + difference, square + difference**2
    return ((groups - 1) / groups * (square - total**2 / groups)).clamp_min(0).sqrt()
