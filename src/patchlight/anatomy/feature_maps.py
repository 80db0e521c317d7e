"""Networks of stages that are opened as a feature map: their forward is crossed after one stage, and has no blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import channels_last, discover_stages, map_tensors, tensors_in
from patchlight.anatomy.intercepting import BlockCall, Entered, Site
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported


class FeatureMapAnatomy(CrossedAnatomy):
    """A network opened after the module at `path`, whose output is its tokens; `shapes` are those for one image.

    A second tensor of the output is prefix tokens that accompany the map, if it has its channels; another one is left
    as it is. `last` is whether a map is [B,h,w,D].
    """

    can_drop: str | None = "its stages need a complete grid of patches"

    def __init__(
        self, model: nn.Module, *, path: str, shapes: Sequence[Sequence[int]], last: bool = False, **facts: Any
    ) -> None:
        self.library = facts.pop("library", type(self).library)
        size, shape = facts["preprocess"].size, shapes[0]
        self.channels_last = last or (len(shape) == 4 and channels_last(shape))
        sides = tuple(shape[1:3]) if self.channels_last else tuple(shape[2:])
        grid = sides if len(shape) == 4 else _rows_and_columns(shape[1], size)
        width = shape[-1] if self.channels_last or len(shape) == 3 else shape[1]
        self.accompanied = len(shapes) == 2 and len(shapes[1]) == 3 and shapes[1][-1] == width and shapes[1][1] <= 2
        prefix = shapes[1][1] if self.accompanied else shape[1] - math.prod(grid) if len(shape) == 3 else 0
        steps = [2 ** round(math.log2(side / cells)) for side, cells in zip(size, grid, strict=True)]
        covered = [step * cells for step, cells in zip(steps, grid, strict=True)]
        near = all(abs(a - b) < step for a, b, step in zip(covered, size, steps, strict=True))
        facts = {"pooling": "cls" if prefix else "avg", "extent": covered if near else size, **facts}
        super().__init__(model, paths=[path], grid=grid, prefix=prefix, **facts)
        self.hierarchical = True

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return ()

    def embed(self, images: Tensor) -> Tensor:
        beside: list[Tensor] = []

        def at(site: Site) -> Any:
            out = site.run()
            if self.sites.index(site.module) is None:
                return out
            first, *beside[:] = tensors_in(out)
            raise Entered(first)

        tokens = self.flat(self.stopped(images, at))
        return torch.cat([*beside, tokens], 1) if self.accompanied else tokens

    def answer(self, call: BlockCall, tokens: Tensor) -> Any:
        first = tensors_in(call.returned)[0]
        cells = tokens[:, self.prefix :] if self.accompanied else tokens
        out, beside = self.unflat(cells, first.shape), tokens[:, : self.prefix] if self.accompanied else None
        return map_tensors(
            call.returned, lambda tensor: out if tensor is first else tensor if beside is None else beside
        )

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        raise IndexError(f"{self.name} has no block {index}: it is opened as a feature map")

    def features(self, tokens: Tensor) -> Tensor:
        if self.classes:
            raise Unsupported(
                f"the features that the classifier of {self.name} reads are not available; load the model with "
                "num_classes=0 to use another head"
            )
        return self.classified(tokens)


def _rows_and_columns(count: int, size: Sequence[int]) -> tuple[int, int]:
    """The grid of tokens that cover an image of this size, with at most two prefix tokens."""
    for cells in (count, count - 1, count - 2):
        rows = max(round(math.sqrt(cells * size[0] / size[1])), 1)
        if cells > 0 and cells % rows == 0 and abs(rows * size[1] - cells // rows * size[0]) < max(size):
            return rows, cells // rows
    raise PatchlightError(f"{count} tokens are not a grid over an image of {size[0]} x {size[1]} pixels")


def read_feature_map(
    model: nn.Module,
    stage: int,
    kind: type[FeatureMapAnatomy],
    facts: dict[str, Any],
    paths: Sequence[str] | None = None,
    within: str = "",
) -> Anatomy:
    """A network opened after one of its stages, which end at `paths`, or are found by running its part `within`."""
    like = next(p for p in model.parameters() if p.is_floating_point())
    inputs = torch.randn(1, facts["channels"], *facts["preprocess"].size, generator=torch.Generator().manual_seed(0))
    stages = discover_stages(model.get_submodule(within), inputs.to(like), paths)
    if not -len(stages) <= stage < len(stages):
        raise PatchlightError(f"stage {stage} does not exist; {facts['name']} has stages 0 to {len(stages) - 1}")
    path, shapes = stages[stage]
    if len(shapes) not in (1, 2) or len(shapes[0]) not in (3, 4):
        raise PatchlightError(f"stage {stage} of {facts['name']} has no single feature map")
    path = f"{within}.{path}" if within else path
    return kind(model, path=path, shapes=shapes, stage=stage % len(stages), **facts)
