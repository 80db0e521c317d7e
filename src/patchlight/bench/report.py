"""From a store to what people read: Markdown, LaTeX, CSV, and one HTML file that opens anywhere, offline."""

from __future__ import annotations

import base64
import csv
import gzip
import html
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from patchlight.bench.plan import opened
from patchlight.bench.recipe import Recipe
from patchlight.bench.statistics import Cell, Ranks, cells, extremes, ranks
from patchlight.bench.store import TIMING, Maps, Results, Store
from patchlight.errors import PatchlightError
from patchlight.files import cell as csv_cell
from patchlight.files import write_whole
from patchlight.images import Preprocess
from patchlight.statistics import FEWEST

EXAMPLES, SIDE = 3, 168
PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7a4b94", "#8c6d31", "#d62728", "#17becf", "#6b6b6b", "#393b79"),
)
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True, eq=False)
class Gathered:
    """A run with its statistics."""

    store: Store
    manifest: dict[str, Any]
    recipe: Recipe
    results: Results
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]

    @cached_property
    def by_key(self) -> dict[tuple[str, str, str], Cell]:
        return {(c.model, c.method, c.metric): c for c in self.cells}

    @cached_property
    def ranks(self) -> dict[tuple[str, str], Ranks]:
        """The methods' ranks, by model and metric, where there are any."""
        found = {(m, n): ranks(self.results, self.recipe, m, n) for m in self.models for n in self.recipe.metrics}
        return {key: value for key, value in found.items() if value is not None}

    @property
    def models(self) -> list[str]:
        return list(self.results.images)

    def higher(self, metric: str) -> bool:
        return self.results.columns[self.models[0], next(iter(self.recipe.methods)), metric].higher_is_better

    def arrow(self, metric: str) -> str:
        return "↑" if self.higher(metric) else "↓"

    def shown(self, value: float | None, metric: str, scaled: bool = True) -> str:
        """A number as its table shows it; the paper's are printed scaled already."""
        if value is None or math.isnan(value):
            return "–"
        own = self.recipe.metrics[metric]
        return f"{value * (own.scale if scaled else 1):.{own.digits}f}"

    def seconds(self, model: str, method: str) -> float:
        """Seconds an explanation takes, per image."""
        return self.by_key[model, method, next(iter(self.recipe.metrics))].explain_seconds


def gather(folder: str | Path) -> Gathered:
    """Read a run and compute its statistics; refused where nothing is done yet."""
    store = Store(folder)
    manifest, recipe, results = store.manifest(), store.recipe(), store.results()
    if not results.images:
        why = f": {results.notes[0]}" if results.notes else ""
        raise PatchlightError(f"no shard of the run in '{folder}' is done yet{why}")
    notes = [*manifest["notes"], *results.notes, *_stand_ins(recipe)]
    missing = sum(len(s["images"]) for s in manifest["shards"]) - sum(map(len, results.images.values()))
    if missing:
        notes.append(f"the run is not complete: {_images(missing)} still to be done")
    if manifest["quick"]:
        notes.append("made with the recipe's quick settings: good for a look, not for a claim")
    found = tuple(cells(results, recipe))
    notes += _too_few(found)
    return Gathered(store, manifest, recipe, results, found, tuple(notes))


def _too_few(found: Sequence[Cell]) -> list[str]:
    """Where there are too few images to say how sure a number is."""
    short = {c.model: c.images for c in found if 0 < c.images < FEWEST}
    return [
        f"{_images(count)} of {model} {'is' if count == 1 else 'are'} too few for intervals, ranks and a best method; "
        f"{FEWEST} or more are needed"
        for model, count in short.items()
    ]


def _stand_ins(recipe: Recipe) -> list[str]:
    """What was used in place of what the recipe names."""
    found = [
        f"{label} stands in for the recipe's model '{model.stands_for}'"
        + (", whose published numbers are shown beside it" if model.stands_for in recipe.published else "")
        for label, model in recipe.models.items()
        if model.stands_for
    ]
    if recipe.data.stands_for:
        found.append(f"'{recipe.data.kind}' data stand in for the recipe's '{recipe.data.stands_for}'")
    return found


def as_csv(run: Gathered) -> str:
    """A line for each model, method and metric, unscaled and in full precision; timing columns last."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f.name for f in fields(Cell) if f.name not in (*TIMING, "published")]
    writer.writerow([*names, "published", "rank", *TIMING])
    for cell in run.cells:
        placed = run.ranks.get((cell.model, cell.metric))
        rank = placed.means.get(cell.method) if placed else None
        scale = run.recipe.metrics[cell.metric].scale
        printed = None if cell.published is None else float(f"{cell.published / scale:.12g}")
        last = [printed, rank, *(getattr(cell, name) for name in TIMING)]
        writer.writerow([_plain(value) for value in [*(getattr(cell, name) for name in names), *last]])
    return out.getvalue()


def _plain(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else csv_cell(value)


LEGEND = (
    "Best in bold, where Friedman's test tells the methods apart at 5 %; † statistically tied with it (paired "
    "bootstrap over images); [95 % interval]"
)


def as_markdown(run: Gathered) -> str:
    """A table for each model, then ranks and failures."""
    lines = [f"# {run.recipe.name}", ""]
    lines += [f"{run.recipe.paper}", ""] if run.recipe.paper else []
    for model in run.models:
        lines += [f"## {_markdown(model)}", "", f"{_counted(run, model)}. {_legend(run, model)}.", ""]
        head = [f"{metric} {run.arrow(metric)}" for metric in run.recipe.metrics]
        lines += _markdown_table(
            ["method", *head, "s/image"],
            [
                [method, *(_cell(run, model, method, n) for n in run.recipe.metrics), _time(run.seconds(model, method))]
                for method in run.recipe.methods
            ],
        )
        undefined = [f"- {_markdown(line)}." for line in _undefined(run, model)]
        lines += ["", *undefined, *([""] if undefined else []), *_rank_lines(run, model)]
    lines += _failure_lines(run)
    lines += [f"- Note: {_markdown(note)}." for note in run.notes]
    return "\n".join(lines).rstrip() + "\n"


def _images(count: int) -> str:
    return f"{count} image{'s' if count != 1 else ''}"


def _counted(run: Gathered, model: str) -> str:
    """How many images count in the means, and of how many."""
    total = len(run.results.images[model])
    used = max((c.images for c in run.cells if c.model == model), default=total)
    return _images(total) if used == total else f"{used} of {_images(total)}"


def _undefined(run: Gathered, model: str) -> list[str]:
    """The metrics that by their protocol have no value for some images, which do not count."""
    total = _images(len(run.results.images[model]))
    most = {n: max(run.by_key[model, m, n].undefined for m in run.recipe.methods) for n in run.recipe.metrics}
    return [f"{n}: {count} of {total} without a value by its protocol" for n, count in most.items() if count]


def _legend(run: Gathered, model: str) -> str:
    printed = any(c.published is not None for c in run.cells if c.model == model)
    return LEGEND + ("; (the paper's number)" if printed else "")


def _cell(run: Gathered, model: str, method: str, metric: str) -> str:
    cell = run.by_key[model, method, metric]
    if math.isnan(cell.mean):
        return "failed" if cell.failed else "–"
    number = run.shown(cell.mean, metric)
    number = f"**{number}**" if cell.mark == "best" else f"{number}†" if cell.mark == "tied" else number
    printed = f" ({run.shown(cell.published, metric, False)})" if cell.published is not None else ""
    interval = f" [{run.shown(cell.low, metric)}, {run.shown(cell.high, metric)}]" if cell.low == cell.low else ""
    return f"{number}{interval}{printed}"


def _time(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds:.3g}"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(map(_markdown, row)) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]


def _markdown(text: str) -> str:
    """Words on one line of Markdown, in which neither a table nor HTML can begin."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _rank_lines(run: Gathered, model: str) -> list[str]:
    found = {n: run.ranks[model, n] for n in run.recipe.metrics if (model, n) in run.ranks}
    if not found:
        return []
    rows = [
        [method, *(f"{r.means[method]:.2f}" if method in r.means else "–" for r in found.values())]
        for method in run.recipe.methods
    ]
    rows.append(["critical difference", *(f"{r.critical:.2f}" for r in found.values())])
    rows.append(["Friedman p", *(f"{r.p:.2g}" for r in found.values())])
    table = _markdown_table(["mean rank", *found], rows)
    return [*table, ""]


def _failure_lines(run: Gathered) -> list[str]:
    return [f"- {count} values failed: {_markdown(reason)}." for reason, count in run.results.failures.items()]


_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "†": r"$^\dagger$"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": "$-$", "∘": r"$\circ$", "δ": r"$\delta$"}
)


def as_latex(run: Gathered) -> str:
    """A booktabs table for each model: mean and half-width of its interval, best bold, tied best with a dagger."""
    out = [r"% mean $\pm$ half of the 95 % bootstrap interval over images; bold: best; dagger: tied with it"]
    for model in run.models:
        metrics = list(run.recipe.metrics)
        out += [r"\begin{tabular}{l" + "r" * len(metrics) + "r}", r"\toprule"]
        head = [f"{_latex(n)} {_latex(run.arrow(n))}" for n in metrics]
        out += [" & ".join([_latex(model), *head, "s/image"]) + r" \\", r"\midrule"]
        for method in run.recipe.methods:
            numbers = [_latex_cell(run, run.by_key[model, method, n]) for n in metrics]
            out.append(" & ".join([_latex(method), *numbers, _latex(_time(run.seconds(model, method)))]) + r" \\")
        out += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(out)


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_cell(run: Gathered, cell: Cell) -> str:
    if math.isnan(cell.mean):
        return "--"
    number = run.shown(cell.mean, cell.metric)
    number = (
        rf"\textbf{{{number}}}" if cell.mark == "best" else rf"{number}$^\dagger$" if cell.mark == "tied" else number
    )
    half = rf" {{\scriptsize$\pm${run.shown((cell.high - cell.low) / 2, cell.metric)}}}" if cell.low == cell.low else ""
    printed = f" ({run.shown(cell.published, cell.metric, False)})" if cell.published is not None else ""
    return f"{number}{half}{printed}"


def write_html(run: Gathered, path: str | Path) -> Path:
    """The whole report as one file with everything in it."""
    return write_whole(path, as_html(run).encode(errors="backslashreplace"))


def as_html(run: Gathered) -> str:
    """Tables, curves, ranks, times and examples; equal stores give equal files."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PatchlightError("the report needs jinja2 and plotly: pip install 'patchlight[bench]'") from error
    environment = Environment(
        loader=PackageLoader("patchlight.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    models = [_model_section(run, model) for model in run.models]
    return environment.get_template("report.html").render(
        run=run,
        recipe=run.recipe,
        manifest=run.manifest,
        models=models,
        legend=LEGEND,
        colours={m: PALETTE[i % len(PALETTE)] for i, m in enumerate(run.recipe.methods)},
        plotly=_packed(get_plotlyjs()),
        charts=_script({c["id"]: c for m in models for c in m["charts"]}),
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


def _model_section(run: Gathered, model: str) -> dict[str, Any]:
    own = run.recipe.models[model]
    number = run.models.index(model)
    charts = [_curves(run, model, n, f"curve-{number}-{i}") for i, n in enumerate(run.recipe.metrics)]
    charts = [c for c in charts if c is not None]
    times = _times(run, model, f"time-{number}")
    return {
        "label": model,
        "name": own.name,
        "images": _counted(run, model),
        "rows": [
            {
                "method": method,
                "cells": [_html_cell(run, run.by_key[model, method, n]) for n in run.recipe.metrics],
                "seconds": _time(run.seconds(model, method)),
            }
            for method in run.recipe.methods
        ],
        "undefined": _undefined(run, model),
        "curves": charts,
        "charts": [*charts, *([times] if times else [])],
        "times": times,
        "ranks": [(n, _rank_plot(run.ranks[model, n])) for n in run.recipe.metrics if (model, n) in run.ranks],
        "examples": _examples(run, model),
    }


def _html_cell(run: Gathered, cell: Cell) -> dict[str, Any]:
    n = cell.metric
    return {
        "mark": cell.mark,
        "mean": "failed" if math.isnan(cell.mean) and cell.failed else run.shown(cell.mean, n),
        "interval": f"{run.shown(cell.low, n)} – {run.shown(cell.high, n)}" if cell.low == cell.low else "",
        "published": run.shown(cell.published, n, False) if cell.published is not None else "",
        "told": f"{cell.images} images" + (f", {cell.undefined} undefined" if cell.undefined else "")
        + (f", {cell.failed} failed" if cell.failed else ""),
    }  # fmt: skip


def _curves(run: Gathered, model: str, metric: str, name: str) -> dict[str, Any] | None:
    """The mean curve of every method, as a Plotly figure; None for a metric without one."""
    traces = []
    for i, method in enumerate(run.recipe.methods):
        column = run.results.columns[model, method, metric]
        if column.curve is None or column.x is None or not bool(column.values.isfinite().any()):
            continue
        mean = torch.nanmean(column.curve[column.values.isfinite()].double(), 0)
        line = {"color": PALETTE[i % len(PALETTE)], "dash": DASHES[i // len(PALETTE) % len(DASHES)], "width": 2}
        y = [round(v, 5) if v == v else None for v in mean.tolist()]
        traces.append(
            {
                "x": [round(v, 5) for v in column.x.tolist()],
                "y": y,
                "name": _drawn(method),
                "mode": "lines",
                "line": line,
            }
        )
    if not traces:
        return None
    return {"id": name, "title": f"{metric} {run.arrow(metric)}", "data": traces, "layout": {"height": 330}}


def _drawn(text: str) -> str:
    """Words as Plotly shows them letter by letter: it reads tags and entities."""
    return html.escape(text, quote=False)


def _times(run: Gathered, model: str, name: str) -> dict[str, Any] | None:
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
    return {"id": name, "title": "Time of an explanation", "data": [dots], "layout": layout}


def _rank_plot(found: Ranks) -> dict[str, Any]:
    """Where the critical-difference diagram draws things: an axis of ranks, methods hung on it, bars over the tied."""
    order = sorted(found.means, key=lambda m: (found.means[m], m))
    count = len(order)
    left = 50.0 + 6.5 * max(len(method) for method in order)
    right = left + 340
    width = right + left
    half = (count + 1) // 2
    span = max(count - 1, 1)

    def x(rank: float) -> float:
        return round(left + (rank - 1) / span * (right - left), 1)

    bars = [
        {"x1": x(found.means[g[0]]) - 3, "x2": x(found.means[g[-1]]) + 3, "y": 46 + 7 * i}
        for i, g in enumerate(found.groups)
    ]
    top = 46 + 7 * len(bars) + 8
    hung = []
    for i, method in enumerate(order):
        on_left = i < half
        row = i if on_left else count - 1 - i
        hung.append(
            {
                "method": method,
                "rank": f"{found.means[method]:.2f}",
                "x": x(found.means[method]),
                "y": top + 8 + 19 * row,
                "left": on_left,
            }
        )
    return {
        "width": width,
        "height": top + 19 * half + 12,
        "left": left,
        "right": right,
        "ticks": [{"x": x(r), "rank": r} for r in range(1, count + 1)],
        "bars": bars,
        "hung": hung,
        "critical": f"{found.critical:.2f}",
        "critical_x": round(x(1 + min(found.critical, span)), 1),
        "p": f"{found.p:.2g}",
        "images": found.images,
    }


def _examples(run: Gathered, model: str) -> list[dict[str, Any]]:
    """Best and worst images of the leading (or only) method under the first metric, each with every method's map."""
    metric = next(iter(run.recipe.metrics))
    known = [c for c in run.cells if (c.model, c.metric) == (model, metric) and c.mean == c.mean]
    if not known:
        return []
    sign = 1 if run.higher(metric) else -1
    leader = max(known, key=lambda c: sign * c.mean).method
    column = run.results.columns[model, leader, metric]
    best, worst = extremes(column.values, column.higher_is_better, EXAMPLES)
    where = {
        (s["model"], name): (s, i)
        for s in run.manifest["shards"]
        for name, i in zip(s["images"], s["indices"], strict=True)
    }
    try:
        data = opened(run.recipe.data)
    except PatchlightError:
        data = None
    found = []
    for title, chosen in (("best", best), ("worst", worst)):
        for i in chosen:
            name = run.results.images[model][i]
            shard, index = where[model, name]
            maps = run.store.read_maps(shard["place"], shard["key"])
            photo = None
            if data is not None and index < len(data) and data.names[index] == name:
                try:
                    photo = data[index].image
                except PatchlightError:
                    photo = None
            if name in maps.images:
                found.append(_example(run, model, metric, leader, title, name, i, maps, photo))
    return found


def _example(
    run: Gathered, model: str, metric: str, leader: str, title: str, name: str, i: int, maps: Maps, photo: Any
) -> dict[str, Any]:
    from PIL import Image

    from patchlight.viz import overlay

    place = list(maps.images).index(name)
    known = [f.name for f in fields(Preprocess) if f.name in maps.preprocess]
    cut: dict[str, Any] = {k: tuple(v) if isinstance(v := maps.preprocess[k], list) else v for k in known}
    preprocess = Preprocess(**cut)
    picture = photo if photo is not None else Image.new("RGB", (preprocess.size[1], preprocess.size[0]), "#777777")
    order = [leader, *(m for m in run.recipe.methods if m != leader)]
    heats = []
    for method in order:
        if method not in maps.scores or not bool(maps.scores[method][place].isfinite().all()):
            continue
        value = float(run.results.columns[model, method, metric].values[i])
        heat = overlay(maps.scores[method][place], picture, preprocess.size, preprocess=preprocess)
        heats.append({"method": method, "value": run.shown(value, metric), "src": _inline(heat)})
    return {
        "title": title,
        "name": name,
        "class": list(maps.classes)[place],
        "photo": _inline(preprocess.crop(picture)) if photo is not None else "",
        "maps": heats,
        "metric": metric,
        "leader": leader,
    }


def _inline(picture: Any) -> str:
    out = io.BytesIO()
    picture.convert("RGB").resize((SIDE, SIDE)).save(out, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()
