"""LeGrad: gradients of attention for the score of each block's output."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import Course
from patchlight.methods.base import layer_map
from patchlight.methods.compositions import MEAN, Readout

Attended = Annotated[
    Literal["auto", "block", "pooler"],
    Field(
        description="The attention that is read: that of the 'block'; that of the 'pooler' of a model with attention "
        "pooling, applied to the output of the block; or 'auto', the pooler's if there is one."
    ),
]


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
    constant="no gradient is positive, so the ReLU is zero",
)
def legrad(b: Evidence, readout: Readout = "tokens", attention: Attended = "auto") -> Tensor:
    """LeGrad: positive gradients of attention for the score of each block's output, averaged over the blocks.

        R_j = mean_l mean_hi ReLU(G_l[h,i,j]),   G_l = ds_l/dA_l

    s_l is the score when the readout is applied to the output of block l instead of the last block. The gradient is
    that of the attention of block l only, and is not multiplied by attention. For models with attention pooling, the
    authors also skip the final norm and subtract the map of an empty prompt; this is not done here. Preset `code` uses
    the last two blocks, as in the released code.

    Args:
        readout: The input of the head: the mean of all "tokens" of a block's output, as in the paper, or of its
            "patches", its "cls" token, or the model's "pooling".
    """
    return b.positive_gradient
