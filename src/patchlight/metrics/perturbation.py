"""Perturbation tests at a few levels of removal: accuracy, score, KL and log-likelihood of the remaining image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.resize import Upsampling
from patchlight.core.targets import Targets, kl_divergence, log_probabilities
from patchlight.evidence.ablation import Unit
from patchlight.evidence.fills import Fill
from patchlight.metrics.base import (
    Measure,
    Measured,
    MeasuredScore,
    TargetClass,
    no_score,
    refuse_quantity,
    register_metric,
)
from patchlight.metrics.deletion import (
    Integrator,
    Removal,
    Share,
    area,
    class_scores,
    count_cells,
    difference_of_scores,
    removed_logits,
    span,
)

Direction = Literal["positive", "negative"]
Quantity = Literal["accuracy", "probability", "logit", "cosine", "kl", "nll"]
Points = Annotated[int, Field(ge=2, description="Number of levels from 0 to 100 %.")]
TokenQuantity = Literal["accuracy", "aopc"]
Form = Annotated[
    Literal["area", "percent", "higher"],
    Field(
        description="'area'; 'percent', 100 times the area; or 'higher', the same, subtracted from 100 if lower is "
        "better."
    ),
]
Levels = Annotated[int, Field(ge=1, description="Number of levels.")]
Low = Annotated[float, Field(ge=0, le=1, description="The first fraction.")]
High = Annotated[float, Field(ge=0, le=1, description="The last fraction.")]

_LOG_FLOOR = math.log(1e-12)
_RISING = ("kl", "nll")


def levels(cells: int, points: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """P equally spaced fractions from low to high, and the number of cells int(fraction * cells) at each."""
    if low > high or (low == high and points > 1):
        raise PatchlightError(f"fractions from low={low} to high={high} are not a range; give low < high")
    x = torch.linspace(low, high, points, dtype=torch.float64)
    return x, (x * cells + 1e-6).long()


def log_probability(logits: Tensor, targets: Targets, ask: Measure) -> Tensor:
    """log p(class) [B,P] of logits [B,P,C], at least log 1e-12."""
    if targets.against is not None:
        raise PatchlightError("a pair of classes has no logarithm of its probability; give target= one class per image")
    index = targets.index.to(logits.device)[:, None].expand(-1, logits.shape[1], 1)
    return log_probabilities(logits, ask.vit.outputs).gather(-1, index)[..., 0].clamp_min(_LOG_FLOOR)


def accuracy(logits: Tensor, targets: Targets, ask: Measure) -> Tensor:
    """1 where the class has the largest logit, otherwise 0 [B,P]."""
    top = (logits[..., 0] > 0).long() if ask.vit.outputs.kind == "binary" else logits.argmax(-1)
    return (top == targets.index.to(top.device)).to(logits)


def _quantity(ask: Measure, quantity: Quantity, logits: Tensor, targets: Targets) -> Tensor:
    if quantity == "accuracy":
        return accuracy(logits, targets, ask)
    if quantity == "kl":
        return kl_divergence(ask.logits()[:, None], logits, ask.vit.outputs).clamp_min(0)
    if quantity == "nll":
        return -log_probability(logits, targets, ask)
    return class_scores(logits, targets, ask, quantity)


def _perturbation_rises(settings: Mapping[str, Any]) -> bool:
    return (settings["quantity"] in _RISING) is (settings["direction"] == "positive")


def _perturbation_limits(settings: Mapping[str, Any]) -> tuple[float, float]:
    low, high = {"kl": (0.0, math.inf), "nll": (0.0, -_LOG_FLOOR)}.get(settings["quantity"], span(settings["quantity"]))
    across = settings["high"] - settings["low"]
    if settings["points"] == 1:  # its only point is the value
        return low, high
    size = {"unit": settings["points"] - 1, "width": across}.get(settings["integrator"], 1.0)
    return low * size, high * size


@register_metric(
    "perturbation",
    paper="Chefer et al., CVPR 2021",
    higher_is_better=_perturbation_rises,
    bounds=_perturbation_limits,
    ablates=True,
    refuses=refuse_quantity(lambda settings: settings["quantity"], "quantity='logit' works"),
    cost="points (9) forwards",
    presets={
        "chefer": {
            "quantity": "accuracy",
            "points": 9,
            "low": 0.1,
            "high": 0.9,
            "unit": "pixel",
            "fill": "black",
            "integrator": "mean",
            "target_class": "label",
            "upsampling": "bilinear",
        },
        "diffmask": {
            "quantity": "probability",
            "points": 29,
            "low": 0.0,
            "high": 1.0,
            "unit": "pixel",
            "fill": "noise",
            "noise": (-1.0, 1.0),
            "noise_seed": 123,
            "integrator": "unit",
            "target_class": "prediction",
            "upsampling": "bilinear",
        },
    },
    quick={"points": 3},
)
def perturbation(
    ask: Measure,
    direction: Direction = "positive",
    quantity: Quantity = "accuracy",
    points: Levels = 9,
    low: Low = 0.1,
    high: High = 0.9,
    unit: Unit = "pixel",
    fill: Fill = "black",
    integrator: Integrator = "mean",
    target_class: TargetClass = "label",
    upsampling: Upsampling = "bilinear",
    noise: tuple[float, float] = (0.0, 1.0),
    noise_seed: int | None = None,
) -> Measured:
    """Mean accuracy, or another quantity, while the highest (or lowest) pixels are removed.

    At each level, int(fraction * HW) pixels are replaced by the fill. A faithful map raises KL and -log p under
    positive perturbation and lowers the other quantities.

    Preset `chefer`: 9 levels from 10 % to 90 %, black, accuracy against the true label, the mean. Preset `diffmask`: 29
    points in steps of 1792 pixels (of 224 x 224), noise U(-1, 1) of seed 123, trapezoids of width 1, the predicted
    class; its paper calls `probability` accuracy and `nll` KL. Curve [B,P] over the fraction removed.

    Args:
        direction: Whether the highest ("positive") or lowest ("negative") pixels are removed first.
        quantity: "accuracy" is 1 if the class has the largest logit; "probability", "logit" and "cosine" are scores of
            the class; "kl" is KL(p_clean || p_k) over all classes; "nll" is -log p(class).
        noise: The range of the fill "noise".
        noise_seed: The seed of the fill "noise"; None: that of the call.
    """
    x, changed = levels(count_cells(ask, unit), points, low, high)
    removal = Removal(fill, unit, upsampling, direction == "negative", noise=noise, noise_seed=noise_seed)
    logits = removed_logits(ask, changed, False, removal)
    curve = _quantity(ask, quantity, logits, ask.of(target_class))
    return Measured(area(curve, integrator, x), curve, x)


RoadQuantity = Literal["accuracy", "probability", "logit", "cosine"]
Shares = Annotated[tuple[Share, ...], Field(min_length=1)]
_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def _half_span(settings: Mapping[str, Any]) -> tuple[float, float]:
    low, high = span(settings["quantity"])
    return (low - high) / 2, (high - low) / 2


@register_metric(
    "road",
    paper="Rong et al., ICML 2022",
    higher_is_better=True,
    bounds=_half_span,
    ablates=True,
    stochastic=lambda settings: settings["fill"] in ("road", "noise") and settings["unit"] != "token",
    refuses=refuse_quantity(lambda settings: settings["quantity"], "quantity='logit' works"),
    cost="2 shares (18) forwards, and as many imputations",
    presets={
        "authors": {"shares": (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9), "quantity": "accuracy", "target_class": "label"},
        "grad-cam": {"shares": _TENTHS, "quantity": "logit"},
    },
    quick={"shares": (0.5,)},
)
def road(
    ask: Measure,
    shares: Shares = _TENTHS,
    quantity: RoadQuantity = "probability",
    unit: Unit = "pixel",
    fill: Fill = "road",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """ROAD: removing the least relevant pixels first minus the most relevant first, with imputed pixels.

        (LeRF - MoRF) / 2

    At each share p, MoRF removes the int(p HW) highest pixels and LeRF keeps only these; both are means over the
    shares. Removed pixels are replaced by the mean of their neighbours plus a little noise, which reveals less of the
    shape of the mask than a constant colour. For shares that are symmetric about one half, such as 10 %, ..., 90 %, it
    is half of the gap of `srg`, random maps score 0, and it equals ROADCombined of the grad-cam library (preset
    `grad-cam`: logits). The seven shares of preset `authors`, with accuracy against the true label, are not symmetric;
    compare its two curves separately. Parts: `morf` and `lerf`; curve [B,P]: half of their difference over the share.

    Args:
        shares: The shares p.
        quantity: What is averaged: "accuracy", or the class's "probability", "logit" or "cosine".
    """
    if any(a >= b for a, b in pairwise(shares)):
        raise PatchlightError(f"shares={list(shares)} are not increasing; give each share once, from low to high")
    x = torch.tensor(shares, dtype=torch.float64)
    counts = (x * count_cells(ask, unit) + 1e-6).long()
    targets = ask.of(target_class)
    lerf, morf = (
        _quantity(ask, quantity, removed_logits(ask, counts, insert, Removal(fill, unit, upsampling)), targets)
        for insert in (True, False)
    )
    curve = (lerf - morf) / 2
    return Measured(curve.mean(1), curve, x, {"morf": morf.mean(1), "lerf": lerf.mean(1)})


_level_metric = partial(register_metric, paper="Wu et al., CVPR 2024", ablates=True, quick={"points": 5})


@_level_metric(
    "auc",
    higher_is_better=False,
    refuses=refuse_quantity(lambda settings: "accuracy", "'aopc' works"),
    cost="points (21) forwards, shared with aopc and lodds",
)
def auc(
    ask: Measure,
    points: Points = 21,
    unit: Unit = "pixel",
    fill: Fill = "black",
    target_class: TargetClass = "prediction",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Area under the accuracy while the highest-ranked pixels are removed.

    The top 0, 5, ..., 100 % are removed; the area is the sum of trapezoids over [0, 1]. Accuracy is 1 if the model
    predicts the class: by default its prediction on the clean image (the paper does not say which), with
    target_class="label" the true class. Curve [B,P] over the fraction removed.
    """
    x, logits = _levels_of_removal(ask, points, unit, fill, upsampling)
    curve = accuracy(logits, ask.of(target_class), ask)
    return Measured(area(curve, "trapezoid", x), curve, x)


@_level_metric(
    "aopc",
    higher_is_better=True,
    bounds=difference_of_scores,
    refuses=no_score,
    cost="points (21) + 1 forwards, shared with auc and lodds",
)
def aopc(
    ask: Measure,
    points: Points = 21,
    unit: Unit = "pixel",
    fill: Fill = "black",
    target_class: TargetClass = "prediction",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Mean drop of the class's probability while the highest-ranked pixels are removed.

        1/|K| sum_k [p(y|x) - p(y|x_k)],   K = {0, 5, ..., 100} per cent of the pixels

    Curve [B,P]: the drop at each level.
    """
    x, logits = _levels_of_removal(ask, points, unit, fill, upsampling)
    targets = ask.of(target_class)
    curve = class_scores(ask.logits()[:, None], targets, ask, score) - class_scores(logits, targets, ask, score)
    return Measured(curve.mean(1), curve, x)


@_level_metric(
    "lodds",
    higher_is_better=False,
    bounds=(_LOG_FLOOR, -_LOG_FLOOR),
    refuses=refuse_quantity(lambda settings: "nll", "'aopc' works"),
    cost="points (21) + 1 forwards, shared with auc and aopc",
)
def lodds(
    ask: Measure,
    points: Points = 21,
    unit: Unit = "pixel",
    fill: Fill = "black",
    target_class: TargetClass = "prediction",
    upsampling: Upsampling = "bilinear",
) -> Measured:
    """Mean log-odds of the class while the highest-ranked pixels are removed.

        -1/|K| sum_k log(p(y|x) / p(y|x_k)),   K as in `aopc`

    Probabilities are at least 1e-12. Curve [B,P]: log p(y|x_k) - log p(y|x).
    """
    x, logits = _levels_of_removal(ask, points, unit, fill, upsampling)
    targets = ask.of(target_class)
    curve = log_probability(logits, targets, ask) - log_probability(ask.logits()[:, None], targets, ask)
    return Measured(curve.mean(1), curve, x)


def _levels_of_removal(
    ask: Measure, points: int, unit: Unit, fill: Fill, upsampling: Upsampling
) -> tuple[Tensor, Tensor]:
    x, changed = levels(count_cells(ask, unit), points, 0.0, 1.0)
    return x, removed_logits(ask, changed, False, Removal(fill, unit, upsampling))


_SKIPPLUS_PRESETS: dict[str, dict[str, Any]] = {
    "skipplus": {"points": 9, "low": 0.1, "high": 0.9, "integrator": "trapezoid", "form": "higher"},
    "skipplus-code": {"points": 9, "low": 0.1, "high": 0.9, "integrator": "width", "form": "percent"},
}


def _token_quantity(settings: Mapping[str, Any]) -> str:
    return str(settings["quantity"] if settings["quantity"] == "accuracy" else settings["score"])


def _area_rises(insert: bool, quantity: str) -> bool:
    """Whether a larger area is better."""
    return insert == (quantity == "accuracy")


def _token_limits(insert: bool) -> Callable[[Mapping[str, Any]], tuple[float, float]]:
    def limits(settings: Mapping[str, Any]) -> tuple[float, float]:
        across = 1 - settings["low"] if insert else settings["high"]
        top = {"unit": float(settings["points"]), "width": across}.get(settings["integrator"], 1.0)
        top *= 1 if settings["form"] == "area" else 100
        low = 0.0
        if settings["quantity"] == "aopc":
            low, top = (top * end for end in difference_of_scores(settings))
        flipped = settings["form"] == "higher" and not _area_rises(insert, settings["quantity"])
        return (100 - top, 100 - low) if flipped else (low, top)

    return limits


def _token_area(
    ask: Measure,
    insert: bool,
    quantity: TokenQuantity,
    form: Form,
    integrator: Integrator,
    targets: Targets,
    grid: Any,
    score: MeasuredScore,
) -> Measured:
    """The area over levels of token removal; the clean image is the first (deletion) or last (insertion) point."""
    points, low, high = grid
    x, changed = levels(count_cells(ask, "token"), points, low, high)
    logits = removed_logits(ask, changed, insert, Removal(unit="token"))
    clean = ask.logits()[:, None]
    logits = torch.cat([logits, clean] if insert else [clean, logits], 1)
    if quantity == "accuracy":
        curve = accuracy(logits, targets, ask)
    else:
        curve = class_scores(clean, targets, ask, score) - class_scores(logits, targets, ask, score)
    end = x.new_tensor([1.0 if insert else 0.0])
    x = torch.cat([x, end] if insert else [end, x])
    values = area(curve, integrator, x)
    if form != "area":
        values, curve = 100 * values, 100 * curve
    if form == "higher" and not _area_rises(insert, quantity):
        values = 100 - values
    return Measured(values, curve, x)


_token_metric = partial(
    register_metric,
    paper="SkipPLUS, CVPR-W 2024",
    ablates=True,
    refuses=refuse_quantity(_token_quantity, "quantity='aopc' works, and score='logit'"),
    cost="points (9) + 1 forwards of fewer tokens",
    presets=_SKIPPLUS_PRESETS,
    quick={"points": 3},
)


@_token_metric(
    "token-deletion",
    higher_is_better=lambda s: s["form"] == "higher" or _area_rises(False, s["quantity"]),
    bounds=_token_limits(False),
)
def token_deletion(
    ask: Measure,
    quantity: TokenQuantity = "accuracy",
    points: Levels = 9,
    low: Low = 0.1,
    high: High = 0.9,
    integrator: Integrator = "trapezoid",
    form: Form = "area",
    target_class: TargetClass = "label",
    score: MeasuredScore = "auto",
) -> Measured:
    """Area under the accuracy, or under the drop of the class's probability, while the highest tokens are removed.

    At each fraction r, the int(r N) highest of N patch tokens are dropped after the position embedding; prefix tokens
    are kept, and the clean image is an additional point at 0. The area is divided by the range of fractions, so it is a
    mean.

    Preset `skipplus`: 10 % to 90 %, in per cent, accuracy as 100 - area, so that higher is always better. Preset
    `skipplus-code`, the released code: trapezoids over [0, 0.9], not divided, nothing subtracted. Curve [B,P+1].

    Args:
        quantity: "accuracy" (lower is better) or "aopc", p(y|x) - p(y|x_r) (higher is better).
    """
    return _token_area(ask, False, quantity, form, integrator, ask.of(target_class), (points, low, high), score)


@_token_metric(
    "token-insertion",
    higher_is_better=lambda s: s["form"] == "higher" or _area_rises(True, s["quantity"]),
    bounds=_token_limits(True),
)
def token_insertion(
    ask: Measure,
    quantity: TokenQuantity = "accuracy",
    points: Levels = 9,
    low: Low = 0.1,
    high: High = 0.9,
    integrator: Integrator = "trapezoid",
    form: Form = "area",
    target_class: TargetClass = "label",
    score: MeasuredScore = "auto",
) -> Measured:
    """Area under the accuracy, or under the missing probability, while only the highest tokens are kept.

    This is `token-deletion` with the int(r N) highest tokens kept and the clean image as the point at 1; preset
    `skipplus` subtracts `aopc` from 100.

    Args:
        quantity: "accuracy" (higher is better) or "aopc" (lower is better).
    """
    return _token_area(ask, True, quantity, form, integrator, ask.of(target_class), (points, low, high), score)
