"""Fills: what stands where an image is masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, overload

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.evidence.imputation import imputed

Painted = Literal["zero", "black", "image-mean", "channel-mean", "blur-rise", "blur-tis", "noise"]
Imputed = Literal["road"]
"""Fills that are made of the pixels that remain, so they differ with what is removed."""
Fill = Annotated[
    Painted | Imputed | float,
    Field(description="What is painted where a patch or pixel is removed; a number is that constant."),
]
ROAD_NOISE = 0.01
"""The deviation of ROAD's noise, of colours in [0, 1]."""


@dataclass(frozen=True)
class Imputation:
    """ROAD's fill: missing pixels are made of their neighbours, with noise [C,H,W]."""

    noise: Tensor

    def over(self, images: Tensor, shown: Tensor) -> Tensor:
        """Images [n,C,H,W] with what is not shown [n,1,H,W] imputed; half-shown pixels are refused."""
        missing = shown < 1
        if bool((missing & (shown > 0)).any()):
            raise PatchlightError(
                "fill='road' imputes pixels that are missing, and these masks are soft, neither 0 nor 1; use "
                "unit='patch' where there is one, or another fill"
            )
        return torch.where(missing, imputed(images, missing) + self.noise.to(images.dtype), images)


Filling = Tensor | Imputation
"""What stands where images are masked: images [B,C,H,W], or what makes them of each variant."""


def painted(images: Tensor, fill: Filling, owner: Tensor, shown: Tensor) -> Tensor:
    """Variants [n,C,H,W]: image owner[v] where shown [n,1,H,W] is 1 (or true), and the fill where it is 0."""
    if isinstance(fill, Imputation):
        return fill.over(images[owner], shown)
    if shown.dtype == torch.bool:
        return torch.where(shown, images[owner], fill[owner])
    return torch.lerp(fill[owner], images[owner], shown)


@overload
def fill_images(
    fill: Painted | float, images: Tensor, vit: Anatomy, seed: int = ..., noise: tuple[float, float] = ...
) -> Tensor: ...
@overload
def fill_images(
    fill: Fill, images: Tensor, vit: Anatomy, seed: int = ..., noise: tuple[float, float] = ...
) -> Filling: ...
def fill_images(
    fill: Fill, images: Tensor, vit: Anatomy, seed: int = 0, noise: tuple[float, float] = (0.0, 1.0)
) -> Filling:
    """What stands where an image is masked [B,C,H,W], in the normalised space the model sees; `painted` puts it there.

    `zero`: 0 after normalisation (the data's mean colour); `black`: RGB 0; `image-mean`: one scalar per image;
    `channel-mean`: one per channel; `blur-rise`, `blur-tis`: the two papers' 11 x 11 kernels, which differ; `noise`:
    uniform in a range, each image's generator seeded by `seed` alone; a number: that constant. `road` depends on what
    is removed, so it is an `Imputation`: the weighted mean of the neighbours, all missing pixels solved together
    (`imputed`; no affine normalisation changes it), and N(0, 1) of 0.01 of the colours' range, as its authors add it
    before normalisation, drawn once from `seed` for all images and variants.
    """
    if fill == "road":
        generator = torch.Generator(images.device).manual_seed(seed)
        drawn = torch.randn(images.shape[1:], generator=generator, device=images.device, dtype=images.dtype)
        return Imputation(drawn * ROAD_NOISE / _per_channel(vit.preprocess.std, images)[:, None, None])
    if isinstance(fill, int | float):
        return torch.full_like(images, float(fill))
    if fill == "zero":
        return torch.zeros_like(images)
    if fill == "black":
        dark = _per_channel([-m / s for m, s in zip(vit.preprocess.mean, vit.preprocess.std, strict=True)], images)
        return dark[None, :, None, None].expand_as(images)
    if fill == "image-mean":
        return images.mean((1, 2, 3), keepdim=True).expand_as(images)
    if fill == "channel-mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if fill == "noise":
        generator = torch.Generator(images.device).manual_seed(seed)
        one = torch.rand(images.shape[1:], generator=generator, device=images.device, dtype=images.dtype)
        return (noise[0] + (noise[1] - noise[0]) * one).expand_as(images)
    if fill in ("blur-rise", "blur-tis"):
        return _blurred(images, fill)
    known = ", ".join((*get_args(Painted), *get_args(Imputed)))
    raise PatchlightError(f"no fill is called '{fill}'; give a number or one of {known}")


def _per_channel(values: Sequence[float], images: Tensor) -> Tensor:
    """One value per channel of the images [C]; their mean where the images have another number of channels."""
    each = torch.tensor(values, dtype=torch.float64).to(images)
    return each if len(each) == images.shape[1] else each.mean(0, keepdim=True)


def _blurred(images: Tensor, fill: str, size: int = 11, sigma: float = 5.0) -> Tensor:
    """Each channel convolved with one of the two kernels: RISE's, zero-padded, or a Gaussian, reflect-padded."""
    if fill == "blur-rise":
        from scipy.ndimage import gaussian_filter

        delta = np.zeros((size, size))
        delta[size // 2, size // 2] = 1
        kernel = torch.from_numpy(gaussian_filter(delta, sigma))
        padded = F.pad(images, [size // 2] * 4)
    else:
        line = torch.exp(-0.5 * (torch.arange(size, dtype=torch.float64) - size // 2).div(sigma) ** 2)
        line = line / line.sum()
        kernel = line[:, None] * line
        padded = F.pad(images, [size // 2] * 4, mode="reflect")
    weight = kernel.to(images).expand(images.shape[1], 1, size, size)
    return F.conv2d(padded, weight, groups=images.shape[1])
