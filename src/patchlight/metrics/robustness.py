"""Robustness: how much a map changes under small changes of the image."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.engine import default_batch_size
from patchlight.evidence.ablation import Count
from patchlight.metrics.base import Measure, Measured, register_metric

Norm = Literal["l2", "l1", "linf"]
Radius = Annotated[float, Field(ge=0)]
_ORDER = {"l2": 2.0, "l1": 1.0, "linf": float("inf")}


def draws(shape: tuple[int, ...], n: int, radius: float, seed: int) -> Tensor:
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
    samples: Count = 10,
    radius: Radius = 0.02,
    norm: Norm = "l2",
    reseed: bool = False,
    chunk: Count | None = None,
) -> Measured:
    """Largest relative change of the map under small noise on the image.

        max_j ||Phi(x) - Phi(x + d_j)|| / ||Phi(x)||,   d_j ~ U(-radius, radius),   j = 1..n

    d_j is added to the normalised image and is the same for every image; the class stays. Phi is the map before
    upsampling; a norm of 0 in the denominator counts as 1. Presets `tis` (captum's defaults) and `quantus` (200 samples
    of radius 0.2) are not comparable.

    Args:
        samples: Number n of noises, sampled from the seed.
        radius: Largest change of a value of the normalised image.
        norm: The norm of maps and their changes.
        reseed: Gives each explanation its own seed; otherwise all have the same, so that the randomness of a sampling
            method does not count.
        chunk: Explanations at once; None: as many as fit in memory.
    """
    batch, n = len(ask.images), samples
    first = ask.maps if ask.current else ask.explain(ask.vit, ask.images, ask.targets, ask.seed)
    first = first.flatten(1)
    noise = draws(tuple(ask.images.shape[1:]), n, radius, ask.seed).to(ask.images)
    # Noise by noise, all images under each: a chunk may contain several noises, but only one seed.
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
        changes.append(torch.linalg.vector_norm(maps - first[owner[part]], _ORDER[norm], 1))
    below = torch.linalg.vector_norm(first, _ORDER[norm], 1)
    change = torch.cat(changes).view(n, batch).amax(0)
    return Measured(change / torch.where(below == 0, 1, below))
