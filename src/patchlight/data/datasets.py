"""A `torch.utils.data.Dataset` as a data set: pairs, dicts, and the targets of torchvision's detection models."""

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
KEYS = "image, label, boxes, mask, labels, masks"


def from_dataset(dataset: Any, names: Sequence[str] | None = None, labels: Sequence[str] | None = None) -> Data:
    """The samples of a `torch.utils.data.Dataset`, or of any object with a length and an item for each index.

    An item is an image, (image, label), (image, target) or a dict with the keys `image` and optionally `label`, `boxes`
    and `mask`. A target is such a dict without `image`.

    - An image is a PIL image, a path, or pixels before any normalisation: uint8 from 0 to 255 or floats from 0 to 1, as
      a tensor [C,H,W] or [H,W], or an array [H,W,C] or [H,W].
    - A label is an index, or one of the names in `labels`.
    - `boxes` [n,4] are xmin, ymin, xmax, ymax in pixels.
    - A `mask` [H,W] is above 0 on the object, 0 on the background and below 0 where it is not labelled.
    - The targets of torchvision have several objects: `labels` [n], `boxes` [n,4] and optionally `masks` [n,H,W]. The
      class is that of the largest object; boxes and mask are those of its class.

    An item must be the same each time it is read, so do not use random transforms. One item is read at a time.

    Args:
        dataset: The data set.
        names: The names of the samples; by default their indices, "000000", "000001", …
        labels: The names of the classes; by default `dataset.classes`.
    """
    try:
        count = len(dataset)
    except TypeError as error:
        kind = type(dataset).__name__
        raise PatchlightError(
            f"a {kind} has no length; give a Dataset with an item for each index, or a list"
        ) from error
    names = [f"{index:06d}" for index in range(count)] if names is None else [str(name) for name in names]
    if len(names) != count:
        raise PatchlightError(f"{len(names)} names were given for {count} samples; give one for each")
    classes = getattr(dataset, "classes", None)
    if labels is None and isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes):
        labels = classes
    return Data(type(dataset).__name__, names, Reader(dataset, names, labels), labels)


class Reader:
    """Reads samples by name, one at a time, because threads cannot share an open file of the data set."""

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
            except Exception as error:  # the user's code may raise anything
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise PatchlightError(f"sample '{name}' of the data set cannot be read: {reason}") from error
        return read_item(item, name, self.labels)


def read_item(item: Any, name: str, labels: Sequence[str] | None = None) -> Sample:
    """An item of a data set as a sample."""
    if isinstance(item, list | tuple):
        image, target = (*item, None, None)[:2]
    else:
        image, target = item, item if isinstance(item, Mapping) else None
    if isinstance(image, Mapping):
        if "image" not in image:
            keys = ", ".join(map(repr, image))
            raise PatchlightError(f"sample '{name}' has the keys {keys}, but not 'image'; the keys are {KEYS}")
        image = image["image"]
    annotations = target if isinstance(target, Mapping) else {"label": target}
    label = _label(annotations.get("label"), name, labels)
    boxes, mask = _boxes(annotations.get("boxes"), name), _array(annotations.get("mask"))
    if annotations.get("labels") is not None:
        label, boxes, mask = _largest(annotations, label, boxes, name)
    return Sample(name, _picture(image, name), label, boxes, None if mask is None else _signs(mask, name))


def _picture(item: Any, name: str) -> Image.Image:
    if isinstance(item, Image.Image | str | Path):
        return open_image(item)
    if not isinstance(item, Tensor | np.ndarray):
        raise PatchlightError(f"the image of '{name}' is a {type(item).__name__}; {GIVE_IMAGES}")
    layout = "[C,H,W]" if isinstance(item, Tensor) else "[H,W,C]"
    pixels = _array(item.float() if isinstance(item, Tensor) and item.is_floating_point() else item)
    return open_image(array_picture(pixels, f"the image of '{name}'", layout))


def _label(item: Any, name: str, labels: Sequence[str] | None) -> int | None:
    if item is None:
        return None
    if isinstance(item, str):
        if item not in (labels or ()):
            raise PatchlightError(f"'{name}' has the unknown class '{item}'; {nearest(item, labels or ())}")
        return list(labels or ()).index(item)
    try:
        return operator.index(item)
    except TypeError as error:
        shape = list(item.shape) if isinstance(item, Tensor | np.ndarray) else None
        kind = f"of shape {shape}" if shape else f"of type {getattr(item, 'dtype', type(item).__name__)}"
        raise PatchlightError(f"the label of '{name}' is {kind}; give the index or name of one class") from error


def _boxes(item: Any, name: str) -> Tensor | None:
    if item is None:
        return None
    form = getattr(getattr(item, "format", None), "name", "XYXY")
    boxes = torch.as_tensor(_array(item), dtype=torch.float32)
    if form != "XYXY" or (boxes.numel() and (boxes.ndim != 2 or boxes.shape[1] != 4)):
        raise PatchlightError(
            f"the boxes of '{name}' are {form} of shape {list(boxes.shape)}; give [n,4]: xmin, ymin, xmax, ymax"
        )
    return boxes.reshape(-1, 4) if boxes.numel() else None


def _largest(target: Mapping[str, Any], label: int | None, boxes: Tensor | None, name: str) -> Objects:
    """The class (by default that of the largest object), and the boxes and mask of its objects."""
    classes, masks = _array(target["labels"]).reshape(-1), _array(target.get("masks"))
    masks = None if masks is None or not len(masks) else masks.reshape(len(masks), *masks.shape[-2:])
    for what, values in (("boxes", boxes), ("masks", masks)):
        if values is not None and len(values) != len(classes):
            raise PatchlightError(f"'{name}' has {len(classes)} labels and {len(values)} {what}; give one per object")
    if not len(classes):
        return label, None, None
    if label is None:
        sides = None if boxes is None else (boxes[:, 2:] - boxes[:, :2]).numpy()
        areas = (masks > 0).sum((1, 2)) if masks is not None else sides.prod(1) if sides is not None else np.ones(1)
        label = _label(classes[int(areas.argmax())], name, None)
    of_class = classes == label
    if not of_class.any():
        raise PatchlightError(
            f"'{name}' has class {label}, but none of its objects has this class; give the labels of the objects"
        )
    mask = None if masks is None else (masks[of_class] > 0).any(0)
    return label, None if boxes is None else boxes[torch.from_numpy(of_class)], mask


def _array(item: Any) -> Any:
    """A tensor, list or picture as an array; None stays None."""
    return None if item is None else item.detach().cpu().numpy() if isinstance(item, Tensor) else np.asarray(item)


def _signs(mask: Any, name: str) -> Tensor:
    """A mask of 1 (object), 0 (background) and -1 (not labelled)."""
    mask = mask[0] if mask.ndim == 3 and len(mask) == 1 else mask
    if mask.ndim != 2:
        raise PatchlightError(f"the mask of '{name}' has shape {list(mask.shape)}; give [H,W]")
    return torch.from_numpy((mask > 0).astype(np.int8) - (mask < 0).astype(np.int8))
