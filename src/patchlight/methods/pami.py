"""PAMI, the inverse of occlusion: what a part alone says about the class."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from patchlight.evidence.ablation import Count
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, register_method
from patchlight.methods.masking import drops_as_fill, score_kept, score_masks, window_masks, window_sum, windows
from patchlight.resize import to_pixels


@register_method(
    "pami",
    paper="Shi et al., 2023",
    ablates=True,
    cost="1 forward per window (121 at 14 x 14 patches)",
    quick={"window": 2},
    constant="a window as large as the grid says the same of every patch; use a smaller one",
    presets={"blur": {"fill": "blur-tis"}, "drop": {"fill": "drop"}},
    refuses=drops_as_fill,
)
def pami(
    ask: Ask,
    window: Count | tuple[Count, ...] = 4,
    stride: Count = 1,
    fill: Fill | Literal["drop"] | float = "blur-tis",
) -> Tensor:
    """PAMI: S(x) = mean over the parts P that contain x of f(X on P, fill elsewhere).

    Parts are square windows of `window` patches (several sizes: a tuple) every `stride` patches, no larger than the
    grid; all else shows `fill`, or is removed (`"drop"`). No code of the authors is public: window 4, stride 1 and the
    blur are this library's choices. Token maps [B,h,w]; one forward per part.
    """
    sizes = (window,) if isinstance(window, int) else window
    axes = [tuple(windows(length, min(size, length), stride) for length in ask.vit.grid) for size in sizes]
    parts = torch.cat([window_masks(rows, columns) for rows, columns in axes])
    if fill == "drop":
        scores = score_kept(ask, parts.flatten(1))
    else:
        small, size, extent = parts.to(ask.images)[:, None], ask.images.shape[-2:], ask.vit.extent
        filling = fill_images(fill, ask.images, ask.vit, ask.seed)
        scores = score_masks(ask, lambda i: to_pixels(small[i], size, extent, "nearest")[:, 0], len(parts), filling)
    total, count = scores.new_zeros(()), scores.new_zeros(())
    each = [len(rows) * len(columns) for rows, columns in axes]
    for (rows, columns), some in zip(axes, scores.mT.split(each, -1), strict=True):
        found = some.unflatten(-1, (len(rows), len(columns)))
        total = total + window_sum(found, rows, columns)
        count = count + window_sum(torch.ones_like(found[0, 0]), rows, columns)
    return total / count.clamp_min(1)
