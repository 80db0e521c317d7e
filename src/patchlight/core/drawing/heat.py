"""Heat maps over an image: a robust scale, and colours over the grey photograph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.errors import PatchlightError, check_keywords, nearest
from patchlight.core.images import Picture, Preprocess, open_image
from patchlight.core.resize import Upsampling, at_size, to_pixels

Pixels = NDArray[np.float64]

HEAT, SIGNED = "inferno", "RdBu_r"
ALPHA = 0.8
FAINTEST = 0.5
"""Opacity at the lowest score, as a fraction of `alpha`; it keeps bright photographs from looking like heat."""
SATURATED = 0.88
"""The part of the diverging colour map that is used; its ends are too dark over a dark photograph."""
GREY = {False: (0.08, 0.67), True: (0.25, 0.7)}
"""Darkest grey of the photograph and its range, by whether scores are signed: darker below inferno."""


@dataclass(frozen=True)
class Scale:
    """The range of the colours: [low, high] is mapped to [0, 1], or, if signed, [-high, high] to [-1, 1]."""

    low: float
    high: float
    signed: bool

    def __call__(self, scores: Tensor) -> Tensor:
        if self.high <= self.low:
            return torch.zeros_like(scores)
        return ((scores - self.low) / (self.high - self.low)).clamp(-1 if self.signed else 0, 1)


def is_signed(scores: Tensor) -> bool:
    """Whether some scores are negative, beyond rounding."""
    return bool(scores.min() < -1e-3 * scores.abs().max())


def robust_scale(scores: Tensor, signed: bool | None = None) -> Scale:
    """The scale from the minimum to the 99th percentile; if signed, plus and minus the 99th percentile of |score|.

    The percentile is rounded down to a score, so that a single outlier never determines the scale. If the range is
    empty, the maximum is used; a constant map has no heat.
    """
    flat = scores.detach().double().flatten()
    if not bool(torch.isfinite(flat).all()):
        raise PatchlightError("the scores contain NaN or infinity; they cannot be drawn")
    signed = is_signed(flat) if signed is None else signed
    low = 0.0 if signed else float(flat.min())
    size = flat.abs() if signed else flat
    high = float(size.sort().values[math.floor(0.99 * (len(size) - 1))])
    return Scale(low, high if high > low else float(size.max()), signed)


def colour_map(name: Any) -> Any:
    """A matplotlib colour map by name; a colour map is returned as it is."""
    if not isinstance(name, str):
        return name
    import matplotlib

    if name not in matplotlib.colormaps:
        raise PatchlightError(f"no colour map is called '{name}'; {nearest(name, matplotlib.colormaps)}")
    return matplotlib.colormaps[name]


def tint(values: Pixels, signed: bool, cmap: Any = None, alpha: float = ALPHA) -> tuple[Pixels, Pixels]:
    """Colour [...,3] and opacity [...,1] of scaled values; stronger heat is more opaque."""
    colours = colour_map(cmap or (SIGNED if signed else HEAT))
    rgb = np.asarray(colours(0.5 + SATURATED * values / 2 if signed else values))[..., :3]
    strength = np.abs(values) if signed else FAINTEST + (1 - FAINTEST) * values
    return rgb, alpha * strength[..., None]


def display_size(size: tuple[int, ...], least: int = 224) -> tuple[int, int]:
    """The model's input size, or its smallest multiple with a side of at least `least` pixels."""
    times = max(1, math.ceil(least / max(size)))
    return size[0] * times, size[1] * times


def seen(image: Picture, size: tuple[int, ...], preprocess: Preprocess | None = None, least: int = 224) -> Image.Image:
    """The part of an image in the model's input, at a readable size.

    Without `preprocess`, this is the largest central part with the shape of the model's input.
    """
    height, width = display_size(size, least)
    view = replace(preprocess or Preprocess((height, width)), size=(height, width))
    if isinstance(image, Image.Image) and image.mode == "RGB" and image.size == view.size[::-1]:
        return image
    return view.crop(open_image(image))


def outlined(picture: Image.Image, regions: Sequence[Tensor]) -> Image.Image:
    """Draw the outlines of regions [H,W] (1 inside, 0 outside) on a picture: white between two black lines."""
    if not regions:
        return picture
    drawn, line = np.array(picture.convert("RGB")), max(1, round(max(picture.size) / 160))
    for region in regions:
        inside = to_pixels(region.float(), picture.size[::-1], upsampling="nearest")
        grown, smaller, smallest = (_grow(inside, by * line) for by in (1, -1, -2))
        drawn[(grown > smallest).numpy()] = 0
        drawn[((inside > 0) & (smaller == 0)).numpy()] = 255
    return Image.fromarray(drawn)


def _grow(inside: Tensor, by: int) -> Tensor:
    """Grow a region [H,W] by pixels, or shrink it if `by` is negative; pixels beyond the picture are outside."""
    framed = F.pad((inside > 0).float(), [abs(by)] * 4)[None]
    pooled = F.max_pool2d(framed if by > 0 else 1 - framed, 2 * abs(by) + 1, 1)[0]
    return pooled if by > 0 else 1 - pooled


def upsample(
    scores: Tensor, size: Sequence[int], upsampling: Upsampling = "bilinear", covers: tuple[float, ...] = (1.0, 1.0)
) -> Tensor:
    """Scores [h,w] at another size, averaged if that is smaller.

    `covers` is the share of the height and width that the scores cover, from the top left.
    """
    return at_size(scores.float(), size, covers, upsampling, averaged=True)


def blend(
    picture: Image.Image,
    scores: Tensor,
    scale: Scale,
    cmap: Any = None,
    alpha: float = ALPHA,
    upsampling: Upsampling = "bilinear",
    covers: tuple[float, ...] = (1.0, 1.0),
) -> Image.Image:
    """Scores [h,w] as heat over a picture of the model's input."""
    values = scale(upsample(scores, picture.size[::-1], upsampling, covers)).double().numpy()
    rgb, opacity = tint(values, scale.signed, cmap, alpha)
    darkest, contrast = GREY[scale.signed]
    grey = darkest + contrast * np.asarray(picture.convert("L"), dtype=np.float64)[..., None] / 255
    return Image.fromarray((255 * (rgb * opacity + grey * (1 - opacity))).round().astype(np.uint8))


@check_keywords
def overlay(
    scores: Tensor,
    image: Picture,
    size: tuple[int, ...],
    *,
    preprocess: Preprocess | None = None,
    cmap: Any = None,
    alpha: float = ALPHA,
    signed: bool | None = None,
    upsampling: Upsampling = "bilinear",
    covers: tuple[float, ...] = (1.0, 1.0),
) -> Image.Image:
    """Scores [h,w] as heat over an image, which is cropped as the model crops it.

    The photograph is grey, so colour means heat. The colours of inferno go from the minimum to the 99th percentile;
    signed scores are blue for "against", red for "for", and transparent at zero.

    Args:
        scores: The map [h,w].
        image: A picture or its path.
        size: The model's input size.
        preprocess: How the model crops and resizes; by default the central part.
        cmap: Another matplotlib colour map.
        alpha: Opacity of the strongest heat.
        signed: Whether to use the signed colours; by default only if there are negative scores.
        upsampling: Interpolation from patches to pixels.
        covers: The share of the model's input that the scores cover.
    """
    if not 0 <= alpha <= 1:
        raise PatchlightError(f"alpha {alpha} is not in [0, 1]")
    if scores.ndim != 2:
        raise PatchlightError(f"an overlay takes scores [h,w]; these have shape {list(scores.shape)}")
    return blend(seen(image, size, preprocess), scores, robust_scale(scores, signed), cmap, alpha, upsampling, covers)
