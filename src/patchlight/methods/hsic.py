"""HSIC attribution: the dependence of the score on the visibility of each cell of the image."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.resize import to_pixels
from patchlight.evidence.ablation import Count, PixelMasks
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Estimate, Level, ablates
from patchlight.methods.masking import at_level, needs_neighbours, owners
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife

Sampler = Literal["sobol", "lhs"]
_AT_ONCE = 2**24


def draw_masks(n: int, cells: int, sampler: Sampler, seed: int) -> Tensor:
    """Binary masks [n,cells]: a scrambled Sobol sequence, or n/2 Latin-hypercube points in twice the dimensions."""
    from scipy.stats import qmc

    generator = np.random.default_rng(seed)
    if sampler == "sobol":
        points = qmc.Sobol(cells, seed=generator).random_base2((n - 1).bit_length())[:n]
    else:
        points = qmc.LatinHypercube(2 * cells, seed=generator).random(-(-n // 2)).reshape(-1, cells)[:n]
    return torch.from_numpy(points > 0.5)


def hsic_of(masks: Tensor, outputs: Tensor, floor: float) -> Tensor:
    """HSIC_j = sum((H K_j H) * (H L H)) / n [R,cells] of binary masks m [n,cells] and outputs y [R,n], in float64.

    K_ab = 1.5 - (m_a - m_b)^2 and L_ab = exp(-(y_a - y_b)^2 / (2 w^2)), w = |median of y|, at least `floor`. The
    centring H removes the terms of K that depend on one index, so HSIC_j = 2/n m_j^T (H L H) m_j.
    """
    m, y = masks.double().to(outputs.device), outputs.double()
    m = m - m.mean(0)
    width = y.median(1).values.abs().clamp_min(floor)

    def hsic_of_rows(y: Tensor, width: Tensor) -> Tensor:
        L = torch.exp(-((y[:, :, None] - y[:, None]) ** 2) / (2 * width[:, None, None] ** 2))
        return 2 / len(m) * (m * (L @ m)).sum(1)

    rows = max(1, _AT_ONCE // len(m) ** 2)
    return torch.cat([hsic_of_rows(a, b) for a, b in zip(y.split(rows), width.split(rows), strict=True)])


@ablates(
    "hsic",
    paper="Novello et al., NeurIPS 2022",
    levels=("pixel", "token"),
    stochastic=True,
    unsigned=True,
    cost="samples forwards (1536)",
    quick={"samples": 64, "grid": 4},
    presets={
        "authors": {"sampler": "lhs", "grid": 7, "samples": 1536},
        "xplique": {"sampler": "sobol", "grid": 8, "samples": 500},
    },
    constant="no mask changed the score",
    refuses=needs_neighbours,
)
def hsic(
    ask: Ask,
    samples: Annotated[int, Field(ge=4)] = 1536,
    grid: Count = 7,
    sampler: Sampler = "sobol",
    fill: Fill = "zero",
    floor: Annotated[float, Field(gt=0)] = 1e-3,
    level: Level = "pixel",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """Dependence of the score on the visibility of each cell, without its sign.

        HSIC_j = sum((H K_j H) * (H L H)) / n,   K_j of the masks of cell j,   L of the scores

    This is the Hilbert-Schmidt independence criterion between the binary mask of a cell and the score. The masks are
    quasi-random, the same for all images, and upsampled by nearest neighbour. L is a Gaussian kernel whose width w is
    the median of the scores of an image. The map is upsampled bicubically, so it may be negative. Presets: `authors`
    (Latin hypercube, 7 x 7, 1536 masks), `xplique` (Sobol, 8 x 8, 500).

    Args:
        samples: Number of masks.
        grid: Cells along each side of a mask.
        sampler: A Sobol sequence, or a Latin hypercube ("lhs").
        floor: Smallest |w|; with a median close to 0, the kernel of different scores would be 0.
    """
    masks = draw_masks(samples, grid * grid, sampler, ask.seed)

    def score(images: Tensor, part: slice) -> Tensor:
        ask_part, shown = ask.of(images), masks[part].view(-1, grid, grid)
        filling = fill_images(fill, ask_part.images, ask.vit, ask.seed)
        variants = PixelMasks(owners(ask_part, len(shown)), shown.repeat(len(images), 1, 1), filling)
        return ask_part.score_variants(variants).view(len(images), len(shown), -1)

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        n, outputs = scores.shape[1], scores.mT.flatten(0, 1)

        def fit(weights: Tensor) -> Tensor:
            members = weights.bool()
            cells = hsic_of(masks[:n][members.cpu()], outputs[:, members], floor) / weights.mean()
            image = to_pixels(cells.view(len(images), -1, grid, grid), ask.images.shape[-2:], upsampling="bicubic")
            return at_level(image.to(ask.images), level, ask)

        return jackknife(fit, n, scores)

    return in_rounds(ask, samples, tolerance, score, estimate)
