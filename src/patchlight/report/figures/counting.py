"""The figure of DiffMask's counting task, which has a model of its own."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.core.progress import telling
from patchlight.data.counting import PATCH, SIDE, Grids, counting_grids
from patchlight.engine import explain
from patchlight.evidence.ablation import Count
from patchlight.report.figures.drawing import NO_METHODS, Drawing, Methods, by_label
from patchlight.report.figures.layouts import OURS, layout
from patchlight.report.figures.sheet import COLUMN, Cell, Row, coloured, pictures
from patchlight.study.counting import (
    SIZES,
    CountingSize,
    SizeName,
    counter,
    gate_settings,
    judge,
    loader_of,
    train_counter,
)
from patchlight.trained.diffmask.gates import DiffMask, load
from patchlight.trained.diffmask.train import train

TINY = CountingSize(32, 2, 2, 2e-3, 64, 1500, 300)
"""A counting task that is learnt in seconds."""


@dataclass(frozen=True)
class CountingModel:
    """A ViT that counts red patches, and the gates trained beside it."""

    vit: Anatomy
    explainer: DiffMask


def read_counting(folder: str | Path, size: CountingSize = SIZES["small"]) -> CountingModel:
    """What `patchlight diffmask counting --out FOLDER` has left there."""
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    weights = Path(folder) / "vit.safetensors"
    if not weights.is_file():
        raise PatchlightError(f"'{folder}' holds no counting task; make one with `patchlight diffmask counting --out`")
    model: Any = VisionTransformer(
        img_size=SIDE * PATCH,
        patch_size=PATCH,
        num_classes=SIDE * SIDE + 1,
        embed_dim=size.width,
        depth=size.depth,
        num_heads=size.heads,
    )
    model.load_state_dict(load_file(weights))
    vit = counter(model.eval().requires_grad_(False))
    return CountingModel(vit, load(Path(folder) / "diffmask", vit))


def make_counting(size: CountingSize, seed: int = 0, progress: Any = True) -> CountingModel:
    """Both trained on the spot."""
    settings = gate_settings(size, seed=seed)
    most = size.vit_steps + size.steps
    with telling(progress, "training on the counting task") as tell:
        vit = train_counter(size, seed, tell=lambda step, right: tell(step, most))
        loader = loader_of(counting_grids(6000, seed, "train"), settings.batch_size)
        explainer = train(vit, loader, settings, lambda p: tell(size.vit_steps + p.step, most))
    return CountingModel(vit, explainer)


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
    shape = TINY if tiny else SIZES[size]
    task = read_counting(folder, SIZES[size]) if folder else make_counting(shape, drawing.seed, drawing.progress)
    held = counting_grids(grids, drawing.seed, "test")
    with warnings.catch_warnings(action="ignore", category=DegenerateMap):  # grids of red patches alone, or of none
        methods = {OURS: {"method": "diffmask", "explainer": task.explainer}, **by_label(rivals)}
        maps = explain(task.vit, held.images, methods, progress=False)
    chosen = grids_to_show(held, columns)
    photos = [task.vit.preprocess.picture(held.images[i]).resize((240, 240), 0) for i in chosen]
    rows = [Row([Cell(p, f"{int(held.labels[i])} red") for p, i in zip(photos, chosen, strict=True)], "Input")]
    for label, att in maps.items():
        exact = judge(label, att.scores, held.red, 0.5 if label == OURS else None).exact
        ends = (0.0, 1.0) if label == OURS else None
        cells = [Cell(coloured(att.scores[i], ends)) for i in chosen]
        rows.append(Row(cells, f"{label} {100 * exact:.0f}\u00a0%"))
    shown = replace(drawing, vit=task.vit, images=held.images)
    shown.say(f"A ViT of {task.vit.depth} blocks and width {task.vit.width}, right on all validation grids")
    shown.say(
        f"per cent: the share of {len(held)} held-out grids on which the map, cut at one threshold for all, is exactly "
        "the red set, or exactly its complement, whichever is more often; DiffMask is cut at 0.5, the others at their "
        "best threshold"
    )
    shown.say("Inferno from 0 (dark) to 1 for DiffMask, else from each map's lowest to its highest")
    return pictures(shown.note, rows, COLUMN, ())


def grids_to_show(held: Grids, columns: int) -> list[int]:
    """The first grid of each of some numbers of red patches, from few to many."""
    chosen: list[int] = []
    for number in torch.linspace(1, SIDE * SIDE - 1, min(columns, len(held))).round().long().tolist():
        left = [i for i in range(len(held)) if i not in chosen]
        chosen.append(min(left, key=lambda i: (abs(int(held.labels[i]) - number), i)))
    return chosen
