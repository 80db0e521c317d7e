"""Ablation: score many variants of images, with tokens removed or pixels masked by a fill.

The variants of all images are one flat list, which is split into chunks. The chunk size depends on free memory and is
halved when memory runs out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.progress import current_watcher
from patchlight.core.registry import Setting
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Score, Targets, target_scores
from patchlight.evidence.fills import Filling, painted
from patchlight.evidence.precision import PRECISION, Decided, Precision, chosen, free_memory, tf32

Unit = Annotated[
    Literal["token", "patch", "pixel", "frame", "tube", "band", "slice", "merge"],
    Field(
        description="What is removed or shown: tokens, which are dropped, or patches or pixels, which are painted. For "
        "videos, sounds and volumes also sets of patches: those of one time ('frame'), of one place at all times "
        "('tube'), of one frequency ('band') or of one depth ('slice'). For vision-language models also the patches of "
        "one visual token ('merge'), which are dropped."
    ),
]
Count = Annotated[int, Field(ge=1)]
ABLATION = {
    setting.name: setting
    for setting in (
        Setting("chunk", Count | None, None, "Number of variants scored at once; None: as many as fit in free memory."),
        Setting("precision", Precision, "auto", PRECISION),
        Setting(
            "compile", bool, False, "Whether the forward is compiled, which is faster for many variants of one shape."
        ),
    )
}
"""Settings of all methods and metrics that score variants."""


class Variants(Protocol):
    """Variants of images in a flat list: `owner` [V] is the image of each variant.

    A type that changes the model, and not only its input, has a method `around(part)`: a context for the forward pass
    of that part, which is never compiled. A type that changes tokens between blocks has `begin`, the block that its
    tokens enter, and a method `edit(part, layer, tokens)` that returns the tokens after a block.
    """

    @property
    def owner(self) -> Tensor:
        """The image [V] of each variant."""

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The tokens that enter block 0 for a part of the list, and their positions [n,k] if some were dropped."""


@dataclass(frozen=True)
class TokenSubsets:
    """Variants of images: image owner[v] with only the patches keep[v] and all prefix tokens.

    Args:
        owner: The image [V] of each variant.
        keep: The patches [V,k] that are kept.
    """

    owner: Tensor
    keep: Tensor

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The kept tokens, and their positions."""
        vit.check_droppable()
        owner, keep = _there(self.owner[part], embedded), _there(self.keep[part], embedded)
        return vit.gather(embedded, keep, owner), keep


@dataclass(frozen=True)
class PixelMasks:
    """Variants of images: image owner[v] where mask v is 1, and the fill where it is 0.

    Args:
        owner: The image [V] of each variant.
        masks: Masks [V,h,w] at patch or pixel resolution, with the axes of the model's grid.
        fill: Fills [B,C,H,W], one per image, or an imputation.
    """

    owner: Tensor
    masks: Tensor
    fill: Filling

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The tokens of the masked images."""
        owner = _there(self.owner[part], images)
        masks = self.masks[part].to(images, non_blocking=True)[:, None]
        if tuple(masks.shape[2:]) != vit.geometry.size:
            extent = vit.extent if tuple(masks.shape[2:]) == vit.grid else None
            masks = to_pixels(masks, vit.geometry.size, extent, "nearest")
        return vit.embed(painted(images, self.fill, owner, vit.as_input(masks))), None


@dataclass(frozen=True)
class RankRanges:
    """Variants of images: image owner[v] with the fill where its rank [B,H,W] is in [begin[v], end[v]).

    Masks are computed inside the chunk.
    """

    owner: Tensor
    begin: Tensor
    end: Tensor
    ranks: Tensor
    fill: Filling

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The tokens of the images with a range of ranks replaced."""
        owner = _there(self.owner[part], images)
        ranks = self.ranks[owner]
        begin, end = (_there(t[part], images).view(-1, *[1] * (ranks.ndim - 1)) for t in (self.begin, self.end))
        shown = (ranks < begin) | (ranks >= end)
        return vit.embed(painted(images, self.fill, owner, vit.as_input(shown[:, None]))), None

    def in_half_precision(self) -> RankRanges:
        """The same variants with a fill in bfloat16, for an embedding in bfloat16."""
        fill = self.fill.bfloat16() if isinstance(self.fill, Tensor) else self.fill
        return replace(self, ranks=self.ranks.int(), fill=fill)


@dataclass(frozen=True)
class Rendered:
    """Variants of images, computed by a function that returns the images [n,C,H,W] of a part of the list."""

    owner: Tensor
    render: Callable[[slice], Tensor]

    def tokens(self, vit: Anatomy, images: Tensor, embedded: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """The tokens of the rendered images."""
        return vit.embed(self.render(part)), None


@dataclass(frozen=True)
class Ablation:
    """Scores variants of images with a chunk size (None: from free memory), precision and compilation.

    Watchers of this thread (`progress.watch`) are notified of every chunk and can stop between chunks.
    """

    vit: Anatomy
    images: Tensor
    chunk: int | None = None
    precision: Precision = "auto"
    compile: bool = False
    fine: bool = False
    """Whether the readout is in float32 even if the blocks are in bfloat16, to separate close classes."""

    def logits(self, variants: Variants | Sequence[Variants]) -> Tensor:
        """Logits [V,C] of all variants in float32, or float64 for a float64 model."""
        lists = list(variants) if isinstance(variants, Sequence) else [variants]
        total = sum(len(v.owner) for v in lists)
        out: Tensor | None = None
        done, watch = 0, current_watcher()
        watch.begin(total)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            embedder = self.vit.view(products=True) if self._bf16 else self.vit
            classifier = self.vit.view(torch.bfloat16) if self._bf16 else self.vit
            for vit in dict.fromkeys((self.vit, embedder, classifier)):
                stack.enter_context(vit.steady())
            stack.enter_context(self._cast())
            embedded = embedder.embed(self.images)
            embedded = embedded.bfloat16() if self._bf16 else embedded
            for part in lists:
                for begin, stop, logits in self._chunks(part, embedded, embedder, classifier):
                    if out is None:
                        kind = torch.float64 if self.vit.dtype == torch.float64 else torch.float32
                        out = torch.empty(total, logits.shape[1], device=logits.device, dtype=kind)
                    out[done + begin : done + stop] = logits
                    watch.advance(stop - begin)
                done += len(part.owner)
        return out if out is not None else self.images.new_empty(0, self.vit.classes)

    def scores(self, variants: Variants | Sequence[Variants], targets: Targets, score: Score) -> Tensor:
        """Scores [V,T] of all variants and classes; several classes need no additional forward passes."""
        lists = list(variants) if isinstance(variants, Sequence) else [variants]
        owner = torch.cat([v.owner.cpu() for v in lists])
        return target_scores(self.logits(lists), targets[owner], score, self.vit.outputs)

    def _chunks(
        self, variants: Variants, embedded: Tensor, embedder: Anatomy, classifier: Anatomy
    ) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, stop, logits) of each chunk; if memory runs out, a chunk is halved and tried again."""
        size = self.chunk or free_chunk(self.vit)
        begin, total = 0, len(variants.owner)
        around, images = getattr(variants, "around", None), self.images
        if self._bf16 and isinstance(variants, RankRanges):
            variants, images = variants.in_half_precision(), images.bfloat16()
        fine = self.fine and self._bf16 and self.vit.depth > 0
        first = self._bf16 and classifier.reads_first and around is None
        forward: Forward = _first_row if first else _blocks
        forward = _compile_forward(classifier, forward) if self.compile and around is None else forward
        while begin < total:
            current_watcher().check()
            stop = min(begin + size, total)
            try:
                tokens, positions = variants.tokens(embedder, images, embedded, slice(begin, stop))
                with self._in_bf16(), contextlib.nullcontext() if around is None else around(slice(begin, stop)):
                    tokens = tokens.bfloat16() if self._bf16 else tokens
                    if not hasattr(variants, "edit"):
                        logits = forward(classifier, tokens, positions)
                        logits = logits if fine else classifier.readout(logits, None if first else positions)
                    else:
                        logits = _forward_with_edits(classifier, tokens, variants, slice(begin, stop))
                if fine:
                    with torch.autocast(self.images.device.type, enabled=False):
                        logits = self.vit.readout(logits.float(), positions)
            except (torch.OutOfMemoryError, MemoryError):
                if size == 1:
                    raise PatchlightError("not even one variant fits into memory; use a smaller model") from None
                size = max(1, size // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            yield begin, stop, logits
            begin = stop

    @property
    def chosen(self) -> Decided:
        """The precision, with `auto` resolved."""
        return chosen(self.precision, self.images.device, self.images.dtype)

    @property
    def rounds(self) -> bool:
        """Whether the computation has less than the model's precision."""
        return self.chosen != "full"

    @property
    def _bf16(self) -> bool:
        """Whether blocks and head are cast to bfloat16; a model that cannot be cast uses autocast."""
        return self.chosen == "bf16" and self.vit.castable

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.chosen == "bf16":
            return torch.autocast(self.images.device.type, torch.bfloat16)
        return tf32() if self.chosen == "tf32" else contextlib.nullcontext()

    def _in_bf16(self) -> contextlib.AbstractContextManager[Any]:
        """Context without autocast for weights and tokens that are already in bfloat16."""
        if self._bf16:
            return torch.autocast(self.images.device.type, enabled=False)
        return contextlib.nullcontext()


def _there(indices: Tensor, like: Tensor) -> Tensor:
    """Move indices to the device of `like`, without waiting for its pending work."""
    return indices.to(like.device, non_blocking=True)


Forward = Callable[[Anatomy, Tensor, Tensor | None], Tensor]


def _blocks(vit: Anatomy, tokens: Tensor, positions: Tensor | None) -> Tensor:
    for index in range(vit.depth):
        tokens = vit.block(index, vit.merge(index, tokens), positions)
    return tokens


def _forward_with_edits(vit: Anatomy, tokens: Tensor, variants: Any, part: slice) -> Tensor:
    for index in range(variants.begin, vit.depth):
        tokens = variants.edit(part, index, vit.block(index, tokens))
    return vit.readout(tokens)


def _first_row(vit: Anatomy, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The output [B,1,D] of the last block at the first token, for a classifier that reads no other."""
    for index in range(vit.depth - 1):
        tokens = vit.block(index, tokens, positions)
    return vit.first_row(tokens)


def _compile_forward(vit: Anatomy, forward: Forward) -> Forward:
    """The compiled forward, cached for the lifetime of the anatomy.

    Models with operations between their blocks are not compiled, because their own forward is intercepted.
    """
    if vit.several_states or any(vit.changes(index) for index in range(1, vit.depth)):
        return forward
    compiled = _COMPILED.setdefault(vit, {})
    if forward not in compiled:
        compiled[forward] = torch.compile(forward, dynamic=False)
    return compiled[forward]


_COMPILED: WeakKeyDictionary[Anatomy, dict[Forward, Forward]] = WeakKeyDictionary()


def free_chunk(vit: Anatomy) -> int:
    """The default chunk size: a quarter of the free CUDA memory at about 24 token tensors per variant.

    On a CPU it is 64, or less if the tokens would take more than 1 GB, as for large bags.
    """
    if vit.device.type != "cuda":
        return max(1, min(64, 2**28 // (vit.tokens * max(vit.width, 1))))
    return int(max(1, min(1024, 0.25 * free_memory(vit.device) / (24 * 4 * vit.tokens * vit.width))))
