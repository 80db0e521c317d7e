"""The figures of Englebert et al., "Explaining through Transformer Input Sampling", and its studies of two settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from patchlight.core.drawing import percent
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import Targets, resolve_targets
from patchlight.evidence.ablation import Count
from patchlight.evidence.fills import Fill, Filling, fill_images, painted
from patchlight.methods.masking import Ratio, Ratios
from patchlight.metrics.base import Evaluation, Measure
from patchlight.metrics.deletion import thresholds
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.panels import tell_bands
from patchlight.report.figures.sheet import COLUMN, WORDS, Cell, Row, line, tidy

PAPER = "TIS (Englebert et al., ICCV-W 2023)"
Counts = Annotated[list[Count], Field(min_length=1)]
METHODS: dict[str, Any] = {
    "TIS": "tis",
    "ViT-CX": "vit-cx",
    "TAM": {"method": "tam", "preset": "tis"},
    "Chefer1": "transatt",
    "Chefer2": "genatt",
    "Rollout": {"method": "rollout", "preset": "vit-explain"},
    "BT-H": {"method": "bt-h", "preset": "tis"},
    "BT-T": {"method": "bt-t", "preset": "tis"},
    "RISE": {"method": "rise", "preset": "tis"},
    "IG": {"method": "ig", "preset": "tis"},
    "SmoothGrad": {"method": "smoothgrad", "preset": "tis"},
}
AGAINST = {"TIS": "tis", "Integrated Gradients": {"method": "ig", "preset": "tis"}}
SAMPLES = [32, 64, 128, 256, 512, 1024, 2048]
RATIOS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
SMALL: dict[str, Any] = {"method": "tis", "samples": 24}


@register_figure(
    "tis-2",
    paper=f"{PAPER}, Figure 2",
    shows="TIS beside ten other methods: the whole object, in grades",
    stand_in="ViT-B/16 and four ImageNet validation images",
    quick={"shown": 2, "methods": {"TIS": SMALL, "Chefer2": "genatt"}},
)
def methods(drawing: Drawing, shown: Count = 4, methods: Methods = METHODS) -> Figure:
    """A row for each image, a column for each method; the brighter, the more a patch speaks for the class."""
    maps = drawing.explain(methods)
    rows: list[Row] = []
    for i, index in enumerate(drawing.classes.tolist()):
        cells = [Cell(drawing.pictures[i])]
        for label, att in maps.items():
            cells.append(Cell(drawing.heat(i, att.scores[i], True, att), "" if rows else label))
        rows.append(Row(cells, drawing.name_of(index)))
    return drawing.rows(rows)


@register_figure(
    "tis-3",
    paper=f"{PAPER}, Figure 3",
    shows="where model and label disagree, TIS shows the object for the predicted class, and not for the label's",
    needs={"labels or target"},
    stand_in="ViT-B/16 and a kite that it takes for a bald eagle",
    quick={"samples": 24},
)
def disagreement(drawing: Drawing, samples: Count = 1024) -> Figure:
    """The image that the model is most wrong about: (a) itself, (b, c) others of its true and its predicted class, and
    TIS's maps (d) for its true class and (e) for the predicted one.

    Needs the labels, and an image among them that is predicted wrongly; or `target`, which then counts as the true
    class of the first image that is predicted otherwise. (b) and (c) are taken from the images given, where there are
    any.
    """
    predicted, true = drawing.predictions, _true(drawing)
    probabilities = drawing.vit.probabilities(drawing.logits.float())
    each = torch.arange(len(drawing))
    surer = probabilities[each, predicted] - probabilities[each, true]
    wrong = predicted != true
    if not bool(wrong.any()):
        raise PatchlightError(
            f"all {len(drawing)} images are predicted as they should be; give one that is not, or target=CLASS"
        )
    asked = drawing.asked is not None
    i = int(wrong.nonzero()[0]) if asked else int(surer.masked_fill(~wrong, -torch.inf).argmax())
    pair = [int(true[i]), int(predicted[i])]
    alone = drawing.select([i])
    att = alone.explain({"TIS": {"method": "tis", "samples": samples}}, target=[pair])["TIS"]
    names = [drawing.name_of(index) for index in pair]
    cells = [Cell(drawing.pictures[i], "(a) image")]
    letters = iter("bcde")
    for index, word in zip(pair, names, strict=True):
        others = [j for j in each.tolist() if j != i and not asked and true[j] == index]
        others.sort(key=lambda j: bool(wrong[j]))
        if others:
            cells.append(Cell(drawing.pictures[others[0]], f"({next(letters)}) another {word}"))
    for t, (index, word) in enumerate(zip(pair, names, strict=True)):
        chance = f"{'target' if t == 0 else 'predicted'}, p = {percent(float(probabilities[i, index]))}"
        cells.append(Cell(alone.heat(0, att.scores[0, t], True, att), f"({next(letters)}) {word}", chance))
    return alone.rows([Row(cells)])


def _true(drawing: Drawing) -> Tensor:
    """The classes [B] that are true, or that the user says are."""
    if drawing.asked is not None:
        found = resolve_targets(drawing.asked, len(drawing), drawing.vit.outcomes, drawing.vit.labels)
        assert found is not None
        return found.index[:, 0]
    assert drawing.labels is not None
    if bool((drawing.labels < 0).any()):
        raise PatchlightError("some of the images have no label; leave them out, or give target=CLASS")
    return drawing.labels


@register_figure(
    "tis-4",
    paper=f"{PAPER}, Figure 4",
    shows="the image after 50 steps of deletion: TIS hides the object, Integrated Gradients scatters",
    stand_in="ViT-B/16 and a jacamar",
    quick={"methods": {"TIS": SMALL, "GenAtt": "genatt"}, "steps": 8, "step": 2},
)
def deleted(
    drawing: Drawing,
    shown: Count = 1,
    methods: Methods = AGAINST,
    step: Count = 50,
    steps: Count = 224,
    fill: Fill = "image-mean",
) -> Figure:
    """For each method: its map, the image after `step` of `steps` steps of the metric deletion, and the curve.

    Pixels are painted with `fill`; which of its four the paper shows is not said. Of several images, each has a row of
    pictures, and the curves are their mean.
    """
    maps = drawing.explain(methods)
    if step > steps:
        raise PatchlightError(f"step {step} is after the last of {steps}; give a smaller one")
    metric = {"deletion": {"preset": "tis", "fill": fill, "steps": steps}}
    found = drawing.evaluate(maps, metric)
    count = int(np.prod(drawing.images.shape[-2:]))
    changed = int(thresholds(count, steps, first=False)[step - 1])
    drawing = replace(drawing, images=drawing.vit.place(drawing.images))
    filled = fill_images(fill, drawing.images, drawing.vit, drawing.seed)
    titles = [word for label in maps for word in (label, f"after {step} steps")]
    across = 1 + len(titles)
    side = min(1.3, 6.9 / across)
    fig = drawing.sheet(len(drawing) * (side + 0.25) + 1.9)
    grid = fig.add_gridspec(len(drawing) + 1, across, height_ratios=[*[side] * len(drawing), 1.75])
    after = {label: without_highest(drawing, att.scores, filled, changed) for label, att in maps.items()}
    for i, index in enumerate(drawing.classes.tolist()):
        shown_here = [drawing.pictures[i]]
        for label, att in maps.items():
            shown_here += [drawing.heat(i, att.scores[i], True, att), drawing.vit.preprocess.picture(after[label][i])]
        for c, (picture, title) in enumerate(zip(shown_here, [drawing.name_of(index), *titles], strict=True)):
            axes = fig.add_subplot(grid[i, c])
            axes.imshow(np.asarray(picture), interpolation="antialiased")
            axes.set_axis_off()
            axes.set_title(title if i == 0 or c == 0 else "", size=WORDS)
    axes = fig.add_subplot(grid[len(drawing), :])
    tidy(axes, "", "step", "score of the class")
    for n, label in enumerate(maps):
        evaluation: Evaluation = found[label]["deletion"]
        assert evaluation.curve is not None
        name = f"{label} (mean {evaluation.mean:.3f})"
        line(axes, range(1, evaluation.curve.shape[1] + 1), evaluation.curve, name, n, marker="")
    axes.axvline(step, color="0.5", linewidth=0.8, linestyle="--")
    axes.legend(fontsize=WORDS - 0.5, frameon=False)
    return fig


def without_highest(drawing: Drawing, maps: Tensor, filled: Filling, changed: int) -> Tensor:
    """The images without their `changed` highest pixels, which show the fill."""
    targets = Targets(drawing.classes[:, None])
    asked = Measure(drawing.vit, drawing.images, maps.to(drawing.images.device), targets, seed=drawing.seed)
    shown = asked.ranks("pixel") >= changed
    return painted(drawing.images, filled, torch.arange(len(drawing)), shown[:, None])


@register_figure(
    "tis-masks",
    paper=f"{PAPER}, supplement: the number of masks N_m",
    shows="insertion, deletion and their difference over TIS's number of masks",
    stand_in="ViT-B/16 and DeiT-B/16; 128 to 1,024 masks are good, with little gain beyond",
    quick={"samples": [8, 24], "steps": 6},
)
def masks(
    drawing: Drawing,
    samples: Count | Counts = SAMPLES,
    keep: Ratio | Ratios = 0.5,
    steps: Count = 224,
    fill: Fill = "image-mean",
) -> Figure:
    """The metrics of TIS with each number of masks; the paper's study is in a supplement whose text we do not have."""
    counts = sorted({samples} if isinstance(samples, int) else set(samples))
    asked = {str(n): {"method": "tis", "samples": n, "keep": keep} for n in counts}
    return _study(drawing, asked, counts, "masks $N_m$", steps, fill, log=True)


@register_figure(
    "tis-ratio",
    paper=f"{PAPER}, supplement: the share of tokens kept",
    shows="insertion, deletion and their difference over the share of tokens that TIS's masks keep",
    stand_in="ViT-B/16 and DeiT-B/16; 0.5 is the default",
    quick={"samples": 16, "keep": [0.3, 0.7], "steps": 6},
)
def ratio(
    drawing: Drawing,
    keep: Ratio | Ratios = RATIOS,
    samples: Count = 1024,
    steps: Count = 224,
    fill: Fill = "image-mean",
) -> Figure:
    """The metrics of TIS with each keep ratio; the paper's study is in a supplement whose text we do not have."""
    ratios = sorted(set(keep) if isinstance(keep, list) else {keep})
    asked = {str(r): {"method": "tis", "samples": samples, "keep": r} for r in ratios}
    return _study(drawing, asked, ratios, "share of tokens kept", steps, fill)


def _study(
    drawing: Drawing,
    asked: Mapping[str, Any],
    x: Sequence[float],
    words: str,
    steps: int,
    fill: Fill,
    log: bool = False,
) -> Figure:
    """Insertion, deletion and their difference of every setting, for each model."""
    tell_bands(drawing)
    metric = {"ins-del": {"preset": "tis", "fill": fill, "steps": steps}}
    models = drawing.models
    found = [own.evaluate(own.working(asked), metric) for own in models]
    fig = drawing.sheet(2.1, COLUMN * len(models))
    panels = fig.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, own, evaluations in zip(panels, models, found, strict=True):
        tidy(axes, own.vit.name, words, "mean probability of the class" if axes is panels[0] else "")
        verdicts: list[Evaluation] = [evaluations[label]["ins-del"] for label in asked]
        kinds = {
            "insertion − deletion": [one.values for one in verdicts],
            "insertion": [one.parts["insertion"] for one in verdicts],
            "deletion": [one.parts["deletion"] for one in verdicts],
        }
        for n, (label, values) in enumerate(kinds.items()):
            line(axes, x, torch.stack([v.double() for v in values], 1), label, n)
        if log:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(x), [f"{value:g}" for value in x])
            axes.minorticks_off()
    handles, names = panels[0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside upper center", ncols=3, fontsize=WORDS - 0.5, frameon=False)
    return fig
