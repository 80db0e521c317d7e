"""Images of one's own, with what is known of them: classes, boxes and masks in sub-folders, CSV, PNG or COCO's JSON."""

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
from patchlight.data.base import Data, Sample, Sources, bare, existing_folder, look_up, read_pairs, register_data
from patchlight.data.coco import Scene, read_coco
from patchlight.data.notes import Note, read_boxes, scaled

LAID_OUT = {"labels": "labels.csv", "boxes": "boxes.csv", "masks": "masks", "coco": "coco.json"}
"""By option, the file or folder it is where nothing else is given, in a folder that has its images in `images`."""
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
    """Every image below a folder, sorted, with what is known of it; the name of a sample is its path in the folder.

    Each file is looked for in the folder first. Where none of them has classes and all images lie in sub-folders, the
    first sub-folder is the class. In a folder with a sub-folder `images`, the images are there, and labels.csv,
    boxes.csv, masks/ and coco.json beside it need not be named.

    Args:
        labels: A CSV file of lines `name,label`: the path, file name or stem of an image and a class name or index.
        classes: The names of a model's classes (`vit.labels`), so that indices are the model's; None: COCO's
            categories, or the sorted names.
        boxes: A CSV file with the columns image, xmin, ymin, xmax, ymax, a line a box.
        masks: A folder of PNG files, called as the images are: 0 on the background, anything else on the object.
        coco: A JSON file in COCO's form, for what the others do not give: the class of the largest object, and the
            boxes and outlines of all objects of that class.
        ignore: The value of masks where nobody labelled.
    """
    root = existing_folder(path, "images")
    given = _places(root, {"labels": labels, "boxes": boxes, "masks": masks, "coco": coco})
    folder = root / "images" if given and (root / "images").is_dir() else root
    paths = {escape_surrogates(p.relative_to(folder).as_posix()): p for p in list_images(folder)}
    if "masks" in given:
        within = existing_folder(given["masks"], "masks").resolve()
        paths = {name: p for name, p in paths.items() if within not in p.resolve().parents}
    names, title = list(paths), root.resolve().name
    drawn = read_coco(given["coco"]) if "coco" in given else None
    scenes = {} if drawn is None else drawn.of(names)
    words = _words(names, given.get("labels"), None if drawn is None else scenes)
    if classes is None and drawn is not None and "labels" not in given:
        classes = drawn.categories
    elif classes is None and not all(word.isdecimal() for word in words.values()):
        classes = sorted(set(words.values()))
    numbers = {name: _class_index(word, name, classes) for name, word in words.items()}
    if drawn is not None:
        scenes = {name: _of_class(scene, words.get(name), drawn.categories) for name, scene in scenes.items()}
    notes = look_up(names, read_boxes(given["boxes"], bare), given["boxes"]) if "boxes" in given else {}
    files = look_up(names, _pngs(given["masks"]), given["masks"], "PNG") if "masks" in given else {}
    sources = partial(_sources, paths, numbers, notes, files, scenes, ignore)
    return Data.of_files(title, names, sources, classes, partial(_annotate, notes, scenes, ignore))


def _pngs(folder: Path) -> dict[str, Path]:
    return {bare(escape_surrogates(p.relative_to(folder).as_posix())): p for p in sorted(folder.rglob("*.png"))}


def _places(root: Path, options: Mapping[str, Place]) -> dict[str, Path]:
    """Where the file or folder of each option is: as given, in the folder or elsewhere, or else as it is laid out."""
    named = {option: Path(place) for option, place in options.items() if place is not None}
    found = {option: root / place if (root / place).exists() else place for option, place in named.items()}
    for option in ("labels", "boxes", "coco"):
        if option in found and (found[option].suffix.lower() == ".json") != (option == "coco"):
            raise PatchlightError(
                f"'{found[option]}' was given as {option}, which is a {'JSON' if option == 'coco' else 'CSV'} file; "
                "labels and boxes are CSV, and COCO's JSON is given as coco"
            )
    if not (root / "images").is_dir():
        return found
    usual = {option: root / name for option, name in LAID_OUT.items() if (root / name).exists()}
    return {**usual, **found}


def _words(names: Sequence[str], labels: Path | None, scenes: Mapping[str, Scene] | None) -> dict[str, str]:
    """The class of each image by name or number, as far as it is known."""
    if labels is not None:
        return look_up(names, read_pairs(labels), labels)
    if scenes is not None:
        found = {name: scene.category() for name, scene in scenes.items()}
        return {name: word for name, word in found.items() if word is not None}
    return {name: name.split("/")[0] for name in names} if all("/" in name for name in names) else {}


def _of_class(scene: Scene, word: str | None, categories: Sequence[str]) -> Scene:
    """The things of an image's class, where that is a category; else all of them."""
    return scene.of(word if word in categories else None)


def _class_index(word: str, name: str, classes: Sequence[str] | None) -> int:
    """A class given by name or by index."""
    if classes is not None and word in classes:
        return classes.index(word)
    if not word.isdecimal():
        raise PatchlightError(f"'{name}' has class '{word}', which is not one; {nearest(word, classes or ())}")
    if classes is not None and int(word) >= len(classes):
        raise PatchlightError(f"'{name}' has class {word}; classes are 0 to {len(classes) - 1}")
    return int(word)


def _annotate(
    notes: Mapping[str, Note], scenes: Mapping[str, Scene], ignore: int | None, sample: Sample, sources: Sources
) -> Sample:
    """A sample with its boxes and mask, from tables and files or else from COCO's JSON."""
    name, size, scene = sample.name, sample.image.size, scenes.get(sample.name, Scene())
    if scene.size not in (None, size):
        drawn_on, own = (f"{width} x {height}" for width, height in (scene.size, size))
        raise PatchlightError(f"'{name}' was {drawn_on} when it was annotated, but is {own}; give the same image")
    boxes = scaled(notes[name], size, name) if name in notes else scene.boxes()
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
    """The files of one image, and what was read of it from tables before."""
    note, scene = notes.get(name), scenes.get(name)
    known = set() if scene is None else scene.known()
    known |= {what for what, table in (("boxes", notes), ("masks", masks)) if name in table}
    boxes = None if note is None else [note.boxes, note.size]
    values = [ignore, boxes, None if scene is None else scene.values()]
    return Sources([paths[name], *([masks[name]] if name in masks else [])], labels.get(name), values, known)


def _read_mask(path: Path, ignore: int | None) -> Tensor:
    """1 on the object, 0 on the background, -1 where the pixel is `ignore`."""
    stored = open_mask(path)
    pixels = np.asarray(stored)
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    colours = pixels[..., :-1] if stored.mode in ("LA", "RGBA") else pixels
    mask = (colours != 0).any(-1).astype(np.int8)
    if ignore is not None:
        mask[(colours == ignore).all(-1)] = -1
    return torch.from_numpy(mask)
