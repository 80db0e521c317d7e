"""The driver of all studies: methods explain images, metrics measure the maps, and failures are isolated per cell."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, UndefinedMetric, escape_surrogates, integer, warn
from patchlight.core.images import GIVE_IMAGES, Note, in_batches
from patchlight.core.progress import Progress, show_progress
from patchlight.core.statistics import constant
from patchlight.core.targets import Target, Targets, resolve_targets, top_classes
from patchlight.data import Batch
from patchlight.engine import explain, several
from patchlight.methods.requests import Request, refusal
from patchlight.metrics.base import Evaluation, Measure, Measured, MetricRequest, apply_method, checked_maps
from patchlight.study.cell import Cell
from patchlight.study.sources import (
    GIVE_MAPS,
    Annotations,
    BatchMaps,
    Source,
    check_annotations,
    check_images,
    check_needs,
    compute_maps,
    map_count,
    source_of,
)

BATCH = 16
"""Images per batch."""
BROKEN = "the map contains NaN or infinite values"

T = TypeVar("T")
Watch = Callable[[Tensor, Targets, Mapping[str, Tensor]], None]
"""Called with every batch: images [b,C,H,W], explained classes and maps [b,h,w] by label."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A result, or the error in its place.

    Attributes:
        result: The result, or None.
        error: Why there is no result.
        seconds: Seconds per image.
        shared_by: The number of results that share this time.
    """

    result: T | None = None
    error: str = ""
    seconds: float = 0.0
    shared_by: int = 1


def explain_each(
    vit: Anatomy,
    images: Tensor,
    requests: Sequence[Request],
    target: Target = None,
    *,
    seed: int = 0,
    catch: type[Exception] = Exception,
    finished: Callable[[Mapping[str, Outcome[Attribution]]], None] = lambda outcomes: None,
) -> dict[str, Outcome[Attribution]]:
    """Explain preprocessed images [B,C,H,W] with every method; returns attributions, or reasons why not, by label.

    Methods that share a pass run together, or one by one if that fails. Errors of the type `catch` become reasons;
    others are raised. `finished` is called with the outcomes of every call.
    """
    outcomes: dict[str, Outcome[Attribution]] = {}
    supported: list[Request] = []
    for request in requests:
        reason = refusal(request.suited(vit), vit)
        if reason is None:
            supported.append(request)
        else:
            refused = Outcome[Attribution](error=f"'{request.name}' does not work on {vit.name}: {reason}")
            outcomes[request.label] = refused
            finished({request.label: refused})

    def call(group: Sequence[Request]) -> dict[str, Attribution]:
        return explain(vit, images, group, target, seed=seed, finite=False, progress=False)

    in_pass = [r for r in supported if r.in_pass]
    for group in filter(None, [in_pass, *([r] for r in supported if not r.in_pass)]):
        together = _explain_together(call, group, len(images), catch)
        outcomes |= together
        finished(together)
    return {request.label: outcomes[request.label] for request in requests}


def _explain_together(
    call: Callable[[Sequence[Request]], Mapping[str, Attribution]],
    requests: Sequence[Request],
    images: int,
    catch: type[Exception],
) -> dict[str, Outcome[Attribution]]:
    """Explain with one call for all methods, which share its time; if it fails, with one call for each."""
    begin = time.perf_counter()
    try:
        maps = call(requests)
    except catch as error:
        if len(requests) == 1:
            return {requests[0].label: Outcome(error=reason_of(error))}
        alone = (_explain_together(call, [request], images, catch) for request in requests)
        return {label: outcome for outcomes in alone for label, outcome in outcomes.items()}
    seconds = (time.perf_counter() - begin) / images
    return {request.label: Outcome(maps[request.label], "", seconds, len(requests)) for request in requests}


def reason_of(error: Exception) -> str:
    """An error as one sentence; for an unexpected error, its type comes first."""
    text = escape_surrogates(" ".join(str(error).split())) or type(error).__name__
    return text if isinstance(error, PatchlightError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class BatchStudy:
    """The results of methods and metrics for a batch of images.

    Attributes:
        batch: The images.
        target: The explained class [B] of each.
        explained: By method, its attribution or the reason why there is none.
        evaluations: By method and metric, the evaluation or the reason why there is none.
    """

    batch: Batch
    target: Tensor
    explained: Mapping[str, Outcome[Attribution]]
    evaluations: Mapping[tuple[str, str], Outcome[Evaluation]]

    def cells(self) -> Iterator[Cell]:
        """A cell for each image, method and metric; images that could not be read are failures."""
        images = list(enumerate(zip(self.batch.names, self.target.tolist(), strict=True)))
        for (method, metric), outcome in self.evaluations.items():
            yield from (Cell(name, method, metric, error=reason) for name, reason in self.batch.failures)
            explained = self.explained[method]
            if explained.result is None:
                yield from (Cell(name, method, metric, error=explained.error, target=t) for _, (name, t) in images)
                continue
            flat = explained.result.scores.flatten(1)
            broken, same = (~flat.isfinite()).any(1).tolist(), constant(flat).tolist()
            for i, (name, target) in images:
                cell = Cell(
                    name,
                    method,
                    metric,
                    target=target,
                    measure_seconds=outcome.seconds,
                    explain_seconds=explained.seconds,
                    shared_by=explained.shared_by,
                )
                if broken[i]:
                    yield replace(cell, error=BROKEN)
                elif outcome.result is None:
                    yield replace(cell, error=outcome.error)
                else:
                    yield _with_value(cell, outcome.result, i, "the map is constant" if same[i] else "")


def _with_value(cell: Cell, evaluation: Evaluation, i: int, note: str) -> Cell:
    value = float(evaluation.values[i])
    return replace(
        cell,
        value=value if value == value else None,
        note=evaluation.reasons[i] or note,
        curve=None if evaluation.curve is None else evaluation.curve[i].tolist(),
        parts={name: part[i].flatten().tolist() for name, part in evaluation.parts.items()},
    )


def study_batch(
    vit: Anatomy,
    batch: Batch,
    plan: Sequence[tuple[Request, Sequence[MetricRequest]]],
    *,
    target: Tensor | None = None,
    seed: int = 0,
    progress: Callable[[str, str], None] = lambda step, label: None,
) -> BatchStudy:
    """Explain a batch with every method of a plan, and measure each with its metrics; failures become reasons.

    Args:
        vit: The opened model.
        batch: Images with their names and annotations, as `patchlight.data` loads them.
        plan: The methods, each with its metrics.
        target: The class [B] of each image; by default the prediction.
        seed: Random seed.
        progress: Called with "explain" and the labels, or "measure" and the label, after each step.
    """
    evaluations = {(r.label, metric.label): Outcome[Evaluation]() for r, metrics in plan for metric in metrics}
    if not batch.names:
        no_maps = {request.label: Outcome[Attribution]() for request, _ in plan}
        return BatchStudy(batch, torch.empty(0, dtype=torch.long), no_maps, evaluations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target is None and vit.question is not None:  # the first of its scores, of every image
            target = torch.zeros(len(batch.names), dtype=torch.long)
        elif target is None:
            target = top_classes(vit.logits(batch.images), vit.outputs).index[:, 0]
        explained = explain_each(
            vit,
            batch.images,
            [request for request, _ in plan],
            target,
            seed=seed,
            finished=lambda outcomes: progress("explain", ", ".join(outcomes)),
        )
        maps = {label: outcome.result for label, outcome in explained.items() if outcome.result is not None}
        options = MeasureOptions(
            target,
            Annotations(batch.labels, batch.boxes, batch.masks),
            seed,
            progress=False,
            current=True,
            isolate=True,
            finished=lambda label: progress("measure", label),
        )
        by_label = {request.label: metrics for request, metrics in plan}
        measured = measure(vit, batch.images, maps, by_label, options) if maps else {}
    for method, outcomes in measured.items():
        evaluations |= {(method, metric): outcome for metric, outcome in outcomes.items()}
    return BatchStudy(batch, target, explained, evaluations)


@dataclass(frozen=True)
class MeasureOptions:
    """How maps are measured.

    Attributes:
        target: The classes to score; by default those that given maps explain, else the prediction.
        annotations: Labels, boxes and masks of the images.
        seed: Random seed.
        batch_size: Images per batch.
        progress: A progress bar, or a function of the images done.
        current: Whether given maps are the results of their method for these images, classes and seed.
        isolate: Whether an error is recorded for its method and metric instead of being raised.
        note: Called with every image as it is read.
        watch: Called with every batch and its maps.
        finished: Called with a label when a batch is measured for it.
        cache: A cache of the metrics across batches; pass the same one to share it between calls on one model.
    """

    target: Target = None
    annotations: Annotations = field(default_factory=Annotations)
    seed: int = 0
    batch_size: int = BATCH
    progress: Progress | bool = True
    current: bool = False
    isolate: bool = False
    note: Note | None = None
    watch: Watch | None = None
    finished: Callable[[str], None] = lambda label: None
    cache: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Column:
    """The results of one metric for one label, batch by batch; with `isolate`, an error ends only this column."""

    request: MetricRequest
    isolate: bool
    parts: list[Measured] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        except Exception as error:
            if not self.isolate:
                raise
            self.error = reason_of(error)
        self.seconds += time.perf_counter() - begin

    def outcome(self, undefined: Mapping[int, str], label: str) -> Outcome[Evaluation]:
        if self.error:
            return Outcome(error=self.error)
        evaluation = _evaluation(self.request, self.parts, undefined, label)
        return Outcome(evaluation, "", self.seconds / len(evaluation))


def measure(
    vit: Anatomy,
    images: Any,
    maps: Mapping[str, Any],
    metrics: Mapping[str, Sequence[MetricRequest]],
    options: MeasureOptions,
) -> dict[str, dict[str, Outcome[Evaluation]]]:
    """Measure maps by label, as in `evaluate`, batch by batch; returns outcomes by label and metric."""
    vit, images = vit.fit(images)
    if vit.question is not None:
        vit = vit.ask((vit.question.general or vit.question).measured())
    vit.renew()
    columns = {label: [_Column(request, options.isolate) for request in metrics[label]] for label in maps}
    for column in itertools.chain(*columns.values()):
        with column.attempt():
            column.request = column.request.suited(vit)
    seed, batch_size = integer("seed", options.seed, 0), integer("batch_size", options.batch_size, 1)
    batch_size = batch_size if vit.question is None else 1
    sizes: list[tuple[int, int] | None] = []

    def note(picture: Any) -> None:
        sizes.append(None if picture is None else picture.size)
        if options.note is not None:
            options.note(picture)

    streamed_labels: list[Any] | None = [] if options.annotations.labels is True else None
    count, batches = in_batches(images, batch_size, vit.preprocess, vit.channels, note, streamed_labels)
    count = next(filter(None, map(map_count, maps.values())), None) if count is None else count
    sources = {label: source_of(each, count, vit) for label, each in maps.items()}
    if not sources:
        raise PatchlightError(f"no maps were given; {GIVE_MAPS}")
    targets = None if vit.question is not None else resolve_targets(options.target, count, vit.outcomes, vit.labels)
    available = options.annotations
    if vit.question is not None and available.boxes is None and available.masks is None:
        # metrics of places measure the object in question
        available = replace(available, **dict.fromkeys(vit.question.annotations, ()))
    for label, source in sources.items():
        _check_one_class(targets or source.targets)
        for column in columns[label]:
            with column.attempt():
                check_needs(column.request, source.method, available)
    annotations = check_annotations(options.annotations, count, vit, streamed_labels)
    undefined: dict[str, dict[int, str]] = {label: {} for label in sources}
    begin = 0
    with show_progress(options.progress, "measuring") as report:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            if vit.question is not None:
                vit = vit.prepared(batch, sizes[begin])
                targets = _target_of_question(vit, options.target, begin)
            part = slice(begin, begin + len(batch))
            _check_count(part.stop, count, more=True)
            check_images(sources.values(), part, batch)
            classes = _classes(vit, batch, sources, targets, part, count)
            if vit.question is not None:
                vit.question.check_measured([i for each in classes.values() for i in each.index[:, 0].tolist()])
            explained = _maps(vit, batch, sources, classes, part, seed)
            if options.watch is not None:
                maps_by_label = {label: each.maps for label, each in explained.items()}
                options.watch(batch, classes[next(iter(sources))], maps_by_label)
            labels, boxes, masks = annotations(part)
            clean: dict[Any, Any] = {}
            for n, (label, source) in enumerate(sources.items()):
                objects = classes[label].index[:, 0]
                if available.boxes == ():
                    boxes = [cast(Any, vit.question).boxes_in_input()[i][None] for i in objects.tolist()]
                elif available.masks == ():
                    masks = cast(Any, vit.question).object_of(objects).to(batch.device).long()
                batch_maps = explained.pop(label)
                finite, broken = _finite(batch_maps.maps, begin, label)
                undefined[label] |= broken
                as_labels = None if options.target is None else objects
                scene = Measure(
                    vit,
                    batch,
                    finite,
                    classes[label],
                    labels if labels is not None else as_labels,
                    boxes,
                    masks,
                    source.method,
                    seed,
                    clean=clean,
                    kept=options.cache,
                    current=options.current or source.scores is None,
                    facts=batch_maps.facts,
                )
                for m, column in enumerate(columns[label]):
                    if not column.error:
                        with column.attempt():
                            column.parts.append(_only_labelled(column.request, scene, column.request.of(scene)))
                    report(begin + len(batch) * (n + (m + 1) / len(columns[label])) / len(sources), count)
                options.finished(label)
            begin = part.stop
            report(begin, count)
    _check_count(begin, count)
    return {
        label: {column.request.label: column.outcome(undefined[label], label) for column in columns[label]}
        for label in sources
    }


def _target_of_question(vit: Anatomy, target: Target, image: int) -> Targets | None:
    """The class to score for one image under its question, in the row of the image."""
    count = None
    if several(target):
        target, count = [target[image]], 1
    targets = resolve_targets(target, count, vit.outcomes, vit.labels)
    return None if targets is None else targets.repeat(image + 1)


def _classes(
    vit: Anatomy, batch: Tensor, sources: Mapping[str, Source], targets: Targets | None, part: slice, count: int | None
) -> dict[str, Targets]:
    """By label, the classes to score: those given, those that its maps explain, or the default ones."""
    known_classes = {label: targets or source.targets for label, source in sources.items()}
    default = None if all(known_classes.values()) else _default_classes(vit, batch)
    return {
        label: default if classes is None else classes.part(part.start, len(batch), count)  # type: ignore[misc]
        for label, classes in known_classes.items()
    }


def _default_classes(vit: Anatomy, batch: Tensor) -> Targets | None:
    """The label that a question is about, as in `explain`; without a question or of several labels, the prediction."""
    target = None if vit.question is None else vit.question.default_target()
    if isinstance(target, int):
        return resolve_targets(target, len(batch), vit.outcomes, vit.labels)
    return top_classes(vit.logits(batch), vit.outputs)


def _maps(
    vit: Anatomy, batch: Tensor, sources: Mapping[str, Source], classes: Mapping[str, Targets], part: slice, seed: int
) -> dict[str, BatchMaps]:
    """By label, the maps of one batch; all methods explain it in one pass."""
    requests = {label: source.request for label, source in sources.items() if source.request is not None}
    computed: dict[str, BatchMaps] = {}
    if requests:
        results = compute_maps(vit, batch, list(requests.values()), classes[next(iter(requests))], seed)
        computed = dict(zip(requests, results, strict=True))
    maps: dict[str, BatchMaps] = {}
    for label, source in sources.items():
        if source.scores is not None:
            facts = {name: torch.tensor(values[part]) for name, values in source.facts.items()}
            maps[label] = BatchMaps(source.scores[part].to(vit.device), facts)
        elif label in computed:
            scores = checked_maps(computed[label].maps.detach(), len(batch), vit)
            maps[label] = replace(computed[label], maps=scores.to(vit.device))
        else:
            maps[label] = BatchMaps(apply_method(source.method, vit, batch, classes[label], seed))
    return maps


def _check_count(images: int, count: int | None, more: bool = False) -> None:
    """Refuse a stream without images, or with another number of images than maps."""
    if images == 0:
        raise PatchlightError(f"no images were given; {GIVE_IMAGES}")
    if count is not None and (images > count if more else images != count):
        raise PatchlightError(f"there are maps of {count} images, but {'at least ' if more else ''}{images} images")


def _check_one_class(targets: Targets | None) -> None:
    if targets is not None and targets.count != 1:
        raise PatchlightError(f"maps of {targets.count} classes per image were given; measure one class at a time")


def _finite(maps: Tensor, first: int, label: str) -> tuple[Tensor, dict[int, str]]:
    """Maps without NaN and infinity, and the reasons of the images that had them; warns of constant maps."""
    flat = maps.flatten(1)
    broken = (~flat.isfinite()).any(1)
    reasons = {first + int(i): BROKEN for i in broken.nonzero().flatten()}
    flat_maps = (constant(flat) & ~broken).nonzero().flatten()
    if len(flat_maps) and flat.shape[1] > 1:
        names = ", ".join(str(first + int(i)) for i in flat_maps[:8]) + (f" by {label}" if label else "")
        words = f"the map of image {names} is constant: its order is random, and its value is that of a random map"
        warn(words, UndefinedMetric)
    return torch.where(broken.view(-1, *[1] * (maps.ndim - 1)), 0, maps), reasons


def _only_labelled(request: MetricRequest, scene: Measure, measured: Measured) -> Measured:
    """A metric that needs labels has no value for the images without one."""
    if "labels" not in request.metric.needs or scene.labels is None:
        return measured
    unknown = (scene.labels < 0).nonzero().flatten().tolist()
    return replace(measured, reasons={**measured.reasons, **dict.fromkeys(unknown, "its true class is not known")})


def _evaluation(
    request: MetricRequest, parts: Sequence[Measured], undefined: Mapping[int, str], label: str
) -> Evaluation:
    values = torch.cat([m.values.detach().double().cpu() for m in parts])
    reasons = dict.fromkeys((~values.isfinite()).nonzero().flatten().tolist(), "the value is not finite")
    starts = itertools.accumulate((len(m.values) for m in parts), initial=0)
    for start, m in zip(starts, parts, strict=False):
        reasons |= {start + i: reason for i, reason in m.reasons.items()}
    reasons |= undefined
    missing = sorted(reasons)
    values[missing] = float("nan")
    if missing:
        whose = f"{request.label} of {label}" if label else request.label
        warn(
            f"{whose}: no value for {len(missing)} of {len(values)} images, which are skipped "
            f"(image {missing[0]}: {reasons[missing[0]]})",
            UndefinedMetric,
        )
    curves = [m.curve.detach().double().cpu() for m in parts if m.curve is not None]
    curve = torch.cat(curves) if curves else None
    if curve is not None:
        curve[missing] = float("nan")
    return Evaluation(
        metric=request.metric.name,
        values=values,
        higher_is_better=request.metric.rises(request.settings),
        bounds=request.metric.limits(request.settings),
        curve=curve,
        x=parts[0].x.double().cpu() if parts[0].x is not None else None,
        reasons=tuple(reasons.get(i, "") for i in range(len(values))),
        settings=request.settings,
        parts={key: torch.cat([m.parts[key].detach().double().cpu() for m in parts]) for key in parts[0].parts},
        combine=request.metric.combine,
    )
