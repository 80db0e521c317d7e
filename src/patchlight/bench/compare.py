"""Two runs side by side: what differs between them, and the difference of every number on the images both have."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.bench.differences import Difference, differences
from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.bench.statistics import SIGNS, Standing, standing
from patchlight.bench.store import Store
from patchlight.bench.tables import markdown_table
from patchlight.core.errors import PatchlightError
from patchlight.core.files import cell as csv_cell
from patchlight.core.statistics import FEWEST, Resamples, percentiles
from patchlight.metrics.base import Evaluation
from patchlight.study.ranking import SAMPLES

Key = tuple[str, str, str]
"""The labels of a model, a method and a metric."""
Pair = tuple[Evaluation, Evaluation]
LEGEND = (
    "On the images where both have a value; [95 % interval of the paired bootstrap difference over images]; ▲ the "
    "second is better at 5 %, ▼ worse"
)


@dataclass(frozen=True)
class Compared:
    """A method under a metric on a model in both runs, on the images where both have a value.

    `difference` is the second run's number less the first's, `equal` on how many images they are the same to the bit;
    `standing` is told where the interval is without 0. `note` names what is not the same in both. The interval is NaN
    where fewer than six images have both.
    """

    model: str
    method: str
    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    images: int
    equal: int
    standing: Standing
    note: str


@dataclass(frozen=True)
class SideBySide:
    """Two runs, what differs between them, and what their numbers say."""

    first: str
    second: str
    recipe: Recipe
    images: int
    differences: tuple[Difference, ...]
    compared: tuple[Compared, ...]
    arrows: Mapping[str, str]


def compare(first: str | Path, second: str | Path, samples: int = SAMPLES) -> SideBySide:
    """Compare two runs on the images both have, by name and content; refused where they have nothing in common."""
    stores = Store(first), Store(second)
    one, other = (store.manifest() for store in stores)
    a, b = _images_of_both(one, other)
    if not len(a):
        raise PatchlightError(f"'{first}' and '{second}' have no image in common, by name and content")
    pairs = dict(_pairs(stores[0].results(), stores[1].results(), a, b))
    if not pairs:
        raise PatchlightError(f"'{first}' and '{second}' have no model, method and metric in common that are done")
    told = differences(one, other, f"'{first}'", f"'{second}'")
    spread = _bootstrapped(pairs, Resamples(len(a), samples))
    compared = tuple(_compared(key, pair, spread[key], _note(key, told)) for key, pair in pairs.items())
    arrows = {metric: pair[0].arrow for (_, _, metric), pair in pairs.items()}
    return SideBySide(str(first), str(second), one.resolved, len(a), tuple(told), compared, arrows)


def _images_of_both(first: Manifest, second: Manifest) -> tuple[Tensor, Tensor]:
    """The places, in each run, of the images that both have."""
    mine, theirs = (
        {image: i for i, image in enumerate(zip(own.images.names, own.images.contents, strict=True))}
        for own in (first, second)
    )
    places = torch.tensor([(i, theirs[image]) for image, i in mine.items() if image in theirs], dtype=torch.long)
    return tuple(places.reshape(-1, 2).unbind(1))  # type: ignore[return-value]


def _pairs(first: Results, second: Results, a: Tensor, b: Tensor) -> Iterator[tuple[Key, Pair]]:
    """What both runs have, on the same images."""
    for key, column in first.columns.items():
        other = second.columns.get(key)
        if other is None or column.metric != other.metric:
            continue
        pair = _on(column, a), _on(other, b)
        if bool(_both(pair).any()):
            yield key, pair


def _on(column: Evaluation, places: Tensor) -> Evaluation:
    """An evaluation of some of its images."""
    return Evaluation(
        column.metric,
        column.values[places],
        column.higher_is_better,
        column.bounds,
        parts={name: part[places] for name, part in column.parts.items()},
        combine=column.combine,
    )


def _both(pair: Pair) -> Tensor:
    """The images [B] for which both have a value."""
    return pair[0].exist & pair[1].exist


def _bootstrapped(pairs: Mapping[Key, Pair], resamples: Resamples) -> dict[Key, Tensor]:
    """The second's number less the first's [S], of the same resamples of the images both have a value for."""
    both = [_both(pair) for pair in pairs.values()]
    first, second = (
        resamples.numbers([(pair[i], counts) for pair, counts in zip(pairs.values(), both, strict=True)])
        for i in (0, 1)
    )
    return {key: b - a for key, a, b in zip(pairs, first, second, strict=True)}


def _compared(key: Key, pair: Pair, spread: Tensor, note: str) -> Compared:
    one, other = pair
    both = _both(pair)
    count = int(both.sum())
    first, second = (float(own.resampled(both.double()[None])[0]) for own in pair)
    low, high = percentiles(spread) if count >= FEWEST else (math.nan, math.nan)
    equal = int((one.values == other.values)[both].sum())
    stands = standing(low, high, one.higher_is_better)
    return Compared(*key, first, second, second - first, low, high, count, equal, stands, note)


def _note(key: Key, told: Sequence[Difference]) -> str:
    """What is not the same in both runs: the model, the method or the metric, where something about them differs."""
    other = {one.about for one in told if one.apart}
    named = zip(("model", "method", "metric"), key, strict=True)
    return ", ".join(f"other {what}" for what, label in named if (what, label) in other)


def as_markdown(found: SideBySide) -> str:
    """What differs, then a table for each model."""
    lines = [f"# {found.recipe.name}: {found.first} and {found.second}", ""]
    same = ["- Recipe, images, models, versions and code are the same."]
    lines += [f"- {one.told}." for one in found.differences] or same
    lines += ["", f"{found.images} image(s) in both. {LEGEND}.", ""]
    models = dict.fromkeys(one.model for one in found.compared)
    for model in models:
        rows = [_row(found, one) for one in found.compared if one.model == model]
        head = ["method", "metric", found.first, found.second, "difference", "images", "note"]
        lines += [f"## {model}", "", *markdown_table(head, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(found: SideBySide, one: Compared) -> list[str]:
    spec = found.recipe.metrics[one.metric]

    def number(value: float, sign: str = "") -> str:
        return "–" if math.isnan(value) else f"{value * spec.scale:{sign}.{spec.digits}f}"

    interval = "" if math.isnan(one.low) else f" [{number(one.low)}, {number(one.high)}]"
    difference = "equal" if one.equal == one.images else f"{number(one.difference, '+')}{interval}{SIGNS[one.standing]}"
    metric = f"{one.metric} {found.arrows[one.metric]}"
    return [one.method, metric, number(one.first), number(one.second), difference, str(one.images), one.note]


def as_csv(found: SideBySide) -> str:
    """A line for each model, method and metric, unscaled and in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f.name for f in fields(Compared)])
    for one in found.compared:
        writer.writerow([_plain(value) for value in asdict(one).values()])
    return out.getvalue()


def _plain(value: Any) -> Any:
    return "" if isinstance(value, float) and math.isnan(value) else csv_cell(value)


def as_json(found: SideBySide) -> dict[str, Any]:
    """The same as tables of words and numbers."""
    return {
        "first": found.first,
        "second": found.second,
        "images": found.images,
        "differences": [one.told for one in found.differences],
        "compared": [asdict(one) for one in found.compared],
    }
