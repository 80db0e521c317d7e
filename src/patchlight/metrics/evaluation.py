"""`evaluate`: from maps and metric names to verdicts, batch by batch; every input is checked here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, undisturbed
from patchlight.anatomy.load import wrap
from patchlight.attribution import Attribution
from patchlight.engine import compute
from patchlight.errors import PatchlightError, UndefinedMetric, integer, warn
from patchlight.evidence.ablation import ABLATION
from patchlight.fingerprints import fingerprint, of_images
from patchlight.images import in_batches
from patchlight.methods.requests import resolve
from patchlight.metrics.base import (
    Evaluation,
    MapFunction,
    Measure,
    Measured,
    MetricRequest,
    checked_maps,
    made_by,
    resolve_metric,
)
from patchlight.progress import Progress, telling
from patchlight.registry import Asked, resolve_all
from patchlight.statistics import constant
from patchlight.targets import Score, Target, Targets, predicted, resolve_targets


@overload
def evaluate(
    vit: Anatomy | nn.Module, images: Any, maps: Any, metric: str = ..., target: Target = ..., **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Sequence[str] | Mapping[str, Mapping[str, Any]] | Sequence[MetricRequest],
    target: Target = ...,
    **options: Any,
) -> dict[str, Evaluation]: ...
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
    progress: Progress | bool | None = None,
    current: bool = False,
    **settings: Any,
) -> Evaluation | dict[str, Evaluation]:
    """Measure maps of images: an Attribution, an array [B,h,w], a method's name, or a callable that explains.

    `images` and `progress` are as in `explain`: a generator or DataLoader is read as it comes. A callable takes
    (vit, images [B,C,H,W], targets, seed) and gives maps [B,h,w].

    `metric`: a name, a list, or a dict of names and settings (a setting `metric` makes the name a free label); the
    latter two give a dict. `target`: the class asked about; by default the one an Attribution explains, else the
    prediction. `labels` are the true classes (default: the target; None where one is not known), `boxes` one [n,4] per
    image and `masks` [B,H,W] on the canvas the model sees (`patchlight.data` makes them). `current` says that an
    Attribution is what its method makes of these very images, classes and seed, so that a metric which explains images
    itself need not begin with it. Further keywords are the metric's settings.

    >>> pl.evaluate(vit, images, att, metric="deletion", preset="rise").mean      # doctest: +SKIP
    """
    vit = wrap(vit)
    vit.renew()
    seed, batch_size = integer("seed", seed, 0), integer("batch_size", batch_size, 1)
    requests = resolve_all(
        metric, settings, MetricRequest, "metric", lambda label, own: resolve_metric(label, own, _OPTIONS)
    )
    count, batches = in_batches(images, batch_size, vit.preprocess, vit.channels)
    count = _length(maps) if count is None else count
    scores, method, explained = _maps(maps, count, vit, seed)
    targets = resolve_targets(target, count, vit.classes, vit.labels) or explained
    if targets is not None and targets.count != 1:
        raise PatchlightError(f"maps of {targets.count} classes an image were given; a metric measures one at a time")
    for request in requests:
        _check_needs(request, method, {"labels": labels, "boxes": boxes, "masks": masks})
    known = _known(count, labels, boxes, masks)
    truth = _labels(labels, known, vit) if labels is not None else None
    canvas = _masks(masks, known, vit) if masks is not None else None
    frames = _boxes(boxes, known, vit) if boxes is not None else None
    found: list[list[Measured]] = [[] for _ in requests]
    undefined: dict[int, str] = {}
    kept: dict[Any, Any] = {}
    begin = 0
    with telling(progress, "measuring") as tell:
        for images_of_batch in batches:
            batch = vit.place(images_of_batch)
            part = slice(begin, begin + len(batch))
            _check_count(part.stop, count, more=True)
            if isinstance(maps, Attribution):
                _check_images(maps.images[part], batch, begin)
            chosen = targets.part(begin, len(batch), count) if targets is not None else predicted(vit.logits(batch))
            own = scores[part].to(vit.device) if scores is not None else made_by(method, vit, batch, chosen, seed)
            own, bad = _finite(own, begin)
            undefined |= bad
            given = Measure(
                vit,
                batch,
                own,
                chosen,
                truth[part] if truth is not None else None if target is None else chosen.index[:, 0],
                frames[part] if frames is not None else None,
                canvas[part].to(vit.device) if canvas is not None else None,
                method,
                seed,
                kept=kept,
                current=current or scores is None,
            )
            for results, request in zip(found, requests, strict=True):
                ablation = {key: request.settings[key] for key in ABLATION} if request.metric.ablates else {}
                own_settings = {k: v for k, v in request.settings.items() if k not in ablation}
                measured = request.metric.function(replace(given, ablation_settings=ablation), **own_settings)
                results.append(_only_labelled(request, given, measured))
            begin = part.stop
            tell(begin, count)
    _check_count(begin, count)
    together = {
        request.label: _evaluation(request, results, undefined)
        for request, results in zip(requests, found, strict=True)
    }
    return together[metric] if isinstance(metric, str) else together


_OPTIONS = ("target", "labels", "boxes", "masks", "seed", "batch_size", "progress", "current")


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


def _maps(
    maps: Any, count: int | None, vit: Anatomy, seed: int
) -> tuple[Tensor | None, MapFunction | None, Targets | None]:
    """The maps [B,h,w] where they are given, what makes them where that is known, and the classes explained."""
    if isinstance(maps, str):
        return None, map_function(maps), None
    if isinstance(maps, Attribution):
        if maps.scores.ndim != 3:
            raise PatchlightError("this attribution explains several classes an image; measure them one at a time")
        check_model(maps, vit)
        own = Targets(maps.target[:, None], None if maps.against is None else maps.against[:, None])
        return checked_maps(maps.scores, len(maps) if count is None else count, vit), _maker_of(maps), own
    if callable(maps):
        return None, maps, None
    try:
        tensor = maps if isinstance(maps, Tensor) else torch.as_tensor(np.asarray(maps))
    except (TypeError, ValueError) as error:
        raise PatchlightError(
            f"maps are a {type(maps).__name__}; give an Attribution, an array [B,h,w], a method's name or a callable"
        ) from error
    return checked_maps(tensor, len(tensor) if count is None else count, vit), None, None


def check_model(maps: Attribution, vit: Anatomy) -> None:
    """Refuse maps of other weights, or of classes that the model does not have."""
    classes = max(vit.classes, 2)
    asked = [maps.target.flatten(), *(() if maps.against is None else (maps.against.flatten(),))]
    wrong = next((int(c) for c in torch.cat(asked) if not 0 <= int(c) < classes), None)
    if wrong is not None:
        raise PatchlightError(
            f"the maps are of {maps.model} and explain its class {wrong}, but {vit.name} has {classes} classes; "
            f"measure them on the model they are of"
        )
    if maps.weights and maps.weights != fingerprint(vit.model):
        raise PatchlightError(
            f"the maps are of other weights ({maps.model}, {maps.weights}) than those of {vit.name} "
            f"({fingerprint(vit.model)}); measure them on the model they are of (in Python, maps.scores on any)"
        )


def _check_images(explained: Sequence[str], batch: Tensor, first: int) -> None:
    """Refuse images that are not those the maps were made of; nothing is known of older maps."""
    pairs = zip(explained, of_images(batch) if explained else (), strict=False)
    wrong = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if wrong is not None:
        raise PatchlightError(
            f"image {first + wrong} is not the one its map was made of; give the same images in the same order, or "
            f"maps.scores to measure the maps on these"
        )


def map_function(name: str, settings: Mapping[str, Any] | None = None, score: Score | None = None) -> MapFunction:
    """A registered method as a function that makes maps."""
    request = resolve(name, settings, score)

    def maps(vit: Anatomy, images: Tensor, targets: Targets, seed: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(vit, images, [request], targets, seed)[1][0][:, 0]

    return maps


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
    score = maps.score if maps.score in ("logit", "probability") else None
    return None if score is None else map_function(maps.method, settings, score)  # type: ignore[arg-type]


def _finite(maps: Tensor, first: int) -> tuple[Tensor, dict[int, str]]:
    """Maps without NaN, and the images that had one; constant maps are told."""
    flat = maps.flatten(1)
    broken = (~flat.isfinite()).any(1)
    bad = {first + int(i): "the map holds NaN or infinite values" for i in broken.nonzero().flatten()}
    dead = (constant(flat) & ~broken).nonzero().flatten()
    if len(dead) and flat.shape[1] > 1:
        names = ", ".join(str(first + int(i)) for i in dead[:8])
        warn(
            f"the map of image {names} is constant: its order is a seeded draw, and its value that of a random map",
            UndefinedMetric,
        )
    return torch.where(broken[:, None, None], 0, maps), bad


def _check_needs(request: MetricRequest, method: MapFunction | None, given: Mapping[str, Any]) -> None:
    if request.metric.explains and method is None:
        raise PatchlightError(
            f"'{request.metric.name}' explains images itself, so it needs a method: give an Attribution, a method's "
            f"name or a callable instead of maps"
        )
    needs = sorted(request.metric.needs)
    missing = [need for need in needs if all(given.get(one) is None for one in need.split(" or "))]
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
    targets = resolve_targets(given, count, vit.classes, vit.labels)
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


def _evaluation(request: MetricRequest, found: Sequence[Measured], undefined: Mapping[int, str]) -> Evaluation:
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
        warn(
            f"{request.label}: no value for {len(missing)} of {len(values)} images, which do not count "
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
