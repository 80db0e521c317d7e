"""Running a unit: its images are explained by its methods and measured by every metric; failures become rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from patchlight.anatomy.opened import Anatomy
from patchlight.bench.events import Listener, StepEnd
from patchlight.bench.plan import Group, Images, Pair, Unit, as_planned, load_model, model_digest
from patchlight.bench.rows import Before, Done, Facts, Known, Maps, ResultRow, maps_from
from patchlight.core.errors import PatchlightError
from patchlight.data import Batch, Data, labelled, load_batch, takes_classes
from patchlight.data.spec import DataSpec
from patchlight.methods.requests import Request
from patchlight.metrics.base import MetricRequest, on_grid
from patchlight.study.run import study_batch

Q = TypeVar("Q", Request, MetricRequest)


@dataclass(frozen=True)
class Resources:
    """What units run on, no part of their keys; `chunk` is how many variants are scored at once.

    `data` are images given in Python, in place of those that the recipe names.
    """

    device: str = "cpu"
    chunk: int = 64
    data: Data | None = None


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
    rows: list[ResultRow] = []
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
        ResultRow(name, *pair, model=unit.group.label, cell=cell, error=reason)
        for pair in unit.group.made
        for name, cell in zip(unit.images.names, unit.cells(pair), strict=True)
    ]
    return Done(rows, Maps(model=unit.group.label))


def _run_batch(
    group: Group, images: Images, pairs: Sequence[Pair], resources: Resources, listen: Listener
) -> dict[tuple[Pair, str], Known]:
    """What these pairs of method and metric say of some images, by pair and name."""
    vit = loaded(group, resources.device)
    batch = _load(group, images, vit, resources)
    metrics: dict[str, list[str]] = {}
    for method, metric in pairs:
        metrics.setdefault(method, []).append(metric)

    def asked(label: str, request: Q) -> Q:
        """A request under this label, its variants scored `chunk` at once unless it says how many."""
        chunk = {"chunk": resources.chunk} if request.settings.get("chunk", 0) is None else {}
        return replace(request, label=label, settings={**request.settings, **chunk})

    requests = []
    for label, names in metrics.items():
        method_spec = group.methods[label]
        measures = [asked(name, method_spec.measured_by(group.metrics[name])) for name in names]
        requests.append((asked(label, method_spec.request), measures))
    study = study_batch(
        vit,
        batch,
        requests,
        target=batch.labels if group.target == "label" else None,
        seed=group.seed,
        progress=lambda stage, label: listen(StepEnd(stage, label)),
    )
    maps = {
        label: on_grid(outcome.result.scores, vit).cpu()
        for label, outcome in study.explained.items()
        if outcome.result is not None
    }
    place = {name: i for i, name in enumerate(batch.names)}
    found: dict[tuple[Pair, str], Known] = {}
    for cell in study.cells():
        pair = cell.method, cell.metric
        evaluation, i = study.evaluations[pair].result, place.get(cell.image)
        found[pair, cell.image] = Known(
            ResultRow(**vars(cell), model=group.label),
            None if evaluation is None else Facts.of(evaluation),
            None if i is None or cell.method not in maps else maps[cell.method][i],
            "" if cell.target is None else vit.label(cell.target),
            vit.preprocess,
        )
    return found


def loaded(group: Group, device: str) -> Anatomy:
    """A group's model; refused where it is not the one that was planned with."""
    vit = load_model(group.model, device)
    if model_digest(vit) != group.digest:
        raise PatchlightError(f"{vit.name} has changed since the run was planned; run the same command again")
    return vit


def _load(group: Group, images: Images, vit: Anatomy, resources: Resources) -> Batch:
    """Some images; those without a class are failures where classes are explained."""
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
        return replace(batch, labels=None)
    return labelled(batch) if group.target == "label" else batch


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
