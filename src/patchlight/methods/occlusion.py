"""Occlusion: the drop of the score when a window is covered or its tokens are removed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.layout import SETS
from patchlight.evidence.ablation import Count, Unit
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Level, ablates
from patchlight.methods.masking import (
    at_level,
    removes_tokens,
    score_masks,
    score_patches,
    shared_in_sets,
    sliding,
    window_masks,
    window_sum,
)

Extent = Count | tuple[Count, Count] | tuple[Count, Count, Count]


def _sides(extent: Extent | None, default: tuple[int, ...]) -> tuple[int, ...]:
    if extent is None:
        return default
    sides = (extent,) * len(default) if isinstance(extent, int) else extent
    if len(sides) != len(default):
        raise PatchlightError(f"a window or stride is {list(sides)}; give one number, or {len(default)}")
    return sides


@ablates(
    "occlusion",
    paper="Zeiler & Fergus, ECCV 2014",
    aliases=("sliding-window",),
    levels=("pixel", "token"),
    cost="1 forward per window + 1 (197 at 14 x 14 patches)",
    presets={
        "captum": {"score": "logit"},
        "leave-one-out": {"unit": "token", "level": "token"},
        "vit-shapley": {"unit": "token", "level": "token"},
    },
    refuses=removes_tokens,
)
def occlusion(
    ask: Ask,
    window: Extent | None = None,
    stride: Extent | None = None,
    unit: Unit = "pixel",
    fill: Fill = "zero",
    level: Level = "pixel",
) -> Tensor:
    """Drop of the score when a sliding window hides a part of the image.

        R(w) = f(X) - f(X without window w)

    The value of a place is the mean R of the windows that cover it; the map is signed. The last window of a row is
    clipped to the image, as captum does. Preset `leave-one-out` removes tokens.

    Args:
        window: Size of a window in cells of `unit`: rows and columns, or one number for both; None: one patch.
        stride: Step between windows, likewise; None: the window.
        unit: What is hidden: "pixel" or "patch", which show `fill`, or "token": patches whose tokens are removed. The
            sets "frame", "tube", "band" and "slice" are hidden one at a time, and their cells share the drop evenly.
        level: "pixel": maps [B,H,W]. "token": maps of patches [B,h,w].
    """
    if unit in SETS:
        return at_level(_without_sets(ask, unit, fill), level, ask)
    size, one = ask.vit.grid, (1,) * len(ask.vit.grid)
    if unit == "pixel":
        size = ask.vit.geometry.size
        one = tuple(side // cells for side, cells in zip(ask.vit.extent, ask.vit.grid, strict=True))
    spans = _sides(window, one)
    steps = _sides(stride, spans)
    axes = [sliding(*axis) for axis in zip(size, spans, steps, strict=True)]
    counts = [len(axis) for axis in axes]
    each = math.prod(counts) + 1

    def shown(index: Tensor) -> Tensor:
        """Masks [n,h,w] of the variants with these indices: 0 is the image itself."""
        hidden = window_masks([axis.to(index.device) for axis in axes], (index - 1).clamp_min(0))
        return ~(hidden & (index > 0).view(-1, *[1] * len(size)))

    if unit == "pixel":
        scores = score_masks(ask, shown, each, fill_images(fill, ask.images, ask.vit, ask.seed))
    else:
        scores = score_patches(ask, shown(torch.arange(each)), unit, fill)
    lost = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, counts)
    count = window_sum(torch.ones_like(lost[0, 0]), *axes)
    return at_level(window_sum(lost, *axes) / count.clamp_min(1), level, ask)


def _without_sets(ask: Ask, unit: Unit, fill: Fill) -> Tensor:
    """The drop of the score without each set of cells, shared evenly by its cells [B,T,*grid]."""
    labels = ask.vit.layout.sets(unit)
    hidden = torch.arange(-1, int(labels.max()) + 1)[:, None]  # -1: nothing
    scores = score_patches(ask, (labels != hidden).view(-1, *ask.vit.grid), unit, fill)
    return shared_in_sets((scores[:, :1] - scores[:, 1:]).mT, ask.vit.layout, unit)
