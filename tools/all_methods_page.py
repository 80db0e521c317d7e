"""The page docs/results/all-methods.md: ``python -m tools.all_methods_page docs/results [RUN …]``.

A RUN is a finished run of a recipe; its tables replace those of all-methods-tables.md. The chart and the table of
all-methods.md combine these tables with those of the other pages. The text above the line `MADE` is not changed.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchlight.bench.statistics import SIGNS, method_gaps
from patchlight.bench.tables import RunTables, markdown_table, read_tables
from patchlight.core.files import write_atomic

NAMES = {
    "posterior": "posterior 128",
    "caap 66": "caap",
    "kernel-shap 256": "kernel-shap",
    "mda 225": "mda",
    "rise 256": "rise",
    "search 1100": "search",
    "TIS": "tis",
    "tis 1024": "tis",
    "ViT-CX": "vit-cx",
    "TAM": "tam",
    "Chefer1": "transatt",
    "Chefer2": "genatt",
    "Att. Rollout": "rollout",
    "BT H": "bt-h",
    "BT T": "bt-t",
    "RISE": "rise",
    "IntegratedGrad": "ig",
    "SmoothGrad": "smoothgrad",
}
"""What papers and tables call a method."""
CURVES_ONLY = {f"{name} {n}" for name in ("posterior", "tis", "search") for n in (64, 256)} | {
    "rise 64", "kernel-shap 64"
}  # fmt: skip
"""Labels that are in the curves and not in the chart."""
OPTIMISES = ("search", "mda")
"""Methods that optimise insertion and deletion, of removed tokens or of painted patches."""
Key = tuple[str, str]
"""A method and a column."""
MADE = "## The table"
TABLES = "all-methods-tables"
REFERENCE = "fullgrad-plus.libra"
"""The method that the methods of a run on few images are compared with."""


@dataclass(frozen=True)
class Column:
    """A test: the pages that measured it, its name there, and whether values are differences to `tis`."""

    pages: tuple[str, ...]
    there: str
    images: str
    meaning: str
    group: str = "Other tests"
    to_tis: bool = False
    section: str = ""


PHOTOGRAPHS, POCKET = "Faithfulness, photographs", "Faithfulness, pocket, 11 images"
_FAITHFULNESS = ("posterior", "compare-faithfulness")
COLUMNS = {
    "Δ mean": Column(
        _FAITHFULNESS, "Δ mean", "250 + 250", "insertion minus deletion over the image's mean", PHOTOGRAPHS, True
    ),
    "Δ blur": Column(_FAITHFULNESS, "Δ blur", "250 + 250", "the same over a blur", PHOTOGRAPHS, True),
    "Token deletion": Column(
        ("posterior",),
        "Token deletion",
        "250",
        "predictions that change without the highest tokens, in %",
        PHOTOGRAPHS,
        True,
    ),
    "SRG": Column(
        ("metric-consistency",),
        "SRG mean",
        "250",
        "area while the lowest patches are removed minus the highest; effect against random maps (paired t / sqrt n)",
        PHOTOGRAPHS,
    ),
    "Δ mean ": Column((TABLES,), "Δ mean", "11", "as on photographs, with `pocket`", POCKET, True, "pocket"),
    "Δ blur ": Column((TABLES,), "Δ blur", "11", "as on photographs, with `pocket`", POCKET, True, "pocket"),
    "Token deletion ": Column(
        (TABLES,), "Token deletion", "11", "as on photographs, with `pocket`", POCKET, True, "pocket"
    ),
    "Pointing game": Column(("compare-localisation",), "Pointing game", "388", "the highest point is in the box"),
    "AP pets": Column(("compare-segmentation", "posterior"), "AP", "370", "average precision of the animal's outline"),
    "Max-sensitivity": Column(("tis-table-4",), "Same seed", "32", "change under small noise; lower is better"),
    "Ground truth": Column(
        ("ground-truth",), "mean", "56 scenes", "the patches that decide come first (`posterior`, `tis`: 64 masks)"
    ),
}


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """The rows of each Markdown table, by the head of their column without its arrow."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip(" `*") for cell in line.strip("| ").split(" | ")] for line in block.splitlines()]
        heads = [name.rstrip(" ↑↓") for name in lines[0]]
        yield [dict(zip(heads, row, strict=False)) for row in lines[2:]]


def number_of(cell: str) -> float:
    """The first number of a cell."""
    return float((re.match(r"[-+]?\d*\.?\d+", cell) or ["nan"])[0])


def half_width(cell: str) -> float:
    """Half of the 95 % interval of a cell: "± x", or brackets; nan if it has none."""
    if match := re.search(r"± (\d*\.?\d+)", cell):
        return float(match[1])
    ends = re.search(r"\[(\S+), (\S+)\]", cell)
    return (float(ends[2]) - float(ends[1])) / 2 if ends else math.nan


def read_page(text: str, page: str, column: Column) -> list[dict[str, str]]:
    """By method, the cells of a column: of both models, or of the one table that has the mean of both."""
    cells_of = list[dict[str, str]]()
    if column.section:
        text = re.split(r"^## ", text.partition(f"## {column.section}")[2], flags=re.MULTILINE)[0]
    for rows in tables(text):
        if page == "metric-consistency":
            cells_of += [
                row for row in rows if row.get("metric") == column.there and "genatt" in row and "effect" not in row
            ]
        elif rows and "method" in rows[0] and column.there in rows[0]:
            names = [re.sub(r" \(.*", "", row["method"]) for row in rows]
            cells_of.append({name: row[column.there] for name, row in zip(names, rows, strict=True)})
    several = page not in ("metric-consistency", "ground-truth", TABLES)
    return [
        {NAMES.get(name, name): cell for name, cell in cells.items() if name != "metric"}
        for cells in cells_of[: 1 + several]
    ]


def collect(folder: Path) -> tuple[dict[Key, float], dict[str, float]]:
    """Values by method and column, means over models and pages; and by column the mean half of the intervals."""
    values, widths = dict[Key, list[float]](), dict[str, float]()
    for label, column in COLUMNS.items():
        halves = list[float]()
        for page in column.pages:
            models = read_page((folder / f"{page}.md").read_text(encoding="utf-8"), page, column)
            halves += [half_width(cell) for cells in models for cell in cells.values()]
            for name in models[0].keys() - CURVES_ONLY:
                zero = [number_of(cells["tis"]) if column.to_tis else 0.0 for cells in models]
                mean = sum(number_of(cells[name]) - z for cells, z in zip(models, zero, strict=True)) / len(models)
                values.setdefault((name, label), []).append(mean)
        known = [half for half in halves if not math.isnan(half)]
        widths[label] = sum(known) / len(known) if known else math.nan
    return {key: sum(some) / len(some) for key, some in values.items()}, widths


def rank(values: Mapping[Key, float], group: str) -> dict[str, float]:
    """Methods by their mean way from random maps (0) to `tis` (100) in the columns of a group."""
    ways = dict[str, list[float]]()
    for (method, label), value in values.items():
        if COLUMNS[label].group == group:
            random, tis = values.get(("random", label), 0.0), values["tis", label]
            ways.setdefault(method, []).append(100 * (value - random) / (tis - random))
    return dict(sorted(((m, sum(way) / len(way)) for m, way in ways.items()), key=lambda pair: -pair[1]))


def number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def draw(blocks: Sequence[Mapping[str, float]], values: Mapping[Key, float], file: Path) -> None:
    """The table as colours: a row for each method, the best of each block first, and a column for each test."""
    from matplotlib.figure import Figure

    methods, labels = [m for block in blocks for m in block], list(COLUMNS)
    shades = [[math.nan] * len(labels) for _ in methods]
    for column, label in enumerate(labels):
        sign = -1 if label == "Max-sensitivity" else 1
        known = sorted((m for m in methods if (m, label) in values), key=lambda m: sign * values[m, label])
        for place, method in enumerate(known):
            shades[methods.index(method)][column] = place / max(1, len(known) - 1)
    figure = Figure(figsize=(0.86 * len(labels) + 2.6, 0.2 * len(methods) + 1.9), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shades, cmap="RdYlBu", vmin=-0.15, vmax=1.15, aspect="auto")
    axes.set_xticks(range(len(labels)), [label.strip().replace(" ", "\n", 1) for label in labels], fontsize=8)
    axes.xaxis.tick_top()
    scores = [f"{m}{'*' * (m in OPTIMISES)}  {score:.0f}" for block in blocks for m, score in block.items()]
    axes.set_yticks(range(len(methods)), scores, fontsize=7)
    for row, method in enumerate(methods):
        for column, label in enumerate(labels):
            if (method, label) in values:
                axes.text(column, row, number(values[method, label]), ha="center", va="center", fontsize=6)
    groups = [column.group for column in COLUMNS.values()]
    for group in dict.fromkeys(groups):
        first, count = groups.index(group), groups.count(group)
        axes.axvline(first - 0.5, color="black", lw=1)
        axes.text(first + (count - 1) / 2, -3.1, group, ha="center", fontsize=8, weight="bold")
    axes.axhline(len(blocks[0]) - 0.5, color="black", lw=1)
    axes.set_xlabel(
        "Blue: among the best in this column. Red: among the worst. White: not measured. *: optimises deletion.\n"
        "Behind a name: mean way from random maps (0) to tis (100) on photographs; below the line, with pocket.",
        fontsize=7,
    )
    figure.savefig(file, dpi=130)


def draw_curves(run: RunTables, file: Path) -> None:
    """Faithfulness against forward passes, with 95 % intervals: a panel for each metric."""
    from matplotlib.figure import Figure

    (model,), metrics = run.models, list(run.recipe.metrics)
    figure = Figure(figsize=(4 * len(metrics), 3.4), layout="constrained")
    lines: dict[str, list[tuple[int, str]]] = {}
    for label in run.recipe.methods:
        name, _, forwards = label.rpartition(" ")
        if forwards.isdecimal():
            lines.setdefault(name, []).append((int(forwards), label))
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        scale = run.recipe.metrics[metric].scale
        for i, (name, points) in enumerate(lines.items()):
            cells = [run.by_key[model, label, metric] for _, label in sorted(points)]
            bars = [[scale * (c.mean - c.low) for c in cells], [scale * (c.high - c.mean) for c in cells]]
            x = [n * 1.03 ** (i - 3) for n, _ in sorted(points)]
            y = [scale * c.mean for c in cells]
            axes.errorbar(x, y, bars, marker="o", ms=4, lw=1.2, elinewidth=0.5, color=f"C{i}", label=name)
        for name, style in ((REFERENCE, "--"), ("random", ":")):
            level = scale * run.by_key[model, name, metric].mean
            axes.axhline(level, color="grey", ls=style, lw=1, label=f"{name} (one pass)" if style == "--" else name)
        axes.set_xscale("log", base=4)
        axes.set_xticks([64, 256, 1024], ["64", "256", "1,024"])
        axes.set_title(metric, fontsize=9)
        axes.set_xlabel("forward passes for one image", fontsize=8)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=130)


def sections(run: RunTables) -> list[str]:
    """A table for each model of a run: means with intervals, marked if they differ from `REFERENCE`."""
    lines, metrics = [f"Recipe `{run.recipe.name}`."], list(run.recipe.metrics)
    for model in run.models:
        rows, gaps = [], method_gaps(run.results, run.recipe, model, REFERENCE)
        for method in run.recipe.methods:
            texts = {metric: run.text(model, method, metric) for metric in metrics}
            signs = {metric: SIGNS[gaps[method, metric].standing] if method != REFERENCE else "" for metric in metrics}
            cells = [f"{t.mean}{f' [{t.low}, {t.high}]' * bool(t.low)}{signs[metric]}" for metric, t in texts.items()]
            rows.append([f"`{method}`", *cells])
        lines += [
            "",
            f"## {model}",
            "",
            f"{run.images(model)} images.",
            "",
            *markdown_table(["method", *metrics], rows),
        ]
    return [*lines, *(f"- {count} values failed: {why}." for why, count in run.results.failures.items()), ""]


def page(values: Mapping[Key, float], widths: Mapping[str, float]) -> tuple[list[dict[str, float]], list[str]]:
    """The methods of the chart in two blocks, measured on photographs and only elsewhere; and what follows `MADE`."""
    photographs, pocket = rank(values, PHOTOGRAPHS), rank(values, POCKET)
    blocks = [photographs, {m: score for m, score in pocket.items() if m not in photographs}]
    heads = {label: f"{label.strip()}{' (`pocket`)' * bool(column.section)}" for label, column in COLUMNS.items()}
    meanings = []
    for label, column in COLUMNS.items():
        width = "–" if math.isnan(widths[label]) else f"± {number(widths[label])}"
        links = ", ".join(f"[{name}]({name}.md)" for name in column.pages)
        meaning = f"{column.meaning}{'; minus that of `tis`' * column.to_tis}"
        meanings.append([heads[label], column.images, meaning, width, links])
    rows = [
        [f"`{m}`"]
        + [f"{scores[m]:.0f}" if m in scores else "–" for scores in (photographs, pocket)]
        + [number(values[m, c]) if (m, c) in values else "–" for c in COLUMNS]
        for block in blocks
        for m in block
    ]
    columns = markdown_table(["column", "images", "what it is", "95 % interval, about", "from"], meanings)
    table = markdown_table(["method", "photographs", "`pocket`", *heads.values()], rows)
    return blocks, [*columns, "", *table, ""]


def rewrite(file: Path, heading: str, lines: Sequence[str]) -> None:
    """Replace everything after a heading of a page."""
    words = file.read_text(encoding="utf-8").partition(heading)[0]
    write_atomic(file, "\n".join([words + heading, "", *lines]).encode())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The page of all methods, from other pages of results and from runs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    args = parser.parse_args(argv)
    if runs := [read_tables(folder) for folder in args.runs]:
        draw_curves(runs[0], args.folder / "all-methods-curves.png")
        rewrite(args.folder / f"{TABLES}.md", MADE + "s", [line for run in runs for line in sections(run)])
    values, widths = collect(args.folder)
    blocks, lines = page(values, widths)
    draw(blocks, values, args.folder / "all-methods.png")
    rewrite(args.folder / "all-methods.md", MADE, lines)


if __name__ == "__main__":
    main()
