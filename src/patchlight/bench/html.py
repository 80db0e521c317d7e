"""The report of a run as one HTML file with everything in it, which opens anywhere, offline."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.bench.rows import Maps
from patchlight.bench.statistics import Ranks, extremes
from patchlight.bench.tables import LEGEND, Gathered
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.files import write_whole
from patchlight.report.page import PALETTE, data_url, page_style, page_template

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchlight.data import Data

EXAMPLES, SIDE = 3, 168
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Chart:
    """A figure of Plotly's, for the element of this id."""

    id: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Hung:
    """A method on the axis of ranks: where its line leaves the axis and where its name stands, on the left or right."""

    method: str
    rank: str
    x: float
    y: float
    left: bool


@dataclass(frozen=True)
class RankPlot:
    """Where the critical-difference diagram draws things: an axis of ranks, methods hung on it, bars over the tied.

    `ticks` are (x, rank) and `bars` (x1, x2, y).
    """

    width: float
    height: float
    left: float
    right: float
    ticks: list[tuple[float, int]]
    bars: list[tuple[float, float, float]]
    hung: list[Hung]
    critical: str
    critical_x: float
    p: str
    images: int


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
    times: Chart | None
    ranks: list[tuple[str, RankPlot]]
    examples: list[Example]

    @property
    def charts(self) -> list[Chart]:
        return [*self.curves, *([self.times] if self.times else [])]


def write_html(run: Gathered, path: str | Path) -> Path:
    """The whole report as one file with everything in it."""
    return write_whole(path, as_html(run).encode(errors="backslashreplace"))


def as_html(run: Gathered) -> str:
    """Tables, curves, ranks, times and examples; equal stores give equal files."""
    try:
        from plotly.offline import get_plotlyjs

        template = page_template("patchlight.bench", "report.html")
    except ImportError as error:
        raise missing_extra("the report needs", "jinja2 and plotly", "bench") from error
    models = {model: _section(run, model, number) for number, model in enumerate(run.models)}
    return template.render(
        style=page_style(),
        run=run,
        recipe=run.recipe,
        manifest=run.manifest,
        models=models,
        legend=LEGEND,
        colours={m: PALETTE[i % len(PALETTE)] for i, m in enumerate(run.recipe.methods)},
        plotly=_packed(get_plotlyjs()),
        charts=_script({chart.id: asdict(chart) for model in models.values() for chart in model.charts}),
    )


def _script(value: Any) -> str:
    """A value as JSON that may stand inside a script element: nothing in it can end or change the element."""
    text = json.dumps(value)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _packed(script: str) -> str:
    """A script as gzip in base64, which the page unpacks: Plotly comes with its whole bundle only, 4.8 MB of it."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _section(run: Gathered, model: str, number: int) -> Section:
    metrics = list(run.recipe.metrics)
    curves = [_curves(run, model, n, f"curve-{number}-{i}") for i, n in enumerate(metrics)]
    return Section(
        curves=[chart for chart in curves if chart is not None],
        times=_times(run, model, f"time-{number}"),
        ranks=[(n, _rank_plot(run.ranks[model, n])) for n in metrics if (model, n) in run.ranks],
        examples=list(_examples(run, model)),
    )


def _curves(run: Gathered, model: str, metric: str, name: str) -> Chart | None:
    """The mean curve of every method; None for a metric without one."""
    traces = []
    for i, method in enumerate(run.recipe.methods):
        column = run.results.columns[model, method, metric]
        if column.mean_curve is None or column.x is None or not column.count:
            continue
        line = {"color": PALETTE[i % len(PALETTE)], "dash": DASHES[i // len(PALETTE) % len(DASHES)], "width": 2}
        x = [round(v, 5) for v in column.x.tolist()]
        y = [round(v, 5) if v == v else None for v in column.mean_curve.tolist()]
        traces.append({"x": x, "y": y, "name": _drawn(method), "mode": "lines", "line": line})
    return Chart(name, f"{metric} {run.arrow(metric)}", traces, {"height": 330}) if traces else None


def _drawn(text: str) -> str:
    """Words as Plotly shows them letter by letter: it reads tags and entities."""
    return html.escape(text, quote=False)


def _times(run: Gathered, model: str, name: str) -> Chart | None:
    """The time of an explanation by every method; None where none is known."""
    known = {m: run.seconds(model, m) for m in run.recipe.methods if not math.isnan(run.seconds(model, m))}
    if not known:
        return None
    order = sorted(known, key=lambda m: (-known[m], m))
    places = list(run.recipe.methods)
    dots = {
        "mode": "markers",
        "y": [_drawn(method) for method in order],
        "x": [float(f"{known[m]:.4g}") for m in order],
        "marker": {"color": [PALETTE[places.index(m) % len(PALETTE)] for m in order], "size": 12},
        "hovertemplate": "%{y}: %{x:.3g} s<extra></extra>",
    }
    axis = {"type": "log", "title": {"text": "seconds per image"}, "gridcolor": "#dfe4ea", "dtick": 1}
    layout = {"height": 90 + 24 * len(order), "showlegend": False, "xaxis": axis}
    return Chart(name, "Time of an explanation", [dots], layout)


def _rank_plot(found: Ranks) -> RankPlot:
    order = sorted(found.means, key=lambda m: (found.means[m], m))
    count, half, span = len(order), (len(order) + 1) // 2, max(len(order) - 1, 1)
    left = 50.0 + 6.5 * max(len(method) for method in order)
    right = left + 340

    def x(rank: float) -> float:
        return round(left + (rank - 1) / span * (right - left), 1)

    groups = [(found.means[group[0]], found.means[group[-1]]) for group in found.groups]
    top = 46 + 7 * len(groups) + 8
    rows = [i if i < half else count - 1 - i for i in range(count)]
    return RankPlot(
        width=right + left,
        height=top + 19 * half + 12,
        left=left,
        right=right,
        ticks=[(x(rank), rank) for rank in range(1, count + 1)],
        bars=[(x(first) - 3, x(last) + 3, 46 + 7 * i) for i, (first, last) in enumerate(groups)],
        hung=[
            Hung(m, f"{found.means[m]:.2f}", x(found.means[m]), top + 8 + 19 * row, i < half)
            for i, (m, row) in enumerate(zip(order, rows, strict=True))
        ],
        critical=f"{found.critical:.2f}",
        critical_x=round(x(1 + min(found.critical, span)), 1),
        p=f"{found.p:.2g}",
        images=found.images,
    )


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
