"""Heat over an image: a robust scale, colours that mean the same to every reader, and the photograph in grey below."""

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

from patchlight.core.errors import PatchlightError, check_keywords, nearest
from patchlight.core.images import Picture, Preprocess, open_image
from patchlight.core.resize import Upsampling, at_size

Pixels = NDArray[np.float64]

HEAT, SIGNED = "inferno", "RdBu_r"
ALPHA = 0.8
FAINTEST = 0.5
"""Opacity of inferno at the lowest score, as a fraction of `alpha`: bright photographs must not pass for heat."""
SATURATED = 0.88
"""How far into the diverging map the strongest score goes: its ends are too dark to tell from a dark photograph."""
GREY = {False: (0.08, 0.67), True: (0.25, 0.7)}
"""Darkest grey of the photograph and its range: dim below inferno, light below the diverging map."""


@dataclass(frozen=True)
class Scale:
    """Where the colours of a map begin and end: [low, high] to [0, 1], or [-high, high] to [-1, 1] when signed."""

    low: float
    high: float
    signed: bool

    def __call__(self, scores: Tensor) -> Tensor:
        if self.high <= self.low:
            return torch.zeros_like(scores)
        return ((scores - self.low) / (self.high - self.low)).clamp(-1 if self.signed else 0, 1)


def is_signed(scores: Tensor) -> bool:
    """Whether scores go below zero by more than rounding."""
    return bool(scores.min() < -1e-3 * scores.abs().max())


def robust_scale(scores: Tensor, signed: bool | None = None) -> Scale:
    """From the minimum to the 99th percentile; signed maps from minus to plus the 99th percentile of |score|.

    The percentile is the next lower score, so that one outlier never sets the scale, however few patches there are.
    A map with so few scores that this leaves nothing is scaled to its maximum; a constant map has no heat.
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
    """A matplotlib colour map by name, or the one given."""
    if not isinstance(name, str):
        return name
    import matplotlib

    if name not in matplotlib.colormaps:
        raise PatchlightError(f"no colour map is called '{name}'; {nearest(name, matplotlib.colormaps)}")
    return matplotlib.colormaps[name]


def tint(values: Pixels, signed: bool, cmap: Any = None, alpha: float = ALPHA) -> tuple[Pixels, Pixels]:
    """Colour [...,3] and opacity [...,1] of scaled values: the stronger the heat, the more it covers."""
    colours = colour_map(cmap or (SIGNED if signed else HEAT))
    rgb = np.asarray(colours(0.5 + SATURATED * values / 2 if signed else values))[..., :3]
    strength = np.abs(values) if signed else FAINTEST + (1 - FAINTEST) * values
    return rgb, alpha * strength[..., None]


def display_size(size: tuple[int, int], least: int = 224) -> tuple[int, int]:
    """The model's input size, or the smallest multiple of it that a person can see something in."""
    times = max(1, math.ceil(least / max(size)))
    return size[0] * times, size[1] * times


def seen(image: Picture, size: tuple[int, int], preprocess: Preprocess | None = None, least: int = 224) -> Image.Image:
    """The part of an image that the model saw, as sharp as a person wants it.

    Without a `preprocess` the centre of the image is taken, whole along its shorter side.
    """
    view = replace(preprocess or Preprocess(size), size=display_size(size, least))
    if isinstance(image, Image.Image) and image.mode == "RGB" and image.size == view.size[::-1]:
        return image
    return view.crop(open_image(image))


def upsample(
    scores: Tensor, size: Sequence[int], upsampling: Upsampling = "bilinear", covers: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """Scores [h,w] at another size; averaged where that is smaller.

    `covers` is the share of the height and width that they lie on, from the top left.
    """
    return at_size(scores.float(), size, covers, upsampling, averaged=True)


def blend(
    picture: Image.Image,
    scores: Tensor,
    scale: Scale,
    cmap: Any = None,
    alpha: float = ALPHA,
    upsampling: Upsampling = "bilinear",
    covers: tuple[float, float] = (1.0, 1.0),
) -> Image.Image:
    """Scores [h,w] as heat over a picture that shows exactly what they are about."""
    values = scale(upsample(scores, picture.size[::-1], upsampling, covers)).double().numpy()
    rgb, opacity = tint(values, scale.signed, cmap, alpha)
    darkest, contrast = GREY[scale.signed]
    grey = darkest + contrast * np.asarray(picture.convert("L"), dtype=np.float64)[..., None] / 255
    return Image.fromarray((255 * (rgb * opacity + grey * (1 - opacity))).round().astype(np.uint8))


@check_keywords
def overlay(
    scores: Tensor,
    image: Picture,
    size: tuple[int, int],
    *,
    preprocess: Preprocess | None = None,
    cmap: Any = None,
    alpha: float = ALPHA,
    signed: bool | None = None,
    upsampling: Upsampling = "bilinear",
    covers: tuple[float, float] = (1.0, 1.0),
) -> Image.Image:
    """Scores [h,w] as heat over `image` (PIL or path, any size), cut the way the model cut it to its input `size`.

    The photograph is grey, so that colour means heat. Scores from their minimum to their 99th percentile run through
    inferno; signed ones (those with negative scores, unless `signed` says otherwise) through blue for "against", none
    at zero, and red for "for". `alpha` is the opacity of the strongest heat, `covers` the share of
    the model's input that the scores lie on.
    """
    if not 0 <= alpha <= 1:
        raise PatchlightError(f"alpha {alpha} is not in [0, 1]")
    if scores.ndim != 2:
        raise PatchlightError(f"an overlay takes scores [h,w]; these have shape {list(scores.shape)}")
    return blend(seen(image, size, preprocess), scores, robust_scale(scores, signed), cmap, alpha, upsampling, covers)
