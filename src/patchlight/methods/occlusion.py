"""Occlusion: the drop of the score when a window is covered or its tokens are removed."""

from __future__ import annotations

import torch
from torch import Tensor

from patchlight.evidence.ablation import Count, Unit
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Level, ablates
from patchlight.methods.masking import (
    at_level,
    removes_tokens,
    score_masks,
    score_patches,
    sliding,
    window_masks,
    window_sum,
)

Extent = Count | tuple[Count, Count]


def _pair(extent: Extent | None, default: tuple[int, int]) -> tuple[int, int]:
    if extent is None:
        return default
    return (extent, extent) if isinstance(extent, int) else extent


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
        unit: What is hidden: "pixel" or "patch", which show `fill`, or "token": patches whose tokens are removed.
        level: "pixel": maps [B,H,W]. "token": maps of patches [B,h,w].
    """
    size, one = ask.vit.grid, (1, 1)
    if unit == "pixel":
        size = (ask.images.shape[-2], ask.images.shape[-1])
        one = (ask.vit.extent[0] // ask.vit.grid[0], ask.vit.extent[1] // ask.vit.grid[1])
    spans = _pair(window, one)
    steps = _pair(stride, spans)
    rows, columns = (sliding(*axis) for axis in zip(size, spans, steps, strict=True))
    each = len(rows) * len(columns) + 1

    def shown(index: Tensor) -> Tensor:
        """Masks [n,h,w] of the variants with these indices: 0 is the image itself."""
        hidden = window_masks(rows.to(index.device), columns.to(index.device), (index - 1).clamp_min(0))
        return ~(hidden & (index > 0)[:, None, None])

    if unit == "pixel":
        scores = score_masks(ask, shown, each, fill_images(fill, ask.images, ask.vit, ask.seed))
    else:
        scores = score_patches(ask, shown(torch.arange(each)), unit, fill)
    lost = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, (len(rows), len(columns)))
    count = window_sum(torch.ones_like(lost[0, 0]), rows, columns)
    return at_level(window_sum(lost, rows, columns) / count.clamp_min(1), level, ask)
