"""Metrics that replace one group of cells at a time: SaCo and the faithfulness estimate."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.resize import Upsampling
from patchlight.core.statistics import constant, pearson, spearman
from patchlight.evidence.ablation import Unit
from patchlight.evidence.fills import Fill
from patchlight.metrics.base import (
    Measure,
    Measured,
    MeasuredScore,
    TargetClass,
    no_score,
    reasons_where,
    register_metric,
)
from patchlight.metrics.deletion import Removal, class_scores, count_cells, ranged_logits

Ties = Literal["faithful", "neutral"]
"""How two groups of equal effect count: as faithful, as in the paper, or not at all."""


def faithfulness(salience: Tensor, effect: Tensor, ties: Ties = "faithful") -> tuple[Tensor, Tensor]:
    """F [B] from the saliences [B,K] of groups, in descending order, and their effects; and the share of ties [B].

    F = sum_{i<j} sigma_ij (s_i - s_j) / sum_{i<j} |s_i - s_j|, sigma 1 where d_i > d_j, -1 where d_i < d_j. Effects are
    equal if they differ by at most 64 eps of the largest (or of 1).
    """
    i, j = torch.triu_indices(salience.shape[1], salience.shape[1], 1, device=salience.device)
    room = 64 * torch.finfo(effect.dtype).eps * effect.abs().amax(1, keepdim=True).clamp_min(1)
    gap = effect[:, i] - effect[:, j]
    tied = gap.abs() <= room
    sigma = torch.where(tied, float(ties == "faithful"), gap.sign().to(salience))
    weight = salience[:, i] - salience[:, j]
    return (sigma * weight).sum(1) / weight.abs().sum(1), tied.to(salience).mean(1)


@register_metric(
    "saco",
    paper="Wu et al., CVPR 2024",
    aliases=("salience-guided-faithfulness",),
    higher_is_better=True,
    bounds=(-1.0, 1.0),
    ablates=True,
    refuses=no_score,
    cost="groups (10) + 1 forwards",
)
def saco(
    ask: Measure,
    groups: Annotated[int, Field(ge=2)] = 10,
    fill: Fill = "image-mean",
    unit: Unit = "pixel",
    ties: Ties = "faithful",
    target_class: TargetClass = "prediction",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """SaCo: whether groups of pixels with more salience also have more effect on the score.

        sum_{i<j} sigma_ij (s_i - s_j) / sum_{i<j} |s_i - s_j|,   sigma = 1 where d_i > d_j, -1 where d_i < d_j

    The pixels in the order of the map are split into K groups of equal size, ranks [iHW/K, (i+1)HW/K). s_i is the sum
    of the map over a group, and d_i = p(y|x) - p(y|x with only that group replaced). The value is a Kendall tau
    weighted by salience: 1 if all pairs agree, -1 if none does. It depends on the values of the map and not only on
    their order: it is unchanged by a positive factor, but not by squaring. A constant map has no value. Parts: `tied`,
    the share of pairs of equal effect. Curve [B,K]: the effects d over the share of pixels at the end of each group.

    Args:
        groups: Number K of groups.
        ties: How pairs of equal effect count: as "faithful", as in the paper (a model that ignores the image then
            scores 1), or as neither ("neutral").
    """
    salience, effect, x = _groups(ask, groups, Removal(fill, unit, upsampling), target_class, score)
    values, tied = faithfulness(salience, effect, ties)
    undefined = constant(ask.maps.flatten(1)) | values.isnan()
    reasons = reasons_where(undefined, "the map is constant: no group is more salient than another")
    return Measured(values, effect, x, {"tied": tied}, reasons)


def _groups(
    ask: Measure, groups: int | None, removal: Removal, target_class: TargetClass, score: MeasuredScore
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the map over groups [B,K] in descending order, effects of replacing each [B,K], and their ends [K]."""
    unit, upsampling = removal.unit, removal.upsampling
    cells = count_cells(ask, unit)
    groups = cells if groups is None else groups
    if groups > cells:
        raise PatchlightError(f"groups={groups} cannot be made of {cells} cells; give at most {cells}, or unit='pixel'")
    edges = torch.arange(groups + 1) * cells // groups
    maps = ask.in_units(unit, upsampling).flatten(1).double()
    ranks = ask.ranks(unit, upsampling).flatten(1)
    group = torch.bucketize(ranks, edges[1:].to(ranks), right=True)
    salience = maps.new_zeros(len(maps), groups).scatter_add_(1, group, maps)
    targets = ask.of(target_class)
    logits = ranged_logits(ask, edges[:-1], edges[1:], removal)
    effect = class_scores(ask.logits()[:, None], targets, ask, score) - class_scores(logits, targets, ask, score)
    return salience, effect, edges[1:].double() / cells


@register_metric(
    "faithfulness-estimate",
    paper="Alvarez-Melis and Jaakkola, NeurIPS 2018; Nguyen and Martinez, 2020",
    higher_is_better=True,
    bounds=(-1.0, 1.0),
    ablates=True,
    refuses=no_score,
    cost="groups (every patch) + 1 forwards",
    presets={"nguyen": {"sizes": True}},
    quick={"groups": 8},
)
def faithfulness_estimate(
    ask: Measure,
    groups: Annotated[int | None, Field(ge=3)] = None,
    fill: Fill = "image-mean",
    unit: Unit = "patch",
    sizes: bool = False,
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Correlation of the values of the map with the effects of replacing single patches.

        corr_i( s_i, f(x) - f(x without group i) )

    The groups are formed in descending order of the map, and s_i is the sum of the map over a group. In an additive
    model, the true effects score 1 and their negative -1. Preset `nguyen` is the monotonicity correlation: the rank
    correlation of |s_i| with the size of the effect, which is the same for a map and its negative.

    Args:
        groups: Number of groups; None: each patch is a group.
        sizes: Whether the rank correlation of absolute values is used instead of the correlation of signed values.
    """
    salience, effect, x = _groups(ask, groups, Removal(fill, unit, upsampling), target_class, score)
    effect = effect.to(salience)
    values = spearman(salience.abs(), effect.abs()) if sizes else pearson(salience, effect)
    reasons = undefined_correlation(ask, effect, values, "replacing any group changes the score by the same amount")
    return Measured(values, effect, x, reasons=reasons)


def undefined_correlation(ask: Measure, effects: Tensor, values: Tensor, reason: str) -> dict[int, str]:
    """Why images have no correlation [B] of their maps with effects [B,K]: one of both is constant."""
    reasons = reasons_where(constant(effects).cpu() | values.isnan().cpu(), reason)
    return reasons | reasons_where(constant(ask.maps.flatten(1)), "the map is constant")
