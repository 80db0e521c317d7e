"""AtMan: suppress attention to a patch, and to similar patches, in every layer; the loss in score is its relevance."""

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
    """Attention scores H scaled by key before the softmax: (H - min over keys of H) * F, or H * F without the offset.

    `factors` F [B,N] has one factor per token. An attention pooling that reads only the patches is scaled too.
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
    """Variant v is image owner[v], run with every attention scaled by factors[v] [V,N]."""

    owner: Tensor
    factors: Tensor
    offset: Offset

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        return embedded[self.owner[part].to(embedded.device)], None

    def around(self, part: slice) -> Suppress:
        return Suppress(self.factors[part], self.offset)


def suppression(tokens: Tensor, layout: Layout, factor: float, kappa: float, neighbours: int | None) -> Tensor:
    """Factors [B,P,N]: row i is for patch i, whose column and those of similar patches are suppressed.

    With c = cos(e_i, e_k) of the tokens [B,N,D] at the transformer's input, a patch k with c >= kappa (at most
    `neighbours`, the most similar first) gets (1 - factor) (1 - c) + factor; prefix and suffix tokens keep 1.
    """
    unit = F.normalize(layout.of_cells(tokens).double(), dim=-1)
    cosine = unit @ unit.mT
    itself = torch.eye(cosine.shape[1], dtype=torch.bool, device=cosine.device)
    similar = (cosine >= kappa) & ~itself
    if neighbours is not None and neighbours < cosine.shape[1] - 1:
        others = cosine.masked_fill(itself, -torch.inf)
        best = others.topk(neighbours, -1).indices
        similar = similar & torch.zeros_like(similar).scatter(-1, best, True)
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
    """How much the loss rises when attention to a patch is suppressed in every block.

        R_i = log p_c(image) - log p_c(patch i suppressed)

    To suppress patch i, the pre-softmax scores H of all heads and blocks become (H - min_keys H) F. F is `factor` in
    column i, (1 - factor) (1 - cos) + factor in the columns of patches with similar embeddings, and 1 elsewhere, always
    in the columns of prefix tokens. With `factor=0` the patch is still seen, at the row's lowest score. A pair of
    classes is explained by log p_a - log p_b; score "logit", or a callable, by its drop. Presets: `code` (kappa 0.6),
    `panda` (0.75), `blip` (no offset, factor 0.05, kappa 0.1, 150 neighbours).

    Args:
        factor: What attention to the patch is multiplied by; the paper's suppression f is 1 - `factor`.
        kappa: Patches whose cosine with the patch is at least this are suppressed with it; above 1 there are none.
        offset: "min" first subtracts each row's lowest score. "none" does not, so that negative scores gain attention
            when they are scaled towards 0.
        neighbours: Maximum number of similar patches, the most similar first; None: all.
    """
    vit, count = ask.vit, len(ask.images)
    with torch.no_grad(), vit.steady():
        factors = suppression(vit.embed(ask.images), vit.layout, factor, kappa, neighbours)
    factors = torch.cat([torch.ones_like(factors[:, :1]), factors], 1)
    each = factors.shape[1]
    variants = Suppressed(owners(ask, each), factors.flatten(0, 1), offset)
    logits = ask.ablation.logits(variants)
    plain = ask.score != "probability"
    targets = ask.targets[variants.owner]
    values = logits if plain else log_probabilities(logits, vit.outputs)
    score, outputs = (ask.score, vit.outputs) if plain else ("logit", Outputs())
    scores = target_scores(values, targets, score, outputs).view(count, each, -1)
    lost: Tensor = (scores[:, :1] - scores[:, 1:]).mT.unflatten(-1, vit.grid)
    return lost
