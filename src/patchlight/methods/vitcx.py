"""ViT-CX: masks are clusters of feature maps, scored by what they cause beyond the noise that fills their gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.ablation import Count, Rendered
from patchlight.anatomy.base import Anatomy
from patchlight.methods.cams import place
from patchlight.methods.compose import block_index
from patchlight.methods.rise import draw_grids
from patchlight.registry import Ask, Settings, method
from patchlight.trace import LayerJob

Variant = Literal["full", 1, 2, 3, 4, 5]
Noise = Callable[[Tensor], Tensor]
"""From indices of draws [n] to standard normal images [n,C,H,W]."""
Masks = Callable[[Tensor], Tensor]
"""From indices of masks [n] to masks [n,1,H,W]."""
_NORM1 = "blocks[-1].norm1"
_BLOCK = 16
"""Draws of noise made at once."""


def feature_maps(ask: Ask, layer: int | str | None = None) -> tuple[Tensor, Tensor]:
    """The channels of a layer on the patch grid [B,D,h,w] in float64, and the clean images' scores [B,T]: 1 forward.

    By default the output of the last block's first norm; of a hierarchical model, the stage it is opened behind.
    """
    vit = ask.vit
    if vit.hierarchical:
        with torch.no_grad(), vit.steady():
            tokens = vit.embed(ask.images)
        clean = ask.run([], tokens=tokens).scores
    else:
        index, kind = place(_NORM1 if layer is None else layer)
        index = block_index(index, vit.depth)
        job = LayerJob(
            lambda b: b.n if kind == "norm1" else b.x, frozenset({"n" if kind == "norm1" else "x"}), (index,)
        )
        seen = ask.run([job])
        tokens, clean = seen.values[0][0][index], seen.scores
    return tokens[:, vit.prefix :].double().mT.unflatten(-1, vit.grid), clean


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    layer = settings["layer"]
    if vit.hierarchical:
        told = f"{vit.name} has no blocks to name as a layer; load it with another stage, and leave layer out"
        return None if layer is None or settings["variant"] == 2 else told
    reads = layer is None or place(layer)[1] == "norm1"
    return f"{vit.name} has no first norm in its blocks" if reads and vit.parts(0).norm1 is None else None


def upsampler(patches: int, pixels: int) -> Tensor:
    """U [pixels,patches]: bilinear upsampling of one axis as a matrix, pixel centres aligned."""
    return F.interpolate(torch.eye(patches, dtype=torch.float64)[None], pixels, mode="linear")[0].T


def _corners(patches: int, pixels: int) -> Tensor:
    """The first and last pixel between each two patch centres: a bilinear map takes its extremes there."""
    cell = ((torch.arange(pixels) + 0.5) * patches / pixels - 0.5).floor()
    turns = cell[1:] != cell[:-1]
    ends = torch.ones(1, dtype=torch.bool)
    return (torch.cat([ends, turns]) | torch.cat([turns, ends])).nonzero()[:, 0]


def scaled(maps: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Maps [...,h,w] shifted and scaled so that they reach from 0 to 1 once upsampled to `size`; and their range [...].

    Upsampling keeps constants, so the pixel map's own minimum and range do it at patch resolution. A constant map
    becomes 0.
    """
    rows, columns = (upsampler(p, s)[_corners(p, s)].to(maps) for p, s in zip(maps.shape[-2:], size, strict=True))
    pixels = (rows @ maps @ columns.T).flatten(-2)
    low, high = pixels.amin(-1), pixels.amax(-1)
    span = high - low
    constant = span <= 1e-9 * torch.maximum(low.abs(), high.abs())
    result = (maps - low[..., None, None]) / torch.where(constant, 1, span)[..., None, None]
    return torch.where(constant[..., None, None], 0, result), torch.where(constant, 0, span)


def cosine_distances(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """1 - cos of the upsampled masks [...,D,D], from masks [...,D,h,w]: <U m_i, U m_j> = m_i^T (U^T U) m_j."""
    grams = [(u.T @ u).to(masks) for u in (upsampler(p, s) for p, s in zip(masks.shape[-2:], size, strict=True))]
    gram = masks.flatten(-2) @ (grams[0] @ masks @ grams[1]).flatten(-2).mT
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    cosine = gram / (norm[..., :, None] * norm[..., None, :]).clamp_min(torch.finfo(gram.dtype).tiny)
    return (1 - cosine).clamp_min(0)


def clusters(distances: np.ndarray, threshold: float) -> np.ndarray:
    """Complete linkage: the cluster of each mask, merged while the largest distance inside stays below `threshold`."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(distances) < 2:
        return np.zeros(len(distances), dtype=np.int64)
    upper = distances[np.triu_indices(len(distances), 1)]
    labels = fcluster(linkage(upper, "complete"), np.nextafter(threshold, 0), "distance")
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank: np.ndarray = np.argsort(np.argsort(first))
    return rank[inverse]


def draws(ask: Ask) -> Noise:
    """Standard normal images by index, on the images' device: the same whatever the image and the chunk.

    They are made in blocks, each with a generator whose own seed comes from the seed.
    """
    shape, device = ask.images.shape[1:], ask.images.device

    def block(index: int) -> Tensor:
        seeds = torch.randint(2**31, (index + 1,), generator=ask.generator())
        generator = torch.Generator(device).manual_seed(int(seeds[index]))
        return torch.randn(_BLOCK, *shape, generator=generator, device=device)

    def noise(indices: Tensor) -> Tensor:
        first, last = int(indices.min()) // _BLOCK, int(indices.max()) // _BLOCK
        made = torch.cat([block(i) for i in range(first, last + 1)])
        return made[(indices - first * _BLOCK).to(device)].to(ask.images.dtype)

    return noise


def masked_scores(ask: Ask, masks: Masks, count: int) -> Tensor:
    """f(X * M_i) [K,T] of one image; masks are made inside the chunk."""

    def render(part: slice) -> Tensor:
        with torch.autocast(ask.images.device.type, enabled=False):
            return ask.images * masks(torch.arange(count)[part].to(ask.images.device))

    return ask.score_variants(Rendered(torch.zeros(count, dtype=torch.long), render))


def causal_scores(
    ask: Ask, masks: Masks, count: int, clean: Tensor, noise: Noise, sigma: float, n_noise: int = 1
) -> Tensor:
    """s_i = f(X * M_i + e_i) - f(X + e_i) + f(X) [K,T] of one image, e_i = (1 - M_i) Z_i, Z_i ~ N(0, sigma^2).

    Masks and noise are made inside the chunk; `clean` [T] is f(X). Mean over `n_noise` draws: 2 K n_noise forwards.
    """
    draw = torch.arange(count * n_noise).repeat_interleave(2)

    def render(part: slice) -> Tensor:
        with torch.autocast(ask.images.device.type, enabled=False):
            shown = masks((draw[part] // n_noise).to(ask.images.device))
            whole = (torch.arange(len(draw))[part] % 2 == 1).to(shown.device)[:, None, None, None]
            return ask.images * torch.where(whole, 1, shown) + (1 - shown) * (sigma * noise(draw[part]))

    scores = ask.score_variants(Rendered(torch.zeros_like(draw), render))
    masked, noisy = scores.view(count, n_noise, 2, scores.shape[-1]).mean(1).unbind(1)
    return masked - noisy + clean


def upsampled(masks: Tensor, images: Tensor) -> Masks:
    """Masks [K,h,w] at the images' size."""
    masks, size = masks.to(images), images.shape[-2:]
    return lambda index: F.interpolate(masks[index, None], size, mode="bilinear").clamp(0, 1)


def saliency(scores: Tensor, masks: Tensor, size: tuple[int, int], corrected: bool = True) -> Tensor:
    """W(x) = sum_i s_i M_i(x) / sum_i M_i(x) [T,H,W] of scores [K,T] and masks [K,h,w], 0 where nothing covers x.

    Not `corrected` for coverage: S(x) = sum_i s_i M_i(x). Sums are taken before upsampling, which is linear.
    """
    masks = masks.double()
    rows, columns = (upsampler(p, s).to(masks) for p, s in zip(masks.shape[-2:], size, strict=True))
    total = rows @ torch.einsum("kt,khw->thw", scores.double(), masks) @ columns.T
    return _covered(total, rows @ masks.sum(0) @ columns.T) if corrected else total


def _covered(total: Tensor, coverage: Tensor) -> Tensor:
    return torch.where(coverage > 1e-9, total / coverage.clamp_min(1e-9), 0)


@method(
    "vit-cx",
    paper="Xie et al., IJCAI 2023",
    aliases=("vitcx",),
    ablates=True,
    default_score="probability",
    stochastic=True,
    exact=False,
    levels=("pixel",),
    cost="1 + 2 K forwards, K about 60 clusters",
    quick={"threshold": 0.2},
    presets={"authors": {}, "paper": {"rescale": False}},
    refuses=_refuses,
    constant="one cluster holds every feature map; use a smaller threshold",
)
def vit_cx(
    ask: Ask,
    layer: int | str | None = None,
    threshold: Annotated[float, Field(gt=0)] | None = None,
    sigma: Annotated[float, Field(ge=0)] = 0.1,
    n_noise: Count = 1,
    rescale: bool = True,
    variant: Variant = "full",
    n_random: Count = 5000,
) -> Tensor:
    """Causal score of clustered feature maps, corrected for coverage: W(x) = sum_i s_i M_i(x) / sum_i M_i(x).

    Each of the D channels of `layer` (default "blocks[-1].norm1", or the stage a hierarchical model is opened behind)
    is upsampled and stretched to [0, 1]; complete linkage on 1 - cosine merges those closer than `threshold` (default
    0.1, hierarchical 0.05), and a cluster's mask M_i [H,W] is its members' sum, stretched again (preset `paper`,
    `rescale=False`: their mean). s_i = f(X M_i + e_i) - f(X + e_i) + f(X) with e_i = (1 - M_i) Z_i, Z_i ~ N(0, sigma^2)
    after normalisation, mean over `n_noise` draws. Constant channels are left out; a pixel that no mask covers gets 0.
    Maps [B,T,H,W]; the paper's is K times this one, the released code's 1/K.

    `variant` (the paper's Table 2): 1 all maps, not clustered; 2 `n_random` masks of RISE; 3 scores f(X M_i); 4 no
    coverage correction, sum_i s_i M_i; 5 as 3 and 4. sigma = 0 is variant 3. 1 + 2 K n_noise forwards (1 + K without
    noise), no backward.
    """
    size = (ask.images.shape[-2], ask.images.shape[-1])
    features, clean = feature_maps(ask, layer)
    channels, spans = scaled(features, size)
    used = (spans > 0).cpu().numpy()
    clustered = variant not in (1, 2)
    distances = cosine_distances(channels, size).cpu().numpy() if clustered else None
    limit = threshold or (0.05 if ask.vit.hierarchical else 0.1)

    def scored(i: int, masks: Masks, count: int) -> Tensor:
        one = replace(ask, images=ask.images[i : i + 1], targets=ask.targets[i : i + 1])
        if sigma == 0 or variant in (3, 5):
            return masked_scores(one, masks, count)
        return causal_scores(one, masks, count, clean[i], draws(ask), sigma, n_noise)

    if variant == 2:
        grids = draw_grids(n_random, 7, 0.5, size, ask.generator()).to(ask.images)
        random = [scored(i, lambda index: grids.masks(index)[:, None], n_random).T for i in range(len(ask.images))]
        wide = grids.to(torch.stack(random))
        return _covered(wide.weighted(torch.stack(random)), wide.weighted(torch.ones_like(random[0][:1]))[0])
    maps = []
    # one image after another: an accelerator scores one while the next is clustered here
    for i, live in enumerate(used):
        masks = channels[i, torch.from_numpy(live.nonzero()[0]).to(channels.device)]
        if distances is not None:
            masks = cluster_masks(masks, clusters(distances[i][live][:, live], limit), size, rescale)
        scores = scored(i, upsampled(masks, ask.images), len(masks))
        maps.append(saliency(scores, masks, size, corrected=variant not in (4, 5)))
    return torch.stack(maps).to(ask.vit.dtype)


def cluster_masks(masks: Tensor, labels: np.ndarray, size: tuple[int, int], rescale: bool = True) -> Tensor:
    """One mask for each cluster [K,h,w]: the sum of its members [D,h,w], stretched to [0, 1]; or their mean."""
    sizes = np.bincount(labels)
    member = torch.from_numpy(labels).to(masks.device)
    sums = masks.new_zeros(len(sizes), *masks.shape[1:]).index_add_(0, member, masks)
    return scaled(sums, size)[0] if rescale else sums / torch.from_numpy(sizes).to(sums)[:, None, None]
