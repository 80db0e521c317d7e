"""Your own images with classes, boxes and masks in sub-folders, CSV, PNG or COCO's JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError, escape_surrogates, nearest
from patchlight.core.images import list_images, open_mask
from patchlight.data.base import (
    Data,
    Sample,
    Sources,
    as_index,
    bare,
    existing_folder,
    look_up,
    read_pairs,
    register_data,
)
from patchlight.data.coco import Scene, read_coco
from patchlight.data.notes import Note, read_boxes, scale_boxes

LAID_OUT = {"labels": "labels.csv", "boxes": "boxes.csv", "masks": "masks", "coco": "coco.json"}
"""The default file or folder of each option, next to the sub-folder `images`."""
Place = str | Path | None


@register_data("files", aliases=("folder",))
def open_files(
    path: str | Path,
    labels: Place = None,
    classes: Sequence[str] | None = None,
    boxes: Place = None,
    masks: Place = None,
    coco: Place = None,
    ignore: int | None = None,
) -> Data:
    """All images below a folder, sorted, with their annotations. The name of a sample is its path in the folder.

    Files are looked up in the folder first. Without labels, the first sub-folder is the class if all images are in
    sub-folders. If the folder has a sub-folder `images`, the images are there, and labels.csv, boxes.csv, masks/ and
    coco.json next to it are used by default.

    Args:
        labels: A CSV file of lines `name,label`: the path, file name or stem of an image and a class name or index.
        classes: The names of a model's classes (`vit.labels`), so that indices are those of the model. Default: COCO's
            categories, or the sorted names.
        boxes: A CSV file with the columns image, xmin, ymin, xmax, ymax and one line per box.
        masks: A folder of PNG files with the names of the images: 0 on the background, other values on the object.
        coco: A JSON file in COCO's format, for annotations that are not in the other files: the class of the largest
            object, and the boxes and outlines of all objects of this class.
        ignore: The value of pixels of masks that are not labelled.
    """
    root = existing_folder(path, "images")
    places = _places(root, {"labels": labels, "boxes": boxes, "masks": masks, "coco": coco})
    folder = root / "images" if places and (root / "images").is_dir() else root
    paths = {escape_surrogates(p.relative_to(folder).as_posix()): p for p in list_images(folder)}
    if "masks" in places:
        within = existing_folder(places["masks"], "masks").resolve()
        paths = {name: p for name, p in paths.items() if within not in p.resolve().parents}
    names, title = list(paths), root.resolve().name
    annotated = read_coco(places["coco"]) if "coco" in places else None
    scenes = {} if annotated is None else annotated.of(names)
    words = _words(names, places.get("labels"), None if annotated is None else scenes)
    if classes is None and annotated is not None and "labels" not in places:
        classes = annotated.categories
    elif classes is None and not all(word.isdecimal() for word in words.values()):
        classes = sorted(set(words.values()))
    numbers = {name: _class_index(word, name, classes) for name, word in words.items()}
    if annotated is not None:  # the annotations of an image's class, if that is a category, else all
        categories = {name: word if word in annotated.categories else None for name, word in words.items()}
        scenes = {name: scene.of(categories.get(name)) for name, scene in scenes.items()}
    notes = look_up(names, read_boxes(places["boxes"], bare), places["boxes"]) if "boxes" in places else {}
    files = look_up(names, _pngs(places["masks"]), places["masks"], "PNG") if "masks" in places else {}
    sources = partial(_sources, paths, numbers, notes, files, scenes, ignore)
    return Data.of_files(title, names, sources, classes, partial(_annotate, notes, scenes, ignore))


def _pngs(folder: Path) -> dict[str, Path]:
    return {bare(escape_surrogates(p.relative_to(folder).as_posix())): p for p in sorted(folder.rglob("*.png"))}


def _places(root: Path, options: Mapping[str, Place]) -> dict[str, Path]:
    """The file or folder of each option: the user's, in the folder or elsewhere, or the default one."""
    chosen = {option: Path(place) for option, place in options.items() if place is not None}
    places = {option: root / place if (root / place).exists() else place for option, place in chosen.items()}
    for option in ("labels", "boxes", "coco"):
        if option in places and (places[option].suffix.lower() == ".json") != (option == "coco"):
            expected = "a JSON file" if option == "coco" else "a CSV file; give COCO's JSON as coco"
            raise PatchlightError(f"'{places[option]}' was given as {option}, which takes {expected}")
    if not (root / "images").is_dir():
        return places
    defaults = {option: root / name for option, name in LAID_OUT.items() if (root / name).exists()}
    return {**defaults, **places}


def _words(names: Sequence[str], labels: Path | None, scenes: Mapping[str, Scene] | None) -> dict[str, str]:
    """The class of each image, if it is known, as a name or a number."""
    if labels is not None:
        return look_up(names, read_pairs(labels), labels)
    if scenes is not None:
        categories = {name: scene.category() for name, scene in scenes.items()}
        return {name: category for name, category in categories.items() if category is not None}
    return {name: name.split("/")[0] for name in names} if all("/" in name for name in names) else {}


def _class_index(word: str, name: str, classes: Sequence[str] | None) -> int:
    """The index of a class from its name or index."""
    if classes is not None and word in classes:
        return classes.index(word)
    index = as_index(word)
    if index is None:
        raise PatchlightError(f"'{name}' has the unknown class '{word[:40]}'; {nearest(word[:40], classes or ())}")
    if classes is not None and index >= len(classes):
        raise PatchlightError(f"'{name}' has class {word}; classes are 0 to {len(classes) - 1}")
    return index


def _annotate(
    notes: Mapping[str, Note], scenes: Mapping[str, Scene], ignore: int | None, sample: Sample, sources: Sources
) -> Sample:
    """Add the boxes and mask of a sample, from tables and files, or else from COCO's JSON."""
    name, size, scene = sample.name, sample.image.size, scenes.get(sample.name, Scene())
    if scene.size not in (None, size):
        before, now = (f"{width} x {height}" for width, height in (scene.size, size))
        raise PatchlightError(f"'{name}' was {before} when it was annotated, but is {now}; give the same image")
    boxes = scale_boxes(notes[name], size, name) if name in notes else scene.boxes()
    mask = scene.mask(size, name) if len(sources.files) == 1 else _read_mask(sources.files[1], ignore)
    return replace(sample, boxes=boxes, mask=mask)


def _sources(
    paths: Mapping[str, Path],
    labels: Mapping[str, int],
    notes: Mapping[str, Note],
    masks: Mapping[str, Path],
    scenes: Mapping[str, Scene],
    ignore: int | None,
    name: str,
) -> Sources:
    """The files of one image, and its annotations from tables."""
    note, scene = notes.get(name), scenes.get(name)
    annotations = set() if scene is None else scene.annotations()
    annotations |= {what for what, table in (("boxes", notes), ("masks", masks)) if name in table}
    boxes = None if note is None else [note.boxes, note.size]
    values = [ignore, boxes, None if scene is None else scene.values()]
    return Sources([paths[name], *([masks[name]] if name in masks else [])], labels.get(name), values, annotations)


def _read_mask(path: Path, ignore: int | None) -> Tensor:
    """A mask of 1 (object), 0 (background) and -1 (pixels with the value `ignore`)."""
    stored = open_mask(path)
    pixels = np.asarray(stored)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    colours = pixels[..., :-1] if stored.mode in ("LA", "RGBA") else pixels
    mask = (colours != 0).any(-1).astype(np.int8)
    if ignore is not None:
        mask[(colours == ignore).all(-1)] = -1
    return torch.from_numpy(mask)
