"""Occlusion, the drop of the score without a window of the image; and PAMI, the score of a window alone."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
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
    """One length for each axis of `default`."""
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

    The value of a pixel is the mean R of the windows that cover it; the map is signed. The last window of a row is
    clipped to the image, as in captum. Preset `leave-one-out` removes tokens.

    Args:
        window: Size of a window in cells of `unit`: rows and columns, or one number for both; None: one patch.
        stride: Distance between windows, like `window`; None: the size of the window.
        unit: "pixel" and "patch" paint the window with `fill`, "token" removes its tokens. The sets "frame", "tube",
            "band" and "slice" are hidden one at a time, and the drop is divided equally among their cells.
    """
    if unit in SETS:
        return at_level(_without_sets(ask, unit, fill), level, ask)
    size, patch = ask.vit.grid, (1,) * len(ask.vit.grid)
    if unit == "pixel":
        size = ask.vit.geometry.size
        patch = tuple(side // cells for side, cells in zip(ask.vit.extent, ask.vit.grid, strict=True))
    spans = _sides(window, patch)
    steps = _sides(stride, spans)
    axes = [sliding(*axis) for axis in zip(size, spans, steps, strict=True)]
    counts = [len(axis) for axis in axes]
    variants = math.prod(counts) + 1

    def masks(index: Tensor) -> Tensor:
        """Masks [n,h,w] of the variants with these indices; variant 0 is the whole image."""
        hidden = window_masks([axis.to(index.device) for axis in axes], (index - 1).clamp_min(0))
        return ~(hidden & (index > 0).view(-1, *[1] * len(size)))

    if unit == "pixel":
        scores = score_masks(ask, masks, variants, fill_images(fill, ask.images, ask.vit, ask.seed))
    else:
        scores = score_patches(ask, masks(torch.arange(variants)), unit, fill)
    drop = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, counts)
    coverage = window_sum(torch.ones_like(drop[0, 0]), *axes)
    return at_level(window_sum(drop, *axes) / coverage.clamp_min(1), level, ask)


def _without_sets(ask: Ask, unit: Unit, fill: Fill) -> Tensor:
    """The drop of the score without each set of cells [B,T,*grid], divided equally among its cells."""
    labels = ask.vit.layout.sets(unit)
    hidden = torch.arange(-1, int(labels.max()) + 1)[:, None]  # -1: nothing
    scores = score_patches(ask, (labels != hidden).view(-1, *ask.vit.grid), unit, fill)
    return shared_in_sets((scores[:, :1] - scores[:, 1:]).mT, ask.vit.layout, unit)


@ablates(
    "pami",
    paper="Shi et al., 2023",
    cost="1 forward per window (121 at 14 x 14 patches)",
    quick={"windows": 2},
    constant="a window as large as the grid gives every patch the same value; use a smaller one",
    presets={"blur": {"fill": "blur-tis"}, "token": {"unit": "token"}},
    refuses=removes_tokens,
)
def pami(
    ask: Ask,
    windows: Count | Annotated[list[Count], Field(min_length=1)] = 4,
    stride: Count = 1,
    unit: Literal["token", "patch"] = "patch",
    fill: Fill = "blur-tis",
) -> Tensor:
    """PAMI: mean score of the parts of the image that contain a patch, with the rest blurred.

        R(x) = mean over the parts P that contain x of f(X on P, fill elsewhere)

    Parts are square windows, no larger than the grid. The authors published no code: windows of 4, stride 1 and the
    blur are our choices.

    Args:
        windows: Patches along each side of a window; a list for several sizes.
        stride: Distance between windows in patches.
        unit: Whether patches outside the part show `fill` ("patch") or are removed ("token").
    """
    sizes = [windows] if isinstance(windows, int) else windows
    axes_of_sizes = [[sliding(length, min(size, length), stride) for length in ask.vit.grid] for size in sizes]
    scores = score_patches(ask, torch.cat([window_masks(axes) for axes in axes_of_sizes]), unit, fill)
    total, coverage = scores.new_zeros(()), scores.new_zeros(())
    counts = [math.prod(map(len, axes)) for axes in axes_of_sizes]
    for axes, values in zip(axes_of_sizes, scores.mT.split(counts, -1), strict=True):
        values = values.unflatten(-1, [len(axis) for axis in axes])
        total = total + window_sum(values, *axes)
        coverage = coverage + window_sum(torch.ones_like(values[0, 0]), *axes)
    return total / coverage.clamp_min(1)
