"""Folders of images: one's own, with classes from sub-folders or a label file, and MURA's radiographs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from patchlight.data.base import Data, Sample, Sources, existing_folder, look_up, read_pairs, read_text, register_data
from patchlight.errors import PatchlightError, nearest, spelled
from patchlight.images import list_images, open_image


@register_data("folder")
def open_folder(path: str | Path, labels: str | Path | None = None, classes: Sequence[str] | None = None) -> Data:
    """Every image below a folder, sorted; the name of a sample is its path inside the folder.

    If all images lie in sub-folders, the first sub-folder is the class, unless `labels` is a CSV file of lines
    `name,label`: the path, file name or stem of an image and a class name or index. `classes` are the names of a
    model's classes (`vit.labels`), so that indices are the model's; by default classes are numbered in the order of
    their sorted names.
    """
    folder = existing_folder(path, "images")
    title = folder.resolve().name
    paths = {spelled(p.relative_to(folder).as_posix()): p for p in list_images(folder)}
    names = list(paths)
    if labels is not None:
        pairs = read_pairs(Path(labels))
        words = [look_up(name, pairs, Path(labels)) for name in names]
    elif all("/" in name for name in names):
        words = [name.split("/")[0] for name in names]
    else:
        return Data(title, names, partial(_read, paths, {}), classes, partial(_sources, paths, {}))
    if classes is None and not all(word.isdecimal() for word in words):
        classes = sorted(set(words))
    numbers = {name: _class_index(word, name, classes) for name, word in zip(names, words, strict=True)}
    return Data(title, names, partial(_read, paths, numbers), classes, partial(_sources, paths, numbers))


@register_data("mura")
def open_mura(path: str | Path, split: str = "valid", part: str | None = None) -> Data:
    """MURA-v1.1: class 1 where the study's folder ends in `_positive` (abnormal), 0 where in `_negative`.

    `split` is valid or train, listed in `valid_image_paths.csv` or else walked; `part` is a body part: XR_WRIST, ….
    """
    root = existing_folder(path, "MURA-v1.1")
    root = root / "MURA-v1.1" if (root / "MURA-v1.1").is_dir() else root
    listed = root / f"{split}_image_paths.csv"
    if listed.is_file():
        lines = [line.strip() for line in read_text(listed).splitlines() if line.strip()]
        named = [line.partition("/")[2] if line.startswith("MURA") else line for line in lines]
        paths = {name: root / name for name in named}
    elif (root / split).is_dir():
        paths = {spelled(p.relative_to(root).as_posix()): p for p in list_images(root / split)}
    else:
        raise PatchlightError(f"'{root}' has neither {listed.name} nor a folder '{split}'; give the folder MURA-v1.1")
    names = list(paths)
    if part is not None:
        parts = {name.split("/")[1] for name in names if "/" in name}
        if part not in parts:
            raise PatchlightError(f"no body part '{part}' in '{root}'; {nearest(part, parts)}")
        names = [name for name in names if name.split("/")[1] == part]
    labels = ("negative", "positive")
    numbers = {name: _study_class(name, labels) for name in names}
    return Data(f"mura-{split}", names, partial(_read, paths, numbers), labels, partial(_sources, paths, numbers))


def _read(paths: Mapping[str, Path], labels: Mapping[str, int], name: str) -> Sample:
    return Sample(name, open_image(paths[name]), labels.get(name))


def _sources(paths: Mapping[str, Path], labels: Mapping[str, int], name: str) -> Sources:
    return Sources([paths[name]], labels.get(name))


def _class_index(word: str, name: str, classes: Sequence[str] | None) -> int:
    """A class given by name or by index."""
    if classes is not None and word in classes:
        return classes.index(word)
    if not word.isdecimal():
        raise PatchlightError(f"'{name}' has class '{word}', which is not one; {nearest(word, classes or ())}")
    if classes is not None and int(word) >= len(classes):
        raise PatchlightError(f"'{name}' has class {word}; classes are 0 to {len(classes) - 1}")
    return int(word)


def _study_class(name: str, labels: Sequence[str]) -> int:
    ending = Path(name).parent.name.rpartition("_")[2]
    if ending not in labels:
        raise PatchlightError(f"the folder of '{name}' ends neither in _positive nor in _negative, so it has no class")
    return labels.index(ending)
