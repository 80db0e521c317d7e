"""RISE: random masks, weighted by the scores of the masked images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.ablation import Count, Unit
from patchlight.evidence.fills import Fill, drops, fill_images
from patchlight.methods.base import Ask, Estimate, Level, ablates
from patchlight.methods.masking import (
    Ratio,
    at_level,
    bernoulli,
    in_sets,
    needs_neighbours,
    removes_tokens,
    score_masks,
    score_patches,
)
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife


@dataclass(frozen=True)
class RandomGrids:
    """Random masks in compact form: binary grids [N,s,s], their crop offsets, and the image size.

    A mask is Y[a] g X[b]^T, with Y[a] [H,s] the rows of the upsampling matrix from a on, so the N masks are never in
    memory together.
    """

    grids: Tensor
    shifts: Tensor
    size: tuple[int, int]

    def to(self, like: Tensor) -> RandomGrids:
        return RandomGrids(self.grids.to(like), self.shifts.to(like.device), self.size)

    def first(self, n: int) -> RandomGrids:
        return RandomGrids(self.grids[:n], self.shifts[:n], self.size)

    @cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """The upsampling matrices Y [cell,H,s] and X [cell,W,s] at every shift."""
        height, width = (upsampling(self.grids.shape[-1], n).to(self.grids) for n in self.size)
        return height, width

    def masks(self, index: Tensor) -> Tensor:
        """The masks [n,H,W] with the given indices."""
        y, x = self.axes
        a, b = self.shifts[index].unbind(1)
        return y[a] @ self.grids[index] @ x[b].mT

    def weighted(self, scores: Tensor) -> Tensor:
        """sum_i scores[...,i] M_i [...,H,W], from scores [...,N].

        Grids with the same shift are summed first, because upsampling is linear.
        """
        y, x = self.axes
        flat, shifts = scores.flatten(0, -2), torch.arange(len(y) * len(x), device=scores.device)
        small = flat.new_zeros(len(flat), self.grids[0].numel(), len(shifts))
        for part in torch.arange(len(self.grids), device=scores.device).split(4096):
            shift = self.shifts[part, 0] * len(x) + self.shifts[part, 1]
            small += (flat[:, None, part] * self.grids[part].flatten(1).T) @ (shift[:, None] == shifts).to(flat)
        small = small.view(len(flat), *self.grids.shape[1:], len(y), len(x))
        rows = torch.einsum("kijab,bwj->kiaw", small, x)
        return torch.einsum("kiaw,ahi->khw", rows, y).view(*scores.shape[:-1], *self.size)


def upsampling(cells: int, size: int) -> Tensor:
    """Bilinear upsampling of s cells to a canvas of (s + 1) ceil(size / s), cropped at every shift: [cell,size,s].

    Pixel centres are aligned; beyond the outermost cell centres, the grid is mirrored.
    """
    cell = -(-size // cells)
    canvas = (cells + 1) * cell
    at = ((torch.arange(canvas, dtype=torch.float64) + 0.5) * cells / canvas - 0.5).abs()
    at = (cells - 1) - ((cells - 1) - at).abs()
    weights = (1 - (at[:, None] - torch.arange(cells)).abs()).clamp_min(0)
    return weights.unfold(0, size, 1)[:cell].mT


def draw_grids(n: int, cells: int, keep: float, size: tuple[int, int], generator: torch.Generator) -> RandomGrids:
    """N grids of s x s cells, each 1 with probability `keep`, and their shifts, uniform within a cell."""
    grids = torch.rand(n, cells, cells, generator=generator) < keep
    shifts = [torch.randint(-(-length // cells), (n,), generator=generator) for length in size]
    return RandomGrids(grids, torch.stack(shifts, 1), size)


@ablates(
    "rise",
    paper="Petsiuk et al., BMVC 2018",
    levels=("pixel", "token"),
    stochastic=True,
    cost="samples forwards (4000)",
    quick={"samples": 48, "grid": 4},
    presets={
        "paper": {"grid": 7, "keep": 0.5, "samples": 4000},
        "repo": {"grid": 8, "keep": 0.1, "samples": 6000},
        "tis": {"grid": 8, "keep": 0.1, "samples": 4000, "score": "logit"},
        "vit-shapley": {"unit": "token", "level": "token", "keep": 0.5, "samples": 2000, "normaliser": "empirical"},
    },
    refuses=lambda settings, vit: removes_tokens(settings, vit) or needs_neighbours(settings, vit),
)
def rise(
    ask: Ask,
    samples: Count = 4000,
    grid: Annotated[int, Field(ge=2)] = 7,
    keep: Ratio = 0.5,
    normaliser: Literal["expected", "empirical"] = "expected",
    unit: Unit = "pixel",
    fill: Fill = "zero",
    level: Level = "pixel",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """RISE: mean score of the random masks that show a pixel.

        R(x) = 1/(N p) sum_i f(X * M_i) M_i(x)

    A mask M_i is a binary grid, upsampled bilinearly to a canvas one cell larger than the image and cropped at a random
    offset. All images have the same masks. Presets: `paper` (the default: s 7, p 0.5, N 4000), `repo` (s 8, p 0.1, N
    6000), `tis` (s 8, p 0.1, N 4000, logits), `vit-shapley` (tokens, p 0.5, N 2000, empirical).

    Args:
        samples: Number N of masks.
        grid: Cells s along each side of a mask.
        keep: Probability p that a cell is shown.
        normaliser: "expected" divides by N p. "empirical" divides by sum_i M_i(x), which corrects for the uneven
            coverage at the borders.
        unit: "pixel": the masks above. "patch" samples patches independently, "token" also removes their tokens;
            "frame", "tube", "band" and "slice" sample these sets of patches.
    """
    layout = ask.vit.layout
    if unit == "pixel":
        size = (ask.images.shape[-2], ask.images.shape[-1])
        grids = draw_grids(samples, grid, keep, size, ask.generator()).to(ask.images)
    else:
        sets = int(layout.sets(unit).max()) + 1
        patches = in_sets(bernoulli((samples, sets), keep, ask.generator(), empty=not drops(unit, fill)), layout, unit)

    def score(images: Tensor, part: slice) -> Tensor:
        ask_part, count = ask.of(images), part.stop - part.start
        if unit != "pixel":
            return score_patches(ask_part, patches[part], unit, fill)
        filling = fill_images(fill, ask_part.images, ask.vit, ask.seed)
        return score_masks(ask_part, lambda index: grids.masks(index + part.start), count, filling)

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        n = scores.shape[1]
        shown = grids.first(n).to(scores) if unit == "pixel" else patches[:n].to(scores)

        def total(weights: Tensor) -> Tensor:
            if isinstance(shown, RandomGrids):
                return shown.weighted(weights)
            cells: Tensor = torch.einsum("...n,nc->...c", weights, shown.flatten(1))
            return cells.view(*cells.shape[:-1], *layout.grid)

        def fit(weights: Tensor) -> Tensor:
            summed = total(weights * scores.mT)
            if normaliser == "expected":
                return at_level(summed / (weights.sum() * keep), level, ask)
            return at_level(summed / total(weights[None])[0].clamp_min(torch.finfo(summed.dtype).tiny), level, ask)

        return jackknife(fit, n, scores)

    return in_rounds(ask, samples, tolerance, score, estimate)


@ablates(
    "drise",
    paper="Petsiuk et al., CVPR 2021",
    levels=("pixel", "token"),
    stochastic=True,
    cost="samples forwards (5000)",
    quick={"samples": 48, "grid": 4},
    refuses=lambda settings, vit: no_detector(vit) or needs_neighbours({**settings, "unit": "pixel"}, vit),
)
def drise(
    ask: Ask,
    samples: Count = 5000,
    grid: Annotated[int, Field(ge=2)] = 16,
    keep: Ratio = 0.5,
    normaliser: Literal["expected", "empirical"] = "expected",
    fill: Fill = "zero",
    level: Level = "pixel",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """D-RISE: RISE for a detection, scored by the best match among all boxes of the masked image.

        R(x) = 1/(N p) sum_i s(X * M_i) M_i(x),   s = max_q IoU(b_q, b*) p_q(c*)

    The question `pl.heads.Box(score="drise")` has the similarity of the paper, with the cosine of all class
    probabilities.

    Args:
        samples: Number N of masks.
        grid: Cells along each side of a mask.
        keep: Probability p that a cell is shown.
        normaliser: "expected" divides by N p, "empirical" by sum_i M_i(x).
    """
    return rise(ask, samples, grid, keep, normaliser, "pixel", fill, level, tolerance)


def no_detector(vit: Anatomy) -> str | None:
    """Why a model has no detections; None if it has."""
    return None if vit.task == "detection" else f"it explains detections, and {vit.name} is not a detector; use 'rise'"
