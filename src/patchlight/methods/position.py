"""Position-aware LRP: the relevance of the position embedding is added to the pixels of each patch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from torch import Tensor

from patchlight.core.resize import to_cells, to_pixels
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import PIXELS, LayerJob
from patchlight.methods.base import Ask, own_passes
from patchlight.methods.dave import refuse_operator
from patchlight.methods.gradients import token_ixg


@own_passes(
    "pa-lrp",
    paper="Bakish et al., arXiv 2506.02138",
    levels=("pixel",),
    needs={"x", "g"},
    ruled=False,
    refuses=refuse_operator,
    presets={"lxt": {"operator": "lxt", "position": "drop"}},
)
def pa_lrp(ask: Ask, position: Literal["add", "only", "drop"] = "add", operator: str = "gamma") -> Tensor:
    """Position-aware LRP: the relevance of each pixel plus the relevance of the position embedding of its patch.

        R = sum_k X_k dX_k + (p_i + b) g_0[i] / |patch i|   for a pixel of patch i

    X is the image, p_i the position embedding of patch i, b the bias of the patch embedding, and g_0 the gradient at
    the tokens, all under a backward rule. The sum of the map over each patch equals `ixg` at token level. The authors
    set negative values to 0; this map is signed. Preset: `lxt` (no positions, the rule `lxt`).

    Args:
        position: "add" adds the relevance of positions, "only" shows it alone, "drop" leaves it out, which is `ixg` at
            pixel level.
        operator: The backward rule.
    """
    ask = replace(ask, rule=RULES.find(operator))
    result = ask.run([LayerJob(token_ixg, frozenset({"x", "g"}), (PIXELS, 0))])
    pixels, patches = result.at(PIXELS), ask.vit.patches(result.at(0))
    area = math.prod(ask.vit.extent) / patches[0].numel()
    missing = patches / area - to_cells(pixels, ask.vit.grid, ask.vit.extent)
    positions = to_pixels(missing, pixels.shape[1:], ask.vit.extent, "nearest")
    maps: Tensor = {"add": pixels + positions, "only": positions, "drop": pixels}[position]
    return maps
