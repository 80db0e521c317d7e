"""Metric-driven attributions (MDA): an order and values that make insertion and deletion curves good."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.resize import to_pixels
from patchlight.evidence.ablation import Count, PixelMasks, RankRanges, Variants
from patchlight.evidence.fills import Fill, Filling, fill_images
from patchlight.methods.base import Ask, Level, ablates
from patchlight.methods.lime import patch_labels
from patchlight.methods.masking import at_level, only_images
from patchlight.methods.orders import guided_order
from patchlight.methods.posterior import prior_map
from patchlight.methods.search import prior_dependence, refuse_prior, region_members, slic_regions

BLURS = range(31, 102, 2)
"""Sides of the blur's kernel; the first one that hides the class is used."""
HIDDEN = 0.01
"""The score of a class that is hidden."""
MOST_CANDIDATES = 28
DENSE = 0.005
"""Values from here on are replaced by ranks in a dense map (kappa)."""
Regions = Literal["square", "slic"]
Values = Literal["sparse", "mixed", "dense", "rank"]


def convex_falls(curve: np.ndarray) -> np.ndarray:
    """How far the closest curve in least squares falls at each step [n], if it is convex and has the same ends [n+1].

    A convex curve that does not rise is a sum of hinges max(1 - i / j, 0) whose weights are at least 0 and sum to the
    fall. The closest one is the point of least norm in a simplex, which non-negative least squares finds exactly.

    >>> convex_falls(np.array([1.0, 0.2, 0.6, 0.0])).round(3)
    array([0.6, 0.2, 0.2])
    """
    from scipy.optimize import nnls

    count, fall = len(curve) - 1, curve[0] - curve[-1]
    if fall <= 0:
        return np.zeros(count)
    lengths = np.arange(1, count + 1)
    hinges = np.maximum(1 - np.arange(count + 1)[:, None] / lengths, 0)
    apart = hinges - (curve - curve[-1])[:, None] / fall
    weights, _ = nnls(np.vstack([apart, np.ones(count)]), np.append(np.zeros(count + 1), 1.0))
    weights[weights < 1e-9 * weights.sum()] = 0  # rounding would order the steps at which nothing falls
    falls: np.ndarray = np.cumsum((fall * weights / weights.sum() / lengths)[::-1])[::-1]
    return falls


def region_values(falls: np.ndarray, sizes: np.ndarray, values: Values) -> np.ndarray:
    """Values of regions in their order, from how far the curve falls at each and from their sizes in pixels."""
    left = 1 - np.arange(1, len(falls) + 1) / len(falls)
    if values == "rank":
        return left
    sparse: np.ndarray = falls / sizes + falls * left
    dense = np.where(sparse >= DENSE, left, sparse)
    dense = dense * (sparse.max() / max(dense.max(), np.finfo(float).tiny))
    share = {"sparse": 0.0, "mixed": 0.5, "dense": 1.0}[values]
    mixed: np.ndarray = (1 - share) * sparse + share * dense
    return mixed


def pixel_ranks(places: Tensor) -> Tensor:
    """The rank of each pixel [H,W], from the place of its region in the order; inside a region in reading order."""
    return places.flatten().argsort(stable=True).argsort().view_as(places)


@dataclass(frozen=True)
class _Game:
    """One image and one class, and the regions of its pixels.

    Args:
        ask: The image and the class.
        labels: The region of each pixel [H,W].
        blurry: The image that insertion begins with [1,C,H,W].
        grey: What deletion ends at.
    """

    ask: Ask
    labels: Tensor
    blurry: Tensor
    grey: Filling

    def score(self, variants: Variants) -> Tensor:
        """The score of each variant [V]."""
        return self.ask.score_variants(variants)[:, 0].double().cpu()

    def masks(self, sets: Tensor) -> Tensor:
        """Which regions [V,n] are in sets of indices [V,m]."""
        return torch.zeros(len(sets), int(self.labels.max()) + 1, dtype=torch.bool).scatter_(1, sets, True)

    def score_shown(self, sets: Tensor, fill: Filling) -> Tensor:
        """The score [V] with only the regions of each set [V,n] over a fill."""
        return self.score(PixelMasks(torch.zeros(len(sets)).long(), sets.to(self.labels.device)[:, self.labels], fill))

    def order(self, prior: Tensor, candidates: int, cutoff: float) -> Tensor:
        """The regions [n], best first.

        The first ones raise the score over the blurred image fastest, until it has risen by `cutoff` of the way to the
        image's; all others, from the last one, raise the score over grey slowest.
        """
        ends = torch.stack([torch.zeros_like(prior), torch.ones_like(prior)]).bool()
        low, high = self.score_shown(ends, self.blurry).tolist()
        best: list[float] = []

        def insertion(sets: Tensor) -> Tensor:
            scores = self.score_shown(self.masks(sets[0]), self.blurry)
            best.append((float(scores.max()) - low) / max(abs(high - low), torch.finfo(torch.float64).tiny))
            return scores[None]

        def enough() -> bool:
            return cutoff < 1 and bool(best) and best[-1] >= cutoff

        shown = guided_order(insertion, prior[None], candidates, stop=enough).regions[0]
        first = shown[: len(best)] if enough() else shown
        rest = torch.ones_like(prior).index_fill(0, first, 0).nonzero()[:, 0]

        def deletion(sets: Tensor) -> Tensor:
            return -self.score_shown(self.masks(rest[sets[0]]), self.grey)[None]

        last = rest[guided_order(deletion, -prior[rest][None], candidates).regions[0]]
        return torch.cat([first, last.flip(0)])

    def falls(self, order: Tensor) -> np.ndarray:
        """How far the mean of both curves falls at each region [n]: from 1 to 0 in a convex curve."""
        height, width = self.labels.shape
        ranks = pixel_ranks(order.argsort().to(self.labels.device)[self.labels])[None]
        changed = torch.arange(height + 1) * width
        every, zero = torch.full_like(changed, height * width), torch.zeros_like(changed)
        inserted = self.score(RankRanges(zero, changed, every, ranks, self.blurry))
        deleted = self.score(RankRanges(zero, zero, changed, ranks, self.grey))
        mean = (_rise(inserted) + _rise(-deleted)) / 2
        at = np.linspace(0, height, len(order) + 1)
        resampled = np.interp(at, np.arange(height + 1), 1 - mean.numpy())
        return convex_falls(resampled)


def _rise(scores: Tensor) -> Tensor:
    """Scores [P] from 0 at the first to 1 at the last, never falling; a straight line if they do not rise."""
    low, high = scores[0], scores[-1]
    if high <= low:
        return torch.linspace(0, 1, len(scores), dtype=scores.dtype)
    return ((scores - low) / (high - low)).clamp(0, 1).cummax(0).values


def blurred(images: Tensor, side: int) -> Tensor:
    """Images with RISE's kernel of this side and deviation, almost a box; padded with 0."""
    from scipy.ndimage import gaussian_filter1d

    line = torch.from_numpy(gaussian_filter1d(np.eye(side)[side // 2], side)).to(images)
    weight = line.expand(images.shape[1], 1, 1, -1)
    across = F.conv2d(images, weight, padding=(0, side // 2), groups=images.shape[1])
    return F.conv2d(across, weight.mT, padding=(side // 2, 0), groups=images.shape[1])


def _prior_pixels(patches: Tensor, vit: Anatomy, size: tuple[int, int], side: int, regions: Regions) -> Tensor:
    """A prior's map [N] at pixels [1,1,H,W]; the authors first average it over squares with soft borders."""
    cells = patches.view(1, 1, *vit.grid).double().cpu()
    if regions == "square":
        return to_pixels(cells, size, vit.extent, "nearest")
    squares = [-(-length // side) for length in vit.grid]
    fine = to_pixels(cells, size, vit.extent, "bilinear")
    return F.interpolate(F.interpolate(fine, squares, mode="bilinear", antialias=True), size, mode="nearest-exact")


def _blurred_copy(ask: Ask) -> Tensor:
    """The least blurred copy of one image that hides its class."""
    for side in BLURS:
        copy = blurred(ask.images, side)
        everything = torch.zeros(1, *ask.images.shape[-2:], dtype=torch.bool)
        if float(ask.score_variants(PixelMasks(torch.zeros(1).long(), everything, copy))) <= HIDDEN:
            break
    return copy


@ablates(
    "mda",
    paper="Walker et al., ICLR 2025",
    levels=("token", "pixel"),
    exact=False,
    nonnegative=True,
    cost="the prior, and for N patches 28 N + 2 H forwards (6,000 for 14 x 14 patches)",
    quick={"prior": "rawatt", "side": 2, "candidates": 2},
    refuses=lambda settings, vit: only_images({}, vit) or refuse_prior(settings, vit),
    depends=prior_dependence,
    presets={"authors": {"regions": "slic", "level": "pixel"}},
)
def mda(
    ask: Ask,
    prior: str = "bt-h",
    side: Count = 1,
    regions: Regions = "square",
    candidates: Count | None = None,
    cutoff: Annotated[float, Field(gt=0, le=1)] = 0.9,
    fill: Fill = "zero",
    values: Values = "sparse",
    level: Level = "token",
) -> Tensor:
    """MDA: an order of the patches that optimises insertion and deletion, with values that fit both curves.

    It optimises the metrics insertion and deletion with its fills, so do not evaluate it with them.

    .. math:: R_{v_k} = d_k \\left( \\frac{1}{|v_k|} + \\frac{n - k}{n} \\right), \\qquad \\sum_k d_k = 1

    The first regions are inserted into a blurred copy of the image: of the candidates, those that the prior ranks
    highest, each step takes the one with the highest score, until it has risen by the share `cutoff`. The others are
    inserted into grey from the last one on: each step takes the candidate with the lowest score. d_k are the steps of
    the mean of both curves of this order, made convex. Preset: `authors` (SLIC regions, a map of pixels).

    Args:
        prior: The method whose map chooses the candidates.
        side: Side of the squares of patches that are one region.
        regions: "square", or nearly square SLIC segments of the same number ("slic"; needs the extra `lime`).
        candidates: Number of regions compared in each step; None: twice the square root of the number of regions, at
            most 28.
        cutoff: Insertion ends when the score has covered this share of the distance from the blurred copy to the image.
        fill: What deletion paints.
        values: "sparse": the formula. "dense": n - k instead, for all but the smallest values. "mixed": their mean.
            "rank": n - k for all.
        level: "token": maps [B,h,w]. "pixel": regions painted on pixels [B,H,W].
    """
    maps = prior_map(ask, prior)
    assert maps is not None  # prior="none" is refused: no method has that name
    size = (ask.images.shape[-2], ask.images.shape[-1])
    squares = region_members(ask.vit.grid, side)
    labels = squares.byte().argmax(0)[patch_labels(ask.vit, size)]
    results = []
    for index, image_maps in enumerate(maps):
        image = ask.of(torch.tensor([index]))
        if regions == "slic":
            labels = slic_regions(image.images[0], ask.vit, len(squares), 10_000)
        sizes = labels.flatten().bincount().double()
        for column, patches in enumerate(image_maps):
            alone = replace(image, targets=image.targets.column(column))
            means = labels.flatten().bincount(_prior_pixels(patches, ask.vit, size, side, regions).flatten()) / sizes
            filling = fill_images(fill, alone.images, ask.vit, ask.seed)
            game = _Game(alone, labels.to(ask.images.device), _blurred_copy(alone), filling)
            count = min(MOST_CANDIDATES, 2 * int(len(means) ** 0.5)) if candidates is None else candidates
            order = game.order(means, count, cutoff)
            values_of = torch.zeros_like(means)
            values_of[order] = torch.from_numpy(region_values(game.falls(order), sizes[order].numpy(), values))
            results.append(values_of[labels])
    wide = torch.promote_types(ask.vit.dtype, torch.float32)
    return at_level(torch.stack(results).view(*maps.shape[:2], *size).to(ask.images.device, wide), level, ask)
