"""Anatomy of timm's other plain transformers, each of which differs from a ViT in one respect."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.families import register_family
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.timm import EvaAnatomy, TimmAnatomy, gathered_bias, kept_tokens

_GRID = "neighbouring patches interact in its {}, so the grid must be complete"


class RelPosAnatomy(TimmAnatomy):
    """ViT with relative positions: a bias per attention, or for all, gathered per sample when tokens are dropped."""

    plain_ends = False

    def embed(self, images: Tensor) -> Tensor:
        net = self.inner
        tokens: Tensor = net.patch_embed(images)
        return tokens if net.cls_token is None else _joined(net.cls_token, tokens)

    def watch(self) -> None:
        super().watch()
        for module in self.net.modules():
            if hasattr(module, "get_bias"):
                module.__class__ = _gathering(cast(Any, type(module)))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        with kept_tokens(None if positions is None else self.places(positions)):
            shared = self.inner.shared_rel_pos
            bias = None if shared is None else shared.get_bias()
            return cast(Tensor, self.blocks[index](tokens, shared_rel_pos=bias))


@cache
def _gathering(kind: Any) -> Any:
    """A subclass of this bias type that is restricted to the tokens kept."""
    return type(kind.__name__, (kind,), {"get_bias": lambda self: gathered_bias(lambda: kind.get_bias(self))})


class NaFlexAnatomy(EvaAnatomy):
    """NaFlexViT at one size of image: its `embeds` projects patches, and adds positions and prefix tokens."""

    plain_ends = False

    @classmethod
    def stem(cls, model: Any) -> Any:
        return model.embeds

    def embed(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.inner.norm_pre(self.inner.embeds(images)[0]))

    def projection(self) -> nn.Module | None:
        return cast(nn.Module, self.inner.embeds.proj)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        rope = self.rope(index, positions)
        return cast(Tensor, self.blocks[index](tokens, **({} if rope is None else {"rope": rope})))


class EncoderAnatomy(EvaAnatomy):
    """The image encoders of Qwen3 and DeepSeek with a classifier: rotary positions, all patches averaged.

    An encoder with its projector merges neighbouring patches, and its tokens are averaged.
    """

    plain_ends = False

    def __init__(self, model: Any, **about: Any) -> None:
        super().__init__(model, **about)
        if _projector(model.encoder) is not None:
            self.can_drop = _GRID.format("projector")

    @staticmethod
    def body(model: Any) -> Any:
        return model.encoder

    def embed(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.inner._pos_embed(self.inner.patch_embed(images))[0])

    def normed(self, tokens: Tensor) -> Tensor:
        tokens = self.inner.norm(tokens) if hasattr(self.inner, "norm") else tokens
        projector = _projector(self.inner)
        return tokens if projector is None else projector(tokens.unflatten(1, self.grid))


def _projector(encoder: Any) -> Any:
    return getattr(encoder, "merger", None) or getattr(encoder, "aligner", None)


class GemmaAnatomy(TimmAnatomy):
    """Gemma 4's image encoder with a classifier: rotary positions, norms before and after attention and MLP."""

    plain_ends = False

    @staticmethod
    def body(model: Any) -> Any:
        return model.encoder

    @classmethod
    def stem(cls, model: Any) -> Any:
        return _Cells(*model.get_patch_size())

    def embed(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.inner.patch_embed(images)[0])

    def projection(self) -> nn.Module | None:
        return cast(nn.Module, self.inner.patch_embed.input_proj)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        cells = torch.arange(self.tokens, device=tokens.device)[None] if positions is None else positions
        places = torch.stack([cells % self.grid[1], cells // self.grid[1]], -1)
        return cast(Tensor, self.blocks[index](tokens, *self.inner.rotary_emb(tokens, places)))

    def normed(self, tokens: Tensor) -> Tensor:
        return tokens

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        return Parts(block.norm1, block.norm3, beyond="norms also follow its attention and MLP")


class SamAnatomy(TimmAnatomy):
    """SAM's image encoder with a classifier: most blocks attend within windows; a convolutional neck follows."""

    plain_ends = False
    can_drop = _GRID.format("windows")
    can_rule = "its attention includes a position bias that depends on the queries"
    can_attend = "its blocks attend within windows, and fold heads into the batch"

    def embed(self, images: Tensor) -> Tensor:
        from timm.layers.pos_embed import resample_abs_pos_embed_nhwc

        net = self.inner
        cells = net.patch_embed(images)
        if net.pos_embed is not None:
            cells = cells + resample_abs_pos_embed_nhwc(net.pos_embed, cells.shape[1:3])
        return cast(Tensor, net.norm_pre(cells).flatten(1, 2))

    def watch(self) -> None:
        for block in self.inner.blocks:
            block.norm1 = _Flat(block.norm1)
        super().watch()

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.blocks[index](tokens.unflatten(1, self.grid)).flatten(1, 2))

    def normed(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.inner.neck(tokens.unflatten(1, self.grid).permute(0, 3, 1, 2)))

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        return Parts(block.norm1.norm, block.norm2, beyond="its attention is within windows")


class _Flat(nn.Module):
    """A norm of a twin that shows cells [B,h,w,D] to taps as rows of tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.training = norm, False

    def forward(self, cells: Tensor) -> Tensor:
        return cast(Tensor, self.norm(cells.flatten(1, 2)).view_as(cells))


class LateAnatomy(TimmAnatomy):
    """A plain transformer whose CLS token joins the patches late.

    Here it is among the tokens from the start, and earlier blocks leave it unchanged.
    """

    plain_ends = False

    @property
    def joins(self) -> int:
        """The first block that has a CLS token."""
        return len(self.inner.blocks)

    def embed(self, images: Tensor) -> Tensor:
        return _joined(self.inner.cls_token, self._patches(images))

    def _patches(self, images: Tensor) -> Tensor:
        """The embedded patches [B,N-1,D]."""
        return cast(Tensor, self.inner.patch_embed(images) + self.inner.pos_embed)

    def watch(self) -> None:
        block: Any
        for block in self.blocks[: self.joins]:
            block.norm1, block.norm2 = _Beside(block.norm1), _Beside(block.norm2)
        super().watch()

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if index < self.joins:
            return torch.cat([tokens[:, :1], self._alone(self.blocks[index], tokens[:, 1:])], 1)
        return self._together(self.blocks[index], tokens)

    def _alone(self, block: Any, patches: Tensor) -> Tensor:
        """Run a block without CLS on the patches."""
        return cast(Tensor, block(patches))

    def _together(self, block: Any, tokens: Tensor) -> Tensor:
        """Run a block with CLS on all tokens."""
        return cast(Tensor, block(tokens))

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        early = index < self.joins
        norms = (block.norm1.norm, block.norm2.norm) if early else (block.norm1, block.norm2)
        return Parts(*norms, beyond="its CLS token joins the patches late")


class _Beside(nn.Module):
    """A norm of a twin that shows all tokens to taps, although the first is not part of its block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.training = norm, False

    def forward(self, patches: Tensor) -> Tensor:
        return cast(Tensor, self.norm(F.pad(patches, (0, 0, 1, 0)))[:, 1:])


class CaitAnatomy(LateAnatomy):
    """CaiT: attention between the patches with talking heads, then two layers in which CLS alone attends."""

    can_rule = "its attention is mixed over heads after the softmax"

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [*self.inner.blocks, *self.inner.blocks_token_only]

    def _together(self, block: Any, tokens: Tensor) -> Tensor:
        return torch.cat([block(tokens[:, 1:], tokens[:, :1]), tokens[:, 1:]], 1)


class XcitAnatomy(LateAnatomy):
    """XCiT: attention between channels and convolutions between patches, then two layers in which CLS attends."""

    can_drop = _GRID.format("convolutions")
    can_rule = "its blocks attend between channels, and have convolutions"
    can_attend = "its blocks attend between channels, not between tokens"

    @classmethod
    def stem(cls, model: Any) -> Any:
        return _Cells(model.patch_embed.patch_size, model.patch_embed.patch_size)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [*self.inner.blocks, *self.inner.cls_attn_blocks]

    def _patches(self, images: Tensor) -> Tensor:
        net = self.inner
        patches, size = net.patch_embed(images)
        if net.pos_embed is not None:
            patches = patches + net.pos_embed(len(patches), *size).flatten(2).mT
        return cast(Tensor, patches)

    def projection(self) -> nn.Module | None:
        return None

    def _alone(self, block: Any, patches: Tensor) -> Tensor:
        return cast(Tensor, block(patches, *self.grid))


class ConvitAnatomy(LateAnatomy):
    """ConViT: gated positional attention between the patches, then blocks of plain attention with CLS."""

    can_drop = _GRID.format("positional attention")
    can_rule = "its attention is a sum of two, divided by its rows"
    can_attend = "its attention is a gated sum of two, one of which reads only positions"

    @property
    def joins(self) -> int:
        return int(self.inner.local_up_to_layer)

    def _patches(self, images: Tensor) -> Tensor:
        patches: Tensor = self.inner.patch_embed(images)
        return patches + self.inner.pos_embed if self.inner.use_pos_embed else patches


class _Cells:
    """Adjacent patches of rows x columns pixels: the grid of a timm patch embedding."""

    def __init__(self, rows: int, columns: int) -> None:
        self._cell = rows, columns

    def feat_ratio(self, as_scalar: bool = False) -> tuple[int, int]:
        return self._cell

    def dynamic_feat_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self._cell[0], size[1] // self._cell[1]


def _joined(token: Tensor, patches: Tensor) -> Tensor:
    return torch.cat([token.expand(len(patches), -1, -1), patches], 1)


_KINDS: dict[str, type[TimmAnatomy]] = {
    "VisionTransformerRelPos": RelPosAnatomy,
    "NaFlexVit": NaFlexAnatomy,
    "Qwen3VitClassifier": EncoderAnatomy,
    "DeepseekVitClassifier": EncoderAnatomy,
    "Gemma4VitClassifier": GemmaAnatomy,
    "VisionTransformerSAM": SamAnatomy,
    "Cait": CaitAnatomy,
    "Xcit": XcitAnatomy,
    "ConVit": ConvitAnatomy,
}
"""By the name of timm's class, which is imported only when there is a model of it."""


@register_family("timm-relatives", package="timm")
def read_relatives(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of one of timm's other plain transformers, or None."""
    kinds = (_KINDS.get(cls.__name__) for cls in type(model).__mro__ if cls.__module__.startswith("timm."))
    kind = next((kind for kind in kinds if kind is not None), None)
    return None if kind is None else kind(model, **about)
