"""Data sets for measuring: images with classes, boxes and masks, read from disk and cut as the model sees them."""

from __future__ import annotations

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
    """Whether data of this kind can be numbered as a model's classes are, by `classes=vit.labels`."""
    return "classes" in settings_of(KINDS.find(kind).function)


def open_data(kind: str, path: str | Path | None = None, **options: Any) -> Data:
    """The data set of this kind at `path`; docs/data.md tells layouts and options of each. Nothing is downloaded."""
    entry = KINDS.find(kind)
    if path is None and not entry.made_up:
        made_up = " and ".join(f"'{name}'" for name, other in KINDS.items() if other.made_up)
        raise PatchlightError(f"data set '{kind}' needs the path it lies at; only {made_up} is made on the spot")
    known = settings_of(entry.function)
    for option, value in options.items():
        if option not in known:
            raise PatchlightError(f"data set '{kind}' has no option '{option}'; {nearest(option, known)}")
        known[option].checked(value, kind)
    data: Data = entry.function(path, **options)
    return data


def open_images(
    paths: Sequence[Path], kind: str | None = None, classes: Sequence[str] | None = None, listed: str | None = None
) -> Data:
    """The images at these paths with what is known of them; plain files and folders hold nothing but their images.

    Args:
        paths: Files and folders, or the one place of a data set.
        kind: The kind of data set.
        classes: The labels of the model, by which a data set is numbered that can be.
        listed: A file of the images to use.
    """
    if kind is not None:
        if len(paths) > 1:
            raise PatchlightError(f"a data set of kind '{kind}' lies at one place; {len(paths)} were given")
        data = open_data(kind, paths[0], **({"classes": classes} if classes and takes_classes(kind) else {}))
        return data if listed is None else data.listed(listed)
    found: dict[str, Path] = {}
    for path in paths:
        root = path if path.is_dir() else path.parent
        for one in list_images(path) if path.is_dir() else [path]:
            name = one.relative_to(root).as_posix()
            found[name if len(paths) == 1 or name not in found else one.as_posix()] = one
    data = Data(paths[0].name, list(found), lambda name: Sample(name, open_image(found[name])))
    return data if listed is None else data.listed(listed)
