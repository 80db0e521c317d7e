"""Anatomy of timm's hierarchical transformers: Swin, SwinV2, PVTv2 and Twins, opened behind one of their stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy
from patchlight.anatomy.timm import described
from patchlight.errors import PatchlightError


class HierarchicalAnatomy(Anatomy):
    """A network of stages, each coarser than the one before: `embed` runs up to the end of one, `readout` the rest.

    `stage` (0-based, negative from the end; the second-to-last by default) chooses it. Its feature map is the tokens
    [B,h*w,D] and its cells are the grid. There are no blocks to look into: attention is windowed or pooled, and each
    stage merges the patches of the one before.
    """

    library = "timm"
    hierarchical = True
    can_drop = "each of its stages merges patches of a whole grid"

    def __init__(self, model: Any, stage: int, **about: Any) -> None:
        count = len(model.feature_info)
        if not -count <= stage < count:
            raise PatchlightError(f"there is no stage {stage}; {about['name']} has stages 0 to {count - 1}")
        self.stage, self.stages = stage % count, count
        step = model.feature_info[self.stage]["reduction"]
        rows, columns = (-(-side // step) for side in about["preprocess"].size)
        super().__init__(
            model, grid=(rows, columns), extent=(rows * step, columns * step), prefix=0, pooling="avg", **about
        )

    @property
    def _net(self) -> Any:
        return self.net

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        for i in range(self.stage + 1):
            images = self._stage(i, images)
        return images.flatten(2).transpose(1, 2)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(f"{self.name} has no block {index}: it is opened behind stage {self.stage}")

    def features(self, tokens: Tensor) -> Tensor:
        last = tokens.transpose(1, 2).unflatten(2, self.grid)
        for i in range(self.stage + 1, self.stages):
            last = self._stage(i, last)
        return self._pooled(last)

    def classify(self, features: Tensor) -> Tensor:
        head = self._net.head
        return cast(Tensor, getattr(head, "fc", head)(features))

    @abstractmethod
    def _stage(self, i: int, x: Tensor) -> Tensor:
        """From feature map to feature map, channels first; stage 0 from the image."""

    @abstractmethod
    def _pooled(self, x: Tensor) -> Tensor:
        """What the classifier reads of the last feature map."""


class SwinAnatomy(HierarchicalAnatomy):
    """Swin and SwinV2."""

    def _stage(self, i: int, x: Tensor) -> Tensor:
        x = self._net.patch_embed(x) if i == 0 else x.permute(0, 2, 3, 1)
        return cast(Tensor, self._net.layers[i](x).permute(0, 3, 1, 2))

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._net.forward_head(self._net.norm(x.permute(0, 2, 3, 1)), pre_logits=True))


class PvtAnatomy(HierarchicalAnatomy):
    """PVTv2."""

    def _stage(self, i: int, x: Tensor) -> Tensor:
        return cast(Tensor, self._net.stages[i](self._net.patch_embed(x) if i == 0 else x))

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._net.forward_head(x, pre_logits=True))


class TwinsAnatomy(HierarchicalAnatomy):
    """Twins."""

    def _stage(self, i: int, x: Tensor) -> Tensor:
        x, size = self._net.patch_embeds[i](x.contiguous())
        x = self._net.pos_drops[i](x)
        for j, block in enumerate(self._net.blocks[i]):
            x = block(x, size)
            x = self._net.pos_block[i](x, size) if j == 0 else x
        return cast(Tensor, x.transpose(1, 2).unflatten(2, size))

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._net.forward_head(self._net.norm(x.flatten(2).transpose(1, 2)), pre_logits=True))


def read_hierarchical(
    model: Any, stage: int = -2, name: str | None = None, labels: Sequence[str] | None = None, **about: Any
) -> Anatomy | None:
    """The anatomy of one of timm's hierarchical transformers, or None where it is not one."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2
    from timm.models.twins import Twins

    kinds: tuple[tuple[type, type[HierarchicalAnatomy], Callable[[Any], Any]], ...] = (
        (SwinTransformer, SwinAnatomy, lambda net: net.layers[-1].blocks[0]),
        (SwinTransformerV2, SwinAnatomy, lambda net: net.layers[-1].blocks[0]),
        (PyramidVisionTransformerV2, PvtAnatomy, lambda net: net.stages[-1].blocks[0]),
        (Twins, TwinsAnatomy, lambda net: net.blocks[-1][0]),
    )
    for cls, anatomy, last in kinds:
        if isinstance(model, cls):
            about = described(model, name, labels, about)
            opened = anatomy(model, stage, heads=int(last(model).attn.num_heads), **about)
            opened.assumed_labels = labels is None
            return opened
    return None
