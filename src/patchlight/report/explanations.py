"""The report of explanations for other people: one HTML file with everything in it, which opens offline and prints.

It shows what the model saw and said, what each method makes of it, and whether that stood the test of removing patches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from patchlight.core.attribution import Attribution
from patchlight.core.drawing.charts import PALETTE, SOFT, Band, Line, line_chart, line_style
from patchlight.core.drawing.heat import blend, is_signed, robust_scale
from patchlight.core.drawing.page import data_url, render_page
from patchlight.core.drawing.pictures import colour_bar, percent, short
from patchlight.core.errors import PatchlightError, escape_surrogates
from patchlight.core.statistics import constant
from patchlight.methods.requests import list_methods
from patchlight.study.faithfulness import sanity_words

if TYPE_CHECKING:
    from torch import Tensor

    from patchlight.anatomy.opened import Anatomy
    from patchlight.study.faithfulness import Faithfulness, Trial

SURE, CLOSE, LEFT = 0.5, 0.1, 0.5
"""Below which probability, and within which of the second class, a model is called unsure; and how much of the first
value may be left once every patch is gone before that is told."""
_PAINT = {
    "zero": "the mean colour of the data that the model was trained on",
    "black": "black",
    "image-mean": "the image's mean grey",
    "channel-mean": "the image's mean colour",
    "blur-rise": "a blurred copy of the image",
    "blur-tis": "a blurred copy of the image",
    "noise": "noise",
}
"""What each fill paints, in words."""
BAND = (0.05, 0.95)
"""The quantiles of the random orders between which a chart is shaded."""


@dataclass(frozen=True)
class Explained:
    """What a report is given about one image.

    `picture` is what the model sees of it, every map is of one class, and `truths` are what the `trial` says of them.
    `sanity` is how similar a map is to those of a model with random weights, where that was asked; `sha256` is of the
    file that the image was read from, where there was one.
    """

    name: str
    picture: Image.Image
    predictions: Sequence[tuple[str, float]]
    maps: Mapping[str, Attribution]
    trial: Trial
    truths: Mapping[str, Faithfulness]
    failures: Mapping[str, str] = field(default_factory=dict)
    sanity: Mapping[str, float] = field(default_factory=dict)
    sha256: str = ""


@dataclass(frozen=True)
class CurveChart:
    """The deletion or insertion curves of all methods, drawn as SVG."""

    title: str
    words: str
    svg: str


@dataclass(frozen=True)
class TestedMap:
    """A method's map as a picture, the look of its curve, and what the tests say of it."""

    method: str
    src: str
    about: str
    colour: str
    dash: str
    truth: Faithfulness
    sanity: str


@dataclass(frozen=True)
class ImageSection:
    """One image of a report, as small as it is shown; `size` is of its pictures, `pixels` of the model's input."""

    name: str
    photo: str
    size: tuple[int, int]
    pixels: tuple[int, int]
    predictions: list[tuple[str, str, float | None]]
    asked: str
    shown: list[TestedMap]
    charts: list[CurveChart]
    quantity: str
    random: dict[str, float]
    notes: list[str]
    failures: dict[str, str]
    hash: str
    sha256: str
    signed: bool


@dataclass(frozen=True)
class Provenance:
    """How everything in a report was made: `facts` about the model and the test, and the methods with their settings.

    `removed` says in words what removing a patch means, and `command` is what makes the same report. `left_out` are
    sentences about images that were asked for and could not be explained.
    """

    model: str
    removed: str
    facts: dict[str, str]
    methods: list[dict[str, str]]
    command: str
    warnings: Sequence[str] = ()
    left_out: Sequence[str] = ()


def section_of(image: Explained) -> ImageSection:
    """What a report shows of one image; pictures are encoded, so that many images take little memory."""
    for name, att in image.maps.items():
        if att.scores.ndim != 3 or len(att) != 1:
            raise PatchlightError(f"a report shows one map of an image for each method; '{name}' has {len(att.target)}")
    if not image.maps:
        why = "; ".join(f"{name}: {reason}" for name, reason in image.failures.items())
        raise PatchlightError(f"a report needs at least one map; none was made{f' ({why})' if why else ''}")
    first, trial = next(iter(image.maps.values())), image.trial
    probable = trial.vit.probable
    quantity = f"{trial.quantity_words} of {first.captions[0]}"
    return ImageSection(
        name=escape_surrogates(image.name),
        photo=data_url(image.picture.convert("RGB")),
        size=image.picture.size,
        pixels=(trial.image.shape[-1], trial.image.shape[-2]),
        predictions=[
            (label, percent(value) if probable else f"{value:.3g}", value if probable else None)
            for label, value in image.predictions
        ],
        asked=first.captions[0],
        shown=[_tested_map(image, name, *line_style(place)) for place, name in enumerate(image.maps)],
        charts=_charts(trial, image.truths, quantity),
        quantity=quantity,
        random={
            "count": len(trial.random.scores),
            "deletion": float(trial.random.deletion_areas.mean()),
            "insertion": float(trial.random.insertion_areas.mean()),
            "score": float(trial.random.scores.mean()),
        },
        notes=_notes(image, first),
        failures=dict(image.failures),
        hash=first.images[0] if first.images else "",
        sha256=image.sha256,
        signed=any(is_signed(att.scores) for att in image.maps.values()),
    )


def report_html(sections: Sequence[ImageSection], made: Provenance) -> str:
    """The whole report as one page; the same sections give the same bytes."""
    if not sections:
        raise PatchlightError("a report needs at least one image; none could be explained")
    return render_page(
        "patchlight.report",
        "report.html",
        palette=PALETTE,
        number=_number,
        made=made,
        sections=sections,
        summary=_summary(sections),
        bars=[(signed, _bar(signed)) for signed in (False, True) if not signed or any(s.signed for s in sections)],
    )


def made_by(
    maps: Mapping[str, Attribution],
    trial: Trial,
    command: str,
    warnings: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Provenance:
    """How maps of a model and their test were made, today; `command` makes the same report, `warnings` came on the way.

    `left_out` are sentences about images that could not be explained.
    """
    known = {info.name: info for info in list_methods()}
    first, vit = next(iter(maps.values())), trial.vit
    rows = []
    for name, att in maps.items():
        info = known.get(att.method) or known.get(att.method.split(".")[0])
        settings = ", ".join(f"{key}={value}" for key, value in att.settings.items()) or "none"
        sampled = f"seed {att.seed}" + (f", {att.samples[0]} drawn" if att.samples else "")
        sampled += "".join(f", {numbers[0]:g} {fact}" for fact, numbers in att.facts.items())
        settings += f"; score={att.score}, precision={att.precision or 'not known'}, {sampled}"
        about = {"summary": info.summary if info else "", "paper": info.paper if info else ""}
        rows.append({"name": name, "method": att.method, **about, "settings": settings})
    shown = first.preprocess
    facts = {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "Model": f"{first.model}: {vit.depth} blocks, {vit.grid[0]}×{vit.grid[1]} patches, {vit.outcomes} classes",
        "Weights": f"{first.weights or 'not known'} (Patchlight's hash of every weight)",
        "Classes": _own_classes(vit) if not first.head else ", ".join(f"{k}: {v}" for k, v in first.head.items()),
        "Images": "as they were given"
        if shown is None
        else f"{shown.size[0]}×{shown.size[1]} pixels, {shown.fit}, {shown.interpolation}, "
        f"the middle {percent(shown.crop_pct)} of it, mean {_listed(shown.mean)}, deviation {_listed(shown.std)}",
        "Test": f"{trial.steps} removals; {removed_words(trial.unit, str(trial.fill))}; "
        f"{trial.randoms} random orders, seed {trial.seed}",
        "Versions": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
    }
    removed = removed_words(trial.unit, str(trial.fill))
    said = tuple(map(escape_surrogates, left_out))
    return Provenance(first.model, removed, facts, rows, escape_surrogates(command), tuple(warnings), said)


def _own_classes(vit: Anatomy) -> str:
    """That the classes are the model's own, and how the first of them are called."""
    named = ", ".join(vit.label(index) for index in range(min(3, vit.outcomes)))
    return f"the model's own: {named}{', …' if vit.outcomes > 3 else ''}"


def removed_words(unit: str, fill: str) -> str:
    """What removing a patch means.

    >>> removed_words("patch", "image-mean")
    "a removed patch is painted over with the image's mean grey (fill 'image-mean')"
    """
    if unit == "token":
        return "a removed patch's token is taken out of the model's input"
    paint = f" with {_PAINT[fill]}" if fill in _PAINT else ""
    return f"a removed patch is painted over{paint} (fill '{fill}')"


def _tested_map(image: Explained, name: str, colour: str, dash: str) -> TestedMap:
    att = image.maps[name]
    heat = blend(image.picture, att.scores[0], robust_scale(att.scores[0]), covers=att.covers)
    sanity = sanity_words(image.sanity[name]) if name in image.sanity else ""
    variable = f"var(--m{PALETTE.index(colour)})"
    return TestedMap(name, data_url(heat), f"for {att.captions[0]}", variable, dash, image.truths[name], sanity)


def _notes(image: Explained, first: Attribution) -> list[str]:
    """What a reader should know about this image before reading its maps."""
    found = []
    (label, top), *others = image.predictions
    if image.trial.vit.probable and top < SURE:
        found.append(f"The model is not sure: its first class, {short(label)}, has {percent(top)} only.")
    elif image.trial.vit.probable and others and top - others[0][1] < CLOSE:
        rival, second = others[0]
        found.append(
            f"The model hardly decides between {short(label)} ({percent(top)}) and {short(rival)} ({percent(second)})."
        )
    if first.target_names[0] != label:
        found.append(
            f"The maps are about {first.target_names[0]}, which is not what the model predicts ({label}): they show "
            "what speaks for that class, not why the model said what it said."
        )
    for name, att in image.maps.items():
        if bool(constant(att.scores.flatten(1)).any()) and att.scores[0].numel() > 1:
            found.append(f"The map of {name} is the same everywhere: it says nothing, and its order is arbitrary.")
    whole, empty = (float(image.trial.random.deletion[0, i]) for i in (0, -1))
    if whole > 0 and empty > LEFT * whole:
        found.append(
            f"With every patch removed the value for {first.captions[0]} is still {_number(empty)} of {_number(whole)}"
            ": the curves tell little on this image."
        )
    if not any(truth.better for truth in image.truths.values()):
        found.append("No method is better than random on this image: do not read its maps as reasons.")
    return found


def _charts(trial: Trial, truths: Mapping[str, Faithfulness], quantity: str) -> list[CurveChart]:
    """Deletion and insertion on one scale: a line per method, and random orders as their mean and a band."""
    x = (trial.removed / trial.removed[-1]).tolist()
    curves = [trial.random, *(truth.curves for truth in truths.values())]
    values = torch.cat([side.flatten() for one in curves for side in (one.deletion, one.insertion)])
    known: list[float] = values[values.isfinite()].tolist() or [0.0]
    limits = min(0.0, *known), max(0.0, *known)
    if trial.score == "probability" and trial.targets.against is None:
        limits = limits[0], max(limits[1], 1.0)

    def chart(title: str, which: str, words: str, done: str) -> CurveChart:
        random = getattr(trial.random, which)
        low, high = random.quantile(torch.tensor(BAND, dtype=torch.float64), 0).tolist()
        lines = [Line("random", x, random.mean(0).tolist(), SOFT, "4 4")]
        for place, (name, truth) in enumerate(truths.items()):
            lines.append(Line(name, x, getattr(truth.curves, which)[0].tolist(), *line_style(place)))
        below = f"share of the patches {done}"
        label = f"{title} curves: {quantity} by {below}"
        bands = [Band(x, low, high)]
        svg = line_chart(lines, x=below, y_limits=limits, bands=bands, percent=True, words=label)
        return CurveChart(title, words, svg)

    return [
        chart("Deletion", "deletion", "patches removed, the highest first: falls early if the map is right", "removed"),
        chart("Insertion", "insertion", "patches shown, the highest first: rises early if the map is right", "shown"),
    ]


def _summary(sections: Sequence[ImageSection]) -> list[dict[str, str]]:
    """Of several images, how often each method was better than random, and its mean score beside random's."""
    rows = []
    shown = [one for section in sections for one in section.shown] if len(sections) > 1 else []
    for method in dict.fromkeys(one.method for one in shown):
        truths = [one.truth for one in shown if one.method == method]
        scores = [truth.score for truth in truths if math.isfinite(truth.score)]
        better = f"{sum(truth.better for truth in truths)} of {len(truths)}"
        mean = _number(sum(scores) / len(scores) if scores else math.nan)
        rows.append({"method": method, "better": better, "score": mean})
    return rows


def _bar(signed: bool) -> str:
    return data_url(Image.fromarray((255 * colour_bar(signed)).round().clip(0, 255).astype(np.uint8)), "png")


def _number(value: float | Tensor) -> str:
    return f"{float(value):.3f}" if math.isfinite(value) else "not defined"


def _listed(numbers: Sequence[float]) -> str:
    return "/".join(f"{number:.4g}" for number in numbers)
