"""The figures of Mehri et al., "SkipPLUS: Skip the First Few Layers to Better Explain Vision Transformers".

The paper's charts have an axis for each metric: token deletion and insertion in accuracy and AOPC, all turned so that
higher is better, and segmentation AP where outlines of the objects are known. Their numbers are not in its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure

from patchlight.core.errors import PatchlightError
from patchlight.evidence.ablation import Count
from patchlight.methods.compositions import block_index, half
from patchlight.metrics.base import Evaluation
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.numbers import record
from patchlight.report.figures.panels import tell_bands
from patchlight.report.figures.sheet import COLOURS, COLUMN, Cell, Row, dots, in_bands, line, style, tidy

PAPER = "SkipPLUS (Mehri et al., CVPR-W 2024)"
MODELS = "ViT-B/8 and EVA-L/14 on 5,000 ImageNet validation images, ViT-B/16 on 2,000 of MURA"
WIDE, CHART = 7, 0.135
"""Pictures side by side at most, and the height of a chart's row in inches."""
Chart = Literal["dots", "radar"]
"""A dot with its interval for each method on each axis; or, as in the paper, all axes around a centre."""

_ALIKE: dict[str, Any] = {"preset": "skipplus"}
FORWARD = {
    "Random": "random",
    "GenAtt": "genatt",
    "RawAtt-Rollout": {"method": "rollout", **_ALIKE},
    "RawAtt∘PLUS": "rawatt.plus",
    "RawAtt∘SkipPLUS": "rawatt.skipplus",
    "GlobEnc-Rollout": {"method": "globenc", **_ALIKE},
    "GlobEnc∘PLUS": {"method": "globenc.plus", **_ALIKE},
    "GlobEnc∘SkipPLUS": {"method": "globenc.skipplus", **_ALIKE},
    "ALTI-Rollout": {"method": "alti", **_ALIKE},
    "ALTI∘PLUS": {"method": "alti.plus", **_ALIKE},
    "ALTI∘SkipPLUS": {"method": "alti.skipplus", **_ALIKE},
    "DecompX": "decompx",
    "DecompX∘PLUS": "decompx.plus",
    "DecompX∘SkipPLUS": "decompx.skipplus",
}
BEST = {
    "Random": "random",
    "RawAtt∘SkipPLUS": "rawatt.skipplus",
    "GenAtt": "genatt",
    "TransAtt": "transatt",
    "GlobEnc∘SkipPLUS": {"method": "globenc.skipplus", **_ALIKE},
    "ALTI∘SkipPLUS": {"method": "alti.skipplus", **_ALIKE},
    "GradCAM∘PLUS": {"method": "gradcam.plus", **_ALIKE},
    "XGradCAM+∘PLUS": {"method": "xgradcam+.plus", **_ALIKE},
    "HiResCAM": {"method": "hirescam", **_ALIKE},
    "Grad∘PLUS": "grad.plus",
    "IG": {"method": "ig", **_ALIKE},
    "SmoothGrad": {"method": "smoothgrad", **_ALIKE},
    "IxG∘SkipPLUS": "ixg.skipplus",
    "AttIxG∘PLUS": "attcat",
    "FullGrad+": "fullgrad-plus",
    "DecompX": "decompx",
    "DecompX∘PLUS": "decompx.plus",
    "DecompX∘SkipPLUS": "decompx.skipplus",
}
GRADIENTS = {
    "Random": "random",
    "Grad": "grad",
    "Grad∘PLUS": "grad.plus",
    "Grad∘SkipPLUS": "grad.skipplus",
    "AttnGrad": "attngrad",
    "AttnGrad∘PLUS": "attngrad.plus",
    "AttnGrad∘SkipPLUS": "attngrad.skipplus",
}
GENATT = {
    "Random": "random",
    "GenAtt": "genatt",
    "GenAtt∘PLUS (GradSAM)": "genatt.plus",
    "GenAtt∘SkipPLUS": "genatt.skipplus",
}
FULLGRAD = {
    "Random": "random",
    "FullGrad": "fullgrad",
    "FullGrad+ (PLUS)": "fullgrad-plus",
    "FullGrad+∘SkipPLUS": "fullgrad-plus.skipplus",
}
IXG = {
    "Random": "random",
    "IxG": "ixg",
    "IxG∘PLUS (CAT)": "ixg.plus",
    "IxG∘SkipPLUS": "ixg.skipplus",
    "AttIxG": "attixg",
    "AttIxG∘PLUS (AttCAT)": "attixg.plus",
    "AttIxG∘SkipPLUS": "attixg.skipplus",
}
CAMS = {
    "Random": "random",
    **{
        f"{label}{behind}": {"method": f"{name}{composition}", **_ALIKE}
        for label, name in {
            "GradCAM": "gradcam",
            "GradCAM++": "gradcam++",
            "XGradCAM": "xgradcam",
            "XGradCAM+": "xgradcam+",
            "GradCAMElementWise": "gradcam-elementwise",
            "HiResCAM": "hirescam",
        }.items()
        for behind, composition in {"": "", "∘PLUS": ".plus", "∘SkipPLUS": ".skipplus"}.items()
    },
}
FIRST = {
    "DecompX∘SkipPLUS": "decompx.skipplus",
    "DecompX": "decompx",
    "GenAtt": "genatt",
    "GradCAM∘PLUS": {"method": "gradcam.plus", **_ALIKE},
    "IxG": "ixg",
}
PUBLISHED = {
    "RawAtt": {"method": "rollout", **_ALIKE},
    "GlobEnc": {"method": "globenc", **_ALIKE},
    "ALTI": {"method": "alti", **_ALIKE},
    "GenAtt": "genatt",
    "DecompX": "decompx",
    "IxG": "ixg",
}
COMPOSED = {
    "RawAtt": "rawatt.skipplus",
    "GlobEnc": {"method": "globenc.skipplus", **_ALIKE},
    "ALTI": {"method": "alti.skipplus", **_ALIKE},
    "GenAtt": "genatt.skipplus",
    "DecompX": "decompx.skipplus",
    "IxG": "ixg.skipplus",
}
CLASSY = {
    "DecompX∘SkipPLUS": "decompx.skipplus",
    "DecompX": "decompx",
    "GenAtt": "genatt",
    "AttIxG∘PLUS": "attcat",
    "GradCAM∘PLUS": {"method": "gradcam.plus", **_ALIKE},
    "FullGrad": "fullgrad",
    "FullGrad+": "fullgrad-plus",
}
SWEPT = {"DecompX": "decompx", "IxG": "ixg", "GenAtt": "genatt"}


@register_figure(
    "skipplus-1",
    paper=f"{PAPER}, Figure 1",
    shows="DecompX with SkipPLUS keeps to the object, where DecompX alone and GenAtt are noisy",
    stand_in="EVA-L/14 and one image, a newt",
    quick={"methods": ["decompx.skipplus", "genatt"]},
)
def first(drawing: Drawing, shown: Count = 1, methods: Methods = FIRST) -> Figure:
    """A photograph and the maps of a few methods: the brighter, the more a patch speaks for the class.

    The text names DecompX∘SkipPLUS, GenAtt and GradCAM; which others the picture shows is not said.
    """
    return _pictures(drawing, methods)


@register_figure(
    "skipplus-2",
    paper=f"{PAPER}, Figure 2",
    shows="DecompX started at each block: noisy from the first blocks, cleaner from later ones",
    quick={"shown": 1, "starts": [0, 3, 6]},
)
def starts(drawing: Drawing, shown: Count = 1, starts: list[int] | None = None) -> Figure:
    """DecompX from different blocks: the photograph, and the map of every start (or of those asked).

    The caption is all that the text has of this picture; which image and model it shows is not said.
    """
    drawing.say("the paper does not say with what its own was drawn")
    depth = drawing.vit.depth
    blocks = [block_index(start, depth) for start in (range(depth) if starts is None else starts)]
    return _pictures(drawing, {f"from block {b}": {"method": "decompx", "start": b} for b in blocks})


@register_figure(
    "skipplus-3",
    paper=f"{PAPER}, Figure 3",
    shows="PLUS and SkipPLUS with forward attention-based methods, on every metric",
    stand_in=MODELS,
    quick={"methods": {"Random": "random", "DecompX∘SkipPLUS": "decompx.skipplus"}, "points": 2, "chart": "radar"},
)
def forward(drawing: Drawing, methods: Methods = FORWARD, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of RawAtt, GlobEnc, ALTI and DecompX: their own composition, PLUS and SkipPLUS.

    The recipe skipplus-figure-3 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-4",
    paper=f"{PAPER}, Figure 4",
    shows="the best versions of all methods, on every metric",
    stand_in=MODELS,
    quick={"methods": ["random", "attcat"], "points": 2},
)
def best(drawing: Drawing, methods: Methods = BEST, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of the best versions of all methods; which the paper shows is not in its text.

    The recipe skipplus-figure-4 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-5",
    paper=f"{PAPER}, Figure 5",
    shows="methods as published, and with SkipPLUS below; products of small numbers leave ALTI's rollout empty",
    stand_in="ViT-B/8",
    quick={"shown": 1, "methods": {"DecompX": "decompx"}, "composed": {"DecompX": "decompx.skipplus"}},
)
def composed(drawing: Drawing, shown: Count = 2, methods: Methods = PUBLISHED, composed: Methods = COMPOSED) -> Figure:
    """Two rows for each image: methods by their own composition, mostly Rollout, and under SkipPLUS.

    `methods` and `composed` have the same labels. Which methods the picture shows besides ALTI and GlobEnc is not in
    the text.
    """
    upper, lower = (_labelled(given) for given in (methods, composed))
    if list(upper) != list(lower):
        raise PatchlightError(f"methods {list(upper)} and composed {list(lower)} differ; give the same labels")
    kept = [label for label in drawing.working(upper) if label in drawing.working(lower)]
    above = drawing.explain({label: upper[label] for label in kept})
    below = drawing.explain({label: lower[label] for label in kept})
    rows = []
    for i, index in enumerate(drawing.classes.tolist()):
        for maps, words in ((above, "as published"), (below, "with SkipPLUS")):
            title = drawing.name_of(index) if maps is above else ""
            cells: list[Cell | None] = [Cell(drawing.pictures[i], title) if maps is above else None]
            for label, att in maps.items():
                heat = drawing.heat(i, att.scores[i], True, att)
                cells.append(Cell(heat, label if maps is above else ""))
            rows.append(Row(cells, words))
    return drawing.rows(rows)


@register_figure(
    "skipplus-6",
    paper=f"{PAPER}, Figure 6",
    shows="whether methods tell two classes of one image apart",
    stand_in="EVA-L/14 and images of COCO with a zebra and an elephant",
    quick={"shown": 1, "methods": ["decompx.skipplus", "genatt"], "classes": ["dog", "cat"]},
)
def discriminative(
    drawing: Drawing, shown: Count = 2, methods: Methods = CLASSY, classes: list[int | str] | None = None
) -> Figure:
    """A row for each image and class: `classes` by name or index, or the two that the model finds most probable.

    Methods that look at no class, such as ALTI and GlobEnc, are left out, as in the paper.
    """
    from patchlight.core.targets import class_index

    vit = drawing.vit
    if classes is None:
        if vit.outcomes < 2:
            raise PatchlightError(f"{vit.name} has one class; a figure of two classes needs a model that has them")
        found = drawing.logits.float()
        both = vit.probabilities(found) if vit.outputs.kind == "binary" else found
        wanted = both.topk(2, 1).indices.tolist()
    else:
        wanted = [[class_index(one, vit.outcomes, vit.labels) for one in classes]] * len(drawing)
    maps = drawing.explain(methods, target=wanted)
    rows: list[Row] = []
    for i, own in enumerate(wanted):
        for t, index in enumerate(own):
            cells: list[Cell | None] = [Cell(drawing.pictures[i])] if t == 0 else [None]
            for label, att in maps.items():
                heat = drawing.heat(i, att.scores[i, t], True, att)
                cells.append(Cell(heat, label if not rows else ""))
            rows.append(Row(cells, drawing.name_of(index)))
    return drawing.rows(rows)


@register_figure(
    "skipplus-7",
    paper=f"{PAPER}, Figure 7",
    shows="the first block of the sum: PLUS and SkipPLUS are both near the best",
    stand_in=MODELS,
    quick={"methods": ["decompx"], "starts": [0, 5], "points": 2},
)
def cutoffs(drawing: Drawing, methods: Methods = SWEPT, points: Count = 9, starts: list[int] | None = None) -> Figure:
    """Each metric of sums from every block (or from `starts`) to the last.

    PLUS begins at block 0, SkipPLUS at the middle, which are marked. The recipe skipplus-figure-7 measures the same
    into a table. Of a second model, all is drawn in a row below.
    """
    drawing.say("grey lines are at PLUS (block 0) and SkipPLUS (the middle)")
    tell_bands(drawing)
    models = _models(drawing)
    found = []
    for own in models:
        depth = own.vit.depth
        blocks = sorted({block_index(start, depth) for start in (range(depth) if starts is None else starts)})
        asked: dict[str, Any] = {"random": "random"}
        for label, method in _labelled(methods).items():
            base = {"method": method} if isinstance(method, str) else dict(method)
            name = base.pop("method", label)
            asked |= {f"{label} {b}": {**base, "method": f"{name}.plus", "start": b} for b in blocks}
        found.append((blocks, own.evaluate(own.working(asked), _metrics(own, points))))
    fig = drawing.sheet(1.75 * len(models) + 0.2)
    panels = fig.subplots(len(models), max(len(_metrics(own, points)) for own in models), squeeze=False)
    for own, (blocks, evaluations), row in zip(models, found, panels, strict=True):
        for axes in row[len(_metrics(own, points)) :]:
            axes.set_axis_off()
        for axes, metric in zip(row, _metrics(own, points), strict=False):
            tidy(axes, metric, "first block of the sum", own.vit.name if axes is row[0] else "")
            axes.axhline(evaluations["random"][metric].mean, color="0.45", linestyle=":", linewidth=1, label="Random")
            for m, label in enumerate(_labelled(methods)):
                values = [evaluations[f"{label} {b}"][metric].values for b in blocks if f"{label} {b}" in evaluations]
                if values:
                    line(axes, blocks, torch.stack(values, 1), label, m)
            for at in (0, half(own.vit.depth, None)):
                axes.axvline(at, color="0.75", linewidth=0.7, zorder=0)
            axes.set_xticks(blocks if len(blocks) < 7 else blocks[:: 2 if len(blocks) < 14 else 4])
    handles, words = panels[0][0].get_legend_handles_labels()
    fig.legend(handles, words, loc="outside upper center", ncols=len(words), fontsize=7, frameon=False)
    return fig


@register_figure(
    "skipplus-8",
    paper=f"{PAPER}, Figure 8",
    shows="PLUS and SkipPLUS with vanilla gradients of tokens and of attention weights",
    stand_in=MODELS,
    quick={"methods": ["grad", "grad.plus"], "points": 2},
)
def gradients(drawing: Drawing, methods: Methods = GRADIENTS, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of gradients, of tokens at block 0 and of attention in the last block, and of their sums.

    The recipe skipplus-figures-8-12 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-9",
    paper=f"{PAPER}, Figure 9",
    shows="PLUS and SkipPLUS neither help GenAtt nor harm it",
    stand_in=MODELS,
    quick={"points": 2},
)
def generic(drawing: Drawing, methods: Methods = GENATT, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of GenAtt by its own product, and of its layer maps summed (which is GradSAM).

    The recipe skipplus-figures-8-12 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-10",
    paper=f"{PAPER}, Figure 10",
    shows="PLUS and SkipPLUS with FullGrad",
    stand_in=MODELS,
    quick={"methods": ["fullgrad", "fullgrad-plus"], "points": 2},
)
def full(drawing: Drawing, methods: Methods = FULLGRAD, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of FullGrad, of FullGrad+ (its sum over the blocks), and of that over the upper half.

    The recipe skipplus-figures-8-12 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-11",
    paper=f"{PAPER}, Figure 11",
    shows="PLUS and SkipPLUS with Input x Gradient and AttIxG: CAT and AttCAT",
    stand_in=MODELS,
    quick={"methods": ["ixg", "attixg.plus"], "points": 2},
)
def products(drawing: Drawing, methods: Methods = IXG, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of IxG and of IxG weighted by attention; their sums are known as CAT and AttCAT.

    The recipe skipplus-figures-8-12 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


@register_figure(
    "skipplus-12",
    paper=f"{PAPER}, Figure 12",
    shows="PLUS and SkipPLUS with CAM methods of CNNs",
    stand_in=MODELS,
    quick={"methods": {"GradCAM∘PLUS": "gradcam.plus", "HiResCAM": "hirescam"}, "points": 2},
)
def cams(drawing: Drawing, methods: Methods = CAMS, points: Count = 9, chart: Chart = "dots") -> Figure:
    """The metrics of CAMs at the last layer, and summed over the blocks; which the paper shows is not in its text.

    The recipe skipplus-figures-8-12 measures the same into a table.
    """
    return _charts(drawing, methods, points, chart)


def _labelled(methods: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    return dict(methods) if isinstance(methods, Mapping) else {name: name for name in methods}


def _pictures(drawing: Drawing, methods: Mapping[str, Any] | Sequence[str]) -> Figure:
    """Each image, and the heat of every method over it, in bands."""
    maps = drawing.explain(methods)
    rows = []
    for i, index in enumerate(drawing.classes.tolist()):
        cells = [Cell(drawing.pictures[i], drawing.name_of(index))]
        cells += [Cell(drawing.heat(i, att.scores[i], True, att), name) for name, att in maps.items()]
        rows += in_bands(cells, WIDE)
    return drawing.rows(rows)


def _metrics(drawing: Drawing, points: int) -> dict[str, dict[str, Any]]:
    """The axes of the charts, by their titles."""
    deletion = {"metric": "token-deletion", "preset": "skipplus", "points": points}
    insertion = {**deletion, "metric": "token-insertion"}
    axes: dict[str, dict[str, Any]] = {
        "Deletion accuracy": deletion,
        "Deletion AOPC": {**deletion, "quantity": "aopc"},
        "Insertion accuracy": insertion,
        "Insertion AOPC": {**insertion, "quantity": "aopc"},
    }
    return axes if drawing.masks is None else {**axes, "Segmentation AP": {"metric": "ap", "preset": "skipplus"}}


def _models(drawing: Drawing) -> list[Drawing]:
    """The models; masks that lie on the input of one of them alone are told."""
    models = drawing.models
    without = [own.vit.name for own in models if own.masks is None]
    if len(without) == 1 < len(models):
        drawing.say(f"the masks given do not lie on the input of {without[0]}, so it has no Segmentation AP")
    return models


def _charts(drawing: Drawing, methods: Mapping[str, Any] | Sequence[str], points: int, chart: Chart) -> Figure:
    """Every method on every axis, for each model."""
    drawing.say("all in per cent, higher is better")
    if chart == "dots":
        tell_bands(drawing, "bars")
    models = _models(drawing)
    found = [own.evaluate(own.working(_labelled(methods)), _metrics(own, points)) for own in models]
    fig = (_radar if chart == "radar" else _dots)(drawing, models, found)
    for own, evaluations in zip(models, found, strict=True):
        for label, measured in evaluations.items():
            for metric, one in measured.items():
                mean, *interval = _percent(one, metric)
                about = {"images": one.count, "panel": own.vit.name, "quantity": metric}
                record(fig, label, mean, (interval[0], interval[1]), **about)
    return fig


def _colour(label: str) -> str:
    """Its composition's: SkipPLUS, PLUS, none; random is grey."""
    if label.casefold() == "random":
        return "0.45"
    lower = label.casefold()
    return COLOURS[2] if "skipplus" in lower else COLOURS[1] if "plus" in lower else COLOURS[0]


def _percent(evaluation: Evaluation, metric: str) -> tuple[float, float, float]:
    """Mean and interval in per cent, as the preset gives all but AP."""
    scale = 100 if metric == "Segmentation AP" else 1
    low, high = evaluation.interval()
    return scale * evaluation.mean, scale * low, scale * high


def _dots(drawing: Drawing, models: Sequence[Drawing], found: Sequence[Any]) -> Figure:
    fig = drawing.sheet(sum(CHART * len(evaluations) + 0.45 for evaluations in found))
    heights = [CHART * len(evaluations) + 0.45 for evaluations in found]
    known = [list(next(iter(evaluations.values()))) for evaluations in found]
    metrics = max(known, key=len)
    panels = fig.subplots(len(models), len(metrics), squeeze=False, height_ratios=heights)
    for own, evaluations, measured, row in zip(models, found, known, panels, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            if metric not in measured:
                axes.set_axis_off()
                continue
            tidy(axes, metric)
            labels = list(evaluations) if axes is row[0] else [""] * len(evaluations)
            values = [_percent(evaluation[metric], metric) for evaluation in evaluations.values()]
            dots(axes, values, labels, [_colour(label) for label in evaluations])
        if len(models) > 1:
            row[0].set_title(f"{own.vit.name}\n{metrics[0]}", size=7.5)
    return fig


def _radar(drawing: Drawing, models: Sequence[Drawing], found: Sequence[Any]) -> Figure:
    """Each axis from the lowest of the methods' means, a tenth from the centre, to the highest, at the rim."""
    drawing.say("each axis runs from the lowest to the highest mean, which stand at its ends")
    most = max(map(len, found))
    across = 3 * len(models)
    fig = drawing.sheet(2.7 + 0.12 * -(-most // across), COLUMN * len(models))
    panels = fig.subplots(1, len(models), squeeze=False, subplot_kw={"projection": "polar"})[0]
    for axes, own, evaluations in zip(panels, models, found, strict=True):
        metrics = list(next(iter(evaluations.values())))
        angles = np.linspace(0, 2 * np.pi, len(metrics), endpoint=False)
        means = {label: np.array([_percent(one[m], m)[0] for m in metrics]) for label, one in evaluations.items()}
        low, high = (f(list(means.values()), axis=0) for f in (np.min, np.max))
        for n, (label, values) in enumerate(means.items()):
            place = 0.1 + 0.9 * (values - low) / np.maximum(high - low, 1e-9)
            looks = {**style(n), "markersize": 2.4, "linewidth": 0.9}
            axes.plot([*angles, angles[0]], [*place, place[0]], label=label, **looks)
        ends = [f"{m}\n{a:.1f} to {b:.1f}" for m, a, b in zip(metrics, low, high, strict=True)]
        axes.set_xticks(angles, ends, size=6)
        for words, angle in zip(axes.get_xticklabels(), angles, strict=True):
            side = np.sin(angle)
            words.set_horizontalalignment("center" if abs(side) < 0.1 else "right" if side > 0 else "left")
        axes.set_theta_zero_location("N")
        axes.set_yticks([0.1, 0.55, 1.0], [])
        axes.set_ylim(0, 1.05)
        axes.tick_params(pad=5)
        axes.grid(color="0.88", linewidth=0.5)
        axes.spines["polar"].set_linewidth(0.5)
        if len(models) > 1:
            axes.set_title(own.vit.name, size=7.5)
    handles, words = panels[0].get_legend_handles_labels()
    fig.legend(handles, words, loc="outside upper center", ncols=across, fontsize=5.5, frameon=False)
    return fig
