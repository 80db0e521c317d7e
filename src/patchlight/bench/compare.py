"""Two runs side by side: what differs between them, and the difference of every number on the images both have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.bench.statistics import SIGNS, Gap, paired_gaps
from patchlight.bench.store import Store
from patchlight.bench.tables import csv_text, markdown_table, scaled
from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import Resamples
from patchlight.metrics.base import Evaluation
from patchlight.study.ranking import SAMPLES

Key = tuple[str, str, str]
"""The labels of a model, a method and a metric."""
Pair = tuple[Evaluation, Evaluation]
LEGEND = (
    "On the images where both have a value; [95 % interval of the paired bootstrap difference over images]; ▲ the "
    "second is better at 5 %, ▼ worse"
)


PLACES = {"weights", "labels", "stands_for"}
"""What a model has that says where things are: the hash of the model as it was loaded says what they are."""
SHOWN = {"scale", "digits"}
"""What a metric has that says how its values are printed."""


@dataclass(frozen=True)
class Difference:
    """A sentence; `apart` says that because of it, values of one run are not values of the other.

    `about` says what it is about, where that is one model, method or metric: which of these, and its label.
    """

    told: str
    apart: bool = True
    about: tuple[str, str] | None = None


@dataclass(frozen=True)
class Compared:
    """A method under a metric on a model in both runs, on the images where both have a value.

    `equal` on how many images they are the same to the bit. `note` names what is not the same in both.
    """

    model: str
    method: str
    metric: str
    gap: Gap
    equal: int
    note: str

    def about(self) -> dict[str, Any]:
        """The same as names and numbers."""
        own = {"model": self.model, "method": self.method, "metric": self.metric, **asdict(self.gap)}
        standing = own.pop("standing")
        return {**own, "equal": self.equal, "standing": standing, "note": self.note}


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
    gaps = paired_gaps(pairs, Resamples(len(a), samples))
    compared = tuple(Compared(*key, gaps[key], _equal(pair), _note(key, told)) for key, pair in pairs.items())
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
        if bool((pair[0].exist & pair[1].exist).any()):
            yield key, pair


def _equal(pair: Pair) -> int:
    """On how many images two evaluations are the same to the bit."""
    return int((pair[0].values == pair[1].values).sum())


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
    spec, gap = found.recipe.metrics[one.metric], one.gap
    interval = "" if math.isnan(gap.low) else f" [{scaled(gap.low, spec)}, {scaled(gap.high, spec)}]"
    difference = f"{scaled(gap.difference, spec, '+')}{interval}{SIGNS[gap.standing]}"
    difference = "equal" if one.equal == gap.images else difference
    metric = f"{one.metric} {found.arrows[one.metric]}"
    return [
        one.method,
        metric,
        scaled(gap.first, spec),
        scaled(gap.second, spec),
        difference,
        str(gap.images),
        one.note,
    ]


def as_csv(found: SideBySide) -> str:
    """A line for each model, method and metric, unscaled and in full precision."""
    rows = [one.about() for one in found.compared]
    return csv_text(list(rows[0]), [list(row.values()) for row in rows])


def as_json(found: SideBySide) -> dict[str, Any]:
    """The same as tables of words and numbers."""
    return {
        "first": found.first,
        "second": found.second,
        "images": found.images,
        "differences": [one.told for one in found.differences],
        "compared": [one.about() for one in found.compared],
    }


def differences(first: Manifest, second: Manifest, a: str, b: str) -> list[Difference]:
    """What differs between two runs that are called `a` and `b`; what keeps them apart comes first."""
    found = [*_of_run(first, second, a, b), *_of_images(first, second, a, b), *_of_parts(first, second, a, b)]
    return sorted(found, key=lambda one: not one.apart)


def _of_run(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    """What is said once of a run."""
    version = first.versions.get("patchlight", "?")

    def facts(run: Manifest) -> dict[str, object]:
        recipe, own = run.resolved, run.versions.get("patchlight", "?")
        return {
            "the recipe": recipe.name,
            "the version of Patchlight": own,
            f"the code of Patchlight {version}, by its hash,": run.code if own == version else first.code,
            "the seed": recipe.seed,
            "the target": recipe.target,
            "the kind of device": run.device.partition(":")[0],
            "the kind of data": recipe.data.kind,
            "options of the data": _told(recipe.data.meaning),
            "the hash of the data's classes": run.classes,
        }

    def circumstances(run: Manifest) -> dict[str, object]:
        versions = {name: own for name, own in sorted(run.versions.items()) if name != "patchlight"}
        settings = {"made with quick settings": run.quick, "variants scored at once": run.chunk, "threads": run.threads}
        return {**settings, **versions}

    for what, x, y in _unequal(facts(first), facts(second)):
        yield Difference(f"{what} is {x} in {a} and {y} in {b}")
    for what, x, y in _unequal(circumstances(first), circumstances(second)):
        yield Difference(f"{what}: {_told(x)} in {a} and {_told(y)} in {b}", apart=False)


def _unequal(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """The names whose values are not the same in both, and these."""
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _of_images(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    one, other = (dict(zip(run.images.names, run.images.contents, strict=True)) for run in (first, second))
    for names, without, here, there in ((one, other, a, b), (other, one, b, a)):
        missing = [name for name in names if name not in without]
        if missing:
            yield Difference(f"{len(missing)} of the {len(names)} images of {here} are not in {there}: '{missing[0]}'")
    changed = [name for name, content in one.items() if other.get(name, content) != content]
    if changed:
        yield Difference(f"{len(changed)} images of {a} have other contents in {b}: '{changed[0]}'")


def _of_parts(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    """Models, methods and metrics of one label that are not the same, and those that only one run has."""
    same: dict[str, list[str]] = {}
    for what, hidden in (("model", PLACES), ("method", set[str]()), ("metric", SHOWN)):
        one, other = (
            {
                label: spec.model_dump(mode="json", exclude=hidden, exclude_defaults=True)
                for label, spec in getattr(run.resolved, f"{what}s").items()
            }
            for run in (first, second)
        )
        for label in one:
            if one[label] != other.get(label, one[label]):
                sentence = f"{what} '{label}' is {_told(one[label])} in {a} and {_told(other[label])} in {b}"
                yield Difference(sentence, about=(what, label))
        for names, there, here in ((one, other, a), (other, one, b)):
            only = ", ".join(f"'{label}'" for label in names if label not in there)
            if only:
                yield Difference(f"{what}s that only {here} has: {only}", apart=False)
        same[what] = [label for label in one if one[label] == other.get(label)]
    for label in first.resolved.models:
        x, y = first.models.get(label), second.models.get(label)
        if label in second.resolved.models and x != y:
            what = f"model '{label}' (weights, configuration, preprocessing or class names)"
            yield Difference(f"{what} has the hash {x} in {a} and {y} in {b}", about=("model", label))
    for label in same["method"]:  # called and set alike: where its hash differs, its code does
        for metric in same["metric"]:
            x, y = (run.made.get(label, {}).get(metric) for run in (first, second))
            if x != y:
                sentence = (
                    f"the code of method '{label}' or of metric '{metric}' has the hash {x} in {a} and {y} in {b}"
                )
                yield Difference(sentence, about=("method", label))
                break


def _told(value: object) -> str:
    """A value of a recipe in words: `{"method": "rollout"}` as rollout, other tables as JSON."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("name", "method", "metric"):
        return f"'{next(iter(value.values()))}'"
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
