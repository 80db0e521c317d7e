"""ImageNet's validation images with classes and boxes, from the official files or a CSV.

A class index is the position of the synset in the sorted list of the 1,000, as in timm and torchvision. The official
`ILSVRC2012_validation_ground_truth.txt` numbers classes differently and needs a table of its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from patchlight.core.errors import PatchlightError, escape_surrogates
from patchlight.core.images import list_images
from patchlight.data.base import (
    Data,
    Sample,
    Sources,
    as_index,
    existing_folder,
    first_existing,
    look_up,
    read_number,
    read_pairs,
    read_table,
    read_text,
    register_data,
)
from patchlight.data.notes import Note, read_boxes, scale_boxes

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
IMAGE_FOLDERS = ("images", "val", "validation", "ILSVRC2012_img_val", "Data/CLS-LOC/val")
XML_FOLDERS = ("Annotations/CLS-LOC/val", "ILSVRC2012_bbox_val_v3/val", "Annotations")
DEVKITS = ("", "data/", "ILSVRC2012_devkit_t12/data/")


@register_data("imagenet")
def open_imagenet(path: str | Path, labels: str | Path | None = None, boxes: str | Path | None = None) -> Data:
    """ImageNet's validation images: folders named by synset, or one folder of images with a label file.

    Boxes that refer to a larger copy of the image are scaled. Images are sorted by class, so that every n-th image
    covers all classes.

    Args:
        labels: The official ground truth, `LOC_val_solution.csv`, a `boxes.csv`, or lines `name,label` with a synset or
            a class index. Default: a file in the folder or beside it.
        boxes: `boxes.csv` (image, class_index or synset, xmin, ymin, xmax, ymax, optionally width and height),
            `LOC_val_solution.csv`, or the folder of the official XML files. Default: those in the folder or beside it.
    """
    root = existing_folder(path, "ImageNet's validation images")
    paths = list_images(first_existing(root / name for name in IMAGE_FOLDERS) or root)
    images = {escape_surrogates(p.stem): p for p in paths}
    if len(images) < len(paths):
        raise PatchlightError(f"'{root}' has {len(paths) - len(images)} images of the same name in different folders")
    places = (root, root.parent)
    box_file = Path(boxes) if boxes else _first_in(places, ("boxes.csv", "LOC_val_solution.csv", *XML_FOLDERS))
    ground_truth = _first_in(places, [f"{kit}{GROUND_TRUTH}" for kit in DEVKITS])
    for file in (labels, boxes):
        if file is not None and not Path(file).exists():
            raise PatchlightError(f"'{file}' does not exist; give a file with ImageNet's labels or boxes")
    synsets = _synsets(_first_in(places, ("classes.csv",)))
    notes = _read_notes(box_file, images) if box_file is not None and box_file.is_file() else None
    if labels is not None:
        words = _labels(_read_notes(Path(labels), images))
    elif all(re.fullmatch(r"n\d{8}", p.parent.name) for p in paths):
        words = {name: p.parent.name for name, p in images.items()}
    elif notes is not None:
        words = _labels(notes)
    elif (source := ground_truth or box_file) is not None:
        words = _labels(_read_notes(source, images))
    else:
        raise PatchlightError(
            f"no classes for the images in '{root}': put them into folders named by synset (n01440764, …), or give "
            f"labels= a file of lines name,label, LOC_val_solution.csv or {GROUND_TRUTH}"
        )
    numbers = {name: _class_index(word, name, synsets) for name, word in words.items()}
    ordered = sorted(images, key=lambda name: (numbers.get(name, -1), name))
    boxes_of = dict.fromkeys(ordered, box_file) if notes is None else notes
    sources = {name: _sources(images[name], numbers[name], boxes_of[name]) for name in ordered}
    annotate = None if box_file is None else partial(_add_boxes, notes)
    return Data.of_files("imagenet", ordered, sources.__getitem__, class_names(), annotate)


@cache
def class_names() -> tuple[str, ...]:
    from patchlight.anatomy.timm import imagenet_labels

    return tuple(imagenet_labels(1000) or ())


@cache
def synset_indices() -> dict[str, int]:
    """The class index of each of ImageNet's 1,000 synsets, as timm lists them."""
    from timm.data.imagenet_info import ImageNetInfo

    return {str(synset): i for i, synset in enumerate(ImageNetInfo().label_names())}


def _synsets(classes: Path | None) -> Mapping[str, int]:
    """The class index of each synset: timm's, or those of a `classes.csv`."""
    if classes is None:
        return synset_indices()
    rows = read_table(classes, ("class_index", "synset"))
    return {row["synset"]: int(read_number(row["class_index"], classes)) for row in rows}


def _sources(image: Path, label: int, boxes: Note | Path | None) -> Sources:
    """The files of one image; `boxes` is its note, or the folder of its XML file."""
    if boxes is None:
        return Sources([image], label)
    if isinstance(boxes, Path):
        return Sources([image, boxes / f"{escape_surrogates(image.stem)}.xml"], label, present={"boxes"})
    return Sources([image], label, [boxes.boxes, boxes.size], {"boxes"} if boxes.boxes else set())


def _add_boxes(notes: Mapping[str, Note] | None, sample: Sample, sources: Sources) -> Sample:
    note = _read_xml(sources.files[1], sample.name) if notes is None else notes[sample.name]
    if not note.boxes:
        raise PatchlightError(f"'{sample.name}' has no box; remove the image")
    return replace(sample, boxes=scale_boxes(note, sample.image.size, sample.name))


def _labels(notes: Mapping[str, Note]) -> dict[str, str]:
    return {name: note.label for name, note in notes.items()}


def _read_notes(path: Path, images: Mapping[str, Path]) -> dict[str, Note]:
    """The annotations of each image in a label or box file."""
    if path.is_dir():
        return {name: _read_xml(path / f"{name}.xml", name) for name in images}
    first = read_text(path).partition("\n")[0]
    if path.name == GROUND_TRUTH or first.strip().isdecimal():
        return _read_ground_truth(path, list(images))
    if "PredictionString" in first:
        table = {row["ImageId"]: _solution(row["PredictionString"], path) for row in read_table(path, ["ImageId"])}
    elif "xmin" in first:
        table = read_boxes(path, lambda image: Path(image).stem)
    else:
        table = {name: Note(label) for name, label in read_pairs(path).items()}
    return look_up(images, table, path)


def _solution(text: str, path: Path) -> Note:
    """One image of LOC_val_solution.csv: `synset xmin ymin xmax ymax`, at least once."""
    words = text.split()
    if not words or len(words) % 5:
        raise PatchlightError(f"'{path}' has '{text}'; write synset xmin ymin xmax ymax, at least once")
    groups = [words[i : i + 5] for i in range(0, len(words), 5)]
    return Note(words[0], [tuple(read_number(w, path) for w in group[1:]) for group in groups])


def _read_xml(path: Path, name: str) -> Note:
    """One image of the official annotations, in the format of PASCAL VOC."""
    if not path.is_file():
        raise PatchlightError(f"no boxes for image '{name}': '{path}' does not exist")
    text = read_text(path)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise PatchlightError(f"'{path}' declares a document type, which is refused for safety; remove it")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise PatchlightError(f"'{path}' is not valid XML: {error}") from error

    def number(parent: ElementTree.Element, tag: str) -> float:
        return read_number(parent.findtext(tag, ""), path)

    objects = root.findall("object")
    if not objects:
        raise PatchlightError(f"'{path}' has no object; remove the image")
    size = None if root.find("size") is None else (number(root, "size/width"), number(root, "size/height"))
    boxes = [tuple(number(o, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")) for o in objects]
    return Note(objects[0].findtext("name", ""), boxes, size)


def _read_ground_truth(path: Path, names: Sequence[str]) -> dict[str, Note]:
    """The official list: line i is the class of ILSVRC2012_val_<i>, with the numbers of the development kit."""
    synsets = _devkit_synsets(path)
    lines = read_text(path).split()
    notes = {}
    for name in names:
        match = re.search(r"_val_(\d{8})$", name)
        line = int(match[1]) if match else 0
        if not 1 <= line <= len(lines):
            raise PatchlightError(
                f"'{path}' has no line for image '{name}'; its {len(lines)} lines are for ILSVRC2012_val_00000001, …"
            )
        number = int(read_number(lines[line - 1], path))
        if number not in synsets:
            raise PatchlightError(f"'{name}' has class {number} in '{path}'; classes there are 1 to {len(synsets)}")
        notes[name] = Note(synsets[number])
    return notes


def _devkit_synsets(path: Path) -> dict[int, str]:
    """ILSVRC2012_ID to synset, from `map_clsloc.txt` or the development kit's `meta.mat` beside the ground truth."""
    table, meta = path.parent / "map_clsloc.txt", path.parent / "meta.mat"
    if table.is_file():
        rows = [line.split() for line in read_text(table).splitlines() if line.strip()]
        return {int(read_number(row[1], table)): row[0] for row in rows if len(row) > 1}
    if meta.is_file():
        from scipy.io import loadmat

        try:
            synsets = np.atleast_1d(loadmat(meta, squeeze_me=True)["synsets"])
            return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets if int(row["ILSVRC2012_ID"]) <= 1000}
        except Exception as error:  # scipy raises all kinds of exceptions for damaged files
            raise PatchlightError(f"'{meta}' is not the meta.mat of ImageNet's development kit: {error}") from error
    raise PatchlightError(
        f"'{path}' has the class numbers of the development kit, not those of models; put the kit's meta.mat or "
        "map_clsloc.txt beside it, or give labels by synset"
    )


def _class_index(word: str, name: str, synsets: Mapping[str, int]) -> int:
    index = synsets.get(word, as_index(word))
    if index is None or not 0 <= index < 1000:
        raise PatchlightError(f"'{name}' has class '{word[:40]}'; give 0 to 999 or a synset such as n01440764")
    return index


def _first_in(places: Sequence[Path], names: Sequence[str]) -> Path | None:
    return first_existing(place / name for place in places for name in names)
