"""DAVE: pixel attributions of the `libra` rule, averaged over warped and noisy copies of the image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import nearest
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import Count
from patchlight.evidence.passes import in_memory, rows_at_once
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import PIXELS, LayerJob
from patchlight.methods.base import Ask, Level, own_passes
from patchlight.methods.masking import at_level, needs_neighbours

DEGREES, SHIFT, SCALE = 20.0, 0.1, 0.1
"""The most that a warp rotates, shifts (share of the side) and scales."""
OUTLIER = 2.5
"""Samples further from the median than this many robust standard deviations are left out."""


@dataclass(frozen=True)
class NoisyCopy:
    """One copy of the images: where each of its pixels comes from, and its noise.

    Args:
        theta: From places in the copy to places in the image [2,3], both from -1 to 1; None: not warped.
        noise: Standard normal noise [C,H,W]; None: no noise.
        strength: t, from 0 (no noise) to 1 (noise only).
    """

    theta: Tensor | None
    noise: Tensor | None
    strength: float

    def warp(self, images: Tensor) -> Tensor:
        """Images [B,C,H,W] warped; places outside show 0."""
        if self.theta is None:
            return images
        grid = F.affine_grid(self.theta.to(images).expand(len(images), -1, -1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    def copy(self, images: Tensor) -> Tensor:
        """(1 - t) B x + sqrt(1 - (1 - t)^2) noise."""
        kept = 1 - self.strength
        shown = self.warp(images)
        return shown if self.noise is None else kept * shown + math.sqrt(1 - kept**2) * self.noise.to(shown)

    def pull_back(self, gradients: Tensor) -> Tensor:
        """The gradients [B,C,H,W] at the copies as gradients at the images: (1 - t) B^T g."""
        kept = 1.0 if self.noise is None else 1 - self.strength
        if self.theta is None:
            return kept * gradients
        with torch.enable_grad():
            leaf = torch.zeros_like(gradients).requires_grad_()
            (pulled,) = torch.autograd.grad(self.warp(leaf), leaf, gradients)
        return kept * pulled


def random_samples(count: int, shape: torch.Size, warp: bool, noise: float, seed: int) -> list[NoisyCopy]:
    """Samples of images [C,H,W], the same for every image."""
    generator = torch.Generator().manual_seed(seed)
    aspect = shape[-1] / shape[-2]
    samples = []
    for strength in torch.linspace(0, noise, count).tolist():
        theta = None
        if warp:
            flip, turn, right, down, size = torch.rand(5, generator=generator).tolist()
            angle, scale = math.radians(DEGREES) * (2 * turn - 1), 1 + SCALE * (2 * size - 1)
            cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
            linear = torch.tensor([[cosine, sine / aspect], [-sine * aspect, cosine]])
            shift = 2 * SHIFT * torch.tensor([2 * right - 1, 2 * down - 1])
            theta = torch.cat([linear, -(linear @ shift)[:, None]], 1)
            theta[0] *= -1 if flip < 0.5 else 1
        drawn = torch.randn(shape, generator=generator) if noise > 0 else None
        samples.append(NoisyCopy(theta, drawn, strength))
    return samples


def robust_mean(values: Tensor) -> Tensor:
    """The mean over the first axis without outliers, value by value.

    >>> robust_mean(torch.tensor([0.0, 1.0, 2.0, 3.0, 100.0]))
    tensor(1.5000)
    """
    median = values.median(0).values
    distance = (values - median).abs()
    keep = distance <= OUTLIER * (1.4826 * distance.median(0).values + 1e-8)
    return (values * keep).sum(0) / keep.sum(0)


def contributions(ask: Ask, samples: list[NoisyCopy], rule: str) -> Iterator[Tensor]:
    """The clean image times its pulled-back gradient, for one image after another: [S,C,H,W]."""
    ask = replace(ask, rule=RULES.find(rule))
    reads = LayerJob(lambda block: block.g, frozenset({"g"}), (PIXELS,))
    each = max(1, rows_at_once(ask.vit))

    def gradients(alone: Ask, copies: Tensor) -> Tensor:
        pixels: Tensor = alone.run([reads], copies).at(PIXELS)
        return pixels.movedim(-1, 1)

    for index in range(len(ask.images)):
        alone = ask.of(torch.tensor([index]))
        parts = []
        for begin in range(0, len(samples), each):
            part = samples[begin : begin + each]
            copies = torch.cat([sample.copy(alone.images) for sample in part])
            pixels = in_memory(partial(gradients, alone), copies)
            parts += [sample.pull_back(g[None]) for sample, g in zip(part, pixels, strict=True)]
        yield torch.cat(parts) * alone.images


def smoothed(maps: Tensor) -> Tensor:
    """The authors' filters of maps [B,H,W]: positive part, half of it blurred, bilateral, and a maximum of 1."""
    positive = maps.relu()[:, None]
    blurred = (positive + F.conv2d(positive, _gaussian(11, 7.0).to(maps), padding=5)) / 2
    windows = F.unfold(blurred, 5, padding=2).unflatten(-1, maps.shape[-2:])  # [B,25,H,W]
    near = torch.exp(-((windows - blurred) ** 2) / (2 * 0.05**2)) * _gaussian(5, 0.5).to(maps).view(1, -1, 1, 1)
    filtered = (near * windows).sum(1) / near.sum(1)
    scaled: Tensor = filtered / filtered.amax((1, 2), keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
    return scaled


def _gaussian(size: int, sigma: float) -> Tensor:
    """A Gaussian window [1,1,size,size] that sums to 1."""
    line = torch.exp(-((torch.arange(size) - size // 2).double() ** 2) / (2 * sigma**2))
    window = line[:, None] * line
    return (window / window.sum())[None, None]


def refuse_operator(settings: Settings, vit: Anatomy) -> str | None:
    """Why the backward rule `operator` cannot be used on a model."""
    reason = needs_neighbours(settings, vit)
    if reason is not None:
        return reason
    rule = RULES.lookup(settings["operator"])
    if rule is None:
        return f"no backward rule is called '{settings['operator']}'; {nearest(settings['operator'], RULES)}"
    if rule.name != "plain" and vit.can_rule is not None:
        return f"the backward rule '{rule.name}' does not hold for {vit.name}: {vit.can_rule}"
    return None


@own_passes(
    "dave",
    paper="Wróbel et al., ICML 2026",
    levels=("pixel", "token"),
    ruled=False,
    stochastic=True,
    exact=False,  # rounding decides whether a sample near the threshold is left out
    cost="samples (50) forwards and backwards",
    quick={"samples": 3},
    refuses=refuse_operator,
    presets={
        "authors": {"samples": 100, "filter": True},
        "operator": {"samples": 1, "warp": False, "noise_level": 0.0},
        "warp": {"noise_level": 0.0},
        "noise": {"warp": False},
    },
)
def dave(
    ask: Ask,
    samples: Count = 50,
    warp: bool = True,
    noise_level: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    robust: bool = True,
    filter: bool = False,
    operator: str = "libra",
    level: Level = "pixel",
) -> Tensor:
    """DAVE: input times gradient of the `libra` rule at pixels, averaged over warped and noisy copies of the image.

        R = robust mean over s of x * (1 - t_s) B_s^T g(u_s),   u_s = (1 - t_s) B_s x + sqrt(1 - (1 - t_s)^2) e_s

    B_s flips, rotates (20 degrees at most), shifts and scales (10 % at most), e_s is standard normal noise, and t_s
    rises from 0 to `noise_level`. The gradient is pulled back by the adjoint of the warp. The map is signed. Presets:
    `authors` (100 samples and their filters), `operator` (`ixg.libra` at pixels), `warp`, `noise`.

    Args:
        samples: Number of copies.
        warp: Whether copies are warped.
        noise_level: The strongest noise; the authors use 0.3 to 0.9, depending on the model.
        robust: Whether outliers are left out of the mean, pixel by pixel.
        filter: Whether the map is smoothed and divided by its maximum as in the authors' pictures; it is then positive.
        operator: The backward rule of the gradient.
        level: "pixel": maps [B,H,W]. "token": their means over patches [B,h,w].
    """
    drawn = random_samples(samples, ask.images.shape[1:], warp, noise_level, ask.seed)
    averaged = [robust_mean(c) if robust else c.mean(0) for c in contributions(ask, drawn, operator)]
    maps = torch.stack(averaged).sum(1)
    return at_level(smoothed(maps) if filter else maps, level, ask)
