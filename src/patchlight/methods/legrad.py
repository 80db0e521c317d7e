"""LeGrad: attention gradients of each block's own score."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import Course
from patchlight.methods.base import layer_map
from patchlight.methods.compositions import MEAN, Readout

Attended = Literal["auto", "block", "pooler"]
"""Whose attention is read: the block's, that of an attention pooling, or the latter if there is one."""


def reads_pooler(settings: Settings, vit: Anatomy) -> bool:
    """Whether the attention of the model's pooling is read instead of a block's."""
    return settings["attention"] == "pooler" or (settings["attention"] == "auto" and vit.pooling == "map")


def no_pooler(settings: Settings, vit: Anatomy) -> str | None:
    """Why the attention of the pooling cannot be read; None if it can, or is not requested."""
    if settings["attention"] == "pooler" and vit.pooling != "map":
        return f"{vit.name} has {vit.pooling} pooling and no pooler with attention; attention='block' works"
    return None


def _local(settings: Settings, vit: Anatomy) -> Course:
    if reads_pooler(settings, vit):
        return Course("pooling", pooler=True)
    return Course(settings["readout"])


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if settings["readout"] == "cls" and vit.prefix == 0:
        return f"{vit.name} has no CLS token; readout 'pooling', 'patches' and 'tokens' work"
    return no_pooler(settings, vit)


@layer_map(
    "legrad",
    paper="Bousselham et al., ICCV 2025",
    needs={"v", "dO"},
    combine=MEAN,
    course=_local,
    refuses=_refuses,
    nonnegative=True,
    precision="full",
    composable="it already is the mean over the blocks; start= selects them",
    cost="1 forward + 1 backward through each block alone",
    presets={"code": {"start": -2}},
    constant="no head's gradient is positive there, so the ReLU leaves nothing",
)
def legrad(b: Evidence, readout: Readout = "tokens", attention: Attended = "auto") -> Tensor:
    """LeGrad: positive attention gradients of each block's own score, averaged over the blocks.

        R_j = mean_l mean_hi ReLU(G_l[h,i,j]),   G_l = ds_l/dA_l

    s_l is the score that the readout gives for block l's output in place of the last; attention itself is not
    multiplied in. The input of a block is constant, and no N x N matrix is kept: G_l = dO_l v_l^T. The authors leave
    out the final norm of a model that pools by attention, and subtract what an empty prompt shows; neither is done
    here. Preset `code` takes the last two blocks as the released code does; the paper takes all.

    Args:
        readout: What the head reads of a block's output: the mean of all "tokens", as the authors do, or of the
            "patches", the "cls" token, or what the model's own "pooling" reads.
        attention: Whose attention has the gradient: the block's ("block"), the pooler's of a model that pools by
            attention, fed with each block's output ("pooler"), or the pooler's where there is one ("auto").
    """
    return b.positive_gradient
