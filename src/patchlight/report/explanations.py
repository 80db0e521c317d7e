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
from patchlight.core.drawing.heat import blend, is_signed, robust_scale
from patchlight.core.drawing.pictures import colour_bar, percent, short
from patchlight.core.errors import PatchlightError, spelled
from patchlight.core.extras import missing_extra
from patchlight.core.statistics import constant
from patchlight.report.page import PALETTE, data_url, page_style, page_template, round_values

if TYPE_CHECKING:
    from torch import Tensor

    from patchlight.anatomy.base import Anatomy
    from patchlight.study.faithfulness import Trial, Truth

SURE, CLOSE, LEFT = 0.5, 0.1, 0.5
"""Below which probability, and within which of the second class, a model is called unsure; and how much of the first
value may be left once every patch is gone before that is told."""
WIDTH, HEIGHT, EDGES = 460, 250, (48, 12, 12, 42)
"""Of a chart, and its edges: left, top, right, bottom."""
DASHES = ("", "7 3", "2 3")
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
    truths: Mapping[str, Truth]
    failures: Mapping[str, str] = field(default_factory=dict)
    sanity: Mapping[str, float] = field(default_factory=dict)
    sha256: str = ""


@dataclass(frozen=True)
class Line:
    """A curve in a chart: `points` as SVG has them, and the number of its colour; None for the mean of random."""

    method: str
    points: str
    colour: int | None
    dash: str


@dataclass(frozen=True)
class Chart:
    """Where one of the two charts draws things; ticks are (place, words)."""

    title: str
    words: str
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    band: str
    lines: list[Line]


@dataclass(frozen=True)
class Shown:
    """A method's map and what the test says of it, in words and numbers."""

    method: str
    src: str
    about: str
    colour: int
    dash: str
    better: bool
    said: str
    sanity: str
    score: str
    deletion: str
    insertion: str
    beaten: str
    value: float


@dataclass(frozen=True)
class Section:
    """One image of a report, as small as it is shown; `size` is of its pictures, `pixels` of the model's input."""

    name: str
    photo: str
    size: tuple[int, int]
    pixels: tuple[int, int]
    predictions: list[tuple[str, str, float | None]]
    asked: str
    shown: list[Shown]
    charts: list[Chart]
    random: dict[str, str]
    notes: list[str]
    failures: dict[str, str]
    hash: str
    sha256: str
    signed: bool


@dataclass(frozen=True)
class Made:
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


def section_of(image: Explained) -> Section:
    """What a report shows of one image; pictures are encoded, so that many images take little memory."""
    for name, att in image.maps.items():
        if att.scores.ndim != 3 or len(att) != 1:
            raise PatchlightError(f"a report shows one map of an image for each method; '{name}' has {len(att.target)}")
    if not image.maps:
        why = "; ".join(f"{name}: {reason}" for name, reason in image.failures.items())
        raise PatchlightError(f"a report needs at least one map; none was made{f' ({why})' if why else ''}")
    first, trial = next(iter(image.maps.values())), image.trial
    probable = trial.vit.probable
    return Section(
        name=spelled(image.name),
        photo=data_url(image.picture.convert("RGB")),
        size=image.picture.size,
        pixels=(trial.image.shape[-1], trial.image.shape[-2]),
        predictions=[
            (label, percent(value) if probable else f"{value:.3g}", value if probable else None)
            for label, value in image.predictions
        ],
        asked=first.named[0],
        shown=[_shown(image, name, place) for place, name in enumerate(image.maps)],
        charts=_charts(trial, image.truths, first.named[0]),
        random={
            "count": str(len(trial.random.scores)),
            "deletion": _number(trial.random.deletion_areas.mean()),
            "insertion": _number(trial.random.insertion_areas.mean()),
            "score": _number(trial.random.scores.mean()),
        },
        notes=_notes(image, first),
        failures=dict(image.failures),
        hash=first.images[0] if first.images else "",
        sha256=image.sha256,
        signed=any(is_signed(att.scores) for att in image.maps.values()),
    )


def quantity_word(trial: Trial) -> str:
    """What the curves show of the class asked about."""
    return "similarity, (1 + cosine) / 2," if trial.quantity == "similarity" else trial.quantity


def check_report() -> None:
    """Refuse, before any work is done, what cannot be written without the package that draws pages."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise missing_extra("the report needs", "jinja2", "web") from error


def report_html(sections: Sequence[Section], made: Made) -> str:
    """The whole report as one page; the same sections give the same bytes."""
    if not sections:
        raise PatchlightError("a report needs at least one image; none could be explained")
    check_report()
    return page_template("patchlight.report", "report.html").render(
        style=page_style(),
        palette=PALETTE,
        made=made,
        sections=sections,
        summary=_summary(sections),
        bars=[(signed, _bar(signed)) for signed in (False, True) if not signed or any(s.signed for s in sections)],
        width=WIDTH,
        height=HEIGHT,
        edges=EDGES,
    )


def made_by(
    maps: Mapping[str, Attribution],
    trial: Trial,
    command: str,
    warnings: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Made:
    """How maps of a model and their test were made, today; `command` makes the same report, `warnings` came on the way.

    `left_out` are sentences about images that could not be explained.
    """
    from patchlight.methods.requests import list_methods

    known = {info.name: info for info in list_methods()}
    first, vit = next(iter(maps.values())), trial.vit
    rows = []
    for name, att in maps.items():
        info = known.get(att.method) or known.get(att.method.split(".")[0])
        settings = ", ".join(f"{key}={value}" for key, value in att.settings.items()) or "none"
        drawn = f"seed {att.seed}" + (f", {att.samples[0]} drawn" if att.samples else "")
        drawn += "".join(f", {numbers[0]:g} {fact}" for fact, numbers in att.facts.items())
        rows.append(
            {
                "name": name,
                "method": att.method,
                "summary": info.summary if info else "",
                "paper": info.paper if info else "",
                "settings": f"{settings}; score={att.score}, precision={att.precision or 'not known'}, {drawn}",
            }
        )
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
    said = tuple(map(spelled, left_out))
    return Made(first.model, removed, facts, rows, spelled(command), tuple(warnings), said)


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


def _shown(image: Explained, name: str, place: int) -> Shown:
    from patchlight.study.faithfulness import sanity_words

    att, truth = image.maps[name], image.truths[name]
    scores = att.scores[0]
    heat = blend(image.picture, scores, robust_scale(scores), covers=att.covers)
    return Shown(
        method=name,
        src=data_url(heat),
        about=f"for {att.named[0]}",
        colour=place % len(PALETTE),
        dash=DASHES[place // len(PALETTE) % len(DASHES)],
        better=truth.better,
        said=truth.words,
        sanity=sanity_words(image.sanity[name]) if name in image.sanity else "",
        score=_number(truth.score),
        deletion=_number(truth.curves.deletion_areas[0]),
        insertion=_number(truth.curves.insertion_areas[0]),
        beaten=f"{truth.beaten} of {truth.randoms}",
        value=truth.score,
    )


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
    if first.explained[0] != label:
        found.append(
            f"The maps are about {first.explained[0]}, which is not what the model predicts ({label}): they show what "
            "speaks for that class, not why the model said what it said."
        )
    for name, att in image.maps.items():
        if bool(constant(att.scores.flatten(1)).any()) and att.scores[0].numel() > 1:
            found.append(f"The map of {name} is the same everywhere: it says nothing, and its order is arbitrary.")
    whole, empty = (float(image.trial.random.deletion[0, i]) for i in (0, -1))
    if whole > 0 and empty > LEFT * whole:
        found.append(
            f"With every patch removed the value for {first.named[0]} is still {_number(empty)} of {_number(whole)}: "
            "the curves tell little on this image."
        )
    if not any(truth.better for truth in image.truths.values()):
        found.append("No method is better than random on this image: do not read its maps as reasons.")
    return found


def _charts(trial: Trial, truths: Mapping[str, Truth], asked: str) -> list[Chart]:
    """Deletion and insertion on one scale: a line per method, and random orders as their mean and a band."""
    fractions = (trial.removed / trial.removed[-1]).tolist()
    curves = [trial.random, *(truth.curves for truth in truths.values())]
    values = torch.cat([side.flatten() for one in curves for side in (one.deletion, one.insertion)])
    known: list[float] = values[values.isfinite()].tolist() or [0.0]
    low, high = min(0.0, *known), max(0.0, *known)
    if trial.score == "probability" and trial.targets.against is None:
        high = max(high, 1.0)
    left, top, right, bottom = EDGES
    span = (high - low) or 1.0

    def x(fraction: float) -> float:
        return round(left + fraction * (WIDTH - left - right), 1)

    def y(value: float) -> float:
        return round(HEIGHT - bottom - (value - low) / span * (HEIGHT - top - bottom), 1)

    def points(side: Tensor) -> list[str]:
        pairs = zip(fractions, side.tolist(), strict=True)
        return [f"{x(f)},{y(v)}" for f, v in pairs if math.isfinite(v)]

    def lines(which: str) -> list[Line]:
        drawn = [Line("random", " ".join(points(getattr(trial.random, which).mean(0))), None, "4 4")]
        for place, (name, truth) in enumerate(truths.items()):
            dash = DASHES[place // len(PALETTE) % len(DASHES)]
            own = " ".join(points(getattr(truth.curves, which)[0]))
            drawn.append(Line(name, own, place % len(PALETTE), dash))
        return drawn

    def band(which: str) -> str:
        ends = getattr(trial.random, which).quantile(torch.tensor(BAND, dtype=torch.float64), 0)
        return " ".join([*points(ends[0]), *reversed(points(ends[1]))])

    x_ticks = [(x(f), f"{round(100 * f)} %") for f in (0.0, 0.25, 0.5, 0.75, 1.0)]
    y_ticks = [(y(v), f"{v:g}") for v in round_values(low, high)]
    quantity = f"{quantity_word(trial)} of {asked}"
    said = {
        "deletion": ("Deletion", "patches removed, the highest first: falls early if the map is right", "removed"),
        "insertion": ("Insertion", "patches shown, the highest first: rises early if the map is right", "shown"),
    }
    return [
        Chart(title, words, f"share of the patches {done}", quantity, x_ticks, y_ticks, band(which), lines(which))
        for which, (title, words, done) in said.items()
    ]


def _summary(sections: Sequence[Section]) -> list[dict[str, str]]:
    """Of several images, how often each method was better than random, and its mean score beside random's."""
    if len(sections) < 2:
        return []
    rows = []
    for method in dict.fromkeys(one.method for section in sections for one in section.shown):
        own = [one for section in sections for one in section.shown if one.method == method]
        known = [one.value for one in own if math.isfinite(one.value)]
        rows.append(
            {
                "method": method,
                "better": f"{sum(one.better for one in own)} of {len(own)}",
                "score": _number(sum(known) / len(known) if known else None),
            }
        )
    return rows


def _bar(signed: bool) -> str:
    return data_url(Image.fromarray((255 * colour_bar(signed)).round().clip(0, 255).astype(np.uint8)), "png")


def _number(value: float | Tensor | None) -> str:
    number = math.nan if value is None else float(value)
    return f"{number:.3f}" if math.isfinite(number) else "not defined"


def _listed(numbers: Sequence[float]) -> str:
    return "/".join(f"{number:.4g}" for number in numbers)
