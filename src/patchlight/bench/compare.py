"""Compares two runs: their recipes, images and versions, and every number on shared images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.bench.manifest import Manifest
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import Results
from patchlight.bench.statistics import Gap, paired_gaps
from patchlight.bench.store import Store
from patchlight.bench.tables import format_gap, format_value, markdown_table
from patchlight.core.errors import PatchlightError
from patchlight.core.files import csv_text
from patchlight.core.statistics import Resamples
from patchlight.core.text import plural
from patchlight.metrics.base import Evaluation
from patchlight.study.ranking import SAMPLES

Key = tuple[str, str, str]
"""The labels of a model, a method and a metric."""
Pair = tuple[Evaluation, Evaluation]
LEGEND = (
    "On the images where both have a value; [95 % interval of the paired bootstrap difference over images]; ▲ the "
    "second is better at 5 %, ▼ worse"
)
IGNORED = {"model": {"weights", "labels", "stands_for"}, "method": set[str](), "metric": {"scale", "digits"}}
"""Settings that do not change values: paths (the model's hash covers the content) and number formats."""


@dataclass(frozen=True)
class Difference:
    """A difference between two runs, in one sentence.

    `incompatible` means that values of the runs cannot be mixed. `subject` is the model, method or metric that differs,
    as its kind and label.
    """

    text: str
    incompatible: bool = True
    subject: tuple[str, str] | None = None


@dataclass(frozen=True)
class ComparedCell:
    """A method under a metric on a model in both runs; `equal` counts images with bit-identical values."""

    model: str
    method: str
    metric: str
    gap: Gap
    equal: int
    note: str

    def as_dict(self) -> dict[str, Any]:
        """Names and numbers in the order of the CSV."""
        gap = asdict(self.gap)
        standing = gap.pop("standing")
        names = {"model": self.model, "method": self.method, "metric": self.metric}
        return {**names, **gap, "equal": self.equal, "standing": standing, "note": self.note}


@dataclass(frozen=True)
class RunComparison:
    """Two runs, their differences and their numbers; `incomplete` has a sentence for each incomplete run."""

    first: str
    second: str
    recipe: Recipe
    images: int
    incomplete: tuple[str, ...]
    differences: tuple[Difference, ...]
    cells: tuple[ComparedCell, ...]
    arrows: Mapping[str, str]


def compare(first: str | Path, second: str | Path) -> RunComparison:
    """Compare two runs on the images both have, by name and content.

    Raises:
        PatchlightError: If the runs have no image, or no model, method and metric, in common.
    """
    stores = Store(first), Store(second)
    manifests = [store.manifest() for store in stores]
    a, b = _shared_images(*manifests)
    if not len(a):
        raise PatchlightError(f"'{first}' and '{second}' have no image in common, by name and content")
    results = [store.results() for store in stores]
    pairs = dict(_pairs(results[0], results[1], a, b))
    if not pairs:
        raise PatchlightError(f"'{first}' and '{second}' have no finished model, method and metric in common")
    incomplete = (
        m.incomplete(r.done, f" in '{f}'") for m, r, f in zip(manifests, results, (first, second), strict=True)
    )
    run_differences = differences(manifests[0], manifests[1], f"'{first}'", f"'{second}'")
    gaps = paired_gaps(pairs, Resamples(len(a), SAMPLES))
    cells = [
        ComparedCell(*key, gaps[key], int((x.values == y.values).sum()), _note(key, run_differences))
        for key, (x, y) in pairs.items()
    ]
    arrows = {metric: pair[0].arrow for (_, _, metric), pair in pairs.items()}
    missing = tuple(filter(None, incomplete))
    recipe = manifests[0].resolved
    return RunComparison(str(first), str(second), recipe, len(a), missing, tuple(run_differences), tuple(cells), arrows)


def _shared_images(first: Manifest, second: Manifest) -> tuple[Tensor, Tensor]:
    """The indices, in each run, of the images that both have."""
    mine, theirs = (
        {image: i for i, image in enumerate(zip(run.images.names, run.images.contents, strict=True))}
        for run in (first, second)
    )
    places = torch.tensor([(i, theirs[image]) for image, i in mine.items() if image in theirs], dtype=torch.long)
    return tuple(places.reshape(-1, 2).unbind(1))  # type: ignore[return-value]


def _pairs(first: Results, second: Results, a: Tensor, b: Tensor) -> Iterator[tuple[Key, Pair]]:
    """The columns that both runs have, on the shared images."""
    for key, column in first.columns.items():
        other = second.columns.get(key)
        if other is None or column.metric != other.metric:
            continue
        pair = _on_images(column, a), _on_images(other, b)
        if bool((pair[0].exist & pair[1].exist).any()):
            yield key, pair


def _on_images(column: Evaluation, places: Tensor) -> Evaluation:
    """An evaluation restricted to some images."""
    return Evaluation(
        column.metric,
        column.values[places],
        column.higher_is_better,
        column.bounds,
        parts={name: part[places] for name, part in column.parts.items()},
        combine=column.combine,
    )


def _note(key: Key, run_differences: Sequence[Difference]) -> str:
    """Which of the model, the method and the metric differ between the runs."""
    subjects = {difference.subject for difference in run_differences if difference.incompatible}
    labels = zip(("model", "method", "metric"), key, strict=True)
    return ", ".join(f"other {kind}" for kind, label in labels if (kind, label) in subjects)


def as_markdown(comparison: RunComparison) -> str:
    """What differs, then a table for each model."""
    first, second = comparison.first, comparison.second
    lines = [f"# {comparison.recipe.name}: {first} and {second}", ""]
    lines += [f"**{sentence}.**\n" for sentence in comparison.incomplete]
    same = ["- Recipe, images, models, versions and code are the same."]
    lines += [f"- {difference.text}." for difference in comparison.differences] or same
    lines += ["", f"{plural(comparison.images, 'image')} in both runs. {LEGEND}.", ""]
    for model in dict.fromkeys(cell.model for cell in comparison.cells):
        rows = [_row(comparison, cell) for cell in comparison.cells if cell.model == model]
        head = ["method", "metric", first, second, "difference", "images", "note"]
        lines += [f"## {model}", "", *markdown_table(head, rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(comparison: RunComparison, cell: ComparedCell) -> list[str]:
    spec, gap = comparison.recipe.metrics[cell.metric], cell.gap
    return [
        cell.method,
        f"{cell.metric} {comparison.arrows[cell.metric]}",
        format_value(gap.first, spec),
        format_value(gap.second, spec),
        "equal" if cell.equal == gap.images else format_gap(gap, spec),
        str(gap.images),
        cell.note,
    ]


def as_csv(comparison: RunComparison) -> str:
    """A line for each model, method and metric, unscaled and in full precision."""
    rows = [cell.as_dict() for cell in comparison.cells]
    return csv_text(list(rows[0]), [list(row.values()) for row in rows])


def as_json(comparison: RunComparison) -> dict[str, Any]:
    """The comparison as values that JSON can hold."""
    return {
        "first": comparison.first,
        "second": comparison.second,
        "images": comparison.images,
        "incomplete": list(comparison.incomplete),
        "differences": [difference.text for difference in comparison.differences],
        "compared": [cell.as_dict() for cell in comparison.cells],
    }


def differences(first: Manifest, second: Manifest, a: str, b: str) -> list[Difference]:
    """What differs between two runs named `a` and `b`; incompatible differences come first."""
    kinds = (_run_differences, _image_differences, _label_differences)
    every = [difference for kind in kinds for difference in kind(first, second, a, b)]
    return sorted(every, key=lambda difference: not difference.incompatible)


def _run_differences(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    """Differences in recipe, code, device and versions."""
    version = first.versions.get("patchlight", "?")

    def identity(run: Manifest) -> dict[str, object]:
        recipe, patchlight = run.resolved, run.versions.get("patchlight", "?")
        return {
            "the recipe": recipe.name,
            "the version of Patchlight": patchlight,
            f"the code of Patchlight {version}, by its hash,": run.code if patchlight == version else first.code,
            "the seed": recipe.seed,
            "the target": recipe.target,
            "the kind of device": run.device.partition(":")[0],
            "the kind of data": recipe.data.kind,
            "the data options": _as_text(recipe.data.meaning),
            "the hash of the data's classes": run.classes,
        }

    def circumstances(run: Manifest) -> dict[str, object]:
        versions = {name: number for name, number in sorted(run.versions.items()) if name != "patchlight"}
        return {"quick settings": run.quick, "variants scored at once": run.chunk, "threads": run.threads, **versions}

    for name, x, y in _unequal(identity(first), identity(second)):
        yield Difference(f"{name} is {x} in {a} and {y} in {b}")
    for name, x, y in _unequal(circumstances(first), circumstances(second)):
        yield Difference(f"{name}: {_as_text(x)} in {a} and {_as_text(y)} in {b}", incompatible=False)


def _unequal(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """The names whose values differ, with both values."""
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _image_differences(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    x, y = (dict(zip(run.images.names, run.images.contents, strict=True)) for run in (first, second))
    for names, other_names, here, there in ((x, y, a, b), (y, x, b, a)):
        missing = [name for name in names if name not in other_names]
        if missing:
            yield Difference(f"{len(missing)} of the {len(names)} images of {here} are not in {there}: '{missing[0]}'")
    changed = [name for name, content in x.items() if y.get(name, content) != content]
    if changed:
        yield Difference(f"{a} and {b} have different contents of {plural(len(changed), 'image')}: '{changed[0]}'")


def _label_differences(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    """Models, methods and metrics that differ under the same label, or that only one run has."""
    same: dict[str, list[str]] = {}
    for kind, ignored in IGNORED.items():
        x, y = (
            {
                label: spec.model_dump(mode="json", exclude=ignored, exclude_defaults=True)
                for label, spec in getattr(run.resolved, f"{kind}s").items()
            }
            for run in (first, second)
        )
        for label in x:
            if x[label] != y.get(label, x[label]):
                sentence = f"{kind} '{label}' is {_as_text(x[label])} in {a} and {_as_text(y[label])} in {b}"
                yield Difference(sentence, subject=(kind, label))
        for names, other_names, here in ((x, y, a), (y, x, b)):
            only = ", ".join(f"'{label}'" for label in names if label not in other_names)
            if only:
                yield Difference(f"{kind}s that only {here} has: {only}", incompatible=False)
        same[kind] = [label for label in x if x[label] == y.get(label)]
    for label in first.resolved.models:
        digest, other_digest = first.models.get(label), second.models.get(label)
        if label in second.resolved.models and digest != other_digest:
            model = f"model '{label}' (weights, configuration, preprocessing or class names)"
            sentence = f"{model} has the hash {digest} in {a} and {other_digest} in {b}"
            yield Difference(sentence, subject=("model", label))
    for label in same["method"]:  # equal names and settings: a different hash means different code
        for metric in same["metric"]:
            digest, other_digest = (run.made.get(label, {}).get(metric) for run in (first, second))
            if digest != other_digest:
                code = f"the code of method '{label}' or of metric '{metric}'"
                sentence = f"{code} has the hash {digest} in {a} and {other_digest} in {b}"
                yield Difference(sentence, subject=("method", label))
                break


def _as_text(value: object) -> str:
    """A value of a recipe: `{"method": "rollout"}` as 'rollout', other tables as JSON."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("name", "method", "metric"):
        return f"'{next(iter(value.values()))}'"
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
