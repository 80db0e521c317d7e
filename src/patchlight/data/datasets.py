"""Any `torch.utils.data.Dataset` as a data set: pairs, dicts, and the targets of torchvision's detection models."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchlight.core.errors import PatchlightError, first_line, nearest
from patchlight.core.images import GIVE_IMAGES, array_picture, open_image
from patchlight.data.base import Data, Sample

Objects = tuple[int | None, Tensor | None, Any]
"""A class, boxes [n,4], and a mask [H,W] as an array."""
GIVEN = ("image", "label", "boxes", "mask", "labels", "masks")


def from_dataset(dataset: Any, names: Sequence[str] | None = None, labels: Sequence[str] | None = None) -> Data:
    """The samples of a `torch.utils.data.Dataset`, or of anything else that has a length and an item for each index.

    An item is an image, (image, label), (image, target), or a dict with the keys `image` and, where they are known,
    `label`, `boxes` and `mask`; so is a target. An image is a PIL image, a path, or pixels before any normalisation:
    uint8 from 0 to 255 or floats from 0 to 1, as a tensor [C,H,W] or [H,W], or an array [H,W,C] or [H,W]. A label is an
    index, or a name among `labels`; `boxes` [n,4] are xmin, ymin, xmax, ymax in pixels; a `mask` [H,W] is above 0 on
    the object, 0 on the background and below 0 where nobody labelled. torchvision's targets have several objects:
    `labels` [n], `boxes` [n,4] and perhaps `masks` [n,H,W]; the class is that of the largest, and boxes and mask are
    those of its class.

    Samples are called `names`, by default "000000", "000001", … by index; `labels` are the names of the classes, by
    default the data set's own `classes`. An item must be the same each time it is read, so leave out random transforms.
    One item is read at a time.
    """
    try:
        count = len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise PatchlightError(
            f"a {kind} has no length; give a Dataset with an item for each index, or a list"
        ) from error
    called = [f"{index:06d}" for index in range(count)] if names is None else [str(name) for name in names]
    if len(called) != count:
        raise PatchlightError(f"{len(called)} names were given for {count} samples; give one for each")
    own = getattr(dataset, "classes", None)
    if labels is None and isinstance(own, list | tuple) and all(isinstance(one, str) for one in own):
        labels = own
    return Data(type(dataset).__name__, called, Reader(dataset, called, labels), labels)


class Reader:
    """Reads samples by name, one at a time: a data set may hold a file open, which threads cannot share."""

    def __init__(self, dataset: Any, names: Sequence[str], labels: Sequence[str] | None) -> None:
        self.dataset, self.names, self.labels = dataset, names, labels
        self.places = {name: index for index, name in enumerate(names)}
        self.lock = Lock()

    def __reduce__(self) -> Any:
        return Reader, (self.dataset, self.names, self.labels)

    def __call__(self, name: str) -> Sample:
        with self.lock:
            try:
                item = self.dataset[self.places[name]]
            except Exception as error:  # whatever a user's own code raises
                told = f"{type(error).__name__}: {first_line(error)}"
                raise PatchlightError(f"sample '{name}' of the data set cannot be read: {told}") from error
        return read_item(item, name, self.labels)


def read_item(item: Any, name: str, labels: Sequence[str] | None = None) -> Sample:
    """An item of a data set as a sample."""
    if isinstance(item, list | tuple):
        given, target = (*item, None, None)[:2]
    else:
        given, target = item, item if isinstance(item, Mapping) else None
    if isinstance(given, Mapping):
        if "image" not in given:
            keys = ", ".join(map(repr, given))
            raise PatchlightError(f"sample '{name}' has the keys {keys}, and none is 'image'; it may have {GIVEN}")
        given = given["image"]
    image = _picture(given, name)
    about = target if isinstance(target, Mapping) else {"label": target}
    label = _label(about.get("label"), name, labels)
    boxes, mask = _boxes(about.get("boxes"), name), _array(about.get("mask"))
    if about.get("labels") is not None:
        label, boxes, mask = _largest(about, label, boxes, name)
    return Sample(name, image, label, boxes, None if mask is None else _signs(mask, name))


def _picture(given: Any, name: str) -> Image.Image:
    if isinstance(given, Image.Image | str | Path):
        return open_image(given)
    if not isinstance(given, Tensor | np.ndarray):
        raise PatchlightError(f"the image of '{name}' is a {type(given).__name__}; {GIVE_IMAGES}")
    layout = "[C,H,W]" if isinstance(given, Tensor) else "[H,W,C]"
    pixels = _array(given.float() if isinstance(given, Tensor) and given.is_floating_point() else given)
    return open_image(array_picture(pixels, f"the image of '{name}'", layout))


def _label(given: Any, name: str, labels: Sequence[str] | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        if given not in (labels or ()):
            raise PatchlightError(f"'{name}' has class '{given}', which is not one; {nearest(given, labels or ())}")
        return list(labels or ()).index(given)
    try:
        return operator.index(given)
    except TypeError as error:
        shape = list(given.shape) if isinstance(given, Tensor | np.ndarray) else None
        told = f"of shape {shape}" if shape else f"of type {getattr(given, 'dtype', type(given).__name__)}"
        raise PatchlightError(f"the label of '{name}' is {told}; give the index of one class, or its name") from error


def _boxes(given: Any, name: str) -> Tensor | None:
    if given is None:
        return None
    form = getattr(getattr(given, "format", None), "name", "XYXY")
    boxes = torch.as_tensor(_array(given), dtype=torch.float32)
    if form != "XYXY" or (boxes.numel() and (boxes.ndim != 2 or boxes.shape[1] != 4)):
        raise PatchlightError(
            f"the boxes of '{name}' are {form} of shape {list(boxes.shape)}; give [n,4]: xmin, ymin, xmax, ymax"
        )
    return boxes.reshape(-1, 4) if boxes.numel() else None


def _largest(about: Mapping[str, Any], label: int | None, boxes: Tensor | None, name: str) -> Objects:
    """The class of the largest of several objects, unless it is given, and the boxes and mask of that class."""
    classes, masks = _array(about["labels"]).reshape(-1), _array(about.get("masks"))
    masks = None if masks is None or not len(masks) else masks.reshape(len(masks), *masks.shape[-2:])
    for what, found in (("boxes", boxes), ("masks", masks)):
        if found is not None and len(found) != len(classes):
            raise PatchlightError(
                f"'{name}' has {len(classes)} labels and {len(found)} {what}; give one for each object"
            )
    if not len(classes):
        return label, None, None
    if label is None:
        sides = None if boxes is None else (boxes[:, 2:] - boxes[:, :2]).numpy()
        areas = (masks > 0).sum((1, 2)) if masks is not None else sides.prod(1) if sides is not None else np.ones(1)
        label = _label(classes[int(areas.argmax())], name, None)
    same = classes == label
    if not same.any():
        raise PatchlightError(f"'{name}' is of class {label}, which none of its objects is; give its own labels")
    mask = None if masks is None else (masks[same] > 0).any(0)
    return label, None if boxes is None else boxes[torch.from_numpy(same)], mask


def _array(given: Any) -> Any:
    """A tensor, list or picture as an array; None stays None."""
    return None if given is None else given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)


def _signs(mask: Any, name: str) -> Tensor:
    """1 on the object, 0 on the background, -1 where nobody labelled."""
    mask = mask[0] if mask.ndim == 3 and len(mask) == 1 else mask
    if mask.ndim != 2:
        raise PatchlightError(f"the mask of '{name}' has shape {list(mask.shape)}; give [H,W]")
    return torch.from_numpy((mask > 0).astype(np.int8) - (mask < 0).astype(np.int8))
