"""How far metrics can be trusted, from a finished run: ``python -m tools.consistency RUN [RUN ...] --out table.md``.

Of every metric of ``metric-consistency`` (or of any recipe that has a random method): how well it tells
each method from random maps, how far its order of methods is that of the other metrics, and whether the order stays the
same over fills, between models and between halves of the images. Several runs are of different models.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchlight.bench.results import Column
from patchlight.bench.store import Store
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_atomic

SPLITS = 50
"""Halvings of the images that a metric's agreement with itself is averaged over."""
PARTS = {
    "srg": {"mif": False, "lif": True},
    "road": {"morf": False, "lerf": True},
    "ins-del": {"insertion": True, "deletion": False},
}
"""By metric, the parts that are metrics of their own, and whether higher is better."""

ABOUT = (
    "`better than random`: share of images, mean over methods; `effect`: paired t / sqrt(n), mean over methods; "
    "`methods above random`: those with t > 2 on every model. The rest are Kendall's tau of the order of methods, "
    "without random: with metrics of other kinds, with the same metric and other fills, between models, and between "
    "random halves of the images."
)
Key = tuple[str, str]
"""A method and a metric."""


class Separation(NamedTuple):
    """A method against random: the share of images it is better on, ties half, the paired effect t / sqrt(n), and t."""

    share: float
    effect: float
    t: float


@dataclass(frozen=True)
class Run:
    """One model's values by method and metric, higher better everywhere; `family` is a metric without its fill."""

    values: Mapping[Key, Tensor]
    methods: Sequence[str]
    metrics: Sequence[str]
    families: Mapping[str, str]
    """By label, what is the same for a metric over several fills; `kinds`: the metric's name."""
    kinds: Mapping[str, str]

    def table(self, metric: str, methods: Sequence[str]) -> Tensor:
        """Values [methods, images] on the images where all of these have one."""
        table = torch.stack([self.values[method, metric] for method in methods])
        return table[:, table.isfinite().all(0)]


def read_runs(folders: Iterable[str | Path]) -> dict[str, Run]:
    """By model, the values of finished runs."""
    found: dict[str, Run] = {}
    for folder in folders:
        results = Store(folder).results()
        for model in results.images:
            columns = {(m, n): c for (own, m, n), c in results.columns.items() if own == model}
            name = model if model not in found else f"{model} ({Path(folder).name})"
            found[name] = run_of(columns)
    if not found:
        raise PatchlightError("nothing of these runs is done; give the folder of a run that is")
    return found


def run_of(columns: Mapping[Key, Column]) -> Run:
    """One model's columns and, where a metric is a difference of two, the two as metrics of their own."""
    values: dict[Key, Tensor] = {}
    families: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for (method, metric), column in columns.items():
        of = [(metric, "", column.values, column.higher_is_better)]
        there = column.values.isfinite()
        for part, rises in PARTS.get(column.metric, {}).items():
            if part in column.parts:
                of.append((f"{metric}: {part}", part, torch.where(there, column.parts[part], torch.nan), rises))
        for label, part, own, rises in of:
            values[method, label] = own if rises else -own
            settings = {key: value for key, value in column.settings.items() if key not in ("fill", "deletion_fill")}
            kinds[label] = column.metric
            families[label] = repr((column.metric, part, sorted(settings.items())))
    methods, metrics = (list(dict.fromkeys(key[i] for key in values)) for i in (0, 1))
    return Run(values, methods, metrics, families, kinds)


def separation(values: Tensor, chance: Tensor) -> Separation:
    """How far a method's values are above those of random maps of the same images."""
    gap = (values - chance)[(values - chance).isfinite()]
    if len(gap) < 2:
        return Separation(math.nan, math.nan, math.nan)
    share = float(((gap > 0).double() + (gap == 0).double() / 2).mean())
    spread, mean = float(gap.std()), float(gap.mean())
    effect = mean / spread if spread > 0 else math.copysign(math.inf, mean) if mean else 0.0
    return Separation(share, effect, effect * math.sqrt(len(gap)))


def agreement(one: Sequence[float] | Tensor, other: Sequence[float] | Tensor) -> float:
    """Kendall's tau-b of two orders of the same methods; NaN if one of them is not an order."""
    from scipy.stats import kendalltau

    return float(kendalltau(np.asarray(one), np.asarray(other)).statistic)


def between_halves(table: Tensor, splits: int = SPLITS, seed: int = 0) -> float:
    """The mean tau of the orders of methods by two halves of the images, of values [methods, images]."""
    generator = torch.Generator().manual_seed(seed)
    half, found = table.shape[1] // 2, []
    for _ in range(splits if half else 0):
        order = torch.randperm(table.shape[1], generator=generator)
        found.append(agreement(table[:, order[:half]].mean(1), table[:, order[half:]].mean(1)))
    return mean(found)


def mean(values: Iterable[float]) -> float:
    """The mean of those that exist; NaN where none does."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


@dataclass(frozen=True)
class Consistency:
    """What is known of one metric; taus are means over models."""

    metric: str
    separations: Mapping[str, Separation]
    share: float
    effect: float
    told: int
    others: float
    fills: float
    models: float
    halves: float


def consistency(runs: Mapping[str, Run], chance: str = "random") -> tuple[list[Consistency], dict[Key, float]]:
    """Every metric that all runs have, and the tau of each pair of them. Random maps are left out of the orders."""
    shared = [n for n in next(iter(runs.values())).metrics if all(n in run.metrics for run in runs.values())]
    methods = [m for m in next(iter(runs.values())).methods if all(m in run.methods for run in runs.values())]
    if chance not in methods:
        raise PatchlightError(
            f"no method of these runs is called '{chance}'; give --random one of {', '.join(methods)}"
        )
    methods.remove(chance)
    if len(methods) < 2:
        raise PatchlightError("there is one method beside random, and no order of one; run a recipe with several")
    tables = {(name, n): run.table(n, methods) for name, run in runs.items() for n in shared}
    means = {key: table.mean(1) for key, table in tables.items()}
    taus = {(a, b): mean(agreement(means[name, a], means[name, b]) for name in runs) for a in shared for b in shared}
    families, kinds = next(iter(runs.values())).families, next(iter(runs.values())).kinds
    found = []
    for n in shared:
        each = {
            m: pooled(separation(run.values[m, n], run.values[chance, n]) for run in runs.values()) for m in methods
        }
        kin = [other for other in shared if other != n and families[other] == families[n]]
        foreign = [other for other in shared if kinds[other] != kinds[n]]
        found.append(
            Consistency(
                n,
                each,
                mean(one.share for one in each.values()),
                mean(one.effect for one in each.values()),
                sum(one.t > 2 for one in each.values()),
                mean(taus[n, other] for other in foreign),
                mean(taus[n, other] for other in kin),
                mean(agreement(means[a, n], means[b, n]) for a, b in combinations(runs, 2)),
                mean(between_halves(tables[name, n]) for name in runs),
            )
        )
    return found, taus


def pooled(each: Iterable[Separation]) -> Separation:
    """The mean share and effect over models, and the least t."""
    known = list(each)
    return Separation(mean(s.share for s in known), mean(s.effect for s in known), min(s.t for s in known))


def as_markdown(runs: Mapping[str, Run], chance: str = "random") -> str:
    """Three tables: metrics, metrics by method, and metrics by metric."""
    found, taus = consistency(runs, chance)
    found = sorted(found, key=lambda one: -one.others if one.others == one.others else math.inf)
    methods = list(found[0].separations)
    images = ", ".join(f"{name} ({max(map(len, run.values.values()))} images)" for name, run in runs.items())
    head = ["metric", "better than random", "effect", "methods above random"]
    head += ["other metrics", "fills", "models", "halves"]
    rows = [
        [
            one.metric,
            f"{100 * one.share:.0f} %",
            number(one.effect),
            f"{one.told} of {len(methods)}",
            *map(number, (one.others, one.fills, one.models, one.halves)),
        ]
        for one in found
    ]
    names = [one.metric for one in found]
    effects = [[one.metric, *(number(one.separations[m].effect) for m in methods)] for one in found]
    return "\n".join(
        [
            f"Models: {images}. Methods: {', '.join(methods)}, against {chance}.",
            "",
            ABOUT,
            "",
            *rows_of(head, rows),
            "",
            "The effect of each method against random:",
            "",
            *rows_of(["metric", *methods], effects),
            "",
            "Kendall's tau of each pair of metrics:",
            "",
            *rows_of(["metric", *names], [[a, *(number(taus[a, b]) for b in names)] for a in names]),
            "",
        ]
    )


def rows_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number(value: float) -> str:
    return f"{value:.2f}" if value == value else "–"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Which metrics are consistent, from the folders of finished runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help="Markdown file (default: printed)")
    parser.add_argument("--random", default="random", help="label of the random method")
    args = parser.parse_args(argv)
    try:
        text = as_markdown(read_runs(args.runs), args.random)
    except PatchlightError as error:
        print(error, file=sys.stderr)
        return 2
    if args.out is None:
        print(text)
    else:
        write_atomic(args.out, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
