"""Faithfulness metrics as their cards write them: one image, one level, one forward at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy


def falling(scores: Tensor) -> list[int]:
    """Cells of a map without ties, highest first."""
    values = scores.flatten().tolist()
    return sorted(range(len(values)), key=lambda i: -values[i])


def masked(image: Tensor, fill: Tensor, cells: list[int]) -> Tensor:
    """The image [C,H,W] with these pixels taken from the fill."""
    out = image.clone()
    out.flatten(1)[:, cells] = fill.flatten(1)[:, cells]
    return out


def probabilities(vit: Anatomy, image: Tensor) -> list[float]:
    return vit.logits(image[None])[0].softmax(0).tolist()


def deletion(vit: Anatomy, image: Tensor, scores: Tensor, fill: Tensor, steps: int) -> list[list[float]]:
    """All probabilities after 0, 1, ..., n steps of ceil(HW / steps) pixels."""
    order, size = falling(scores), math.ceil(scores.numel() / steps)
    counts = [*range(0, scores.numel(), size), scores.numel()]
    return [probabilities(vit, masked(image, fill, order[:n])) for n in counts]


def insertion(vit: Anatomy, image: Tensor, scores: Tensor, fill: Tensor, steps: int) -> list[list[float]]:
    order, size = falling(scores), math.ceil(scores.numel() / steps)
    counts = [*range(0, scores.numel(), size), scores.numel()]
    return [probabilities(vit, masked(fill, image, order[:n])) for n in counts]


def without_patches(vit: Anatomy, image: Tensor, patches: list[int]) -> list[float]:
    """Probabilities with these patch tokens cut out of the sequence that enters block 0."""
    kept = [i for i in range(vit.grid[0] * vit.grid[1]) if i not in patches]
    with torch.no_grad():
        tokens = vit.embed(image[None])
        rows = [*range(vit.prefix), *(vit.prefix + i for i in kept)]
        logits = vit.readout(vit.run(tokens[:, rows]))
    return logits[0].softmax(0).tolist()


def argmax(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: values[i])


def rise_area(curve: list[float]) -> float:
    """(sum - first / 2 - last / 2) / (n - 1)."""
    return (sum(curve) - curve[0] / 2 - curve[-1] / 2) / (len(curve) - 1)


def trapezoids(x: list[float], curve: list[float]) -> float:
    return sum((b - a) * (p + q) / 2 for a, b, p, q in zip(x, x[1:], curve, curve[1:], strict=False))


def saco(s: list[float], d: list[float]) -> float:
    """The paper's loop over pairs: the weight s_i - s_j counts for the map where d_i >= d_j, else against it."""
    faithful, total = 0.0, 0.0
    for i in range(len(s)):
        for j in range(i + 1, len(s)):
            faithful += (s[i] - s[j]) * (1 if d[i] >= d[j] else -1)
            total += abs(s[i] - s[j])
    return faithful / total
