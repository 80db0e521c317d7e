"""Where maps come from (given, or made by a method), and the checks of maps, images and annotations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.targets import Score, ScoreName, Targets, resolve_targets
from patchlight.methods.maps import estimate
from patchlight.methods.requests import Request, check_contrast, check_supported, resolve
from patchlight.metrics.base import MapFunction, MetricRequest, checked_maps


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


def computed_maps(
    vit: Anatomy, images: Tensor, requests: Sequence[Request], targets: Targets, seed: int
) -> list[BatchMaps]:
    """What methods make of images, without their warnings: a metric has its own for maps that say nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request in requests:
            check_contrast(request, targets, vit)
        return [BatchMaps(one.maps[:, 0], one.facts) for one in estimate(vit, images, requests, targets, seed)[1]]


Beside = tuple[Tensor | None, Sequence[Tensor] | None, Tensor | None]
"""The labels, boxes and masks of some of the images."""


def checked_annotations(
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


def map_count(maps: Any) -> int | None:
    """How many images maps are of, where they are given."""
    return len(maps) if isinstance(maps, Attribution | Tensor | np.ndarray | list | tuple) else None


def _known(count: int | None, *annotations: Any) -> int:
    """The number of images, which annotations cannot do without."""
    if count is None and any(given is not None for given in annotations):
        raise PatchlightError("labels, boxes and masks need images whose number is known beforehand; give a list")
    return count or 0


def source_of(maps: Any, count: int | None, vit: Anatomy) -> Source:
    """Maps as they were given, or what makes them; of an Attribution, both where its method is known."""
    if isinstance(maps, Source):
        return maps
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


def check_images(sources: Iterable[Source], part: slice, batch: Tensor) -> None:
    """Refuse images that are not those the maps were made of; nothing is known of older maps."""
    known = [source.images[part] for source in sources if source.images]
    seen = hash_images(batch) if known else ()
    for explained in known:
        wrong = next((i for i, (one, other) in enumerate(zip(explained, seen, strict=False)) if one != other), None)
        if wrong is not None:
            raise PatchlightError(
                f"image {part.start + wrong} is not the one its map was made of; give the same images in the same "
                f"order, or maps.scores to measure the maps on these"
            )


def map_function(name: str, settings: Mapping[str, Any] | None = None, score: Score | None = None) -> MapFunction:
    """A registered method as a function that makes maps."""
    return maps_by(resolve(name, settings, score))


def maps_by(request: Request) -> MapFunction:
    """A method as asked, as a function that makes maps."""
    return lambda vit, images, targets, seed: computed_maps(vit, images, [request], targets, seed)[0].maps


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


def check_needs(request: MetricRequest, method: MapFunction | None, given: Annotations) -> None:
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
