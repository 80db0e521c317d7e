"""Occlusion: what the score loses when a window is covered or its tokens are removed."""

from __future__ import annotations

import torch
from torch import Tensor

from patchlight.evidence.ablation import Count
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Level, register_method
from patchlight.methods.masking import drops_at_token_level, score_kept, score_masks, window_masks, window_sum, windows

Extent = Count | tuple[Count, Count]


def _pair(extent: Extent | None, default: tuple[int, int]) -> tuple[int, int]:
    if extent is None:
        return default
    return (extent, extent) if isinstance(extent, int) else extent


@register_method(
    "occlusion",
    paper="Zeiler & Fergus, ECCV 2014",
    aliases=("sliding-window",),
    ablates=True,
    levels=("pixel", "token"),
    cost="1 forward per window + 1 (197 at 14 x 14 patches)",
    presets={"captum": {"score": "logit"}, "leave-one-out": {"level": "token"}, "vit-shapley": {"level": "token"}},
    refuses=drops_at_token_level,
)
def occlusion(
    ask: Ask,
    window: Extent | None = None,
    stride: Extent | None = None,
    fill: Fill | float = "zero",
    level: Level = "pixel",
) -> Tensor:
    """Occlusion: R(w) = f(X) - f(X without window w); a place's value is the mean R of the windows that cover it.

    `window` and `stride` (rows, columns, or one number for both) count pixels, one patch by default, and the window is
    replaced by `fill`; with `level="token"` they count patches, one by default, and tokens are really removed
    (leave-one-out). The stride defaults to the window; the last window of a row is clipped to the image, as captum
    does. Signed. Pixel maps [B,H,W], token maps [B,h,w]; one forward per window and one for the image.
    """
    if level == "token":
        size, one = ask.vit.grid, (1, 1)
    else:
        size = (ask.images.shape[-2], ask.images.shape[-1])
        one = (ask.vit.extent[0] // ask.vit.grid[0], ask.vit.extent[1] // ask.vit.grid[1])
    spans = _pair(window, one)
    steps = _pair(stride, spans)
    rows, columns = (windows(*axis) for axis in zip(size, spans, steps, strict=True))
    each = len(rows) * len(columns) + 1

    def shown(index: Tensor) -> Tensor:
        """Masks [n,...] of the variants with these indices: 0 is the image itself."""
        hidden = window_masks(rows.to(index.device), columns.to(index.device), (index - 1).clamp_min(0))
        return ~(hidden & (index > 0)[:, None, None])

    if level == "token":
        scores = score_kept(ask, shown(torch.arange(each)).flatten(1))
    else:
        filling = fill_images(fill, ask.images, ask.vit, ask.seed)
        scores = score_masks(ask, lambda index: shown(index).to(ask.images), each, filling)
    lost = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, (len(rows), len(columns)))
    count = window_sum(torch.ones_like(lost[0, 0]), rows, columns)
    return window_sum(lost, rows, columns) / count.clamp_min(1)
