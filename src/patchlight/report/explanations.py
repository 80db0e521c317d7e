"""The report of explanations for other people: one HTML file that contains everything, opens offline and prints.

For each image it shows one large map, what the model saw and said, and what happened when patches were hidden; then all
methods side by side, the curves of the faithfulness test, and an appendix with settings, hashes and the command.
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
from patchlight.core.drawing.notebook import sentence_html
from patchlight.core.drawing.page import Chart, data_url, render_page
from patchlight.core.drawing.pictures import IGNORES_CLASS, colour_bar, ignores_class, map_title, percent, short
from patchlight.core.errors import PatchlightError, escape_surrogates
from patchlight.core.paths import command_without_folders, remove_folders
from patchlight.core.statistics import constant
from patchlight.evidence.fills import Fill, describe_fill
from patchlight.methods.requests import list_methods

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.evidence.ablation import Unit
    from patchlight.study.faithfulness import Faithfulness, Trial

UNSURE, CLOSE, LEFT = 0.5, 0.1, 0.5
"""A prediction below UNSURE, or within CLOSE of the second class, gets a caveat; so does a test in which more than LEFT
of the score remains when every patch is hidden."""
BAND = (0.05, 0.95)
"""Quantiles of the random orders between which a chart is shaded."""
SMALL = 280
"""Largest width of maps that are shown side by side, in pixels; the first map is as large as the picture."""
CAVEATS = (
    "The map shows which patches drove the score, not whether the prediction is right.",
    "Images with hidden patches are unlike the training images, so compare every number with that of random patches.",
    "The result holds for this model and this image; another method may show another part of what the model uses.",
)
"""General caveats; page one shows three sentences, those about the image first."""


@dataclass(frozen=True)
class Explained:
    """The content of a report about one image.

    Attributes:
        name: Name of the image in the report.
        picture: The part of the image that the model takes.
        predictions: The best classes with their scores.
        maps: One map per method; the first is shown large.
        trial: The faithfulness test.
        results: The result of the test for each map.
        failures: Methods without a map, with the reason.
        sha256: Hash of the image file, if there is one.
    """

    name: str
    picture: Image.Image
    predictions: Sequence[tuple[str, float]]
    maps: Mapping[str, Attribution]
    trial: Trial
    results: Mapping[str, Faithfulness]
    failures: Mapping[str, str] = field(default_factory=dict)
    sha256: str = ""


@dataclass(frozen=True)
class MapEntry:
    """The map of one method as a data URL, the style of its curves, and its test result.

    `hiding` says what hiding the strongest patches did; `tags` are short remarks, each with whether it is good news.
    """

    title: str
    src: str
    alt: str
    colour: str
    dash: str
    result: Faithfulness
    hiding: str
    tags: list[tuple[str, bool]]


@dataclass(frozen=True)
class ImageSection:
    """One image of a report, with encoded pictures.

    `size` is that of the large map, `pixels` that of the model's input; `signed` says which colours the large map has;
    `answer` is the sentence of a model that answers, as HTML.
    """

    name: str
    photo: str
    large: str
    size: tuple[int, int]
    pixels: tuple[int, int]
    predictions: list[tuple[str, str, float | None]]
    explained: str
    maps: list[MapEntry]
    charts: list[Chart]
    quantity: str
    random: dict[str, float]
    caveats: list[str]
    notes: list[str]
    failures: dict[str, str]
    hash: str
    sha256: str
    signed: bool
    answer: str = ""


@dataclass(frozen=True)
class Provenance:
    """How the content of a report was computed.

    Attributes:
        model: Name of the model.
        removal: What hiding a patch means, in words.
        facts: Facts about the model and the test, by name.
        methods: The methods and their settings.
        command: The command that makes the same report; empty if there is none.
        warnings: Warnings while the maps were computed.
        left_out: Sentences about images that could not be explained.
    """

    model: str
    removal: str
    facts: dict[str, str]
    methods: list[dict[str, str]]
    command: str
    warnings: Sequence[str] = ()
    left_out: Sequence[str] = ()


def section_of(image: Explained) -> ImageSection:
    """The section of one image; its pictures are encoded, so many sections need little memory."""
    for name, att in image.maps.items():
        if att.scores.ndim != 3 or len(att) != 1:
            raise PatchlightError(
                f"a report shows one map per image and method; '{name}' has {len(att.target)}; explain one class"
            )
    if not image.maps:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in image.failures.items())
        raise PatchlightError(
            f"a report needs at least one map; no method gave one{f' ({reasons})' if reasons else ''}"
        )
    first, trial = next(iter(image.maps.values())), image.trial
    probable = trial.vit.probable
    notes = _notes(image)
    quantity = f"{trial.quantity_words} of {first.captions[0]}"
    picture = image.picture.convert("RGB")
    return ImageSection(
        name=remove_folders(escape_surrogates(image.name)),
        photo=data_url(_thumbnail(picture)),
        large=data_url(_heat(picture, first)),
        size=picture.size,
        pixels=(trial.image.shape[-1], trial.image.shape[-2]),
        predictions=[
            (label, percent(value) if probable else f"{value:.3g}", value if probable else None)
            for label, value in image.predictions
        ],
        explained=first.captions[0],
        maps=[_map_entry(image, name, *line_style(place)) for place, name in enumerate(image.maps)],
        charts=_charts(image, quantity),
        quantity=quantity,
        random={
            "count": len(trial.random.scores),
            "deletion": float(trial.random.deletion_areas.mean()),
            "insertion": float(trial.random.insertion_areas.mean()),
            "score": float(trial.random.scores.mean()),
        },
        caveats=[*notes, *CAVEATS][:3],
        notes=notes[3:],
        failures={name: remove_folders(reason) for name, reason in image.failures.items()},
        hash=first.images[0] if first.images else "",
        sha256=image.sha256,
        signed=is_signed(first.scores),
        answer="".join(sentence_html(words, first.head.get("prompt")) for words in first.words),
    )


def report_html(sections: Sequence[ImageSection], provenance: Provenance) -> str:
    """The report as one page; equal sections give equal bytes."""
    if not sections:
        raise PatchlightError("a report needs at least one image; none could be explained")
    return render_page(
        "patchlight.report",
        "report.html",
        palette=PALETTE,
        number=_number,
        provenance=provenance,
        sections=sections,
        summary=_summary(sections),
        scales={signed: _scale(signed) for signed in (False, True)},
    )


def describe_run(
    maps: Mapping[str, Attribution],
    trial: Trial,
    command: str,
    warnings: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> Provenance:
    """How the maps of an image and their test were computed; absolute paths are shortened to names."""
    registered = {info.name: info for info in list_methods()}
    first, vit = next(iter(maps.values())), trial.vit
    methods = []
    for name, att in maps.items():
        info = registered.get(att.method) or registered.get(att.method.split(".")[0])
        settings = ", ".join(f"{key}={value}" for key, value in att.settings.items()) or "none"
        sampled = f"seed={att.seed}" + (f", samples used: {att.samples[0]}" if att.samples else "")
        sampled += "".join(f", {fact}: {numbers[0]:g}" for fact, numbers in att.facts.items())
        settings += f"; score={att.score}, {sampled}, precision used: {att.precision or 'unknown'}"
        words = {"summary": info.summary if info else "", "paper": info.paper if info else ""}
        methods.append(
            {"name": map_title(name, att), "method": att.method, **words, "settings": remove_folders(settings)}
        )
    view = first.preprocess
    removal = removal_words(trial.unit, trial.fill)
    facts = {
        "Date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "Model": f"{first.model}: {vit.depth} blocks, {vit.grid[0]}×{vit.grid[1]} patches"
        + ("" if vit.task else f", {vit.outcomes} classes"),
        "Weights": f"{first.weights or 'unknown'} (Patchlight's hash of all weights)",
        "Question" if vit.task else "Classes": ", ".join(f"{k}: {v}" for k, v in first.head.items())
        if first.head
        else _model_classes(vit),
        "Images": "as given"
        if view is None
        else f"{view.size[0]}×{view.size[1]} pixels, {view.fit}, {view.interpolation}, "
        f"the central {percent(view.crop_pct)}, mean {_join(view.mean)}, standard deviation {_join(view.std)}",
        "Test": f"{trial.steps} steps; {removal}; {trial.randoms} random orders, seed {trial.seed}",
        "Versions": ", ".join(f"{name} {version}" for name, version in first.versions.items()),
    }
    return Provenance(
        remove_folders(first.model),
        removal,
        {name: remove_folders(words) for name, words in facts.items()},
        methods,
        command_without_folders(escape_surrogates(command)),
        tuple(map(remove_folders, warnings)),
        tuple(remove_folders(escape_surrogates(sentence)) for sentence in left_out),
    )


def _model_classes(vit: Anatomy) -> str:
    first = ", ".join(vit.label(index) for index in range(min(3, vit.outcomes)))
    return f"those of the model: {first}{', …' if vit.outcomes > 3 else ''}"


def removal_words(unit: Unit, fill: Fill) -> str:
    """What hiding a patch means.

    >>> removal_words("patch", "image-mean")
    "hidden patches are painted with the image's mean brightness (fill 'image-mean')"
    """
    if unit == "token":
        return "the tokens of hidden patches are removed from the model's input"
    return f"hidden patches are painted with {describe_fill(fill)} (fill '{fill}')"


def _thumbnail(picture: Image.Image) -> Image.Image:
    small = picture.copy()
    small.thumbnail((SMALL, SMALL))
    return small


def _heat(picture: Image.Image, att: Attribution) -> Image.Image:
    return blend(picture, att.scores[0], robust_scale(att.scores[0]), covers=att.covers)


def _map_entry(image: Explained, name: str, colour: str, dash: str) -> MapEntry:
    att, result, title = image.maps[name], image.results[name], map_title(name, image.maps[name])
    verdict = "better than random" if result.better else "not better than random"
    verdict = "baseline" if result.baseline else verdict if result.conclusive else "inconclusive"
    tags = [(verdict, result.better)]
    tags += [(f"rank {result.rank} of {result.shown}", True)] if result.shown > 1 else []
    tags += [(IGNORES_CLASS, False)] if ignores_class(att) else []
    question = image.trial.vit.question
    if question is not None and question.regions:
        place = "box" if "boxes" in question.annotations else "region"
        share = float(att.inside(question.regions[int(att.target[0])])[0])
        tags += [(f"{percent(share)} inside the {place}", True)] if share == share else []
    return MapEntry(
        title=title,
        src=data_url(_heat(_thumbnail(image.picture.convert("RGB")), att)),
        alt=f"map of {title} for {att.captions[0]}",
        colour=f"var(--m{PALETTE.index(colour)})",
        dash=dash,
        result=result,
        hiding=image.trial.hiding(result).words,
        tags=tags,
    )


def _notes(image: Explained) -> list[str]:
    """Caveats about this image and its first map, one sentence each, the most important first; then other maps."""
    notes, titles = [], {map_title(name, att): att for name, att in image.maps.items()}
    name, first = next(iter(titles.items()))
    (label, top), *others = image.predictions
    if not any(result.better for result in image.results.values()):
        notes.append("No method is better than random on this image: do not read its maps as reasons.")
    if first.target_names[0] != label:
        notes.append(
            f"The maps explain {first.target_names[0]}, but the model predicts {label}: they show what speaks for "
            f"{first.target_names[0]}, not why the model predicts {label}."
        )
    if ignores_class(first):
        notes.append(f"{name} {IGNORES_CLASS}: its map is the same for every class.")
    if image.trial.vit.probable and top < UNSURE:
        notes.append(f"The model is not sure: its first class, {short(label)}, has only {percent(top)}.")
    elif image.trial.vit.probable and others and top - others[0][1] < CLOSE:
        rival, second = others[0]
        notes.append(f"The model is undecided: {short(label)} has {percent(top)} and {short(rival)} {percent(second)}.")
    complete, empty = (float(image.trial.random.deletion[0, i]) for i in (0, -1))
    if complete > 0 and empty > LEFT * complete:
        notes.append(
            f"With every patch hidden, the {image.trial.quantity_words} of {first.captions[0]} is still "
            f"{_number(empty)} (of {_number(complete)}), so the curves say little about this image."
        )
    for title, att in titles.items():
        if bool(constant(att.scores.flatten(1)).any()) and att.scores[0].numel() > 1:
            words = f"The map of {title} is constant: it shows nothing, and its order is arbitrary."
            notes.insert(0 if att is first else len(notes), words)
    return notes


def _charts(image: Explained, quantity: str) -> list[Chart]:
    """Deletion and insertion curves on one scale: a line per method, and the mean and a band of the random orders."""
    trial, results = image.trial, image.results
    x = (trial.removed / trial.removed[-1]).tolist()
    curves = [trial.random, *(result.curves for result in results.values())]
    values = torch.cat([side.flatten() for each in curves for side in (each.deletion, each.insertion)])
    finite: list[float] = values[values.isfinite()].tolist() or [0.0]
    limits = min(0.0, *finite), max(0.0, *finite)
    if trial.score == "probability" and trial.targets.against is None:
        limits = limits[0], max(limits[1], 1.0)

    def chart(title: str, side: str, caption: str, x_words: str) -> Chart:
        random = getattr(trial.random, side)
        low, high = random.quantile(torch.tensor(BAND, dtype=torch.float64), 0).tolist()
        lines = [Line("random", x, random.mean(0).tolist(), SOFT, "4 4")]
        for place, (name, result) in enumerate(results.items()):
            title_of_map = map_title(name, image.maps[name])
            lines.append(Line(title_of_map, x, getattr(result.curves, side)[0].tolist(), *line_style(place)))
        words = f"{title} curves: {quantity} by {x_words}"
        svg = line_chart(
            lines,
            x=x_words,
            y=trial.quantity_words,
            y_limits=limits,
            bands=[Band(x, low, high)],
            percent=True,
            words=words,
        )
        return Chart(title, svg, caption)

    deletion = "The strongest patches are hidden first. With a faithful map the score falls early."
    insertion = "The strongest patches are shown first. With a faithful map the score rises early."
    return [
        chart("Deletion", "deletion", deletion, "share of patches hidden"),
        chart("Insertion", "insertion", insertion, "share of patches shown"),
    ]


def _summary(sections: Sequence[ImageSection]) -> list[dict[str, str]]:
    """For several images: how often each method is better than random, its mean score and its mean effect."""
    rows = []
    maps = [each for section in sections for each in section.maps] if len(sections) > 1 else []
    for title in dict.fromkeys(each.title for each in maps):
        results = [each.result for each in maps if each.title == title]
        means = []
        for values in ([result.score for result in results], [result.effect for result in results]):
            finite = [value for value in values if math.isfinite(value)]
            means.append(_number(sum(finite) / len(finite) if finite else math.nan))
        better = f"{sum(result.better for result in results)} of {len(results)}"
        better = "baseline" if all(result.baseline for result in results) else better
        rows.append({"method": title, "better": better, "score": means[0], "effect": means[1]})
    return rows


def _scale(signed: bool) -> str:
    return data_url(Image.fromarray((255 * colour_bar(signed)).round().clip(0, 255).astype(np.uint8)), "png")


def _number(value: float | torch.Tensor) -> str:
    return f"{float(value):.3f}" if math.isfinite(value) else "not defined"


def _join(numbers: Sequence[float]) -> str:
    return "/".join(f"{number:.4g}" for number in numbers)
