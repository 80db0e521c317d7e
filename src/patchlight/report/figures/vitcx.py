"""The figures of Xie et al., "ViT-CX: Causal Explanation of Vision Transformers"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from patchlight.anatomy.weights import read_weights
from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.core.progress import telling
from patchlight.core.statistics import spearman
from patchlight.evidence.ablation import Count
from patchlight.evidence.passes import LayerJob
from patchlight.methods.base import Ask
from patchlight.methods.cams import NORM1, feature_maps
from patchlight.methods.rise import draw_grids
from patchlight.methods.vitcx import scaled, upsampled
from patchlight.report.figures.base import Drawing, Methods, register_figure
from patchlight.report.figures.masks import SIGMA, Impact, asked, channel_masks, impact, similarities
from patchlight.report.figures.numbers import record
from patchlight.report.figures.panels import coloured, explained, of_prediction, stretched
from patchlight.report.figures.sheet import COLOURS, COLUMN, Cell, Row, mean_interval, pictures, tidy

PAPER = "ViT-CX (Xie et al., IJCAI 2023)"
METHODS: dict[str, Any] = {
    "CGW1": "transatt",
    "CGW2": "genatt",
    "TAM": "tam",
    "Score-CAM": {"method": "score-cam", "preset": "vit-cx"},
    "ViT-CX": "vit-cx",
}
"""The columns of Figure 1, by the paper's names."""
EMPTY = "zero"
"""The empty canvas that the paper inserts pixels into: 0 after normalisation."""


def faithful(steps: int) -> dict[str, dict[str, Any]]:
    """Deletion and insertion as the paper measures them, in `steps` steps, and insertion into RISE's blurred image."""
    rise = {"preset": "rise", "steps": steps}
    return {
        "Del": {"metric": "deletion", **rise},
        "Ins": {"metric": "insertion", **rise, "fill": EMPTY},
        "Ins (blur)": {"metric": "insertion", **rise},
    }


def impacts(drawing: Drawing, sigma: float = SIGMA, layer: str = NORM1) -> list[Impact]:
    """The masks of every image and what they cause."""
    found = []
    with telling(drawing.progress, "masking") as tell:
        for i, (image, index) in enumerate(zip(drawing.images, drawing.classes.tolist(), strict=True)):
            found.append(impact(drawing.vit, image, index, sigma=sigma, seed=drawing.seed, layer=layer))
            tell(i + 1, len(drawing))
    return found


@register_figure(
    "vitcx-1",
    paper=f"{PAPER}, Figure 1",
    shows="maps of attention-based methods, Score-CAM and ViT-CX, each with its deletion and insertion AUC",
    stand_in="ViT-B/16; a goldfish, a dogsled, a vine snake and a head cabbage of ImageNet",
    quick={"shown": 1, "steps": 8, "methods": {"CGW2": "genatt", "ViT-CX": {"method": "vit-cx", "distance": 0.2}}},
)
def examples(drawing: Drawing, shown: Count = 4, steps: Count = 224, methods: Methods | None = None) -> Figure:
    """A row for every image: the maps of the predicted class, and below each how faithful it is.

    Deletion (lower is better) and insertion into an empty canvas (zeros after normalisation; higher is better) in
    `steps` steps; the best of a row is marked with *. The numbers also have insertion into RISE's blurred image.
    """
    drawing = of_prediction(drawing)
    maps = explained(drawing, METHODS if methods is None else methods)
    found = drawing.evaluate(maps, faithful(steps))
    rows = []
    for i, picture in enumerate(drawing.pictures):
        cells = [Cell(picture, drawing.name_of(int(drawing.classes[i])), "Del / Ins")]
        values = {label: {name: float(one.values[i]) for name, one in own.items()} for label, own in found.items()}
        best = {"Del": min(own["Del"] for own in values.values()), "Ins": max(own["Ins"] for own in values.values())}
        for label, att in maps.items():
            words = " / ".join(_marked(values[label][name], best[name]) for name in best)
            cells.append(Cell(drawing.heat(i, att.scores[i], True, att), label, words, values[label]))
        rows.append(Row(cells))
    drawing.say(
        "below: deletion AUC (lower is better) / insertion AUC over an empty canvas, zeros after normalisation (higher "
        "is better), * the best of its row"
    )
    return drawing.rows(rows)


def _marked(value: float, best: float) -> str:
    return f"{value:.3f}{'*' if value == best else ''}"


@register_figure(
    "vitcx-2",
    paper=f"{PAPER}, Figure 2",
    shows="attention maps of CLS, feature maps, and the image through the masks that these make",
    stand_in="ViT-B/16 and one image",
    quick={"columns": 2},
)
def feature_maps_and_masks(
    drawing: Drawing, shown: Count = 1, columns: Count = 5, layer: str = NORM1, channels: list[int] | None = None
) -> Figure:
    """For each image: (a) attention of CLS to the patches by head, (b) feature maps, (c) the image through their masks.

    Heads are those of the last block, then of the blocks before it. Feature maps are `channels` of `layer`, by default
    `columns` of them, evenly spread. A mask is its feature map, upsampled and stretched to [0, 1].
    """
    rows = []
    for i, image in enumerate(drawing.images):
        ask = asked(drawing.vit, image)
        features = feature_maps(ask, layer)[0][0]
        chosen = _spread(len(features), columns) if channels is None else channels
        masks = scaled(features[chosen].double(), drawing.vit.extent)[0]
        through = ask.images * upsampled(masks, ask.images, drawing.vit.extent)(torch.arange(len(chosen)))
        looked = _attention_maps(drawing, ask, columns)
        pairs = {
            "(a) attention": [Cell(stretched(one), name) for name, one in looked.items()],
            "(b) feature maps": [Cell(stretched(features[k]), f"channel {k}") for k in chosen],
            "(c) through masks": [Cell(drawing.vit.preprocess.picture(one)) for one in through],
        }
        first: list[Cell | None] = [Cell(drawing.pictures[i], "image")]
        for label, cells in pairs.items():
            if cells:
                rows.append(Row([*first, *cells], label))
                first = [None]
    drawing.say(f"(a) and (b) from their lowest value (dark) to their highest; (b) of {layer}")
    return drawing.rows(rows, signed=())


def _attention_maps(drawing: Drawing, ask: Ask, count: int) -> dict[str, Tensor]:
    """Attention of CLS to the patches [h,w] by block and head, from the last block on; of all tokens without a CLS."""
    vit = drawing.vit
    if vit.attention is not None or vit.hierarchical or vit.depth == 0:
        drawing.say(f"(a) left out: the attention of {vit.name} cannot be read")
        return {}
    layers = tuple(range(vit.depth - 1, max(-1, vit.depth - 1 - -(-count // vit.heads)), -1))
    rows = slice(0, 1) if vit.prefix else slice(None)
    seen = ask.run([LayerJob(lambda b: b.A[0, :, rows, b.prefix :].mean(1), frozenset({"A"}), layers)])
    found = {
        f"block {layer}, head {head}": one.unflatten(0, vit.grid)
        for layer in layers
        for head, one in enumerate(seen.at(layer))
    }
    return dict(list(found.items())[:count])


def _spread(total: int, count: int) -> list[int]:
    """`count` of `total` places, evenly spread; all where there are fewer."""
    count = min(count, total)
    return [(2 * i + 1) * total // (2 * count) for i in range(count)]


@register_figure(
    "vitcx-4",
    paper=f"{PAPER}, Figure 4",
    shows="how alike the masks of a ViT are: cosine similarities within one image, and their means over images",
    stand_in="ViT-B/16 and ResNet-50, all 50,000 validation images of ImageNet (mean .92 for the ViT)",
    least=2,
    quick={"random_masks": 50},
)
def mask_similarity(
    drawing: Drawing,
    random_masks: Count = 200,
    cnn: str = "resnet50",
    cnn_weights: str | None = None,
    layer: str = NORM1,
) -> Figure:
    """Similarities of the masks that a ViT's channels at `layer` make, beside those of other masks.

    (a) all pairs of the first image, (b) the mean of each image. Beside them RISE's random masks; the masks of a CNN
    (`cnn`, a name of timm) where its weights are given (`cnn_weights`, a safetensors file); and those of a second
    model, where one is given.
    """
    sources = {drawing.vit.name: _alike(drawing, layer)}
    if drawing.other is not None:
        sources[drawing.other.name] = _alike(drawing.of(drawing.other), layer)
    if cnn_weights is not None:
        sources[cnn] = _alike_of_cnn(drawing, cnn, cnn_weights)
    else:
        drawing.say(f"the masks of a CNN are drawn where its weights are given (cnn={cnn!r}, cnn_weights=FILE)")
    sources["random masks (RISE)"] = _alike_at_random(drawing, random_masks)
    drawing.say("dashed: means")
    fig = drawing.sheet(2.1)
    left, right = fig.subplots(1, 2)
    _histograms(left, {label: own[0] for label, own in sources.items()}, density=True)
    tidy(left, "(a) one image", "Sim(i, j) of two masks", "density")
    _histograms(right, {label: torch.stack([one.mean() for one in own]) for label, own in sources.items()})
    tidy(right, f"(b) {len(drawing)} images", "mSim, the mean of an image's pairs", "share of images")
    left.legend(fontsize=6.5, frameon=False, loc="upper left")
    return fig


def _histograms(axes: Axes, samples: Mapping[str, Tensor], density: bool = False) -> None:
    """Histograms of several samples over [0, 1], outlined and faintly filled, their means dashed."""
    edges = np.linspace(0, 1, 81)
    for n, (label, values) in enumerate(samples.items()):
        array = values.clamp(0, 1).double().cpu().numpy()
        weight = (1 / (edges[1] - edges[0]) if density else 1.0) / len(array)
        shown: dict[str, Any] = {"bins": edges, "weights": np.full(len(array), weight), "color": COLOURS[n]}
        axes.hist(array, histtype="stepfilled", alpha=0.2, **shown)
        axes.hist(array, histtype="step", linewidth=1.1, label=label, **shown)
        axes.axvline(float(array.mean()), color=COLOURS[n], linewidth=0.8, linestyle="--")
        words = "Sim(i, j), mean of the pairs" if density else "mSim, mean over images"
        whole, low, high = (float(one) for one in mean_interval(values[:, None]))
        interval = (math.nan, math.nan) if density else (low, high)
        record(axes, label, whole, interval, images=1 if density else len(array), quantity=words)
    axes.set_xlim(0, 1)


def _alike(drawing: Drawing, layer: str = NORM1) -> list[Tensor]:
    """By image, the similarities of all pairs of channels."""
    vit, found = drawing.vit, []
    with telling(drawing.progress, "comparing masks") as tell:
        for i, image in enumerate(drawing.images):
            found.append(similarities(channel_masks(asked(vit, image), layer)[0], vit.extent))
            tell(i + 1, len(drawing))
    return found


def _alike_at_random(drawing: Drawing, count: int) -> list[Tensor]:
    """The same of random masks, which have nothing to do with an image: RISE's, others for every image."""
    size, found = drawing.vit.preprocess.size, []
    for i in range(len(drawing)):
        generator = torch.Generator().manual_seed(drawing.seed + i)
        masks = draw_grids(count, 7, 0.5, size, generator).to(torch.zeros(())).masks(torch.arange(count))
        found.append(similarities(masks.double(), size))
    return found


def _alike_of_cnn(drawing: Drawing, name: str, weights: str) -> list[Tensor]:
    """The same of the last feature map of a CNN of timm."""
    import timm
    from timm.data.config import resolve_model_data_config

    model: Any = timm.create_model(name)
    try:
        model.load_state_dict(read_weights(Path(weights)))
    except RuntimeError as error:
        raise PatchlightError(f"'{weights}' holds no weights of {name}: {str(error).splitlines()[0]}") from error
    model.eval().requires_grad_(False)
    about = resolve_model_data_config(model)
    height, width = about["input_size"][1:]
    preprocess = Preprocess((height, width), tuple(about["mean"]), tuple(about["std"]))
    found = []
    for picture in drawing.pictures:
        features = model.forward_features(preprocess.tensor(picture)[None])[0]
        masks, spans = scaled(features.double(), (height, width))
        found.append(similarities(masks[spans > 0], (height, width)))
    return found


@register_figure(
    "vitcx-5",
    paper=f"{PAPER}, Figure 5",
    shows="a mask whose outline alone gives the class away, and one that keeps the object, without and with noise",
    stand_in="ViT-B/16 and a goldfish (a: .973 falls to .005 with noise; b: .994 to .981)",
    quick={"searched": 2},
)
def artefacts(drawing: Drawing, searched: Count = 16, sigma: float = SIGMA) -> Figure:
    """The mask whose score is most of all an artefact, and one of the same image whose score is not.

    Of the masks of the first `searched` images, (a) loses most when its gaps are filled with noise of deviation
    `sigma`; (b) is the mask of that image with the highest score that keeps it.
    """
    drawing = of_prediction(drawing).select(range(min(searched, len(drawing))))
    found = impacts(drawing, sigma)
    plain = [one.plain() for one in found]
    i = max(range(len(found)), key=lambda n: float((plain[n] - found[n].scores).max()))
    lost = plain[i] - found[i].scores
    chosen = {"(a)": int(lost.argmax()), "(b)": int((plain[i] - 2 * lost.abs()).argmax())}
    rows: list[Row] = []
    for case, index in chosen.items():
        (masked, before), (noisy, after) = (found[i].through(index, noise) for noise in (False, True))
        look, score = drawing.vit.preprocess.picture, float(found[i].scores[index])
        cells = [
            Cell(drawing.pictures[i], "Image", f"p = {found[i].clean:.3f}"),
            Cell(coloured(found[i].at_size(index), colours="cividis"), "Mask"),
            Cell(look(masked), "Masked", f"CI = {before:.3f}", {"CI": before}),
            Cell(
                look(noisy),
                "With noise",
                f"p\u00a0=\u00a0{after:.3f} s\u00a0=\u00a0{score:.3f}",
                {"p with noise": after, "s": score},
            ),
        ]
        rows.append(Row(cells if not rows else [replace(cell, title="") for cell in cells], case))
    drawing.say(
        f"probabilities p of {drawing.name_of(int(drawing.classes[i]))}; CI: causal impact score p(X M); s: the "
        f"debiased one, p(X M + e) − p(X + e) + p(X), with noise e of deviation {sigma:g}; masks from 0 (blue) to 1 "
        "(yellow)"
    )
    return pictures(drawing.note, rows, COLUMN, ())


@register_figure(
    "vitcx-6",
    paper=f"{PAPER}, Figure 6",
    shows="where most masks suffice for the class, a map not corrected for coverage shows nothing but the coverage",
    stand_in="ViT-B/16 and a dogsled",
    quick={"searched": 2},
)
def coverage_bias(drawing: Drawing, searched: Count = 16, examples: Count = 1) -> Figure:
    """How often the masks cover each pixel, the map without correction, and the corrected one.

    Of the first `searched` images those with the highest mean score of their masks, the most overdetermined ones.
    """
    drawing = of_prediction(drawing).select(range(min(searched, len(drawing))))
    found = impacts(drawing)
    means = [float(one.scores.mean()) for one in found]
    rows = []
    for i in sorted(range(len(found)), key=lambda n: -means[n])[:examples]:
        coverage = found[i].coverage()
        biased, corrected = (found[i].weighted(found[i].scores, corrected=c) for c in (False, True))
        alike = [float(spearman(m.flatten()[None], coverage.flatten()[None])) for m in (biased, corrected)]
        name = drawing.name_of(int(drawing.classes[i]))
        cells = [
            Cell(drawing.pictures[i], name, f"μ = {means[i]:.2f}", {"mean score of the masks": means[i]}),
            Cell(drawing.heat(i, coverage), "Coverage ρ"),
            Cell(drawing.heat(i, biased), "Not corrected", _signed(alike[0]), {_WITH_COVERAGE: alike[0]}),
            Cell(drawing.heat(i, corrected), "Corrected", _signed(alike[1]), {_WITH_COVERAGE: alike[1]}),
        ]
        rows.append(Row(cells))
    drawing.say("below: μ is the mean score of the masks, r the rank correlation of a map with the coverage")
    return pictures(drawing.note, rows, COLUMN)


_WITH_COVERAGE = "rank correlation with the coverage"


def _signed(value: float) -> str:
    return f"r = {value:.2f}".replace("-", "−")
