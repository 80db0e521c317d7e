"""The tables of a run as Markdown, LaTeX and CSV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.bench.rows import TIMING
from patchlight.bench.statistics import SIGNS, Gap, Ranks, TableCell, method_gaps, rank_methods, table_cells
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.files import csv_text
from patchlight.core.statistics import FEWEST, Mark
from patchlight.core.text import plural
from patchlight.study.spec import MetricSpec

LEGEND = (
    "Best in bold, if Friedman's test separates the methods at 5 %; † statistically tied with it (paired bootstrap "
    "over images); [95 % interval]; s/image: seconds per explanation (/ n: of a pass that n methods share)"
)
SHARED_ONLY = "Methods are compared only on the images that all of them have"
UNEVEN = "[95 % interval]; n: number of images. Means of different images cannot be compared"
GAPS = "On shared images; [95 % interval of the paired bootstrap over images]; ▲ better at 5 %, ▼ worse"


@dataclass(frozen=True)
class CellText:
    """A cell as text; each part is empty where it does not apply.

    `half` is half the width of the interval, `count` is "n = N" where the cells of the table have different numbers of
    images, and `details` is the tooltip.
    """

    mean: str
    mark: Mark
    low: str
    high: str
    half: str
    published: str
    count: str
    details: str


@dataclass(frozen=True, eq=False)
class RunTables:
    """A run with its statistics.

    `incomplete` is a sentence, empty for a complete run. With `shared_only`, only images that all methods have count.
    """

    store: Store
    manifest: Manifest
    recipe: Recipe
    results: Results
    cells: tuple[TableCell, ...]
    notes: tuple[str, ...]
    incomplete: str = ""
    shared_only: bool = False

    @cached_property
    def by_key(self) -> dict[tuple[str, str, str], TableCell]:
        return {(c.model, c.method, c.metric): c for c in self.cells}

    @cached_property
    def on_shared_images(self) -> RunTables:
        """The same tables, on the images that all methods with a value have."""
        results = self.results.on_shared_images()
        return replace(self, results=results, cells=tuple(table_cells(results, self.recipe)), shared_only=True)

    def uneven(self, model: str) -> bool:
        """Whether the run is incomplete and the methods have been measured on different images of this model."""
        if self.shared_only or not self.incomplete:
            return False
        shared = self.on_shared_images.by_key
        return any(c.images != shared[key].images for key, c in self.by_key.items() if key[0] == model)

    def tables(self, model: str) -> list[RunTables]:
        """The tables of a model: one, preceded for an uneven model by one on the shared images, if there are any."""
        return [self.on_shared_images, self] if self.uneven(model) and self.on_shared_images.images(model) else [self]

    @cached_property
    def ranks(self) -> dict[tuple[str, str], Ranks]:
        """The methods' ranks by model and metric, where they exist."""
        keys = [(model, metric) for model in self.models for metric in self.recipe.metrics]
        ranks = {key: rank_methods(self.results, self.recipe, *key) for key in keys}
        return {key: value for key, value in ranks.items() if value is not None}

    @property
    def models(self) -> list[str]:
        return list(self.results.images)

    def arrow(self, metric: str) -> str:
        return self.results.columns[self.models[0], next(iter(self.recipe.methods)), metric].arrow

    def number(self, value: float, metric: str, sign: str = "") -> str:
        """Format a value of a metric; `sign="+"` is for differences."""
        return format_value(value, self.recipe.metrics[metric], sign)

    def badge(self, method: str) -> str:
        """ "ignores the class" for such a method in a run that explains the images' labels."""
        ignores = self.recipe.target == "label" and self.recipe.methods[method].request.ignores_class
        return "ignores the class" if ignores else ""

    def images(self, model: str) -> int:
        """The number of images behind the means of a model's table; single cells may have fewer."""
        return max((c.images for c in self.cells if c.model == model), default=0)

    def count(self, model: str, images: int) -> str:
        """`n = N` where the cells of the table have different numbers of images."""
        return "" if images == self.images(model) and not self.uneven(model) else f"n = {images}"

    def text(self, model: str, method: str, metric: str) -> CellText:
        """A cell as its table shows it; published numbers are scaled already."""
        cell = self.by_key[model, method, metric]
        sides = ("", "", "")
        if cell.low == cell.low:
            low, high = cell.low, cell.high
            sides = self.number(low, metric), self.number(high, metric), self.number((high - low) / 2, metric)
        left_out = {"undefined": cell.undefined, "failed": cell.failed}
        return CellText(
            "failed" if math.isnan(cell.mean) and cell.failed else self.number(cell.mean, metric),
            "" if self.uneven(model) else cell.mark,
            *sides,
            "" if cell.published is None else f"{cell.published:.{self.recipe.metrics[metric].digits}f}",
            self.count(model, cell.images) if cell.images else "",
            ", ".join([plural(cell.images, "image"), *(f"{n} {why}" for why, n in left_out.items() if n)]),
        )

    def seconds(self, model: str, method: str) -> float:
        """Seconds per explanation; for a shared pass, seconds of the pass."""
        return self.by_key[model, method, next(iter(self.recipe.metrics))].explain_seconds

    def seconds_text(self, model: str, method: str) -> str:
        """The same as text, with the number of methods that share the pass."""
        shared = self.by_key[model, method, next(iter(self.recipe.metrics))].shared_by
        seconds = self.seconds(model, method)
        return ("–" if math.isnan(seconds) else f"{seconds:.3g}") + (f" / {shared}" if shared > 1 else "")

    def caption(self, model: str) -> str:
        """The images of a model's table, and how to read its cells."""
        total, used = len(self.results.images[model]), self.images(model)
        images = plural(total, "image") if used == total else f"{used} of {plural(total, 'image')}"
        if self.uneven(model):
            return f"All values so far, on {images}. {UNEVEN}."
        images += ", those that all methods have" if self.shared_only else ""
        cells = [c for c in self.cells if c.model == model]
        published = "; (the paper's number)" if any(c.published is not None for c in cells) else ""
        fewer = "; n: images of a cell with fewer images" if any(c.images not in (0, used) for c in cells) else ""
        return f"{images}. {LEGEND}{published}{fewer}."

    def undefined_lines(self, model: str) -> list[str]:
        """The metrics that are undefined on some images by their protocol."""
        total = plural(len(self.results.images[model]), "image")
        most = {n: max(self.by_key[model, m, n].undefined for m in self.recipe.methods) for n in self.recipe.metrics}
        return [f"{n}: undefined on {count} of {total} by its protocol" for n, count in most.items() if count]


def read_tables(folder: str | Path) -> RunTables:
    """Read a run and compute its statistics.

    Raises:
        PatchlightError: If no unit of the run is done.
    """
    store = Store(folder)
    manifest, results = store.manifest(), store.results(progress=True)
    recipe = manifest.resolved
    if not results.images:
        why = f": {results.notes[0]}" if results.notes else ""
        raise PatchlightError(f"no unit of the run in '{folder}' is done yet{why}")
    incomplete = manifest.incomplete(results.done)
    cells = tuple(table_cells(results, recipe))
    recorded = [note for note in manifest.notes if note != incomplete]  # an export records that it is incomplete
    notes = [*recorded, *results.notes, *_stand_ins(recipe)]
    if manifest.quick:
        notes.append("measured with the recipe's quick settings: good for a first look, not for a claim")
    for model in results.images:
        fewest = min((c.images for c in cells if c.model == model and c.images), default=FEWEST)
        if fewest < FEWEST:
            needs = f"intervals, ranks and a best method need at least {FEWEST} images"
            notes.append(f"{needs}; some cells of {model} have only {fewest}")
    return RunTables(
        store, manifest, recipe, results, cells, tuple(notes), incomplete and f"{incomplete}. {SHARED_ONLY}"
    )


def _stand_ins(recipe: Recipe) -> list[str]:
    """Notes on models and data that replace those of the recipe."""
    notes = [
        f"{label} stands in for the recipe's model '{model.stands_for}'"
        + (", whose published numbers are shown beside it" if model.stands_for in recipe.published else "")
        for label, model in recipe.models.items()
        if model.stands_for
    ]
    if recipe.data.stands_for:
        notes.append(f"'{recipe.data.kind}' data stand in for the recipe's '{recipe.data.stands_for}'")
    return notes


def format_value(value: float, metric: MetricSpec, sign: str = "") -> str:
    """Format a value of a metric as tables show it; `sign="+"` is for differences."""
    return "–" if math.isnan(value) else f"{value * metric.scale:{sign}.{metric.digits}f}"


def format_gap(gap: Gap, metric: MetricSpec) -> str:
    """A difference with its interval and its sign."""
    low, high = format_value(gap.low, metric), format_value(gap.high, metric)
    interval = "" if math.isnan(gap.low) else f" [{low}, {high}]"
    return f"{format_value(gap.difference, metric, '+')}{interval}{SIGNS[gap.standing]}"


def as_csv(run: RunTables) -> str:
    """A line for each model, method and metric, unscaled and in full precision; timing columns last."""
    names = [f.name for f in fields(TableCell) if f.name not in (*TIMING, "published")]
    rows = []
    shared = run.on_shared_images.by_key if run.incomplete else run.by_key
    for key, cell in run.by_key.items():
        ranks = run.ranks.get((cell.model, cell.metric))
        rank = ranks.means.get(cell.method) if ranks else None
        scale = run.recipe.metrics[cell.metric].scale
        published = None if cell.published is None else float(f"{cell.published / scale:.12g}")
        last = [shared[key].mean, shared[key].images, published, rank, *(getattr(cell, name) for name in TIMING)]
        rows.append([*(getattr(cell, name) for name in names), *last])
    return csv_text([*names, "shared_mean", "shared_images", "published", "rank", *TIMING], rows)


def as_markdown(run: RunTables, against: str | None = None) -> str:
    """A table for each model, the differences to the method `against`, ranks, failures and notes."""
    lines = [f"# {run.recipe.name}", ""]
    lines += [f"**{run.incomplete}.**", ""] if run.incomplete else []
    lines += [f"{run.recipe.paper}", ""] if run.recipe.paper else []
    metrics, methods = list(run.recipe.metrics), list(run.recipe.methods)
    head = [f"{n} {run.arrow(n)}" for n in metrics]
    names = {m: f"{m} ({badge})" if (badge := run.badge(m)) else m for m in methods}
    for model in run.models:
        lines += [f"## {_escape_markdown(model)}", ""]
        for table in run.tables(model):
            cells = {m: [_markdown_cell(table.text(model, m, n)) for n in metrics] for m in methods}
            rows = [[names[m], *cells[m], run.seconds_text(model, m)] for m in methods]
            lines += [table.caption(model), "", *markdown_table(["method", *head, "s/image"], rows), ""]
        undefined = [f"- {_escape_markdown(line)}." for line in run.undefined_lines(model)]
        lines += [*undefined, *([""] if undefined else [])]
        if against is not None:
            gaps = method_gaps(run.results, run.recipe, model, against)
            rows = [
                [names[m], *(_gap_cell(run, model, gaps[m, n], n) for n in metrics)] for m in methods if m != against
            ]
            lines += [f"{GAPS}.", "", *markdown_table([f"difference to {against}", *head], rows), ""]
        lines += _rank_lines(run, model)
    lines += [f"- {count} values failed: {_escape_markdown(reason)}." for reason, count in run.results.failures.items()]
    lines += [f"- Note: {_escape_markdown(note)}." for note in run.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_cell(cell: CellText) -> str:
    number = {"best": f"**{cell.mean}**", "tied": f"{cell.mean}†", "": cell.mean}[cell.mark]
    interval = f" [{cell.low}, {cell.high}]" if cell.low else ""
    count = f" ({cell.count})" if cell.count else ""
    return f"{number}{interval}{_published_number(cell)}{count}"


def _gap_cell(run: RunTables, model: str, gap: Gap, metric: str) -> str:
    count = run.count(model, gap.images)
    return format_gap(gap, run.recipe.metrics[metric]) + (f" ({count})" if count else "")


def _published_number(cell: CellText) -> str:
    """The paper's number, in brackets after a measured one."""
    return f" ({cell.published})" if cell.published and cell.mean not in ("failed", "–") else ""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(map(_escape_markdown, row)) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]


def _escape_markdown(text: str) -> str:
    """Text on one line, escaped so that it cannot start a table cell or HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _rank_lines(run: RunTables, model: str) -> list[str]:
    ranks = {n: run.ranks[model, n] for n in run.recipe.metrics if (model, n) in run.ranks}
    if not ranks:
        return []
    rows = [
        [method, *(f"{r.means[method]:.2f}" if method in r.means else "–" for r in ranks.values())]
        for method in run.recipe.methods
    ]
    rows.append(["critical difference", *(f"{r.critical:.2f}" for r in ranks.values())])
    rows.append(["Friedman p", *(f"{r.p:.2g}" for r in ranks.values())])
    if run.incomplete:
        rows.append(["shared images", *(str(r.images) for r in ranks.values())])
    return [*markdown_table(["mean rank", *ranks], rows), ""]


_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "†": r"$^\dagger$"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": "$-$", "∘": r"$\circ$", "δ": r"$\delta$"}
)


def as_latex(run: RunTables) -> str:
    """A booktabs table for each model: mean and half-width of its interval, best bold, tied best with a dagger."""
    out = [f"% {run.incomplete}"] if run.incomplete else []
    out += [r"% mean $\pm$ half of the 95 % bootstrap interval over images; bold: best; dagger: tied with it"]
    for model, table in ((name, table) for name in run.models for table in run.tables(name)):
        metrics = list(run.recipe.metrics)
        out += [f"% {table.caption(model)}"] if run.incomplete else []
        out += [r"\begin{tabular}{l" + "r" * len(metrics) + "r}", r"\toprule"]
        head = [f"{_escape_latex(n)} {_escape_latex(run.arrow(n))}" for n in metrics]
        out += [" & ".join([_escape_latex(model), *head, "s/image"]) + r" \\", r"\midrule"]
        for method in run.recipe.methods:
            numbers = [_latex_cell(table.text(model, method, n)) for n in metrics]
            seconds = _escape_latex(run.seconds_text(model, method))
            name = _escape_latex(method) + (rf" {{\scriptsize ({badge})}}" if (badge := run.badge(method)) else "")
            out.append(" & ".join([name, *numbers, seconds]) + r" \\")
        out += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(out)


def _escape_latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_cell(cell: CellText) -> str:
    if cell.mean in ("failed", "–"):
        return "--"
    number = {"best": rf"\textbf{{{cell.mean}}}", "tied": rf"{cell.mean}$^\dagger$", "": cell.mean}[cell.mark]
    half = rf" {{\scriptsize$\pm${cell.half}}}" if cell.half else ""
    count = rf" {{\scriptsize ({cell.count})}}" if cell.count else ""
    return f"{number}{half}{_published_number(cell)}{count}"
