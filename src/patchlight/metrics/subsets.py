"""Metrics that hide random sets of patches and compare the effects with the sums of the map over these sets."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import pearson
from patchlight.evidence.ablation import PixelMasks, TokenSubsets
from patchlight.evidence.fills import Fill, fill_images
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, no_score, register_metric
from patchlight.metrics.deletion import check_tokens, class_scores, count_cells
from patchlight.metrics.groups import undefined_correlation

HiddenShare = Annotated[float, Field(gt=0, lt=1)]
Removed = Annotated[
    Literal["patch", "token"],
    Field(description="'patch' paints hidden patches with the fill, 'token' removes their tokens."),
]


def random_sets(count: int, share: float, patches: int, seed: int) -> Tensor:
    """Indices [R,k] of the patches in R random sets of one size, at least one patch and not all."""
    if patches < 2:
        raise PatchlightError("the model has one patch, and a random set needs at least two to choose from")
    size = min(max(1, round(share * patches)), patches - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, patches, generator=generator).argsort(1)[:, :size]


def set_effects(ask: Measure, sets: Tensor, unit: Removed, fill: Fill) -> tuple[Tensor, Tensor]:
    """Sums [B,R] of the maps over sets of patches [R,k], and logits [B,R,C] of the images without each set."""
    maps, count = ask.on_grid().flatten(1).double(), len(ask.images)
    sets = sets.to(maps.device)
    hidden = torch.zeros(len(sets), maps.shape[1], dtype=torch.bool, device=maps.device).scatter_(1, sets, True)
    owner = torch.arange(count).repeat_interleave(len(sets))
    if unit == "token":
        check_tokens(ask.vit, maps.shape[1] - sets.shape[1])
        shown = (~hidden).nonzero()[:, 1].view(len(sets), -1).repeat(count, 1)
        logits = ask.ablation.logits(TokenSubsets(owner, shown))
    else:
        masks = (~hidden).view(-1, *ask.vit.grid).repeat(count, *[1] * len(ask.vit.grid))
        filled = fill_images(fill, ask.images, ask.vit, ask.seed)
        logits = ask.ablation.logits(PixelMasks(owner, masks, filled))
    return maps @ hidden.double().T, logits.view(count, len(sets), -1)


def _effects(ask: Measure, logits: Tensor, target_class: TargetClass, score: MeasuredScore) -> Tensor:
    """f(x) - f(x without the set) [B,R]."""
    targets = ask.of(target_class)
    clean = class_scores(ask.logits()[:, None], targets, ask, score)
    return (clean - class_scores(logits, targets, ask, score)).double()


@register_metric(
    "faithfulness-correlation",
    paper="Bhatt et al., IJCAI 2020",
    higher_is_better=True,
    bounds=(-1.0, 1.0),
    ablates=True,
    stochastic=True,
    refuses=no_score,
    cost="1 + samples (100) forwards for each share",
    quick={"samples": 8},
    presets={"ancona": {"shares": (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), "score": "logit"}},
)
def faithfulness_correlation(
    ask: Measure,
    samples: Annotated[int, Field(ge=3)] = 100,
    shares: Annotated[tuple[HiddenShare, ...], Field(min_length=1)] = (0.3,),
    unit: Removed = "patch",
    fill: Fill = "image-mean",
    target_class: TargetClass = "given",
    score: MeasuredScore = "auto",
) -> Measured:
    """Correlation of the sums of the map over random sets of patches with the effects of hiding these sets.

        mean over shares of corr_r( sum_{i in S_r} m_i,  f(x) - f(x without S_r) )

    All sets of a share have the same size, and all images the same sets. In an additive model, the true effects score 1
    and their negative -1. Factors and offsets of the map do not matter. Preset `ancona` is Sensitivity-n: set sizes
    from 1 to 80 %, logits. Curve [B,shares]: the correlation for each share.

    Args:
        samples: Number of sets for each share.
        shares: Shares of the patches that a set hides.
    """
    patches, columns, effects = count_cells(ask, unit), [], torch.empty(0)
    for place, share in enumerate(shares):
        sets = random_sets(samples, share, patches, ask.seed + place)
        sums, logits = set_effects(ask, sets, unit, fill)
        effects = _effects(ask, logits, target_class, score)
        columns.append(pearson(sums, effects.to(sums.device)))
    curve = torch.stack(columns, 1)
    values = curve.mean(1)
    reasons = undefined_correlation(ask, effects, values, "hiding any of the sets changes the score alike")
    return Measured(values, curve, torch.tensor(shares).double(), reasons=reasons)


@register_metric(
    "infidelity",
    paper="Yeh et al., NeurIPS 2019",
    higher_is_better=False,
    bounds=(0.0, float("inf")),
    ablates=True,
    stochastic=True,
    refuses=no_score,
    cost="1 + samples (100) forwards",
    quick={"samples": 8},
)
def infidelity(
    ask: Measure,
    samples: Annotated[int, Field(ge=2)] = 100,
    share: HiddenShare = 0.3,
    scaled: bool = True,
    unit: Removed = "patch",
    fill: Fill = "image-mean",
    target_class: TargetClass = "given",
    score: MeasuredScore = "auto",
) -> Measured:
    """Mean squared error of the map as a prediction of the effects of hiding random sets of patches.

        mean_r ( b sum_{i in S_r} m_i - (f(x) - f(x without S_r)) )^2

    The values of the map are contributions of the patches, not gradients. b is the non-negative factor with the
    smallest error, so that maps of any scale can be compared, or 1. A constant map has a value.

    Args:
        samples: Number of sets.
        share: Share of the patches that a set hides.
        scaled: Whether b is fitted to each image; otherwise it is 1.
    """
    sets = random_sets(samples, share, count_cells(ask, unit), ask.seed)
    sums, logits = set_effects(ask, sets, unit, fill)
    effects = _effects(ask, logits, target_class, score).to(sums.device)
    if scaled:
        size = (sums**2).sum(1, keepdim=True)
        sums = sums * ((sums * effects).sum(1, keepdim=True) / size.clamp_min(1e-300)).clamp_min(0)
    return Measured(((sums - effects) ** 2).mean(1))


@register_metric(
    "f-fidelity",
    paper="Zheng et al., ICLR 2025",
    aliases=("r-fidelity",),
    higher_is_better=True,
    bounds=lambda settings: (-2.0, 2.0) if settings["score"] == "probability" else (-math.inf, math.inf),
    ablates=True,
    stochastic=True,
    refuses=no_score,
    cost="1 + 2 samples (10) forwards for each share (9)",
    quick={"samples": 4, "shares": (0.3, 0.7)},
    presets={"paper": {"samples": 50, "shares": tuple(i / 20 for i in range(1, 20))}},
)
def f_fidelity(
    ask: Measure,
    samples: Annotated[int, Field(ge=1)] = 10,
    shares: Annotated[tuple[HiddenShare, ...], Field(min_length=1)] = tuple(i / 10 for i in range(1, 10)),
    rate: HiddenShare = 0.5,
    most: HiddenShare = 0.1,
    fill: Fill = "image-mean",
    target_class: TargetClass = "given",
    score: MeasuredScore = "auto",
) -> Measured:
    """Drop of the score when random patches among the highest are hidden, minus the drop for the remaining patches.

        mean over s of ( f(x) - E f(x without some of the s highest) ) - ( f(x) - E f(x without some of the rest) )

    Each patch is hidden with probability `rate`, or less if more than the share `most` of the image would be hidden, so
    that images stay close to the training data. Without fine-tuning the model on such images, as here, the authors call
    the metric R-Fidelity. Random maps have 0 if the shares are symmetric about one half. Parts: `plus` and `minus`, the
    means of both drops; curve [B,shares]: their difference.

    Args:
        samples: Number of random subsets for each share and side.
        shares: Shares s of the patches that count as the highest.
        rate: Probability that a patch is hidden.
        most: Largest expected share of the image that is hidden.
    """
    patches, count = count_cells(ask, "patch"), len(ask.images)
    ranks = ask.ranks("patch").flatten(1)
    generator = torch.Generator().manual_seed(ask.seed)
    chance = torch.rand(samples, patches, generator=generator).to(ranks.device)
    filled = fill_images(fill, ask.images, ask.vit, ask.seed)
    owner = torch.arange(count).repeat_interleave(samples)
    plus, minus = list[Tensor](), list[Tensor]()
    for share in shares:
        size = min(max(1, round(share * patches)), patches - 1)
        for part, drops in ((ranks < size, plus), (ranks >= size, minus)):
            inside = size if drops is plus else patches - size
            hidden = chance[:, ranks].transpose(0, 1) < min(rate, most * patches / inside)
            shown = ~(hidden & part[:, None]).reshape(count * samples, *ask.vit.grid)
            logits = ask.ablation.logits(PixelMasks(owner, shown, filled)).view(count, samples, -1)
            drops.append(_effects(ask, logits, target_class, score).mean(1))
    drops_plus, drops_minus = torch.stack(plus, 1), torch.stack(minus, 1)
    curve = drops_plus - drops_minus
    parts = {"plus": drops_plus.mean(1), "minus": drops_minus.mean(1)}
    return Measured(curve.mean(1), curve, torch.tensor(shares).double(), parts)
