"""Data sets for measuring: images with classes, boxes and masks, read from disk and cut as the model sees them."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, get_type_hints

from patchlight.data.base import Batch as Batch
from patchlight.data.base import Data as Data
from patchlight.data.base import Sample as Sample
from patchlight.data.base import batches as batches
from patchlight.data.base import labelled as labelled
from patchlight.data.base import load_batch as load_batch
from patchlight.errors import PatchlightError, nearest
from patchlight.registry import checked

KINDS = {
    "folder": "patchlight.data.folders:open_folder",
    "mura": "patchlight.data.folders:open_mura",
    "imagenet": "patchlight.data.imagenet:open_imagenet",
    "imagenet-s": "patchlight.data.segmentation:open_imagenet_s",
    "imagenet-segmentation": "patchlight.data.segmentation:open_imagenet_segmentation",
    "pets": "patchlight.data.segmentation:open_pets",
    "cifar10": "patchlight.data.cifar:open_cifar10",
    "cifar100": "patchlight.data.cifar:open_cifar100",
    "counting": "patchlight.data.cifar:open_counting",
}


def open_data(kind: str, path: str | Path | None = None, **options: Any) -> Data:
    """The data set of this kind at `path`; docs/data.md tells layouts and options of each. Nothing is downloaded."""
    if kind not in KINDS:
        raise PatchlightError(f"no data set is called '{kind}'; {nearest(kind, KINDS)}")
    if path is None and kind != "counting":
        raise PatchlightError(f"data set '{kind}' needs the path it lies at; only 'counting' is made on the spot")
    module, _, name = KINDS[kind].partition(":")
    opener = getattr(importlib.import_module(module), name)
    known = list(inspect.signature(opener).parameters)[1:]
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        raise PatchlightError(f"data set '{kind}' has no option '{unknown}'; {nearest(unknown, known)}")
    hints = get_type_hints(opener)
    for option, value in options.items():
        checked(kind, option, value, hints[option])
    data: Data = opener(path, **options)
    return data
