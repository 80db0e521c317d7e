"""Methods that read the gradients of tokens or pixels."""

from __future__ import annotations

from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.methods.compose import FIRST, block_index
from patchlight.registry import Settings, method
from patchlight.taps import Evidence


def degenerate_ixg(settings: Settings, vit: Anatomy) -> str | None:
    """Plain IxG at the input of the last block of a CLS-pooled model is zero up to the norm's epsilon."""
    start = settings.get("start")
    at_last = start is not None and block_index(start, vit.depth) == vit.depth - 1
    if at_last and settings.get("level") != "pixel" and settings.get("rule") == "plain" and vit.pooling == "cls":
        return (
            "plain input-times-gradient at the input of the last block is zero up to the layer norm's epsilon, since a "
            "layer norm ignores the scale of its input; use '.libra', or start at an earlier block"
        )
    return None


@method(
    "ixg",
    paper="Shrikumar et al., 2016",
    aliases=("inputxgradient", "input-x-gradient"),
    needs={"x", "g"},
    combine=FIRST,
    levels=("token", "pixel"),
    advice=degenerate_ixg,
)
def ixg(b: Evidence) -> Tensor:
    """Input times gradient: sum over channels of x_l * g_l at the input of block `start`, or of the image. Signed.

    At token level x_0 includes the position embedding. One forward, one backward.
    """
    return (b.x * b.g).sum(-1)
