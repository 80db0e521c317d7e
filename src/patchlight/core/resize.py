"""Conversion between the cells of a patch grid and the pixels of an image, of a video or of a volume.

A grid covers an `extent` of pixels from the top left corner of the image: the image itself, fewer pixels if patches do
not fit, or more if the image is padded. The number of axes is that of the size or grid that is asked for, up to three.
An axis whose length does not change is left alone, so that a grid (1,h,w) gives what (h,w) does.
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

    With `averaged`, cells that are smaller than pixels are averaged instead of sampled. Three axes that all change are
    interpolated trilinearly or by nearest neighbour.
    """
    if tuple(values.shape[-len(size) :]) == tuple(size):
        return values
    if len(size) != 2:
        extent = tuple(size if extent is None else extent)
        return _changing(
            values,
            size,
            extent,
            lambda some, size, extent: to_pixels(some, size, extent, upsampling, align_corners, averaged),
            lambda some, size, extent: _to_voxels(some, size, extent, upsampling, align_corners),
        )
    flat = values.reshape(-1, 1, *values.shape[-2:])
    extent = tuple(size if extent is None else extent)
    shrinks = extent[0] < values.shape[-2] or extent[1] < values.shape[-1]
    smooth = {} if upsampling == "nearest" else {"align_corners": align_corners, "antialias": averaged and shrinks}
    out = F.interpolate(flat, extent, mode=upsampling, **smooth)
    return fitted(out, size).reshape(*values.shape[:-2], *size)


Change = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def _changing(values: Tensor, size: Sequence[int], extent: Sequence[int], plane: Change, volume: Change) -> Tensor:
    """Apply `plane` to the one or two of the last axes whose length changes, or `volume` to all three."""
    lead, count = values.ndim - len(size), len(size)
    changes = [values.shape[lead + i] != size[i] or extent[i] != size[i] for i in range(count)]
    some = [i for i in range(count) if changes[i]]
    if len(some) == 3:
        return volume(values, size, extent)
    if len(some) > 3:
        raise PatchlightError(f"a grid of {count} axes is not supported; at most three can be resized")
    order = [*range(lead), *(lead + i for i in range(count) if not changes[i]), *(lead + i for i in some)]
    moved, sides, reach = values.permute(order), [size[i] for i in some], [extent[i] for i in some]
    if len(some) == 1:
        changed = plane(moved[..., None], (*sides, 1), (*reach, 1))[..., 0]
    else:
        changed = plane(moved, sides, reach)
    return changed.permute([order.index(dim) for dim in range(values.ndim)])


def _to_voxels(
    values: Tensor, size: Sequence[int], extent: Sequence[int], upsampling: Upsampling, align_corners: bool
) -> Tensor:
    if upsampling == "bicubic":
        raise PatchlightError("upsampling='bicubic' works on pictures; use 'bilinear' or 'nearest' here")
    smooth: dict[str, Any] = {}
    if upsampling != "nearest":
        smooth = {"mode": "trilinear", "align_corners": align_corners}
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
    """Crop pixels [n,c,h,w] at the bottom and right, or repeat the last row and column, to get another size."""
    pixels = _cropped(pixels, size)
    missing = _missing(pixels, size)
    return F.pad(pixels, missing, mode="replicate") if any(missing) else pixels


def _cropped(pixels: Tensor, size: Sequence[int]) -> Tensor:
    for axis, side in enumerate(size, -len(size)):
        pixels = pixels.narrow(axis, 0, min(side, pixels.shape[axis]))
    return pixels


def _missing(pixels: Tensor, size: Sequence[int]) -> list[int]:
    """How much each of the last axes has to be padded at its end, as `F.pad` takes it."""
    sides = zip(reversed(size), reversed(pixels.shape), strict=False)
    return [part for side, length in sides for part in (0, side - length)]


def to_cells(pixels: Tensor, grid: Sequence[int], extent: Sequence[int] | None = None) -> Tensor:
    """The mean of pixels [...,H,W] in each cell of a grid [...,h,w]; pixels outside the grid do not count."""
    count = len(grid)
    if tuple(pixels.shape[-count:]) == tuple(grid):
        return pixels
    extent = tuple(pixels.shape[-count:] if extent is None else extent)
    return _pooled(pixels, grid, extent) if count == 2 else _changing(pixels, grid, extent, _pooled, _pooled)


def _pooled(pixels: Tensor, grid: Sequence[int], extent: Sequence[int]) -> Tensor:
    count, cells = len(grid), tuple(grid)
    pool: Callable[[Tensor, Any], Tensor] = F.adaptive_avg_pool2d if count == 2 else F.adaptive_avg_pool3d
    flat = pixels.reshape(-1, 1, *pixels.shape[-count:])
    inside = _cropped(flat, extent)
    missing = _missing(inside, extent)
    means = pool(F.pad(inside, missing), cells)
    if any(missing):
        means = means / pool(F.pad(torch.ones_like(inside[:1]), missing), cells)
    return means.reshape(*pixels.shape[:-count], *grid)
