"""Tools of masking methods: masks computed inside the chunk, unequal numbers of dropped tokens, sliding windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.layout import SETS, Layout
from patchlight.core.registry import Settings
from patchlight.core.resize import to_cells, to_pixels
from patchlight.evidence.ablation import TokenSubsets, Unit
from patchlight.evidence.fills import Fill, Filling, drops, fill_images, painted
from patchlight.methods.base import Ask, Level

Ratio = Annotated[float, Field(gt=0, le=1)]
Ratios = Annotated[list[Ratio], Field(min_length=1)]
"""Shares of an image that masks show."""


@dataclass(frozen=True)
class MadeMasks:
    """Variants of images: image owner[v] where mask v is 1, and the fill where it is 0.

    `make` creates the masks [n,h,w] of a part of the list, in patches or pixels, so that only one chunk is in memory.
    """

    owner: Tensor
    make: Callable[[slice], Tensor]
    fill: Filling

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        owner = self.owner[part].to(images.device)
        with torch.autocast(images.device.type, enabled=False):  # a mask has the precision of the image
            masks = to_pixels(self.make(part)[:, None].to(images), vit.geometry.size, vit.extent, "nearest")
            shown = painted(images, self.fill, owner, vit.as_input(masks))
        return vit.embed(shown), None


def owners(ask: Ask, variants: int) -> Tensor:
    """The image of each variant, for the same number of `variants` of every image, one image after another."""
    return torch.arange(len(ask.images)).repeat_interleave(variants)


def score_masks(ask: Ask, make: Callable[[Tensor], Tensor], count: int, fill: Filling) -> Tensor:
    """Scores [B,count,T] of the same masks over every image; `make` creates the masks [n,h,w] with the indices [n]."""

    def masks_of_part(part: slice) -> Tensor:
        return make(torch.arange(part.start, part.stop, device=ask.images.device) % count)

    scores = ask.score_variants(MadeMasks(owners(ask, count), masks_of_part, fill))
    return scores.view(len(ask.images), count, -1)


def score_kept(ask: Ask, kept: Tensor) -> Tensor:
    """Scores [B,M,T] of every image with only the patches of each mask [M,P] (or, per image, [B,M,P]).

    Subsets of one size are scored together.
    """
    shown = kept.expand(len(ask.images), -1, -1).flatten(0, 1).bool().cpu()
    sizes = shown.sum(1)
    if not bool(sizes.all()):
        raise PatchlightError("a variant would keep no patch at all; use a smaller window, or pixels with a fill")
    owner, lists, places = owners(ask, kept.shape[-2]), [], []
    for size in sizes.unique().tolist():
        rows = (sizes == size).nonzero()[:, 0]
        lists.append(TokenSubsets(owner[rows], shown[rows].nonzero()[:, 1].view(len(rows), size)))
        places.append(rows)
    scores = ask.score_variants(lists)
    back = torch.cat(places).argsort().to(scores.device)
    return scores[back].view(len(ask.images), kept.shape[-2], -1)


def score_patches(ask: Ask, kept: Tensor, unit: Unit, fill: Fill) -> Tensor:
    """Scores [B,M,T] of every image with only the patches of each mask [M,h,w]; others are removed or show `fill`."""
    if drops(unit, fill):
        return score_kept(ask, kept.flatten(1))
    shown, filling = kept.to(ask.images), fill_images(fill, ask.images, ask.vit, ask.seed)
    return score_masks(ask, lambda index: shown[index], len(kept), filling)


def bernoulli(shape: tuple[int, int], p: float, generator: torch.Generator, empty: bool = False) -> Tensor:
    """Rows of independent Bernoulli variables; unless `empty`, a row without any gets one random True."""
    rows = torch.rand(shape, generator=generator) < p
    column = torch.randint(shape[1], (shape[0],), generator=generator)
    zero = ~rows.any(1) & (not empty)
    rows[zero, column[zero]] = True
    return rows


def removes_tokens(settings: Settings, vit: Anatomy) -> str | None:
    """Why a model does not have the sets of the setting `unit`, or cannot remove its tokens; None if it can."""
    try:
        vit.layout.sets(settings["unit"])
    except Unsupported as error:
        return str(error)
    return vit.cannot_remove(settings["unit"]) if drops(settings["unit"], settings.get("fill")) else None


def advise_patches(reason: str) -> str:
    """Why tokens cannot be removed, followed by the unit that works unless the reason names it."""
    return reason if "unit='patch'" in reason else f"{reason}; unit='patch' works"


def only_images(settings: Settings, vit: Anatomy) -> str | None:
    """Why pictures cannot be masked or warped: the model takes other inputs; None if it takes images."""
    if vit.layout.inputs == "images" or settings.get("unit", "pixel") != "pixel":
        return None
    advice = "; unit='patch' works" if "unit" in settings else "; 'occlusion' and 'kernel-shap' work"
    return f"it masks or warps pictures, and {vit.name} takes {vit.layout.inputs}{advice}"


def needs_neighbours(settings: Settings, vit: Anatomy) -> str | None:
    """Why neighbouring pixels cannot be masked or warped together; None if they can."""
    if vit.unordered and settings.get("unit", "pixel") == "pixel":
        advice = "; unit='token' works" if "unit" in settings else ""
        return f"it masks or warps neighbouring patches, and the tiles of a bag have no neighbours{advice}"
    return only_images(settings, vit)


def at_level(maps: Tensor, level: Level, ask: Ask) -> Tensor:
    """Convert maps [...,h,w] to a level: patches are upsampled by nearest neighbour, pixels are averaged."""
    if level == "pixel":
        return to_pixels(maps, ask.vit.geometry.size, ask.vit.extent, "nearest")
    return to_cells(maps, ask.vit.grid, ask.vit.extent)


def sliding(length: int, window: int, stride: int) -> Tensor:
    """Indicators [n,length] of windows along one axis, every `stride` cells; the last one is clipped."""
    begin = torch.arange(0, -(-max(length - window, 0) // stride) + 1) * stride
    at = torch.arange(length)
    return (at >= begin[:, None]) & (at < begin[:, None] + window)


def window_sum(values: Tensor, *axes: Tensor) -> Tensor:
    """Sum of the values [...,ny,nx] of all windows that cover each cell [...,H,W]; `axes` are indicators."""
    for dim, axis in enumerate(axes[:-2], -len(axes)):
        values = (values.movedim(dim, -1) @ axis.to(values)).movedim(-1, dim)
    return axes[-2].T.to(values) @ values @ axes[-1].to(values)


def window_masks(axes: Sequence[Tensor], index: Tensor | None = None) -> Tensor:
    """Masks [n,H,W] of the windows with these indices (None: all), from indicators [ny,H] and [nx,W]."""
    counts = [len(axis) for axis in axes]
    index = torch.arange(math.prod(counts), device=axes[0].device) if index is None else index
    masks = torch.ones(len(index), dtype=torch.bool, device=index.device)
    for axis, window in zip(axes, torch.unravel_index(index, counts), strict=True):
        masks = masks[..., None] & axis[window].view(len(index), *[1] * (masks.ndim - 1), -1)
    return masks


def in_sets(values: Tensor, layout: Layout, unit: str) -> Tensor:
    """Values of cells [...,*grid] from values [...,U] of the sets of a unit: every cell has the value of its set."""
    if unit not in SETS:
        return values.reshape(*values.shape[:-1], *layout.grid)
    return values[..., layout.sets(unit).to(values.device)].reshape(*values.shape[:-1], *layout.grid)


def shared_in_sets(values: Tensor, layout: Layout, unit: str) -> Tensor:
    """`in_sets`, with the value of a set divided equally among its cells, so that the sum does not change."""
    return in_sets(values if unit not in SETS else values * (values.shape[-1] / layout.cells), layout, unit)
