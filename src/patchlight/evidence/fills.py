"""Fills: what stands where an image is masked."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.base import Anatomy
from patchlight.errors import PatchlightError

Painted = Literal["zero", "black", "image-mean", "channel-mean", "blur-rise", "blur-tis", "noise"]
Fill = Painted | float
"""What is painted where a patch or pixel is removed; a number is that constant."""


def fill_images(
    fill: Fill, images: Tensor, vit: Anatomy, seed: int = 0, noise: tuple[float, float] = (0.0, 1.0)
) -> Tensor:
    """What stands where an image is masked [B,C,H,W], in the normalised space the model sees.

    `zero`: 0 after normalisation (the data's mean colour); `black`: RGB 0; `image-mean`: one scalar per image;
    `channel-mean`: one per channel; `blur-rise`, `blur-tis`: the two papers' 11 x 11 kernels, which differ; `noise`:
    uniform in a range, each image's generator seeded by `seed` alone; a number: that constant.
    """
    if isinstance(fill, int | float):
        return torch.full_like(images, float(fill))
    if fill == "zero":
        return torch.zeros_like(images)
    if fill == "black":
        dark = -torch.tensor(vit.preprocess.mean).to(images) / torch.tensor(vit.preprocess.std).to(images)
        dark = dark if len(dark) == images.shape[1] else dark.mean(0, keepdim=True)
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
    raise PatchlightError(f"no fill is called '{fill}'; give a number or one of {', '.join(get_args(Painted))}")


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
