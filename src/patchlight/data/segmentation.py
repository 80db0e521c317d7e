"""Images with masks: ImageNet-S, ImageNet-Segmentation and Oxford-IIIT Pet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchlight.core.errors import PatchlightError, escape_surrogates
from patchlight.core.extras import import_extra
from patchlight.core.fingerprints import json_digest
from patchlight.core.images import list_images, open_mask
from patchlight.data.base import (
    Data,
    Sample,
    Sources,
    existing_folder,
    first_existing,
    largest_region,
    read_text,
    register_data,
)
from patchlight.data.imagenet import class_names, synset_indices

IGNORED = 1000
NO_CLASS = -2


@register_data("imagenet-s")
def open_imagenet_s(path: str | Path, split: str = "validation", categories: str | Path | None = None) -> Data:
    """ImageNet-S: images in `validation/SYNSET/`, masks in `validation-segmentation/SYNSET/` as PNG.

    The class id of a pixel is R + 256 G: 0 is another class, 1000 is ignored, and i is the i-th of the sorted synsets.
    The class of an image is the one with the largest area on the model's input; its mask is 1 there and 0 elsewhere.

    Args:
        split: The name of the folder of images.
        categories: A file of synsets, `ImageNetS_categories_im919.txt`. Default: the one in the folder or above it, or
            else a complete set of class folders.
    """
    root = existing_folder(path, "ImageNet-S")
    folder, masks = root / split, root / f"{split}-segmentation"
    for needed in (folder, masks):
        existing_folder(needed, f"ImageNet-S ({needed.name})")
    paths = {escape_surrogates(p.stem): p for p in list_images(folder)}
    table = _class_table(_categories(root, masks, categories))
    values, present = json_digest(table.tolist()), {"labels", "masks"}  # the mask determines the class, by the table
    sources = {
        name: Sources([p, (masks / p.relative_to(folder)).with_suffix(".png")], values=values, present=present)
        for name, p in paths.items()
    }
    return Data.of_files(
        f"imagenet-s-{split}", list(paths), sources.__getitem__, class_names(), partial(_add_regions, table)
    )


@register_data("imagenet-segmentation")
def open_imagenet_segmentation(path: str | Path) -> Data:
    """ImageNet-Segmentation (Guillaumin et al.): `gtsegs_ijcv.mat`, 4,276 images with one object each.

    Needs h5py (`pip install 'patchlight[segmentation]'`). An image has a label if its synset is one of ImageNet's
    1,000; the papers explain the predicted class.
    """
    file = Path(path)
    file = file / "gtsegs_ijcv.mat" if file.is_dir() else file
    if not file.is_file():
        raise PatchlightError(f"'{file}' does not exist; give gtsegs_ijcv.mat or its folder")
    with _open_mat(file) as mat:
        missing = [key for key in ("value/img", "value/gt") if key not in mat]
        if missing:
            raise PatchlightError(f"'{file}' has no '{missing[0]}', so it is not gtsegs_ijcv.mat")
        count = len(mat["value/img"])
    names = [f"segmentation-{i:04d}" for i in range(count)]
    return Data("imagenet-segmentation", names, partial(_read_mat, file), class_names())


@register_data("pets")
def open_pets(path: str | Path, split: str = "all") -> Data:
    """Oxford-IIIT Pet: `images/` and `trimaps/` (or `annotations/trimaps/`): 1 animal, 2 background, 3 border.

    The border counts as not labelled. Classes are the breeds in alphabetical order.

    Args:
        split: "trainval" or "test": the images in `annotations/trainval.txt` or `test.txt`; "all": those in `list.txt`,
            or all images without such a file.
    """
    root = existing_folder(path, "Oxford-IIIT Pet")
    images = existing_folder(root / "images", "its images")
    trimaps = first_existing((root / "trimaps", root / "annotations" / "trimaps"))
    if trimaps is None:
        raise PatchlightError(f"'{root}' has no folder trimaps or annotations/trimaps")
    paths = {escape_surrogates(p.stem): p for p in list_images(images)}
    list_file = root / "annotations" / f"{'list' if split == 'all' else split}.txt"
    names = list(paths)
    if list_file.is_file():
        lines = [line for line in read_text(list_file).splitlines() if line.strip() and not line.startswith("#")]
        names = [line.split()[0] for line in lines]
    elif split != "all":
        raise PatchlightError(f"no split '{split}': '{list_file}' does not exist")
    breed_of = {name: name.rpartition("_")[0] for name in paths}
    breeds = sorted(set(breed_of.values()), key=str.lower)
    labels = {name: breeds.index(breed) for name, breed in breed_of.items()}
    files = {name: [paths.get(name, images / f"{name}.jpg"), trimaps / f"{name}.png"] for name in names}
    sources = {name: Sources(paths_of, labels.get(name), present={"masks"}) for name, paths_of in files.items()}
    return Data.of_files(f"pets-{split}", names, sources.__getitem__, breeds, _add_trimap)


def _add_regions(table: torch.Tensor, sample: Sample, sources: Sources) -> Sample:
    channels = np.asarray(open_mask(sources.files[1]).convert("RGB"), dtype=np.int64)
    ids = torch.from_numpy(channels[..., 0] + 256 * channels[..., 1])
    regions = table[ids.clamp(max=len(table) - 1)]
    if bool((regions == NO_CLASS).any()):
        wrong = int(ids[regions == NO_CLASS][0])
        allowed = f"ids are 0, 1 to {int((table >= 0).sum())}, and {IGNORED}"
        raise PatchlightError(f"the mask of '{sample.name}' has class id {wrong}; {allowed}")
    mask, label = largest_region(regions, sample.name)
    return replace(sample, label=label, mask=mask, regions=regions)


def _class_table(synsets: Sequence[str]) -> torch.Tensor:
    """The class index of each class id of ImageNet-S; -1 for ids without a class."""
    table = torch.full((IGNORED + 2,), NO_CLASS, dtype=torch.int16)
    table[0] = table[IGNORED] = -1
    for i, synset in enumerate(sorted(synsets), start=1):
        if synset not in synset_indices() or i >= IGNORED:
            raise PatchlightError(f"'{synset}' in the list of categories is not a synset of ImageNet's 1,000 classes")
        table[i] = synset_indices()[synset]
    return table


def _categories(root: Path, masks: Path, categories: str | Path | None) -> list[str]:
    """The synsets of the data set, from its list or from a complete set of class folders."""
    if categories is not None:
        return read_text(Path(categories)).split()
    above = (root, *root.resolve().parents[:2])
    lists = [
        p for a in above for sub in ("", "data/categories") for p in (a / sub).glob("ImageNetS_categories_im*.txt")
    ]
    folders = [p.name for p in masks.iterdir() if p.is_dir()]
    for path in lists:
        synsets = read_text(path).split()
        if len(lists) == 1 or root.name.endswith(f"{len(synsets)}"):
            return synsets
    if len(folders) in (50, 300, 919):
        return folders
    raise PatchlightError(
        f"the classes of the ids in '{masks}' are not known; give categories=, the ImageNetS_categories_im*.txt of the "
        "data set"
    )


def _open_mat(file: Path) -> Any:
    h5py = import_extra("h5py", "gtsegs_ijcv.mat needs", "segmentation")
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise PatchlightError(f"'{file}' is not a MATLAB 7.3 file, or it is truncated: {error}") from error


def _read_mat(file: Path, name: str) -> Sample:
    index = int(name.rpartition("-")[2])
    with _open_mat(file) as mat:  # opened each time, because threads and processes cannot share a handle

        def array(key: str) -> Any:
            value = mat[key][index, 0]
            while getattr(mat[value].dtype, "kind", "") == "O":  # a cell inside a cell
                value = mat[value][0, 0]
            return mat[value][()]

        try:
            pixels, mask = array("value/img"), array("value/gt")
            image_id = "".join(map(chr, array("value/id").ravel())) if "value/id" in mat else ""
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise PatchlightError(f"'{name}' of '{file}' cannot be read: {error}") from error
    if pixels.ndim != 3 or pixels.shape[0] != 3 or pixels.dtype != np.uint8 or mask.ndim != 2:
        raise PatchlightError(f"'{name}' of '{file}' is not an RGB image with a mask: {pixels.shape}, {mask.shape}")
    # MATLAB stores columns first: [C,W,H] and [W,H]
    signs = torch.from_numpy(np.where(mask == 1, 1, np.where(mask == 0, 0, -1)).astype(np.int8).T.copy())
    image = Image.fromarray(np.ascontiguousarray(pixels.transpose(2, 1, 0)))
    return Sample(name, image, synset_indices().get(image_id.partition("_")[0]), mask=signs)


def _add_trimap(sample: Sample, sources: Sources) -> Sample:
    trimap = np.asarray(open_mask(sources.files[1]))
    if trimap.ndim != 2 or not np.isin(trimap, (1, 2, 3)).all():
        raise PatchlightError(f"the trimap of '{sample.name}' has values other than 1, 2 and 3")
    return replace(sample, mask=torch.from_numpy(np.array([0, 1, 0, -1], dtype=np.int8)[trimap]))
