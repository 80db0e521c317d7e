"""What the appendices of ViT-CX study: sanity, localisation, sensitivity, the masks' similarity, overdetermination.

The appendices are not to be had as text; these figures show what the paper says of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.core.progress import telling
from patchlight.core.resize import to_pixels
from patchlight.core.targets import Targets
from patchlight.engine import explain
from patchlight.evidence.ablation import Count
from patchlight.methods.cams import NORM1, Place
from patchlight.methods.vitcx import cosine_distances
from patchlight.metrics.localisation import unit_range
from patchlight.metrics.sanity import stages, twin
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.masks import DISTANCE, SIGMA, asked, channel_masks, clustered, similarities
from patchlight.report.figures.numbers import record
from patchlight.report.figures.panels import explained, of_prediction, tell_bands
from patchlight.report.figures.sheet import COLOURS, WORDS, line, mean_interval, tidy
from patchlight.report.figures.vitcx import PAPER, faithful, impacts

Distances = list[Annotated[float, Field(gt=0)]]
Deviations = list[Annotated[float, Field(ge=0)]]
SANITY: dict[str, Any] = {"ViT-CX": "vit-cx", "CGW2": "genatt", "Rollout": "rollout"}
LOCALISED: dict[str, Any] = {"ViT-CX": "vit-cx", "CGW1": "transatt", "CGW2": "genatt", "Rollout": "rollout"}


class _Recorder:
    """A method that keeps the maps it makes, in the order it was asked."""

    def __init__(self, own: Any) -> None:
        self.own = own
        self.maps: list[Tensor] = []

    def __call__(self, vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        asked_of = {"map": {"method": self.own} if isinstance(self.own, str) else self.own}
        with warnings.catch_warnings():  # a random model may have constant maps
            warnings.simplefilter("ignore", DegenerateMap)
            found = explain(vit, images, asked_of, targets.index[:, 0].tolist(), seed=seed, progress=False)["map"]
        self.maps.append(found.scores)
        return found.scores


@register_figure(
    "vitcx-sanity",
    paper=f"{PAPER}, Appendix B",
    shows="maps while the model's layers become random, from the last to the first: those that explain it must change",
    quick={"methods": {"ViT-CX": {"method": "vit-cx", "distance": 0.3}, "Rollout": "rollout"}, "columns": 4},
)
def sanity(drawing: Drawing, columns: Count = 6, methods: Methods | None = None) -> Figure:
    """Cascading randomisation: the first image's maps after some of the stages, and the similarity after all.

    Similarity is the rank correlation with the map of the trained model, the mean over images (metric
    `randomisation`): a map that stays the same does not explain the model. Drawn after Adebayo et al. (2018): the
    paper's appendix is not to be had as text.
    """
    drawing.say("drawn after Adebayo et al. (2018), since the paper's Appendix B is not to be had as text")
    drawing = of_prediction(drawing)
    recorders = {
        label: _Recorder(own) for label, own in drawing.working(SANITY if methods is None else methods).items()
    }
    found = drawing.evaluate(recorders, "randomisation", batch_size=len(drawing))
    names = ["trained", *(name for name, _ in stages(twin(drawing.vit)))]
    chosen = [round(float(c)) for c in np.linspace(0, len(names) - 1, min(columns, len(names)))]
    drawing.say(
        "the weights of the head, then the norm, the blocks from the last to the first and the embedding are drawn anew"
    )
    tell_bands(drawing)
    rows, across = len(recorders), len(chosen)
    fig = drawing.sheet(0.95 * rows + 1.7)
    grid = fig.add_gridspec(rows + 1, across, height_ratios=[0.95] * rows + [1.7])
    for r, (label, recorder) in enumerate(recorders.items()):
        for c, stage in enumerate(chosen):
            axes = fig.add_subplot(grid[r, c])
            _picture(axes, drawing.heat(0, recorder.maps[stage][0], True))
            if r == 0:
                axes.set_title(names[stage], size=WORDS)
            if c == 0:
                axes.set_ylabel(label, size=WORDS)
    axes = fig.add_subplot(grid[rows, :])
    for n, (label, own) in enumerate(found.items()):
        line(axes, range(len(names)), own.curve, label, n, names)
    tidy(axes, "", "", "rank correlation with\nthe trained model's")
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.axhline(0, color="0.5", linewidth=0.6)
    axes.legend(fontsize=6.5, frameon=False, loc="upper right")
    return fig


def _picture(axes: Axes, picture: Any) -> None:
    axes.imshow(np.asarray(picture), interpolation="antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


@register_figure(
    "vitcx-localisation",
    paper=f"{PAPER}, Appendix C",
    shows="boxes around the heat of ViT-CX beside the true ones, and how often boxes are right at every threshold",
    needs={"boxes"},
    quick={"methods": {"ViT-CX": {"method": "vit-cx", "distance": 0.3}, "Rollout": "rollout"}, "examples": 2},
)
def localisation(drawing: Drawing, examples: Count = 4, methods: Methods | None = None) -> Figure:
    """Examples with the true boxes (dashed) and that around the heat, cut where the first method is best.

    The curves are the share of images whose box has an IoU of .3, .5 and .7 with a true one, the mean of the three
    (metric `max-box-acc`); the legend has the best over the thresholds. The paper compares with trained localisers, in
    an appendix that is not to be had as text.
    """
    drawing.say("the paper's Appendix C, which is not to be had as text, compares with trained localisers")
    drawing = of_prediction(_boxed(drawing))
    maps = explained(drawing, LOCALISED if methods is None else methods)
    found = drawing.evaluate(maps, "max-box-acc")
    first = next(iter(maps))
    share = found[first].curve.mean(0)
    best = float(found[first].x[share == share.max()][-1])
    drawing.say(
        f"white, dashed: true boxes; green: the box around the largest part of {first}'s heat above {best:.2f}, its "
        "best threshold (the highest of equal ones); in brackets MaxBoxAccV2"
    )
    tell_bands(drawing)
    count = min(examples, len(drawing))
    fig = drawing.sheet(2.3)
    across = -(-count // 2)
    grid = fig.add_gridspec(2, across + 1, width_ratios=[1.1] * across + [3.4])
    size = drawing.vit.preprocess.size
    for i in range(count):
        axes = fig.add_subplot(grid[i % 2, i // 2])
        _picture(axes, drawing.heat(i, maps[first].scores[i], True, maps[first]))
        scores = unit_range(to_pixels(maps[first].scores[i : i + 1].double(), size, drawing.vit.extent))[0].numpy()
        scale = drawing.pictures[i].width / size[1]
        assert drawing.boxes is not None
        for box in drawing.boxes[i].tolist():
            _outline(axes, box, scale, "white", "--")
        _outline(axes, heat_box(scores, best), scale, COLOURS[2], "-")
    axes = fig.add_subplot(grid[:, across])
    for n, (label, own) in enumerate(found.items()):
        line(axes, own.x, own.curve, f"{label} ({own.mean:.2f})", n, marker=None)
        record(axes, label, own.mean, own.interval(), images=own.count, quantity="MaxBoxAccV2")
    tidy(axes, "", "threshold of the heat, from 0 to 1", "boxes that are right")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, None)
    axes.legend(fontsize=6.5, frameon=False, loc="best")
    return fig


def _boxed(drawing: Drawing) -> Drawing:
    """The images that have a box; the others are counted in the note."""
    assert drawing.boxes is not None
    chosen = [i for i, boxes in enumerate(drawing.boxes) if len(boxes)]
    if not chosen:
        raise PatchlightError("none of the images has a box; give images with boxes around their objects")
    if len(chosen) < len(drawing):
        drawing.say(f"{len(drawing) - len(chosen)} of {len(drawing)} images have no box and are left out")
    return drawing.select(chosen)


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


@register_figure(
    "vitcx-sensitivity",
    paper=f"{PAPER}, Appendix F",
    shows="how faithful ViT-CX is over its settings: the distance of clusters, the noise, and the layer",
    quick={"steps": 3, "distances": [0.3], "deviations": [0.1], "blocks": [-1]},
)
def sensitivity(
    drawing: Drawing,
    steps: Count = 28,
    distances: Distances | None = None,
    deviations: Deviations | None = None,
    blocks: list[int] | None = None,
) -> Figure:
    """Insertion and deletion AUC in `steps` steps, as one setting changes and the others stay.

    Insertion is into an empty canvas (zeros after normalisation), and once more into RISE's blurred image. `distances`
    below which masks are put together (0.1), `deviations` of the noise (0.1), and `blocks` whose first norm is read
    (the last). The paper's appendix is not to be had as text.
    """
    drawing.say("the paper's Appendix F is not to be had as text")
    drawing = of_prediction(drawing)
    depth = drawing.vit.depth
    several = [depth - 1 if b == -1 else b % depth for b in (blocks or _spread(depth))]
    studies: dict[str, tuple[list[float], str]] = {
        "distance": (sorted(distances or [0.02, 0.05, 0.1, 0.2, 0.3]), "distance δ of clusters"),
        "sigma": (sorted(deviations or [0.0, 0.05, 0.1, 0.2, 0.4]), "deviation σ of the noise"),
        "layer": ([float(b) for b in sorted(set(several))], "block that is read"),
    }
    asked_of = {name: [_setting(name, value, depth) for value in values] for name, (values, _) in studies.items()}
    methods = {str(own): own for all_of in asked_of.values() for own in all_of}
    with warnings.catch_warnings():  # one cluster may hold every mask
        warnings.simplefilter("ignore", DegenerateMap)
        found = drawing.evaluate(methods, faithful(steps))
    counts = _counts(drawing, studies["distance"][0])
    drawing.say("dotted: the paper's setting; below δ how many masks remain, on average")
    tell_bands(drawing)
    fig = drawing.sheet(2.2)
    axes = fig.subplots(1, len(studies), sharey=True)
    usual = {"distance": DISTANCE, "sigma": SIGMA, "layer": float(depth - 1)}
    for axis, (name, (values, words)) in zip(axes, studies.items(), strict=True):
        for n, (metric, arrow) in enumerate({"Ins": "↑", "Del": "↓", "Ins (blur)": "↑"}.items()):
            measured = torch.stack([found[str(own)][metric].values for own in asked_of[name]], 1)
            line(axis, range(len(values)), measured, f"{metric} {arrow}", n, values)
        ticks = [f"{value:g}" for value in values]
        if name == "distance":
            _record_counts(axis, values, counts)
            ticks = [f"{tick}\n{count:.0f}" for tick, count in zip(ticks, counts.mean(0).tolist(), strict=True)]
        tidy(axis, "", words, "AUC" if name == "distance" else "")
        axis.set_xticks(range(len(values)), ticks)
        axis.margins(x=0.08)
        if usual[name] in values:
            axis.axvline(values.index(usual[name]), color="0.5", linewidth=0.8, linestyle=":")
    axes[-1].legend(fontsize=6.5, frameon=False, loc="center")
    return fig


def _record_counts(axes: Axes, distances: Sequence[float], counts: Tensor) -> None:
    """Keep how many masks remain of every image [B,P] at each distance."""
    for distance, mean, low, high in zip(distances, *(one.tolist() for one in mean_interval(counts)), strict=True):
        record(axes, "masks", mean, (low, high), x=distance, images=len(counts), quantity="masks that remain")


def _spread(depth: int) -> list[int]:
    """Five blocks from the first to the last, or all of fewer."""
    return sorted({round(float(b)) for b in np.linspace(0, depth - 1, min(5, depth))})


def _setting(name: str, value: float, depth: int) -> dict[str, Any]:
    """ViT-CX with one setting of its own, those of the paper written out, so that the same are measured once."""
    usual: dict[str, Any] = {"distance": DISTANCE, "sigma": SIGMA, "layer": depth - 1}
    chosen = {**usual, name: value}
    return {"method": "vit-cx", **chosen, "layer": f"blocks[{chosen['layer']:.0f}].norm1"}


def _counts(drawing: Drawing, distances: Sequence[float], layer: str = "blocks[-1].norm1") -> Tensor:
    """How many masks are left of every image at every distance [B,P]."""

    def of(image: Tensor) -> list[float]:
        channels, _ = channel_masks(asked(drawing.vit, image), layer)
        return [float(len(clustered(channels, drawing.vit.extent, distance).masks)) for distance in distances]

    return torch.tensor(_each(drawing, of, "clustering"))


def _each(drawing: Drawing, function: Callable[[Tensor], Any], words: str) -> list[Any]:
    """What a function makes of every image."""
    found = []
    with telling(drawing.progress, words) as tell:
        for i, image in enumerate(drawing.images):
            found.append(function(image))
            tell(i + 1, len(drawing))
    return found


@register_figure(
    "vitcx-similarity",
    paper=f"{PAPER}, appendices: similarity of masks",
    shows="how alike the masks are inside clusters and at every block, and how many remain at every distance",
    stand_in="ViT-B/16; 63 masks of 768 remain at a distance of 0.1",
    quick={"distances": [0.05, 0.2]},
)
def similarity(drawing: Drawing, distances: Distances | None = None, place: Place = "norm1") -> Figure:
    """Redundancy of ViT masks: (a) Sim(i, j) of one image, masks clustered early side by side; (b) their mean by block;
    (c) the masks that remain. Masks are made of the channels at `place` of the blocks, (a) and (c) of the last.
    """
    vit, several, last = drawing.vit, sorted(distances or [0.02, 0.05, 0.1, 0.15, 0.2, 0.3]), f"blocks[-1].{place}"
    channels, _ = channel_masks(asked(vit, drawing.images[0]), last)
    distances_of = cosine_distances(channels, vit.extent)
    order = _in_order(distances_of)
    matrix = 1 - distances_of[order][:, order]

    def by_block(image: Tensor) -> list[float]:
        ask = asked(vit, image)
        layers = [f"blocks[{block}].{place}" for block in range(vit.depth)]
        return [float(similarities(channel_masks(ask, layer)[0], vit.extent).mean()) for layer in layers]

    means, counts = torch.tensor(_each(drawing, by_block, "comparing masks")), _counts(drawing, several, last)
    drawing.say("(a) Sim(i, j) of the first image, in the order in which masks are clustered")
    tell_bands(drawing)
    fig = drawing.sheet(2.0)
    first, second, third = fig.subplots(1, 3)
    shown = first.imshow(
        matrix.cpu().numpy(), cmap="cividis", vmin=float(matrix.min()), vmax=1, interpolation="nearest"
    )
    tidy(first, "(a)", f"{len(matrix)} masks", "")
    first.grid(visible=False)
    first.set_yticks([])
    bar = fig.colorbar(shown, ax=first, shrink=0.75, pad=0.02)
    bar.ax.tick_params(labelsize=WORDS - 1, length=2, width=0.5)
    bar.outline.set_visible(False)
    line(second, range(vit.depth), means, "", 0)
    tidy(second, "(b)", "block", "mSim, mean over images")
    second.xaxis.get_major_locator().set_params(integer=True)
    line(third, several, counts, "", 1)
    tidy(third, "(c)", "distance δ of clusters", "masks that remain")
    third.axvline(DISTANCE, color="0.5", linewidth=0.8, linestyle=":")
    third.set_ylim(0, None)
    return fig


def _in_order(distances: Tensor) -> Tensor:
    """The order in which the tree of complete linkage has its leaves: masks that are merged early lie side by side."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distances.cpu().numpy(), checks=False), "complete")
    return torch.from_numpy(leaves_list(tree)).long()


@register_figure(
    "vitcx-overdetermination",
    paper=f"{PAPER}, Section 3.4 and appendices: causal overdetermination",
    shows="how often most masks alone suffice for the class: the mean score of each image's masks, and its variance",
    stand_in="ViT-B/16, 50,000 images of ImageNet: 20.95 % above a mean of 0.9, their variance .036",
    least=2,
    quick={},
)
def overdetermination(
    drawing: Drawing, threshold: Annotated[float, Field(gt=0, lt=1)] = 0.9, layer: str = NORM1
) -> Figure:
    """(a) images by the mean score μ of their masks, and the share above the threshold; (b) variance of the scores."""
    drawing = of_prediction(drawing)
    scores = [one.scores for one in impacts(drawing, layer=layer)]
    means, variances = (torch.stack([f(s) for s in scores]) for f in (torch.mean, torch.var))
    above = means > threshold
    share, low, high = (float(x[0]) for x in mean_interval(above[:, None].double()))
    sure = f" (95 % interval: {100 * low:.0f} to {100 * high:.0f})" if low == low else ""
    inside = f"; their variance is {float(variances[above].mean()):.3f}" if bool(above.any()) else ""
    drawing.say(f"{100 * share:.1f} %{sure} of the images have a mean above {threshold:g}{inside}")
    fig = drawing.sheet(1.9)
    about: dict[str, Any] = {"images": len(means), "panel": f"μ > {threshold:g}"}
    record(fig, drawing.vit.name, share, (low, high), quantity="share of images", **about)
    if bool(above.any()):
        inner = float(variances[above].mean())
        record(
            fig,
            drawing.vit.name,
            inner,
            quantity="mean variance of their scores",
            **{**about, "images": int(above.sum())},
        )
    record(fig, drawing.vit.name, float(means.mean()), quantity="mean score of masks", images=len(means))
    left, right = fig.subplots(1, 2)
    edges = np.linspace(min(0.0, float(means.min())), max(1.0, float(means.max())), 21)
    weights = np.full(len(means), 1 / len(means))
    left.hist(means.numpy(), edges, weights=weights, color=COLOURS[0], alpha=0.75)
    tidy(left, "(a)", "mean score μ of an image's masks", "share of images")
    for side, colour in ((~above, COLOURS[0]), (above, COLOURS[1])):
        right.plot(means[side].numpy(), variances[side].numpy(), "o", color=colour, markersize=2.6, alpha=0.8)
    tidy(right, "(b)", "mean score μ of an image's masks", "variance of the scores")
    right.set_ylim(0, None)
    for axis in (left, right):
        axis.axvline(threshold, color=COLOURS[1], linewidth=0.9, linestyle="--")
    return fig
