"""Where maps come from (given, or computed by a method), and checks of maps, images and annotations."""

from __future__ import annotations

import sys
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
from patchlight.core.targets import ScoreName, Targets, resolve_targets
from patchlight.methods.maps import estimate
from patchlight.methods.requests import Request, check_contrast, check_supported, resolve
from patchlight.metrics.base import MapFunction, MetricRequest, checked_maps

GIVE_MAPS = "give an Attribution, an array [B,h,w], the name of a method or a function"


@dataclass(frozen=True)
class Annotations:
    """Labels, boxes and masks of images, as in `evaluate`."""

    labels: Any = None
    boxes: Sequence[Any] | None = None
    masks: Any = None


@dataclass(frozen=True)
class Source:
    """Where the maps of one label come from.

    Attributes:
        scores: Given maps [B,h,w]; None if maps are computed for each batch.
        request: The method that computes them.
        method: A function that computes maps of any images.
        targets: The classes that given maps explain.
        images: The hashes of the images of given maps.
        facts: The numbers that the method of given maps reports for each image.
    """

    scores: Tensor | None = None
    request: Request | None = None
    method: MapFunction | None = None
    targets: Targets | None = None
    images: tuple[str, ...] = ()
    facts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchMaps:
    """The maps [b,h,w] of one label on a batch, and the numbers [b] that their method reports, by name."""

    maps: Tensor
    facts: Mapping[str, Tensor] = field(default_factory=dict)


def compute_maps(
    vit: Anatomy, images: Tensor, requests: Sequence[Request], targets: Targets, seed: int
) -> list[BatchMaps]:
    """Compute the maps of methods; their warnings are dropped, because metrics warn of the same maps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for request in requests:
            check_contrast(request, targets, vit)
        return [BatchMaps(each.maps[:, 0], each.facts) for each in estimate(vit, images, requests, targets, seed)[1]]


Beside = tuple[Tensor | None, Sequence[Tensor] | None, Tensor | None]
"""Labels, boxes and masks of some of the images."""


def check_annotations(
    annotations: Annotations, count: int | None, vit: Anatomy, streamed_labels: list[Any] | None
) -> Callable[[slice], Beside]:
    """Check annotations, and return a function that selects those of some images.

    The labels of a stream are added to `streamed_labels` as they are read.
    """
    listed_labels = None if streamed_labels is not None else annotations.labels
    if count is None and any(each is not None for each in (listed_labels, annotations.boxes, annotations.masks)):
        raise PatchlightError("labels, boxes and masks need a known number of images; give a list of images")
    number = count or 0
    labels = _labels(listed_labels, number, vit) if listed_labels is not None else None
    masks = _masks(annotations.masks, number, vit) if annotations.masks is not None else None
    boxes = _boxes(annotations.boxes, number, vit) if annotations.boxes is not None else None

    def select(part: slice) -> Beside:
        selected = labels[part] if labels is not None else None
        return (
            selected if streamed_labels is None else _labels(streamed_labels[part], part.stop - part.start, vit),
            boxes[part] if boxes is not None else None,
            masks[part].to(vit.device) if masks is not None else None,
        )

    return select


def map_count(maps: Any) -> int | None:
    """The number of given maps; None if a method computes them."""
    return len(maps) if isinstance(maps, Attribution | Tensor | np.ndarray | list | tuple) else None


def source_of(maps: Any, count: int | None, vit: Anatomy) -> Source:
    """The source of maps: the maps themselves, the method that computes them, or for an Attribution both."""
    if isinstance(maps, Source):
        return maps
    if isinstance(maps, str):
        maps = resolve(maps)
    elif isinstance(maps, Mapping) and "method" in maps:
        maps = resolve(str(maps["method"]), maps)
    if isinstance(maps, Request):
        check_supported(maps, vit)
        return Source(request=maps, method=map_function(maps))
    if isinstance(maps, Attribution):
        if maps.several:
            raise PatchlightError(
                "this attribution explains several classes per image; measure one class at a time: att.only(name)"
            )
        check_model(maps, vit)
        targets = Targets(maps.target[:, None], None if maps.against is None else maps.against[:, None])
        scores = checked_maps(maps.scores, len(maps) if count is None else count, vit)
        return Source(scores, method=_method_of(maps), targets=targets, images=maps.images, facts=maps.facts)
    if callable(maps):
        return Source(method=maps)
    try:
        tensor = maps if isinstance(maps, Tensor) else torch.as_tensor(np.asarray(maps))
    except (TypeError, ValueError) as error:
        raise PatchlightError(f"maps are a {type(maps).__name__}; {GIVE_MAPS}") from error
    return Source(checked_maps(tensor, len(tensor) if count is None else count, vit))


def check_model(maps: Attribution, vit: Anatomy) -> None:
    """Refuse maps of other weights, of another head, or of classes that the model does not have."""
    classes = sys.maxsize if vit.question is not None and not vit.question.image else vit.outcomes
    explained = [maps.target.flatten(), *(() if maps.against is None else (maps.against.flatten(),))]
    wrong = next((int(c) for c in torch.cat(explained) if not 0 <= int(c) < classes), None)
    if wrong is not None:
        raise PatchlightError(
            f"the maps explain class {wrong} of {maps.model}, but {vit.name} has {classes} classes; measure them on "
            "the same model"
        )
    head = {} if vit.head is None else vit.head.about()
    if maps.weights and maps.head != head:
        theirs, ours = (describe_head(each) for each in (maps.head, head))
        raise PatchlightError(
            f"the maps explain another head of {maps.model} ({theirs}) than this one ({ours}); measure them with the "
            "same head"
        )
    if maps.weights and maps.weights != identity(vit):
        raise PatchlightError(
            f"the maps explain other weights ({maps.model}, {maps.weights}) than those of {vit.name} "
            f"({identity(vit)}); measure them on the same model (in Python, maps.scores works on any model)"
        )


def describe_head(head: Mapping[str, Any]) -> str:
    """The head of an attribution in a few words."""
    if not head:
        return "its own classifier"
    return ", ".join(head["labels"]) if "labels" in head else str(head)


def check_images(sources: Iterable[Source], part: slice, batch: Tensor) -> None:
    """Refuse images that are not those of the maps, if the maps have hashes of them."""
    recorded = [source.images[part] for source in sources if source.images]
    hashes = hash_images(batch) if recorded else ()
    for explained in recorded:
        wrong = next((i for i, (a, b) in enumerate(zip(explained, hashes, strict=False)) if a != b), None)
        if wrong is not None:
            raise PatchlightError(
                f"image {part.start + wrong} is not the one that its map explains; give the same images in the same "
                "order, or maps.scores to measure the maps on these images"
            )


def map_function(request: Request) -> MapFunction:
    """A method as a function that computes maps."""
    return lambda vit, images, targets, seed: compute_maps(vit, images, [request], targets, seed)[0].maps


def _method_of(maps: Attribution) -> MapFunction | None:
    """The method of an attribution; None if it is not registered or its score was a function."""
    try:
        entry = resolve(maps.method)
    except PatchlightError:
        return None
    settings = dict(maps.settings)
    if maps.level == "pixel" and entry.in_pass:
        settings.pop("start", None)  # a map of pixels has no blocks
    if "level" in entry.settings:
        settings["level"] = maps.level
    score = maps.score if maps.score in get_args(ScoreName) else None
    return None if score is None else map_function(resolve(maps.method, settings, score))  # type: ignore[arg-type]


def check_needs(request: MetricRequest, method: MapFunction | None, annotations: Annotations) -> None:
    if request.metric.explains and method is None:
        raise PatchlightError(
            f"'{request.metric.name}' explains images itself, so it needs a method: give an Attribution, the name of a "
            "method or a function instead of maps"
        )
    needs = sorted(request.metric.needs)
    missing = [need for need in needs if all(getattr(annotations, kind) is None for kind in need.split(" or "))]
    if missing:
        first = missing[0].split(" or ")[0]
        raise PatchlightError(f"'{request.metric.name}' needs {' and '.join(missing)}; give {first}=… (or --data KIND)")


def _labels(labels: Any, count: int, vit: Anatomy) -> Tensor:
    """The true classes [B]; -1 for unknown ones, which are None or -1 in a list or tensor."""
    rows = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else labels
    unknown = [i for i, row in enumerate(rows) if row is None or row == -1] if isinstance(rows, list | tuple) else []
    filled = [0 if i in unknown else row for i, row in enumerate(rows)] if unknown else labels
    targets = resolve_targets(filled, count, vit.outcomes, vit.labels)
    assert targets is not None
    classes = targets.index[:, 0].clone()
    classes[unknown] = -1
    return classes


def _masks(masks: Any, count: int, vit: Anatomy) -> Tensor:
    tensor = masks if isinstance(masks, Tensor) else torch.as_tensor(np.asarray(masks))
    if tuple(tensor.shape) != (count, *vit.geometry.size):
        size = [count, *vit.geometry.size]
        raise PatchlightError(f"masks have shape {list(tensor.shape)}; these images take masks of shape {size}")
    values = set(tensor.unique().tolist())
    if not values <= {-1, 0, 1}:
        raise PatchlightError(
            f"masks contain {sorted(values)[:5]}; give 1 for the object, 0 for the background, -1 for not labelled"
        )
    return tensor.to(torch.int8)


def _boxes(boxes: Sequence[Any], count: int, vit: Anatomy) -> list[Tensor]:
    if len(boxes) != count:
        raise PatchlightError(f"boxes are given for {len(boxes)} images, but there are {count}")
    height, width = vit.preprocess.size
    checked_boxes = []
    for i, value in enumerate(boxes):
        box = torch.as_tensor(value, dtype=torch.float64)
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
