"""Robustness metrics: changes of the map under small changes of the image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import top_classes
from patchlight.engine import default_batch_size
from patchlight.evidence.ablation import Count
from patchlight.metrics.base import Measure, Measured, reasons_where, register_metric

Norm = Literal["l2", "l1", "linf"]
Noises = Annotated[int, Field(ge=1, description="Number n of noise samples.")]
Radius = Annotated[float, Field(ge=0, description="Largest change of a value of the normalised image.")]
Chunk = Annotated[Count | None, Field(description="Number of explanations at once; None: as many as fit in memory.")]
_ORDER = {"l2": 2.0, "l1": 1.0, "linf": float("inf")}


def uniform_noise(shape: tuple[int, ...], n: int, radius: float, seed: int) -> Tensor:
    """Perturbations d_j [n,C,H,W] ~ U(-radius, radius), on the CPU: the same for every image, batch and device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(n, *shape).uniform_(-radius, radius, generator=generator)


@register_metric(
    "max-sensitivity",
    paper="Yeh et al., NeurIPS 2019",
    higher_is_better=False,
    bounds=(0.0, float("inf")),
    explains=True,
    stochastic=True,
    cost="samples (10) explanations",
    presets={
        "tis": {"samples": 10, "radius": 0.02, "norm": "l2", "reseed": False},
        "quantus": {"samples": 200, "radius": 0.2, "norm": "l2", "reseed": False},
    },
    quick={"samples": 2},
)
def max_sensitivity(
    ask: Measure,
    samples: Noises = 10,
    radius: Radius = 0.02,
    norm: Norm = "l2",
    reseed: bool = False,
    chunk: Chunk = None,
) -> Measured:
    """Largest relative change of the map under small noise on the image.

        max_j ||Phi(x) - Phi(x + d_j)|| / ||Phi(x)||,   d_j ~ U(-radius, radius),   j = 1..n

    d_j is added to the normalised image and is the same for every image; the class is not changed. Phi is the map
    before upsampling; a norm of 0 in the denominator is replaced by 1. The values of presets `tis` (captum's defaults)
    and `quantus` (200 samples of radius 0.2) are not comparable.

    Args:
        norm: The norm of maps and their changes.
        reseed: Whether each explanation has its own seed; otherwise the randomness of a sampling method does not count.
    """
    first = _original_maps(ask).flatten(1)
    noise = uniform_noise(tuple(ask.images.shape[1:]), samples, radius, ask.seed).to(ask.images)

    def change(maps: Tensor, images: Tensor, owner: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(maps - first[owner], _ORDER[norm], 1)
        return size

    below: Tensor = torch.linalg.vector_norm(first, _ORDER[norm], 1)
    largest = _under_noise(ask, noise, change, reseed, chunk).amax(0)
    return Measured(largest / torch.where(below == 0, 1, below))


def _original_maps(ask: Measure) -> Tensor:
    return ask.maps if ask.current else ask.explain(ask.vit, ask.images, ask.targets, ask.seed)


def _under_noise(
    ask: Measure,
    noise: Tensor,
    change: Callable[[Tensor, Tensor, Tensor], Tensor],
    reseed: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Change of the maps [n,B] under each noise [n,C,H,W]; `change` maps (maps [m,N], noisy images, owner) to [m]."""
    batch, n = len(ask.images), len(noise)
    # All images under one noise sample come before the next: a chunk may contain several samples, but only one seed.
    owner, draw = torch.arange(batch).repeat(n), torch.arange(n).repeat_interleave(batch)
    size = chunk or default_batch_size(ask.vit)
    runs = range(0, n * batch, batch if reseed else n * batch)
    parts = [
        slice(begin, min(begin + size, start + runs.step))
        for start in runs
        for begin in range(start, start + runs.step, size)
    ]
    changes = []
    for part in parts:
        images = ask.images[owner[part]] + noise[draw[part]]
        seed = ask.seed + 1 + int(draw[part.start]) if reseed else ask.seed
        maps = ask.explain(ask.vit, images, ask.targets[owner[part]], seed).flatten(1)
        changes.append(change(maps, images, owner[part]))
    return torch.cat(changes).view(n, batch)


def relative(a: Tensor, b: Tensor) -> Tensor:
    """(a - b) / a, elementwise; a denominator of 0 is replaced by 1e-6."""
    ratio: Tensor = (a - b) / torch.where(a == 0, 1e-6, a)
    return ratio


_AGARWAL = {"samples": 200, "change": "relative", "low": 0.02, "radius": 0.2}


@register_metric(
    "stability",
    paper="Alvarez-Melis and Jaakkola, NeurIPS 2018; Agarwal et al., 2022",
    aliases=("local-lipschitz",),
    higher_is_better=False,
    bounds=(0.0, float("inf")),
    explains=True,
    stochastic=True,
    cost="samples (10) explanations and forwards",
    presets={
        "ris": {**_AGARWAL, "per": "relative-input"},
        "ros": {**_AGARWAL, "per": "output"},
        "rrs": {**_AGARWAL, "per": "tokens"},
    },
    quick={"samples": 2},
)
def stability(
    ask: Measure,
    samples: Noises = 10,
    radius: Radius = 0.02,
    low: float | None = None,
    change: Literal["absolute", "relative"] = "absolute",
    per: Literal["input", "relative-input", "output", "tokens"] = "input",
    chunk: Chunk = None,
) -> Measured:
    """Largest change of the map under small noise, per change of the image, the logits or the tokens.

        max_j ||Phi(x) - Phi(x + d_j)|| / ||x - (x + d_j)||,   d_j ~ U(-radius, radius),   j = 1..n

    The default is the local Lipschitz estimate, of maps divided by the largest magnitude of Phi(x). Noise samples that
    change the prediction are skipped; part `kept` is the share of the others. An image without other samples has no
    value. Presets `ris`, `ros` and `rrs` are relative input, output and representation stability: they divide the
    change of each element by the element, so elements close to 0 dominate.

    Args:
        low: Smallest change; None: -radius. With the presets, pixels only become brighter.
        change: "relative" divides the change of the map by the map, elementwise.
        per: The denominator: the change of the image, the relative change of its elements, the change of the logits, or
            the relative change of the tokens that leave the last block.
    """
    first = _original_maps(ask).flatten(1).double()
    size = first.abs().amax(1, keepdim=True)
    size = torch.where(size > 0, size, 1)
    first = first / size
    noise = uniform_noise(tuple(ask.images.shape[1:]), samples, radius, ask.seed)
    if low is not None:
        noise = low + (noise + radius) * (radius - low) / (2 * radius or 1)
    clean, last = _outputs(ask.vit, ask.images)
    predicted = top_classes(clean, ask.vit.outputs).index

    def ratio(maps: Tensor, images: Tensor, owner: Tensor) -> Tensor:
        index = owner.to(maps.device)
        maps = maps.double() / size[index]
        gap = relative(first[index], maps) if change == "relative" else first[index] - maps
        logits, tokens = _outputs(ask.vit, images)
        below = {
            "input": lambda: ask.images[index] - images,
            "relative-input": lambda: relative(ask.images[index], images),
            "output": lambda: clean[index] - logits,
            "tokens": lambda: relative(last[index], tokens),
        }[per]()
        same = (top_classes(logits, ask.vit.outputs).index == predicted[owner.cpu()]).all(1).to(maps.device)
        step = below.double().flatten(1).norm(dim=1)
        return torch.where(same, gap.norm(dim=1) / step.clamp_min(1e-12), torch.nan)

    ratios = _under_noise(ask, noise.to(ask.images), ratio, chunk=chunk)
    valid = ratios.isfinite()
    values = torch.where(valid, ratios, -torch.inf).amax(0)
    reasons = reasons_where(~valid.any(0), "every noise sample changes its prediction")
    return Measured(values, parts={"kept": valid.double().mean(0)}, reasons=reasons)


def _outputs(vit: Anatomy, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B,C] and the tokens [B,N,D] that leave the last block, without gradients."""
    with torch.no_grad():
        tokens = vit.run(vit.embed(images))
        return vit.readout(tokens), tokens
