"""The figure of DiffMask's counting task, which has a model of its own."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from matplotlib.figure import Figure

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap
from patchlight.core.progress import Progress, show_progress
from patchlight.data.counting import SIDE, CountingGrids, counting_grids
from patchlight.engine import explain
from patchlight.evidence.ablation import Count
from patchlight.report.figures.drawing import NO_METHODS, Drawing, Methods, by_label
from patchlight.report.figures.layouts import OURS, layout
from patchlight.report.figures.sheet import COLUMN, Row, Tile, coloured, pictures
from patchlight.study.counting import (
    SIZES,
    CountingSize,
    SizeName,
    gate_settings,
    judge,
    loader_of,
    read_task,
    train_counter,
)
from patchlight.trained.diffmask.gates import DiffMask
from patchlight.trained.diffmask.train import train

TINY = CountingSize(32, 2, 2, 2e-3, 64, 1500, 300)
"""A counting task that is learnt in seconds."""


def train_task(size: CountingSize, seed: int = 0, progress: Progress | bool = True) -> tuple[Anatomy, DiffMask]:
    """A ViT that counts red patches, and the gates beside it."""
    settings = gate_settings(size, seed=seed)
    most = size.vit_steps + size.steps
    with show_progress(progress, "training on the counting task") as tell:
        vit = train_counter(size, seed, report=lambda step, right: tell(step, most))
        loader = loader_of(counting_grids(6000, seed, "train"), settings.batch_size)
        return vit, train(vit, loader, settings, lambda p: tell(size.vit_steps + p.step, most))


@layout
def counting(
    drawing: Drawing,
    columns: Count = 6,
    grids: Count = 100,
    folder: str | None = None,
    size: SizeName = "small",
    tiny: bool = False,
    *,
    rivals: Methods = NO_METHODS,
) -> Figure:
    """Maps of held-out grids of the counting task, and the share of them on which a threshold is exact."""
    if folder:
        vit, explainer = read_task(folder, SIZES[size])
    else:
        vit, explainer = train_task(TINY if tiny else SIZES[size], drawing.seed, drawing.progress)
    held = counting_grids(grids, drawing.seed, "test")
    with warnings.catch_warnings(action="ignore", category=DegenerateMap):  # grids of red patches alone, or of none
        methods = {OURS: {"method": "diffmask", "explainer": explainer}, **by_label(rivals)}
        maps = explain(vit, held.images, methods, progress=False)
    chosen = grids_to_show(held, columns)
    photos = [vit.preprocess.picture(held.images[i]).resize((240, 240), 0) for i in chosen]
    rows = [Row([Tile(p, f"{int(held.labels[i])} red") for p, i in zip(photos, chosen, strict=True)], "Input")]
    for label, att in maps.items():
        exact = judge(label, att.scores, held.red, 0.5 if label == OURS else None).exact
        cells = [Tile(coloured(att.scores[i], (0.0, 1.0) if label == OURS else None)) for i in chosen]
        rows.append(Row(cells, f"{label} {100 * exact:.0f}\u00a0%"))
    shown = replace(drawing, vit=vit, images=held.images)
    shown.say(f"A ViT of {vit.depth} blocks and width {vit.width}, right on all validation grids")
    shown.say(
        f"per cent: the share of {len(held)} held-out grids on which the map, cut at one threshold for all, is exactly "
        "the red set, or exactly its complement, whichever is more often; DiffMask is cut at 0.5, the others at their "
        "best threshold"
    )
    shown.say("Inferno from 0 (dark) to 1 for DiffMask, else from each map's lowest to its highest")
    return pictures(shown.note, rows, COLUMN, ())


def grids_to_show(held: CountingGrids, columns: int) -> list[int]:
    """The first grid of each of some numbers of red patches, from few to many."""
    chosen: list[int] = []
    for number in torch.linspace(1, SIDE * SIDE - 1, min(columns, len(held))).round().long().tolist():
        left = [i for i in range(len(held)) if i not in chosen]
        chosen.append(min(left, key=lambda i: (abs(int(held.labels[i]) - number), i)))
    return chosen
