"""Shared by masking methods: masks made inside the chunk, unequal numbers of dropped tokens, sliding windows."""

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
    """Variant v is image owner[v] where its mask is 1 and the fill where it is 0.

    `make` creates the masks [n,h,w] of a part of the list, of patches or pixels, so that only those of a chunk exist.
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


def owners(ask: Ask, each: int) -> Tensor:
    """`each` variants of every image: v = image * each + variant."""
    return torch.arange(len(ask.images)).repeat_interleave(each)


def among(part: slice, each: int, device: torch.device) -> Tensor:
    """The index of each variant of a part among the `each` variants of its image."""
    return torch.arange(part.start, part.stop, device=device) % each


def score_masks(ask: Ask, make: Callable[[Tensor], Tensor], each: int, fill: Filling) -> Tensor:
    """Scores [B,each,T] of the same masks over every image; `make` creates the masks [n,h,w] with the indices [n]."""

    def made(part: slice) -> Tensor:
        return make(among(part, each, ask.images.device))

    scores = ask.score_variants(MadeMasks(owners(ask, each), made, fill))
    return scores.view(len(ask.images), each, -1)


def score_kept(ask: Ask, kept: Tensor) -> Tensor:
    """Scores [B,M,T] of every image with only the patches kept [M,P] (or, per image, [B,M,P]); the rest is removed.

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
    """Scores [B,M,T] of every image with only the patches kept [M,h,w]; the rest is removed, or shows `fill`."""
    if drops(unit, fill):
        return score_kept(ask, kept.flatten(1))
    shown, filling = kept.to(ask.images), fill_images(fill, ask.images, ask.vit, ask.seed)
    return score_masks(ask, lambda index: shown[index], len(kept), filling)


def bernoulli(shape: tuple[int, int], p: float, generator: torch.Generator, empty: bool = False) -> Tensor:
    """Rows of independent parts, each kept with probability p; unless `empty`, an empty row gets one part."""
    kept = torch.rand(shape, generator=generator) < p
    one = torch.randint(shape[1], (shape[0],), generator=generator)
    lost = ~kept.any(1) & (not empty)
    kept[lost, one[lost]] = True
    return kept


def removes_tokens(settings: Settings, vit: Anatomy) -> str | None:
    """The refusal of methods that remove tokens if `unit` is "token", or whose unit the model's grid does not have."""
    try:
        vit.layout.sets(settings["unit"])
    except Unsupported as error:
        return str(error)
    return vit.cannot_remove(settings["unit"]) if drops(settings["unit"], settings.get("fill")) else None


def only_images(settings: Settings, vit: Anatomy) -> str | None:
    """The refusal of methods that mask or warp pictures, which a grid of other axes does not have."""
    if vit.layout.inputs == "images" or settings.get("unit", "pixel") != "pixel":
        return None
    advice = "; unit='patch' works" if "unit" in settings else "; 'occlusion' and 'kernel-shap' work"
    return f"it masks or warps pictures, and {vit.name} takes {vit.layout.inputs}{advice}"


def needs_neighbours(settings: Settings, vit: Anatomy) -> str | None:
    """The refusal of methods that mask or warp neighbouring pixels together."""
    if vit.unordered and settings.get("unit", "pixel") == "pixel":
        advice = "; unit='token' works" if "unit" in settings else ""
        return f"it masks or warps neighbouring patches, and the tiles of a bag have no neighbours{advice}"
    return only_images(settings, vit)


def at_level(maps: Tensor, level: Level, ask: Ask) -> Tensor:
    """Maps [...,h,w] of patches or pixels at a level: patches painted on pixels, or pixels averaged over patches."""
    if level == "pixel":
        return to_pixels(maps, ask.vit.geometry.size, ask.vit.extent, "nearest")
    return to_cells(maps, ask.vit.grid, ask.vit.extent)


def sliding(length: int, window: int, stride: int) -> Tensor:
    """Indicators [n,length] of windows along one axis: one every `stride` from 0, the last one clipped to fit."""
    begin = torch.arange(0, -(-max(length - window, 0) // stride) + 1) * stride
    at = torch.arange(length)
    return (at >= begin[:, None]) & (at < begin[:, None] + window)


def window_sum(values: Tensor, *axes: Tensor) -> Tensor:
    """Sum over the windows that cover each place: values [...,ny,nx] to [...,H,W], from those of `sliding`."""
    for place, axis in enumerate(axes[:-2], -len(axes)):
        values = (values.movedim(place, -1) @ axis.to(values)).movedim(-1, place)
    return axes[-2].T.to(values) @ values @ axes[-1].to(values)


def window_masks(axes: Sequence[Tensor], index: Tensor | None = None) -> Tensor:
    """The windows [n,H,W] with the given indices (all, in reading order), from indicators [ny,H] and [nx,W]."""
    counts = [len(axis) for axis in axes]
    index = torch.arange(math.prod(counts), device=axes[0].device) if index is None else index
    masks = torch.ones(len(index), dtype=torch.bool, device=index.device)
    for axis, own in zip(axes, torch.unravel_index(index, counts), strict=True):
        masks = masks[..., None] & axis[own].view(len(index), *[1] * (masks.ndim - 1), -1)
    return masks


def in_sets(values: Tensor, layout: Layout, unit: str) -> Tensor:
    """Values [...,U] of the sets of a unit as values of cells [...,*grid], each the same for all cells of its set."""
    if unit not in SETS:
        return values.reshape(*values.shape[:-1], *layout.grid)
    return values[..., layout.sets(unit).to(values.device)].reshape(*values.shape[:-1], *layout.grid)


def shared_in_sets(values: Tensor, layout: Layout, unit: str) -> Tensor:
    """The same, with the value of a set shared evenly by its cells, so that the sum stays."""
    return in_sets(values if unit not in SETS else values * (values.shape[-1] / layout.cells), layout, unit)
