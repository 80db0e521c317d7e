"""Insertion and deletion: the class's score while the highest pixels appear, or disappear, step by step.

Every faithfulness metric removes parts of images by `ranged_logits`, most through `removed_logits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Unsupported
from patchlight.core.resize import Upsampling, to_pixels
from patchlight.core.targets import Targets, target_scores
from patchlight.evidence.ablation import Count, RankRanges, TokenSubsets, Unit
from patchlight.evidence.fills import Fill, drops, fill_images
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, register_metric
from patchlight.metrics.quantities import no_score

Integrator = Annotated[
    Literal["trapezoid", "mean", "unit", "width"],
    Field(
        description="How points become an area: trapezoids divided by the width they cover, the mean of the points, "
        "trapezoids of width 1 each ('unit'), or trapezoids that are not divided ('width')."
    ),
]
Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[
    Count | None,
    Field(description="Number of steps; each changes ceil(cells / steps) more cells in the map's order; None: one."),
]
First = Annotated[bool, Field(description="Whether the image before the first step is a point of the curve too.")]

_PIXELS: dict[str, Any] = {"steps": 224, "unit": "pixel", "upsampling": "bilinear"}
_RISE = {**_PIXELS, "first": True, "integrator": "trapezoid", "target_class": "prediction"}
_TIS = {**_PIXELS, "first": False, "integrator": "mean", "target_class": "label"}
_SHAPLEY = {"steps": None, "unit": "token", "first": True, "integrator": "mean", "target_class": "label"}
_WORDS = {
    "rise": {"fill": {"blur": "blur-rise", "black": "zero", "grey": "zero"}},
    "tis": {"fill": {"blur": "blur-tis", "black": "zero", "mean": "image-mean", "random": "noise"}},
}
_INS_DEL_WORDS = {preset: {**words, "deletion_fill": words["fill"]} for preset, words in _WORDS.items()}


def thresholds(cells: int, steps: int | None, first: bool) -> Tensor:
    """Cells changed at each point [P]: steps of ceil(cells / steps), the last full; `first` adds the clean point.

    Without `steps` each step changes one cell.
    """
    size = math.ceil(cells / (steps or cells))
    changed = torch.arange(0 if first else 1, math.ceil(cells / size) + 1) * size
    return changed.clamp_max(cells)


def count_cells(ask: Measure, unit: Unit) -> int:
    """The number of cells that can be removed from each image."""
    count = math.prod(ask.size) if unit == "pixel" else int(ask.vit.layout.sets(unit).max()) + 1
    return count - int(ask.protected(unit).sum()) if ask.protect else count


def area(curve: Tensor, integrator: Integrator, x: Tensor) -> Tensor:
    """The area [B] under curves [B,P] over rising x [P]."""
    if integrator == "mean" or len(x) == 1:
        return curve.mean(-1)
    if integrator == "unit":
        return torch.trapezoid(curve, dx=1.0)
    x = x.to(curve)
    return torch.trapezoid(curve, x) / (x[-1] - x[0] if integrator == "trapezoid" else 1.0)


@dataclass(frozen=True)
class Removal:
    """How cells of an image are removed: the fill, and the order.

    Attributes:
        fill: What is painted where pixels or patches are missing; tokens are dropped.
        unit: Pixels, patches or tokens.
        upsampling: How the map becomes pixels.
        lowest_first: Whether the order begins with the lowest cells.
        reverse_ties: Whether equal cells come in the reverse of their usual order.
        noise: The range of the fill `noise`.
        noise_seed: The seed of that fill; None: the metric's.
    """

    fill: Fill = "black"
    unit: Unit = "pixel"
    upsampling: Upsampling = "bilinear"
    lowest_first: bool = False
    reverse_ties: bool = False
    noise: tuple[float, float] = (0.0, 1.0)
    noise_seed: int | None = None


def removed_logits(ask: Measure, changed: Tensor, insert: bool, removal: Removal) -> Tensor:
    """Logits [B,P,C] with the `changed` [P] highest cells removed from the image, or (`insert`) only these shown."""
    rest = torch.full_like(changed, count_cells(ask, removal.unit))
    begin, end = (changed, rest) if insert else (torch.zeros_like(changed), changed)
    return ranged_logits(ask, begin, end, removal)


def ranged_logits(ask: Measure, begin: Tensor, end: Tensor, removal: Removal) -> Tensor:
    """Logits [B,P,C] of images without the cells whose rank is in [begin, end), [P] each.

    Metrics of one call share equal variants. P forward passes per image.
    """
    unit, labels = removal.unit, ask.vit.layout.sets(removal.unit)
    removes = drops(unit, removal.fill)
    ordering = (unit, removal.upsampling, removal.lowest_first, removal.reverse_ties)
    seed = ask.seed if removal.noise_seed is None else removal.noise_seed

    def pixels() -> Tensor:
        ranks = ask.ranks(*ordering)
        if unit != "pixel":
            ranks = ranks if unit == "patch" else ranks[:, labels.to(ranks.device)].view(-1, *ask.vit.grid)
            ranks = to_pixels(ranks.float(), ask.size, ask.vit.extent, "nearest").int()
        count = len(ask.images)
        owner = torch.arange(count).repeat_interleave(len(begin))
        filled = fill_images(removal.fill, ask.images, ask.vit, seed, removal.noise)
        variants = RankRanges(owner, begin.repeat(count), end.repeat(count), ranks, filled)
        return ask.ablation.logits(variants).view(count, len(begin), -1)

    def tokens() -> Tensor:
        if unit == "pixel":
            raise Unsupported("fill='none' removes tokens, not pixels; give unit='token' or a fill")
        check_tokens(ask.vit, count_cells(ask, unit) - int((end - begin).max()), unit)
        order = ask.ranks(*ordering).flatten(1).argsort(1)
        members = ask.vit.layout.members(unit).to(order.device)
        owner = torch.arange(len(order))
        kept = [torch.cat([order[:, :a], order[:, b:]], 1) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        logits = ask.ablation.logits([TokenSubsets(owner, members[some].flatten(1)) for some in kept])
        return logits.view(len(kept), len(order), -1).transpose(0, 1)

    ablation = tuple(sorted(ask.ablation_settings.items()))
    filled_by = () if removes else (removal.fill, removal.noise, seed)
    ranges = (tuple(begin.tolist()), tuple(end.tolist()))
    key = ("removed", *ranges, *ordering, ask.protect, filled_by, ablation)
    logits: Tensor = ask.once(key, tokens if removes else pixels)
    return logits


def check_tokens(vit: Anatomy, left: int, unit: str = "token") -> None:
    """Refuse a model that cannot drop tokens, or that would have none `left`."""
    reason = vit.cannot_remove(unit)
    if reason is not None:
        raise Unsupported(f"{vit.name} cannot drop tokens: {reason}; unit='patch' fills patches instead")
    if not vit.reads_positions and (vit.prefix == 0 or vit.pooling in ("avg", "max")) and left == 0:
        raise Unsupported(
            f"{vit.name} reads its class from the patches, so nothing is left to classify when all are dropped; "
            f"unit='patch' fills patches instead"
        )


def scored(logits: Tensor, targets: Targets, ask: Measure, score: MeasuredScore = "probability") -> Tensor:
    """p(class) [B,P] of logits [B,P,C], or another score; for a pair of classes, the difference."""
    assert score != "auto", "decided by MetricRequest.suited"
    points = logits.shape[1]
    against = None if targets.against is None else targets.against.repeat_interleave(points, 0)
    each = Targets(targets.index.repeat_interleave(points, 0), against)
    return target_scores(logits.flatten(0, 1), each, score, ask.vit.outputs).view(-1, points)


def span(score: str) -> tuple[float, float]:
    """The lowest and highest possible score."""
    return {"logit": (-math.inf, math.inf), "cosine": (-1.0, 1.0)}.get(score, (0.0, 1.0))


def _curve(
    ask: Measure, insert: bool, changed: Tensor, removal: Removal, target: TargetClass, score: MeasuredScore
) -> Tensor:
    return scored(removed_logits(ask, changed, insert, removal), ask.of(target), ask, score)


def measured(curve: Tensor, changed: Tensor, integrator: Integrator = "trapezoid") -> Measured:
    """The area of curves [B,P] over the fraction of cells changed [P]."""
    x = changed.double() / changed[-1]
    steps = torch.linspace(float(x[0]), 1.0, len(x), dtype=x.dtype)  # a shorter last step counts as a full one
    return Measured(area(curve, integrator, steps), curve, x)


def _limits(settings: Any) -> tuple[float, float]:
    low, high = span(settings["score"])
    if settings["integrator"] != "unit":
        return low, high
    if settings["steps"] is None:
        return low and -math.inf, math.inf
    steps = max(1, settings["steps"] - (0 if settings["first"] else 1))
    return low * steps, high * steps


def _difference_limits(settings: Any) -> tuple[float, float]:
    low, high = _limits(settings)
    return low - high, high - low


_step_metric = partial(register_metric, ablates=True, protects=True, refuses=no_score, quick={"steps": 14})
_rise_metric = partial(
    _step_metric, paper="Petsiuk et al., BMVC 2018", bounds=_limits, cost="steps (224) + 1 forwards", words=_WORDS
)


@_rise_metric(
    "insertion",
    higher_is_better=True,
    presets={"rise": {**_RISE, "fill": "blur-rise"}, "tis": {**_TIS, "fill": "blur-tis"}, "vit-shapley": _SHAPLEY},
)
def insertion(
    ask: Measure,
    steps: Steps = 224,
    fill: Fill = "blur-rise",
    unit: Unit = "pixel",
    first: First = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Area under the class's score while the highest-ranked pixels appear on the fill.

    Preset `rise`: 225 points, trapezoids, the predicted class, RISE's blur. Preset `tis`: 224 points without the bare
    fill, their mean, the true class; it has the paper's words for fills: blur, random, black (`zero`) and mean
    (`image-mean`). Preset `vit-shapley`: tokens one by one, from none to all, the mean of the points, the true class.
    Curve [B,P] over the fraction shown. P forward passes per image.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    curve = _curve(ask, True, changed, Removal(fill, unit, upsampling), target_class, score)
    return measured(curve, changed, integrator)


@_rise_metric(
    "deletion",
    higher_is_better=False,
    presets={"rise": {**_RISE, "fill": "zero"}, "tis": {**_TIS, "fill": "blur-tis"}, "vit-shapley": _SHAPLEY},
)
def deletion(
    ask: Measure,
    steps: Steps = 224,
    fill: Fill = "zero",
    unit: Unit = "pixel",
    first: First = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Area under the class's score while the highest-ranked pixels are replaced by the fill.

    Presets as for `insertion`; `rise` deletes to `zero`, the training data's mean colour.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    curve = _curve(ask, False, changed, Removal(fill, unit, upsampling), target_class, score)
    return measured(curve, changed, integrator)


@_step_metric(
    "ins-del",
    paper="Englebert et al., ICCV-W 2023",
    higher_is_better=True,
    bounds=_difference_limits,
    cost="2 steps (448) + 2 forwards",
    presets={
        "rise": {**_RISE, "fill": "blur-rise", "deletion_fill": "zero"},
        "tis": {**_TIS, "fill": "blur-tis", "deletion_fill": None},
        "vit-shapley": _SHAPLEY,
    },
    words=_INS_DEL_WORDS,
)
def ins_del(
    ask: Measure,
    steps: Steps = 224,
    fill: Fill = "image-mean",
    deletion_fill: Fill | None = None,
    unit: Unit = "pixel",
    first: First = True,
    integrator: Integrator = "trapezoid",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Insertion minus deletion.

    Both use the same fill, or deletion uses `deletion_fill`. Curve: their difference.

    Args:
        deletion_fill: The fill of the deletion; None: the same.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    over = fill if deletion_fill is None else deletion_fill
    inserted = _curve(ask, True, changed, Removal(fill, unit, upsampling), target_class, score)
    deleted = _curve(ask, False, changed, Removal(over, unit, upsampling), target_class, score)
    found = measured(inserted - deleted, changed, integrator)
    parts = {
        "insertion": measured(inserted, changed, integrator).values,
        "deletion": measured(deleted, changed, integrator).values,
    }
    return Measured(found.values, found.curve, found.x, parts)
