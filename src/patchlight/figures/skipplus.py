"""The figures of Mehri et al., "SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers"."""

from __future__ import annotations

from matplotlib.figure import Figure

from patchlight.evidence.ablation import Count
from patchlight.figures.base import Drawing, register_figure
from patchlight.figures.sheet import Cell, Row
from patchlight.methods.compositions import block_index

PAPER = "SkipPLUS (Mehri et al., CVPR-W 2024)"
BAND = 7
"""Pictures side by side at most."""


@register_figure(
    "skipplus-2",
    paper=f"{PAPER}, Figure 2",
    shows="DecompX started at each block: noisy from the first blocks, clean from later ones",
    stand_in="ViT-B/8 or EVA-L/14",
    quick={"shown": 1, "starts": [0, 3, 6]},
)
def starts(drawing: Drawing, shown: Count = 1, starts: list[int] | None = None) -> Figure:
    """DecompX from different blocks: the photograph, and the map of every start (or of those asked).

    The caption is all that the text has of this picture; which image and model it shows is not said.
    """
    depth = drawing.vit.depth
    blocks = [block_index(start, depth) for start in (range(depth) if starts is None else starts)]
    maps = drawing.explain({f"from block {start}": {"method": "decompx", "start": start} for start in blocks})
    rows = []
    for i, picture in enumerate(drawing.pictures):
        cells = [Cell(picture, drawing.name_of(int(drawing.classes[i])))]
        cells += [Cell(drawing.heat(i, att.scores[i], True, att), name) for name, att in maps.items()]
        rows += [Row(cells[begin : begin + BAND]) for begin in range(0, len(cells), BAND)]
    return drawing.rows(rows)
