"""Coalitions of patches: how they are drawn, and attention that sees a coalition's tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.watching import AttentionTap


class Unseen(AttentionTap):
    """Attention that sees the keys `seen` [B,N] alone, fused where the model's is."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen[:, None, None]

    def scaled_dot_product_attention(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Tensor:
        if attn_mask is None:
            shown = self.seen
        elif attn_mask.dtype == torch.bool:
            shown = attn_mask & self.seen
        else:
            shown = attn_mask.masked_fill(~self.seen, -torch.inf)
        return func(query, key, value, shown, *rest, **kwargs)  # type: ignore[no-any-return]

    def attend(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.seen, -torch.inf).softmax(-1)


def no_coalitions(vit: Anatomy) -> str | None:
    """Why a model cannot be asked about the patches of a coalition alone, the empty one too; None when it can."""
    if vit.can_drop is not None:
        return f"{vit.name} cannot drop tokens: {vit.can_drop}"
    if vit.pooling not in ("cls", "cls+dist"):
        return f"{vit.name} reads its patches, so it says nothing about the empty coalition"
    return None


def members_first(z: Tensor) -> Tensor:
    """The players of coalitions z [n,d], those that take part before the others, each in order."""
    return (~z).to(torch.uint8).argsort(dim=1, stable=True)


def coalition_logits(vit: Anatomy, images: Tensor, z: Tensor, chunk: int) -> Tensor:
    """Logits [B,m,C] of every image with only the patches of its coalitions z [B,m,d], `chunk` of them at once.

    Coalitions of like size run together: the tokens that none of them has are really removed, and what a smaller one
    does not have is hidden from attention, which is the same. Gradients flow.
    """
    embedded = vit.embed(images)
    rows = z.flatten(0, 1)
    size = rows.sum(1)
    order, members = size.argsort(), members_first(rows)
    sizes = size[order].tolist()
    found = []
    for begin in range(0, len(sizes), chunk):
        some = order[begin : begin + chunk]
        longest = sizes[begin : begin + chunk][-1]
        keep = members[some, :longest]
        seen = torch.arange(-vit.prefix, longest, device=z.device) < size[some, None]
        tokens = vit.gather(embedded, keep, some // z.shape[1])
        with Unseen(seen):
            for index in range(vit.depth):
                tokens = vit.block(index, tokens, keep)
            found.append(vit.readout(tokens))
    logits: Tensor = torch.cat(found)[order.argsort()].unflatten(0, z.shape[:2])
    return logits


def draw_sizes(n: int, players: int, generator: torch.Generator) -> Tensor:
    """Sizes k [n] of coalitions with P(k) proportional to 1 / (k (d - k)), 0 < k < d."""
    size = torch.arange(1, players, dtype=torch.float64, device=generator.device)
    return torch.multinomial(1 / (size * (players - size)), n, replacement=True, generator=generator) + 1


def draw_coalitions(n: int, players: int, generator: torch.Generator) -> Tensor:
    """Coalitions z [n,d] (True: takes part), each second one the complement of the one before.

    The size k is drawn with P(k) proportional to 1 / (k (d - k)), 0 < k < d; then a subset of that size, uniformly.
    They lie where the generator does.
    """
    pairs = -(-n // 2)
    drawn = draw_sizes(pairs, players, generator)
    place = (
        torch.rand(pairs, players, generator=generator, dtype=torch.float64, device=generator.device)
        .argsort(1)
        .argsort(1)
    )
    z = place < drawn[:, None]
    return torch.stack([z, ~z], 1).flatten(0, 1)[:n]
