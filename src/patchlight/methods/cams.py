"""The CAM family on tokens: channel weights from gradients, applied to the activations of one layer."""

from __future__ import annotations

import re
from typing import Literal

from torch import Tensor

from patchlight.errors import PatchlightError
from patchlight.methods.compose import block_index
from patchlight.registry import Combiner, LayerMaps, Settings, method
from patchlight.taps import Evidence

Prefix = Literal["exclude", "include"]
_PLACE = re.compile(r"(?:blocks\[(-?\d+)\])?\.?(norm1|input)?")


def place(layer: int | str) -> tuple[int, Literal["norm1", "input"]]:
    """Read a `layer` setting: a block index (its input), "blocks[-1].norm1", "blocks[3].input", "norm1" or "input"."""
    if isinstance(layer, int):
        return layer, "input"
    found = _PLACE.fullmatch(layer)
    if not layer or found is None:
        raise PatchlightError(f"layer '{layer}' is not a place; try 'blocks[-1].norm1', 'blocks[3].input' or a number")
    return int(found[1] or -1), "norm1" if found[2] == "norm1" else "input"


def cam_needs(settings: Settings) -> frozenset[str]:
    return frozenset({"n", "gn"} if place(settings["layer"])[1] == "norm1" else {"x", "g"})


def _at_layer(maps: LayerMaps, layer: int | str = "blocks[-1].norm1") -> Tensor:
    return maps.vector(block_index(place(layer)[0], maps.vit.depth))


AT_LAYER = Combiner(_at_layer, lambda depth, s: (block_index(place(s["layer"])[0], depth),))


def activations(b: Evidence, layer: int | str) -> tuple[Tensor, Tensor]:
    """Activations and gradients [B,N,D] at the place that `layer` names."""
    return (b.n, b.gn) if place(layer)[1] == "norm1" else (b.x, b.g)


def counted(values: Tensor, b: Evidence, prefix: Prefix) -> Tensor:
    """The tokens that enter a channel's mean: patches, or all."""
    return values if prefix == "include" else values[:, b.prefix :]


@method(
    "gradcam",
    paper="Selvaraju et al., ICCV 2017, on tokens",
    aliases=("grad-cam",),
    needs=cam_needs,
    combine=AT_LAYER,
    composed={"layer": "input", "prefix": "include"},
    presets={"jacobgil": {}, "skipplus": {"layer": "blocks[-1].input", "prefix": "include"}},
)
def gradcam(b: Evidence, layer: int | str = "blocks[-1].norm1", prefix: Prefix = "exclude") -> Tensor:
    """Grad-CAM on tokens: w_k = mean_i g_ik, map_i = sum_k w_k a_ik. Signed, no ReLU.

    `layer` is the output of the last block's first norm by default (the grad-cam library's recommendation), where
    `prefix="exclude"` leaves CLS out of the mean. Preset `skipplus`: input of the last block, CLS in the mean.
    """
    a, g = activations(b, layer)
    weights = counted(g, b, prefix).mean(1, keepdim=True)
    return (a * weights).sum(-1)
