"""The report of a run as one HTML file with everything in it, which opens anywhere, offline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from patchlight.bench.rows import Maps
from patchlight.bench.statistics import Ranks, extremes
from patchlight.bench.tables import LEGEND, Gathered
from patchlight.core.drawing.charts import Dot, Line, dot_chart, line_chart, line_style, rank_chart
from patchlight.core.drawing.page import data_url, render_page
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchlight.data import Data

EXAMPLES, SIDE = 3, 168


@dataclass(frozen=True)
class Chart:
    """A chart as inline SVG, and the words above and below it."""

    title: str
    svg: str
    caption: str = ""


@dataclass(frozen=True)
class Heat:
    """A method's map over an image, as a data URL, and its value there."""

    method: str
    value: str
    src: str


@dataclass(frozen=True)
class Example:
    """An image on which the leading method is best or worst, with every method's map; `photo` is a data URL or ""."""

    title: str
    name: str
    explained: str
    photo: str
    maps: list[Heat]
    metric: str
    leader: str


@dataclass(frozen=True)
class Section:
    """What the report shows of one model besides its table."""

    curves: list[Chart]
    ranks: list[Chart]
    times: Chart | None
    examples: list[Example]


def write_html(run: Gathered, path: str | Path) -> Path:
    """The whole report as one file with everything in it."""
    return write_whole(path, as_html(run).encode(errors="backslashreplace"))


def as_html(run: Gathered) -> str:
    """Tables, curves, ranks, times and examples; equal stores give equal files."""
    colours = {method: line_style(i)[0] for i, method in enumerate(run.recipe.methods)}
    metrics = list(run.recipe.metrics)
    models = {
        model: Section(
            [chart for metric in metrics if (chart := _curves(run, model, metric)) is not None],
            [_ranks(run.ranks[model, metric], colours) for metric in metrics if (model, metric) in run.ranks],
            _times(run, model, colours),
            list(_examples(run, model)),
        )
        for model in run.models
    }
    about = {"run": run, "recipe": run.recipe, "manifest": run.manifest}
    return render_page("patchlight.bench", "runs.html", **about, models=models, legend=LEGEND, colours=colours)


def _curves(run: Gathered, model: str, metric: str) -> Chart | None:
    """The mean curve of every method; None for a metric without one."""
    lines = []
    for i, method in enumerate(run.recipe.methods):
        column = run.results.columns[model, method, metric]
        if column.mean_curve is not None and column.x is not None and column.count:
            lines.append(Line(method, column.x.tolist(), column.mean_curve.tolist(), *line_style(i)))
    title = f"{metric} {run.arrow(metric)}"
    return Chart(title, line_chart(lines, legend=True, words=f"Mean curves of {metric}")) if lines else None


def _times(run: Gathered, model: str, colours: dict[str, str]) -> Chart | None:
    """The time of an explanation by every method, the quickest first; None where none is known."""
    known = {m: run.seconds(model, m) for m in run.recipe.methods if not math.isnan(run.seconds(model, m))}
    order = sorted(known, key=lambda m: (known[m], m))
    dots = [Dot(m, known[m], colours[m], words=f"{m}: {known[m]:.3g} s") for m in order]
    title = "Time of an explanation"
    return Chart(title, dot_chart(dots, x="seconds per image", log=True, words=title)) if dots else None


def _ranks(found: Ranks, colours: dict[str, str]) -> Chart:
    words = f"Critical-difference diagram of {found.metric}"
    svg = rank_chart(found.means, found.groups, found.critical, colours, words)
    return Chart(found.metric, svg, f"{found.images} images, Friedman p = {found.p:.2g}")


def _examples(run: Gathered, model: str) -> Iterator[Example]:
    """Best and worst images of the leading (or only) method under the first metric, each with every method's map."""
    metric = next(iter(run.recipe.metrics))
    known = [c for c in run.cells if (c.model, c.metric) == (model, metric) and c.mean == c.mean]
    if not known:
        return
    sign = 1 if run.higher(metric) else -1
    leader = max(known, key=lambda c: sign * c.mean).method
    column = run.results.columns[model, leader, metric]
    best, worst = extremes(column.values, column.higher_is_better, EXAMPLES)
    chosen = [*(("best", i) for i in best), *(("worst", i) for i in worst)]
    data, names = _data(run), run.results.images[model]
    maps = run.store.maps(model, [names[i] for _, i in chosen])
    for title, i in chosen:
        name, index = names[i], run.manifest.images.indices[i]
        if name not in maps.images or maps.preprocess is None:
            continue
        photo = _photo(data, index, name)
        yield Example(
            title,
            name,
            maps.classes[maps.images.index(name)],
            "" if photo is None else _inline(maps.preprocess.crop(photo)),
            _heats(run, model, metric, [leader, *(m for m in run.recipe.methods if m != leader)], i, maps, photo),
            metric,
            leader,
        )


def _data(run: Gathered) -> Data | None:
    """The data of a run, where it still is."""
    try:
        return run.recipe.data.open()
    except PatchlightError:
        return None


def _photo(data: Data | None, index: int, name: str) -> Image | None:
    """The image as it lies on the disk, if it does."""
    if data is None or index >= len(data) or data.names[index] != name:
        return None
    try:
        return data[index].image
    except PatchlightError:
        return None


def _heats(
    run: Gathered, model: str, metric: str, methods: Sequence[str], i: int, maps: Maps, photo: Image | None
) -> list[Heat]:
    """The maps of a model's i-th image by these methods, over the image or over grey."""
    from PIL import Image

    from patchlight.core.drawing import overlay

    assert maps.preprocess is not None
    height, width = maps.preprocess.size
    place = maps.images.index(run.results.images[model][i])
    picture = photo if photo is not None else Image.new("RGB", (width, height), "#777777")
    found = []
    for method in methods:
        if method in maps.scores and bool(maps.scores[method][place].isfinite().all()):
            value = float(run.results.columns[model, method, metric].values[i])
            heat = overlay(maps.scores[method][place], picture, maps.preprocess.size, preprocess=maps.preprocess)
            found.append(Heat(method, run.number(value, metric), _inline(heat)))
    return found


def _inline(picture: Image) -> str:
    return data_url(picture.convert("RGB").resize((SIDE, SIDE)), quality=82)
