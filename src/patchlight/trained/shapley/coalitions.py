"""Samples the coalitions of a training: those of the Shapley kernel, and the masks of a surrogate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from patchlight.evidence.coalitions import draw_coalitions, draw_sizes

Coalitions = Literal["kernel", "binomial", "code"]


def draw_pairs(count: int, masks: int, players: int, kind: Coalitions, generator: torch.Generator) -> Tensor:
    """Sample coalitions z [count,masks,d] (True: member) per image; every second is the complement of the previous.

    `kernel`: size k with P(k) proportional to 1 / (k (d - k)), 0 < k < d, then a uniform subset of that size.
    `binomial`: k as before, then each patch independently with probability 1 - k / d, so sizes vary, and the empty and
    the full coalition occur. `code`: the same with k - 1 instead of k.
    """
    if kind == "kernel":
        return draw_coalitions(count * masks, players, generator).view(count, masks, players)
    size = draw_sizes(count * masks // 2, players, generator) - int(kind == "code")
    drawn = torch.rand(len(size), players, generator=generator, device=generator.device)
    z = drawn < 1 - size[:, None] / players
    return torch.stack([z, ~z], 1).view(count, masks, players)


def draw_uniform(count: int, players: int, generator: torch.Generator) -> Tensor:
    """Sample one coalition z [count,1,d] per image: every patch with probability u, u ~ U(0, 1) per image."""
    u = torch.rand(count, 1, 1, generator=generator, device=generator.device)
    return torch.rand(count, 1, players, generator=generator, device=generator.device) < u
