"""Table and picture of docs/results/ground-truth.md: ``python -m tools.ground_truth_page RUN [RUN …] --out FOLDER``.

Rows are methods and columns tasks, of a run of the recipe ``ground-truth``; the best method of a task and those
tied with it (paired bootstrap over scenes) are marked as in `patchlight bench report`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from patchlight.bench.statistics import TableCell, table_cells
from patchlight.bench.store import Store
from patchlight.core.files import write_atomic
from patchlight.core.statistics import SIGNS
from patchlight.methods.requests import resolve

Cells = dict[tuple[str, str], TableCell]
"""Cells of one metric by method and task."""


def cells_of(folder: Path, metric: str) -> Cells:
    """The cells of a metric in a run."""
    store = Store(folder)
    cells = table_cells(store.results(), store.manifest().resolved)
    return {(cell.method, cell.model): cell for cell in cells if cell.metric == metric}


def order(cells: Cells) -> tuple[list[str], list[str]]:
    """Methods by their mean over tasks, the best first, and tasks in the run's order."""
    tasks = list(dict.fromkeys(task for _, task in cells))
    methods = list(dict.fromkeys(method for method, _ in cells))
    means = {method: sum(cells[method, task].mean for task in tasks) / len(tasks) for method in methods}
    return sorted(methods, key=lambda method: -means[method]), tasks


def blind(method: str) -> bool:
    """Whether a method of the recipe ignores the class."""
    return resolve(method.removesuffix(" 1024")).ignores_class


def as_markdown(cells: Cells) -> str:
    """The table: mean, its interval, and marks."""
    methods, tasks = order(cells)
    lines = [f"| method | {' | '.join(tasks)} | mean |", f"| --- |{' --- |' * (len(tasks) + 1)}"]
    for method in methods:
        own = [cells[method, task] for task in tasks]
        shown = [f"{c.mean:.2f} [{c.low:.2f}, {c.high:.2f}]{SIGNS[c.mark]}" for c in own]
        mean = sum(c.mean for c in own) / len(own)
        lines.append(f"| {method}{' (ignores the class)' * blind(method)} | {' | '.join(shown)} | {mean:.2f} |")
    return "\n".join(lines) + "\n"


def draw(cells: Cells, file: Path) -> None:
    """The table as colours: a row for each method, a column for each task."""
    from matplotlib.figure import Figure

    methods, tasks = order(cells)
    values = [[cells[method, task].mean for task in tasks] for method in methods]
    figure = Figure(figsize=(1.1 * len(tasks) + 2, 0.2 * len(methods) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(methods)), methods, fontsize=7)
    for row, own in enumerate(values):
        for column, value in enumerate(own):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color="wk"[value > 0.6])
    axes.set_xlabel("Does the map rank the patches that decide first? 1: always. Random maps: about 0.1.", fontsize=8)
    figure.savefig(file, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Table and picture of a run of the recipe ground-truth.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--metric", default="AP")
    args = parser.parse_args(argv)
    cells = {key: cell for run in args.runs for key, cell in cells_of(run, args.metric).items()}
    write_atomic(args.out / "ground-truth-table.md", as_markdown(cells).encode())
    draw(cells, args.out / "ground-truth.png")


if __name__ == "__main__":
    main()
