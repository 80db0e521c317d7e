"""The order of tokens in the sequence of a model (`Layout`), and the part of the input of each cell (`Geometry`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError, Unsupported

IMAGE_AXES = ("row", "column")
"""The axes of an image."""
SETS = {"frame": "time", "tube": "time", "band": "frequency", "slice": "depth", "merge": "merge"}
"""Named sets of cells, by the axis that they need: all cells of one time, frequency or depth; a tube has all times of
one place; "merge", which needs no axis, has the square of patches that a model merges into one visual token."""


@dataclass(frozen=True)
class Layout:
    """The order of tokens in a sequence: prefix tokens, the cells of a grid, suffix tokens.

    Args:
        grid: Cells along each axis: (rows, columns) of an image, (frames, rows, columns) of a video.
        prefix: Tokens before the cells: CLS, DIST, registers.
        suffix: Tokens after the cells, such as detection tokens.
        axes: The name of each axis of the grid: "row", "column", "time", "depth", "frequency".
        order: The positions of the tokens of each cell, cell after cell in C order, among the grid tokens. A cell has
            several tokens where a model sees each part of an image in several views. None: one token per cell, in C
            order.
        merge: Patches along each side of the square that becomes one visual token of a language model.

    Example:
        >>> Layout((2, 3), prefix=1).count
        7
    """

    grid: tuple[int, ...]
    prefix: int = 0
    suffix: int = 0
    axes: tuple[str, ...] = IMAGE_AXES
    order: tuple[int, ...] | None = None
    merge: int = 1

    def __post_init__(self) -> None:
        grid = tuple(int(side) for side in self.grid)
        order = None if self.order is None else tuple(int(place) for place in self.order)
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "axes", tuple(self.axes))
        object.__setattr__(self, "order", None if order == tuple(range(math.prod(grid))) else order)
        if len(self.axes) != len(grid) or len(set(self.axes)) != len(grid):
            raise PatchlightError(
                f"the grid {grid} has {len(grid)} axes and {self.axes} names {len(self.axes)}; name each once, for "
                "example axes=('time', 'row', 'column')"
            )
        if order is not None and sorted(order) != list(range(max(1, self.per_cell) * self.cells)):
            raise PatchlightError(f"order must hold each of the places 0 to {self.cells - 1} once")

    @property
    def cells(self) -> int:
        """Number of cells of the grid."""
        return math.prod(self.grid)

    @property
    def per_cell(self) -> int:
        """Number of tokens of a cell."""
        return 1 if self.order is None else len(self.order) // self.cells

    @property
    def count(self) -> int:
        """N: number of tokens."""
        return self.prefix + self.cells * self.per_cell + self.suffix

    @cached_property
    def place(self) -> Tensor:
        """The indices [cells * per_cell] of the tokens of each cell, in C order, among all tokens."""
        cells = torch.arange(self.cells) if self.order is None else torch.tensor(self.order)
        return cells + self.prefix

    def of_cells(self, tokens: Tensor) -> Tensor:
        """The values of the cells, in C order, of tokens [B,N,...]: the sum over the tokens of each."""
        if self.order is None:
            return tokens[:, self.prefix : tokens.shape[1] - self.suffix]
        values = tokens[:, self.place.to(tokens.device)]
        return values if self.per_cell == 1 else values.unflatten(1, (self.cells, self.per_cell)).sum(2)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Values [B,N] of all tokens from those of the cells [B,cells]: 0 at prefix and suffix."""
        out = values.new_zeros(len(values), self.count)
        return out.index_copy(1, self.place.to(values.device), values.repeat_interleave(self.per_cell, 1))

    def places(self, keep: Tensor) -> Tensor:
        """Indices [V,p+k+s] of the prefix tokens, of the tokens of cells `keep` [V,k] and of the suffix among all."""
        prefix = torch.arange(self.prefix, device=keep.device).expand(len(keep), -1)
        tokens = self.place.to(keep.device).view(self.cells, -1)
        cells = keep + self.prefix if self.order is None else tokens[keep].flatten(1)
        suffix = torch.arange(self.count - self.suffix, self.count, device=keep.device).expand(len(keep), -1)
        return torch.cat([prefix, cells, suffix], 1)

    def sets(self, unit: str) -> Tensor:
        """The number [cells] of the set of each cell: sets of one cell, or a named kind of `SETS`."""
        if unit not in SETS:
            return torch.arange(self.cells)
        if unit == "merge":
            rows, columns = (torch.arange(side) // self.merge for side in self.grid[-2:])
            return (rows[:, None] * (self.grid[-1] // self.merge) + columns).flatten()
        axis = SETS[unit]
        if axis not in self.axes:
            works = [name for name, needed in SETS.items() if needed in self.axes]
            raise Unsupported(
                f"unit='{unit}' needs an axis of {axis}, and this grid has {' and '.join(self.axes)}; "
                f"use unit={' or '.join(map(repr, [*works, 'patch']))}"
            )
        along = self.axes.index(axis)
        if unit != "tube":
            shape = [-1 if i == along else 1 for i in range(len(self.grid))]
            return torch.arange(self.grid[along]).view(shape).expand(self.grid).flatten()
        across = [side for i, side in enumerate(self.grid) if i != along]
        return torch.arange(math.prod(across)).view(across).unsqueeze(along).expand(self.grid).flatten()

    def members(self, unit: str) -> Tensor:
        """The cells [sets,k] of each set, in C order."""
        labels = self.sets(unit)
        return labels.argsort(stable=True).view(int(labels.max()) + 1, -1)

    @property
    def inputs(self) -> str:
        """The inputs of a model with this layout: "images", "videos", "volumes", "sounds" or "arrays"."""
        if self.axes == IMAGE_AXES:
            return "images"
        kinds = {"frequency": "sounds", "time": "videos", "depth": "volumes"}
        return next((kind for axis, kind in kinds.items() if axis in self.axes), "arrays")


@dataclass(frozen=True)
class Geometry:
    """The part of the input that each cell of a grid covers: from begin + i step, `cell` long, for cell i of an axis.

    Args:
        size: Length of the input along each axis of the grid.
        step: Distance between neighbouring cells; less than `cell` where they overlap.
        cell: Length of a cell.
        begin: Where the first cell begins.
        unit: The unit of each axis: "px", "frame", "s", "Hz", "mm".
        dims: The dimension of each axis in one input (without the batch); None: the last ones, in order.

    Where cells overlap, the value of a place is the mean of its cells (`overlapping`).

    Example:
        >>> Geometry.even((14, 14), (230, 230), (224, 224)).extent((14, 14))
        (224, 224)
    """

    size: tuple[int, ...]
    step: tuple[float, ...]
    cell: tuple[float, ...]
    begin: tuple[float, ...]
    unit: tuple[str, ...] = ("px", "px")
    dims: tuple[int, ...] | None = None

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True}

    def __post_init__(self) -> None:
        parts = (self.size, self.step, self.cell, self.begin, self.unit, self.size if self.dims is None else self.dims)
        if len({len(part) for part in parts}) != 1:
            raise PatchlightError("size, step, cell, begin, unit and dims of a geometry need one value per axis")

    @staticmethod
    def even(
        grid: Sequence[int],
        size: Sequence[int],
        extent: Sequence[int] | None = None,
        unit: Sequence[str] | None = None,
        dims: Sequence[int] | None = None,
    ) -> Geometry:
        """Cells side by side that divide `extent` (None: `size`) evenly."""
        step = tuple(side / cells for side, cells in zip(extent or size, grid, strict=True))
        names = ("px",) * len(step) if unit is None else tuple(unit)
        return Geometry(tuple(size), step, step, (0.0,) * len(step), names, None if dims is None else tuple(dims))

    def extent(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The length of the input that a grid covers along each axis, from 0: begin + step (n - 1) + cell."""
        ends = zip(self.begin, self.step, self.cell, grid, strict=True)
        return tuple(round(begin + step * (n - 1) + cell) for begin, step, cell, n in ends)

    @property
    def overlaps(self) -> bool:
        """Whether neighbouring cells overlap."""
        return any(step < cell for step, cell in zip(self.step, self.cell, strict=True))

    def overlapping(self, scores: Tensor, size: Sequence[int]) -> Tensor:
        """Scores of cells [...,*grid] at another size [...,*size]: each place has the mean of its cells.

        A place without a cell has the value of the nearest place with one.
        """
        for axis in range(-len(size), 0):
            at = (torch.arange(size[axis], dtype=torch.float64) + 0.5) * self.size[axis] / size[axis]
            begin = self.begin[axis] + self.step[axis] * torch.arange(scores.shape[axis], dtype=torch.float64)
            inside = (at[:, None] >= begin) & (at[:, None] < begin + self.cell[axis])
            covered = inside.any(1).nonzero()[:, 0]
            nearest = (torch.arange(len(at))[:, None] - covered).abs().argmin(1)
            weights = inside[covered[nearest]].to(scores)
            scores = (scores.movedim(axis, -1) @ (weights / weights.sum(1, keepdim=True)).T).movedim(-1, axis)
        return scores

    def channels_first(self, images: Tensor) -> Tensor:
        """Inputs [B,...] of the model as [B,C,*size], with the axes of the grid in order."""
        if self.dims is None:
            return images
        dims = [dim + 1 for dim in self.dims]
        channel = [dim for dim in range(1, images.ndim) if dim not in dims]
        return images.permute(0, *channel, *dims) if channel else images.permute(0, *dims)[:, None]

    def as_input(self, images: Tensor, channel: bool = True) -> Tensor:
        """The inverse of `channels_first`; `channel` is False if inputs have no dimension of channels."""
        if self.dims is None:
            return images
        if not channel:
            return images[:, 0].permute(0, *(1 + torch.tensor(self.dims).argsort()).tolist())
        first = next(dim for dim in range(len(self.dims) + 1) if dim not in self.dims)
        return images.permute(0, *(1 + torch.tensor([first, *self.dims]).argsort()).tolist())
