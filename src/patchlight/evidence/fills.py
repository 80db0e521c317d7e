"""Fills: the values that replace hidden parts of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, overload

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.evidence.imputation import imputed

Painted = Literal["zero", "black", "image-mean", "channel-mean", "blur-rise", "blur-tis", "noise"]
Imputed = Literal["road", "freeze"]
"""Fills that are computed from the visible pixels, so they depend on the mask."""
Signal = Literal["floor"]
"""Fills for sounds and volumes, which also work on images."""
Fill = Annotated[
    Painted | Imputed | Signal | Literal["none"] | float,
    Field(
        description="The fill of removed patches or pixels; a number is a constant. With 'none', the tokens are "
        "dropped, as with unit='token'."
    ),
]
FILLS: dict[str, tuple[str, str]] = {
    "zero": ("the training data's mean colour", "0 after normalisation"),
    "black": ("black", "RGB 0 before normalisation"),
    "image-mean": ("the image's mean brightness", "one number for all pixels and channels, after normalisation"),
    "channel-mean": ("the image's mean colour", "one number per channel"),
    "blur-rise": ("a blurred copy of the image (RISE)", "RISE's 11 x 11 kernel, almost a box; padded with 0"),
    "blur-tis": ("a blurred copy of the image (TIS)", "an 11 x 11 Gaussian of deviation 5; padded by reflection"),
    "noise": ("noise", "uniform in [0, 1) after normalisation, the same for all images; a metric may set the range"),
    "road": ("an imputation from the remaining pixels", "the weighted mean of the neighbours, with a little noise"),
    "freeze": ("the last visible frame", "each hidden patch of a video repeats the last frame in which it is visible"),
    "floor": (
        "the input's lowest value",
        "one number for all positions and channels, such as silence in a spectrogram",
    ),
}
"""For each fill, its name in sentences and an exact description; used by the report, the page and the docs."""
ROAD_NOISE = 0.01
"""Standard deviation of ROAD's noise, for colours in [0, 1]."""


@dataclass(frozen=True)
class Imputation:
    """The fill of ROAD: hidden pixels are computed from their neighbours, plus noise [C,H,W]."""

    noise: Tensor

    def over(self, images: Tensor, shown: Tensor) -> Tensor:
        """Impute the hidden pixels of images [n,C,H,W]; `shown` [n,1,H,W] must be 0 or 1."""
        missing = shown < 1
        if bool((missing & (shown > 0)).any()):
            raise PatchlightError(
                "fill='road' needs masks of 0 and 1, and these masks are soft; use unit='patch' if the method has it, "
                "or another fill"
            )
        return torch.where(missing, imputed(images, missing) + self.noise.to(images.dtype), images)


@dataclass(frozen=True)
class Freeze:
    """Repeat the last visible value along `dim` at each hidden position.

    A position without an earlier visible value shows the next one, and one that is never visible its first value.
    """

    dim: int

    def over(self, images: Tensor, shown: Tensor) -> Tensor:
        """Fill hidden positions, where `shown` is below 1/2."""
        visible = (shown if shown.dtype == torch.bool else shown >= 0.5).expand_as(images)
        count = images.shape[self.dim]
        index = torch.arange(count, device=images.device).view([-1 if d == self.dim else 1 for d in range(images.ndim)])
        last = torch.where(visible, index, -1).cummax(self.dim).values
        later = torch.where(visible, index, count).flip(self.dim).cummin(self.dim).values.flip(self.dim)
        return images.gather(self.dim, torch.where(last >= 0, last, later % count))


def drops(unit: str, fill: object = None) -> bool:
    """Whether tokens are dropped instead of painted."""
    return unit in ("token", "merge") or fill == "none"


Filling = Tensor | Imputation | Freeze
"""Images [B,C,H,W] to paint, or an imputation, which computes them for each variant."""


def painted(images: Tensor, fill: Filling, owner: Tensor, shown: Tensor) -> Tensor:
    """Variants [n,C,H,W] of images: image owner[v] where `shown` [n,1,H,W] is 1 (or True), and the fill elsewhere."""
    if isinstance(fill, Imputation | Freeze):
        return fill.over(images[owner], shown)
    if shown.dtype == torch.bool:
        return torch.where(shown, images[owner], fill[owner])
    return torch.lerp(fill[owner], images[owner], shown)


@overload
def fill_images(
    fill: Painted | Signal | float, images: Tensor, vit: Anatomy, seed: int = ..., noise: tuple[float, float] = ...
) -> Tensor: ...
@overload
def fill_images(
    fill: Fill, images: Tensor, vit: Anatomy, seed: int = ..., noise: tuple[float, float] = ...
) -> Filling: ...
def fill_images(
    fill: Fill, images: Tensor, vit: Anatomy, seed: int = 0, noise: tuple[float, float] = (0.0, 1.0)
) -> Filling:
    """The fill of each image [B,C,H,W], after normalisation.

    Means and blurs of a video or a volume are computed for each frame or slice. `road` and `freeze` depend on the mask,
    so they are objects that compute the fill for each variant. The noise of `road` has a deviation of 0.01 before
    normalisation and is the same for all images and variants.

    Args:
        fill: A name in `FILLS`, or a constant.
        images: Preprocessed images [B,C,H,W].
        vit: The model, for its normalisation.
        seed: Seed of `noise` and `road`; all images have the same noise.
        noise: Range of `noise`.
    """
    reason = no_fill(fill, vit)
    if reason is not None:
        raise Unsupported(reason)
    if fill == "none":
        raise Unsupported("fill='none' removes tokens, which unit='pixel' and masks of pixels cannot do; give a fill")
    if fill == "freeze":
        dims = vit.geometry.dims or tuple(range(images.ndim - 1 - len(vit.axes), images.ndim - 1))
        return Freeze(1 + dims[vit.axes.index("time")])
    if fill == "road":
        generator = torch.Generator(images.device).manual_seed(seed)
        normal = torch.randn(images.shape[1:], generator=generator, device=images.device, dtype=images.dtype)
        return Imputation(normal * ROAD_NOISE / _per_channel(vit.preprocess.std, images)[:, None, None])
    planes = vit.channels_first(images)
    if planes.ndim != 5 or fill in ("noise", "floor"):
        return vit.as_input(_fill_planes(fill, planes, vit, seed, noise))
    frames = _fill_planes(fill, planes.transpose(1, 2).flatten(0, 1), vit, seed, noise)
    return vit.as_input(frames.unflatten(0, (len(planes), -1)).transpose(1, 2))


def _fill_planes(fill: Fill, images: Tensor, vit: Anatomy, seed: int, noise: tuple[float, float]) -> Tensor:
    """A fill [B,C,H,W] that does not depend on the mask."""
    if isinstance(fill, int | float):
        return torch.full_like(images, float(fill))
    if fill == "zero":
        return torch.zeros_like(images)
    if fill == "black":
        dark = _per_channel([-m / s for m, s in zip(vit.preprocess.mean, vit.preprocess.std, strict=True)], images)
        return dark[None, :, None, None].expand_as(images)
    if fill == "floor":
        return images.flatten(1).amin(1).view(-1, *[1] * (images.ndim - 1)).expand_as(images)
    if fill == "image-mean":
        return images.mean((1, 2, 3), keepdim=True).expand_as(images)
    if fill == "channel-mean":
        return images.mean((2, 3), keepdim=True).expand_as(images)
    if fill == "noise":
        generator = torch.Generator(images.device).manual_seed(seed)
        uniform = torch.rand(images.shape[1:], generator=generator, device=images.device, dtype=images.dtype)
        return (noise[0] + (noise[1] - noise[0]) * uniform).expand_as(images)
    if fill in ("blur-rise", "blur-tis"):
        return _blurred(images, fill)
    raise PatchlightError(f"no fill is called '{fill}'; give a number or one of {', '.join(FILLS)}")


def no_fill(fill: object, vit: Anatomy) -> str | None:
    """Why a fill cannot be used on a model's input; None if it can."""
    if vit.unordered and fill in ("blur-rise", "blur-tis", "road"):
        return f"fill='{fill}' is for images; for tiles use 'channel-mean' (the mean tile) or 'zero'"
    takes = vit.layout.inputs
    if fill == "freeze" and takes != "videos":
        return f"fill='freeze' repeats frames, and {vit.name} takes {takes}"
    if fill == "road" and takes != "images":
        return f"fill='road' is for images, and {vit.name} takes {takes}; use 'blur-tis'"
    return None


def describe_fill(fill: Fill) -> str:
    """The name of a fill in a sentence.

    >>> describe_fill("image-mean"), describe_fill(0.5)
    ("the image's mean brightness", 'the constant 0.5')
    """
    return f"the constant {fill:g}" if isinstance(fill, int | float) else FILLS[fill][0]


def _per_channel(values: Sequence[float], images: Tensor) -> Tensor:
    """One value per channel [C], or their mean if the images have another number of channels."""
    per_channel = torch.tensor(values, dtype=torch.float64).to(images)
    return per_channel if len(per_channel) == images.shape[1] else per_channel.mean(0, keepdim=True)


def _blurred(images: Tensor, fill: str, size: int = 11, sigma: float = 5.0) -> Tensor:
    """Blur images with the kernel of RISE and zero padding, or with a Gaussian and reflection padding."""
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
