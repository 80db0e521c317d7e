"""AtMan: the relevance of a patch is the drop of the score when attention to it is suppressed in every block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.core.layout import Layout
from patchlight.core.registry import Settings
from patchlight.core.targets import Outputs, log_probabilities, target_scores
from patchlight.evidence.ablation import Count
from patchlight.evidence.record import Record
from patchlight.evidence.rules import PLAIN
from patchlight.evidence.taps import Taps
from patchlight.methods.base import Ask, ablates
from patchlight.methods.masking import owners

Offset = Literal["min", "none"]


class Suppress(Taps):
    """Scales attention scores H by key before the softmax: (H - min over keys of H) * F, or H * F without the offset.

    `factors` F [B,N] has one factor per token. Attention pooling is scaled as well.
    """

    def __init__(self, factors: Tensor, offset: Offset) -> None:
        super().__init__(PLAIN, frozenset({"A"}), Record(-1, factors), in_block=True)
        self.factors, self.offset = factors, offset

    def attend(self, scores: Tensor) -> Tensor:
        factors = self.factors[:, None, None, -scores.shape[-1] :].to(scores)
        lowest = scores.amin(-1, keepdim=True) if self.offset == "min" else 0
        return ((scores - lowest) * factors).softmax(-1)


@dataclass(frozen=True)
class Suppressed:
    """Variants of images: image owner[v], with all attention scaled by factors[v] [V,N]."""

    owner: Tensor
    factors: Tensor
    offset: Offset

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        return embedded[self.owner[part].to(embedded.device)], None

    def around(self, part: slice) -> Suppress:
        return Suppress(self.factors[part], self.offset)


def suppression(tokens: Tensor, layout: Layout, factor: float, kappa: float, neighbours: int | None) -> Tensor:
    """Factors [B,P,N] that suppress each patch i (row i) and similar patches.

    With c = cos(e_i, e_k) of the tokens [B,N,D] that enter block 0, the factor of a patch k with c >= kappa (at most
    `neighbours`, the most similar first) is (1 - factor) (1 - c) + factor. Prefix and suffix tokens have 1.
    """
    unit = F.normalize(layout.of_cells(tokens).double(), dim=-1)
    cosine = unit @ unit.mT
    itself = torch.eye(cosine.shape[1], dtype=torch.bool, device=cosine.device)
    similar = (cosine >= kappa) & ~itself
    if neighbours is not None and neighbours < cosine.shape[1] - 1:
        most_similar = cosine.masked_fill(itself, -torch.inf).topk(neighbours, -1).indices
        similar = similar & torch.zeros_like(similar).scatter(-1, most_similar, True)
    scaled = torch.where(similar, (1 - factor) * (1 - cosine) + factor, 1.0).masked_fill(itself, factor)
    ones = scaled.new_ones(*scaled.shape[:2], tokens.shape[1])
    return ones.index_copy(2, layout.place.to(scaled.device), scaled.repeat_interleave(layout.per_cell, 2))


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if vit.depth == 0 or vit.hierarchical or vit.windows > 1:
        return f"it suppresses attention between all tokens, and {vit.name} has no such blocks"
    if vit.pools_only:
        return f"{vit.name} uses attention only for pooling, not between tiles"
    if vit.packed:
        return f"it suppresses other patches in each variant, and {vit.name} runs the tokens of all as one list"
    if vit.attention is not None:
        return f"it suppresses attention between all tokens, and that of {vit.name} cannot be read: {vit.attention}"
    return None


@ablates(
    "atman",
    paper="Deiseroth et al., NeurIPS 2023",
    exact=False,
    cost="N + 1 forwards (N patches)",
    presets={
        "code": {"kappa": 0.6},
        "panda": {"kappa": 0.75},
        "blip": {"offset": "none", "factor": 0.05, "kappa": 0.1, "neighbours": 150},
    },
    refuses=_refuses,
    advice=lambda settings, vit: "a factor of 1 suppresses nothing" if settings["factor"] == 1 else None,
)
def atman(
    ask: Ask,
    factor: Annotated[float, Field(ge=0)] = 0.1,
    kappa: Annotated[float, Field(ge=0)] = 0.7,
    offset: Offset = "min",
    neighbours: Count | None = None,
) -> Tensor:
    """Increase of the loss when attention to a patch is suppressed in every block.

        R_i = log p_c(image) - log p_c(patch i suppressed)

    To suppress patch i, the attention scores H before the softmax, of all heads and blocks, are replaced by
    (H - min_keys H) F. F is `factor` in column i, (1 - factor) (1 - cos) + factor in the columns of patches with
    similar embeddings, and 1 in all other columns. With `factor=0` the patch has the lowest score of each row, so some
    attention remains. For a pair of classes, log p_a - log p_b is explained; with score "logit" or a callable, that
    score. Presets: `code` (kappa 0.6), `panda` (0.75), `blip` (no offset, factor 0.05, kappa 0.1, 150 neighbours).

    Args:
        factor: The factor of attention to the patch; the paper's suppression f is 1 - `factor`.
        kappa: Smallest cosine of patches that are suppressed together with the patch; above 1 there are none.
        offset: "min" subtracts the lowest score of each row first. "none" does not, so that negative scores, scaled
            towards 0, gain attention.
        neighbours: Maximum number of similar patches, the most similar first; None: all.
    """
    vit, count = ask.vit, len(ask.images)
    with torch.no_grad(), vit.steady():
        factors = suppression(vit.embed(ask.images), vit.layout, factor, kappa, neighbours)
    factors = torch.cat([torch.ones_like(factors[:, :1]), factors], 1)
    variants = Suppressed(owners(ask, factors.shape[1]), factors.flatten(0, 1), offset)
    logits = ask.ablation.logits(variants)
    plain = ask.score != "probability"
    targets = ask.targets[variants.owner]
    values = logits if plain else log_probabilities(logits, vit.outputs)
    score, outputs = (ask.score, vit.outputs) if plain else ("logit", Outputs())
    scores = target_scores(values, targets, score, outputs).view(count, factors.shape[1], -1)
    drop: Tensor = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, vit.grid)
    return drop
