"""`evaluate`: from maps and metric names to verdicts, batch by batch; every input is checked here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, overload

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, undisturbed
from patchlight.anatomy.load import wrap
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError, UndefinedMetric, integer, warn
from patchlight.core.fingerprints import identity, of_images
from patchlight.core.images import Note, in_batches
from patchlight.core.progress import Progress, telling
from patchlight.core.registry import Asked, resolve_all
from patchlight.core.statistics import constant
from patchlight.core.targets import Score, ScoreName, Target, Targets, predicted, resolve_targets
from patchlight.engine import estimate
from patchlight.methods.requests import Request, check_supported, resolve
from patchlight.metrics.base import (
    Evaluation,
    Evaluations,
    MapFunction,
    Measure,
    Measured,
    MetricRequest,
    checked_maps,
    made_by,
    resolve_metric,
)


@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Mapping[str, Any] | list[str],
    metric: Asked = ...,
    target: Target = ...,
    **options: Any,
) -> Evaluations: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module, images: Any, maps: Any, metric: str = ..., target: Target = ..., **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Sequence[str] | Mapping[str, Mapping[str, Any] | str] | Sequence[MetricRequest],
    target: Target = ...,
    **options: Any,
) -> Evaluations: ...
@undisturbed
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Asked | Sequence[MetricRequest] = "ins-del",
    target: Target = None,
    *,
    labels: Any = None,
    boxes: Sequence[Any] | None = None,
    masks: Any = None,
    seed: int = 0,
    batch_size: int = 16,
    progress: Progress | bool = True,
    current: bool = False,
    **settings: Any,
) -> Evaluation | Evaluations:
    """Measure maps of images: an Attribution, an array [B,h,w], a method's name, or a callable that explains.

    A dict of these, such as `explain` gives for several methods, or a list of names gives a dict by label. `images`
    and `progress` are as in `explain`: a generator or DataLoader is read as it comes, and explained with the methods
    that are given by name (or as a dict with their settings), all in one pass. A callable takes (vit, images [B,C,H,W],
    targets, seed) and gives maps [B,h,w].

    `metric`: a name, a list, or a dict of names and settings (a setting `metric` makes the name a free label); the
    latter two give a dict. `target`: the class asked about; by default the one an Attribution explains, else the
    prediction. `labels` are the true classes (default: the target; None where one is not known); True takes those that
    come with a loader's images, as (images, labels), which must be classes of this model. `boxes` are one [n,4] per
    image and `masks` [B,H,W] on the canvas the model sees (`patchlight.data` makes them). `current` says that an
    Attribution is what its method makes of these very images, classes and seed, so that a metric which explains images
    itself need not begin with it. Further keywords are the metric's settings.

    >>> pl.evaluate(vit, images, att, metric="deletion", preset="rise").mean      # doctest: +SKIP
    """
    requests = resolve_all(
        metric, settings, MetricRequest, "metric", lambda label, own: resolve_metric(label, own, _OPTIONS)
    )
    if isinstance(maps, list | tuple) and maps and all(isinstance(one, str) for one in maps):
        maps = {name: name for name in maps}
    several = isinstance(maps, Mapping)
    given = Annotations(labels, boxes, masks)
    found = measure(
        wrap(vit), images, maps if several else {"": maps}, requests, target, given, seed, batch_size, progress, current
    )
    each = {label: own[metric] if isinstance(metric, str) else own for label, own in found.items()}
    return Evaluations(each, "method") if several else each[""]


_OPTIONS = ("metric", "target", "labels", "boxes", "masks", "seed", "batch_size", "progress", "current")


@dataclass(frozen=True)
class Annotations:
    """What is known of the images besides their maps, as `evaluate` takes it."""

    labels: Any = None
    boxes: Sequence[Any] | None = None
    masks: Any = None


@dataclass(frozen=True)
class Source:
    """Where the maps of one label come from: they are given (`scores`), or made of each batch.

    `targets` are the classes that given maps explain, `images` the hashes of what they were made of, `facts` the
    numbers that their method reports of each image.
    """

    scores: Tensor | None = None
    request: Request | None = None
    method: MapFunction | None = None
    targets: Targets | None = None
    images: tuple[str, ...] = ()
    facts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchMaps:
    """The maps [b,h,w] of one label on a batch, and what their method reports of each image [b], by name."""

    maps: Tensor
    facts: Mapping[str, Tensor] = field(default_factory=dict)


Watch = Callable[[Tensor, Targets, Mapping[str, Tensor]], None]
"""Told of every batch: its images [b,C,H,W], the classes asked about and the maps [b,h,w] by label."""


def measure(
    vit: Anatomy,
    images: Any,
    maps: Mapping[str, Any],
    requests: Sequence[MetricRequest],
    target: Target,
    annotations: Annotations,
    seed: int,
    batch_size: int,
    progress: Progress | bool,
    current: bool = False,
    note: Note | None = None,
    watch: Watch | None = None,
) -> dict[str, Evaluations]:
    """By label of the maps, every metric asked: batch by batch, of which nothing but the values is kept."""
    vit.renew()
    requests = [request.suited(vit) for request in requests]
    seed, batch_size = integer("seed", seed, 0), integer("batch_size", batch_size, 1)
    read: list[Any] | None = [] if annotations.labels is True else None
    count, batches = in_batches(images, batch_size, vit.preprocess, vit.channels, note, read)
    count = next(filter(None, map(_length, maps.values())), None) if count is None else count
    sources = {label: _source(own, count, vit) for label, own in maps.items()}
    if not sources:
        raise PatchlightError(
            "no maps were given; give an Attribution, an array [B,h,w], a method's name or a callable"
        )
    asked = resolve_targets(target, count, vit.outcomes, vit.labels)
    for source in sources.values():
        _check_one_class(asked or source.targets)
        for request in requests:
            _check_needs(request, source.method, annotations)
    annotated = _annotated(annotations, count, vit, read)
    found: dict[tuple[str, str], list[Measured]] = {(label, r.label): [] for label in sources for r in requests}
    undefined: dict[str, dict[int, str]] = {label: {} for label in sources}
    kept: dict[Any, Any] = {}
    begin = 0
    with telling(progress, "measuring") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            part = slice(begin, begin + len(batch))
            _check_count(part.stop, count, more=True)
            _check_images(sources.values(), part, batch)
            chosen, explained = _explained(vit, batch, sources, asked, part, count, seed)
            if watch is not None:
                watch(batch, chosen[next(iter(sources))], {label: own.maps for label, own in explained.items()})
            truth, frames, canvas = annotated(part)
            for n, (label, source) in enumerate(sources.items()):
                own_maps = explained.pop(label)
                own, bad = _finite(own_maps.maps, begin, label)
                undefined[label] |= bad
                given = Measure(
                    vit,
                    batch,
                    own,
                    chosen[label],
                    truth if truth is not None else None if target is None else chosen[label].index[:, 0],
                    frames,
                    canvas,
                    source.method,
                    seed,
                    kept=kept,
                    current=current or source.scores is None,
                    facts=own_maps.facts,
                )
                for m, request in enumerate(requests):
                    found[label, request.label].append(_only_labelled(request, given, request.of(given)))
                    tell(begin + len(batch) * (n + (m + 1) / len(requests)) / len(sources), count)
            begin = part.stop
            tell(begin, count)
    _check_count(begin, count)
    return {
        label: Evaluations({r.label: _evaluation(r, found[label, r.label], undefined[label], label) for r in requests})
        for label in sources
    }


def _explained(
    vit: Anatomy,
    batch: Tensor,
    sources: Mapping[str, Source],
    asked: Targets | None,
    part: slice,
    count: int | None,
    seed: int,
) -> tuple[dict[str, Targets], dict[str, BatchMaps]]:
    """By label, the classes asked about and the maps of one batch; all methods explain it in one pass."""
    guess: list[Targets] = []

    def classes(source: Source) -> Targets:
        given = asked or source.targets
        if given is not None:
            return given.part(part.start, len(batch), count)
        if not guess:
            guess.append(predicted(vit.logits(batch), vit.outputs))
        return guess[0]

    chosen = {label: classes(source) for label, source in sources.items()}
    together = {label: source.request for label, source in sources.items() if source.request is not None}
    made: dict[str, BatchMaps] = {}
    if together:
        found = _computed(vit, batch, list(together.values()), chosen[next(iter(together))], seed)
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
    return chosen, maps


def _computed(
    vit: Anatomy, images: Tensor, requests: Sequence[Request], targets: Targets, seed: int
) -> list[BatchMaps]:
    """What methods make of images, without their warnings: a metric has its own for maps that say nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [BatchMaps(one.maps[:, 0], one.facts) for one in estimate(vit, images, requests, targets, seed)[1]]


Beside = tuple[Tensor | None, Sequence[Tensor] | None, Tensor | None]


def _annotated(
    given: Annotations, count: int | None, vit: Anatomy, read: list[Any] | None
) -> Callable[[slice], Beside]:
    """Labels, boxes and masks of some of the images, all checked; labels that come with the images are in `read`."""
    labels = None if read is not None else given.labels
    known = _known(count, labels, given.boxes, given.masks)
    truth = _labels(labels, known, vit) if labels is not None else None
    canvas = _masks(given.masks, known, vit) if given.masks is not None else None
    frames = _boxes(given.boxes, known, vit) if given.boxes is not None else None

    def of(part: slice) -> Beside:
        own = truth[part] if truth is not None else None
        return (
            own if read is None else _labels(read[part], part.stop - part.start, vit),
            frames[part] if frames is not None else None,
            canvas[part].to(vit.device) if canvas is not None else None,
        )

    return of


def _length(maps: Any) -> int | None:
    """How many images maps are of, where they are given."""
    return len(maps) if isinstance(maps, Attribution | Tensor | np.ndarray | list | tuple) else None


def _known(count: int | None, *annotations: Any) -> int:
    """The number of images, which annotations cannot do without."""
    if count is None and any(given is not None for given in annotations):
        raise PatchlightError("labels, boxes and masks need images whose number is known beforehand; give a list")
    return count or 0


def _check_count(seen: int, count: int | None, more: bool = False) -> None:
    """Refuse images that come one after another and turn out to be none, or not as many as the maps."""
    if seen == 0:
        raise PatchlightError("no images were given; give a tensor, PIL image(s) or path(s)")
    if count is not None and (seen > count if more else seen != count):
        raise PatchlightError(f"there are maps of {count} images, but {'at least ' if more else ''}{seen} images came")


def _source(maps: Any, count: int | None, vit: Anatomy) -> Source:
    """Maps as they were given, or what makes them; of an Attribution, both where its method is known."""
    if isinstance(maps, str):
        maps = resolve(maps)
    elif isinstance(maps, Mapping) and "method" in maps:
        maps = resolve(str(maps["method"]), maps)
    if isinstance(maps, Request):
        check_supported(maps, vit)
        return Source(request=maps, method=maps_by(maps))
    if isinstance(maps, Attribution):
        if maps.scores.ndim != 3:
            raise PatchlightError("this attribution explains several classes an image; measure them one at a time")
        check_model(maps, vit)
        own = Targets(maps.target[:, None], None if maps.against is None else maps.against[:, None])
        scores = checked_maps(maps.scores, len(maps) if count is None else count, vit)
        return Source(scores, method=_maker_of(maps), targets=own, images=maps.images, facts=maps.facts)
    if callable(maps):
        return Source(method=maps)
    try:
        tensor = maps if isinstance(maps, Tensor) else torch.as_tensor(np.asarray(maps))
    except (TypeError, ValueError) as error:
        raise PatchlightError(
            f"maps are a {type(maps).__name__}; give an Attribution, an array [B,h,w], a method's name or a callable"
        ) from error
    return Source(checked_maps(tensor, len(tensor) if count is None else count, vit))


def check_model(maps: Attribution, vit: Anatomy) -> None:
    """Refuse maps of other weights, or of classes that the model does not have."""
    classes = vit.outcomes
    asked = [maps.target.flatten(), *(() if maps.against is None else (maps.against.flatten(),))]
    wrong = next((int(c) for c in torch.cat(asked) if not 0 <= int(c) < classes), None)
    if wrong is not None:
        raise PatchlightError(
            f"the maps are of {maps.model} and explain its class {wrong}, but {vit.name} has {classes} classes; "
            f"measure them on the model they are of"
        )
    head = {} if vit.head is None else vit.head.about()
    if maps.weights and maps.head != head:
        theirs, ours = (", ".join(each["labels"]) if each else "its own classifier" for each in (maps.head, head))
        raise PatchlightError(
            f"the maps are of another head of {maps.model} ({theirs}) than is asked here ({ours}); measure them with "
            "the head they are of"
        )
    if maps.weights and maps.weights != identity(vit):
        raise PatchlightError(
            f"the maps are of other weights ({maps.model}, {maps.weights}) than those of {vit.name} "
            f"({identity(vit)}); measure them on the model they are of (in Python, maps.scores on any)"
        )


def _check_images(sources: Iterable[Source], part: slice, batch: Tensor) -> None:
    """Refuse images that are not those the maps were made of; nothing is known of older maps."""
    known = [source.images[part] for source in sources if source.images]
    seen = of_images(batch) if known else ()
    for explained in known:
        wrong = next((i for i, (one, other) in enumerate(zip(explained, seen, strict=False)) if one != other), None)
        if wrong is not None:
            raise PatchlightError(
                f"image {part.start + wrong} is not the one its map was made of; give the same images in the same "
                f"order, or maps.scores to measure the maps on these"
            )


def _check_one_class(targets: Targets | None) -> None:
    if targets is not None and targets.count != 1:
        raise PatchlightError(f"maps of {targets.count} classes an image were given; a metric measures one at a time")


def map_function(name: str, settings: Mapping[str, Any] | None = None, score: Score | None = None) -> MapFunction:
    """A registered method as a function that makes maps."""
    return maps_by(resolve(name, settings, score))


def maps_by(request: Request) -> MapFunction:
    """A method as asked, as a function that makes maps."""
    return lambda vit, images, targets, seed: _computed(vit, images, [request], targets, seed)[0].maps


def _maker_of(maps: Attribution) -> MapFunction | None:
    """How an attribution was made; None where its method is not registered here or its score was a callable."""
    try:
        entry = resolve(maps.method)
    except PatchlightError:
        return None
    settings = dict(maps.settings)
    if maps.level == "pixel" and entry.in_pass:
        settings.pop("start", None)  # blocks, of which a map of the image itself has none
    if "level" in entry.settings:
        settings["level"] = maps.level
    score = maps.score if maps.score in get_args(ScoreName) else None
    return None if score is None else map_function(maps.method, settings, score)  # type: ignore[arg-type]


def _finite(maps: Tensor, first: int, label: str) -> tuple[Tensor, dict[int, str]]:
    """Maps without NaN, and the images that had one; constant maps are told."""
    flat = maps.flatten(1)
    broken = (~flat.isfinite()).any(1)
    bad = {first + int(i): "the map holds NaN or infinite values" for i in broken.nonzero().flatten()}
    dead = (constant(flat) & ~broken).nonzero().flatten()
    if len(dead) and flat.shape[1] > 1:
        names = ", ".join(str(first + int(i)) for i in dead[:8]) + (f" by {label}" if label else "")
        warn(
            f"the map of image {names} is constant: its order is a seeded draw, and its value that of a random map",
            UndefinedMetric,
        )
    return torch.where(broken[:, None, None], 0, maps), bad


def _check_needs(request: MetricRequest, method: MapFunction | None, given: Annotations) -> None:
    if request.metric.explains and method is None:
        raise PatchlightError(
            f"'{request.metric.name}' explains images itself, so it needs a method: give an Attribution, a method's "
            f"name or a callable instead of maps"
        )
    needs = sorted(request.metric.needs)
    missing = [need for need in needs if all(getattr(given, one) is None for one in need.split(" or "))]
    if missing:
        first = missing[0].split(" or ")[0]
        raise PatchlightError(f"'{request.metric.name}' needs {' and '.join(missing)}; give {first}=… (or --data KIND)")


def _only_labelled(request: MetricRequest, given: Measure, measured: Measured) -> Measured:
    """A metric that cannot do without labels has no value for the images whose true class is not known."""
    if "labels" not in request.metric.needs or given.labels is None:
        return measured
    unknown = (given.labels < 0).nonzero().flatten().tolist()
    return replace(measured, reasons={**measured.reasons, **dict.fromkeys(unknown, "its true class is not known")})


def _labels(labels: Any, count: int, vit: Anatomy) -> Tensor:
    """The true classes [B]; -1 where one is not known, which is None or -1 in a list or tensor."""
    rows = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    unknown = [i for i, row in enumerate(rows) if row is None or row == -1] if isinstance(rows, list | tuple) else []
    given = [0 if i in unknown else row for i, row in enumerate(rows)] if unknown else labels
    targets = resolve_targets(given, count, vit.outcomes, vit.labels)
    assert targets is not None
    truth = targets.index[:, 0].clone()
    truth[unknown] = -1
    return truth


def _masks(masks: Any, count: int, vit: Anatomy) -> Tensor:
    tensor = masks if isinstance(masks, Tensor) else torch.as_tensor(np.asarray(masks))
    if tuple(tensor.shape) != (count, *vit.preprocess.size):
        size = [count, *vit.preprocess.size]
        raise PatchlightError(f"masks have shape {list(tensor.shape)}; these images take masks of shape {size}")
    values = set(tensor.unique().tolist())
    if not values <= {-1, 0, 1}:
        raise PatchlightError(
            f"masks hold {sorted(values)[:5]}; give 1 for the object, 0 around it, -1 for not labelled"
        )
    return tensor.to(torch.int8)


def _boxes(boxes: Sequence[Any], count: int, vit: Anatomy) -> list[Tensor]:
    if len(boxes) != count:
        raise PatchlightError(f"boxes are given for {len(boxes)} images, but there are {count}")
    height, width = vit.preprocess.size
    checked_boxes = []
    for i, given in enumerate(boxes):
        box = torch.as_tensor(given, dtype=torch.float64)
        if box.numel() % 4 or (box.ndim > 1 and box.shape[-1] != 4):
            raise PatchlightError(f"boxes of image {i} have shape {list(box.shape)}; give [n, 4]")
        box = box.reshape(-1, 4)
        low, high = box[:, :2], box[:, 2:]
        inside = (low >= 0).all() and (high[:, 0] <= width).all() and (high[:, 1] <= height).all()
        if not (inside and (high > low).all()):
            raise PatchlightError(
                f"a box of image {i} is {box.tolist()}; boxes are xmin, ymin, xmax, ymax inside {width}x{height}"
            )
        checked_boxes.append(box)
    return checked_boxes


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
