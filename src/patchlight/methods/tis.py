"""Transformer Input Sampling: token subsets from clusters of the model's activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import Count, PixelMasks, TokenSubsets, Variants
from patchlight.evidence.fills import Fill, fill_images
from patchlight.evidence.kmeans import Empty, draw_initial, kmeans
from patchlight.methods.base import Ask, Estimate, Reads, ablates
from patchlight.methods.masking import Ratio, Ratios, advise_patches, owners
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife


def block_outputs(vit: Anatomy) -> Reads:
    """The output tokens of every block; of a hierarchical model, those of the stage that it is opened at."""
    return Reads(("y", layer) for layer in range(vit.stage_end if vit.hierarchical else vit.depth))


def activation_points(ask: Ask, standardise: bool = False) -> Tensor:
    """The outputs of all blocks as points [B,L*D,N] in float32: the values of each channel at the patches.

    `standardise` scales each point to mean 0 and variance 1, so that channels of large scale do not dominate.
    """
    vit = ask.vit
    values, _ = ask.forward(block_outputs(vit))
    points = torch.cat([vit.layout.of_cells(values[read]).float().mT for read in sorted(block_outputs(vit))], 1)
    if standardise:
        points = points - points.mean(-1, keepdim=True)
        points = points / points.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
    return points


def ranked_patches(centroids: Tensor) -> Tensor:
    """The patches in descending order of each centroid [B,K,N]; ties are in index order."""
    return centroids.argsort(stable=True, dim=-1, descending=True)


def as_masks(keep: Tensor, patches: int) -> Tensor:
    """Indices [B,K,k] as masks [B,K,N] of 0 and 1."""
    return torch.zeros(*keep.shape[:2], patches, dtype=torch.bool, device=keep.device).scatter_(2, keep, True)


def mean_score(scores: Tensor, masks: Tensor, weights: Tensor | None = None) -> Tensor:
    """sum_j w_j M_j / sum_j M_j [B,T,N] of scores w [B,V,T] and masks M [B,V,N]; `weights` [V] are 0 or 1.

    A patch that no mask shows gets the lowest value of the image.
    """
    masks, weights = masks.to(scores), scores.new_ones(scores.shape[1]) if weights is None else weights
    coverage = (weights @ masks)[:, None]
    mean = ((weights[:, None] * scores).mT @ masks) / coverage.clamp_min(1)
    lowest = mean.masked_fill(coverage == 0, torch.inf).amin(-1, keepdim=True)
    return torch.where(coverage > 0, mean, lowest)


def sampled_scores(
    ask: Ask,
    centroids: Tensor,
    keep: Sequence[float],
    unit: Literal["token", "patch"] = "token",
    fill: Fill = "noise",
    inverted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores w [B,V,T] and masks M [B,V,N] of centroids [B,K,N] at every keep ratio, V = K len(keep), by centroid.

    With `inverted`, w is minus the score of the image without M.
    """
    batch, count, patches = centroids.shape
    order = ranked_patches(centroids)
    owner = owners(ask, count)
    filled = fill_images(fill, ask.images, ask.vit, ask.seed)
    lists: list[Variants] = []
    masks = []
    for ratio in keep:
        size = max(1, int(ratio * patches))
        if inverted and size == patches:
            raise PatchlightError(f"inverted masks of keep={ratio} leave no patch to score; give keep below 1")
        masks.append(as_masks(order[..., :size], patches))
        if unit == "token":
            shown = order[..., size:] if inverted else order[..., :size]
            lists.append(TokenSubsets(owner, shown.flatten(0, 1)))
        else:
            pixels = ~masks[-1] if inverted else masks[-1]
            lists.append(PixelMasks(owner, pixels.reshape(-1, *ask.vit.grid), filled))
    scores = ask.score_variants(lists).view(len(keep), batch, count, -1)
    scores = scores.movedim(0, 2).flatten(1, 2)
    return -scores if inverted else scores, torch.stack(masks, 2).flatten(1, 2)


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if settings["unit"] == "token" and vit.can_drop is not None:
        return advise_patches(vit.can_drop) if vit.depth else vit.can_drop
    return None if vit.depth else f"it clusters the outputs of blocks, and {vit.name} is opened as a feature map"


@ablates(
    "tis",
    paper="Englebert et al., ICCV-W 2023",
    aliases=("transformer-input-sampling",),
    stochastic=True,
    exact=False,
    cost="1 + samples (1024) forwards of half the tokens, and a k-means",
    quick={"samples": 48},
    presets={"authors": {"empty": "zero", "iterations": 100, "stretch": True}},
    refuses=_refuses,
    reads=lambda settings, vit: block_outputs(vit),
    constant="every mask had the same score (keep=1 shows the whole image in each); use a smaller keep",
)
def tis(
    ask: Ask,
    samples: Count = 1024,
    keep: Ratio | Ratios = 0.5,
    unit: Literal["token", "patch"] = "token",
    fill: Fill = "noise",
    inverted: bool = False,
    empty: Empty = "reseed",
    standardise: bool = False,
    iterations: Count = 100,
    stretch: bool = False,
    tolerance: Tolerance | None = None,
) -> Estimate:
    """Transformer Input Sampling: mean score of the token subsets that contain a patch.

        R = (sum_j w_j M_j) / (sum_j M_j),   w_j = p_c(tokens of M_j)

    The outputs of all L blocks are L*D points of dimension N (patches), and mask M_j [N] shows the patches where
    centroid j of their k-means is largest. The transformer runs on the prefix tokens and these patches only, taken
    after the position embedding. A patch that no mask shows gets the lowest value of the image. The initial centroids
    are those of the authors' code after `numpy.random.seed(12345 + seed)`. Hierarchical models need `unit="patch"`, and
    the blocks are those of the stage of the map. Preset `authors`: empty clusters are set to zero, and the map is
    scaled to [0, 1]. 1 + samples len(keep) forward passes.

    Args:
        samples: Number of centroids, at most one for each point.
        keep: Share of the patches that a mask shows; with several shares, the masks of all are used.
        unit: "token" removes the other patches. "patch" paints them after normalisation, as in the paper's ablation.
        fill: The fill of painted patches; "noise" is uniform in [0, 1), one sample per image.
        inverted: Whether M_j is removed instead, and the map is minus the mean score (ours).
        empty: The new centroid of an empty cluster: a distant point ("reseed", ours) or zero.
        standardise: Whether each point is scaled to variance 1 (ours).
        iterations: Maximum number of iterations of the k-means.
        stretch: Whether the map is scaled to [0, 1].
    """
    points = activation_points(ask, standardise)
    initial = draw_initial(points.shape[1], samples, ask.seed)
    centroids = kmeans(points, initial, iterations, empty=empty)
    ratios = keep if isinstance(keep, list) else [keep]
    wide = torch.promote_types(ask.vit.dtype, torch.float32)
    shown = torch.zeros(
        *centroids.shape[:2], len(ratios), centroids.shape[2], dtype=torch.bool, device=centroids.device
    )

    def score(images: Tensor, part: slice) -> Tensor:
        index = images.to(centroids.device)
        scores, masks = sampled_scores(ask.of(images), centroids[index, part], ratios, unit, fill, inverted)
        shown[index, part] = masks.unflatten(1, (-1, len(ratios)))
        return scores

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        masks = shown[images.to(shown.device)].flatten(1, 2)[:, : scores.shape[1]].to(scores)

        def fit(weights: Tensor) -> Tensor:
            maps = mean_score(scores, masks, weights)
            if stretch:
                low, high = maps.aminmax(dim=-1, keepdim=True)
                maps = (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)
            return maps.view(*maps.shape[:2], *ask.vit.grid).to(wide)

        return jackknife(fit, scores.shape[1], scores, together=len(ratios))

    return in_rounds(ask, centroids.shape[1], tolerance, score, estimate)
