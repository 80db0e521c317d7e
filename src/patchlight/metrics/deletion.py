"""Insertion and deletion: the class's probability while the map's highest pixels appear, or disappear, step by step."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from patchlight.ablation import Count, Fill, RankThresholds, fill_images
from patchlight.metrics.base import Measure, Measured, TargetClass, Unit, Upsampling, metric
from patchlight.targets import Score

Integrator = Literal["trapezoid", "mean"]
AnyFill = Fill | float
_RISE = {"steps": 224, "unit": "pixel", "first": True, "integrator": "trapezoid", "target_class": "predicted"}
_TIS = {"steps": 224, "unit": "pixel", "first": False, "integrator": "mean", "target_class": "given"}
_WORDS = {
    "rise": {"fill": {"blur": "blur-rise", "black": "zero", "grey": "zero"}},
    "tis": {"fill": {"blur": "blur-tis", "black": "zero", "mean": "image-mean", "random": "noise"}},
}
_SAID = "Petsiuk et al., BMVC 2018"


def thresholds(cells: int, steps: int, first: bool) -> Tensor:
    """Cells changed at each point [P]: steps of ceil(cells / steps), the last full; `first` adds the clean point."""
    size = math.ceil(cells / steps)
    changed = torch.arange(0 if first else 1, math.ceil(cells / size) + 1) * size
    return changed.clamp_max(cells)


def area(curve: Tensor, integrator: Integrator) -> Tensor:
    """The area [B] under curves [B,P] over [0, 1]: trapezoids between equally spaced points, or their mean."""
    if integrator == "mean":
        return curve.mean(-1)
    return (curve.sum(-1) - (curve[:, 0] + curve[:, -1]) / 2) / (curve.shape[-1] - 1)


def removal_curve(
    ask: Measure,
    insert: bool,
    changed: Tensor,
    fill: AnyFill,
    unit: Unit = "pixel",
    upsampling: Upsampling = "bilinear",
    target_class: TargetClass = "given",
    score: Score = "probability",
    lowest_first: bool = False,
    noise: tuple[float, float] = (0.0, 1.0),
    noise_seed: int | None = None,
) -> Tensor:
    """The score [B,P] with the `changed` [P] highest cells shown over the fill (`insert`), or replaced by it."""
    ranks = ask.ranks(unit, upsampling, lowest_first)
    if unit == "patch":
        (h, w), (height, width) = ranks.shape[-2:], ask.size
        ranks = ranks.repeat_interleave(height // h, 1).repeat_interleave(width // w, 2)
    batch, points = len(ask.images), len(changed)
    owner = torch.arange(batch).repeat_interleave(points)
    filled = fill_images(fill, ask.images, ask.vit, ask.seed if noise_seed is None else noise_seed, noise)
    variants = RankThresholds(owner, changed.repeat(batch), ranks, filled, inverted=not insert)
    return ask.scores(variants, ask.of(target_class), score).view(batch, points)


def _measured(curve: Tensor, changed: Tensor, integrator: Integrator) -> Measured:
    return Measured(area(curve, integrator), curve, changed.double() / changed[-1])


def _cells(ask: Measure, unit: Unit) -> int:
    rows, columns = ask.size if unit == "pixel" else ask.vit.grid
    return rows * columns


@metric(
    "insertion",
    paper=_SAID,
    higher_is_better=True,
    ablates=True,
    cost="steps (224) + 1 forwards",
    presets={"rise": {**_RISE, "fill": "blur-rise"}, "tis": {**_TIS, "fill": "blur-tis"}},
    words=_WORDS,
    quick={"steps": 14},
)
def insertion(
    ask: Measure,
    steps: Count = 224,
    fill: AnyFill = "blur-rise",
    unit: Unit = "pixel",
    first: bool = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Area under p(class) while the highest-ranked pixels of the image appear on the fill; higher is better.

    Each of the `steps` shows ceil(HW / steps) more pixels (or patches: `unit`) of the upsampled map's order; `first`
    adds the bare fill as a point. Preset `rise`: 225 points, trapezoids, the predicted class, RISE's blur. Preset
    `tis`: 224 points without the bare fill, their mean, the class given; fills by its words (blur, random, black,
    mean). Curve [B,P] over the fraction shown. P forwards an image.
    """
    changed = thresholds(_cells(ask, unit), steps, first)
    return _measured(removal_curve(ask, True, changed, fill, unit, upsampling, target_class), changed, integrator)


@metric(
    "deletion",
    paper=_SAID,
    higher_is_better=False,
    ablates=True,
    cost="steps (224) + 1 forwards",
    presets={"rise": {**_RISE, "fill": "zero"}, "tis": {**_TIS, "fill": "blur-tis"}},
    words=_WORDS,
    quick={"steps": 14},
)
def deletion(
    ask: Measure,
    steps: Count = 224,
    fill: AnyFill = "zero",
    unit: Unit = "pixel",
    first: bool = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Area under p(class) while the highest-ranked pixels of the image give way to the fill; lower is better.

    Settings and presets as for `insertion`; `rise` deletes to `zero`, grey after normalisation.
    """
    changed = thresholds(_cells(ask, unit), steps, first)
    return _measured(removal_curve(ask, False, changed, fill, unit, upsampling, target_class), changed, integrator)


@metric(
    "ins-del",
    paper="Englebert et al., ICCV-W 2023",
    higher_is_better=True,
    bounds=(-1.0, 1.0),
    ablates=True,
    cost="2 steps (448) + 2 forwards",
    presets={
        "rise": {**_RISE, "fill": "blur-rise", "deletion_fill": "zero"},
        "tis": {**_TIS, "fill": "blur-tis", "deletion_fill": None},
    },
    words=_WORDS,
    quick={"steps": 14},
)
def ins_del(
    ask: Measure,
    steps: Count = 224,
    fill: AnyFill = "image-mean",
    deletion_fill: AnyFill | None = None,
    unit: Unit = "pixel",
    first: bool = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Insertion less deletion, over the same fill (or `deletion_fill`); higher is better. Curve: their difference."""
    changed = thresholds(_cells(ask, unit), steps, first)
    over = fill if deletion_fill is None else deletion_fill
    inserted = removal_curve(ask, True, changed, fill, unit, upsampling, target_class)
    deleted = removal_curve(ask, False, changed, over, unit, upsampling, target_class)
    found = _measured(inserted - deleted, changed, integrator)
    parts = {"insertion": area(inserted, integrator), "deletion": area(deleted, integrator)}
    return Measured(found.values, found.curve, found.x, parts)
