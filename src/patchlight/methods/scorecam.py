"""Score-CAM on tokens: channels weighted by the score of the image masked by each."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.core.resize import to_pixels
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, ablates
from patchlight.methods.cams import NORM1, Layer, channel_reads, feature_maps, no_place
from patchlight.methods.masking import MadeMasks, owners


def refuses(settings: Settings, vit: Anatomy) -> str | None:
    return None if vit.hierarchical else no_place(settings["layer"], vit)


@ablates(
    "score-cam",
    paper="Wang et al., CVPR-W 2020, on tokens",
    aliases=("scorecam",),
    score="logit",
    cost="1 forward per channel + 1 (769 at width 768)",
    refuses=refuses,
    reads=channel_reads,
    constant="ReLU leaves nothing of a negative map; use relu=False",
    presets={"paper": {"relu": True}, "jacobgil": {}, "vit-cx": {"weighting": "score", "score": "probability"}},
)
def score_cam(
    ask: Ask,
    layer: Layer = NORM1,
    weighting: Literal["softmax", "score"] = "softmax",
    relu: bool = False,
    fill: Fill = "zero",
) -> Tensor:
    """Score-CAM: the channels of one block, weighted by the score of the image masked by each of them.

        R = sum_k alpha_k A_k,   alpha = softmax_k f(X * H_k),   H_k = minmax(Up(A_k))

    Up is bilinear with corners aligned. The score of an empty baseline, the same for all k, drops out of the softmax.
    The map is signed like those of the other CAMs. Presets: `paper` (ReLU), `vit-cx` (scores, with probabilities).

    Args:
        weighting: "softmax" is the formula above. "score": sum_k f(X * H_k) H_k, as ViT-CX describes it.
        relu: Keeps the positive part of the map, which can be empty, because a ViT's activations are signed.
    """
    maps, _ = feature_maps(ask, layer)
    flat = maps.flatten(0, 1)
    low, high = flat.new_empty(2, len(flat))
    each = [-1, *[1] * len(ask.vit.grid)]

    def stretched(part: slice) -> Tensor:
        up = to_pixels(flat[part], ask.vit.geometry.size, ask.vit.extent, align_corners=True)
        low[part], high[part] = up.flatten(1).amin(1), up.flatten(1).amax(1)
        shown: Tensor = (up - low[part].view(each)) / (high[part] - low[part] + 1e-8).view(each)
        return shown

    filling = fill_images(fill, ask.images, ask.vit, ask.seed)
    scores = ask.score_variants(MadeMasks(owners(ask, maps.shape[1]), stretched, filling))
    scores = scores.view(*maps.shape[:2], -1)
    if weighting == "softmax":
        weights = scores.softmax(1)
    else:
        maps = ((flat - low.view(each)) / (high - low + 1e-8).view(each)).view_as(maps)
        weights = scores
    cam: Tensor = torch.einsum("bkt,bkc->btc", weights.to(maps), maps.flatten(2))
    cam = cam.view(*cam.shape[:2], *ask.vit.grid)
    return cam.relu() if relu else cam
