"""Coalitions of patches: sampling them, and attention restricted to the tokens of a coalition."""

from __future__ import annotations

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.watching import Unseen
from patchlight.core.layout import Layout


def no_coalitions(vit: Anatomy) -> str | None:
    """Why a model cannot score coalitions of patches, including the empty one; None if it can."""
    if vit.can_drop is not None:
        return f"{vit.name} cannot drop tokens: {vit.can_drop}"
    if vit.pooling not in ("cls", "cls+dist"):
        return f"{vit.name} reads its patches, so the empty coalition has no score"
    return None


def members_first(z: Tensor) -> Tensor:
    """The players of coalitions z [n,d]: first the members, then the others, both in order."""
    return (~z).to(torch.uint8).argsort(dim=1, stable=True)


def seen_tokens(layout: Layout, longest: int, size: Tensor) -> Tensor:
    """Mask [n,N] of visible tokens: prefix, suffix and the first size [n] of `longest` patches."""
    seen = torch.arange(-layout.prefix, longest + layout.suffix, device=size.device)
    return (seen < size[:, None]) | (seen >= longest)


def coalition_logits(vit: Anatomy, images: Tensor, z: Tensor, chunk: int) -> Tensor:
    """Logits [B,m,C] of every image with only the patches of its coalitions z [B,m,d], `chunk` coalitions at once.

    Coalitions of similar size run together: tokens that no coalition of a chunk contains are removed, and other tokens
    that a coalition does not contain are hidden from attention. Differentiable; autocast of the caller applies.
    """
    vit.record_calls()
    embedded = vit.embed(images)
    rows = z.flatten(0, 1)
    size = rows.sum(1)
    order, members = size.argsort(), members_first(rows)
    sizes, parts = size[order].tolist(), []
    for begin in range(0, len(sizes), chunk):
        index, longest = order[begin : begin + chunk], sizes[begin : begin + chunk][-1]
        keep = members[index, :longest]
        tokens = vit.gather(embedded, keep, index // z.shape[1])
        with Unseen(seen_tokens(vit.layout, longest, size[index])):
            for layer in range(vit.depth):
                tokens = vit.block(layer, tokens, keep)
            parts.append(vit.readout(tokens, keep))
    logits: Tensor = torch.cat(parts)[order.argsort()].unflatten(0, z.shape[:2])
    return logits


def draw_sizes(n: int, players: int, generator: torch.Generator) -> Tensor:
    """Sample sizes k [n] of coalitions with P(k) proportional to 1 / (k (d - k)), 0 < k < d."""
    size = torch.arange(1, players, dtype=torch.float64, device=generator.device)
    return torch.multinomial(1 / (size * (players - size)), n, replacement=True, generator=generator) + 1


def draw_coalitions(n: int, players: int, generator: torch.Generator) -> Tensor:
    """Sample coalitions z [n,d] (True: member); every second one is the complement of the previous one.

    The size k has P(k) proportional to 1 / (k (d - k)), 0 < k < d, and subsets of one size are equally likely. The
    result is on the device of the generator.
    """
    pairs = -(-n // 2)
    sizes = draw_sizes(pairs, players, generator)
    values = torch.rand(pairs, players, generator=generator, dtype=torch.float64, device=generator.device)
    z = values.argsort(1).argsort(1) < sizes[:, None]
    return torch.stack([z, ~z], 1).flatten(0, 1)[:n]
