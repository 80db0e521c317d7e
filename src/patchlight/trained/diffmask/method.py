"""The method `diffmask`: the map of trained gates, computed in the same forward as other white-box methods."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.record import Evidence
from patchlight.methods.base import Composition, LayerMaps, layer_map
from patchlight.trained.diffmask.gates import DiffMask, Map, aggregate


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    reason = DiffMask.refusal(settings, vit)
    if reason is not None:
        return reason
    gate, last = settings["gate"], DiffMask.resolve(settings["explainer"]).gates.count - 1
    if gate is not None and not 0 <= gate <= last:
        return f"there is no gate {gate}; {vit.name} has gates 0 to {last}"
    if gate is None and not settings["aggregated"]:
        return "aggregated=False shows one gate; choose it with gate"
    return None


def _in_pass(h0: Tensor) -> bool:
    """Whether gates run inside the pass (no states are stored), or together after it (few launches)."""
    return h0.device.type == "cpu"


def _product(
    maps: LayerMaps, explainer: Any = None, map: Map = "expected", gate: int | None = None, aggregated: bool = True
) -> Tensor:
    """The product of the gates of all blocks as a map [B,N].

    Args:
        explainer: A `pl.diffmask.DiffMask` or its folder; None: the explainer of the bundled model.
        map: "expected": m = prod_i E[z_i]. "keep": prod_i P(z_i != 0), as in the released code. "graded": the mean of m
            over shifts of all u_i, which also orders patches that m keeps or masks entirely.
        gate: The last gate of the product; None: all gates.
        aggregated: Whether gates are multiplied; otherwise `gate` is shown alone.
    """
    blocks = [maps.values[block] for block in sorted(maps.values)]
    h0 = blocks[0][0]
    gates = DiffMask.resolve(explainer).network_like(h0)
    last = gates.count - 1 if gate is None else gate
    first = 0 if aggregated else last
    values = torch.stack([value for _, values in blocks for value in values][first : last + 1])
    u = values if _in_pass(h0) else gates.locations(h0, values, first)
    return maps.vit.layout.of_tokens(aggregate(u, map, gates.alpha))


@layer_map(
    "diffmask",
    paper="Nalmpantis et al., CVPR-W 2023",
    aliases=("vision-diffmask",),
    needs={"x", "y", "p"},
    combine=Composition(_product, lambda depth, settings: range(depth)),
    nonnegative=True,
    composable="its gates already make one map of all blocks",
    refuses=_refuses,
    depends=DiffMask.identity,
    cost="1 forward and L + 2 small gates; trained once per model",
    constant="the gates keep or mask all of the image; train them longer, or with other settings",
)
def diffmask(b: Evidence, explainer: Any = None) -> tuple[Tensor, list[Tensor]]:
    """The share of each patch that trained gates keep while the output stays the same; ignores the class.

        R = prod_i E[z_i],   z_i ~ HardConcrete(u_i),   u_i = alpha tanh(W2 tanh(W1 [h_0; h_i] + c1) + c2) + beta_i

    There is a gate for each of the L + 2 states h_i: projected patches, inputs of the blocks, output of the last block.
    The map is in [0, 1]. One forward pass.

    Args:
        explainer: A `pl.diffmask.DiffMask` or its folder; None: the explainer of the bundled model.
    """
    states = [*((b.p,) if b.index == 0 else ()), b.x, *((b.y,) if b.index == b.depth - 1 else ())]
    if not _in_pass(b.p):
        return b.p, [x[:, -b.p.shape[1] :] for x in states]
    gates = DiffMask.resolve(explainer).network_like(b.p)
    first = 0 if b.index == 0 else b.index + 1
    return b.p, [gates.location(b.p, x, first + i) for i, x in enumerate(states)]
