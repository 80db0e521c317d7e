"""Page and pictures of docs/results/all-methods.md: ``python -m tools.all_methods_page RUN [RUN …] --out FOLDER``.

RUN are finished runs of the recipes ``all-methods`` and, optionally, ``all-methods-sensitivity``, ``equal-budget`` and
``ground-truth``. Methods are ordered by their mean rank over the faithfulness tests of both models. The sentences of
the page follow from the numbers; add what they mean.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from patchlight.bench.store import Store
from patchlight.bench.tables import RunTables, markdown_table, read_tables
from patchlight.core.files import write_atomic
from patchlight.core.statistics import SIGNS
from patchlight.methods.requests import resolve

FAITHFUL = ("Δ mean", "Δ blur", "SRG", "Token deletion")
"""Metrics that decide the order."""
PLACES = ("Pointing game", "AP in boxes")
OPTIMISES = ("search", "search 1024", "mda")
"""Methods that optimise insertion and deletion over their own removals."""
MEANING = {
    "Δ mean": "insertion minus deletion over the image's mean",
    "Δ blur": "insertion minus deletion over a blur",
    "SRG": "the gap between removing the least and the most important patches first",
    "Token deletion": "share of predictions that change when the highest tokens are dropped",
    "Pointing game": "the highest patch is in the object's box",
    "AP in boxes": "the patches in the box come first",
    "Max-sensitivity": "change of the map under small noise, lower is better",
    "Ground truth": "the patches that decide come first, mean of the tasks with a known cause",
}
Values = Mapping[tuple[str, str], float]
"""A number by method and metric."""


def mean_ranks(run: RunTables, metrics: Sequence[str]) -> dict[str, float]:
    """By method, the rank over images (1 is best), averaged over these metrics and all models."""
    ranks = [
        run.ranks[model, metric].means for model in run.models for metric in metrics if (model, metric) in run.ranks
    ]
    return {m: sum(rank[m] for rank in ranks) / len(ranks) for m in run.recipe.methods if all(m in r for r in ranks)}


def averages(run: RunTables, metric: str, label: str = "") -> dict[tuple[str, str], float]:
    """By method, a metric averaged over the models."""
    cells = {method: [run.by_key[model, method, metric].mean for model in run.models] for method in run.recipe.methods}
    scale = run.recipe.metrics[metric].scale
    return {(method, label or metric): scale * sum(values) / len(values) for method, values in cells.items()}


def places(values: Values, metric: str) -> dict[str, float]:
    """By method, its place from 0 (worst) to 1 (best) under a metric."""
    sign = -1 if metric == "Max-sensitivity" else 1
    known = {method: sign * v for (method, name), v in values.items() if name == metric and not math.isnan(v)}
    order = sorted(known, key=lambda method: known[method])
    return {method: i / max(1, len(order) - 1) for i, method in enumerate(order)}


def draw(
    order: Mapping[str, float],
    metrics: Sequence[str],
    values: Values,
    file: Path,
    note: str = "Behind a name: mean rank in the columns left of the line.",
) -> None:
    """The table as colours: a row for each method, the best first, and a column for each metric."""
    from matplotlib.figure import Figure

    methods = list(order)
    columns = {metric: places(values, metric) for metric in metrics}
    shades = [[columns[metric].get(method, math.nan) for metric in metrics] for method in methods]
    figure = Figure(figsize=(1.05 * len(metrics) + 3.2, 0.21 * len(methods) + 1.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shades, cmap="RdYlBu", vmin=-0.15, vmax=1.15, aspect="auto")
    axes.set_xticks(range(len(metrics)), [metric.replace(" ", "\n", 1) for metric in metrics], fontsize=8)
    axes.xaxis.tick_top()
    names = [f"{method}{' (optimises deletion)' * (method in OPTIMISES)}  {rank:.1f}" for method, rank in order.items()]
    axes.set_yticks(range(len(methods)), names, fontsize=7)
    for row, method in enumerate(methods):
        for column, metric in enumerate(metrics):
            value = values.get((method, metric), math.nan)
            if not math.isnan(value):
                axes.text(column, row, number(value), ha="center", va="center", fontsize=6)
    axes.axvline(len([metric for metric in metrics if metric in FAITHFUL]) - 0.5, color="black", lw=1)
    axes.set_xlabel(
        f"Blue: among the best in this column. Red: among the worst.\n{note}",
        fontsize=7,
    )
    figure.savefig(file, dpi=130)


def number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def draw_curves(run: RunTables, file: Path) -> None:
    """Faithfulness against forward passes: a row for each model, a column for each metric, 95 % intervals."""
    from matplotlib.figure import Figure

    metrics = list(run.recipe.metrics)
    figure = Figure(figsize=(3.6 * len(metrics), 3 * len(run.models)), layout="constrained")
    grid = figure.subplots(len(run.models), len(metrics), squeeze=False)
    for row, model in enumerate(run.models):
        for column, metric in enumerate(metrics):
            axes = grid[row][column]
            lines: dict[str, list[tuple[int, str]]] = {}
            for label in run.recipe.methods:
                name, _, forwards = label.rpartition(" ")
                if forwards.isdecimal():
                    lines.setdefault(name, []).append((int(forwards), label))
            scale = run.recipe.metrics[metric].scale
            for i, (name, points) in enumerate(lines.items()):
                if points[0][0] == 1:
                    level = scale * run.by_key[model, points[0][1], metric].mean
                    axes.axhline(level, color="grey", ls="--", lw=1, label=f"{name} (one pass)")
                    continue
                cells = [run.by_key[model, label, metric] for _, label in points]
                x, y = [n for n, _ in points], [scale * c.mean for c in cells]
                bars = [[scale * (c.mean - c.low) for c in cells], [scale * (c.high - c.mean) for c in cells]]
                axes.errorbar(x, y, bars, marker="o", ms=4, lw=1.2, elinewidth=0.5, color=f"C{i}", label=name)
            axes.set_xscale("log", base=4)
            axes.set_xticks([64, 256, 1024, 4096], ["64", "256", "1,024", "4,096"])
            axes.set_title(f"{metric}, {model}", fontsize=9)
    grid[-1][0].set_xlabel("forward passes for one image")
    grid[0][-1].legend(fontsize=7)
    figure.savefig(file, dpi=130)


def table(run: RunTables, model: str, order: Mapping[str, float]) -> list[str]:
    """A model's means, intervals and marks."""
    metrics, rows = list(run.recipe.metrics), []
    for method in order:
        texts = [run.text(model, method, metric) for metric in metrics]
        cells = [f"{t.mean} [{t.low}, {t.high}]{SIGNS[t.mark]}{f' ({t.count})' if t.count else ''}" for t in texts]
        rows.append([f"`{method}`", *cells])
    return markdown_table(["method", *metrics], rows)


def sentences(run: RunTables, order: Mapping[str, float]) -> list[str]:
    """What the numbers say: the first methods, the best one-pass method, leaders, and who is not above random."""
    names = list(order)
    critical = max(rank.critical for rank in run.ranks.values())
    one_pass = [m for m in names if run.recipe.methods[m].request.in_pass]
    fair = [m for m in names if m not in OPTIMISES]

    def listed(some: Sequence[str]) -> str:
        return ", ".join(f"`{m}` ({order[m]:.1f})" for m in some[:3])

    lines = [
        f"- **First by mean rank** of {len(names)} methods: {listed(names)}; random maps have "
        f"{order.get('random', math.nan):.1f}. In one column, ranks that are closer than {critical:.1f} do not differ "
        "significantly.",
        f"- **Without methods that optimise deletion**: {listed(fair)}.",
        f"- **In one forward and backward pass**: {listed(one_pass)}.",
    ]
    for metric in run.recipe.metrics:
        parts = []
        for model in run.models:
            cells = {m: run.by_key[model, m, metric] for m in names}
            best = [m for m, c in cells.items() if c.mark == "best"]
            tied = [m for m, c in cells.items() if c.mark == "tied"]
            leader = max(cells, key=lambda m: -math.inf if math.isnan(cells[m].mean) else cells[m].mean)
            lead = f"`{best[0] if best else leader}` ({run.number(cells[best[0] if best else leader].mean, metric)})"
            parts.append(f"{lead} on {model}" + (f", not separated from {len(tied)} others" if tied else ""))
        lines.append(f"- **{metric}** ({MEANING.get(metric, '')}): {'; '.join(parts)}.")
    chance = {(model, metric): run.by_key[model, "random", metric].high for model in run.models for metric in FAITHFUL}
    weak = [
        m for m in names
        if m != "random" and any(run.by_key[model, m, metric].low <= high for (model, metric), high in chance.items())
    ]  # fmt: skip
    if weak:
        lines.append(f"- **Not above random** in at least one faithfulness test: {', '.join(f'`{m}`' for m in weak)}.")
    return lines


def page(runs: Mapping[str, RunTables], out: Path) -> str:
    """The page; its pictures are written to `out`."""
    main = runs["all-methods"]
    order = dict(sorted(mean_ranks(main, FAITHFUL).items(), key=lambda pair: pair[1]))
    metrics = list(main.recipe.metrics)
    values = {key: v for metric in metrics for key, v in averages(main, metric).items()}
    for name, metric, label in (
        ("all-methods-sensitivity", "Max-sensitivity", "Max-sensitivity"), ("ground-truth", "AP", "Ground truth"),
    ):  # fmt: skip
        if name in runs:
            more = averages(runs[name], metric, label)
            values |= {key: v for key, v in more.items() if key[0] in order}
            metrics.append(label)
    draw(order, metrics, values, out / "all-methods.png")
    images = {model: main.images(model) for model in main.models}
    shown = " and ".join(f"{count} images with `{model}`" for model, count in images.items())
    lines = ["# All methods in one table", ""]
    lines += [f"{len(order)} methods, {len(metrics)} tests, {shown}; the predicted class is explained.", ""]
    lines += [*sentences(main, order), "", "![Methods and tests](all-methods.png)", ""]
    lines += ["Numbers are means over both models. What the columns mean:", ""]
    lines += [f"- **{metric}**: {MEANING[metric]}." for metric in metrics if metric in MEANING]
    lines += ["", "## Mean ranks", "", "Over images; 1 is the best.", ""]
    heads = [f"{metric}, {model}" for metric in main.recipe.metrics for model in main.models]
    keys = [(model, metric) for metric in main.recipe.metrics for model in main.models]
    rows = [
        [f"`{m}`", str(resolve_cost(main, m)), f"{rank:.1f}"]
        + [
            f"{main.ranks[key].means[m]:.1f}" if key in main.ranks and m in main.ranks[key].means else "–"
            for key in keys
        ]
        for m, rank in order.items()
    ]
    lines += markdown_table(["method", "cost for one image", "mean rank, faithfulness", *heads], rows)
    if "equal-budget" in runs:
        draw_curves(runs["equal-budget"], out / "all-methods-curves.png")
        lines += ["", "## At equal cost", "", "![Faithfulness against forward passes](all-methods-curves.png)", ""]
        for model in runs["equal-budget"].models:
            methods = dict.fromkeys(runs["equal-budget"].recipe.methods, 0.0)
            lines += [f"{runs['equal-budget'].caption(model)} {model}:", ""]
            lines += [*table(runs["equal-budget"], model, methods), ""]
    for model in main.models:
        lines += ["", f"## All values, {model}", "", main.caption(model), "", *table(main, model, order)]
    lines += [f"\n- {count} values failed: {reason}." for reason, count in main.results.failures.items()]
    commands = "\n".join(f"patchlight bench run {name} --images DATA/imagenet-val-1000 --device cuda --out runs/{name}"
                         for name in runs)  # fmt: skip
    lines += ["", "## Commands", "", "```", commands]
    lines += [
        f"python -m tools.all_methods_page {' '.join(f'runs/{name}' for name in runs)} --out docs/results",
        "```",
        "",
    ]
    return "\n".join(lines)


def resolve_cost(run: RunTables, method: str) -> str:
    """What a method costs for one image, as `patchlight methods` says."""
    return resolve(run.recipe.methods[method].method).method.cost


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The page of all methods, from finished runs.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    args = parser.parse_args(argv)
    runs = {Store(folder).manifest().resolved.name: read_tables(folder) for folder in args.runs}
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomic(args.out / "all-methods.md", page(runs, args.out).encode())


if __name__ == "__main__":
    main()
