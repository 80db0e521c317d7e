"""The report of a run as one self-contained HTML file that opens offline."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from patchlight.bench.paths import PathRemover
from patchlight.bench.rows import Maps
from patchlight.bench.statistics import Ranks, extremes, leading_method
from patchlight.bench.tables import RunTables
from patchlight.core.drawing.charts import Dot, Line, dot_chart, line_chart, line_style, rank_chart
from patchlight.core.drawing.page import Chart, data_url, render_page
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchlight.data import Data

EXAMPLES, SIDE = 3, 168


@dataclass(frozen=True)
class Example:
    """An image on which the leading method is best or worst, with the map of every method.

    `photo` is a data URL, empty if the photograph is missing. `maps` has the method, its value and a data URL.
    """

    title: str
    name: str
    explained: str
    photo: str
    maps: list[tuple[str, str, str]]
    metric: str
    leader: str


def as_html(run: RunTables) -> str:
    """Tables, curves, ranks, times and examples, without absolute paths; equal stores give equal files."""
    paths = PathRemover(run.manifest)
    colours = {method: line_style(i)[0] for i, method in enumerate(run.recipe.methods)}
    metrics = list(run.recipe.metrics)
    models = {
        model: {
            "name": paths.models[model],
            "curves": [chart for metric in metrics if (chart := _curves(run, model, metric)) is not None],
            "ranks": [_ranks(run.ranks[model, metric], colours) for metric in metrics if (model, metric) in run.ranks],
            "times": _times(run, model, colours),
            "examples": list(_examples(run, model, paths)),
        }
        for model in run.models
    }
    return render_page(
        "patchlight.bench",
        "runs.html",
        run=run,
        recipe=run.recipe,
        manifest=run.manifest,
        models=models,
        colours=colours,
        failures={paths.text(reason): count for reason, count in run.results.failures.items()},
        clean=paths.value,
    )


def _curves(run: RunTables, model: str, metric: str) -> Chart | None:
    """The mean curve of every method; None for a metric without curves."""
    lines = []
    for i, method in enumerate(run.recipe.methods):
        column = run.results.columns[model, method, metric]
        if column.mean_curve is not None and column.x is not None and column.count:
            name = f"{method} (n = {column.count})" if run.uneven(model) else method
            lines.append(Line(name, column.x.tolist(), column.mean_curve.tolist(), *line_style(i)))
    title = f"{metric} {run.arrow(metric)}"
    return Chart(title, line_chart(lines, legend=True, words=f"Mean curves of {metric}")) if lines else None


def _times(run: RunTables, model: str, colours: dict[str, str]) -> Chart | None:
    """Seconds per explanation of every method, fastest first; None if none was measured."""
    seconds = {m: s for m in run.recipe.methods if not math.isnan(s := run.seconds(model, m))}
    order = sorted(seconds, key=lambda m: (seconds[m], m))
    dots = [Dot(m, seconds[m], colours[m], words=f"{m}: {seconds[m]:.3g} s") for m in order]
    title = "Time per explanation"
    return Chart(title, dot_chart(dots, x="seconds per image", log=True, words=title)) if dots else None


def _ranks(ranks: Ranks, colours: dict[str, str]) -> Chart:
    words = f"Critical-difference diagram of {ranks.metric}"
    svg = rank_chart(ranks.means, ranks.groups, ranks.critical, colours, words)
    return Chart(ranks.metric, svg, f"{ranks.images} shared images, Friedman p = {ranks.p:.2g}")


def _examples(run: RunTables, model: str, paths: PathRemover) -> Iterator[Example]:
    """Best and worst images of the leading method under the first metric, with the map of every method."""
    metric = next(iter(run.recipe.metrics))
    columns = {method: run.results.columns[model, method, metric] for method in run.recipe.methods}
    leader = leading_method(columns)
    if leader is None:
        return
    best, worst = extremes(columns[leader].values, columns[leader].higher_is_better, EXAMPLES)
    chosen = [*(("best", i) for i in best), *(("worst", i) for i in worst)]
    data, names = None, run.results.images[model]
    with contextlib.suppress(PatchlightError):
        data = run.recipe.data.open()
    maps = run.store.maps(model, [names[i] for _, i in chosen])
    for title, i in chosen:
        name, index = names[i], run.manifest.images.indices[i]
        if name not in maps.images or maps.preprocess is None:
            continue
        place = maps.images.index(name)
        photo = _photo(data, index, name)
        heats = dict(_overlays(maps, place, photo))
        order = [leader, *(m for m in columns if m != leader)]
        values = {m: run.number(float(columns[m].values[i]), metric) for m in order}
        yield Example(
            title,
            paths.images[name],
            maps.classes[place],
            "" if photo is None else _inline(maps.preprocess.crop(photo)),
            [(method, values[method], heats[method]) for method in order if method in heats],
            metric,
            leader,
        )


def _photo(data: Data | None, index: int, name: str) -> Image | None:
    """The photograph, if it still exists."""
    if data is not None and index < len(data) and data.names[index] == name:
        with contextlib.suppress(PatchlightError):
            return data[index].image
    return None


def _overlays(maps: Maps, place: int, photo: Image | None) -> Iterator[tuple[str, str]]:
    """The maps of the image at `place` over the photograph, or over grey, as data URLs by method."""
    from PIL import Image

    from patchlight.core.drawing import overlay

    assert maps.preprocess is not None
    height, width = maps.preprocess.size
    picture = photo if photo is not None else Image.new("RGB", (width, height), "#777777")
    for method, scores in maps.scores.items():
        if bool(scores[place].isfinite().all()):
            heat = overlay(scores[place], picture, maps.preprocess.size, preprocess=maps.preprocess)
            yield method, _inline(heat)


def _inline(picture: Image) -> str:
    return data_url(picture.convert("RGB").resize((SIDE, SIDE)), quality=82)
