"""Networks of stages that are opened as a feature map: their forward is crossed after one stage, and has no blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import channels_last, discover_stages, map_size
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported


class FeatureMapAnatomy(CrossedAnatomy):
    """A network opened after the module at `path`, whose output is its tokens; `shape` is that of one image."""

    can_drop = "its stages need a complete grid of patches"

    def __init__(self, model: nn.Module, *, path: str, shape: Sequence[int], **about: Any) -> None:
        self.channels_last = channels_last(shape)
        super().__init__(model, paths=[path], grid=_grid(shape, about["preprocess"].size), prefix=0, **about)
        self.hierarchical = True

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        return self.after_first(images)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(f"{self.name} has no block {index}: it is opened as a feature map")

    def features(self, tokens: Tensor) -> Tensor:
        if self.classes:
            raise Unsupported(f"the features that the classifier of {self.name} reads are not available")
        return self.classified(tokens)


def _grid(shape: Sequence[int], size: tuple[int, int]) -> tuple[int, ...]:
    """The grid of a map, or of tokens that cover an image of this size."""
    if len(shape) == 4:
        return map_size(shape)
    rows = round(math.sqrt(shape[1] * size[0] / size[1]))
    if rows * (shape[1] // max(rows, 1)) != shape[1]:
        raise PatchlightError(f"{shape[1]} tokens are not a grid over an image of {size[0]} x {size[1]} pixels")
    return rows, shape[1] // rows


def read_feature_map(model: nn.Module, stage: int, kind: type[FeatureMapAnatomy], about: dict[str, Any]) -> Anatomy:
    """A network opened after one of its stages, which are found by running it."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    inputs = torch.randn(1, about["channels"], *about["preprocess"].size, generator=torch.Generator().manual_seed(0))
    stages = discover_stages(model, inputs.to(like))
    if not -len(stages) <= stage < len(stages):
        raise PatchlightError(f"stage {stage} does not exist; {about['name']} has stages 0 to {len(stages) - 1}")
    path, shape = stages[stage]
    return kind(model, path=path, shape=shape, **about)
