"""Anatomy of timm's hierarchical transformers: Swin, SwinV2, PVTv2 and Twins, opened at one of their stages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from patchlight.anatomy.contract import Parts, linear, stacked
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.timm import described
from patchlight.anatomy.watching import watch_reach
from patchlight.anatomy.windows import Bins, Merging, Pooled, Reach, Windows
from patchlight.core.errors import PatchlightError


class HierarchicalAnatomy(Anatomy):
    """A network of stages, each coarser than the one before, opened before the blocks of one of them.

    `stage` (0-based, negative from the end; the second-to-last by default) selects it. The tokens are on the grid of
    that stage; `block` runs on the grid of its own stage, and `merge` combines tokens where a later stage begins. Rows
    are pulled through all stages, so maps are on the grid of the selected stage. Feature-map methods read the output of
    the stage.
    """

    library = "timm"
    hierarchical = True
    can_drop = "each of its stages merges patches of a complete grid"
    kernel, padding = 2, 0
    """Tokens merged into one along a side, and how far the first reaches over the edge."""

    def __init__(self, model: Any, stage: int, **about: Any) -> None:
        count = len(model.feature_info)
        if not -count <= stage < count:
            raise PatchlightError(f"stage {stage} does not exist; {about['name']} has stages 0 to {count - 1}")
        self.stage, self.stages = stage % count, count
        step = model.feature_info[self.stage]["reduction"]
        rows, columns = (-(-side // step) for side in about["preprocess"].size)
        super().__init__(
            model, grid=(rows, columns), extent=(rows * step, columns * step), prefix=0, pooling="avg", **about
        )

    @property
    def _grids(self) -> list[tuple[int, int]]:
        """The grids of the stages, from the one it is opened at."""
        steps = [2**i for i in range(self.stages - self.stage)]
        return [(-(-self.grid[0] // step), -(-self.grid[1] // step)) for step in steps]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self._blocks(stage)[j] for stage, j in self._order]

    @property
    def _order(self) -> list[tuple[int, int]]:
        """The stage of each block, and its index there."""
        return [(i, j) for i in range(self.stage, self.stages) for j in range(len(self._blocks(i)))]

    def grid_of(self, index: int) -> tuple[int, int]:
        """The grid on which a block runs."""
        return self._grids[self._order[index][0] - self.stage]

    @property
    def stage_end(self) -> int:
        return len(self._blocks(self.stage))

    def embed(self, images: Tensor) -> Tensor:
        for i in range(self.stage):
            images = self._stage(i, images)
        return self._merged(self.stage, images).flatten(2).transpose(1, 2)

    def _begins(self, index: int) -> bool:
        """Whether a block is the first of a stage after the one that the model is opened at."""
        return 0 < index < self.depth and self._order[index][1] == 0

    def merge(self, index: int, tokens: Tensor) -> Tensor:
        if not self._begins(index):
            return tokens
        fine = tokens.transpose(1, 2).unflatten(2, self.grid_of(index - 1))
        return self._merged(self._order[index][0], fine).flatten(2).transpose(1, 2)

    def merging(self, index: int) -> Merging | None:
        if not self._begins(index):
            return None
        return Merging(self.grid_of(index - 1), self.grid_of(index), self.kernel, 2, self.padding)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self._run(*self._order[index], tokens, self.grid_of(index))

    def width_of(self, index: int) -> int:
        return len(cast(Any, self.blocks[index]).norm1.weight)

    def members(self, index: int) -> list[nn.Module]:
        return [self.blocks[index], *self._between(*self._order[index], merges=self._begins(index))]

    def features(self, tokens: Tensor) -> Tensor:
        return self._pooled(tokens.transpose(1, 2).unflatten(2, self._grids[-1]))

    def classify(self, features: Tensor) -> Tensor:
        head = self.net.head
        return cast(Tensor, getattr(head, "fc", head)(features))

    @abstractmethod
    def _pooled(self, x: Tensor) -> Tensor:
        """The input of the classifier, from the last feature map (channels first)."""

    @property
    def tokens_read(self) -> int:
        return self._grids[-1][0] * self._grids[-1][1]

    def watch(self) -> None:
        super().watch()
        if any(weight.is_meta for weight in self.net.parameters()):  # a model without weights cannot be run
            return
        for index, block in enumerate(self.blocks):
            reach = self._reach(block, self.grid_of(index))
            if reach is not None:
                watch_reach(cast(Any, block).attn, reach, self._until(block))

    def _stage(self, i: int, x: Tensor) -> Tensor:
        """Run a stage from feature map to feature map (channels first); stage 0 starts from the image."""
        x = self._merged(i, x)
        size, x = (x.shape[2], x.shape[3]), x.flatten(2).transpose(1, 2)
        for j in range(len(self._blocks(i))):
            x = self._run(i, j, x, size)
        return cast(Tensor, x.transpose(1, 2).unflatten(2, size))

    @abstractmethod
    def _merged(self, i: int, x: Tensor) -> Tensor:
        """The feature map (channels first) that enters the blocks of a stage; for stage 0, from the image."""

    @abstractmethod
    def _blocks(self, i: int) -> Sequence[nn.Module]:
        """The blocks of a stage, each with its attention as `attn`."""

    @abstractmethod
    def _between(self, i: int, j: int, merges: bool) -> list[nn.Module]:
        """Modules that run with a block: the merging before it and what follows it."""

    @abstractmethod
    def _run(self, i: int, j: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """Run a block on tokens [B,h*w,D]."""

    def _until(self, block: Any) -> nn.Module | None:
        """The part from which on its attention runs on tokens in order; None if there is none."""
        return None

    @abstractmethod
    def _reach(self, block: Any, grid: tuple[int, int]) -> Reach | None:
        """Which tokens its attention connects; None for all with all."""


_WINDOWED = "its attention is within windows"


class SwinAnatomy(HierarchicalAnatomy):
    """Swin and SwinV2: attention within windows, shifted in every other block; 2 x 2 patches are merged."""

    def _merged(self, i: int, x: Tensor) -> Tensor:
        x = self.net.patch_embed(x) if i == 0 else x.permute(0, 2, 3, 1)
        return cast(Tensor, self.net.layers[i].downsample(x).permute(0, 3, 1, 2))

    def _blocks(self, i: int) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self.net.layers[i].blocks)

    def _between(self, i: int, j: int, merges: bool) -> list[nn.Module]:
        return [self.net.layers[i].downsample] if merges else []

    def _run(self, i: int, j: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        return cast(Tensor, self._blocks(i)[j](tokens.unflatten(1, grid)).flatten(1, 2))

    def _reach(self, block: Any, grid: tuple[int, int]) -> Reach:
        window, shift, like = tuple(block.window_size), tuple(block.shift_size), block.norm1.weight
        mask = block.attn_mask
        if getattr(block, "dynamic_mask", False):  # created for every image
            padded = [-(-side // size) * size for side, size in zip(grid, window, strict=True)]
            mask = block.get_attn_mask(like.new_zeros(1, *padded, 1))
        return Windows.of(grid, window, shift, None if mask is None else mask == 0, like.device)

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        attn, mlp = block.attn, block.mlp
        if hasattr(attn, "logit_scale"):
            return Parts(beyond=f"{_WINDOWED}, of normed queries and keys, and norms follow it and the MLP")
        return Parts(
            block.norm1,
            block.norm2,
            attn.proj,
            lambda: linear(attn.qkv).weight.chunk(3)[2],
            qkv=lambda: stacked(attn.qkv),
            fc1=mlp.fc1,
            activation=mlp.act,
            fc2=mlp.fc2,
            beyond=_WINDOWED,
        )

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net.forward_head(self.net.norm(x.permute(0, 2, 3, 1)), pre_logits=True))


class PvtAnatomy(HierarchicalAnatomy):
    """PVTv2: attention to pooled tokens; overlapping 3 x 3 patches are merged, and MLPs mix neighbours.

    The norm after the last block of a stage belongs to that block.
    """

    kernel, padding = 3, 1

    def _merged(self, i: int, x: Tensor) -> Tensor:
        merge = self.net.patch_embed if i == 0 else self.net.stages[i].downsample
        return cast(Tensor, merge(x).permute(0, 3, 1, 2))

    def _blocks(self, i: int) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self.net.stages[i].blocks)

    def _between(self, i: int, j: int, merges: bool) -> list[nn.Module]:
        stage = self.net.stages[i]
        return [*([stage.downsample] if merges else []), *([stage.norm] if j == len(self._blocks(i)) - 1 else [])]

    def _run(self, i: int, j: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = self._blocks(i)[j](tokens, grid)
        return cast(Tensor, self.net.stages[i].norm(tokens) if j == len(self._blocks(i)) - 1 else tokens)

    def _reach(self, block: Any, grid: tuple[int, int]) -> Reach | None:
        if block.attn.pool is None:
            return _pooled_keys(block.attn.sr, grid)
        side = int(block.attn.pool.output_size)
        return Pooled(Bins(grid, (side, side)))

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        return Parts(block.norm1, beyond="its attention is to pooled tokens, and its MLPs mix neighbouring tokens")

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net.forward_head(x, pre_logits=True))


class TwinsAnatomy(HierarchicalAnatomy):
    """Twins: attention within windows and, in every other block (in PCPVT in all), to pooled tokens.

    The convolution after the first block of a stage belongs to that block.
    """

    def _merged(self, i: int, x: Tensor) -> Tensor:
        x, size = self.net.patch_embeds[i](x.contiguous())
        return cast(Tensor, self.net.pos_drops[i](x).transpose(1, 2).unflatten(2, size))

    def _blocks(self, i: int) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self.net.blocks[i])

    def _between(self, i: int, j: int, merges: bool) -> list[nn.Module]:
        net = self.net
        return [*([net.patch_embeds[i]] if merges else []), *([net.pos_block[i]] if j == 0 else [])]

    def _run(self, i: int, j: int, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = self._blocks(i)[j](tokens, grid)
        return cast(Tensor, self.net.pos_block[i](tokens, grid) if j == 0 else tokens)

    def _reach(self, block: Any, grid: tuple[int, int]) -> Reach | None:
        window = getattr(block.attn, "ws", None)
        if window is None:
            return _pooled_keys(block.attn.sr, grid)
        return Windows.of(grid, (window, window), device=block.norm1.weight.device)

    def _until(self, block: Any) -> nn.Module | None:
        return cast(nn.Module, block.attn.proj)

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        beyond = "its attention is within windows or to pooled tokens, and every stage has a convolution"
        return Parts(block.norm1, beyond=beyond)

    def _pooled(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.net.forward_head(self.net.norm(x.flatten(2).transpose(1, 2)), pre_logits=True))


def _pooled_keys(reduction: nn.Conv2d | None, grid: tuple[int, int]) -> Reach | None:
    """The keys that a convolution of adjacent patches produces; None if there is no convolution."""
    if reduction is None:
        return None
    step = int(reduction.stride[0])
    return Pooled(Merging(grid, (grid[0] // step, grid[1] // step), step, step))


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
            return anatomy(model, stage, heads=int(last(model).attn.num_heads), **about)
    return None
