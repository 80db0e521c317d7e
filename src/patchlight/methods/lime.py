"""LIME: a weighted linear model of the score, fitted to images with random hidden segments."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.resize import to_cells, to_pixels
from patchlight.evidence.ablation import Unit
from patchlight.evidence.fills import Fill, Filling, drops, fill_images
from patchlight.methods.base import Ask, Estimate, Level, ablates
from patchlight.methods.masking import (
    MadeMasks,
    bernoulli,
    in_sets,
    only_images,
    owners,
    removes_tokens,
    score_kept,
    shared_in_sets,
)
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife


def patch_labels(vit: Anatomy, size: tuple[int, ...], unit: Unit = "patch") -> Tensor:
    """The number [H,W] of the patch, or set of patches, of each pixel."""
    index = vit.layout.sets(unit).double().view(1, 1, *vit.grid)
    return to_pixels(index, size, vit.extent, "nearest")[0, 0].long()


def picture(image: Tensor, vit: Anatomy) -> np.ndarray:
    """The colours [H,W,3], from 0 to 1, of a normalised image [3,H,W]."""
    if len(image) != 3:
        raise PatchlightError(f"superpixels need colours, but this model reads {len(image)} channels; use patches")
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (vit.preprocess.mean, vit.preprocess.std))
    colours: np.ndarray = (image.double().cpu() * std + mean).clamp(0, 1).movedim(0, -1).numpy()
    return colours


def superpixels(image: Tensor, vit: Anatomy) -> Tensor:
    """Labels [H,W] of the quickshift segments of a normalised image [3,H,W]."""
    try:
        from skimage.segmentation import quickshift
    except ImportError:
        raise missing_extra("the superpixels of 'lime' need", "scikit-image", "lime", "use unit='patch'") from None
    labels: Tensor = torch.from_numpy(quickshift(picture(image, vit), kernel_size=4, max_dist=200, ratio=0.2)).long()
    return labels


def segment_means(images: Tensor, labels: Tensor) -> Tensor:
    """Images [B,C,H,W] in which each segment of labels [B,H,W] has its mean colour."""
    index = labels.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    total = images.new_zeros(*images.shape[:2], int(labels.max()) + 1)  # also of a video [B,C,T,H,W]
    count = total.scatter_add(2, index, torch.ones_like(images).flatten(2))
    total = total.scatter_add(2, index, images.flatten(2))
    return (total / count.clamp_min(1)).gather(2, index).view_as(images)


def fit(z: Tensor, y: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """argmin_b sum_i w_i (y_i - b_0 - z_i b)^2 + ridge |b|^2 in closed form, b_0 free.

    z [B,n,S], y [B,n,T] and w [B,n] to b [B,T,S], in float64; z and w may be the same for all images, [1,n,S].
    """
    z, y, w = z.double(), y.double(), weights.double()[..., None]
    z = z - (w * z).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    y = y - (w * y).sum(1, keepdim=True) / w.sum(1, keepdim=True)
    normal = (w * z).mT @ z + ridge * torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    solved: Tensor = torch.linalg.solve(normal, (w * z).mT @ y)
    return solved.transpose(1, 2)


def kernel(z: Tensor, counts: Tensor, width: float) -> Tensor:
    """pi = sqrt(exp(-d^2 / width^2)) [B,n], with d = 1 - sqrt(k / S) the cosine distance of z [B,n,S] to all ones."""
    distance = 1 - (z.double().sum(-1) / counts[:, None]).sqrt()
    return torch.exp(-(distance**2) / width**2).sqrt()


@ablates(
    "lime",
    paper="Ribeiro et al., KDD 2016",
    levels=("token", "pixel"),
    stochastic=True,
    cost="samples forwards (2000)",
    quick={"samples": 96},
    presets={"paper": {"unit": "pixel", "level": "pixel", "samples": 1000}, "token": {"unit": "token"}},
    refuses=lambda settings, vit: removes_tokens(settings, vit) or only_images(settings, vit),
)
def lime(
    ask: Ask,
    samples: Annotated[int, Field(ge=2)] = 2000,
    unit: Unit = "patch",
    fill: Fill | Literal["segment-mean"] = "segment-mean",
    width: Annotated[float, Field(gt=0)] = 0.25,
    ridge: Annotated[float, Field(gt=0)] = 1.0,
    level: Level = "token",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """LIME: coefficients of a linear model that predicts the score from the segments shown.

        min_b sum_i pi_i (f_i - b_0 - z_i b)^2 + ridge |b|^2,   pi_i = sqrt(exp(-d_i^2 / width^2))

    z_i in {0,1}^S are the visible segments of sample i: each with probability 1/2, in the first sample all. d_i is the
    cosine distance of z_i to 1. The map is b, signed. Presets: `paper` (superpixels, 1000 samples, a map of pixels),
    `token`. One forward pass per sample.

    Args:
        samples: Number of samples; there are more patches than superpixels, so the default is above the paper's 1000.
        unit: A segment: a "patch", a patch whose token is removed ("token"), a quickshift superpixel ("pixel"; needs
            the extra `lime`), or a set of patches ("frame", "tube", "band", "slice"), whose coefficient is divided
            equally among its cells.
        fill: The fill of hidden segments; "segment-mean" is their mean colour.
        width: Width of the kernel that weights the samples.
        ridge: Penalty on the coefficients.
    """
    size, layout, removes = ask.vit.geometry.size, ask.vit.layout, drops(unit, fill)
    if unit == "pixel":
        labels = torch.stack([superpixels(image, ask.vit) for image in ask.images])
    else:
        labels = patch_labels(ask.vit, size, unit)[None]
    counts = labels.flatten(1).amax(1) + 1
    z = torch.zeros(len(counts), samples, int(counts.max()), dtype=torch.bool)
    for shown, count in zip(z, counts.tolist(), strict=True):
        shown[:, :count] = bernoulli((samples, count), 0.5, ask.generator(), empty=not removes)
        shown[0, :count] = True
    labels = labels.to(ask.images.device).expand(len(ask.images), *size)

    def segments(images: Tensor) -> Tensor:
        return z if len(z) == 1 else z[images]

    def score(images: Tensor, part: slice) -> Tensor:
        shown, ask_part = segments(images)[:, part], ask.of(images)
        if removes:
            return score_kept(ask_part, in_sets(shown, layout, unit).flatten(2))
        return _score_segments(ask_part, shown, labels[images], fill)

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        device = torch.device("cpu") if scores.device.type == "mps" else scores.device
        shown, y = segments(images)[:, : scores.shape[1]].to(device), scores.to(device)
        nearness = kernel(shown, (counts if len(z) == 1 else counts[images]).to(device), width)
        index = labels[images.to(labels.device)].flatten(1)[:, None].expand(-1, scores.shape[-1], -1)

        def fit_map(weights: Tensor) -> Tensor:
            coefficients = fit(shown, y, nearness * weights, ridge).to(scores)
            if unit != "pixel" and level == "token":
                return shared_in_sets(coefficients, layout, unit)
            pixels = coefficients.gather(2, index).view(*coefficients.shape[:2], *size)
            return pixels if level == "pixel" else to_cells(pixels, ask.vit.grid, ask.vit.extent)

        return jackknife(fit_map, scores.shape[1], y)

    return in_rounds(ask, samples, tolerance, score, estimate)


def _score_segments(ask: Ask, z: Tensor, labels: Tensor, fill: Fill | Literal["segment-mean"]) -> Tensor:
    """Scores [B,n,T] of images with only the segments z [B,n,S] (or one z for all), for labels [B,H,W]."""
    if fill == "segment-mean":
        filling: Filling = ask.vit.as_input(segment_means(ask.vit.channels_first(ask.images), labels))
    else:
        filling = fill_images(fill, ask.images, ask.vit, ask.seed)
    owner, flat = owners(ask, z.shape[1]), z.expand(len(ask.images), -1, -1).flatten(0, 1)

    def masks(part: slice) -> Tensor:
        index = labels[owner[part].to(labels.device)].flatten(1)
        return flat[part].to(ask.images).gather(1, index).view(-1, *labels.shape[1:])

    scores = ask.score_variants(MadeMasks(owner, masks, filling))
    return scores.view(len(ask.images), z.shape[1], -1)
