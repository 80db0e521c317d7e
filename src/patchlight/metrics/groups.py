"""Groups of cells are replaced one at a time: more salient groups should have more effect (SaCo, estimates)."""

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
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, register_metric
from patchlight.metrics.deletion import Removal, count_cells, ranged_logits, scored
from patchlight.metrics.quantities import no_score

Ties = Literal["faithful", "neutral"]
"""How two groups of equal effect count: in the map's favour, as in the paper, or not at all."""


def faithfulness(salience: Tensor, effect: Tensor, ties: Ties = "faithful") -> tuple[Tensor, Tensor]:
    """F [B] of groups' saliences [B,K], in falling order, and effects [B,K]; and the share of tied pairs [B].

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

    Pixels in the map's order are cut into K groups of equal size, places [iHW/K, (i+1)HW/K). s_i is the sum of the map
    over a group and d_i = p(y|x) - p(y|x with that group alone replaced). The value is a Kendall tau weighted by
    salience: 1 if all pairs agree, -1 if none does. It reads the values of the map and not only their order: a positive
    factor changes nothing, squaring does. A constant map has no value. Parts: `tied`, the share of pairs of equal
    effect. Curve [B,K]: the effects d over the share of pixels down to the end of each group.

    Args:
        groups: Number K of groups.
        ties: How pairs of equal effect count: as faithful, as in the paper, where a model that ignores the image scores
            1, or as neither ("neutral").
    """
    salience, effect, x = _groups(ask, groups, Removal(fill, unit, upsampling), target_class, score)
    values, tied = faithfulness(salience, effect, ties)
    dead = constant(ask.maps.flatten(1)) | values.isnan()
    reasons = {int(n): "the map is constant: no group is more salient than another" for n in dead.nonzero().flatten()}
    return Measured(values, effect, x, {"tied": tied}, reasons)


def _groups(
    ask: Measure, groups: int | None, removal: Removal, target_class: TargetClass, score: MeasuredScore
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the map over groups [B,K] in falling order, effects of replacing each alone [B,K], and their ends [K]."""
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
    effect = scored(ask.logits()[:, None], targets, ask, score) - scored(logits, targets, ask, score)
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
    """Correlation of each patch's score in the map with what replacing that patch alone does to the score.

        corr_i( s_i, f(x) - f(x without group i) )

    Groups follow each other in the falling order of the map, and s_i is the map's sum over a group. An additive model
    gives its own effects 1 and their negative -1. Preset `nguyen` is the monotonicity correlation: the rank
    correlation of |s_i| with the size of the effect, which a map and its negative share.

    Args:
        groups: Number of groups; None: each patch is one.
        sizes: Takes rank correlation of sizes instead of the correlation of signed values.
    """
    salience, effect, x = _groups(ask, groups, Removal(fill, unit, upsampling), target_class, score)
    effect = effect.to(salience)
    values = spearman(salience.abs(), effect.abs()) if sizes else pearson(salience, effect)
    flat = constant(ask.maps.flatten(1)).to(values.device)
    undefined = flat | constant(effect) | values.isnan()
    reasons = dict.fromkeys(
        undefined.nonzero().flatten().tolist(), "replacing any group changes the score by the same amount"
    )
    reasons |= dict.fromkeys(flat.nonzero().flatten().tolist(), "the map is constant")
    values[undefined] = torch.nan
    return Measured(values, effect, x, reasons=reasons)
