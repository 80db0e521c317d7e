"""Scenes of shapes on textured grounds, with boxes and masks: the data of ``pocket-detector``, drawn by formulas.

Every scene has one to four shapes of random colour, size, place and turn, which hardly overlap, over a smooth ground
with noise and thin lines. Nothing is downloaded and nothing has a licence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 96
MOST = 4
"""Objects in a scene, at most."""
LABELS = ("circle", "square", "triangle", "cross", "ring", "star")


@dataclass(frozen=True)
class Scenes:
    """Images [n,3,H,W] from 0 to 1, masks [n,MOST,H,W], boxes [n,MOST,4] in pixels, labels [n,MOST]; -1: no object."""

    images: Tensor
    masks: Tensor
    boxes: Tensor
    labels: Tensor


def compose(count: int, generator: torch.Generator, side: int = SIDE) -> Scenes:
    """Draw scenes on the device of the generator."""
    device = generator.device

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, device=device)

    radius = uniform(count, MOST, low=0.09, high=0.21) * side
    centre = radius[..., None] + uniform(count, MOST, 2) * (side - 2 * radius[..., None])
    labels = torch.randint(len(LABELS), (count, MOST), generator=generator, device=device)
    wanted = torch.randint(1, MOST + 1, (count,), generator=generator, device=device)
    apart = (centre[:, :, None] - centre[:, None]).norm(dim=3) > 0.9 * (radius[:, :, None] + radius[:, None])
    there = torch.zeros(count, MOST, dtype=torch.bool, device=device)
    for i in range(MOST):  # an object that would overlap an earlier one is left out
        free = (apart[:, i, :i] | ~there[:, :i]).all(1) if i else there[:, 0] == 0
        there[:, i] = free & (i < wanted)
    rows, columns = torch.meshgrid(*[torch.arange(side, device=device) + 0.5] * 2, indexing="ij")
    x = (columns - centre[..., 0, None, None]) / radius[..., None, None]
    y = (rows - centre[..., 1, None, None]) / radius[..., None, None]
    turn = uniform(count, MOST, 1, 1, low=-math.pi, high=math.pi)
    drawn = torch.where(there, labels, -1)
    inside = _inside(x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin(), drawn)
    masks = inside & there[..., None, None]
    there = there & masks.flatten(2).any(2)
    ground = _ground(count, side, generator)
    colours = uniform(count, MOST, 3)
    mean = (ground[:, None] * masks[:, :, None]).sum((3, 4)) / masks.sum((2, 3)).clamp_min(1)[..., None]
    weak = (colours - mean).norm(dim=2, keepdim=True) < 0.35  # the colour must differ from the ground
    colours = torch.where(weak, (mean + 0.5) % 1, colours)
    images = ground
    for i in range(MOST):
        images = torch.where(masks[:, i, None], colours[:, i, :, None, None], images)
    images = images + 0.04 * torch.randn(images.shape, generator=generator, device=device)
    return Scenes(images.clamp(0, 1), masks, _boxes(masks), torch.where(there, labels, -1))


def _inside(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    """Which pixels belong to a shape, in coordinates where it has radius 1."""
    inside = torch.zeros_like(x, dtype=torch.bool)
    for k, shape in enumerate(_SHAPES):
        inside[labels == k] = shape(x[labels == k], y[labels == k])
    return inside


def _radius(x: Tensor, y: Tensor) -> Tensor:
    return (x**2 + y**2).sqrt()


_HALF = 0.9 * math.sqrt(0.5) * 1.1
_THIRD = 2 * math.pi / 3
_SHAPES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: _radius(x, y) < 0.9,
    lambda x, y: (x.abs() < _HALF) & (y.abs() < _HALF),
    lambda x, y: _radius(x, y) * ((torch.atan2(y, x) % _THIRD) - _THIRD / 2).cos() < 0.5,
    lambda x, y: ((x.abs() < 0.28) | (y.abs() < 0.28)) & (x.abs() < 0.9) & (y.abs() < 0.9),
    lambda x, y: (_radius(x, y) < 0.95) & (_radius(x, y) > 0.55),
    lambda x, y: _radius(x, y) < 0.62 + 0.36 * (5 * torch.atan2(y, x)).cos(),
)
"""Which points are inside of each of `LABELS`."""


def _ground(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Smooth colours with noise of a middle size, and lines."""
    device = generator.device
    ground = 0.5 + torch.zeros(count, 3, side, side, device=device)
    for cells, size in ((3, 0.18), (12, 0.06), (32, 0.04)):
        noise = torch.randn(count, 3, cells, cells, generator=generator, device=device)
        ground += size * F.interpolate(noise, size=(side, side), mode="bilinear")
    rows, columns = torch.meshgrid(*[torch.arange(side, device=device) + 0.5] * 2, indexing="ij")
    for _ in range(3):
        turn = math.pi * torch.rand(count, 1, 1, generator=generator, device=device)
        shift = side * (torch.rand(count, 1, 1, generator=generator, device=device) - 0.5)
        far = (columns - side / 2) * turn.cos() + (rows - side / 2) * turn.sin() - shift
        colour = torch.rand(count, 3, 1, 1, generator=generator, device=device)
        ground = torch.where((far.abs() < 0.8)[:, None], colour, ground)
    return ground.clamp(0, 1)


def _boxes(masks: Tensor) -> Tensor:
    """The tight boxes of masks, as (left, top, right, bottom)."""
    sides = []
    for axis in (2, 3):  # over rows, then columns
        along = masks.any(axis)
        size = along.shape[-1]
        first = along.int().argmax(-1)
        last = size - along.flip(-1).int().argmax(-1)
        sides.append((first, last))
    (left, right), (top, bottom) = sides
    boxes = torch.stack([left, top, right, bottom], 2).float()
    return torch.where(masks.flatten(2).any(2)[..., None], boxes, 0)
