"""Data sets: images with classes, boxes and masks, cropped as for the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import list_images, open_image
from patchlight.core.registry import settings_of
from patchlight.data.base import KINDS as KINDS
from patchlight.data.base import Batch as Batch
from patchlight.data.base import Data as Data
from patchlight.data.base import Sample as Sample
from patchlight.data.base import Sources as Sources
from patchlight.data.base import batches as batches
from patchlight.data.base import labelled as labelled
from patchlight.data.base import load_batch as load_batch
from patchlight.data.base import read_list as read_list
from patchlight.data.base import register_data as register_data
from patchlight.data.datasets import from_dataset as from_dataset


def takes_classes(kind: str) -> bool:
    """Whether a kind of data can use the class numbers of a model, with `classes=vit.labels`."""
    return "classes" in settings_of(KINDS.find(kind).function)


def open_data(kind: str, path: str | Path | None = None, **options: Any) -> Data:
    """Open a data set on disk. Nothing is downloaded; docs/data.md describes the layouts.

    Args:
        kind: The kind of data set: "files", "imagenet", "imagenet-s", "pets", "cifar10", …
        path: The folder or file of the data set; not needed for "counting", which is generated.
        options: Options of this kind.

    Returns:
        A sequence of samples. `recommend` takes it, and `patchlight.data.batches` prepares it for a model.

    Example:
        >>> data = pl.open_data("files", "photos/", labels="labels.csv")                        # doctest: +SKIP
    """
    entry = KINDS.find(kind)
    if path is None and not entry.made_up:
        raise PatchlightError(f"data set '{kind}' needs a path; give its folder")
    settings = settings_of(entry.function)
    for option, value in options.items():
        if option not in settings:
            raise PatchlightError(f"data set '{kind}' has no option '{option}'; {nearest(option, settings)}")
        settings[option].checked(value, kind)
    data: Data = entry.function(path, **options)
    return data


def open_images(
    paths: Sequence[Path], kind: str | None = None, classes: Sequence[str] | None = None, listed: str | None = None
) -> Data:
    """Open images in files and folders, or a data set.

    Args:
        paths: Files and folders, or the path of a data set.
        kind: The kind of data set; None for plain images.
        classes: The labels of the model; the data set uses its class numbers if possible.
        listed: A file that lists the images to use.
    """
    if kind is not None:
        if len(paths) > 1:
            raise PatchlightError(f"{len(paths)} paths were given; a data set of kind '{kind}' has one")
        data = open_data(kind, paths[0], **({"classes": classes} if classes and takes_classes(kind) else {}))
        return data if listed is None else data.listed(listed)
    files: dict[str, Path] = {}
    for path in paths:
        root = path if os.path.isdir(path) else path.parent
        for file in list_images(path) if os.path.isdir(path) else [path]:
            name = file.relative_to(root).as_posix()
            files[name if len(paths) == 1 or name not in files else file.as_posix()] = file
    data = Data(paths[0].name, list(files), lambda name: Sample(name, open_image(files[name])))
    return data if listed is None else data.listed(listed)
