"""PAMI, the inverse of occlusion: the score of a part alone."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.evidence.ablation import Count
from patchlight.evidence.fills import Fill
from patchlight.methods.base import Ask, ablates
from patchlight.methods.masking import removes_tokens, score_patches, sliding, window_masks, window_sum


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
        stride: Patches from one window to the next.
        unit: Whether patches outside the part show `fill` ("patch") or are removed ("token").
    """
    sizes = [windows] if isinstance(windows, int) else windows
    spans = [[sliding(length, min(size, length), stride) for length in ask.vit.grid] for size in sizes]
    parts = torch.cat([window_masks(axes) for axes in spans])
    scores = score_patches(ask, parts, unit, fill)
    total, count = scores.new_zeros(()), scores.new_zeros(())
    each = [math.prod(map(len, axes)) for axes in spans]
    for axes, some in zip(spans, scores.mT.split(each, -1), strict=True):
        found = some.unflatten(-1, [len(axis) for axis in axes])
        total = total + window_sum(found, *axes)
        count = count + window_sum(torch.ones_like(found[0, 0]), *axes)
    return total / count.clamp_min(1)
