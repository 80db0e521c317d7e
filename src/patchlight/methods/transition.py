"""Transition methods: products of attention over the blocks, weighted by an integrated gradient of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.contract import linear
from patchlight.evidence.passes import Pass, in_memory, rows_at_once
from patchlight.evidence.record import Evidence
from patchlight.evidence.rows import written
from patchlight.evidence.runner import LayerJob
from patchlight.methods.base import Ask, LayerMaps, follows_one_state, own_passes
from patchlight.methods.compositions import Readout, block_index
from patchlight.methods.tokentm import no_linear_values

Steps = Annotated[int, Field(ge=1, description="Number of alphas.")]
WithIntegral = Annotated[
    bool, Field(description="Whether the gradient is averaged over alphas; otherwise it is that of the image.")
]


def _first_block(start: int | None, default: int, depth: int) -> int:
    """The block `start`, or if None the default, or the last block of a shallower model."""
    return min(default, depth - 1) if start is None else block_index(start, depth)


def _read_rows(ask: Ask, result: Pass, readout: Readout) -> tuple[Tensor, Tensor]:
    """The tokens that the classifier reads: their indices [n], and the weight of each [B,n]."""
    weights = LayerMaps({}, ask.vit, partial(result.rows, ask.vit), result.end()).start_row(readout)
    rows = (weights != 0).any(0).nonzero().flatten()
    return rows, weights[:, rows]


def feedback(ask: Ask, rows: Tensor, steps: int, with_integral: bool = True) -> Tensor:
    """W = mean_h ReLU(mean_k G_{L-1}(alpha_k * image)) [B,n,N] at `rows`, with alpha from 0 to 1 inclusive.

    Without the integral, alpha is 1. Methods that explain the same images share the result.
    """
    last, images = ask.vit.depth - 1, ask.images
    begin, count = (0, steps) if with_integral else (1, 1)
    alphas = torch.linspace(begin, 1, count, dtype=images.dtype, device=images.device)
    job = LayerJob(lambda b: b.G[:, :, rows], frozenset({"A", "G"}), (last,))

    def gradients(factors: Tensor) -> Tensor:
        scaled = (factors.view(-1, *[1] * images.ndim) * images).flatten(0, 1)
        G: Tensor = ask.run([job], scaled).at(last).unflatten(0, (len(factors), len(images)))
        return G

    def compute() -> Tensor:
        total: Any = 0.0
        for factors in alphas.split(max(1, rows_at_once(ask.vit) // len(images))):
            total = total + in_memory(gradients, factors).sum(0)
        mean: Tensor = total / len(alphas)
        return mean.relu().mean(1)

    return ask.once(("feedback", tuple(rows.tolist()), steps if with_integral else None), compute)


def _layer_pass(ask: Ask, function: Callable[[Evidence], Tensor], needs: set[str], first: int) -> Pass:
    return ask.run([LayerJob(function, frozenset(needs), tuple(range(first, ask.vit.depth)))])


def _perception(matrices: Mapping[int, Tensor], rows: Tensor) -> Tensor:
    """The `rows` [B,n,N] of prod_l (I + M_l), with the last block on the left."""
    any_matrix = next(iter(matrices.values()))
    state = torch.eye(any_matrix.shape[-1]).to(any_matrix)[rows].expand(len(any_matrix), -1, -1)
    for layer in sorted(matrices, reverse=True):
        state = state + state @ matrices[layer]
    return state


def _read(ask: Ask, weights: Tensor, product: Tensor) -> Tensor:
    """The weighted sum of rows [B,n,N] of a (to, from) matrix, on the patch grid."""
    return ask.vit.patches((weights[:, :, None] * product).sum(1))


@own_passes(
    "tam",
    needs={"A", "G"},
    paper="Yuan et al., NeurIPS Workshop 2021",
    aliases=("transition-attention-maps",),
    nonnegative=True,
    cost="21 forwards + 20 backwards through the last block",
    quick={"steps": 3},
    refuses=follows_one_state,
    presets={"tis": {"start": 0}, "interpretdl": {"score": "probability"}},
)
def tam(
    ask: Ask,
    start: int | None = None,
    steps: Steps = 20,
    with_integral: WithIntegral = True,
    first_state: bool = False,
    readout: Readout = "pooling",
) -> Tensor:
    """Transition attention maps: attention chained over the blocks, times an integrated gradient.

        r = mean_h A_{L-1}[CLS],   r <- r + r mean_h A_l   for l = L-2 down to `start`
        W = mean_h ReLU(mean_k G_{L-1}(alpha_k * image))[CLS]

    The map is r * W. The alphas are equally spaced from 0 to 1 inclusive, so the baseline is a tensor of zeros. Without
    a CLS token, the maps of all rows that the classifier reads are averaged. Presets: `tis` starts at block 0,
    `interpretdl` explains the probability.

    Args:
        start: The first block; None: block 4, or the last block of a shallower model.
        first_state: Whether only the last block is used for r.
    """
    depth = ask.vit.depth
    first = depth - 1 if first_state else _first_block(start, 4, depth)
    result = _layer_pass(ask, lambda b: b.heads_mean, {"A"}, first)
    rows, weights = _read_rows(ask, result, readout)
    matrices: dict[int, Tensor] = dict(result.layers())
    state = matrices.pop(depth - 1)[:, rows]
    for layer in sorted(matrices, reverse=True):
        state = state + state @ matrices[layer]
    return _read(ask, weights, state * feedback(ask, rows, steps, with_integral))


def head_importance(b: Evidence) -> Tensor:
    """I_h = mean_ij |A_h^T G_h| [B,H], normalised over the heads; uniform if no head has a gradient."""
    raw = (b.A.transpose(-2, -1) @ b.G).abs_().mean((-2, -1))
    total = raw.sum(1, keepdim=True)
    return torch.where(total > 0, raw / total, 1 / raw.shape[1])


def _by_importance(b: Evidence) -> Tensor:
    """sum_h I_h A_h [B,N,N]."""
    importance = head_importance(b)[..., None] * b.heads
    return written(b.matrix("A", rows=importance.expand(-1, -1, b.tokens)))


def value_ratio(b: Evidence) -> Tensor:
    """nu_j = ||v_j W_O^T|| / ||x_j|| [B,N]: the values of all heads with their bias, without the projection's bias."""
    image = b.v.transpose(1, 2).flatten(2) @ linear(b.parts.out).weight.T
    ratio: Tensor = image.norm(dim=-1) / b.x.norm(dim=-1).clamp(min=1e-12)
    return ratio


@own_passes(
    "bt-h",
    needs={"A", "G"},
    paper="Chen et al., TMLR 2022",
    aliases=("bt-head",),
    nonnegative=True,
    cost="21 forwards + 1 backward, attention matrices written out, + 20 backwards through the last block",
    quick={"steps": 3},
    refuses=follows_one_state,
    presets={"tis": {"start": 0}, "interpretdl": {"score": "probability"}},
)
def bt_h(
    ask: Ask,
    start: int | None = None,
    steps: Steps = 20,
    with_integral: WithIntegral = True,
    readout: Readout = "pooling",
) -> Tensor:
    """Attention weighted by head and accumulated over the blocks, times an integrated gradient.

        R = prod_l (I + sum_h I_h A_h),   I_h = mean_ij |A_h^T G_h|, normalised over the heads of each image
        W = mean_h ReLU(mean_k G_{L-1}(alpha_k * image))

    The map is the CLS row of R times W of `tam`. The paper calls R attention perception and W reasoning feedback.
    Presets: `tis` starts at block 0, `interpretdl` explains the probability.

    Args:
        start: The first block; None: block 3, or the last block of a shallower model.
    """
    first = _first_block(start, 3, ask.vit.depth)
    result = _layer_pass(ask, _by_importance, {"A", "G"}, first)
    rows, weights = _read_rows(ask, result, readout)
    perception = _perception(result.layers(), rows)
    return _read(ask, weights, perception * feedback(ask, rows, steps, with_integral))


@own_passes(
    "bt-t",
    needs={"A", "G", "v"},
    paper="Chen et al., TMLR 2022",
    aliases=("bt-token",),
    nonnegative=True,
    cost="21 forwards + 20 backwards through the last block",
    quick={"steps": 3},
    refuses=lambda settings, vit: follows_one_state(settings, vit) or no_linear_values(settings, vit),
    presets={"tis": {"start": 0}, "interpretdl": {"start": 3, "score": "probability"}},
)
def bt_t(
    ask: Ask,
    start: int | None = None,
    steps: Steps = 20,
    with_integral: WithIntegral = True,
    readout: Readout = "pooling",
) -> Tensor:
    """Attention weighted by token and accumulated over the blocks, times an integrated gradient.

        R = prod_l (I + mean_h A_l diag(nu_l)),   nu_j = ||v_j W_O^T|| / ||x_j||

    The map is the CLS row of |R| times W of `tam`. The values v include their bias, and x is the input of the block
    before its norm. Presets: `tis` starts at block 0, `interpretdl` at block 3 and explains the probability.

    Args:
        start: The first block; None: block 6, or the last block of a shallower model.
    """
    first = _first_block(start, 6, ask.vit.depth)
    result = _layer_pass(ask, lambda b: b.heads_mean * value_ratio(b)[:, None], {"A", "v", "x"}, first)
    rows, weights = _read_rows(ask, result, readout)
    perception = _perception(result.layers(), rows)
    return _read(ask, weights, perception.abs() * feedback(ask, rows, steps, with_integral))
