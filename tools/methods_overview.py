"""The page docs/results/all-methods.md: ``python -m tools.methods_overview docs/results``.

It combines the measurements of other result pages: a row per method, a column per test. The chart and everything after
the line `MADE` are regenerated; the text before it is not changed. ``tools.all_methods_page`` writes the page from a
run of the recipe ``all-methods`` instead.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchlight.bench.tables import markdown_table
from patchlight.core.files import write_atomic
from tools.all_methods_page import draw, number

NAMES = {
    "posterior": "posterior 128",
    "TIS": "tis",
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
Key = tuple[str, str]
"""A method and a column."""


@dataclass(frozen=True)
class Column:
    """A test: the pages that measured it, its name there, and whether values are differences to `tis`."""

    pages: tuple[str, ...]
    there: str
    images: str
    meaning: str
    to_tis: bool = False
    faithful: bool = False


FAITHFULNESS = ("posterior", "compare-faithfulness")
COLUMNS = {
    "Δ mean": Column(FAITHFULNESS, "Δ mean", "250 + 250", "insertion minus deletion over the image's mean", True, True),
    "Δ blur": Column(FAITHFULNESS, "Δ blur", "250 + 250", "the same over a blur", True, True),
    "Token deletion": Column(
        ("posterior",), "Token deletion", "250", "predictions that change without the highest tokens, in %", True, True
    ),
    "SRG": Column(
        ("metric-consistency",),
        "SRG mean",
        "250",
        "area while the lowest patches are removed minus the highest; effect against random maps (paired t / sqrt n)",
        faithful=True,
    ),
    "Pointing game": Column(("compare-localisation",), "Pointing game", "388", "the highest point is in the box"),
    "AP pets": Column(("compare-segmentation", "posterior"), "AP", "370", "average precision of the animal's outline"),
    "Max-sensitivity": Column(("tis-table-4",), "Same seed", "32", "change under small noise; lower is better"),
    "Ground truth": Column(
        ("ground-truth",), "mean", "56 scenes", "the patches that decide come first (`posterior`, `tis`: 64 masks)"
    ),
}
MADE = "## The table"


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
    if found := re.search(r"± (\d*\.?\d+)", cell):
        return float(found[1])
    ends = re.search(r"\[(\S+), (\S+)\]", cell)
    return (float(ends[2]) - float(ends[1])) / 2 if ends else math.nan


def read_page(text: str, page: str, column: Column) -> list[dict[str, str]]:
    """By method, the cells of a column: of both models, or of the one table that has the mean of both."""
    found = list[dict[str, str]]()
    for rows in tables(text):
        if page == "metric-consistency":
            found += [
                row for row in rows if row.get("metric") == column.there and "genatt" in row and "effect" not in row
            ]
        elif rows and "method" in rows[0] and column.there in rows[0]:
            names = [re.sub(r" \(.*", "", row["method"]) for row in rows]
            found.append({name: row[column.there] for name, row in zip(names, rows, strict=True)})
    found = found[:1] if page in ("metric-consistency", "ground-truth") else found[:2]
    return [{NAMES.get(name, name): cell for name, cell in cells.items() if name != "metric"} for cells in found]


def collect(folder: Path) -> tuple[dict[Key, float], dict[str, float]]:
    """Values by method and column, means over models and pages; and by column the mean half of the intervals."""
    values, widths = dict[Key, list[float]](), dict[str, float]()
    for label, column in COLUMNS.items():
        halves = list[float]()
        for page in column.pages:
            models = read_page((folder / f"{page}.md").read_text(encoding="utf-8"), page, column)
            halves += [half_width(cell) for cells in models for cell in cells.values()]
            for name in models[0]:
                zero = [number_of(cells["tis"]) if column.to_tis else 0.0 for cells in models]
                mean = sum(number_of(cells[name]) - z for cells, z in zip(models, zero, strict=True)) / len(models)
                values.setdefault((name, label), []).append(mean)
        known = [half for half in halves if not math.isnan(half)]
        widths[label] = sum(known) / len(known) if known else math.nan
    return {key: sum(some) / len(some) for key, some in values.items()}, widths


def rank(values: Mapping[Key, float]) -> dict[str, float]:
    """Methods with at least two tests, by their mean way from random maps (0) to `tis` (100) in faithfulness."""
    ways = dict[str, list[float]]()
    for (method, label), value in values.items():
        if COLUMNS[label].faithful:
            random, tis = values.get(("random", label), 0.0), values["tis", label]
            ways.setdefault(method, []).append(100 * (value - random) / (tis - random))
    order = {
        m: sum(way) / len(way) for m, way in ways.items() if m == "random" or sum((m, c) in values for c in COLUMNS) > 1
    }
    return dict(sorted(order.items(), key=lambda pair: -pair[1]))


def page(folder: Path) -> str:
    """The page; its picture is written to the folder."""
    values, widths = collect(folder)
    order = rank(values)
    note = "Behind a name: the way from random maps (0) to tis (100), left of the line. White: not measured."
    draw(order, list(COLUMNS), values, folder / "all-methods.png", note)
    lines = []
    for label, column in COLUMNS.items():
        width = "–" if math.isnan(widths[label]) else f"± {number(widths[label])}"
        links = ", ".join(f"[{name}]({name}.md)" for name in column.pages)
        lines.append([label, column.images, f"{column.meaning}{'; minus that of `tis`' * column.to_tis}", width, links])
    rows = [
        [f"`{m}`", f"{place:.0f}", *(number(values[m, c]) if (m, c) in values else "–" for c in COLUMNS)]
        for m, place in order.items()
    ]
    words = (folder / "all-methods.md").read_text(encoding="utf-8").partition(MADE)[0]
    columns = markdown_table(["column", "images", "what it is", "95 % interval, about", "from"], lines)
    return "\n".join(
        [words + MADE, "", *columns, "", *markdown_table(["method", "random 0, `tis` 100", *COLUMNS], rows), ""]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The page of all methods, from the other pages of results.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    write_atomic(folder / "all-methods.md", page(folder).encode())


if __name__ == "__main__":
    main()
