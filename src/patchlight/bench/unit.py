"""Running a unit: its images are explained by its methods and measured by every metric; failures become rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.bench.events import Listener, Step
from patchlight.bench.plan import Group, Images, Pair, Unit, as_planned, load_model, model_digest
from patchlight.bench.rows import Before, Done, Facts, Known, Maps, Row, maps_from
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, spelled
from patchlight.core.statistics import constant
from patchlight.core.targets import predicted
from patchlight.data import Batch, Data, labelled, load_batch, takes_classes
from patchlight.data.spec import DataSpec
from patchlight.engine import explain
from patchlight.methods.requests import Request, refusal
from patchlight.metrics.base import Evaluation, MetricRequest, on_grid
from patchlight.study.evaluate import evaluate

T = TypeVar("T")
Q = TypeVar("Q", Request, MetricRequest)


@dataclass(frozen=True)
class Resources:
    """What units run on, no part of their keys; `chunk` is how many variants are scored at once.

    `data` are images given in Python, in place of those that the recipe names.
    """

    device: str = "cpu"
    chunk: int = 64
    data: Data | None = None


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What was made, or the reason why nothing was; the seconds it took, per image, and how many share them."""

    made: T | None = None
    error: str = ""
    seconds: float = 0.0
    shared_by: int = 1


@dataclass(frozen=True)
class Work:
    """A batch at work: its model, its images, and the class [B] each is explained and measured for."""

    group: Group
    vit: Anatomy
    batch: Batch
    target: Tensor
    chunk: int

    def asked(self, label: str, request: Q) -> Q:
        """A request under this label, its variants scored `chunk` at once unless it says how many."""
        own = {"chunk": self.chunk} if request.settings.get("chunk", 0) is None else {}
        return replace(request, label=label, settings={**request.settings, **own})


def run_unit(
    unit: Unit, resources: Resources, before: Before | None = None, listen: Listener = lambda event: None
) -> Done:
    """The rows and maps of a unit: a function of its spec alone, less what is known `before`.

    Its images are explained `batch_size` at once. Methods that read the same pass are explained in one call; each
    method's maps serve all metrics. What fails becomes rows with the reason.
    """
    found = dict(before or {})
    cells = {pair: unit.cells(pair) for pair in unit.group.made}
    todo: dict[tuple[Pair, ...], list[int]] = {}
    for i in range(len(unit.images)):
        missing = tuple(pair for pair, own in cells.items() if own[i] not in found)
        if missing:
            todo.setdefault(missing, []).append(i)
    size = unit.group.batch_size
    place = {name: i for i, name in enumerate(unit.images.names)}
    for pairs, places in todo.items():
        for start in range(0, len(places), size):
            part = unit.images.at(places[start : start + size])
            known = _run_batch(unit.group, part, pairs, resources, listen)
            found |= {cells[pair][place[name]]: one for (pair, name), one in known.items()}
    return assembled(unit, found)


def assembled(unit: Unit, found: Before) -> Done:
    """The rows and maps of a unit, all of whose values are known."""
    group, names = unit.group, unit.images.names
    cells = {pair: unit.cells(pair) for pair in group.made}
    rows: list[Row] = []
    facts: dict[str, Facts] = {}
    drawn: dict[str, dict[str, Known]] = {method: {} for method in group.methods}
    for i, name in enumerate(names):
        for (method, metric), own in cells.items():
            known = found[own[i]]
            rows.append(replace(known.row, model=group.label, image=name, method=method, metric=metric, cell=own[i]))
            if known.facts is not None:
                facts[metric] = known.facts
            if known.map is not None:
                drawn[method].setdefault(name, known)
    return Done(rows, maps_from(group.label, names, drawn), facts)


def lost(unit: Unit, reason: str) -> Done:
    """The rows of a unit that cannot be run at all."""
    rows = [
        Row(unit.group.label, name, *pair, cell, error=reason)
        for pair in unit.group.made
        for name, cell in zip(unit.images.names, unit.cells(pair), strict=True)
    ]
    return Done(rows, Maps(model=unit.group.label))


def _run_batch(
    group: Group, images: Images, pairs: Sequence[Pair], resources: Resources, listen: Listener
) -> dict[tuple[Pair, str], Known]:
    """What these pairs of method and metric say of some images, by pair and name."""
    work = _begun(group, images, resources)
    asked: dict[str, list[str]] = {}
    for method, metric in pairs:
        asked.setdefault(method, []).append(metric)
    found: dict[tuple[Pair, str], Known] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explained = _explained(work, list(asked), listen) if work.batch.names else {}
        for method, metrics in asked.items():
            outcome = explained.get(method, Outcome())
            maps = None if outcome.made is None else on_grid(outcome.made.scores, work.vit).cpu()
            facts: dict[str, Facts] = {}
            for row in _measured(work, method, metrics, outcome, facts):
                drawn = None
                if maps is not None and row.image in work.batch.names:
                    drawn = maps[work.batch.names.index(row.image)]
                named = "" if row.target is None else work.vit.label(row.target)
                about = (facts.get(row.metric), drawn, named, work.vit.preprocess)
                found[(method, row.metric), row.image] = Known(row, *about)
            listen(Step("measure", method))
    return found


def loaded(group: Group, device: str) -> Anatomy:
    """A group's model; refused where it is not the one that was planned with."""
    vit = load_model(group.model, device)
    if model_digest(vit) != group.digest:
        raise PatchlightError(f"{vit.name} has changed since the run was planned; run the same command again")
    return vit


def _begun(group: Group, images: Images, resources: Resources) -> Work:
    """The group's model and some images; those without a class are failures where classes are explained."""
    vit = loaded(group, resources.device)
    if resources.data is None:
        data, foreign = opened(group.data.model_dump_json(), vit.outcomes, tuple(vit.labels or ()))
    else:
        data, foreign = resources.data, _foreign(resources.data, vit.outcomes)
    if foreign and group.target == "label":
        raise PatchlightError(
            f"the labels are not classes of {vit.name}, so give a model of these classes or --target prediction: "
            f"{foreign}"
        )
    batch = load_batch(as_planned(data, images), range(len(images)), vit, workers=4)
    if foreign:
        batch = replace(batch, labels=None)
    elif group.target == "label":
        batch = labelled(batch)
    return Work(group, vit, batch, _targets(group, vit, batch), resources.chunk)


@lru_cache(maxsize=2)
def opened(key: str, classes: int, labels: tuple[str, ...]) -> tuple[Data, str]:
    """The data of a DataSpec's JSON, and why its labels are not the model's classes; nothing where they are.

    A folder's class names are looked up among the model's, where it has names; else the number of classes must agree.
    """
    spec = DataSpec.model_validate_json(key)
    if takes_classes(spec.kind) and labels and "classes" not in spec.options:
        try:
            return spec.open(classes=labels), ""
        except PatchlightError as error:
            return spec.open(), str(error)
    data = spec.open()
    return data, _foreign(data, classes)


def _foreign(data: Data, classes: int) -> str:
    """Why the labels of data are not a model's classes; nothing where they may be."""
    if data.labels is None or len(data.labels) == classes:
        return ""
    return f"there are {len(data.labels)} of them, and {classes} classes"


def _targets(group: Group, vit: Anatomy, batch: Batch) -> Tensor:
    """The class [B] each image is explained and measured for."""
    if not len(batch.names):
        return torch.empty(0, dtype=torch.long)
    if group.target == "prediction":
        return predicted(vit.logits(batch.images), vit.outputs).index[:, 0]
    assert batch.labels is not None, "images without a label are failures by now"
    return batch.labels


def _explained(work: Work, methods: Sequence[str], listen: Listener) -> dict[str, Outcome[Attribution]]:
    """By method, what it made of the images; those that read the same pass share a call."""
    requests = {label: work.group.methods[label].request for label in methods}
    reasons = {label: refusal(request, work.vit) for label, request in requests.items()}
    made: dict[str, Outcome[Attribution]] = {
        label: Outcome(error=f"'{requests[label].name}' does not work on {work.vit.name}: {reason}")
        for label, reason in reasons.items()
        if reason is not None
    }
    able = [label for label in methods if label not in made]
    shared = [label for label in able if requests[label].in_pass]
    alone = [[label] for label in able if label not in shared]

    def call(labels: Sequence[str]) -> dict[str, Attribution]:
        asked = [work.asked(label, requests[label]) for label in labels]
        return explain(work.vit, work.batch.images, asked, work.target, seed=work.group.seed, finite=False)

    for labels in filter(None, [shared, *alone]):
        made |= _together(call, labels, len(work.batch.names))
        listen(Step("explain", ", ".join(labels)))
    return made


def _together(
    call: Callable[[Sequence[str]], Mapping[str, T]], labels: Sequence[str], images: int
) -> dict[str, Outcome[T]]:
    """What one call makes of all these, which share its time; where it fails, of each alone, or why not."""
    begin = time.perf_counter()
    try:
        made = call(labels)
    except Exception as error:
        if len(labels) == 1:
            return {labels[0]: Outcome(error=_reason(error))}
        return {label: _together(call, [label], images)[label] for label in labels}
    seconds = (time.perf_counter() - begin) / images
    return {label: Outcome(made[label], "", seconds, len(labels)) for label in labels}


def _reason(error: Exception) -> str:
    told = spelled(" ".join(str(error).split())) or type(error).__name__
    return told if isinstance(error, PatchlightError) else f"{type(error).__name__}: {told}"


def _measured(
    work: Work, method: str, metrics: Sequence[str], explained: Outcome[Attribution], facts: dict[str, Facts]
) -> Iterator[Row]:
    """The rows of one method under these metrics; facts about the metrics are added to `facts`."""
    batch = work.batch

    def row(metric: str, image: str, **rest: Any) -> Row:
        return Row(work.group.label, image, method, metric, **rest)

    yield from (row(metric, name, error=reason) for name, reason in batch.failures for metric in metrics)
    images = list(zip(batch.names, work.target.tolist(), strict=True))
    if explained.made is None:
        yield from (row(metric, name, target=t, error=explained.error) for name, t in images for metric in metrics)
        return
    flat = explained.made.scores.flatten(1)
    broken, same = (~flat.isfinite()).any(1).tolist(), constant(flat).tolist()
    for metric, outcome in _evaluated(work, method, metrics, explained.made).items():
        if outcome.made is not None:
            facts[metric] = Facts.of(outcome.made)
        seconds = {"explain_seconds": explained.seconds, "measure_seconds": outcome.seconds / outcome.shared_by}
        for i, (name, target) in enumerate(images):
            about: dict[str, Any] = {"target": target, "shared_by": explained.shared_by, **seconds}
            if broken[i]:
                about["error"] = "the map holds NaN or infinite values"
            elif outcome.made is None:
                about["error"] = outcome.error
            else:
                about |= _value(outcome.made, i, "the map is constant" if same[i] else "")
            yield row(metric, name, **about)


def _evaluated(work: Work, method: str, metrics: Sequence[str], maps: Attribution) -> dict[str, Outcome[Evaluation]]:
    """By metric, its evaluation of a method's maps."""
    batch, own = work.batch, work.group.methods[method]

    def call(labels: Sequence[str]) -> dict[str, Evaluation]:
        asked = [work.asked(label, own.measured_by(work.group.metrics[label])) for label in labels]
        given = {"labels": batch.labels, "boxes": batch.boxes, "masks": batch.masks}
        return evaluate(work.vit, batch.images, maps, asked, work.target, seed=work.group.seed, current=True, **given)

    return _together(call, metrics, len(batch.names))


def _value(evaluation: Evaluation, i: int, note: str) -> dict[str, Any]:
    """What an evaluation says of image i."""
    value = float(evaluation.values[i])
    return {
        "value": value if value == value else None,
        "note": (evaluation.reasons[i] if evaluation.reasons else "") or note,
        "curve": None if evaluation.curve is None else evaluation.curve[i].tolist(),
        "parts": {name: part[i].flatten().tolist() for name, part in evaluation.parts.items()},
    }
