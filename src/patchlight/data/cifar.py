"""Small images held in memory: CIFAR-10 and CIFAR-100, without pickle and without a download, and the counting task."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from patchlight.data.base import Data, Sample, existing_folder, read_text, register_data
from patchlight.errors import PatchlightError
from patchlight.zoo.cifar10 import CLASSES, TEST_BATCH, TRAIN_BATCHES, UInt8Array, load_cifar10, read_records


@register_data("cifar10")
def open_cifar10(path: str | Path, split: str = "test") -> Data:
    """CIFAR-10 in a layout that `patchlight.zoo.cifar10` reads; of the binary version only the split's files."""
    root = existing_folder(path, "CIFAR-10")
    files = [f"{name}.bin" for name in _one_of(split, train=TRAIN_BATCHES, test=(TEST_BATCH,))]
    for place in (root, root / "cifar-10-batches-bin"):
        if all((place / file).is_file() for file in files):
            return _data("cifar10", split, [_records(place / file) for file in files], CLASSES)
    try:
        whole = load_cifar10(root)
    except (FileNotFoundError, ValueError) as error:
        raise PatchlightError(str(error)) from error
    part = (whole.x_train, whole.y_train) if split == "train" else (whole.x_test, whole.y_test)
    return _data("cifar10", split, [part], CLASSES)


@register_data("cifar100")
def open_cifar100(path: str | Path, split: str = "test") -> Data:
    """CIFAR-100's binary version: `train.bin`, `test.bin` (coarse and fine label, 3072 pixel bytes) and class names.

    Classes are the 100 fine ones, named by `fine_label_names.txt` where it is there.
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
    return _data("cifar100", split, [_records(place / file, label_bytes=2)], names)


@register_data("counting", made_up=True)
def open_counting(
    path: str | Path | None = None,
    split: str = "test",
    count: int | None = None,
    seed: int = 0,
    distractors: int = 5,
    masks: bool = False,
) -> Data:
    """The counting-patches task of `patchlight.data.counting`, made on the spot: no path is needed.

    With `masks`, the red patches are the object, and grids without any are left out.
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
        raise PatchlightError(f"no split is called '{split}'; give {' or '.join(sorted(choices))}")
    return choices[split]


def _records(path: Path, label_bytes: int = 1) -> tuple[UInt8Array, UInt8Array]:
    try:
        return read_records(path, label_bytes)
    except ValueError as error:
        raise PatchlightError(str(error)) from error


def _data(
    kind: str, split: str, parts: list[tuple[UInt8Array, UInt8Array]], classes: tuple[str, ...] | list[str]
) -> Data:
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if not len(labels):
        raise PatchlightError(f"the {split} split of this {kind} has no images")
    names = [f"{split}-{i:05d}" for i in range(len(labels))]
    return Data(f"{kind}-{split}", names, partial(_read, pixels, labels, None), classes)


def _read(pixels: UInt8Array, labels: UInt8Array, masks: torch.Tensor | None, name: str) -> Sample:
    index = int(name.rpartition("-")[2])
    mask = None if masks is None else masks[index]
    return Sample(name, Image.fromarray(pixels[index]), int(labels[index]), mask=mask)
