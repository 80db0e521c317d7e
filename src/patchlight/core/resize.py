"""Conversion between the cells of a patch grid and the pixels of an image, of a video or of a volume.

A grid covers an `extent` of pixels from the top left corner of the image: the image itself, fewer pixels if patches do
not fit, or more if the image is padded. The new size has one to three axes. An axis whose length does not change is not
resized, so a grid (1,h,w) is treated like (h,w).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

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

    With `averaged`, cells smaller than pixels are averaged instead of sampled. If three axes change, interpolation is
    trilinear or nearest-neighbour.
    """
    if tuple(values.shape[-len(size) :]) == tuple(size):
        return values
    if len(size) != 2:
        extent = tuple(size if extent is None else extent)
        return _resize_changing(
            values,
            size,
            extent,
            lambda plane, size, extent: to_pixels(plane, size, extent, upsampling, align_corners, averaged),
            lambda volume, size, extent: _to_voxels(volume, size, extent, upsampling, align_corners),
        )
    flat = values.reshape(-1, 1, *values.shape[-2:])
    extent = tuple(size if extent is None else extent)
    shrinks = extent[0] < values.shape[-2] or extent[1] < values.shape[-1]
    smooth = {} if upsampling == "nearest" else {"align_corners": align_corners, "antialias": averaged and shrinks}
    out = F.interpolate(flat, extent, mode=upsampling, **smooth)
    return fitted(out, size).reshape(*values.shape[:-2], *size)


Change = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def _resize_changing(
    values: Tensor, size: Sequence[int], extent: Sequence[int], plane: Change, volume: Change
) -> Tensor:
    """Apply `plane` to the one or two of the last axes whose length changes, or `volume` to all three."""
    lead, count = values.ndim - len(size), len(size)
    changes = [values.shape[lead + i] != size[i] or extent[i] != size[i] for i in range(count)]
    axes = [i for i in range(count) if changes[i]]
    if len(axes) == 3:
        return volume(values, size, extent)
    if len(axes) > 3:
        raise PatchlightError(f"a grid of {count} axes is not supported; at most three can be resized")
    order = [*range(lead), *(lead + i for i in range(count) if not changes[i]), *(lead + i for i in axes)]
    moved, sides, reach = values.permute(order), [size[i] for i in axes], [extent[i] for i in axes]
    if len(axes) == 1:
        changed = plane(moved[..., None], (*sides, 1), (*reach, 1))[..., 0]
    else:
        changed = plane(moved, sides, reach)
    return changed.permute([order.index(dim) for dim in range(values.ndim)])


def _to_voxels(
    values: Tensor, size: Sequence[int], extent: Sequence[int], upsampling: Upsampling, align_corners: bool
) -> Tensor:
    if upsampling == "bicubic":
        raise PatchlightError("upsampling='bicubic' works on pictures; use 'bilinear' or 'nearest' here")
    smooth: Any = {} if upsampling == "nearest" else {"mode": "trilinear", "align_corners": align_corners}
    out = F.interpolate(values.reshape(-1, 1, *values.shape[-3:]), tuple(extent), **smooth)
    return fitted(out, size).reshape(*values.shape[:-3], *size)


def at_size(
    scores: Tensor, size: Sequence[int], covers: Sequence[float], upsampling: Upsampling, averaged: bool = False
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
    """Crop pixels [n,c,h,w] at the bottom and right, or repeat the last row and column, to fit a size."""
    pixels = _crop(pixels, size)
    missing = _missing(pixels, size)
    return F.pad(pixels, missing, mode="replicate") if any(missing) else pixels


def _crop(pixels: Tensor, size: Sequence[int]) -> Tensor:
    for axis, side in enumerate(size, -len(size)):
        pixels = pixels.narrow(axis, 0, min(side, pixels.shape[axis]))
    return pixels


def _missing(pixels: Tensor, size: Sequence[int]) -> list[int]:
    """The padding at the end of each of the last axes, in the order of `F.pad`."""
    sides = zip(reversed(size), reversed(pixels.shape), strict=False)
    return [part for side, length in sides for part in (0, side - length)]


def to_cells(pixels: Tensor, grid: Sequence[int], extent: Sequence[int] | None = None) -> Tensor:
    """The mean of pixels [...,H,W] in each cell of a grid [...,h,w]; pixels outside the grid do not count."""
    count = len(grid)
    if tuple(pixels.shape[-count:]) == tuple(grid):
        return pixels
    extent = tuple(pixels.shape[-count:] if extent is None else extent)
    return _pool(pixels, grid, extent) if count == 2 else _resize_changing(pixels, grid, extent, _pool, _pool)


def _pool(pixels: Tensor, grid: Sequence[int], extent: Sequence[int]) -> Tensor:
    count, cells = len(grid), tuple(grid)
    pool: Callable[[Tensor, Any], Tensor] = F.adaptive_avg_pool2d if count == 2 else F.adaptive_avg_pool3d
    flat = pixels.reshape(-1, 1, *pixels.shape[-count:])
    inside = _crop(flat, extent)
    missing = _missing(inside, extent)
    means = pool(F.pad(inside, missing), cells)
    if any(missing):
        means = means / pool(F.pad(torch.ones_like(inside[:1]), missing), cells)
    return means.reshape(*pixels.shape[:-count], *grid)
