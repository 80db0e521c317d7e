"""Anatomy of timm's hierarchical transformers: Swin, SwinV2, PVTv2 and Twins, opened behind one of their stages."""

from __future__ import annotations

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

    def __init__(
        self,
        model: Any,
        stages: Sequence[Callable[[Tensor], Tensor]],
        head: Callable[[Tensor], Tensor],
        stage: int,
        **about: Any,
    ) -> None:
        count = len(stages)
        if not -count <= stage < count:
            raise PatchlightError(f"there is no stage {stage}; {about['name']} has stages 0 to {count - 1}")
        self.stage, self._stages, self._head = stage % count, stages, head
        step = model.feature_info[self.stage]["reduction"]
        grid = tuple(-(-side // step) for side in about["preprocess"].size)
        super().__init__(model, grid=cast("tuple[int, int]", grid), prefix=0, pooling="avg", **about)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        for stage in self._stages[: self.stage + 1]:
            images = stage(images)
        return images.flatten(2).transpose(1, 2)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(f"{self.name} has no block {index}: it is opened behind stage {self.stage}")

    def readout(self, tokens: Tensor) -> Tensor:
        features = tokens.transpose(1, 2).unflatten(2, self.grid)
        for stage in self._stages[self.stage + 1 :]:
            features = stage(features)
        return self._head(features)


def read_hierarchical(
    model: Any, stage: int = -2, name: str | None = None, labels: Sequence[str] | None = None, **about: Any
) -> Anatomy | None:
    """The anatomy of one of timm's hierarchical transformers, or None where it is not one."""
    from timm.models.pvt_v2 import PyramidVisionTransformerV2
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2
    from timm.models.twins import Twins

    kinds = ((SwinTransformer, _swin), (SwinTransformerV2, _swin), (PyramidVisionTransformerV2, _pvt), (Twins, _twins))
    for cls, parts in kinds:
        if isinstance(model, cls):
            stages, head, heads = parts(model)
            about = described(model, name, labels, about)
            return HierarchicalAnatomy(model, stages, head, stage, heads=heads, **about)
    return None


Opened = tuple[list[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor], int]
"""Stages from feature map to feature map, channels first; the head on the last of them; heads of the last stage."""


def _swin(net: Any) -> Opened:
    def stage(i: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = net.patch_embed(x) if i == 0 else x.permute(0, 2, 3, 1)
            return cast(Tensor, net.layers[i](x).permute(0, 3, 1, 2))

        return run

    def head(x: Tensor) -> Tensor:
        return cast(Tensor, net.forward_head(net.norm(x.permute(0, 2, 3, 1))))

    return [stage(i) for i in range(len(net.layers))], head, int(net.layers[-1].blocks[0].attn.num_heads)


def _pvt(net: Any) -> Opened:
    def stage(i: int) -> Callable[[Tensor], Tensor]:
        return lambda x: cast(Tensor, net.stages[i](net.patch_embed(x) if i == 0 else x))

    return [stage(i) for i in range(len(net.stages))], net.forward_head, int(net.stages[-1].blocks[0].attn.num_heads)


def _twins(net: Any) -> Opened:
    def stage(i: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x, size = net.patch_embeds[i](x.contiguous())
            x = net.pos_drops[i](x)
            for j, block in enumerate(net.blocks[i]):
                x = block(x, size)
                x = net.pos_block[i](x, size) if j == 0 else x
            return cast(Tensor, x.transpose(1, 2).unflatten(2, size))

        return run

    def head(x: Tensor) -> Tensor:
        return cast(Tensor, net.forward_head(net.norm(x.flatten(2).transpose(1, 2))))

    return [stage(i) for i in range(len(net.blocks))], head, int(net.blocks[-1][0].attn.num_heads)
