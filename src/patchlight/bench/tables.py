"""The tables of a run: what is counted and compared, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.bench.rows import TIMING
from patchlight.bench.statistics import SIGNS, Gap, Ranks, TableCell, cells, gaps, ranks
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.files import cell as csv_cell
from patchlight.core.statistics import FEWEST, Mark
from patchlight.study.spec import MetricSpec

LEGEND = (
    "Best in bold, where Friedman's test tells the methods apart at 5 %; † statistically tied with it (paired "
    "bootstrap over images); [95 % interval]; s/image: seconds of an explanation (/ n: of a pass that n methods share)"
)
GAPS = "On the same images; [95 % interval of the paired bootstrap over images]; ▲ better at 5 %, ▼ worse"


@dataclass(frozen=True)
class Shown:
    """A cell in words: its number, the interval and half its width, the paper's number; "" where there is none."""

    mean: str
    mark: Mark
    low: str
    high: str
    half: str
    published: str
    told: str


@dataclass(frozen=True, eq=False)
class Gathered:
    """A run with its statistics."""

    store: Store
    manifest: Manifest
    recipe: Recipe
    results: Results
    cells: tuple[TableCell, ...]
    notes: tuple[str, ...]

    @cached_property
    def by_key(self) -> dict[tuple[str, str, str], TableCell]:
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

    def number(self, value: float, metric: str, sign: str = "") -> str:
        """A value as its table shows it; with sign="+" a difference."""
        return scaled(value, self.recipe.metrics[metric], sign)

    def shown(self, model: str, method: str, metric: str) -> Shown:
        """A cell as its table shows it; the paper's number is printed scaled already."""
        cell = self.by_key[model, method, metric]
        sides = ("", "", "")
        if cell.low == cell.low:
            low, high = cell.low, cell.high
            sides = self.number(low, metric), self.number(high, metric), self.number((high - low) / 2, metric)
        return Shown(
            "failed" if math.isnan(cell.mean) and cell.failed else self.number(cell.mean, metric),
            cell.mark,
            *sides,
            "" if cell.published is None else f"{cell.published:.{self.recipe.metrics[metric].digits}f}",
            f"{cell.images} images"
            + (f", {cell.undefined} undefined" if cell.undefined else "")
            + (f", {cell.failed} failed" if cell.failed else ""),
        )

    def seconds(self, model: str, method: str) -> float:
        """Seconds an explanation takes, per image; of a shared pass, its own."""
        return self.by_key[model, method, next(iter(self.recipe.metrics))].explain_seconds

    def seconds_shown(self, model: str, method: str) -> str:
        """The same in words, with how many methods share the pass."""
        shared = self.by_key[model, method, next(iter(self.recipe.metrics))].shared_by
        return seconds_shown(self.seconds(model, method)) + (f" / {shared}" if shared > 1 else "")

    def counted(self, model: str) -> str:
        """How many images count in the means, and of how many."""
        total = len(self.results.images[model])
        used = max((c.images for c in self.cells if c.model == model), default=total)
        return _images(total) if used == total else f"{used} of {_images(total)}"

    def undefined(self, model: str) -> list[str]:
        """The metrics that by their protocol have no value for some images, which do not count."""
        total = _images(len(self.results.images[model]))
        most = {n: max(self.by_key[model, m, n].undefined for m in self.recipe.methods) for n in self.recipe.metrics}
        return [f"{n}: {count} of {total} without a value by its protocol" for n, count in most.items() if count]


def scaled(value: float, metric: MetricSpec, sign: str = "") -> str:
    """A value of a metric as tables show it; with sign="+" a difference."""
    return "–" if math.isnan(value) else f"{value * metric.scale:{sign}.{metric.digits}f}"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, without formulas and NaN."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_plain(value) for value in row] for row in rows)
    return out.getvalue()


def gather(folder: str | Path) -> Gathered:
    """Read a run and compute its statistics; refused where nothing is done yet."""
    store = Store(folder)
    manifest, results = store.manifest(), store.results(progress=True)
    recipe = manifest.resolved
    if not results.images:
        why = f": {results.notes[0]}" if results.notes else ""
        raise PatchlightError(f"no unit of the run in '{folder}' is done yet{why}")
    notes = [*manifest.notes, *results.notes, *_stand_ins(recipe)]
    done = sum(len(column) - column.undone for column in results.columns.values())
    if done < manifest.values:
        notes.append(f"the run is not complete: {manifest.values - done} of {manifest.values} values still to be done")
    if manifest.quick:
        notes.append("made with the recipe's quick settings: good for a look, not for a claim")
    found = tuple(cells(results, recipe))
    notes += _too_few(found)
    return Gathered(store, manifest, recipe, results, found, tuple(notes))


def _too_few(found: Sequence[TableCell]) -> list[str]:
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
    names = [f.name for f in fields(TableCell) if f.name not in (*TIMING, "published")]
    rows = []
    for cell in run.cells:
        placed = run.ranks.get((cell.model, cell.metric))
        rank = placed.means.get(cell.method) if placed else None
        scale = run.recipe.metrics[cell.metric].scale
        printed = None if cell.published is None else float(f"{cell.published / scale:.12g}")
        last = [printed, rank, *(getattr(cell, name) for name in TIMING)]
        rows.append([*(getattr(cell, name) for name in names), *last])
    return csv_text([*names, "published", "rank", *TIMING], rows)


def _plain(value: Any) -> Any:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else csv_cell(value)


def as_markdown(run: Gathered, against: str | None = None) -> str:
    """A table for each model, then the differences to the method `against`, ranks and failures."""
    lines = [f"# {run.recipe.name}", ""]
    lines += [f"{run.recipe.paper}", ""] if run.recipe.paper else []
    metrics, methods = list(run.recipe.metrics), list(run.recipe.methods)
    for model in run.models:
        printed = any(c.published is not None for c in run.cells if c.model == model)
        legend = LEGEND + ("; (the paper's number)" if printed else "")
        lines += [f"## {_markdown(model)}", "", f"{run.counted(model)}. {legend}.", ""]
        head = ["method", *(f"{n} {run.arrow(n)}" for n in metrics), "s/image"]
        cells = {m: [_markdown_cell(run.shown(model, m, n)) for n in metrics] for m in methods}
        lines += markdown_table(head, [[m, *cells[m], run.seconds_shown(model, m)] for m in methods])
        undefined = [f"- {_markdown(line)}." for line in run.undefined(model)]
        lines += ["", *undefined, *([""] if undefined else [])]
        lines += [*_gap_lines(run, model, against), *_rank_lines(run, model)]
    lines += [f"- {count} values failed: {_markdown(reason)}." for reason, count in run.results.failures.items()]
    lines += [f"- Note: {_markdown(note)}." for note in run.notes]
    return "\n".join(lines).rstrip() + "\n"


def _images(count: int) -> str:
    return f"{count} image{'s' if count != 1 else ''}"


def seconds_shown(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds:.3g}"


def _markdown_cell(cell: Shown) -> str:
    number = {"best": f"**{cell.mean}**", "tied": f"{cell.mean}†", "": cell.mean}[cell.mark]
    interval = f" [{cell.low}, {cell.high}]" if cell.low else ""
    return f"{number}{interval}{_in_brackets(cell)}"


def _in_brackets(cell: Shown) -> str:
    """The paper's number beside ours, where we have one."""
    return f" ({cell.published})" if cell.published and cell.mean not in ("failed", "–") else ""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(map(_markdown, row)) + " |"

    return [line(head), "|" + " --- |" * len(head), *map(line, rows)]


def _markdown(text: str) -> str:
    """Words on one line of Markdown, in which neither a table nor HTML can begin."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _gap_lines(run: Gathered, model: str, against: str | None) -> list[str]:
    if against is None:
        return []
    found = gaps(run.results, run.recipe, model, against)
    metrics = list(run.recipe.metrics)

    def cell(gap: Gap, metric: str) -> str:
        interval = "" if math.isnan(gap.low) else f" [{run.number(gap.low, metric)}, {run.number(gap.high, metric)}]"
        return f"{run.number(gap.difference, metric, '+')}{interval}{SIGNS[gap.standing]}"

    rows = [[m, *(cell(found[m, n], n) for n in metrics)] for m in run.recipe.methods if m != against]
    head = [f"difference to {against}", *(f"{n} {run.arrow(n)}" for n in metrics)]
    return [f"{GAPS}.", "", *markdown_table(head, rows), ""]


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
    return [*markdown_table(["mean rank", *found], rows), ""]


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
            numbers = [_latex_cell(run.shown(model, method, n)) for n in metrics]
            seconds = _latex(run.seconds_shown(model, method))
            out.append(" & ".join([_latex(method), *numbers, seconds]) + r" \\")
        out += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(out)


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_cell(cell: Shown) -> str:
    if cell.mean in ("failed", "–"):
        return "--"
    number = {"best": rf"\textbf{{{cell.mean}}}", "tied": rf"{cell.mean}$^\dagger$", "": cell.mean}[cell.mark]
    half = rf" {{\scriptsize$\pm${cell.half}}}" if cell.half else ""
    return f"{number}{half}{_in_brackets(cell)}"
