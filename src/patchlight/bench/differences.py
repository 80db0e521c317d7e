"""What differs between two runs, a sentence for each thing, and whether their values can stand in one table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from patchlight.anatomy.spec import ModelSpec
from patchlight.bench.manifest import Manifest
from patchlight.study.spec import MethodSpec, MetricSpec

S = TypeVar("S", ModelSpec, MethodSpec, MetricSpec)
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


def differences(first: Manifest, second: Manifest, a: str, b: str) -> list[Difference]:
    """What differs between two runs that are called `a` and `b`; what keeps them apart comes first."""
    found = [*_of_whole(first, second, a, b), *_of_images(first, second, a, b), *_of_parts(first, second, a, b)]
    return sorted(found, key=lambda one: not one.apart)


def _of_whole(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    one, other = first.resolved, second.resolved
    mine, theirs = first.versions.get("patchlight", "?"), second.versions.get("patchlight", "?")
    for what, x, y in (
        ("the recipe", one.name, other.name),
        ("the version of Patchlight", mine, theirs),
        (f"the code of Patchlight {mine}, by its hash,", first.code, second.code if mine == theirs else first.code),
        ("the seed", one.seed, other.seed),
        ("the target", one.target, other.target),
        ("the kind of device", first.device.partition(":")[0], second.device.partition(":")[0]),
        ("the kind of data", one.data.kind, other.data.kind),
        ("options of the data", _told(one.data.meaning), _told(other.data.meaning)),
    ):
        if x != y:
            yield Difference(f"{what} is {x} in {a} and {y} in {b}")
    if first.classes != second.classes:
        yield Difference(f"the data of {a} and {b} have other classes")
    for what, own, their in (
        ("made with quick settings", first.quick, second.quick),
        ("variants scored at once", first.chunk, second.chunk),
        ("threads", first.threads, second.threads),
        *(
            (name, first.versions.get(name), second.versions.get(name))
            for name in sorted({*first.versions, *second.versions})
        ),
    ):
        if own != their and what != "patchlight":
            yield Difference(f"{what}: {_told(own)} in {a} and {_told(their)} in {b}", apart=False)


def _of_images(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    one = dict(zip(first.images.names, first.images.contents, strict=True))
    other = dict(zip(second.images.names, second.images.contents, strict=True))
    for names, without, here, there in ((one, other, a, b), (other, one, b, a)):
        missing = [name for name in names if name not in without]
        if missing:
            yield Difference(f"{len(missing)} of the {len(names)} images of {here} are not in {there}: '{missing[0]}'")
    changed = [name for name, content in one.items() if other.get(name, content) != content]
    if changed:
        yield Difference(f"{len(changed)} images of {a} have other contents in {b}: '{changed[0]}'")


def _of_parts(first: Manifest, second: Manifest, a: str, b: str) -> Iterator[Difference]:
    """Models, methods and metrics of one label that are not the same, and those that only one run has."""
    one, other = first.resolved, second.resolved
    yield from _of_table("model", one.models, other.models, PLACES, a, b)
    yield from _of_table("method", one.methods, other.methods, set(), a, b)
    yield from _of_table("metric", one.metrics, other.metrics, SHOWN, a, b)
    for label in one.models.keys() & other.models.keys():
        x, y = first.models.get(label), second.models.get(label)
        if x != y:
            what = f"model '{label}' (weights, configuration, preprocessing or class names)"
            yield Difference(f"{what} has the hash {x} in {a} and {y} in {b}", about=("model", label))
    for label, metric, x, y in _made_otherwise(first, second):
        told = f"the code of method '{label}' or of metric '{metric}' has the hash {x} in {a} and {y} in {b}"
        yield Difference(told, about=("method", label))


def _of_table(
    what: str, first: Mapping[str, S], second: Mapping[str, S], without: set[str], a: str, b: str
) -> Iterator[Difference]:
    for label in first:
        if label not in second:
            continue
        x, y = (one[label].model_dump(mode="json", exclude=without, exclude_defaults=True) for one in (first, second))
        if x != y:
            yield Difference(f"{what} '{label}' is {_told(x)} in {a} and {_told(y)} in {b}", about=(what, label))
    for names, there, here in ((first, second, a), (second, first, b)):
        only = [label for label in names if label not in there]
        if only:
            listed = ", ".join(f"'{label}'" for label in only)
            yield Difference(f"{what}s that only {here} has: {listed}", apart=False)


def _made_otherwise(first: Manifest, second: Manifest) -> Iterator[tuple[str, str, str | None, str | None]]:
    """Methods and metrics that are called and set alike, and are not the same: their code differs."""
    one, other = first.resolved, second.resolved
    for label, method in one.methods.items():
        for name, metric in one.metrics.items():
            theirs, same = other.metrics.get(name), other.methods.get(label) == method
            if theirs is None or not same or _measured(theirs) != _measured(metric):
                continue
            x, y = first.made.get(label, {}).get(name), second.made.get(label, {}).get(name)
            if x != y:
                yield label, name, x, y
                break


def _measured(metric: MetricSpec) -> object:
    return metric.model_dump(mode="json", exclude=SHOWN)


def _told(value: object) -> str:
    """A value of a recipe in words: `{"method": "rollout"}` as rollout, other tables as JSON."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("name", "method", "metric"):
        return f"'{next(iter(value.values()))}'"
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
