"""The one driver: methods explain images, metrics measure the maps, and a failure stays with its own cells."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, UndefinedMetric, escape_surrogates, integer, warn
from patchlight.core.images import Note, in_batches
from patchlight.core.progress import Progress, show_progress
from patchlight.core.statistics import constant
from patchlight.core.targets import Target, Targets, resolve_targets, top_classes
from patchlight.data import Batch
from patchlight.engine import explain
from patchlight.methods.requests import Request, refusal
from patchlight.metrics.base import Evaluation, Measure, Measured, MetricRequest, checked_maps, made_by
from patchlight.study.cell import Cell
from patchlight.study.sources import (
    Annotations,
    BatchMaps,
    Source,
    check_images,
    check_needs,
    checked_annotations,
    computed_maps,
    map_count,
    source_of,
)

BATCH = 16
"""Images that are measured at once."""
BROKEN = "the map holds NaN or infinite values"

T = TypeVar("T")
Plan = Mapping[Request, Sequence[MetricRequest]]
Watch = Callable[[Tensor, Targets, Mapping[str, Tensor]], None]
"""A function of every batch: its images [b,C,H,W], the classes explained and the maps [b,h,w] by label."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """A result, or the error in its place.

    Attributes:
        result: What was computed; None where that failed.
        error: Why there is no result.
        seconds: Seconds per image.
        shared_by: How many results share that time.
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
    finite: bool = False,
    catch: type[Exception] = Exception,
    finished: Callable[[Mapping[str, Outcome[Attribution]]], None] = lambda outcomes: None,
) -> dict[str, Outcome[Attribution]]:
    """Explain images with every method: all that share a pass together, and one by one where that fails.

    Args:
        vit: The opened model.
        images: Preprocessed images [B,C,H,W].
        requests: The methods, each under its own label.
        target: The classes to explain, as `explain` takes them.
        seed: The seed of methods that sample.
        finite: Whether a map that is not finite counts as failed.
        catch: The errors that become reasons; others are raised.
        finished: Called with the outcomes of every call as it is done.

    Returns:
        By label, an attribution or the reason why there is none.
    """
    outcomes: dict[str, Outcome[Attribution]] = {}
    able: list[Request] = []
    for request in requests:
        reason = refusal(request.suited(vit), vit)
        if reason is None:
            able.append(request)
        else:
            refused = Outcome[Attribution](error=f"'{request.name}' does not work on {vit.name}: {reason}")
            outcomes[request.label] = refused
            finished({request.label: refused})

    def call(some: Sequence[Request]) -> dict[str, Attribution]:
        return explain(vit, images, some, target, seed=seed, finite=finite, progress=False)

    for some in filter(None, [[r for r in able if r.in_pass], *([r] for r in able if not r.in_pass)]):
        together = _together(call, some, len(images), catch)
        outcomes |= together
        finished(together)
    return {request.label: outcomes[request.label] for request in requests}


def _together(
    call: Callable[[Sequence[Request]], Mapping[str, Attribution]],
    requests: Sequence[Request],
    images: int,
    catch: type[Exception],
) -> dict[str, Outcome[Attribution]]:
    """One call for all these methods, which share its time; where it fails, one for each."""
    begin = time.perf_counter()
    try:
        maps = call(requests)
    except catch as error:
        if len(requests) == 1:
            return {requests[0].label: Outcome(error=reason_of(error))}
        return {label: one for request in requests for label, one in _together(call, [request], images, catch).items()}
    seconds = (time.perf_counter() - begin) / images
    return {request.label: Outcome(maps[request.label], "", seconds, len(requests)) for request in requests}


def reason_of(error: Exception) -> str:
    """An error as one sentence; the type of an unexpected one comes first."""
    text = escape_surrogates(" ".join(str(error).split())) or type(error).__name__
    return text if isinstance(error, PatchlightError) else f"{type(error).__name__}: {text}"


@dataclass(frozen=True)
class BatchStudy:
    """What methods and metrics say of a batch of images.

    Attributes:
        batch: The images.
        target: The class [B] each was explained and measured for.
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
    plan: Plan | Sequence[tuple[Request, Sequence[MetricRequest]]],
    *,
    target: Tensor | None = None,
    seed: int = 0,
    progress: Callable[[str, str], None] = lambda step, label: None,
) -> BatchStudy:
    """Explain a batch with every method of the plan, and measure each by its metrics; failures become reasons.

    Args:
        vit: The opened model.
        batch: Images with their names and annotations, as `patchlight.data` loads them.
        plan: The methods, each with the metrics that measure it.
        target: The class [B] of each image; by default the prediction.
        seed: The seed of methods and metrics that sample.
        progress: Called with "explain" and the labels, or "measure" and the label, after each step.

    Returns:
        The attributions and evaluations, and with them the cells.
    """
    pairs = list(plan.items() if isinstance(plan, Mapping) else plan)
    if not batch.names:
        unread: Mapping[tuple[str, str], Outcome[Evaluation]] = {
            (request.label, metric.label): Outcome() for request, metrics in pairs for metric in metrics
        }
        none = {request.label: Outcome[Attribution]() for request, _ in pairs}
        return BatchStudy(batch, torch.empty(0, dtype=torch.long), none, unread)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if target is None:
            target = top_classes(vit.logits(batch.images), vit.outputs).index[:, 0]
        explained = explain_each(
            vit,
            batch.images,
            [request for request, _ in pairs],
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
        by_label = {request.label: metrics for request, metrics in pairs}
        measured = measure(vit, batch.images, maps, by_label, options) if maps else {}
    evaluations = {
        (request.label, metric.label): measured[request.label][metric.label] if request.label in maps else Outcome()
        for request, metrics in pairs
        for metric in metrics
    }
    return BatchStudy(batch, target, explained, evaluations)


def cells(
    vit: Anatomy,
    batch: Batch,
    methods: Sequence[Request],
    metrics: Sequence[MetricRequest],
    *,
    target: Tensor | None = None,
    seed: int = 0,
) -> Iterator[Cell]:
    """Explain a batch with every method, measure the maps with every metric, and give a cell for each.

    Methods that share a pass run together, and one by one where that fails. Constant maps are noted, maps that are not
    finite are errors, and the model's answer to the images themselves is computed once for all metrics.

    Args:
        vit: The opened model.
        batch: Images with their names and annotations.
        methods: The methods.
        metrics: The metrics.
        target: The class [B] of each image; by default the prediction.
        seed: The seed of methods and metrics that sample.
    """
    plan = [(method, metrics) for method in methods]
    return study_batch(vit, batch, plan, target=target, seed=seed).cells()


@dataclass(frozen=True)
class MeasureOptions:
    """How maps are measured.

    Attributes:
        target: The classes asked about; by default those that given maps explain, else the prediction.
        annotations: Labels, boxes and masks of the images.
        seed: The seed of methods and metrics that sample.
        batch_size: Images at once.
        progress: A progress bar, or a function of the images done.
        current: Whether given maps are what their method makes of these images, classes and seed.
        isolate: Whether an error becomes the reason of its own method and metric instead of being raised.
        note: Called with every image as it is read.
        watch: Called with every batch and its maps.
        finished: Called with a label when a batch is measured for it.
        kept: What metrics keep from batch to batch; give the same to go on in another call on the same model.
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
    kept: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Column:
    """What one metric says of one label's maps, batch by batch; with `isolate`, an error ends it instead of the run."""

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
    """By label of the maps, every metric asked of it: batch by batch, of which nothing but the values is kept."""
    vit.renew()
    columns = {label: [_Column(request, options.isolate) for request in metrics[label]] for label in maps}
    for column in itertools.chain(*columns.values()):
        with column.attempt():
            column.request = column.request.suited(vit)
    seed, batch_size = integer("seed", options.seed, 0), integer("batch_size", options.batch_size, 1)
    given = options.annotations
    read: list[Any] | None = [] if given.labels is True else None
    count, batches = in_batches(images, batch_size, vit.preprocess, vit.channels, options.note, read)
    count = next(filter(None, map(map_count, maps.values())), None) if count is None else count
    sources = {label: source_of(own, count, vit) for label, own in maps.items()}
    if not sources:
        raise PatchlightError(
            "no maps were given; give an Attribution, an array [B,h,w], a method's name or a callable"
        )
    targets = resolve_targets(options.target, count, vit.outcomes, vit.labels)
    for label, source in sources.items():
        _check_one_class(targets or source.targets)
        for column in columns[label]:
            with column.attempt():
                check_needs(column.request, source.method, given)
    annotations = checked_annotations(given, count, vit, read)
    undefined: dict[str, dict[int, str]] = {label: {} for label in sources}
    begin = 0
    with show_progress(options.progress, "measuring") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            part = slice(begin, begin + len(batch))
            _check_count(part.stop, count, more=True)
            check_images(sources.values(), part, batch)
            chosen = _classes(vit, batch, sources, targets, part, count)
            explained = _maps(vit, batch, sources, chosen, part, seed)
            if options.watch is not None:
                options.watch(batch, chosen[next(iter(sources))], {label: own.maps for label, own in explained.items()})
            labels, boxes, masks = annotations(part)
            clean: dict[Any, Any] = {}
            for n, (label, source) in enumerate(sources.items()):
                of_label = explained.pop(label)
                finite, broken = _finite(of_label.maps, begin, label)
                undefined[label] |= broken
                classes = None if options.target is None else chosen[label].index[:, 0]
                scene = Measure(
                    vit,
                    batch,
                    finite,
                    chosen[label],
                    labels if labels is not None else classes,
                    boxes,
                    masks,
                    source.method,
                    seed,
                    clean=clean,
                    kept=options.kept,
                    current=options.current or source.scores is None,
                    facts=of_label.facts,
                )
                for m, column in enumerate(columns[label]):
                    if not column.error:
                        with column.attempt():
                            column.parts.append(_only_labelled(column.request, scene, column.request.of(scene)))
                    tell(begin + len(batch) * (n + (m + 1) / len(columns[label])) / len(sources), count)
                options.finished(label)
            begin = part.stop
            tell(begin, count)
    _check_count(begin, count)
    return {
        label: {column.request.label: column.outcome(undefined[label], label) for column in columns[label]}
        for label in sources
    }


def _classes(
    vit: Anatomy,
    batch: Tensor,
    sources: Mapping[str, Source],
    targets: Targets | None,
    part: slice,
    count: int | None,
) -> dict[str, Targets]:
    """By label, the classes asked about: those given, those that its maps explain, or the prediction."""
    known = {label: targets or source.targets for label, source in sources.items()}
    guess = None if all(known.values()) else top_classes(vit.logits(batch), vit.outputs)
    return {
        label: guess if classes is None else classes.part(part.start, len(batch), count)  # type: ignore[misc]
        for label, classes in known.items()
    }


def _maps(
    vit: Anatomy, batch: Tensor, sources: Mapping[str, Source], chosen: Mapping[str, Targets], part: slice, seed: int
) -> dict[str, BatchMaps]:
    """By label, the maps of one batch; all methods explain it in one pass."""
    together = {label: source.request for label, source in sources.items() if source.request is not None}
    made: dict[str, BatchMaps] = {}
    if together:
        found = computed_maps(vit, batch, list(together.values()), chosen[next(iter(together))], seed)
        made = dict(zip(together, found, strict=True))
    maps: dict[str, BatchMaps] = {}
    for label, source in sources.items():
        if source.scores is not None:
            facts = {name: torch.tensor(values[part]) for name, values in source.facts.items()}
            maps[label] = BatchMaps(source.scores[part].to(vit.device), facts)
        elif label in made:
            own = made[label]
            maps[label] = replace(own, maps=checked_maps(own.maps.detach(), len(batch), vit).to(vit.device))
        else:
            maps[label] = BatchMaps(made_by(source.method, vit, batch, chosen[label], seed))
    return maps


def _check_count(seen: int, count: int | None, more: bool = False) -> None:
    """Refuse images that come one after another and turn out to be none, or not as many as the maps."""
    if seen == 0:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    if count is not None and (seen > count if more else seen != count):
        raise PatchlightError(f"there are maps of {count} images, but {'at least ' if more else ''}{seen} images came")


def _check_one_class(targets: Targets | None) -> None:
    if targets is not None and targets.count != 1:
        raise PatchlightError(f"maps of {targets.count} classes an image were given; a metric measures one at a time")


def _finite(maps: Tensor, first: int, label: str) -> tuple[Tensor, dict[int, str]]:
    """Maps without NaN, and the images that had one; constant maps are told."""
    flat = maps.flatten(1)
    broken = (~flat.isfinite()).any(1)
    bad = {first + int(i): BROKEN for i in broken.nonzero().flatten()}
    dead = (constant(flat) & ~broken).nonzero().flatten()
    if len(dead) and flat.shape[1] > 1:
        names = ", ".join(str(first + int(i)) for i in dead[:8]) + (f" by {label}" if label else "")
        warn(
            f"the map of image {names} is constant: its order is a seeded draw, and its value that of a random map",
            UndefinedMetric,
        )
    return torch.where(broken[:, None, None], 0, maps), bad


def _only_labelled(request: MetricRequest, given: Measure, measured: Measured) -> Measured:
    """A metric that cannot do without labels has no value for the images whose true class is not known."""
    if "labels" not in request.metric.needs or given.labels is None:
        return measured
    unknown = (given.labels < 0).nonzero().flatten().tolist()
    return replace(measured, reasons={**measured.reasons, **dict.fromkeys(unknown, "its true class is not known")})


def _evaluation(
    request: MetricRequest, found: Sequence[Measured], undefined: Mapping[int, str], label: str
) -> Evaluation:
    values = torch.cat([m.values.detach().double().cpu() for m in found])
    reasons = [""] * len(values)
    first = 0
    for m in found:
        for i, reason in m.reasons.items():
            reasons[first + i] = reason
            values[first + i] = float("nan")
        first += len(m.values)
    for i, reason in undefined.items():
        reasons[i] = reason
        values[i] = float("nan")
    for i in (~values.isfinite()).nonzero().flatten().tolist():
        reasons[i] = reasons[i] or "the value is not finite"
        values[i] = float("nan")
    missing = [i for i, reason in enumerate(reasons) if reason]
    if missing:
        whose = f"{request.label} of {label}" if label else request.label
        warn(
            f"{whose}: no value for {len(missing)} of {len(values)} images, which do not count "
            f"(image {missing[0]}: {reasons[missing[0]]})",
            UndefinedMetric,
        )
    curves = [m.curve.detach().double().cpu() for m in found if m.curve is not None]
    curve = torch.cat(curves) if curves else None
    if curve is not None:
        curve[missing] = float("nan")
    return Evaluation(
        metric=request.metric.name,
        values=values,
        higher_is_better=request.metric.rises(request.settings),
        bounds=request.metric.limits(request.settings),
        curve=curve,
        x=found[0].x.double().cpu() if found[0].x is not None else None,
        reasons=tuple(reasons),
        settings=request.settings,
        parts={key: torch.cat([m.parts[key].detach().double().cpu() for m in found]) for key in found[0].parts},
        combine=request.metric.combine,
    )
