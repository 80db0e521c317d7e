"""Layouts of ViT-CX's figures: its masks and their scores, sanity, localisation, and its settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.weights import read_weights
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.core.images import Preprocess
from patchlight.core.progress import show_progress
from patchlight.core.resize import to_pixels
from patchlight.core.statistics import spearman
from patchlight.core.targets import Targets
from patchlight.engine import explain
from patchlight.evidence.ablation import Count
from patchlight.evidence.runner import LayerJob
from patchlight.methods.base import Ask
from patchlight.methods.cams import NORM1, Place, feature_maps
from patchlight.methods.rise import draw_grids
from patchlight.methods.vitcx import cosine_distances, scale_to_unit, upsampled
from patchlight.metrics.localisation import unit_range
from patchlight.metrics.sanity import stages, twin
from patchlight.report.figures import sheet
from patchlight.report.figures.drawing import NO_METHODS, Drawing, Methods
from patchlight.report.figures.layouts import layout
from patchlight.report.figures.masks import DISTANCE, SIGMA, Impact, ask_about, channel_masks, cluster_channels, impact
from patchlight.report.figures.masks import similarities as mask_similarities
from patchlight.report.figures.numbers import record
from patchlight.report.figures.sheet import COLOURS, COLUMN, Row, Tile, colour_picture, mean_interval

Distances = list[Annotated[float, Field(gt=0)]]
Deviations = list[Annotated[float, Field(ge=0)]]
WITH_COVERAGE = "rank correlation with the coverage"


def auc_metrics(steps: int) -> dict[str, dict[str, Any]]:
    """Deletion, insertion into the paper's empty canvas (fill `zero`), and insertion into RISE's blurred image."""
    rise = {"preset": "rise", "steps": steps}
    return {
        "Del": {"metric": "deletion", **rise},
        "Ins": {"metric": "insertion", **rise, "fill": "zero"},
        "Ins (blur)": {"metric": "insertion", **rise},
    }


def each_image(drawing: Drawing, words: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of every image and the image, with a progress bar."""
    with show_progress(drawing.progress, words) as advance:
        for i, image in enumerate(drawing.images):
            yield i, image
            advance(i + 1, len(drawing))


def impacts(drawing: Drawing, sigma: float = SIGMA, layer: str = NORM1) -> list[Impact]:
    """The masks of every image and their scores."""
    classes = drawing.classes.tolist()
    return [
        impact(ask_about(drawing.vit, image, classes[i], drawing.seed), sigma=sigma, layer=layer)
        for i, image in each_image(drawing, "masking")
    ]


@layout
def maps_with_scores(drawing: Drawing, shown: Count = 4, steps: Count = 224, methods: Methods = NO_METHODS) -> Figure:
    """A row per image: the maps of the predicted class, and below each its deletion and insertion."""
    drawing = drawing.of_prediction()
    attributions = drawing.explain(methods)
    evaluations = drawing.evaluate(attributions, auc_metrics(steps))
    rows = []
    for i, (picture, name) in enumerate(zip(drawing.pictures, drawing.class_names, strict=True)):
        cells = [Tile(picture, name, "Del / Ins")]
        values = {label: {m: float(e.values[i]) for m, e in each.items()} for label, each in evaluations.items()}
        best = {
            "Del": min(each["Del"] for each in values.values()),
            "Ins": max(each["Ins"] for each in values.values()),
        }
        for label, att in attributions.items():
            marked = (f"{values[label][m]:.3f}{'*' if values[label][m] == best[m] else ''}" for m in best)
            cells.append(Tile(drawing.positive(i, att), label, " / ".join(marked), values[label]))
        rows.append(Row(cells))
    drawing.say(
        "below: deletion AUC (lower is better) / insertion AUC on an empty canvas, fill zero (higher is better); * is "
        "the best of its row"
    )
    return drawing.rows(rows)


@layout
def features(
    drawing: Drawing, shown: Count = 1, columns: Count = 5, layer: str = NORM1, channels: list[int] | None = None
) -> Figure:
    """For each image: attention of CLS per head, feature maps, and the image through their masks."""
    rows = []
    for i, image in enumerate(drawing.images):
        ask = ask_about(drawing.vit, image)
        maps = feature_maps(ask, layer)[0][0]
        count = min(columns, len(maps))
        chosen = [(2 * k + 1) * len(maps) // (2 * count) for k in range(count)] if channels is None else channels
        masks = scale_to_unit(maps[chosen].double(), drawing.vit.extent)[0]
        through = ask.images * upsampled(masks, ask.images, drawing.vit.extent)(torch.arange(len(chosen)))
        attention = _attention_maps(drawing, ask, columns)
        parts = {
            "(a) attention": [Tile(colour_picture(one), name) for name, one in attention.items()],
            "(b) feature maps": [Tile(colour_picture(maps[k]), f"channel {k}") for k in chosen],
            "(c) through masks": [Tile(drawing.vit.preprocess.picture(one)) for one in through],
        }
        first: list[Tile | None] = [Tile(drawing.pictures[i], "image")]
        for label, cells in parts.items():
            if cells:
                rows.append(Row([*first, *cells], label))
                first = [None]
    drawing.say(f"(a) and (b) go from their lowest value (dark) to their highest; (b) is of {layer}")
    return drawing.rows(rows, signed=())


def _attention_maps(drawing: Drawing, ask: Ask, count: int) -> dict[str, Tensor]:
    """Attention of CLS to the patches [h,w] by block and head, last block first; of all tokens if there is no CLS."""
    vit = drawing.vit
    if vit.attention is not None or vit.hierarchical or vit.depth == 0:
        drawing.say(f"(a) left out: the attention of {vit.name} cannot be read")
        return {}
    layers = tuple(range(vit.depth - 1, max(-1, vit.depth - 1 - -(-count // vit.heads)), -1))
    rows = slice(0, 1) if vit.prefix else slice(None)
    seen = ask.run([LayerJob(lambda b: b.A[0, :, rows, b.cells].mean(1), frozenset({"A"}), layers)])
    maps = {
        f"block {layer}, head {head}": one.unflatten(0, vit.grid)
        for layer in layers
        for head, one in enumerate(seen.at(layer))
    }
    return dict(list(maps.items())[:count])


@layout
def mask_similarity(
    drawing: Drawing,
    random_masks: Count = 200,
    cnn: str = "resnet50",
    cnn_weights: str | None = None,
    layer: str = NORM1,
) -> Figure:
    """Similarities of a ViT's masks and of other masks: all pairs of one image, and the mean per image."""
    sources = {
        model.vit.name: [
            mask_similarities(channel_masks(ask_about(model.vit, image), layer)[0], model.vit.extent)
            for _, image in each_image(model, "comparing masks")
        ]
        for model in drawing.models
    }
    if cnn_weights is not None:
        sources[cnn] = _similarities_of_cnn(drawing, cnn, cnn_weights)
    else:
        drawing.say(f"give the weights of a CNN (cnn={cnn!r}, cnn_weights=FILE) to compare with its masks")
    size, at_random = drawing.vit.preprocess.size, []
    for i in range(len(drawing)):
        generator = torch.Generator().manual_seed(drawing.seed + i)
        grids = draw_grids(random_masks, 7, 0.5, size, generator).to(torch.zeros(()))
        at_random.append(mask_similarities(grids.masks(torch.arange(random_masks)).double(), size))
    sources["random masks (RISE)"] = at_random
    drawing.say("dashed: means")
    fig = drawing.sheet(2.1)
    left, right = fig.subplots(1, 2)
    _histograms(left, {label: images[0] for label, images in sources.items()}, density=True)
    sheet.tidy(left, "(a) one image", "Sim(i, j) of two masks", "density")
    _histograms(right, {label: torch.stack([one.mean() for one in images]) for label, images in sources.items()})
    sheet.tidy(right, f"(b) {len(drawing)} images", "mSim, the mean of an image's pairs", "share of images")
    sheet.legend(left, loc="upper left")
    return fig


def _histograms(axes: Axes, samples: Mapping[str, Tensor], density: bool = False) -> None:
    """Histograms of several samples over [0, 1], with their means as dashed lines."""
    edges = np.linspace(0, 1, 81)
    for n, (label, values) in enumerate(samples.items()):
        array = values.clamp(0, 1).double().cpu().numpy()
        weight = (1 / (edges[1] - edges[0]) if density else 1.0) / len(array)
        looks: dict[str, Any] = {"bins": edges, "weights": np.full(len(array), weight), "color": COLOURS[n]}
        axes.hist(array, histtype="stepfilled", alpha=0.2, **looks)
        axes.hist(array, histtype="step", linewidth=1.1, label=label, **looks)
        axes.axvline(float(array.mean()), color=COLOURS[n], linewidth=0.8, linestyle="--")
        mean, low, high = (float(one) for one in mean_interval(values[:, None]))
        interval = (math.nan, math.nan) if density else (low, high)
        words = "Sim(i, j), mean of the pairs" if density else "mSim, mean over images"
        record(axes, label, mean, interval, images=1 if density else len(array), quantity=words)
    axes.set_xlim(0, 1)


def _similarities_of_cnn(drawing: Drawing, name: str, weights: str) -> list[Tensor]:
    """For each image, the similarities of the masks made of the last feature map of a timm CNN."""
    import timm
    from timm.data.config import resolve_model_data_config

    model: Any = timm.create_model(name)
    try:
        model.load_state_dict(read_weights(Path(weights)))
    except RuntimeError as error:
        message = f"'{weights}' does not contain weights of {name}: {str(error).splitlines()[0]}"
        raise PatchlightError(message) from error
    model.eval().requires_grad_(False)
    config = resolve_model_data_config(model)
    height, width = config["input_size"][1:]
    preprocess = Preprocess((height, width), tuple(config["mean"]), tuple(config["std"]))
    similarities = []
    for picture in drawing.pictures:
        maps = model.forward_features(preprocess.tensor(picture)[None])[0]
        masks, spans = scale_to_unit(maps.double(), (height, width))
        similarities.append(mask_similarities(masks[spans > 0], (height, width)))
    return similarities


@layout
def artefacts(drawing: Drawing, searched: Count = 16, sigma: float = SIGMA) -> Figure:
    """The mask that loses most when noise fills its gaps, and one of the same image that keeps a high score."""
    drawing = drawing.of_prediction().select(range(min(searched, len(drawing))))
    each = impacts(drawing, sigma)
    plain = [masks.plain() for masks in each]
    i = max(range(len(each)), key=lambda n: float((plain[n] - each[n].scores).max()))
    lost = plain[i] - each[i].scores
    rows: list[Row] = []
    for case, index in {"(a)": int(lost.argmax()), "(b)": int((plain[i] - 2 * lost.abs()).argmax())}.items():
        (masked, before), (noisy, after) = (each[i].through(index, noise) for noise in (False, True))
        look, score = drawing.vit.preprocess.picture, float(each[i].scores[index])
        numbers = {"p with noise": after, "s": score}
        titles = ["", "", "", ""] if rows else ["Image", "Mask", "Masked", "With noise"]
        cells = [
            Tile(drawing.pictures[i], titles[0], f"p = {each[i].clean:.3f}"),
            Tile(colour_picture(each[i].at_size(index), (0.0, 1.0), "cividis"), titles[1]),
            Tile(look(masked), titles[2], f"CI = {before:.3f}", {"CI": before}),
            Tile(look(noisy), titles[3], f"p\u00a0=\u00a0{after:.3f} s\u00a0=\u00a0{score:.3f}", numbers),
        ]
        rows.append(Row(cells, case))
    drawing.say(
        f"p: probability of {drawing.class_names[i]}; CI: causal impact score p(X M); s: the debiased score "
        f"p(X M + e) − p(X + e) + p(X), with noise e of standard deviation {sigma:g}; masks: 0 is blue, 1 is yellow"
    )
    return sheet.pictures(drawing.note, rows, COLUMN, ())


@layout
def coverage(drawing: Drawing, searched: Count = 16, examples: Count = 1) -> Figure:
    """How often the masks cover each pixel, and the maps without and with correction, where masks score highest."""
    drawing = drawing.of_prediction().select(range(min(searched, len(drawing))))
    each = impacts(drawing)
    means = [float(masks.scores.mean()) for masks in each]
    rows = []
    for i in sorted(range(len(each)), key=lambda n: -means[n])[:examples]:
        covered = each[i].coverage()
        name, mean = drawing.class_names[i], means[i]
        cells = [
            Tile(drawing.pictures[i], name, f"μ = {mean:.2f}", {"mean score of the masks": mean}),
            Tile(drawing.heat(i, covered), "Coverage ρ"),
        ]
        for title, corrected in (("Not corrected", False), ("Corrected", True)):
            scores = each[i].weighted(each[i].scores, corrected)
            alike = float(spearman(scores.flatten()[None], covered.flatten()[None]))
            words = f"r = {alike:.2f}".replace("-", "−")
            cells.append(Tile(drawing.heat(i, scores), title, words, {WITH_COVERAGE: alike}))
        rows.append(Row(cells))
    drawing.say("below: μ is the mean score of the masks, r the rank correlation of a map with the coverage")
    return sheet.pictures(drawing.note, rows, COLUMN)


class _Recorder:
    """A method that records its maps in the order of the calls."""

    def __init__(self, method: Any) -> None:
        self.method = {"method": method} if isinstance(method, str) else method
        self.maps: list[Tensor] = []

    def __call__(self, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        with warnings.catch_warnings(action="ignore", category=DegenerateMap):  # of a random model
            classes = targets.index[:, 0].tolist()
            att = explain(vit, images, {"map": self.method}, classes, seed=seed, progress=False)["map"]
        self.maps.append(att.scores)
        return att.scores


@layout
def sanity(drawing: Drawing, columns: Count = 6, methods: Methods = NO_METHODS) -> Figure:
    """Cascading randomisation: the first image's maps after some stages, and the similarity after every stage."""
    drawing.say("follows Adebayo et al. (2018), since the text of the paper's Appendix B is not available")
    drawing = drawing.of_prediction()
    recorders = {label: _Recorder(method) for label, method in drawing.working(methods).items()}
    evaluations = drawing.evaluate(recorders, "randomisation", batch_size=len(drawing))
    names = ["trained", *(name for name, _ in stages(twin(drawing.vit)))]
    chosen = [round(float(c)) for c in np.linspace(0, len(names) - 1, min(columns, len(names)))]
    drawing.say(
        "the head, then the norm, the blocks from the last to the first and the embedding get random weights one by one"
    )
    drawing.say_intervals()
    rows: list[Row] = []
    for label, recorder in recorders.items():
        heats = {names[stage]: drawing.heat(0, recorder.maps[stage][0], True) for stage in chosen}
        rows.append(Row([Tile(heat, "" if rows else name) for name, heat in heats.items()], label))
    fig, axes = drawing.pictures_over_chart(rows, 0.95, 1.7)
    for n, (label, evaluation) in enumerate(evaluations.items()):
        sheet.line(axes, range(len(names)), evaluation.curve, label, n, names)
    sheet.tidy(axes, "", "", "rank correlation with\nthe trained model's")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.axhline(0, color="0.5", linewidth=0.6)
    sheet.legend(axes, loc="upper right")
    return fig


@layout
def localisation(drawing: Drawing, examples: Count = 4, methods: Methods = NO_METHODS) -> Figure:
    """Examples with the true boxes and the box around the heat, and the share of correct boxes."""
    drawing.say("the paper's Appendix C, whose text is not available, compares with trained localisers")
    assert drawing.boxes is not None
    with_boxes = [i for i, boxes in enumerate(drawing.boxes) if len(boxes)]
    if not with_boxes:
        raise PatchlightError("none of the images has a box; give images with boxes around their objects")
    if len(with_boxes) < len(drawing):
        drawing.say(f"{len(drawing) - len(with_boxes)} of {len(drawing)} images have no box and are skipped")
    drawing = drawing.select(with_boxes).of_prediction()
    attributions = drawing.explain(methods)
    evaluations = drawing.evaluate(attributions, "max-box-acc")
    first, att = next(iter(attributions.items()))
    share = evaluations[first].curve.mean(0)
    best = float(evaluations[first].x[share == share.max()][-1])
    drawing.say(
        f"white, dashed: true boxes; green: the box around the largest part of {first}'s heat above {best:.2f}, its "
        "best threshold (the highest if several are equal); in brackets: MaxBoxAccV2"
    )
    drawing.say_intervals()
    count = min(examples, len(drawing))
    fig = drawing.sheet(2.3)
    across = -(-count // 2)
    grid = fig.add_gridspec(2, across + 1, width_ratios=[1.1] * across + [3.4])
    size = drawing.vit.preprocess.size
    for i in range(count):
        axes = fig.add_subplot(grid[i % 2, i // 2])
        sheet.show(axes, drawing.positive(i, att))
        scores = unit_range(to_pixels(att.scores[i : i + 1].double(), size, drawing.vit.extent))[0].numpy()
        scale = drawing.pictures[i].width / size[1]
        assert drawing.boxes is not None
        for box in drawing.boxes[i].tolist():
            _outline(axes, box, scale, "white", "--")
        _outline(axes, heat_box(scores, best), scale, COLOURS[2], "-")
    axes = fig.add_subplot(grid[:, across])
    for n, (label, evaluation) in enumerate(evaluations.items()):
        sheet.line(axes, evaluation.x, evaluation.curve, f"{label} ({evaluation.mean:.2f})", n, marker=None)
        record(axes, label, evaluation.mean, evaluation.interval(), images=evaluation.count, quantity="MaxBoxAccV2")
    sheet.tidy(axes, "", "threshold of the heat, from 0 to 1", "share of correct boxes")
    axes.set(xlim=(0, 1), ylim=(0, None))
    sheet.legend(axes)
    return fig


def heat_box(heat: NDArray[np.float64], threshold: float) -> list[float]:
    """The tight box (xmin, ymin, xmax, ymax) around the largest 8-connected part of heat [H,W] >= threshold."""
    from scipy import ndimage

    labels, _ = ndimage.label(heat >= threshold, np.ones((3, 3)))
    sizes = np.bincount(labels.ravel())
    rows, columns = ndimage.find_objects(labels)[sizes[1:].argmax()]
    return [float(columns.start), float(rows.start), float(columns.stop), float(rows.stop)]


def _outline(axes: Axes, box: Sequence[float], scale: float, colour: str, dashes: str) -> None:
    left, top, right, bottom = (scale * side for side in box)
    where = (left - 0.5, top - 0.5), right - left, bottom - top
    axes.add_patch(Rectangle(*where, fill=False, edgecolor="black", linewidth=1.8, clip_on=False))
    axes.add_patch(Rectangle(*where, fill=False, edgecolor=colour, linewidth=1.0, linestyle=dashes, clip_on=False))


@layout
def sensitivity(
    drawing: Drawing,
    steps: Count = 28,
    distances: Distances | None = None,
    deviations: Deviations | None = None,
    blocks: list[int] | None = None,
) -> Figure:
    """Insertion and deletion AUC of ViT-CX as one setting changes and the others stay."""
    drawing.say("the text of the paper's Appendix F is not available")
    drawing = drawing.of_prediction()
    depth = drawing.vit.depth
    several = blocks or [round(float(b)) for b in np.linspace(0, depth - 1, min(5, depth))]
    usual = {"distance": DISTANCE, "sigma": SIGMA, "layer": float(depth - 1)}
    studies: dict[str, tuple[list[float], str]] = {
        "distance": (sorted(distances or [0.02, 0.05, 0.1, 0.2, 0.3]), "distance δ of clusters"),
        "sigma": (sorted(deviations or [0.0, 0.05, 0.1, 0.2, 0.4]), "deviation σ of the noise"),
        "layer": (sorted({float(b % depth) for b in several}), "block that is read"),
    }

    def request(name: str, value: float) -> dict[str, Any]:
        """ViT-CX with all settings written out, so that equal settings are measured once."""
        chosen = {**usual, name: value}
        return {"method": "vit-cx", **chosen, "layer": f"blocks[{chosen['layer']:.0f}].norm1"}

    requests = {name: [request(name, value) for value in values] for name, (values, _) in studies.items()}
    with warnings.catch_warnings(action="ignore", category=DegenerateMap):  # all masks may be in one cluster
        methods = {str(each): each for several in requests.values() for each in several}
        evaluations = drawing.evaluate(methods, auc_metrics(steps))
    counts = _mask_counts(drawing, studies["distance"][0])
    drawing.say("dotted: the paper's setting; below δ: the mean number of masks that remain")
    drawing.say_intervals()
    fig = drawing.sheet(2.2)
    axes = fig.subplots(1, len(studies), sharey=True)
    for axis, (name, (values, words)) in zip(axes, studies.items(), strict=True):
        for n, (metric, arrow) in enumerate({"Ins": "↑", "Del": "↓", "Ins (blur)": "↑"}.items()):
            scores = torch.stack([evaluations[str(each)][metric].values for each in requests[name]], 1)
            sheet.line(axis, range(len(values)), scores, f"{metric} {arrow}", n, values)
        ticks = [f"{value:g}" for value in values]
        if name == "distance":
            for value, mean, low, high in zip(values, *(part.tolist() for part in mean_interval(counts)), strict=True):
                record(axis, "masks", mean, (low, high), x=value, images=len(counts), quantity="masks that remain")
            ticks = [f"{tick}\n{count:.0f}" for tick, count in zip(ticks, counts.mean(0).tolist(), strict=True)]
        sheet.tidy(axis, "", words, "AUC" if name == "distance" else "")
        axis.set_xticks(range(len(values)), ticks)
        axis.margins(x=0.08)
        if usual[name] in values:
            axis.axvline(values.index(usual[name]), color="0.5", linewidth=0.8, linestyle=":")
    sheet.legend(axes[-1], loc="center")
    return fig


def _mask_counts(drawing: Drawing, distances: Sequence[float], layer: str = "blocks[-1].norm1") -> Tensor:
    """The number of masks of each image at each distance [B,P]."""
    counts = []
    for _, image in each_image(drawing, "clustering"):
        channels, _ = channel_masks(ask_about(drawing.vit, image), layer)
        counts.append([float(len(cluster_channels(channels, drawing.vit.extent, each))) for each in distances])
    return torch.tensor(counts)


@layout
def similarity(drawing: Drawing, distances: Distances | None = None, place: Place = "norm1") -> Figure:
    """Sim(i, j) of one image in the order of clustering; its mean by block; the number of masks that remain."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    vit, several, last = drawing.vit, sorted(distances or [0.02, 0.05, 0.1, 0.15, 0.2, 0.3]), f"blocks[-1].{place}"
    apart = cosine_distances(channel_masks(ask_about(vit, drawing.images[0]), last)[0], vit.extent)
    tree = linkage(squareform(apart.cpu().numpy(), checks=False), "complete")
    order = torch.from_numpy(leaves_list(tree)).long()
    matrix = 1 - apart[order][:, order]
    layers, by_image = [f"blocks[{block}].{place}" for block in range(vit.depth)], []
    for _, image in each_image(drawing, "comparing masks"):
        ask = ask_about(vit, image)
        masks = (channel_masks(ask, layer)[0] for layer in layers)
        by_image.append([float(mask_similarities(each, vit.extent).mean()) for each in masks])
    means, counts = torch.tensor(by_image), _mask_counts(drawing, several, last)
    drawing.say("(a) Sim(i, j) of the first image, in the order in which masks are clustered")
    drawing.say_intervals()
    fig = drawing.sheet(2.0)
    first, second, third = fig.subplots(1, 3)
    lowest = float(matrix.min())
    shown = first.imshow(matrix.cpu().numpy(), cmap="cividis", vmin=lowest, vmax=1, interpolation="nearest")
    sheet.tidy(first, "(a)", f"{len(matrix)} masks", "")
    first.grid(visible=False)
    first.set_yticks([])
    bar = fig.colorbar(shown, ax=first, shrink=0.75, pad=0.02)
    bar.ax.tick_params(labelsize=sheet.WORDS - 1, length=2, width=0.5)
    bar.outline.set_visible(False)
    sheet.line(second, range(vit.depth), means, "", 0)
    sheet.tidy(second, "(b)", "block", "mSim, mean over images")
    second.xaxis.get_major_locator().set_params(integer=True)
    sheet.line(third, several, counts, "", 1)
    sheet.tidy(third, "(c)", "distance δ of clusters", "masks that remain")
    third.axvline(DISTANCE, color="0.5", linewidth=0.8, linestyle=":")
    third.set_ylim(0, None)
    return fig


@layout
def overdetermination(
    drawing: Drawing, threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9, layer: str = NORM1
) -> Figure:
    """The mean score of each image's masks, and the variance of the scores."""
    drawing = drawing.of_prediction()
    scores = [each.scores for each in impacts(drawing, layer=layer)]
    means, variances = (torch.stack([f(s) for s in scores]) for f in (torch.mean, torch.var))
    above = means > threshold
    share, low, high = (float(x[0]) for x in mean_interval(above[:, None].double()))
    variance = float(variances[above].mean())
    interval = f" (95 % interval: {100 * low:.0f} to {100 * high:.0f})" if low == low else ""
    inside = f"; their mean variance is {variance:.3f}" if bool(above.any()) else ""
    drawing.say(f"{100 * share:.1f} %{interval} of the images have a mean above {threshold:g}{inside}")
    fig = drawing.sheet(1.9)
    name, panel, count = drawing.vit.name, f"μ > {threshold:g}", len(means)
    record(fig, name, share, (low, high), quantity="share of images", images=count, panel=panel)
    if bool(above.any()):
        quantity = "mean variance of their scores"
        record(fig, name, variance, quantity=quantity, images=int(above.sum()), panel=panel)
    record(fig, name, float(means.mean()), quantity="mean score of masks", images=count)
    left, right = fig.subplots(1, 2)
    edges = np.linspace(min(0.0, float(means.min())), max(1.0, float(means.max())), 21)
    left.hist(means.numpy(), edges, weights=np.full(count, 1 / count), color=COLOURS[0], alpha=0.75)
    sheet.tidy(left, "(a)", "mean score μ of an image's masks", "share of images")
    for side, colour in ((~above, COLOURS[0]), (above, COLOURS[1])):
        right.plot(means[side].numpy(), variances[side].numpy(), "o", color=colour, markersize=2.6, alpha=0.8)
    sheet.tidy(right, "(b)", "mean score μ of an image's masks", "variance of the scores")
    right.set_ylim(0, None)
    for axis in (left, right):
        axis.axvline(threshold, color=COLOURS[1], linewidth=0.9, linestyle="--")
    return fig
