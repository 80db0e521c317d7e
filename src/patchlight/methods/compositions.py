"""Compositions of the maps of several blocks: `.plus`, `.skipplus`, `.rollout`, and the defaults of methods."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.evidence.rows import row_sums, times
from patchlight.methods.base import Composition, LayerMaps, register_composition

Readout = Annotated[
    Literal["pooling", "cls", "patches", "tokens"],
    Field(
        description="The row of a token-to-token matrix that is read: that of the classifier's pooling, the CLS row, "
        "or the mean over patches or all tokens."
    ),
]
Start = Annotated[int, Field(description="The first block; negative numbers count from the last.")]
Residual = Annotated[float, Field(description="Share of the identity in each factor.")]
Scale = Annotated[float, Field(description="Factor of each matrix, against products that explode in deep models.")]
Terms = Annotated[
    Literal["layer", "tail"],
    Field(
        description="'layer' sums the maps of single blocks, as in the paper's experiments; 'tail' sums the method's "
        "map restricted to the blocks from l on, for each l, as in its equation."
    ),
]


def block_index(layer: int, depth: int) -> int:
    """A 0-based index of a block; negative numbers count from the last block."""
    if not -depth <= layer < depth:
        raise PatchlightError(f"block {layer} does not exist; this model has blocks 0 to {depth - 1}")
    return layer % depth


def _from_start(depth: int, settings: Settings) -> range:
    return range(block_index(settings["start"], depth), depth)


def _last(maps: LayerMaps, layer: int = -1, readout: Readout = "pooling") -> Tensor:
    """The map of one block, the last by default.

    Args:
        layer: The block; negative numbers count from the last.
    """
    return maps.vector(block_index(layer, maps.vit.depth), readout)


LAST = Composition(_last, lambda depth, s: (block_index(s["layer"], depth),), staged=True)


def _first(maps: LayerMaps, start: Start = 0) -> Tensor:
    """The map at the input of block `start`."""
    return maps.vector(block_index(start, maps.vit.depth))


FIRST = Composition(_first, lambda depth, s: (block_index(s["start"], depth),), staged=True)


def _additive(maps: LayerMaps, start: Start = 0, readout: Readout = "pooling") -> Tensor:
    """r <- r + r M_l from the last block to the first: a row of prod(I + M_l), without matrix products."""
    row, layers = maps.start_row(readout), _from_start(maps.vit.depth, {"start": start})
    for layer in reversed(layers):
        row = maps.arriving(row, layer + 1)
        row = row + times(row, maps.values[layer])
    return maps.lifted(row, layers[0])


ADDITIVE = Composition(_additive, _from_start, staged=True)


def _rollout(
    maps: LayerMaps,
    start: Start = 0,
    residual: Residual = 0.5,
    normalise: Literal["rows", "none", "vit-explain"] = "rows",
    scale: Scale = 1.0,
    readout: Readout = "pooling",
) -> Tensor:
    """r <- r N((1 - residual) M_l + residual I) from the last block to the first.

    Args:
        normalise: "rows" divides each row by its sum; "vit-explain" divides column j by the sum of row j, as in that
            library; "none" does not divide.
    """
    row, layers = maps.start_row(readout), _from_start(maps.vit.depth, {"start": start})
    for layer in reversed(layers):
        row = maps.arriving(row, layer + 1)
        matrix, share = maps.values[layer], (1 - residual) * scale
        total = 1.0 if normalise == "none" else share * row_sums(matrix) + residual
        if normalise == "rows":
            row = row / total
        row = share * times(row, matrix) + residual * row
        if normalise == "vit-explain":
            row = row / total
    return maps.lifted(row, layers[0])


ROLLOUT = register_composition("rollout", span=_from_start, matrices_only=True, staged=True)(_rollout)


def _plus(maps: LayerMaps, start: Start = 0, terms: Terms = "layer", readout: Readout = "pooling") -> Tensor:
    """PLUS: the unweighted sum of the maps of the blocks from `start` on."""
    layers = _from_start(maps.vit.depth, {"start": start})
    if terms == "layer":
        return torch.stack([maps.vector(layer, readout) for layer in layers]).sum(0)
    base = maps.base
    if base is None:
        raise PatchlightError("terms='tail' needs a method that starts at a block; this one reads a single block")
    return torch.stack([base(maps, layer) for layer in layers]).sum(0)


PLUS = register_composition("plus", span=_from_start, staged=True)(_plus)


def _sum(maps: LayerMaps, start: Start = 0, readout: Readout = "pooling") -> Tensor:
    """PLUS, without its setting `terms`."""
    return _plus(maps, start, readout=readout)


SUM = Composition(_sum, _from_start, staged=True)


def _mean(maps: LayerMaps, start: Start = 0) -> Tensor:
    """The mean of the maps [B,N] of the blocks from `start` on."""
    layers = _from_start(maps.vit.depth, {"start": start})
    return torch.stack([maps.vector(layer) for layer in layers]).mean(0)


MEAN = Composition(_mean, _from_start)


def half(depth: int, start: int | None, rounding: str = "ceil") -> int:
    """The first block of SkipPLUS: `start` if given, otherwise ceil(L/2), or L // 2 as in the released code."""
    if start is not None:
        return block_index(start, depth)
    return math.ceil(depth / 2) if rounding == "ceil" else depth // 2


def _skipplus(
    maps: LayerMaps,
    start: int | None = None,
    rounding: Literal["ceil", "floor"] = "ceil",
    terms: Terms = "layer",
    readout: Readout = "pooling",
) -> Tensor:
    """SkipPLUS: PLUS over the upper half of the blocks.

    Args:
        start: The first block of the sum; None: m.
        rounding: "ceil": m = ceil(L/2), as in the paper. "floor": m = L // 2, as in the released code.
    """
    return _plus(maps, half(maps.vit.depth, start, rounding), terms, readout)


def _upper_half(depth: int, settings: Settings) -> range:
    return range(half(depth, settings["start"], settings["rounding"]), depth)


SKIPPLUS = register_composition("skipplus", span=_upper_half, staged=True)(_skipplus)
