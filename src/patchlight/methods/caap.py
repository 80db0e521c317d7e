"""CAAP in our reading: the activations of one patch, inserted into the run of an empty image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import Count, Rendered
from patchlight.evidence.fills import Painted, fill_images
from patchlight.methods.base import Ask, ablates
from patchlight.methods.masking import owners

Block = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Patched:
    """Variant v is the run of the context of image owner[v], with tokens of the image inserted after some blocks.

    Args:
        owner: The image [V] of each variant.
        shown: Which patches [V,N] are inserted.
        source: The image's patches after these blocks [B,K,N,D].
        context: The tokens of the context after the first of these blocks [B,T,D].
        place: Where patches are among the tokens [N].
        first: The first of these blocks.
    """

    owner: Tensor
    shown: Tensor
    source: Tensor
    context: Tensor
    place: Tensor
    first: int

    @property
    def begin(self) -> int:
        """The block that the tokens enter."""
        return self.first + 1

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The context's tokens with the first insertion."""
        owner = self.owner[part].to(self.context.device)
        return self.edit(part, self.first, self.context[owner]), None

    def edit(self, part: slice, layer: int, tokens: Tensor) -> Tensor:
        """The tokens after a block, with the image's inserted if it is one of these blocks."""
        if layer - self.first >= self.source.shape[1]:
            return tokens
        owner, shown = self.owner[part].to(tokens.device), self.shown[part].to(tokens.device)
        inserted = self.source[owner, layer - self.first].to(tokens)
        return tokens.index_copy(1, self.place, torch.where(shown[..., None], inserted, tokens[:, self.place]))


def _range(settings: Settings, depth: int) -> tuple[int, int]:
    """The first and the last block of the insertions."""
    first = depth // 4 if settings["start"] is None else settings["start"]
    return first, max(first, 3 * depth // 4 - 1) if settings["stop"] is None else settings["stop"]


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if vit.depth == 0 or vit.hierarchical or vit.pools_only or vit.several_states:
        return f"it inserts tokens after blocks that all have the same tokens, and {vit.name} has no such blocks"
    if settings["window"] % 2 == 0:
        return f"a window of {settings['window']} patches has no middle; give an odd number"
    first, last = _range(settings, vit.depth)
    if not first <= last < vit.depth:
        return f"start={first} and stop={last} are not a range of the {vit.depth} blocks, which are numbered from 0"
    return None


@ablates(
    "caap",
    paper="after Izadi et al., arXiv 2603.13652 (our reading of its abstract)",
    score="logit",
    cost="2 forwards, and the upper 3/4 of a forward for each patch",
    refuses=_refuses,
)
def caap(
    ask: Ask,
    start: Block | None = None,
    stop: Block | None = None,
    window: Count = 1,
    context: Painted | float = "zero",
) -> Tensor:
    """The increase of the score when the tokens of one patch are inserted into the forward of an empty image.

        R_i = f_c(y_i) - f_c(x_0),   y_i = x_0 with token i of the image inserted after each block from a to b

    x_0 is the context, an image without content. CLS and register tokens are those of the context. This is our reading:
    only the paper's abstract was available, so blocks, context and score may differ from the authors'. Interpret
    only the order of the patches, not sums of their values.

    Args:
        start: The first block a; None: a quarter of the depth.
        stop: The last block b; None: the block before three quarters of the depth. With b = a one block is patched.
        window: Side of the square of patches that is inserted, an odd number; the value belongs to its middle.
        context: What the empty image shows, as a fill.
    """
    vit, cells = ask.vit, ask.vit.cells
    first, last = _range({"start": start, "stop": stop}, vit.depth)
    neutral = fill_images(context, ask.images, vit, ask.seed)
    place = vit.layout.place.to(ask.images.device)
    with torch.no_grad(), vit.steady():
        tokens, seen = vit.run(vit.embed(ask.images), stop=first), []
        for layer in range(first, last + 1):
            tokens = vit.block(layer, tokens)
            seen.append(tokens[:, place])
        base = vit.run(vit.embed(neutral), stop=first + 1)
    at = torch.cartesian_prod(*(torch.arange(length) for length in vit.grid)).view(cells, -1)
    near = (at[:, None] - at).abs().amax(-1) <= window // 2
    owner = owners(ask, cells)
    shown = near.repeat_interleave(vit.layout.per_cell, 1).repeat(len(ask.images), 1)
    scores = ask.score_variants(Patched(owner, shown, torch.stack(seen, 1), base, place, first))
    empty = ask.score_variants(Rendered(torch.arange(len(neutral)), lambda part: neutral[part]))
    rise: Tensor = scores.view(len(neutral), cells, -1) - empty[:, None]
    maps: Tensor = rise.mT.unflatten(2, vit.grid)
    return maps
