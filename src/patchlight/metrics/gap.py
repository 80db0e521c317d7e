"""SRG: the gap between removing the least important and the most important cells, with its MIF and LIF curves."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from patchlight.core.resize import Upsampling
from patchlight.evidence.ablation import Count, Unit
from patchlight.evidence.fills import Fill
from patchlight.metrics.base import Measure, Measured, MeasuredScore, TargetClass, register_metric
from patchlight.metrics.deletion import Removal, area, count_cells, removed_logits, scored, span, thresholds
from patchlight.metrics.quantities import no_score

Spacing = Literal["linear", "log"]
"""Steps of equal size, or counts that grow by one factor from a single cell to all."""


def removed_counts(cells: int, steps: int | None, spacing: Spacing) -> Tensor:
    """Cells removed at each point [P], from none to all: linear, or `steps` powers from 1 to all, rounded down."""
    if spacing == "linear":
        return thresholds(cells, steps, first=True)
    powers = np.geomspace(1, cells, steps or cells).astype(int)
    return torch.tensor(sorted({0, *powers.tolist(), cells}))


def _limits(settings: Any) -> tuple[float, float]:
    low, high = span(settings["score"])
    return low - high, high - low


@register_metric(
    "srg",
    paper="Blücher et al., TMLR 2024",
    aliases=("symmetric-relevance-gain",),
    higher_is_better=True,
    bounds=_limits,
    ablates=True,
    refuses=no_score,
    cost="2 steps (56) + 2 forwards, shared with insertion and deletion; with ties 4 steps + 4",
    presets={
        "bluecher": {
            "steps": 15,
            "spacing": "log",
            "fill": "zero",
            "unit": "patch",
            "target_class": "label",
            "score": "probability",
        }
    },
    quick={"steps": 14},
)
def srg(
    ask: Measure,
    steps: Count | None = 28,
    spacing: Spacing = "linear",
    fill: Fill = "zero",
    unit: Unit = "patch",
    target_class: TargetClass = "given",
    upsampling: Upsampling = "bilinear",
    score: MeasuredScore = "auto",
) -> Measured:
    """Symmetric relevance gain: removing the least important patches first minus the most important first.

        AUC_LIF - AUC_MIF,   the areas under the class's score over the share removed

    MIF removes the k highest cells, LIF the k lowest, k from none to all; trapezoids. Equal cells are removed in an
    order from the seed and in its reverse, and both curves are averaged. So a random order scores 0 and the negative of
    a map the negative value, for every fill: what the fill does to all orders alike cancels. Without ties, on steps
    that divide the cells, it is `ins-del` over one fill. Cells are averages of the map over a patch, as the paper's are
    over its units. Preset `bluecher`: 15 counts that grow by one factor, the true class, probabilities. Parts: the
    areas `mif` and `lif` and the curves `mif-curve` and `lif-curve` [B,P]; curve [B,P]: LIF - MIF over the share
    removed.

    Args:
        steps: Number of steps from none to all; None: each cell by itself.
        spacing: Whether the counts grow by one number ("linear") or by one factor ("log").
    """
    cells = count_cells(ask, unit)
    removed = removed_counts(cells, steps, spacing)
    targets, x = ask.of(target_class), removed.double() / cells

    def curves(reverse_ties: bool) -> Tensor:
        """MIF and LIF [2,B,P]; LIF shows the cells that remain when the k lowest are removed."""
        removal = Removal(fill, unit, upsampling, reverse_ties=reverse_ties)
        mif, shown = (
            scored(removed_logits(ask, counts, insert, removal), targets, ask, score)
            for counts, insert in ((removed, False), ((cells - removed).flip(0), True))
        )
        return torch.stack([mif, shown.flip(1)])

    both = curves(False)
    orders = [ask.ranks(unit, upsampling, reverse_ties=reverse).flatten(1) for reverse in (False, True)]
    tied = (orders[0] != orders[1]).any(1).to(both.device)
    if bool(tied.any()):
        both = torch.where(tied[:, None], (both + curves(True)) / 2, both)
    mif, lif = both
    areas = {"mif": area(mif, "trapezoid", x), "lif": area(lif, "trapezoid", x)}
    parts = {**areas, "mif-curve": mif, "lif-curve": lif}
    return Measured(areas["lif"] - areas["mif"], lif - mif, x, parts)
