"""Where the tokens of a model are: the layout of its blocks, from what running its forward shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from patchlight.anatomy.discovery import Discovery
from patchlight.anatomy.windows import Merging
from patchlight.core.errors import PatchlightError


@dataclass(frozen=True)
class Stages:
    """The blocks of a hierarchical model, from the stage that it is opened at.

    Args:
        grids: The grid of each block, and of the output of the last.
        tokens: The number of its tokens, and of the output of the last.
        left: The number of tokens that leave each block.
        convolutions: Kernel, stride and padding of the convolution that merges patches before a block, by its number.
    """

    grids: Sequence[tuple[int, ...]]
    tokens: Sequence[int]
    left: Sequence[int]
    convolutions: Mapping[int, tuple[int, int, int]]

    @property
    def end(self) -> int:
        """Number of blocks of the first stage, which leave as many tokens as enter it."""
        return next((i for i, count in enumerate(self.left) if count != self.tokens[0]), len(self.left))

    @property
    def late(self) -> bool:
        """Whether a token joins the patches in a later stage."""
        return any(count != grid[0] * grid[1] for grid, count in zip(self.grids, self.tokens, strict=True))

    def merging(self, index: int) -> Merging | None:
        """How patches are merged before a block."""
        (rows, columns), coarse = self.grids[index - 1], cast(tuple[int, int], self.grids[index])
        fine = rows, columns
        if fine == coarse:
            return None
        step = fine[0] // coarse[0]
        kernel, stride, padding = self.convolutions.get(index, (step, step, 0))
        return Merging(fine, coarse, kernel, stride, padding)


def locate_tokens(discovery: Discovery, stage: int, name: str) -> dict[str, Any]:
    """Where the tokens of a model are, as keywords of `CrossedAnatomy`.

    Args:
        discovery: What its forward shows.
        stage: The stage at which a hierarchical model is opened.
        name: The name of the model in errors.
    """
    counts = [discovery.tokens(index) for index in range(len(discovery.blocks) + 1)]
    facts: dict[str, Any] = {"heads": discovery.heads, "pools": discovery.pools, "attentions": discovery.attentions}
    facts |= {"axes": discovery.inputs.axes, "input_shape": discovery.inputs.shape}
    if len(set(counts)) == 1:
        (prefix, suffix), grid = discovery.constant, discovery.grid(0, sum(discovery.constant))
        facts |= {"paths": discovery.blocks, "prefix": prefix, "suffix": suffix, "order": discovery.order}
        facts |= {"windows": discovery.windows}
        return {**facts, "grid": grid, "geometry": discovery.geometry}
    begins = [0, *(i for i in range(1, len(discovery.blocks)) if counts[i] != counts[i - 1])]
    if not -len(begins) <= stage < len(begins):
        raise PatchlightError(f"stage {stage} does not exist; {name} has stages 0 to {len(begins) - 1}")
    first = begins[stage]
    grids = [discovery.grid(index) for index in range(first, len(counts))]
    left = [math.prod(shape[1:-1]) for shape in discovery.ends]
    merges = {i - first: c[0] for i, c in discovery.convolutions.items() if i > first}
    merging = {i: (c.kernel[0], c.stride[0], c.padding[0]) for i, c in merges.items()}
    facts |= {
        "attentions": discovery.attentions[first:],
        "paths": discovery.blocks[first:],
        "stages": Stages(grids, counts[first:], left[first:], merging),
        "prefix": 0,
        "stage": stage % len(begins),
    }
    return {
        **facts,
        "grid": grids[0],
        "extent": _covered(discovery, grids[0]),
        "order": _coarser(discovery, grids[0]),
    }


def _covered(discovery: Discovery, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The part of the input that a grid of merged patches covers: more than its size where patches were padded."""
    stem, size = discovery.stem, discovery.inputs.size
    if stem is None:
        return size
    steps = range(1, max(stem.grid) + 1)
    step = next((n for n in steps if tuple(-(-side // n) for side in stem.grid) == grid), 0)
    covered = tuple(cells * step * pixels for cells, pixels in zip(grid, stem.stride, strict=True))
    return covered if step else size


def _coarser(discovery: Discovery, grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """The order of the cells of a coarser grid: a model that pools tokens in place keeps the order of the first."""
    if discovery.order is None or discovery.stem is None or discovery.order == tuple(range(len(discovery.order))):
        return None
    fine = torch.tensor(discovery.order).view(discovery.stem.grid)
    step = discovery.stem.grid[0] // grid[0]
    return tuple((fine[::step, ::step].flatten() % math.prod(grid)).tolist())
