"""Conversion between the cells of a patch grid and the pixels of an image.

A grid covers an `extent` of pixels from the top left corner of the image: the image itself, fewer pixels if patches do
not fit, or more if the image is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.errors import PatchlightError

Upsampling = Annotated[
    Literal["nearest", "bilinear", "bicubic"], Field(description="Interpolation from patches to pixels.")
]


def to_pixels(
    values: Tensor,
    size: Sequence[int],
    extent: Sequence[int] | None = None,
    upsampling: Upsampling = "bilinear",
    align_corners: bool = False,
    averaged: bool = False,
) -> Tensor:
    """Interpolate values of cells [...,h,w] to pixels [...,H,W]; pixels outside the grid get the nearest value.

    With `averaged`, cells that are smaller than pixels are averaged instead of sampled.
    """
    if tuple(values.shape[-2:]) == tuple(size):
        return values
    flat = values.reshape(-1, 1, *values.shape[-2:])
    extent = tuple(size if extent is None else extent)
    shrinks = extent[0] < values.shape[-2] or extent[1] < values.shape[-1]
    smooth = {} if upsampling == "nearest" else {"align_corners": align_corners, "antialias": averaged and shrinks}
    out = F.interpolate(flat, extent, mode=upsampling, **smooth)
    return fitted(out, size).reshape(*values.shape[:-2], *size)


def at_size(
    scores: Tensor, size: Sequence[int], covers: tuple[float, float], upsampling: Upsampling, averaged: bool = False
) -> Tensor:
    """Interpolate scores [...,h,w] that cover this share of the height and width to any size."""
    if upsampling not in ("nearest", "bilinear", "bicubic"):
        raise PatchlightError(f"unknown upsampling '{upsampling}'; give nearest, bilinear or bicubic")
    extent = [max(1, round(side * share)) for side, share in zip(size, covers, strict=True)]
    return to_pixels(scores, size, extent, upsampling, averaged=averaged)


def axis_matrix(cells: int, pixels: int) -> Tensor:
    """`to_pixels` along one axis as a matrix U [pixels,cells] in float64: a map becomes U_rows map U_columns^T."""
    return to_pixels(torch.eye(cells, dtype=torch.float64)[..., None], (pixels, 1))[..., 0].T


def fitted(pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Crop pixels [n,c,h,w] at the bottom and right, or repeat the last row and column, to get another size."""
    pixels = pixels[..., : size[0], : size[1]]
    missing = (0, size[1] - pixels.shape[-1], 0, size[0] - pixels.shape[-2])
    return F.pad(pixels, missing, mode="replicate") if any(missing) else pixels


def to_cells(pixels: Tensor, grid: Sequence[int], extent: Sequence[int] | None = None) -> Tensor:
    """The mean of pixels [...,H,W] in each cell of a grid [...,h,w]; pixels outside the grid do not count."""
    if tuple(pixels.shape[-2:]) == tuple(grid):
        return pixels
    flat = pixels.reshape(-1, 1, *pixels.shape[-2:])
    extent = tuple(flat.shape[-2:] if extent is None else extent)
    inside = flat[..., : extent[0], : extent[1]]
    missing = (0, extent[1] - inside.shape[-1], 0, extent[0] - inside.shape[-2])
    cells = (grid[0], grid[1])
    means = F.adaptive_avg_pool2d(F.pad(inside, missing), cells)
    if any(missing):
        means = means / F.adaptive_avg_pool2d(F.pad(torch.ones_like(inside[:1]), missing), cells)
    return means.reshape(*pixels.shape[:-2], *grid)
