"""The figures of Nalmpantis et al., "VISION DIFFMASK: Faithful Interpretation of Vision Transformers"."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.drawing.heat import Scale, blend
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.core.progress import telling
from patchlight.data.counting import PATCH, SIDE, Grids, counting_grids
from patchlight.engine import explain
from patchlight.evidence.ablation import Count
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.perturbation import Direction, Points
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.panels import by_method, coloured, explained, of_prediction, stretched, tell_bands
from patchlight.report.figures.sheet import COLUMN, Cell, Row, line, pictures, tidy
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

PAPER = "VISION DIFFMASK (Nalmpantis et al., CVPR-W 2023)"
RIVALS: dict[str, Any] = {
    "Grad-CAM": {"method": "gradcam", "preset": "diffmask"},
    "Attn. Roll.": {"method": "rollout", "preset": "vit-explain"},
    "Chefer et al.": "transatt",
}
"""The paper's rivals, by its names and as its code computes them."""
OURS = "DiffMask"


def _with_ours(drawing: Drawing, rivals: Methods | None) -> dict[str, Any]:
    """DiffMask and its rivals, as `explain` takes them; refused where no explainer fits the model."""
    own = {"method": "diffmask", **({} if drawing.explainer is None else {"explainer": str(drawing.explainer)})}
    reason = refusal(resolve(OURS, own).suited(drawing.vit), drawing.vit)
    if reason is not None:
        raise PatchlightError(f"DiffMask cannot explain {drawing.vit.name}: {reason}")
    others = RIVALS if rivals is None else rivals
    return {OURS: own, **(others if isinstance(others, dict) else {name: name for name in others})}


def _maps(drawing: Drawing, rivals: Methods | None) -> Figure:
    """A column for every image: the photograph, and the heat of every method below it."""
    drawing = of_prediction(drawing)
    maps = explained(drawing, _with_ours(drawing, rivals))
    drawing.say("DiffMask's colours go from 0 to 1, the share of a patch that is kept")

    def shown(i: int, label: str, att: Attribution) -> Image.Image:
        if label == OURS:
            return blend(drawing.pictures[i], att.scores[i], Scale(0.0, 1.0, False), upsampling="nearest")
        return drawing.heat(i, att.scores[i], True, att)

    return by_method(drawing, maps, shown)


@register_figure(
    "diffmask-3",
    paper=f"{PAPER}, Figure 3",
    shows="DiffMask's and its rivals' maps of CIFAR-10's classes: DiffMask keeps the object, with hard edges",
    needs={"explainer"},
    stand_in="a ViT-B/16 fine-tuned on CIFAR-10 (98.75 %), its test images",
    quick={"shown": 3},
)
def on_cifar(drawing: Drawing, shown: Count = 8, methods: Methods | None = None) -> Figure:
    """DiffMask beside Grad-CAM, rollout and Chefer et al. on small photographs; `methods` are other rivals."""
    return _maps(drawing, methods)


@register_figure(
    "diffmask-4",
    paper=f"{PAPER}, Figure 4",
    shows="DiffMask's and its rivals' maps on ImageNet: DiffMask keeps all prominent objects, not the top class alone",
    needs={"explainer"},
    stand_in="a ViT-B/16 for ImageNet-1k (85.49 %), its validation images",
    quick={"shown": 3},
)
def on_imagenet(drawing: Drawing, shown: Count = 8, methods: Methods | None = None) -> Figure:
    """The same as Figure 3, on ImageNet: gates trained for its classes keep what the whole distribution rests on."""
    return _maps(drawing, methods)


def _curves(drawing: Drawing, direction: Direction, points: int, rivals: Methods | None) -> Figure:
    """-log p and p of the predicted class while pixels are removed, the mean over images with its interval."""
    drawing = of_prediction(drawing)
    asked = {**_with_ours(drawing, rivals), "Random": "random"}
    common = {"metric": "perturbation", "preset": "diffmask", "direction": direction, "points": points}
    metrics = {"KL": {**common, "quantity": "nll"}, "accuracy": {**common, "quantity": "probability"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        found = drawing.evaluate(drawing.working(asked), metrics)
    drawing.say(
        "removed pixels become noise; as in the paper's code its KL is −log p and its accuracy p of the class predicted"
    )
    tell_bands(drawing)
    fig = drawing.sheet(2.3)
    axes = fig.subplots(1, 2)
    ideal = {("KL", "positive"): "higher", ("KL", "negative"): "lower"}
    for axis, (name, words) in zip(
        axes, {"KL": "−log p(class)  (“KL divergence”)", "accuracy": "p(class)  (“accuracy”)"}.items(), strict=True
    ):
        for n, (label, own) in enumerate(found.items()):
            measured = own[name]
            line(axis, 100 * measured.x, measured.curve, label, n, marker=None)
        better = ideal.get((name, direction), "lower" if direction == "positive" else "higher")
        first = "most" if direction == "positive" else "least"
        tidy(axis, f"{better} is better", f"pixels removed, {first} relevant first (%)", words)
        axis.set_xlim(0, 100)
        axis.set_ylim(bottom=0)
    axes[1].legend(fontsize=6.5, frameon=False, loc="upper right" if direction == "positive" else "lower left")
    return fig


_STAND_IN = "a ViT-B/16 fine-tuned on CIFAR-10, 50 of its test images"


@register_figure(
    "diffmask-5",
    paper=f"{PAPER}, Figure 5",
    shows="negative perturbation: least relevant pixels removed first, and the output should stay as it is",
    needs={"explainer"},
    stand_in=_STAND_IN,
    quick={"points": 6},
)
def negative(drawing: Drawing, points: Points = 29, methods: Methods | None = None) -> Figure:
    """Two curves for every method over the share of pixels removed, the lowest first."""
    return _curves(drawing, "negative", points, methods)


@register_figure(
    "diffmask-6",
    paper=f"{PAPER}, Figure 6",
    shows="positive perturbation: most relevant pixels removed first, and the output should change at once",
    needs={"explainer"},
    stand_in=_STAND_IN,
    quick={"points": 6},
)
def positive(drawing: Drawing, points: Points = 29, methods: Methods | None = None) -> Figure:
    """Two curves for every method over the share of pixels removed, the highest first."""
    return _curves(drawing, "positive", points, methods)


@dataclass(frozen=True)
class Counting:
    """A ViT that counts red patches, and the gates trained beside it."""

    vit: Anatomy
    explainer: DiffMask


def read_counting(folder: str | Path, size: CountingSize = SIZES["small"]) -> Counting:
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
    return Counting(vit, load(Path(folder) / "diffmask", vit))


def make_counting(size: CountingSize, seed: int = 0, progress: Any = True) -> Counting:
    """Both trained on the spot."""
    settings = gate_settings(size, seed=seed)
    most = size.vit_steps + size.steps
    with telling(progress, "training on the counting task") as tell:
        vit = train_counter(size, seed, tell=lambda step, right: tell(step, most))
        loader = loader_of(counting_grids(6000, seed, "train"), settings.batch_size)
        explainer = train(vit, loader, settings, lambda p: tell(size.vit_steps + p.step, most))
    return Counting(vit, explainer)


TINY = CountingSize(32, 2, 2, 2e-3, 64, 1500, 300)
"""A counting task that is learnt in seconds."""


@register_figure(
    "diffmask-2",
    paper=f"{PAPER}, Figure 2",
    shows="a ViT that counts red patches: a faithful map is the red ones or all others, on every grid",
    stand_in="a ViT-base of 12 blocks, trained for the task",
    quick={"tiny": True, "grids": 40},
)
def counting(
    drawing: Drawing,
    columns: Count = 6,
    grids: Count = 100,
    folder: str | None = None,
    size: SizeName = "small",
    tiny: bool = False,
) -> Figure:
    """Maps of held-out grids of the counting task, and the share of `grids` of them on which a threshold is exact.

    The model and the images given are not used: a ViT is trained to count, and DiffMask beside it, unless `folder` has
    what `patchlight diffmask counting --size SIZE --out FOLDER` left (`tiny`: a smaller task, done in seconds).
    """
    task = (
        read_counting(folder, SIZES[size])
        if folder
        else make_counting(TINY if tiny else SIZES[size], drawing.seed, drawing.progress)
    )
    held = counting_grids(grids, drawing.seed, "test")
    asked = {OURS: {"method": "diffmask", "explainer": task.explainer}, **RIVALS}
    with warnings.catch_warnings():  # grids of red patches alone, or of none
        warnings.simplefilter("ignore", DegenerateMap)
        maps = {k: a.scores for k, a in explain(task.vit, held.images, asked, progress=False).items()}
    chosen = grids_to_show(held, columns)
    pictures_of = [task.vit.preprocess.picture(held.images[i]).resize((240, 240), 0) for i in chosen]
    rows = [Row([Cell(p, f"{int(held.labels[i])} red") for p, i in zip(pictures_of, chosen, strict=True)], "Input")]
    for label, scores in maps.items():
        exact = judge(label, scores, held.red, 0.5 if label == OURS else None).exact
        cells = [Cell(coloured(scores[i]) if label == OURS else stretched(scores[i])) for i in chosen]
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
    wanted = torch.linspace(1, SIDE * SIDE - 1, min(columns, len(held))).round().long().tolist()
    found: list[int] = []
    for number in wanted:
        left = [i for i in range(len(held)) if i not in found]
        found.append(min(left, key=lambda i: (abs(int(held.labels[i]) - number), i)))
    return found
