"""The figure of DiffMask's counting task, which trains its own model."""

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
from patchlight.report.figures.sheet import COLUMN, Row, Tile, colour_picture, pictures
from patchlight.study import counting as task
from patchlight.study.counting import SIZES, CountingSize, SizeName
from patchlight.trained.diffmask.gates import DiffMask
from patchlight.trained.diffmask.train import train

TINY = CountingSize(32, 2, 2, 2e-3, 64, 1500, 300)
"""A counting task that is trained in seconds."""


def train_task(size: CountingSize, seed: int = 0, progress: Progress | bool = True) -> tuple[Anatomy, DiffMask]:
    """Train a ViT that counts red patches, and DiffMask's gates for it."""
    settings = task.gate_settings(size, seed=seed)
    total = size.vit_steps + size.steps
    with show_progress(progress, "training on the counting task") as advance:
        vit = task.train_counter(size, seed, report=lambda step, right: advance(step, total))
        loader = task.loader_of(counting_grids(6000, seed, "train"), settings.batch_size)
        return vit, train(vit, loader, settings, lambda p: advance(size.vit_steps + p.step, total))


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
    """Maps of held-out grids of the counting task, and the share of grids on which a thresholded map is exact."""
    if folder:
        vit, explainer = task.read_task(folder, SIZES[size])
    else:
        vit, explainer = train_task(TINY if tiny else SIZES[size], drawing.seed, drawing.progress)
    test_set = counting_grids(grids, drawing.seed, "test")
    with warnings.catch_warnings(action="ignore", category=DegenerateMap):  # grids may be all red, or have no red patch
        methods = {OURS: {"method": "diffmask", "explainer": explainer}, **by_label(rivals)}
        maps = explain(vit, test_set.images, methods, progress=False)
    chosen = grids_to_show(test_set, columns)
    photos = [vit.preprocess.picture(test_set.images[i]).resize((240, 240), 0) for i in chosen]
    rows = [Row([Tile(p, f"{int(test_set.labels[i])} red") for p, i in zip(photos, chosen, strict=True)], "Input")]
    for label, att in maps.items():
        exact = task.judge(label, att.scores, test_set.red, 0.5 if label == OURS else None).exact
        cells = [Tile(colour_picture(att.scores[i], (0.0, 1.0) if label == OURS else None)) for i in chosen]
        rows.append(Row(cells, f"{label} {100 * exact:.0f}\u00a0%"))
    shown = replace(drawing, vit=vit, images=test_set.images)
    shown.say(f"a ViT with {vit.depth} blocks and width {vit.width}, correct on all validation grids")
    shown.say(
        f"per cent: share of {len(test_set)} held-out grids on which the map, cut at one threshold for all grids, is "
        "exactly the red patches, or exactly the others, whichever is more frequent; the threshold is 0.5 for DiffMask "
        "and the best one for other methods"
    )
    shown.say("colours: from 0 (dark) to 1 for DiffMask, else from the lowest to the highest score of each map")
    return pictures(shown.note, rows, COLUMN, ())


def grids_to_show(grids: CountingGrids, columns: int) -> list[int]:
    """Indices of grids with few to many red patches, the first of each number."""
    chosen: list[int] = []
    for number in torch.linspace(1, SIDE * SIDE - 1, min(columns, len(grids))).round().long().tolist():
        left = [i for i in range(len(grids)) if i not in chosen]
        chosen.append(min(left, key=lambda i: (abs(int(grids.labels[i]) - number), i)))
    return chosen
