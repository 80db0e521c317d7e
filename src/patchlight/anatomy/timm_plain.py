"""Anatomy of timm's other plain transformers, which differ from a ViT in one respect each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.families import register_family
from patchlight.anatomy.intercepting import BlockCall
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.timm import TimmAnatomy

_GRID = "neighbouring patches interact in its {}, so the grid must be complete"


class OtherAnatomy(TimmAnatomy):
    """A transformer with rotary or relative positions, or with blocks of which only the norms are read."""

    plain_ends = False
    norms = ("norm1", "norm2")
    """The norms before attention and before the MLP."""
    beside = ""
    """What its blocks do beside attention and MLP; "" where their parts are read like those of a ViT."""

    def parts(self, index: int) -> Parts:
        if not self.beside:
            return super().parts(index)
        norms = [getattr(self.blocks[index], name) for name in self.norms]
        first, second = (norm.norm if isinstance(norm, _Shown) else norm for norm in norms)
        return Parts(first, second, beyond=self.beside)


class EncoderAnatomy(OtherAnatomy):
    """The image encoders of Qwen3 and DeepSeek with a classifier; with a projector, they merge neighbouring patches."""

    def blank_of(self, tokens: Tensor) -> Tensor | None:
        """Behind its blocks the patches are put on the grid of the image: fewer are one row of patches."""
        if tokens.shape[1] == self.tokens:
            return None
        height, width = (side // cells for side, cells in zip(self.extent, self.grid, strict=True))
        return tokens.new_zeros(len(tokens), self.channels, height, width * tokens.shape[1])

    def why_not_drop(self, tokens: Tensor) -> str | None:
        names = ("merger", "aligner")
        merges = any(getattr(self.inner, name, None) is not None for name in names)
        return _GRID.format("projector") if merges else super().why_not_drop(tokens)


class GemmaAnatomy(OtherAnatomy):
    """Gemma 4's image encoder with a classifier: norms before and after attention and MLP."""

    norms = ("norm1", "norm3")
    beside = "norms also follow its attention and MLP"

    def projection(self) -> nn.Module | None:
        return cast(nn.Module, self.inner.patch_embed.input_proj)


class SamAnatomy(OtherAnatomy):
    """SAM's image encoder with a classifier: most blocks attend within windows; a convolutional neck follows."""

    can_drop = _GRID.format("windows")
    can_rule = "its attention includes a position bias that depends on the queries"
    can_attend = "its blocks attend within windows, and fold heads into the batch"
    beside = "its attention is within windows"


class LateAnatomy(OtherAnatomy):
    """A plain transformer whose CLS token joins the patches late.

    Here it is among the tokens from the start, and earlier blocks leave it unchanged.
    """

    beside = "its CLS token joins the patches late"

    @property
    def joins(self) -> int:
        """The first block that has a CLS token."""
        return int(getattr(self.inner, "local_up_to_layer", len(self.inner.blocks)))

    def embed(self, images: Tensor) -> Tensor:
        return torch.cat([self.inner.cls_token.expand(len(images), -1, -1), super().embed(images)], 1)

    def changes(self, index: int) -> bool:
        return False

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        return tokens

    def watch(self) -> None:
        block: Any
        for block in self.blocks[: self.joins]:
            block.norm1, block.norm2 = _Shown(block.norm1), _Shown(block.norm2)
        super().watch()

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if index < self.joins:
            return torch.cat([tokens[:, :1], super().block(index, tokens[:, 1:])], 1)
        return super().block(index, tokens)


class _Shown(nn.Module):
    """A norm of a twin that shows all tokens to taps, although the first is not part of its block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.training = norm, False

    def forward(self, patches: Tensor) -> Tensor:
        return cast(Tensor, self.norm(F.pad(patches, (0, 0, 1, 0)))[:, 1:])


class CaitAnatomy(LateAnatomy):
    """CaiT: attention between the patches with talking heads, then two layers in which CLS alone attends.

    The blocks of these layers take the patches and return CLS.
    """

    can_rule = "its attention is mixed over heads after the softmax"
    lists = ("blocks", "blocks_token_only")

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if index < self.joins:
            return super().block(index, tokens)
        cls = self.blocks[index](tokens[:, 1:], tokens[:, :1])
        return torch.cat([cls, tokens[:, 1:]], 1)

    def answer(self, call: BlockCall, tokens: Tensor) -> Any:
        return tokens[:, :1]

    def check_constants(self, calls: Any) -> None:
        """Its last blocks get CLS beside their tokens."""

    def why_not_drop(self, tokens: Tensor) -> str | None:
        """Its heads are mixed with a bias, so hidden keys are not the same as absent ones; absent ones are meant."""
        return None


class XcitAnatomy(LateAnatomy):
    """XCiT: attention between channels and convolutions between patches, then two layers in which CLS attends."""

    can_drop = _GRID.format("convolutions")
    can_rule = "its blocks attend between channels, and have convolutions"
    can_attend = "its blocks attend between channels, not between tokens"
    lists = ("blocks", "cls_attn_blocks")

    def projection(self) -> nn.Module | None:
        return None


class ConvitAnatomy(LateAnatomy):
    """ConViT: gated positional attention between the patches, then blocks of plain attention with CLS."""

    can_drop = _GRID.format("positional attention")
    can_rule = "its attention is a sum of two, divided by its rows"
    can_attend = "its attention is a gated sum of two, one of which reads only positions"


_KINDS: dict[str, type[TimmAnatomy]] = {
    **dict.fromkeys(("VisionTransformerRelPos", "NaFlexVit"), OtherAnatomy),
    **dict.fromkeys(("Qwen3VitClassifier", "DeepseekVitClassifier"), EncoderAnatomy),
    "Gemma4VitClassifier": GemmaAnatomy,
    "VisionTransformerSAM": SamAnatomy,
    "Cait": CaitAnatomy,
    "Xcit": XcitAnatomy,
    "ConVit": ConvitAnatomy,
}
"""By the name of timm's class, which is imported only when there is a model of it."""


@register_family("timm-relatives", package="timm")
def read_relatives(model: nn.Module, **overrides: Any) -> Anatomy | None:
    """The anatomy of one of timm's other plain transformers, or None."""
    kinds = (_KINDS.get(cls.__name__) for cls in type(model).__mro__ if cls.__module__.startswith("timm."))
    kind = next((kind for kind in kinds if kind is not None), None)
    return None if kind is None else kind(model, **overrides)
