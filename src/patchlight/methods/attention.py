"""Methods that read the attention matrices, alone or with their gradients."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.methods.compose import ADDITIVE, LAST, ROLLOUT
from patchlight.registry import method
from patchlight.taps import Evidence

_FUSION = {"max": torch.amax, "min": torch.amin}


@method(
    "rawatt",
    paper="attention of the last block",
    aliases=("raw-attention",),
    needs={"A"},
    combine=LAST,
    matrix=True,
    class_specific=False,
    cost="1 forward",
)
def rawatt(b: Evidence) -> Tensor:
    """Attention of one block, mean over heads: M = mean_h A_l, its CLS row. Class-agnostic."""
    return b.heads_mean


@method(
    "rollout",
    paper="Abnar & Zuidema, ACL 2020",
    aliases=("attention-rollout",),
    needs={"A"},
    combine=ROLLOUT,
    matrix=True,
    class_specific=False,
    composable="it is a product over all blocks already",
    cost="1 forward",
    presets={
        "chefer": {"start": 1},
        "vit-explain": {"discard": 0.9, "normalise": "vit-explain"},
        "skipplus": {"normalise": "none"},
    },
)
def rollout(
    b: Evidence,
    fusion: Literal["mean", "max", "min"] = "mean",
    discard: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> Tensor:
    """Attention rollout: the CLS row of prod_l N(M_l + I), M_l the heads fused. Class-agnostic.

    `discard` sets that fraction of each fused matrix, its smallest entries, to zero, except the CLS-to-CLS entry.
    Presets: `chefer` starts at block 1 as that paper's scripts do, `vit-explain` discards 0.9 and normalises along
    the wrong axis as that code does, `skipplus` does not normalise.
    """
    matrix = b.heads_mean if fusion == "mean" else _FUSION[fusion](b.A, 1)
    flat = matrix.flatten(1)
    count = int(flat.shape[1] * discard)
    if not count:
        return matrix
    smallest = flat.topk(count, 1, largest=False).indices
    keep = torch.ones_like(flat).scatter(1, smallest, 0)
    keep[:, 0] = 1
    return (flat * keep).view_as(matrix)


@method(
    "genatt",
    paper="Chefer et al., ICCV 2021",
    aliases=("chefer2", "cgw2", "gae"),
    needs={"A", "G"},
    combine=ADDITIVE,
    matrix=True,
)
def genatt(b: Evidence) -> Tensor:
    """Gradient-weighted attention: the CLS row of prod_l (I + mean_h ReLU(A_l * G_l)).

    R <- R + E_l R from R = I, all blocks, no normalisation. One forward, one backward.
    """
    return b.AG.relu().mean(1)
