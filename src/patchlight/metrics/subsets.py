"""Random sets of patches: does what the map adds up to in a set agree with what hiding the set does to the score?"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import constant, pearson
from patchlight.evidence.ablation import PixelMasks, TokenSubsets
from patchlight.evidence.fills import Fill, fill_images
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, register_metric
from patchlight.metrics.deletion import check_tokens, count_cells, scored
from patchlight.metrics.quantities import no_score

HiddenShare = Annotated[float, Field(gt=0, lt=1)]
Removed = Literal["patch", "token"]


def random_sets(count: int, share: float, patches: int, seed: int) -> Tensor:
    """Indices [R,k] of the patches in random sets of one size, at least one and not all of them."""
    if patches < 2:
        raise PatchlightError("the model has one patch, and a random set needs at least two to choose from")
    size = min(max(1, round(share * patches)), patches - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, patches, generator=generator).argsort(1)[:, :size]


def set_effects(ask: Measure, sets: Tensor, unit: Removed, fill: Fill) -> tuple[Tensor, Tensor]:
    """The sums of the maps over sets of patches [R,k], and the logits [B,R,C] of the images without each set."""
    maps, count = ask.on_grid().flatten(1).double(), len(ask.images)
    sets = sets.to(maps.device)
    hidden = torch.zeros(len(sets), maps.shape[1], dtype=torch.bool, device=maps.device).scatter_(1, sets, True)
    owner = torch.arange(count).repeat_interleave(len(sets))
    if unit == "token":
        check_tokens(ask.vit, maps.shape[1] - sets.shape[1])
        kept = (~hidden).nonzero()[:, 1].view(len(sets), -1).repeat(count, 1)
        logits = ask.ablation.logits(TokenSubsets(owner, kept))
    else:
        masks = (~hidden).view(-1, *ask.vit.grid).repeat(count, *[1] * len(ask.vit.grid))
        filled = fill_images(fill, ask.images, ask.vit, ask.seed)
        logits = ask.ablation.logits(PixelMasks(owner, masks, filled))
    return maps @ hidden.double().T, logits.view(count, len(sets), -1)


def _undefined(ask: Measure, effects: Tensor, values: Tensor) -> dict[int, str]:
    """Why images have no value: maps or effects that are constant."""
    flat = constant(ask.maps.flatten(1)).cpu()
    still = constant(effects).cpu() | values.isnan().cpu()
    reasons = {int(i): "hiding any of the sets changes the score alike" for i in still.nonzero().flatten()}
    return {**reasons, **{int(i): "the map is constant" for i in flat.nonzero().flatten()}}


def _effects(ask: Measure, logits: Tensor, target_class: TargetClass, score: MeasuredScore) -> Tensor:
    """f(x) - f(x without the set) [B,R]."""
    targets = ask.of(target_class)
    clean = scored(ask.logits()[:, None], targets, ask, score)
    return (clean - scored(logits, targets, ask, score)).double()


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
    """Correlation of what the map adds up to in random sets of patches with what hiding each set does to the score.

        mean over shares of corr_r( sum_{i in S_r} m_i,  f(x) - f(x without S_r) )

    The sets of a share have one size and are the same for all images. An additive model gives its own effects 1 and
    their negative -1; factors and offsets of the map change nothing. Preset `ancona` is Sensitivity-n: set sizes from 1
    to 80 %, logits. Curve [B,shares]: the correlation for each share.

    Args:
        samples: Number of sets for each share.
        shares: Shares of the patches that a set hides.
        unit: "patch" paints hidden patches with `fill`, "token" removes their tokens.
    """
    patches, columns, effects = count_cells(ask, unit), [], torch.empty(0)
    for place, share in enumerate(shares):
        sets = random_sets(samples, share, patches, ask.seed + place)
        sums, logits = set_effects(ask, sets, unit, fill)
        effects = _effects(ask, logits, target_class, score)
        columns.append(pearson(sums, effects.to(sums.device)))
    curve = torch.stack(columns, 1)
    values = curve.mean(1)
    return Measured(values, curve, torch.tensor(shares).double(), reasons=_undefined(ask, effects, values))


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
    """Mean squared error of the map as a prediction of what hiding random sets of patches does to the score.

        mean_r ( b sum_{i in S_r} m_i - (f(x) - f(x without S_r)) )^2

    Maps are read as contributions of the patches, not as gradients. b is 1, or the factor of at least 0 with the least
    error, so that maps of any unit can be compared. A constant map is one prediction among others and has a value.

    Args:
        samples: Number of sets.
        share: Share of the patches that a set hides.
        scaled: Whether b is the best factor for each image.
        unit: "patch" paints hidden patches with `fill`, "token" removes their tokens.
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
    """Drop of the score when a few of the highest patches are hidden at random, minus that for a few of the rest.

        mean over s of ( f(x) - E f(x without some of the s highest) ) - ( f(x) - E f(x without some of the rest) )

    Each patch is hidden with a chance of `rate`, less where more than the share `most` of the image would be hidden: so
    images stay close to the training data. The authors also fine-tune the model on such images; without, as here,
    they call it R-Fidelity. Random maps have 0 if the shares are symmetric about one half. Parts: `plus` and `minus`,
    the means of both drops; curve [B,shares]: their difference.

    Args:
        samples: Random subsets for each share and side.
        shares: Shares s of the patches that count as the highest.
        rate: Chance of each patch to be hidden.
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
    both = {"plus": torch.stack(plus, 1), "minus": torch.stack(minus, 1)}
    curve = both["plus"] - both["minus"]
    parts = {name: drops.mean(1) for name, drops in both.items()}
    return Measured(curve.mean(1), curve, torch.tensor(shares).double(), parts)
