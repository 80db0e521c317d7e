"""Methods based on attention matrices: alone, with their gradients, or with input times gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.evidence.rows import Matrix, mean_row, written
from patchlight.methods.base import layer_map
from patchlight.methods.compositions import ADDITIVE, FIRST, LAST, ROLLOUT, SUM
from patchlight.methods.gradients import token_ixg

_FUSION = {"max": torch.amax, "min": torch.amin}


def read_from(b: Evidence) -> Tensor:
    """mean_hi A[h,i,j] [B,N]: the attention that token j receives."""
    return b.once("mean_hi A", lambda: mean_row(b.matrix("A")))


@layer_map(
    "rawatt",
    paper="attention of the last block",
    aliases=("raw-attention",),
    needs={"A"},
    combine=LAST,
    matrix=True,
    nonnegative=True,
    cost="1 forward",
)
def rawatt(b: Evidence) -> Matrix:
    """Attention of one block, averaged over its heads; ignores the class.

    R = (mean_h A_l)[CLS]
    """
    return b.matrix("A")


def _discards(settings: Settings, vit: Anatomy) -> str | None:
    if vit.hierarchical and settings["discard"]:
        return f"discard ranks the entries of one matrix of all tokens, but attention of {vit.name} is between some"
    return None


@layer_map(
    "rollout",
    paper="Abnar & Zuidema, ACL 2020",
    aliases=("attention-rollout",),
    needs={"A"},
    combine=ROLLOUT,
    matrix=True,
    nonnegative=True,
    composable="it already is a product over all blocks",
    refuses=_discards,
    cost="1 forward",
    presets={
        "chefer": {"start": 1},
        "vit-explain": {"discard": 0.9, "normalise": "vit-explain"},
        "skipplus": {"normalise": "none"},
    },
)
def rollout(
    b: Evidence, fusion: Literal["mean", "max", "min"] = "mean", discard: Annotated[float, Field(ge=0, lt=1)] = 0.0
) -> Matrix:
    """Attention rollout: attention with skip connections, multiplied over the blocks; ignores the class.

        R = prod_l N(M_l + I),   M_l the fused heads of block l,   N divides each row by its sum

    The map is the CLS row of R. Presets: `chefer` starts at block 1, as in that paper's scripts; `vit-explain` discards
    0.9 and normalises along the wrong axis, as in that library; `skipplus` does not normalise.

    Args:
        fusion: How the heads of a block are combined to one matrix.
        discard: Fraction of the smallest entries of each fused matrix that is set to zero; CLS to CLS is kept.
    """
    count = int(b.tokens**2 * discard)
    if fusion == "mean" and not count:
        return b.matrix("A")
    matrix = b.heads_mean if fusion == "mean" else _FUSION[fusion](b.A, 1)
    if not count:
        return matrix
    flat = matrix.flatten(1)
    smallest = flat.topk(count, 1, largest=False).indices
    keep = torch.ones_like(flat).scatter(1, smallest, 0)
    keep[:, 0] = 1
    return (flat * keep).view_as(matrix)


@layer_map(
    "genatt",
    paper="Chefer et al., ICCV 2021",
    aliases=("chefer2", "cgw2", "gae"),
    needs={"A", "G"},
    combine=ADDITIVE,
    matrix=True,
    nonnegative=True,
    presets={"bt": {"rectify": "mean"}},
)
def genatt(b: Evidence, rectify: Literal["heads", "mean"] = "heads") -> Matrix:
    """Gradient-weighted attention, accumulated over the blocks.

        R <- R + mean_h ReLU(A_l * G_l) R,   R = I before the first block

    The map is the CLS row of R; nothing is normalised.

    Args:
        rectify: "heads" takes the ReLU in each head, "mean" after the mean over heads, as in the code of BT (preset
            `bt`).
    """
    return b.matrix("relu(AG)") if rectify == "heads" else written(b.matrix("AG")).relu()


@layer_map(
    "gradsam",
    paper="Barkan et al., CIKM 2021",
    aliases=("grad-sam",),
    needs={"A", "G"},
    combine=SUM,
    nonnegative=True,
    composable="it already is the sum over the blocks; 'genatt.plus' and 'genatt.skipplus' are its layer maps summed",
)
def gradsam(b: Evidence) -> Matrix:
    """Gradient-weighted attention, summed over the blocks.

        R = sum_l mean_h ReLU(A_l * G_l)

    The map is the CLS row of R, which is `genatt.plus`. `readout="tokens"` averages over all rows, as in the paper.
    """
    return b.matrix("relu(AG)")


@layer_map(
    "attcam",
    paper="Grad-CAM on attention: Chefer et al., CVPR 2021",
    precision="full",
    aliases=("attn-gradcam",),
    needs={"A", "G"},
    combine=LAST,
    matrix=True,
    composed={"relu": False},
    presets={"chefer": {"relu": True}, "skipplus": {"relu": False}},
    constant="all heads have negative mean gradients, so the ReLU is zero; preset='skipplus' keeps the signed map",
)
def attcam(b: Evidence, relu: bool = True) -> Matrix:
    """Grad-CAM on attention: the heads of the last block, weighted by their mean gradients.

        M = ReLU(mean_h w_h A_h),   w[h,i] = mean of G[h,i,j] over the patches j

    The map is the CLS row of M. Preset `skipplus` and the compositions `.plus`, `.skipplus` and `.rollout` have no
    ReLU.

    Args:
        relu: Whether the ReLU is applied.
    """
    matrix = b.matrix("A", rows=b.gradient_mean)
    return written(matrix).relu() if relu else matrix


@layer_map(
    "attngrad",
    paper="gradient of attention, as in SkipPLUS",
    aliases=("attention-gradient",),
    needs={"A", "G"},
    combine=LAST,
    matrix=True,
)
def attngrad(b: Evidence, sign: Literal["signed", "abs", "relu"] = "signed") -> Matrix:
    """Gradient of the score with respect to one block's attention.

        R = (mean_h G_l)[CLS],   or of |G_l|,   or of ReLU(G_l)

    Args:
        sign: What is averaged over the heads: G ("signed"), |G| ("abs") or ReLU(G) ("relu").
    """
    if sign == "signed":
        return b.matrix("G")
    return b.matrix("abs(G)" if sign == "abs" else "relu(G)")


@layer_map(
    "attnfrom",
    paper="AttCAT, NeurIPS 2022",
    aliases=("attn-from",),
    needs={"A"},
    combine=LAST,
    nonnegative=True,
    cost="1 forward",
)
def attnfrom(b: Evidence) -> Tensor:
    """Mean attention that each patch receives from all tokens in one block; ignores the class.

    R_j = mean over heads h and tokens i of A_l[h,i,j]
    """
    return read_from(b)


Pair = Annotated[
    Literal["auto", "input", "output"],
    Field(
        description="The tokens x: the 'output' of block l, as in the SkipPLUS code; its 'input', as in the SkipPLUS "
        "paper and in AttCAT's code; or 'auto', the output with CLS pooling and the input if the classifier reads "
        "patches."
    ),
]
Last = Annotated[
    bool, Field(description="Whether the output of the last block is used; with CLS pooling, its gradient is zero.")
]


def _pair_needs(settings: Settings) -> frozenset[str]:
    parts = {"input": {"x", "g"}, "output": {"x", "y", "gy"}, "auto": {"x", "g", "y", "gy"}}
    return frozenset({"A"} | parts[settings["pair"]])


def _pair_of(settings: Settings, vit: Anatomy) -> Settings:
    """Resolve "auto": outputs if the classifier reads no patch, otherwise inputs."""
    pair = settings["pair"]
    if pair == "auto":
        pair = "output" if vit.pooling in ("cls", "cls+dist") else "input"
    return {"pair": pair}


_NO_GRADIENT = "the output of the last block is not used (with CLS pooling its gradient is zero); start earlier"
_PAIRS: dict[str, Mapping[str, Any]] = {"skipplus-code": {"pair": "output"}}


@layer_map(
    "attixg",
    paper="Qiang et al., NeurIPS 2022",
    needs=_pair_needs,
    combine=FIRST,
    constant=_NO_GRADIENT,
    adapts=_pair_of,
    presets=_PAIRS,
)
def attixg(b: Evidence, pair: Pair = "auto", last: Last = False) -> Tensor:
    """Input times gradient of one block's tokens, weighted by the attention they receive.

        R_j = (mean_hi A_l[h,i,j]) (sum_d x[j,d] g[j,d])

    The map is signed. Preset `skipplus-code` is `pair="output"` everywhere.
    """
    if pair == "input":
        return read_from(b) * token_ixg(b)
    if b.index == b.depth - 1 and not last:
        return b.x.new_zeros(b.x.shape[:2])
    return read_from(b) * (b.y * b.gy).sum(-1)


@layer_map(
    "attcat",
    paper="Qiang et al., NeurIPS 2022",
    needs=_pair_needs,
    combine=SUM,
    constant=_NO_GRADIENT,
    composable="it already is the sum over the blocks; 'attixg.plus' and 'attixg.skipplus' are its layer maps summed",
    adapts=_pair_of,
    presets=_PAIRS,
)
def attcat(b: Evidence, pair: Pair = "auto", last: Last = False) -> Tensor:
    """Input times gradient weighted by attention, summed over the blocks.

    This is `attixg.plus`. With CLS pooling, the sum is over the outputs of all blocks except the last, otherwise over
    the inputs of all blocks; preset `skipplus-code` always uses the outputs. The map is signed.
    """
    return attixg(b, pair, last)


@layer_map(
    "cat",
    paper="Qiang et al., NeurIPS 2022",
    needs={"x", "g"},
    combine=SUM,
    composable="it already is the sum over the blocks; 'ixg.plus' and 'ixg.skipplus' are its layer maps summed",
)
def cat(b: Evidence) -> Tensor:
    """Input times gradient, summed over the inputs of all blocks.

        R_j = sum_l sum_d x_l[j,d] g_l[j,d]

    The map is signed. This is `ixg.plus`.
    """
    return token_ixg(b)
