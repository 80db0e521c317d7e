"""Running a shard: its images are explained with every method and measured with every metric; failures become rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from patchlight.anatomy.base import Anatomy
from patchlight.attribution import Attribution
from patchlight.bench.events import Listener, Step
from patchlight.bench.plan import Shard, as_planned, load_model, model_digest
from patchlight.bench.rows import Before, Done, Facts, Maps, Row
from patchlight.data import Batch, Data, labelled, load_batch
from patchlight.engine import explain
from patchlight.errors import PatchlightError, spelled
from patchlight.methods.requests import Request, refusal
from patchlight.metrics.base import Evaluation, MetricRequest, on_grid
from patchlight.metrics.evaluation import evaluate
from patchlight.specs import DataSpec
from patchlight.statistics import constant
from patchlight.targets import predicted

T = TypeVar("T")
Q = TypeVar("Q", Request, MetricRequest)


@dataclass(frozen=True)
class Resources:
    """What shards run on, no part of their keys; `chunk` is how many variants are scored at once."""

    device: str = "cpu"
    chunk: int = 64


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What was made, or the reason why nothing was; and the seconds it took, per image."""

    made: T | None = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Work:
    """A shard at work: its model, its images, and the class [B] each is explained and measured for."""

    shard: Shard
    vit: Anatomy
    batch: Batch
    target: Tensor
    chunk: int

    def asked(self, label: str, request: Q) -> Q:
        """A request under this label, its variants scored `chunk` at once unless it says how many."""
        own = {"chunk": self.chunk} if request.settings.get("chunk", 0) is None else {}
        return replace(request, label=label, settings={**request.settings, **own})


def run_shard(
    shard: Shard, resources: Resources, before: Before | None = None, listen: Listener = lambda event: None
) -> Done:
    """The rows and maps of a shard: a function of its spec alone, less what is known `before`.

    Methods that read the same pass are explained in one call, the others one by one; each method's maps serve all
    metrics. What fails becomes rows with the reason.
    """
    before = before or Before()
    work = _begun(shard, resources)
    known = {pair: cell for pair, cell in shard.cells.items() if len(before.rows.get(cell, ())) == len(shard.names)}
    missing = {m: [n for n in shard.metrics if (m, n) not in known] for m in shard.methods}
    missing = {m: metrics for m, metrics in missing.items() if metrics}
    rows: list[Row] = []
    facts: dict[str, Facts] = {}
    maps: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        explained = _explained(work, list(missing), listen) if work.batch.names else {}
        for method, metrics in missing.items():
            outcome = explained.get(method, Outcome())
            if outcome.made is not None:
                maps[method] = on_grid(outcome.made.scores, work.vit)
            rows += _measured(work, method, metrics, outcome, facts)
            listen(Step("measure", method))
    for (method, metric), cell in known.items():
        rows += [replace(row, model=shard.label, method=method, metric=metric) for row in before.rows[cell]]
        if cell in before.facts:
            facts.setdefault(metric, before.facts[cell])
        if method not in maps and len(before.maps.get(cell, ())) == len(work.batch.names):
            maps[method] = before.maps[cell]
    order = {name: i for i, name in enumerate(shard.names)}
    place = {pair: i for i, pair in enumerate(shard.cells)}
    rows.sort(key=lambda row: (order[row.image], place[row.method, row.metric]))
    classes = [work.vit.label(int(t)) for t in work.target]
    return Done(rows, Maps(maps, work.batch.names, classes, work.vit.preprocess), facts)


def loaded(shard: Shard, device: str) -> Anatomy:
    """A shard's model; refused where it is not the one that was planned with."""
    vit = load_model(shard.model, device)
    if model_digest(vit) != shard.digest:
        raise PatchlightError(f"{vit.name} has changed since the run was planned; run the same command again")
    return vit


def _begun(shard: Shard, resources: Resources) -> Work:
    """The shard's model and images; those without a class are failures where classes are explained."""
    vit = loaded(shard, resources.device)
    data, foreign = opened(shard.data.model_dump_json(), vit.outcomes, tuple(vit.labels or ()))
    if foreign and shard.target == "label":
        raise PatchlightError(
            f"the labels are not classes of {vit.name}, so give a model of these classes or --target prediction: "
            f"{foreign}"
        )
    batch = load_batch(as_planned(data, shard), range(len(shard.names)), vit, workers=4)
    if foreign:
        batch = replace(batch, labels=None)
    elif shard.target == "label":
        batch = labelled(batch)
    return Work(shard, vit, batch, _targets(shard, vit, batch), resources.chunk)


@lru_cache(maxsize=2)
def opened(key: str, classes: int, labels: tuple[str, ...]) -> tuple[Data, str]:
    """The data of a DataSpec's JSON, and why its labels are not the model's classes; nothing where they are.

    A folder's class names are looked up among the model's, where it has names; else the number of classes must agree.
    """
    spec = DataSpec.model_validate_json(key)
    if spec.kind == "folder" and labels and "classes" not in spec.options:
        try:
            return spec.open(classes=labels), ""
        except PatchlightError as error:
            return spec.open(), str(error)
    data = spec.open()
    if data.labels is None or len(data.labels) == classes:
        return data, ""
    return data, f"there are {len(data.labels)} of them, and {classes} classes"


def _targets(shard: Shard, vit: Anatomy, batch: Batch) -> Tensor:
    """The class [B] each image is explained and measured for."""
    if not len(batch.names):
        return torch.empty(0, dtype=torch.long)
    if shard.target == "prediction":
        return predicted(vit.logits(batch.images), vit.outputs).index[:, 0]
    assert batch.labels is not None, "images without a label are failures by now"
    return batch.labels


def _explained(work: Work, methods: Sequence[str], listen: Listener) -> dict[str, Outcome[Attribution]]:
    """By method, what it made of the images; those that read the same pass share a call."""
    requests = {label: work.shard.methods[label].request for label in methods}
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
        return explain(work.vit, work.batch.images, asked, work.target, seed=work.shard.seed, finite=False)

    for labels in filter(None, [shared, *alone]):
        made |= _together(call, labels, len(work.batch.names))
        listen(Step("explain", ", ".join(labels)))
    return made


def _together(
    call: Callable[[Sequence[str]], Mapping[str, T]], labels: Sequence[str], images: int
) -> dict[str, Outcome[T]]:
    """What one call makes of all these, which share its time equally; where it fails, of each alone, or why not."""
    begin = time.perf_counter()
    try:
        made = call(labels)
    except Exception as error:
        if len(labels) == 1:
            return {labels[0]: Outcome(error=_reason(error))}
        return {label: _together(call, [label], images)[label] for label in labels}
    seconds = (time.perf_counter() - begin) / len(labels) / images
    return {label: Outcome(made[label], seconds=seconds) for label in labels}


def _reason(error: Exception) -> str:
    told = spelled(" ".join(str(error).split())) or type(error).__name__
    return told if isinstance(error, PatchlightError) else f"{type(error).__name__}: {told}"


def _measured(
    work: Work, method: str, metrics: Sequence[str], explained: Outcome[Attribution], facts: dict[str, Facts]
) -> Iterator[Row]:
    """The rows of one method under these metrics; facts about the metrics are added to `facts`."""
    shard, batch = work.shard, work.batch

    def row(metric: str, image: str, **rest: Any) -> Row:
        return Row(shard.label, image, method, metric, shard.cells[method, metric], **rest)

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
        seconds = {"explain_seconds": explained.seconds, "measure_seconds": outcome.seconds}
        for i, (name, target) in enumerate(images):
            about: dict[str, Any] = {"target": target, **seconds}
            if broken[i]:
                about["error"] = "the map holds NaN or infinite values"
            elif outcome.made is None:
                about["error"] = outcome.error
            else:
                about |= _value(outcome.made, i, "the map is constant" if same[i] else "")
            yield row(metric, name, **about)


def _evaluated(work: Work, method: str, metrics: Sequence[str], maps: Attribution) -> dict[str, Outcome[Evaluation]]:
    """By metric, its evaluation of a method's maps."""
    batch, own = work.batch, work.shard.methods[method]

    def call(labels: Sequence[str]) -> dict[str, Evaluation]:
        asked = [work.asked(label, own.measured_by(work.shard.metrics[label])) for label in labels]
        given = {"labels": batch.labels, "boxes": batch.boxes, "masks": batch.masks}
        return evaluate(work.vit, batch.images, maps, asked, work.target, seed=work.shard.seed, current=True, **given)

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
