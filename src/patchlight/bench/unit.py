"""Runs a unit: explains its images with its methods and measures the maps with every metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from patchlight.anatomy.opened import Anatomy
from patchlight.bench.events import Listener, StepEnd
from patchlight.bench.plan import Group, Images, Pair, Unit, as_planned, load_model, model_digest
from patchlight.bench.rows import CellValue, CellValues, Facts, ImageMap, Maps, ResultRow, UnitResult, stack_maps
from patchlight.core.errors import PatchlightError
from patchlight.data import Batch, Data, labelled, load_batch, takes_classes
from patchlight.data.spec import DataSpec
from patchlight.methods.requests import Request
from patchlight.metrics.base import MetricRequest, on_grid
from patchlight.study.run import study_batch

Q = TypeVar("Q", Request, MetricRequest)


@dataclass(frozen=True)
class Resources:
    """What units run on; not part of their keys. `chunk` variants are scored at once.

    `data` is a data set in Python that replaces the recipe's data.
    """

    device: str = "cpu"
    chunk: int = 64
    data: Data | None = None


def run_unit(
    unit: Unit, resources: Resources, measured: CellValues | None = None, listen: Listener = lambda event: None
) -> UnitResult:
    """Compute the rows and maps of a unit, except for values that were `measured` before.

    The result depends on the unit alone. Methods that share a pass are explained in one call, and all metrics use the
    same maps. A failure becomes rows with its reason.
    """
    values = dict(measured or {})
    cells = {pair: unit.cells(pair) for pair in unit.group.hashes}
    todo: dict[tuple[Pair, ...], list[int]] = {}
    for i in range(len(unit.images)):
        missing = tuple(pair for pair, hashes in cells.items() if hashes[i] not in values)
        if missing:
            todo.setdefault(missing, []).append(i)
    size = unit.group.batch_size
    place = {name: i for i, name in enumerate(unit.images.names)}
    for pairs, places in todo.items():
        for start in range(0, len(places), size):
            part = unit.images.at(places[start : start + size])
            computed = _run_batch(unit.group, part, pairs, resources, listen)
            values |= {cells[pair][place[name]]: value for (pair, name), value in computed.items()}
    return assemble_unit(unit, values)


def assemble_unit(unit: Unit, values: CellValues) -> UnitResult:
    """The rows and maps of a unit from its values."""
    group, names = unit.group, unit.images.names
    cells = {pair: unit.cells(pair) for pair in group.hashes}
    rows: list[ResultRow] = []
    facts: dict[str, Facts] = {}
    maps: dict[str, dict[str, ImageMap]] = {method: {} for method in group.methods}
    for i, name in enumerate(names):
        for (method, metric), hashes in cells.items():
            value = values[hashes[i]]
            rows.append(replace(value.row, model=group.label, image=name, method=method, metric=metric, cell=hashes[i]))
            if value.facts is not None:
                facts[metric] = value.facts
            if value.map is not None:
                maps[method].setdefault(name, value.map)
    return UnitResult(rows, stack_maps(group.label, names, maps), facts)


def lost_unit(unit: Unit, reason: str) -> UnitResult:
    """The rows of a unit that cannot be run, with the reason as error."""
    rows = [
        ResultRow(name, *pair, model=unit.group.label, cell=cell, error=reason)
        for pair in unit.group.hashes
        for name, cell in zip(unit.images.names, unit.cells(pair), strict=True)
    ]
    return UnitResult(rows, Maps(model=unit.group.label))


def _run_batch(
    group: Group, images: Images, pairs: Sequence[Pair], resources: Resources, listen: Listener
) -> dict[tuple[Pair, str], CellValue]:
    """Compute the values of pairs of method and metric for some images, by pair and image name."""
    recipe, vit = group.recipe, load_planned(group, resources.device)
    batch = _load(group, images, vit, resources)
    metrics: dict[str, list[str]] = {}
    for method, metric in pairs:
        metrics.setdefault(method, []).append(metric)

    def with_chunk(label: str, request: Q) -> Q:
        """The request under this label, with the chunk size of the run unless it has its own."""
        chunk = {"chunk": resources.chunk} if request.settings.get("chunk", 0) is None else {}
        return replace(request, label=label, settings={**request.settings, **chunk})

    requests = []
    for label, names in metrics.items():
        spec = recipe.methods[label]
        measures = [with_chunk(name, spec.measured_by(recipe.metrics[name])) for name in names]
        requests.append((with_chunk(label, spec.request), measures))
    study = study_batch(
        vit,
        batch,
        requests,
        target=batch.labels if recipe.target == "label" else None,
        seed=recipe.seed,
        progress=lambda stage, label: listen(StepEnd(stage, label)),
    )
    maps = {
        label: on_grid(outcome.result.scores, vit).cpu()
        for label, outcome in study.explained.items()
        if outcome.result is not None
    }
    place = {name: i for i, name in enumerate(batch.names)}
    values: dict[tuple[Pair, str], CellValue] = {}
    for cell in study.cells():
        pair = cell.method, cell.metric
        evaluation, i = study.evaluations[pair].result, place.get(cell.image)
        explained = "" if cell.target is None else vit.label(cell.target)
        values[pair, cell.image] = CellValue(
            ResultRow(**vars(cell), model=group.label),
            None if evaluation is None else Facts.of(evaluation),
            None if i is None or cell.method not in maps else ImageMap(maps[cell.method][i], explained, vit.preprocess),
        )
    return values


def load_planned(group: Group, device: str) -> Anatomy:
    """Load a group's model; an error if it differs from the planned one."""
    vit = load_model(group.model, device)
    if model_digest(vit) != group.digest:
        raise PatchlightError(f"{vit.name} has changed since the run was planned; run the same command again")
    return vit


def _load(group: Group, images: Images, vit: Anatomy, resources: Resources) -> Batch:
    """Load images; those without a class become failures if labels are explained."""
    if resources.data is None:
        data, foreign = open_data(
            group.recipe.data_for(group.label).model_dump_json(), vit.outcomes, tuple(vit.labels or ())
        )
    else:
        data, foreign = resources.data, _foreign(resources.data, vit.outcomes)
    if foreign and group.recipe.target == "label":
        raise PatchlightError(
            f"the labels are not classes of {vit.name} ({foreign}); use a model of these classes or --target prediction"
        )
    batch = load_batch(as_planned(data, images), range(len(images)), vit, workers=4)
    if foreign:
        return replace(batch, labels=None)
    return labelled(batch) if group.recipe.target == "label" else batch


@lru_cache(maxsize=2)
def open_data(key: str, classes: int, labels: tuple[str, ...]) -> tuple[Data, str]:
    """Open the data of a DataSpec's JSON; also return why its labels are not the model's classes, empty if they are.

    Class names of a folder are looked up among the model's class names; without names, the numbers must agree.
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
    """Why the labels of the data are not a model's classes; empty if they may be."""
    if data.labels is None or len(data.labels) == classes:
        return ""
    return f"{len(data.labels)} labels, {classes} classes"
