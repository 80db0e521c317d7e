"""Insertion, deletion and SRG: the class's score while pixels or patches are shown or removed step by step.

All faithfulness metrics remove parts of images with `removed_logits` or `ranged_logits`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Unsupported
from patchlight.core.resize import Upsampling, to_pixels
from patchlight.core.targets import Targets, target_scores
from patchlight.evidence.ablation import Count, RankRanges, TokenSubsets, Unit
from patchlight.evidence.fills import Fill, drops, fill_images
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, no_score, register_metric

Integrator = Annotated[
    Literal["trapezoid", "mean", "unit", "width"],
    Field(
        description="How the area is computed: trapezoids divided by the width they cover, the mean of the points, "
        "trapezoids of width 1 each ('unit'), or trapezoids that are not divided ('width')."
    ),
]
Share = Annotated[float, Field(ge=0, le=1)]
Steps = Annotated[
    Count | None,
    Field(description="Number of steps; each changes ceil(cells / steps) more cells in the map's order; None: one."),
]
First = Annotated[bool, Field(description="Whether the curve begins with the image before the first step.")]

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
    """Number of cells changed at each point [P]: steps of ceil(cells / steps) cells, until all are changed.

    Without `steps`, each step changes one cell. `first` adds a point before the first step.
    """
    size = math.ceil(cells / (steps or cells))
    changed = torch.arange(0 if first else 1, math.ceil(cells / size) + 1) * size
    return changed.clamp_max(cells)


def count_cells(ask: Measure, unit: Unit) -> int:
    """Number of cells that can be removed from each image."""
    count = math.prod(ask.size) if unit == "pixel" else int(ask.vit.layout.sets(unit).max()) + 1
    return count - int(ask.protected(unit).sum()) if ask.protect else count


def area(curve: Tensor, integrator: Integrator, x: Tensor) -> Tensor:
    """The area [B] under curves [B,P] over increasing x [P]."""
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
        fill: What is painted in place of removed pixels or patches; tokens are dropped.
        unit: Pixels, patches or tokens.
        upsampling: How the map is upsampled to pixels.
        lowest_first: Whether the lowest cells are removed first.
        reverse_ties: Whether the order of equal cells is reversed.
        noise: The range of the fill `noise`.
        noise_seed: The seed of the fill `noise`; None: that of the metric.
    """

    fill: Fill = "black"
    unit: Unit = "pixel"
    upsampling: Upsampling = "bilinear"
    lowest_first: bool = False
    reverse_ties: bool = False
    noise: tuple[float, float] = (0.0, 1.0)
    noise_seed: int | None = None


def removed_logits(ask: Measure, changed: Tensor, insert: bool, removal: Removal) -> Tensor:
    """Logits [B,P,C] of images without their `changed` [P] highest cells, or with only these (`insert`)."""
    rest = torch.full_like(changed, count_cells(ask, removal.unit))
    begin, end = (changed, rest) if insert else (torch.zeros_like(changed), changed)
    return ranged_logits(ask, begin, end, removal)


def ranged_logits(ask: Measure, begin: Tensor, end: Tensor, removal: Removal) -> Tensor:
    """Logits [B,P,C] of images without the cells whose rank is in [begin, end), [P] each: P forwards per image.

    The metrics of one call share the logits of equal variants.
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
        ends = zip(begin.tolist(), end.tolist(), strict=True)
        shown = [torch.cat([order[:, :first], order[:, last:]], 1) for first, last in ends]
        logits = ask.ablation.logits([TokenSubsets(owner, members[cells].flatten(1)) for cells in shown])
        return logits.view(len(shown), len(order), -1).transpose(0, 1)

    ablation = tuple(sorted(ask.ablation_settings.items()))
    filled_by = () if removes else (removal.fill, removal.noise, seed)
    ranges = (tuple(begin.tolist()), tuple(end.tolist()))
    key = ("removed", *ranges, *ordering, ask.protect, filled_by, ablation)
    logits: Tensor = ask.once(key, tokens if removes else pixels)
    return logits


def check_tokens(vit: Anatomy, remaining: int, unit: str = "token") -> None:
    """Raise Unsupported if a model cannot drop tokens, or needs at least one patch and has none `remaining`."""
    reason = vit.cannot_remove(unit)
    if reason is not None:
        raise Unsupported(f"{vit.name} cannot drop tokens: {reason}; unit='patch' fills patches instead")
    if not vit.reads_positions and (vit.prefix == 0 or vit.pooling in ("avg", "max")) and remaining == 0:
        raise Unsupported(
            f"{vit.name} reads its class from the patches, so nothing is left to classify when all are dropped; "
            f"unit='patch' fills patches instead"
        )


def class_scores(logits: Tensor, targets: Targets, ask: Measure, score: MeasuredScore = "probability") -> Tensor:
    """The score of the class [B,P] from logits [B,P,C]; for a pair of classes, the difference."""
    assert score != "auto", "resolved by MetricRequest.suited"
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
    return class_scores(removed_logits(ask, changed, insert, removal), ask.of(target), ask, score)


def area_of_curve(curve: Tensor, changed: Tensor, integrator: Integrator = "trapezoid") -> Measured:
    """The area under curves [B,P] over the fraction of cells changed [P]."""
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
    """Area under the class's score while the highest-ranked pixels are shown on the fill.

    Presets: `rise` (225 points, trapezoids, the predicted class, RISE's blur), `tis` (224 points without the empty
    fill, their mean, the true class), `vit-shapley` (tokens one by one from none to all, the mean of the points, the
    true class). With preset `tis`, `fill` takes the paper's words: blur, random, black (`zero`) and mean
    (`image-mean`). Curve [B,P] over the fraction shown. P forward passes per image.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    curve = _curve(ask, True, changed, Removal(fill, unit, upsampling), target_class, score)
    return area_of_curve(curve, changed, integrator)


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

    The presets are those of `insertion`; `rise` fills with `zero`, the mean colour of the training data.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    curve = _curve(ask, False, changed, Removal(fill, unit, upsampling), target_class, score)
    return area_of_curve(curve, changed, integrator)


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

    The curve is the difference of both curves, and the parts are both areas.

    Args:
        deletion_fill: The fill of the deletion; None: that of the insertion.
    """
    changed = thresholds(count_cells(ask, unit), steps, first)
    deletion_fill = fill if deletion_fill is None else deletion_fill
    inserted = _curve(ask, True, changed, Removal(fill, unit, upsampling), target_class, score)
    deleted = _curve(ask, False, changed, Removal(deletion_fill, unit, upsampling), target_class, score)
    curves = {"insertion": inserted, "deletion": deleted}
    parts = {name: area_of_curve(curve, changed, integrator).values for name, curve in curves.items()}
    return replace(area_of_curve(inserted - deleted, changed, integrator), parts=parts)


Spacing = Literal["linear", "log"]
"""Steps of equal size, or counts that grow by a constant factor from one cell to all."""


def removed_counts(cells: int, steps: int | None, spacing: Spacing) -> Tensor:
    """Number of cells removed at each point [P], from none to all; "log": `steps` powers, rounded down."""
    if spacing == "linear":
        return thresholds(cells, steps, first=True)
    powers = np.geomspace(1, cells, steps or cells).astype(int)
    return torch.tensor(sorted({0, *powers.tolist(), cells}))


def difference_of_scores(settings: Any) -> tuple[float, float]:
    """The lowest and highest possible difference of two scores."""
    low, high = span(settings["score"])
    return low - high, high - low


@register_metric(
    "srg",
    paper="Blücher et al., TMLR 2024",
    aliases=("symmetric-relevance-gain",),
    higher_is_better=True,
    bounds=difference_of_scores,
    ablates=True,
    refuses=no_score,
    cost="2 steps (56) + 2 forwards, shared with insertion and deletion; with ties 4 steps + 4",
    presets={
        "bluecher": {
            "steps": 15,
            "spacing": "log",
            "fill": "zero",
            "unit": "patch",
            "target_class": "label",
            "score": "probability",
        }
    },
    quick={"steps": 14},
)
def srg(
    ask: Measure,
    steps: Count | None = 28,
    spacing: Spacing = "linear",
    fill: Fill = "zero",
    unit: Unit = "patch",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Symmetric relevance gain: removing the least important patches first minus the most important first.

        AUC_LIF - AUC_MIF,   the areas under the class's score over the share removed

    MIF removes the k highest cells, LIF the k lowest, for k from none to all; the areas are sums of trapezoids. Equal
    cells are removed in an order sampled from the seed and in its reverse, and the curves are averaged. So the expected
    value of a random map is 0, and the negative of a map has the negative value, for every fill. Without ties, and if
    the number of steps divides the number of cells, it equals `ins-del` with one fill. The score of a cell is the mean
    of the map over a patch, as in the paper. Preset `bluecher`: 15 counts that grow by a constant factor, the true
    class, probabilities. Parts: the areas `mif` and `lif` and the curves `mif-curve` and `lif-curve` [B,P]; curve
    [B,P]: LIF - MIF over the share removed.

    Args:
        steps: Number of steps from none to all; None: one cell per step.
        spacing: Whether the counts grow by a constant number ("linear") or by a constant factor ("log").
    """
    cells = count_cells(ask, unit)
    removed = removed_counts(cells, steps, spacing)
    targets, x = ask.of(target_class), removed.double() / cells

    def curves(reverse_ties: bool) -> Tensor:
        """MIF and LIF [2,B,P]; LIF shows the cells that remain when the k lowest are removed."""
        removal = Removal(fill, unit, upsampling, reverse_ties=reverse_ties)
        mif, shown = (
            class_scores(removed_logits(ask, counts, insert, removal), targets, ask, score)
            for counts, insert in ((removed, False), ((cells - removed).flip(0), True))
        )
        return torch.stack([mif, shown.flip(1)])

    mif_lif = curves(False)
    orders = [ask.ranks(unit, upsampling, reverse_ties=reverse).flatten(1) for reverse in (False, True)]
    tied = (orders[0] != orders[1]).any(1).to(mif_lif.device)
    if bool(tied.any()):
        mif_lif = torch.where(tied[:, None], (mif_lif + curves(True)) / 2, mif_lif)
    mif, lif = mif_lif
    areas = {"mif": area(mif, "trapezoid", x), "lif": area(lif, "trapezoid", x)}
    parts = {**areas, "mif-curve": mif, "lif-curve": lif}
    return Measured(areas["lif"] - areas["mif"], lif - mif, x, parts)
