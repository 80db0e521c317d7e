"""Properties of the values of a map: sparseness, completeness, and numbers that its method reports."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.resize import Upsampling
from patchlight.core.targets import ScoreName, target_scores
from patchlight.evidence.fills import Fill, fill_images, painted
from patchlight.methods.base import Level
from patchlight.metrics.base import Measure, Measured, no_score, reasons_where, register_metric

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
    """Gini index of the map: 0 if all pixels are equal, close to 1 if one pixel has the whole sum.

        G = sum_i (2i - n - 1) a_(i) / (n sum a),   a_(1) <= … <= a_(n) the scores of the map

    The largest value is 1 - 1/n. A constant map has 0.

    Args:
        shift: When the lowest score is subtracted: if a score is "negative", as in the paper, "always" (preset `tis`),
            or "none".
        absolute: Whether the absolute value of the map is taken first (preset `quantus`).
        eps: Fraction of the highest score that is added to all scores, so that G does not depend on the map's scale.
        level: "pixel": the upsampled map. "token": the map on the patch grid.
    """
    maps = (ask.upsampled(upsampling) if level == "pixel" else ask.on_grid()).flatten(1).double()
    maps = maps.abs() if absolute else maps
    low = maps.amin(1, keepdim=True)
    if shift != "none":
        maps = torch.where((low < 0) | (shift == "always"), maps - low, maps)
    reasons = reasons_where(low[:, 0] < 0, "the map has negative scores") if shift == "none" else {}
    high = maps.amax(1, keepdim=True)
    return Measured(gini(maps + torch.where(high > 0, eps * high, 1)), reasons=reasons)


@register_metric(
    "completeness-error",
    paper="Sundararajan et al., ICML 2017; LibraGrad, CVPR 2025",
    higher_is_better=False,
    bounds=(0.0, float("inf")),
    cost="1 forward; 2 with a baseline",
    refuses=no_score,
)
def completeness_error(
    ask: Measure, baseline: Fill | None = None, score: ScoreName = "logit", relative: bool = False
) -> Measured:
    """Distance of the total of the map from the score that it explains.

        |sum of the map - (s(x) - s(baseline))|

    Integrated gradients and SHAP distribute the difference from a baseline, which must be given (`zero` for `ig` at
    pixel level). The map is not upsampled. Contributions that are not in the map (prefix tokens, biases) are part of
    the error.

    Args:
        baseline: The fill of the baseline; None: s(baseline) is 0, for methods that distribute the whole logit, such
            as FullGrad and DecompX with their biases.
        score: The score s of the class (for a pair, the difference), in full precision.
        relative: Whether the error is divided by |s(x) - s(baseline)|.
    """
    explained = _score(ask, ask.images, score)
    if baseline is not None:
        fill = fill_images(baseline, ask.images, ask.vit, ask.seed)
        planes = ask.vit.channels_first(ask.images)[:, :1]
        all_hidden = ask.vit.as_input(torch.zeros_like(planes, dtype=torch.bool))
        explained = explained - _score(ask, painted(ask.images, fill, torch.arange(len(planes)), all_hidden), score)
    error = (ask.maps.double().sum(list(range(1, ask.maps.ndim))) - explained).abs()
    return Measured(error / explained.abs() if relative else error)


def _score(ask: Measure, images: Tensor, score: ScoreName) -> Tensor:
    return target_scores(ask.vit.logits(images), ask.targets, score, ask.vit.outputs)[:, 0].double()


@register_metric(
    "fact", paper="Xie et al., IJCAI 2023, the number of masks", higher_is_better=False, bounds=(-math.inf, math.inf)
)
def fact(ask: Measure, fact: str = "masks") -> Measured:
    """A number that the method itself reports for each image, such as the number of masks of `vit-cx`.

    It describes the work of a method, not the quality of a map; in rankings, lower is better. A map without this number
    has no value.

    Args:
        fact: Name of the number in the attribution's `facts`.
    """
    values = ask.facts.get(fact)
    if values is not None:
        return Measured(values.double())
    reported = ", ".join(sorted(ask.facts))
    missing = f"reported are {reported}" if reported else "no method reported it with these maps"
    count = len(ask.images)
    reasons = dict.fromkeys(range(count), f"'{fact}' is not known: {missing}")
    return Measured(torch.full((count,), torch.nan, dtype=torch.float64), reasons=reasons)
