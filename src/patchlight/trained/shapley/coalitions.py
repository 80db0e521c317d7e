"""The coalitions of a training: those of the Shapley kernel, and those of a surrogate's masks."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from patchlight.evidence.coalitions import draw_coalitions, draw_sizes

Coalitions = Literal["kernel", "binomial", "code"]


def draw_pairs(count: int, masks: int, players: int, kind: Coalitions, generator: torch.Generator) -> Tensor:
    """Coalitions z [count,masks,d] (True: takes part) for each image, every second the complement of the one before.

    `kernel`: the size k has P(k) proportional to 1 / (k (d - k)), 0 < k < d, then a subset of that size, uniformly.
    `binomial`: k as before, then each patch by itself with probability 1 - k / d, so that sizes scatter and the empty
    and the full coalition occur. `code`: the same with k - 1 in the place of k.
    """
    if kind == "kernel":
        return draw_coalitions(count * masks, players, generator).view(count, masks, players)
    size = draw_sizes(count * masks // 2, players, generator) - int(kind == "code")
    drawn = torch.rand(len(size), players, generator=generator, device=generator.device)
    z = drawn < 1 - size[:, None] / players
    return torch.stack([z, ~z], 1).view(count, masks, players)


def draw_uniform(count: int, players: int, generator: torch.Generator) -> Tensor:
    """One coalition z [count,1,d] for each image: every patch with probability u, u ~ U(0, 1) for each image."""
    u = torch.rand(count, 1, 1, generator=generator, device=generator.device)
    return torch.rand(count, 1, players, generator=generator, device=generator.device) < u
