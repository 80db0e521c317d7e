"""Layouts of figures: grids of maps, charts of metrics, and curves, which the TOML files of `recipes/figures` use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from patchlight.core.attribution import Attributions
from patchlight.core.drawing.heat import Scale, blend
from patchlight.core.drawing.pictures import in_bands, percent
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.core.targets import Targets, class_index, resolve_targets
from patchlight.evidence.ablation import Count
from patchlight.evidence.fills import Fill, Filling, fill_images, painted
from patchlight.methods.compositions import block_index, half
from patchlight.methods.masking import Ratio, Ratios
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.base import Evaluation, Measure
from patchlight.metrics.deletion import thresholds
from patchlight.metrics.perturbation import Direction, Points
from patchlight.report.figures import sheet
from patchlight.report.figures.drawing import NO_METHODS, Drawing, Methods, by_label
from patchlight.report.figures.numbers import record
from patchlight.report.figures.sheet import COLOURS, COLUMN, PAGE, Row, Tile

LAYOUTS: dict[str, Callable[..., Figure]] = {}
F = TypeVar("F", bound=Callable[..., Figure])
WIDE = 7
"""Most pictures side by side."""
FEW = 5
"""Most images whose columns fit the width of a paper's column."""
Chart = Literal["dots", "radar"]
"""A dot with its interval for each method and metric; or all metrics around a centre, as in the paper."""
Counts = Annotated[list[Count], Field(min_length=1)]
OURS = "DiffMask"


def layout(function: F) -> F:
    """Register a layout by the name of its function."""
    LAYOUTS[function.__name__] = function
    return function


@layout
def maps(drawing: Drawing, shown: Count = 1, methods: Methods = NO_METHODS, *, labelled: bool = False) -> Figure:
    """Each image and its maps: in bands of pictures, or one labelled row per image."""
    attributions = drawing.explain(methods)
    rows: list[Row] = []
    for i, name in enumerate(drawing.class_names):
        heats = _heats(drawing, attributions, i, titled=not (labelled and rows))
        picture = Tile(drawing.pictures[i], "" if labelled else name)
        rows += [Row([picture, *heats], name)] if labelled else map(Row, in_bands([picture, *heats], WIDE))
    return drawing.rows(rows)


def _heats(drawing: Drawing, maps: Attributions, i: int, *class_number: int, titled: bool = True) -> list[Tile]:
    """The positive parts of all maps of image i; with several classes, of the class with that number."""
    return [Tile(drawing.positive(i, att, *class_number), label if titled else "") for label, att in maps.items()]


@layout
def starts(drawing: Drawing, shown: Count = 1, starts: list[int] | None = None) -> Figure:
    """Each image and the map of DecompX from every block, or from `starts`."""
    drawing.say("the paper does not say what its figure was drawn with")
    methods = {f"from block {b}": {"method": "decompx", "start": b} for b in _blocks(drawing, starts)}
    return maps(drawing, methods=methods)


def _blocks(drawing: Drawing, starts: Sequence[int] | None) -> list[int]:
    depth = drawing.vit.depth
    return [block_index(start, depth) for start in (range(depth) if starts is None else starts)]


@layout
def columns(drawing: Drawing, shown: Count = 8, methods: Methods = NO_METHODS, *, explainer: bool = False) -> Figure:
    """A column per image and a row per method, for the predicted class; with `explainer`, DiffMask's gates first."""
    drawing = drawing.of_prediction()
    attributions = drawing.explain(_with_gates(drawing, methods) if explainer else methods)
    if explainer:
        drawing.say("DiffMask's colours go from 0 to 1, the share of a patch that is kept")
    rows = [Row([Tile(p, name) for p, name in zip(drawing.pictures, drawing.class_names, strict=True)], "Input")]
    for label, att in attributions.items():
        heats = [
            blend(picture, att.scores[i], Scale(0.0, 1.0, False), upsampling="nearest")
            if explainer and label == OURS
            else drawing.positive(i, att)
            for i, picture in enumerate(drawing.pictures)
        ]
        rows.append(Row([Tile(heat) for heat in heats], label))
    few = len(drawing) <= FEW
    return sheet.pictures(drawing.note, rows, COLUMN if few else PAGE, largest=0.72 if few else 0.8)


def _with_gates(drawing: Drawing, rivals: Methods) -> dict[str, Any]:
    """DiffMask and its rivals; refused if the explainer does not fit the model."""
    gates = {"method": "diffmask", **({} if drawing.explainer is None else {"explainer": str(drawing.explainer)})}
    reason = refusal(resolve(OURS, gates).suited(drawing.vit), drawing.vit)
    if reason is not None:
        raise PatchlightError(f"DiffMask cannot explain {drawing.vit.name}: {reason}")
    return {OURS: gates, **by_label(rivals)}


@layout
def compositions(
    drawing: Drawing, shown: Count = 2, methods: Methods = NO_METHODS, composed: Methods = NO_METHODS
) -> Figure:
    """Two rows per image: the methods, and below them the same methods under another composition."""
    upper, lower = by_label(methods), by_label(composed)
    if list(upper) != list(lower):
        raise PatchlightError(f"methods {list(upper)} and composed {list(lower)} differ; give the same labels")
    working = [label for label in drawing.working(upper) if label in drawing.working(lower)]
    above, below = (drawing.explain({label: table[label] for label in working}) for table in (upper, lower))
    rows = []
    for i, name in enumerate(drawing.class_names):
        rows.append(Row([Tile(drawing.pictures[i], name), *_heats(drawing, above, i)], "as published"))
        rows.append(Row([None, *_heats(drawing, below, i, titled=False)], "with SkipPLUS"))
    return drawing.rows(rows)


@layout
def classes(
    drawing: Drawing, shown: Count = 2, methods: Methods = NO_METHODS, classes: list[int | str] | None = None
) -> Figure:
    """A row per image and class: the named classes, or the two most probable ones."""
    vit = drawing.vit
    if classes is not None:
        targets = [[class_index(word, vit.outcomes, vit.labels) for word in classes]] * len(drawing)
    elif vit.outcomes < 2:
        raise PatchlightError(f"{vit.name} has one class; a figure of two classes needs a model with at least two")
    else:
        logits = drawing.logits.float()
        both = vit.probabilities(logits) if vit.outputs.kind == "binary" else logits
        targets = both.topk(2, 1).indices.tolist()
    attributions = drawing.explain(methods, target=targets)
    rows: list[Row] = []
    for i, pair in enumerate(targets):
        for t, index in enumerate(pair):
            heats = _heats(drawing, attributions, i, t, titled=not rows)
            rows.append(Row([None if t else Tile(drawing.pictures[i]), *heats], drawing.name_of(index)))
    return drawing.rows(rows)


@layout
def disagreement(drawing: Drawing, samples: Count = 1024) -> Figure:
    """The most confident mistake of the model, other images of its two classes, and TIS's maps for both classes."""
    predicted, true = drawing.predictions, _true_classes(drawing)
    probabilities = drawing.vit.probabilities(drawing.logits.float())
    each = torch.arange(len(drawing))
    surer = probabilities[each, predicted] - probabilities[each, true]
    wrong = predicted != true
    if not bool(wrong.any()):
        raise PatchlightError(
            f"all {len(drawing)} images are predicted correctly; give one that is not, or target=CLASS"
        )
    by_user = drawing.user_target is not None
    i = int(wrong.nonzero()[0]) if by_user else int(surer.masked_fill(~wrong, -torch.inf).argmax())
    pair = [int(true[i]), int(predicted[i])]
    alone = drawing.select([i])
    att = alone.explain({"TIS": {"method": "tis", "samples": samples}}, target=[pair])["TIS"]
    cells = [Tile(drawing.pictures[i], "(a) image")]
    letters = iter("bcde")
    for index in pair:
        others = [j for j in each.tolist() if j != i and not by_user and true[j] == index]
        if others:
            best = min(others, key=lambda j: bool(wrong[j]))
            cells.append(Tile(drawing.pictures[best], f"({next(letters)}) another {drawing.name_of(index)}"))
    for t, (index, word) in enumerate(zip(pair, ("target", "predicted"), strict=True)):
        chance = f"{word}, p = {percent(float(probabilities[i, index]))}"
        cells.append(Tile(alone.positive(0, att, t), f"({next(letters)}) {drawing.name_of(index)}", chance))
    return alone.rows([Row(cells)])


def _true_classes(drawing: Drawing) -> Tensor:
    """The true classes [B], or those that the user calls true."""
    if drawing.user_target is not None:
        targets = resolve_targets(drawing.user_target, len(drawing), drawing.vit.outcomes, drawing.vit.labels)
        assert targets is not None
        return targets.index[:, 0]
    assert drawing.labels is not None
    if bool((drawing.labels < 0).any()):
        raise PatchlightError("some images have no label; leave them out, or give target=CLASS")
    return drawing.labels


@layout
def deletion(
    drawing: Drawing,
    shown: Count = 1,
    methods: Methods = NO_METHODS,
    step: Count = 50,
    steps: Count = 224,
    fill: Fill = "image-mean",
) -> Figure:
    """For each method: its map, the image after some steps of the deletion metric, and the curve."""
    attributions = drawing.explain(methods)
    if step > steps:
        raise PatchlightError(f"step {step} is after the last of {steps} steps; give a smaller one")
    evaluations = drawing.evaluate(attributions, {"deletion": {"preset": "tis", "fill": fill, "steps": steps}})
    count = int(thresholds(int(np.prod(drawing.images.shape[-2:])), steps, first=False)[step - 1])
    drawing = replace(drawing, images=drawing.vit.place(drawing.images))
    filled = fill_images(fill, drawing.images, drawing.vit, drawing.seed)
    after = {label: without_highest(drawing, att.scores, filled, count) for label, att in attributions.items()}
    titles = [word for label in attributions for word in (label, f"after {step} steps")]
    rows = []
    for i, name in enumerate(drawing.class_names):
        pictures = []
        for label, att in attributions.items():
            pictures += [drawing.positive(i, att), drawing.vit.preprocess.picture(after[label][i])]
        tiles = [Tile(picture, "" if i else title) for picture, title in zip(pictures, titles, strict=True)]
        rows.append(Row([Tile(drawing.pictures[i], name), *tiles]))
    side = min(1.3, PAGE / (1 + len(titles)))
    fig, axes = drawing.pictures_over_chart(rows, side, 1.75, spare=0.15 + 0.25 * len(rows))
    sheet.tidy(axes, "", "step", "score of the class")
    for n, label in enumerate(attributions):
        evaluation: Evaluation = evaluations[label]["deletion"]
        assert evaluation.curve is not None
        name = f"{label} (mean {evaluation.mean:.3f})"
        sheet.line(axes, range(1, evaluation.curve.shape[1] + 1), evaluation.curve, name, n, marker="")
    axes.axvline(step, color="0.5", linewidth=0.8, linestyle="--")
    sheet.legend(axes)
    return fig


def without_highest(drawing: Drawing, maps: Tensor, filled: Filling, count: int) -> Tensor:
    """The images with the fill in place of their `count` highest pixels."""
    targets = Targets(drawing.classes[:, None])
    measure = Measure(drawing.vit, drawing.images, maps.to(drawing.images.device), targets, seed=drawing.seed)
    shown = measure.ranks("pixel") >= count
    return painted(drawing.images, filled, torch.arange(len(drawing)), shown[:, None])


@layout
def perturbation(
    drawing: Drawing, points: Points = 29, methods: Methods = NO_METHODS, *, direction: Direction = "positive"
) -> Figure:
    """-log p and p of the predicted class while pixels are removed: means over images with their intervals."""
    drawing = drawing.of_prediction()
    common = {"metric": "perturbation", "preset": "diffmask", "direction": direction, "points": points}
    metrics = {"KL": {**common, "quantity": "nll"}, "accuracy": {**common, "quantity": "probability"}}
    with warnings.catch_warnings(action="ignore", category=DegenerateMap):
        working = drawing.working({**_with_gates(drawing, methods), "Random": "random"})
        evaluations = drawing.evaluate(working, metrics)
    drawing.say(
        "removed pixels become noise; as in the paper's code, its KL is −log p and its accuracy is p of the predicted "
        "class"
    )
    drawing.say_intervals()
    fig = drawing.sheet(2.3)
    first = direction == "positive"
    better = {"KL": "higher" if first else "lower", "accuracy": "lower" if first else "higher"}
    words = {"KL": "−log p(class)  (“KL divergence”)", "accuracy": "p(class)  (“accuracy”)"}
    panels = fig.subplots(1, 2)
    for axes, metric in zip(panels, metrics, strict=True):
        for n, (label, measured) in enumerate(evaluations.items()):
            sheet.line(axes, 100 * measured[metric].x, measured[metric].curve, label, n, marker=None)
        removed = f"pixels removed, {'most' if first else 'least'} relevant first (%)"
        sheet.tidy(axes, f"{better[metric]} is better", removed, words[metric])
        axes.set(xlim=(0, 100), ylim=(0, None))
    sheet.legend(panels[1], loc="upper right" if first else "lower left")
    return fig


def skipplus_metrics(drawing: Drawing, points: int) -> dict[str, dict[str, Any]]:
    """The metrics of SkipPLUS's charts by title, higher is better; segmentation AP if outlines are given."""
    deletion = {"metric": "token-deletion", "preset": "skipplus", "points": points}
    insertion = {**deletion, "metric": "token-insertion"}
    metrics: dict[str, dict[str, Any]] = {
        "Deletion accuracy": deletion,
        "Deletion AOPC": {**deletion, "quantity": "aopc"},
        "Insertion accuracy": insertion,
        "Insertion AOPC": {**insertion, "quantity": "aopc"},
    }
    return metrics if drawing.masks is None else {**metrics, "Segmentation AP": {"metric": "ap", "preset": "skipplus"}}


def _models(drawing: Drawing) -> list[Drawing]:
    """The models; the note names one whose input the masks do not fit."""
    models = drawing.models
    without = [model.vit.name for model in models if model.masks is None]
    if len(without) == 1 < len(models):
        drawing.say(f"the masks do not lie on the input of {without[0]}, so it has no Segmentation AP")
    return models


Measured = Mapping[str, Mapping[str, tuple[float, float, float]]]
"""Mean and interval in per cent, by method and metric."""


@layout
def metrics(drawing: Drawing, methods: Methods = NO_METHODS, points: Count = 9, chart: Chart = "dots") -> Figure:
    """Every method on every metric, for each model."""
    drawing.say("all in per cent, higher is better")
    if chart == "dots":
        drawing.say_intervals("bars")
    models = _models(drawing)
    evaluations = [model.evaluate(model.working(methods), skipplus_metrics(model, points)) for model in models]
    tables = [{label: _per_cent(values) for label, values in measured.items()} for measured in evaluations]
    fig = (_radar if chart == "radar" else _dots)(drawing, models, tables)
    for model, measured, table in zip(models, evaluations, tables, strict=True):
        for label, values in measured.items():
            for metric, evaluation in values.items():
                mean, low, high = table[label][metric]
                place = {"images": evaluation.count, "panel": model.vit.name, "quantity": metric}
                record(fig, label, mean, (low, high), **place)
    return fig


def _per_cent(evaluations: Mapping[str, Evaluation]) -> dict[str, tuple[float, float, float]]:
    """Mean and interval by metric; all metrics but segmentation AP are in per cent already."""
    table = {}
    for metric, evaluation in evaluations.items():
        factor, (low, high) = 100 if metric == "Segmentation AP" else 1, evaluation.interval()
        table[metric] = factor * evaluation.mean, factor * low, factor * high
    return table


def _colour(label: str) -> str:
    """The colour of a method's composition (SkipPLUS, PLUS or another); random is grey."""
    lower = label.casefold()
    plain = "0.45" if lower == "random" else COLOURS[0]
    return COLOURS[2] if "skipplus" in lower else COLOURS[1] if "plus" in lower else plain


def _dots(drawing: Drawing, models: Sequence[Drawing], tables: Sequence[Measured]) -> Figure:
    heights = [0.135 * len(table) + 0.45 for table in tables]
    fig = drawing.sheet(sum(heights))
    titles = max((list(next(iter(table.values()))) for table in tables), key=len)
    panels = fig.subplots(len(models), len(titles), squeeze=False, height_ratios=heights)
    for model, table, row in zip(models, tables, panels, strict=True):
        for axes, metric in zip(row, titles, strict=True):
            if metric not in next(iter(table.values())):
                axes.set_axis_off()
                continue
            sheet.tidy(axes, metric)
            labels = list(table) if axes is row[0] else [""] * len(table)
            sheet.dots(axes, [values[metric] for values in table.values()], labels, [_colour(label) for label in table])
        if len(models) > 1:
            row[0].set_title(f"{model.vit.name}\n{titles[0]}", size=7.5)
    return fig


def _radar(drawing: Drawing, models: Sequence[Drawing], tables: Sequence[Measured]) -> Figure:
    """Each axis from the lowest of the methods' means, a tenth from the centre, to the highest, at the rim."""
    drawing.say("each axis runs from the lowest to the highest mean, which are written at its end")
    across = 3 * len(models)
    fig = drawing.sheet(2.7 + 0.12 * -(-max(map(len, tables)) // across), COLUMN * len(models))
    panels = fig.subplots(1, len(models), squeeze=False, subplot_kw={"projection": "polar"})[0]
    for axes, model, table in zip(panels, models, tables, strict=True):
        titles = list(next(iter(table.values())))
        angles = np.linspace(0, 2 * np.pi, len(titles), endpoint=False)
        means = {label: np.array([values[m][0] for m in titles]) for label, values in table.items()}
        low, high = (f(list(means.values()), axis=0) for f in (np.min, np.max))
        for n, (label, values) in enumerate(means.items()):
            place = 0.1 + 0.9 * (values - low) / np.maximum(high - low, 1e-9)
            looks = {**sheet.style(n), "markersize": 2.4, "linewidth": 0.9}
            axes.plot([*angles, angles[0]], [*place, place[0]], label=label, **looks)
        ends = [f"{m}\n{a:.1f} to {b:.1f}" for m, a, b in zip(titles, low, high, strict=True)]
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
            axes.set_title(model.vit.name, size=7.5)
    sheet.legend(panels[0], across, fontsize=5.5)
    return fig


@layout
def sums(drawing: Drawing, methods: Methods = NO_METHODS, points: Count = 9, starts: list[int] | None = None) -> Figure:
    """Each metric of sums from every block (or from `starts`) to the last, a row per model."""
    drawing.say("grey lines are at PLUS (block 0) and SkipPLUS (the middle)")
    drawing.say_intervals()
    models = _models(drawing)
    rows = []
    for model in models:
        blocks = sorted(set(_blocks(model, starts)))
        requests: dict[str, Any] = {"random": "random"}
        for label, method in by_label(methods).items():
            base = {"method": method} if isinstance(method, str) else dict(method)
            name = base.pop("method", label)
            requests |= {f"{label} {b}": {**base, "method": f"{name}.plus", "start": b} for b in blocks}
        titles = skipplus_metrics(model, points)
        rows.append((model.vit, blocks, list(titles), model.evaluate(model.working(requests), titles)))
    fig = drawing.sheet(1.75 * len(models) + 0.2)
    panels = fig.subplots(len(models), max(len(titles) for _, _, titles, _ in rows), squeeze=False)
    for (vit, blocks, names, measured), row in zip(rows, panels, strict=True):
        for axes in row[len(names) :]:
            axes.set_axis_off()
        for axes, metric in zip(row, names, strict=False):
            sheet.tidy(axes, metric, "first block of the sum", vit.name if axes is row[0] else "")
            axes.axhline(measured["random"][metric].mean, color="0.45", linestyle=":", linewidth=1, label="Random")
            for m, label in enumerate(by_label(methods)):
                values = [measured[f"{label} {b}"][metric].values for b in blocks if f"{label} {b}" in measured]
                if values:
                    sheet.line(axes, blocks, torch.stack(values, 1), label, m)
            for at in (0, half(vit.depth, None)):
                axes.axvline(at, color="0.75", linewidth=0.7, zorder=0)
            axes.set_xticks(blocks if len(blocks) < 7 else blocks[:: 2 if len(blocks) < 14 else 4])
    sheet.legend(panels[0][0], len(methods) + 1, fontsize=7)
    return fig


@layout
def tis_settings(
    drawing: Drawing,
    samples: Count | Counts = 1024,
    keep: Ratio | Ratios = 0.5,
    steps: Count = 224,
    fill: Fill = "image-mean",
    *,
    varied: Literal["samples", "keep"] = "samples",
) -> Figure:
    """Insertion, deletion and their difference of TIS as one setting varies, for each model."""
    settings: dict[str, Any] = {"samples": samples, "keep": keep}
    values = sorted(set(settings[varied]) if isinstance(settings[varied], list) else {settings[varied]})
    requests = {str(value): {"method": "tis", **settings, varied: value} for value in values}
    drawing.say_intervals()
    models = drawing.models
    metric = {"ins-del": {"preset": "tis", "fill": fill, "steps": steps}}
    evaluations = [model.evaluate(model.working(requests), metric) for model in models]
    fig = drawing.sheet(2.1, COLUMN * len(models))
    panels = fig.subplots(1, len(models), squeeze=False, sharey=True)[0]
    words = {"samples": "masks $N_m$", "keep": "share of tokens kept"}[varied]
    for axes, model, measured in zip(panels, models, evaluations, strict=True):
        sheet.tidy(axes, model.vit.name, words, "mean probability of the class" if axes is panels[0] else "")
        each: list[Evaluation] = [measured[label]["ins-del"] for label in requests]
        curves = {"insertion − deletion": [evaluation.values for evaluation in each]}
        curves |= {part: [evaluation.parts[part] for evaluation in each] for part in ("insertion", "deletion")}
        for n, (label, points) in enumerate(curves.items()):
            sheet.line(axes, values, torch.stack([point.double() for point in points], 1), label, n)
        if varied == "samples":
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
    sheet.legend(panels[0], 3, fontsize=sheet.WORDS - 0.5)
    return fig
