"""ViT-CX: masks are clusters of feature maps, scored by their causal effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.core.resize import axis_matrix, fitted, to_pixels
from patchlight.evidence.ablation import Count, Rendered
from patchlight.methods.base import Ask, Estimate, ablates
from patchlight.methods.cams import ATTENTION, NORM1, Layer, channel_reads, feature_maps, no_place
from patchlight.methods.masking import only_images, owners
from patchlight.methods.rise import draw_grids
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife

Variant = Literal["full", 1, 2, 3, 4, 5]
Noise = Callable[[Tensor], Tensor]
"""Returns standard normal images [n,C,H,W], given their indices [n]."""
Masks = Callable[[Tensor], Tensor]
"""Returns masks [n,1,H,W], given their indices [n]."""
_BLOCK = 16
"""Number of noise images that are sampled at once."""


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    layer = settings["layer"]
    if only_images(settings, vit) is not None:
        return only_images(settings, vit)
    if settings["variant"] == 2:
        return None
    if vit.hierarchical and layer != NORM1:
        return f"{vit.name} has no blocks to name as a layer; load it with another stage, and leave layer out"
    return no_place(layer, vit)


def _corners(patches: int, pixels: int) -> Tensor:
    """The first and last pixel between each two patch centres, where a bilinear map has its extremes."""
    cell = ((torch.arange(pixels) + 0.5) * patches / pixels - 0.5).floor()
    turns = cell[1:] != cell[:-1]
    ends = torch.ones(1, dtype=torch.bool)
    return (torch.cat([ends, turns]) | torch.cat([turns, ends])).nonzero()[:, 0]


def scale_to_unit(maps: Tensor, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scale maps [...,h,w] to the range [0, 1] after upsampling to `size`; also returns their range [...].

    Upsampling preserves constants, so the minimum and range of the upsampled map can be applied before it. A constant
    map becomes 0.
    """
    rows, columns = (axis_matrix(p, s)[_corners(p, s)].to(maps) for p, s in zip(maps.shape[-2:], size, strict=True))
    pixels = (rows @ maps @ columns.T).flatten(-2)
    low, high = pixels.amin(-1), pixels.amax(-1)
    span = high - low
    constant = span <= 1e-9 * torch.maximum(low.abs(), high.abs())
    result = (maps - low[..., None, None]) / torch.where(constant, 1, span)[..., None, None]
    return torch.where(constant[..., None, None], 0, result), torch.where(constant, 0, span)


def cosine_distances(masks: Tensor, size: tuple[int, ...]) -> Tensor:
    """1 - cos of the upsampled masks [...,D,D], from masks [...,D,h,w]: <U m_i, U m_j> = m_i^T (U^T U) m_j."""
    grams = [(u.T @ u).to(masks) for u in (axis_matrix(p, s) for p, s in zip(masks.shape[-2:], size, strict=True))]
    gram = masks.flatten(-2) @ (grams[0] @ masks @ grams[1]).flatten(-2).mT
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    cosine = gram / (norm[..., :, None] * norm[..., None, :]).clamp_min(torch.finfo(gram.dtype).tiny)
    distances = (1 - cosine).clamp_min(0)
    return torch.maximum(distances, distances.mT)  # rounding makes a product and its transpose differ


def clusters(distances: Tensor, threshold: float, valid: Tensor | None = None) -> Tensor:
    """Complete linkage of masks with distances [B,D,D]: the cluster of each mask [B,D], -1 if not `valid` [B,D].

    Clusters are merged while all members are closer than `threshold`, and numbered by their first members.
    """
    valid = torch.ones(distances.shape[:2], dtype=torch.bool, device=distances.device) if valid is None else valid
    if distances.device.type == "cuda":
        return _number_clusters(_merge_nearest(distances, threshold, valid), valid)
    leaders = [_link(d[v][:, v], v, threshold) for d, v in zip(distances, valid, strict=True)]
    return _number_clusters(torch.stack(leaders), valid)


def _link(distances: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """The first member [D] of the cluster of each valid mask, by scipy."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    leader = torch.arange(len(valid))
    if len(distances) < 2:
        return leader
    tree = linkage(squareform(distances.numpy(), checks=False), "complete")
    labels = fcluster(tree, np.nextafter(threshold, 0), "distance")
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    leader[valid] = leader[valid][torch.from_numpy(first[inverse])]
    return leader


def _merge_nearest(distances: Tensor, threshold: float, valid: Tensor) -> Tensor:
    """The first member [B,D] of the cluster of each mask, for all images at once on their device.

    Pairs that are each other's nearest are merged together, round by round; for complete linkage this gives the same
    clusters as merging the closest pair first.
    """
    batch, count, _ = distances.shape
    places = torch.arange(count, device=distances.device).expand(batch, -1)
    leader, alive = places, valid
    while True:
        apart = alive[:, :, None] & alive[:, None, :] & ~torch.eye(count, dtype=torch.bool, device=distances.device)
        distances = distances.masked_fill(~apart, torch.inf)
        nearest, partner = distances.min(-1)
        merged = (partner.gather(1, partner) == places) & (nearest < threshold) & (partner < places)
        if not bool(merged.any()):
            return leader
        into = torch.where(merged, partner, places)
        distances = distances.scatter_reduce(1, into[:, :, None].expand_as(distances), distances, "amax")
        distances = distances.scatter_reduce(2, into[:, None, :].expand_as(distances), distances, "amax")
        leader, alive = into.gather(1, leader), alive & ~merged


def _number_clusters(leader: Tensor, valid: Tensor) -> Tensor:
    """The number [B,D] of each mask's cluster, from its first member."""
    first = valid & (leader == torch.arange(leader.shape[1], device=leader.device))
    return (first.cumsum(1) - 1).gather(1, leader).masked_fill(~valid, -1)


def sample_noise(ask: Ask) -> Noise:
    """Standard normal images by index, independent of image and chunk.

    They are sampled in blocks; the generator of each block has a seed derived from the seed.
    """
    shape, device = ask.images.shape[1:], ask.images.device

    @lru_cache(maxsize=8)
    def block(index: int) -> Tensor:
        seeds = torch.randint(2**31, (index + 1,), generator=ask.generator())
        generator = torch.Generator(device).manual_seed(int(seeds[index]))
        return torch.randn(_BLOCK, *shape, generator=generator, device=device)

    def noise(indices: Tensor) -> Tensor:
        first, last = int(indices.min()) // _BLOCK, int(indices.max()) // _BLOCK
        images = torch.cat([block(i) for i in range(first, last + 1)])
        return images[(indices - first * _BLOCK).to(device, non_blocking=True)].to(ask.images.dtype)

    return noise


def masked_scores(ask: Ask, masks: Masks, owner: Tensor) -> Tensor:
    """f(X * M_i) [K,T] for masks M_i of images owner[i]; masks are computed inside the chunk."""
    device = ask.images.device
    index, owner_there = torch.arange(len(owner), device=device), owner.to(device)

    def render(part: slice) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return ask.images[owner_there[part]] * masks(index[part])

    return ask.score_variants(Rendered(owner, render))


def causal_scores(
    ask: Ask,
    masks: Masks,
    owner: Tensor,
    clean: Tensor,
    noise: Noise,
    sigma: float,
    samples: int = 1,
    part: slice | None = None,
) -> Tensor:
    """s_i = f(X * M_i + e_i) - f(X + e_i) + f(X) [K,T], e_i = (1 - M_i) Z_i, Z_i ~ N(0, sigma^2).

    Mask i belongs to image owner[i] (images one after another); noise indices restart for each image. Masks and noise
    are computed inside the chunk; `clean` [B,T] is f(X). The result is the mean over `samples` noise images, or a
    `part` of them: 2 K samples forwards.
    """
    device = ask.images.device
    place = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
    noises = torch.arange(samples)[part or slice(None)]
    draw = (place[:, None] * samples + noises).flatten().repeat_interleave(2)
    mask = torch.arange(len(owner)).repeat_interleave(2 * len(noises))
    index, owner_there = mask.to(device), owner[mask].to(device)
    unmasked = (torch.arange(len(mask)) % 2 == 1).to(device)[:, None, None, None]

    def render(part: slice) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            shown = masks(index[part])
            filled = (1 - shown) * (sigma * noise(draw[part]))
            return torch.addcmul(filled, ask.images[owner_there[part]], shown.masked_fill(unmasked[part], 1))

    scores = ask.score_variants(Rendered(owner[mask], render))
    masked, noisy = scores.view(len(owner), len(noises), 2, scores.shape[-1]).mean(1).unbind(1)
    return masked - noisy + clean[owner.to(clean.device)]


def upsampled(masks: Tensor, images: Tensor, extent: tuple[int, ...] | None = None) -> Masks:
    """Masks [K,h,w] upsampled to the size of the images."""
    masks, size = masks.to(images), images.shape[-2:]
    return lambda index: to_pixels(masks[index, None], size, extent).clamp(0, 1)


def saliency(scores: Tensor, masks: Tensor, size: tuple[int, ...], corrected: bool = True) -> Tensor:
    """W(x) = sum_i s_i M_i(x) / sum_i M_i(x) [T,H,W] of scores [K,T] and masks [K,h,w], 0 if no mask covers x.

    Without `corrected`, W(x) = sum_i s_i M_i(x). Sums are computed before upsampling, which is linear.
    """
    masks = masks.double()
    rows, columns = (axis_matrix(p, s).to(masks) for p, s in zip(masks.shape[-2:], size, strict=True))
    total = rows @ torch.einsum("kt,khw->thw", scores.double(), masks) @ columns.T
    return _divide(total, rows @ masks.sum(0) @ columns.T) if corrected else total


def _divide(total: Tensor, coverage: Tensor) -> Tensor:
    return torch.where(coverage > 1e-9, total / coverage.clamp_min(1e-9), 0)


@ablates(
    "vit-cx",
    paper="Xie et al., IJCAI 2023",
    aliases=("vitcx",),
    stochastic=True,
    exact=False,
    levels=("pixel",),
    cost="1 + 2 K forwards, K about 60 clusters",
    quick={"distance": 0.2},
    presets={"authors": {}, "paper": {"layer": ATTENTION, "rescale": False}},
    refuses=_refuses,
    reads=channel_reads,
    constant="all feature maps are in one cluster; use a smaller distance",
)
def vit_cx(
    ask: Ask,
    layer: Layer = NORM1,
    distance: Annotated[float, Field(gt=0)] | None = None,
    sigma: Annotated[float, Field(ge=0)] = 0.1,
    samples: Count = 1,
    rescale: bool = True,
    variant: Variant = "full",
    random_masks: Count = 5000,
    tolerance: Tolerance | None = None,
) -> Estimate:
    """ViT-CX: causal scores of masks that are clusters of feature maps.

        R(x) = sum_i s_i M_i(x) / sum_i M_i(x)
        s_i = f(X M_i + e_i) - f(X + e_i) + f(X),   e_i = (1 - M_i) Z_i,   Z_i ~ N(0, sigma^2)

    The D channels of `layer` are upsampled, scaled to [0, 1] and clustered by complete linkage on 1 - cosine. The mask
    M_i [H,W] of a cluster is the sum of its members, scaled again. Constant channels are skipped, and pixels that no
    mask covers get 0. The paper's map is K times this map, that of the released code 1/K times. The number K of masks
    of each image is in the attribution's `facts["masks"]`. 1 + 2 K samples forward passes (1 + K without noise). The
    error treats the masks as samples.

    Presets: `authors` (default) is the released code; `paper` uses the output of the last block's attention module and
    the mean of each cluster.

    Args:
        distance: Channels with a distance below this are merged; None: 0.1, or 0.05 for hierarchical models.
        sigma: Standard deviation of the noise; 0 is variant 3.
        samples: Number of noise samples over which s_i is averaged.
        rescale: Whether a mask is the scaled sum of its members; otherwise it is their mean.
        variant: Variants of the paper's Table 2. 1: channels are not clustered; 2: masks of RISE; 3: scores f(X M_i);
            4: sum_i s_i M_i, without coverage correction; 5: both 3 and 4.
        random_masks: Number of RISE masks of variant 2.
    """
    size = (ask.images.shape[-2], ask.images.shape[-1])
    features, clean = feature_maps(ask, layer)
    features, wide = features.double(), torch.promote_types(ask.vit.dtype, torch.float32)

    def score_masks(ask_part: Ask, masks: Masks, owner: Tensor, clean: Tensor, part: slice | None = None) -> Tensor:
        if sigma == 0 or variant in (3, 5):
            return masked_scores(ask_part, masks, owner)
        return causal_scores(ask_part, masks, owner, clean, sample_noise(ask), sigma, samples, part)

    if variant == 2:
        grids = draw_grids(random_masks, 7, 0.5, size, ask.generator()).to(ask.images)
        owner = owners(ask, random_masks)
        random = score_masks(ask, lambda index: grids.masks(index % random_masks)[:, None], owner, clean)
        random = random.view(len(features), random_masks, -1).mT
        wider = grids.to(random)
        result = jackknife(
            lambda weights: _divide(wider.weighted(weights * random), wider.weighted(weights[None])[0]),
            random_masks,
            random,
        )
        return replace(result, facts={"masks": torch.full((len(features),), random_masks)})
    extent = ask.vit.extent
    channels, spans = scale_to_unit(features, extent)
    valid = spans > 0
    if variant == 1:
        masks, counts = channels[valid], valid.sum(1)
    else:
        limit = distance or (0.05 if ask.vit.hierarchical else 0.1)
        labels = clusters(cosine_distances(channels, extent), limit, valid)
        masks, counts = cluster_masks(channels, labels, extent, rescale), labels.amax(1) + 1
    masks_of = masks.split(counts.tolist())
    most = max(map(len, masks_of))

    def score(images: Tensor, part: slice) -> Tensor:
        ask_part, masks = ask.of(images), [masks_of[i] for i in images.tolist()]
        lengths = [len(m) for m in masks]
        owner = torch.arange(len(masks)).repeat_interleave(torch.tensor(lengths))
        shown = upsampled(torch.cat(masks), ask_part.images, extent)
        scores = score_masks(ask_part, shown, owner, clean[images.to(clean.device)], part)
        padded = nn.utils.rnn.pad_sequence(list(scores.split(lengths)), batch_first=True)
        padded = F.pad(padded, (0, 0, 0, most - padded.shape[1])).flatten(1)
        return padded[:, None].expand(-1, part.stop - part.start, -1)  # the mean of these noise samples

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        means = scores.mean(1).view(len(images), most, ask.targets.count)

        def estimate_image(i: int, image: int) -> Estimate:
            masks = masks_of[image]

            def fit(weights: Tensor) -> Tensor:
                weighted = weights[:, None, None] * masks
                maps = saliency(means[i, : len(masks)], weighted, extent, corrected=variant not in (4, 5))
                return fitted(maps[None], size).to(wide)

            return jackknife(fit, len(masks), masks)

        return Estimate.concat([estimate_image(i, image) for i, image in enumerate(images.tolist())])

    return replace(in_rounds(ask, samples, tolerance, score, estimate, first=1), facts={"masks": counts.cpu()})


def cluster_masks(masks: Tensor, labels: Tensor, size: tuple[int, ...], rescale: bool = True) -> Tensor:
    """One mask per cluster [K,h,w], images one after another: the scaled sum of its members, or their mean.

    `labels` [B,D] are the cluster numbers of masks [B,D,h,w] in each image, -1 for none.
    """
    counts = labels.amax(1) + 1
    member = (labels + (counts.cumsum(0) - counts)[:, None])[labels >= 0]
    total = int(counts.sum())
    sums = masks.new_zeros(total, *masks.shape[2:]).index_add_(0, member, masks[labels >= 0])
    if rescale:
        return scale_to_unit(sums, size)[0]
    return sums / torch.bincount(member, minlength=total)[:, None, None]
