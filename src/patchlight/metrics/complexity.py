"""Complexity and completeness: how few patches a map uses, and whether its scores add up to what they explain."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.resize import Upsampling
from patchlight.core.targets import ScoreName, target_scores
from patchlight.evidence.fills import Fill, fill_images, painted
from patchlight.methods.base import Level
from patchlight.metrics.base import Measure, Measured, register_metric
from patchlight.metrics.quantities import unread

Small = Annotated[float, Field(ge=0)]


def gini(values: Tensor) -> Tensor:
    """G = sum_i (2i - n - 1) a_(i) / (n sum a) [B] of values [B,n] >= 0, a_(1) <= … <= a_(n)."""
    values = values.double().sort(1).values
    n = values.shape[1]
    weights = 2 * torch.arange(1, n + 1, device=values.device, dtype=torch.float64) - n - 1
    return (values @ weights) / (n * values.sum(1))


@register_metric(
    "sparseness",
    paper="Chalasani et al., ICML 2020",
    aliases=("gini",),
    higher_is_better=True,
    presets={
        "tis": {"shift": "always", "absolute": False, "level": "pixel", "upsampling": "bilinear"},
        "quantus": {"shift": "none", "absolute": True, "level": "pixel", "upsampling": "bilinear"},
    },
)
def sparseness(
    ask: Measure,
    shift: Literal["negative", "always", "none"] = "negative",
    absolute: bool = False,
    eps: Small = 1e-7,
    level: Level = "pixel",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Gini index of the map: 0 when all pixels are equal, near 1 when one pixel has everything.

        G = sum_i (2i - n - 1) a_(i) / (n sum a),   a_(1) <= … <= a_(n) the scores of the map

    The largest value is 1 - 1/n. A constant map has 0.

    Args:
        shift: When the lowest score is subtracted: where there are negative ones, as the paper says, "always" (preset
            `tis`), or never.
        absolute: Takes |map| first (preset `quantus`).
        eps: This times the highest score is added, so that G does not depend on the map's scale.
        level: "pixel": the upsampled map. "token": the map on the patch grid.
    """
    maps = (ask.upsampled(upsampling) if level == "pixel" else ask.on_grid()).flatten(1).double()
    maps = maps.abs() if absolute else maps
    low = maps.amin(1, keepdim=True)
    if shift != "none":
        maps = torch.where((low < 0) | (shift == "always"), maps - low, maps)
    reasons = {}
    if shift == "none":
        reasons = {int(i): "the map has negative scores" for i in (low[:, 0] < 0).nonzero().flatten()}
    high = maps.amax(1, keepdim=True)
    values = gini(maps + torch.where(high > 0, eps * high, 1))
    values[list(reasons)] = torch.nan
    return Measured(values, reasons=reasons)


@register_metric(
    "completeness-error",
    paper="Sundararajan et al., ICML 2017; LibraGrad, CVPR 2025",
    higher_is_better=False,
    bounds=(0.0, float("inf")),
    cost="1 forward; 2 with a baseline",
    refuses=unread(lambda settings: settings["score"], "score='logit' works"),
)
def completeness_error(
    ask: Measure, baseline: Fill | None = None, score: ScoreName = "logit", relative: bool = False
) -> Measured:
    """How far the map's sum is from the score that it explains.

        |sum of the map - (s(x) - s(baseline))|

    Integrated gradients and SHAP share out the difference to a baseline: give it (`zero` for `ig` at pixel level). The
    map is not upsampled; what it leaves out (prefix tokens, biases) is part of the error.

    Args:
        baseline: The fill of the baseline; None: its term is 0, the target of methods that share out the whole logit,
            FullGrad and DecompX with their biases.
        score: s: the class's logit, probability or cosine (a pair's difference), in full precision.
        relative: Divides by |s(x) - s(baseline)|.
    """
    explained = _score(ask, ask.images, score)
    if baseline is not None:
        fill = fill_images(baseline, ask.images, ask.vit, ask.seed)
        planes = ask.vit.channels_first(ask.images)[:, :1]
        every, nothing = torch.arange(len(planes)), ask.vit.as_input(torch.zeros_like(planes, dtype=torch.bool))
        explained = explained - _score(ask, painted(ask.images, fill, every, nothing), score)
    error = (ask.maps.double().sum(list(range(1, ask.maps.ndim))) - explained).abs()
    return Measured(error / explained.abs() if relative else error)


def _score(ask: Measure, images: Tensor, score: ScoreName) -> Tensor:
    return target_scores(ask.vit.logits(images), ask.targets, score, ask.vit.outputs)[:, 0].double()
