"""Folders of images, MURA and CIFAR, with small files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.data import load_batch, open_data
from patchlight.data.cifar import read_cifar10
from patchlight.data.counting import counting_grids

from .files import picture, write


def refused(kind: str, path: Path, **options: object) -> str:
    with pytest.raises(PatchlightError) as error:
        open_data(kind, path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


KINDS = ["folder", "mura", "imagenet", "imagenet-s", "imagenet-segmentation", "pets", "cifar10", "cifar100"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_empty_folder(kind: str, tmp_path: Path) -> None:
    assert "does not exist" in refused(kind, tmp_path / "absent")
    assert str(tmp_path) in refused(kind, tmp_path)


def test_a_folder_without_images_and_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "notes.txt", "x")
    assert "no images in" in refused("folder", tmp_path)
    assert "is not a folder" in refused("folder", path)


def test_flat_folders_have_no_classes(tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "sub/c.png"):
        picture(tmp_path / name)
    data = open_data("folder", tmp_path)
    assert (data.names, data.labels) == (["a.png", "b.png", "sub/c.png"], None)
    assert data[2].label is None


def test_label_files(tmp_path: Path) -> None:
    for name in ("one.png", "two.png", "x/three.png", "y/three.png"):
        picture(tmp_path / "images" / name)
    text = 'name,label\none.png,"tench, Tinca tinca"\ntwo,cock\nx/three.png,cock\ny/three,hen\n'
    labels = write(tmp_path / "labels.csv", text)
    data = open_data("folder", tmp_path / "images", labels=labels)
    assert data.labels == ["cock", "hen", "tench, Tinca tinca"]
    assert [s.label for s in data] == [2, 0, 0, 1]
    model = ["hen", "goldfish", "cock", "tench, Tinca tinca"]
    assert [s.label for s in open_data("folder", tmp_path / "images", labels=labels, classes=model)] == [3, 2, 2, 0]
    said = refused("folder", tmp_path / "images", labels=labels, classes=["hens", "cock", "tench, Tinca tinca"])
    assert said == "'y/three.png' has the unknown class 'hen'; did you mean 'hens'?"


def test_label_files_with_indices(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(tmp_path / "images" / f"{name}.png")
    labels = write(tmp_path / "labels.txt", "# made by hand\na.png 7\nb.png 300\n")
    assert [s.label for s in open_data("folder", tmp_path / "images", labels=labels)] == [7, 300]
    assert "'b.png' has class 300; classes are 0 to 9" in refused(
        "folder", tmp_path / "images", labels=labels, classes=[str(i + 1000) for i in range(10)]
    )
    write(labels, "a.png 7\n")
    assert "labels.txt' has no line for image 'b.png'" in refused("folder", tmp_path / "images", labels=labels)
    write(labels, "a.png 7\nb.png\n")
    assert "line 2 of" in refused("folder", tmp_path / "images", labels=labels)
    labels.write_bytes(b"\xff\xfe\x00")
    assert "is not a text file in UTF-8" in refused("folder", tmp_path / "images", labels=labels)
    assert "cannot be read" in refused("folder", tmp_path / "images", labels=tmp_path / "absent.csv")


def test_mura(tmp_path: Path) -> None:
    root = tmp_path / "MURA-v1.1"
    names = [
        "valid/XR_WRIST/patient11185/study1_positive/image1.png",
        "valid/XR_WRIST/patient11185/study2_negative/image1.png",
        "valid/XR_HAND/patient11501/study1_negative/image1.png",
    ]
    for name in names:
        picture(root / name)
    picture(root / "valid/XR_HAND/patient11501/study1_negative/._image1.png")
    walked = open_data("mura", root)
    assert sorted(walked.names) == sorted(names)
    write(root / "valid_image_paths.csv", "".join(f"MURA-v1.1/{name}\n" for name in names))
    for path in (root, tmp_path):
        data = open_data("mura", path)
        assert data.names == names
        assert data.labels == ("negative", "positive")
        assert [s.label for s in data] == [1, 0, 0]
    assert open_data("mura", root, part="XR_HAND").names == names[2:]
    assert "did you mean 'XR_HAND'" in refused("mura", root, part="HAND")
    assert "neither train_image_paths.csv nor a folder 'train'" in refused("mura", root, split="train")
    write(root / "valid_image_paths.csv", "MURA-v1.1/valid/XR_HAND/patient1/study1/image1.png\n")
    assert "ends with neither _positive nor _negative" in refused("mura", root)


def records(count: int, label_bytes: int) -> np.ndarray:
    raw = np.random.default_rng(0).integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    raw[:, :label_bytes] = np.arange(count)[:, None] + np.arange(label_bytes) * 90
    return raw


def test_cifar10(tmp_path: Path) -> None:
    raw = records(3, 1)
    raw.tofile(tmp_path / "test_batch.bin")
    data = open_data("cifar10", tmp_path)
    assert (data.name, data.names) == ("cifar10-test", ["test-00000", "test-00001", "test-00002"])
    sample = data[2]
    assert sample.label == 2
    assert data.labels is not None
    assert data.labels[2] == "bird"
    assert sample.image.getpixel((5, 7)) == tuple(raw[2, 1 + channel * 1024 + 7 * 32 + 5] for channel in range(3))
    assert "no CIFAR-10 found in" in refused("cifar10", tmp_path, split="train")
    assert "give test or train" in refused("cifar10", tmp_path, split="valid")
    raw.ravel()[:-5].tofile(tmp_path / "test_batch.bin")
    assert "not a multiple of 3073" in refused("cifar10", tmp_path)


def test_cifar10_is_read_from_other_plain_files(tmp_path: Path) -> None:
    sizes = {"train": 50_000, "test": 10_000}
    arrays = {f"x_{part}": np.zeros((n, 32, 32, 3), np.uint8) for part, n in sizes.items()}
    arrays |= {f"y_{part}": (np.arange(n) % 10).astype(np.uint8) for part, n in sizes.items()}
    arrays["x_test"][7] = 200
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert np.array_equal(read_cifar10(tmp_path, "test")[0], arrays["x_test"])
    assert np.array_equal(read_cifar10(tmp_path, "train")[1], arrays["y_train"])
    arrays = {name: array for name, array in arrays.items() if name.endswith("test")}
    np.savez(tmp_path / "cifar10.npz", **(arrays | {"x_test": arrays["x_test"][:10]}))
    with pytest.raises(PatchlightError, match=r"the test part .* is not CIFAR-10: images \(10, 32, 32, 3\)"):
        read_cifar10(tmp_path)
    np.savez(tmp_path / "cifar10.npz", **(arrays | {"y_test": arrays["y_test"] // 2}))
    with pytest.raises(PatchlightError, match="are not 1000 images of each of 10 classes"):
        read_cifar10(tmp_path)
    np.savez(tmp_path / "cifar10.npz", x_test=arrays["x_test"])
    with pytest.raises(PatchlightError, match="no array y_test"):
        read_cifar10(tmp_path)
    with pytest.raises(PatchlightError, match=r"bin.*npz"):
        read_cifar10(tmp_path / "nowhere")
    (tmp_path / "package").mkdir()
    Image.fromarray(arrays["x_test"].reshape(10_000, 1024, 3)).save(tmp_path / "package" / "test_batch.png")
    write(tmp_path / "package" / "test_lables.json", json.dumps(arrays["y_test"].tolist()))
    (tmp_path / "cifar10.npz").unlink()
    pixels, labels = read_cifar10(tmp_path)
    assert np.array_equal(pixels, arrays["x_test"])
    assert np.array_equal(labels, arrays["y_test"])


def test_cifar100_reads_the_fine_label(tmp_path: Path) -> None:
    raw = records(4, 2)
    raw.tofile(tmp_path / "test.bin")
    assert open_data("cifar100", tmp_path)[3].label == 93
    write(tmp_path / "fine_label_names.txt", "\n".join(f"kind{i}" for i in range(100)))
    data = open_data("cifar100", tmp_path)
    assert data.labels is not None
    assert data.labels[93] == "kind93"
    assert data[1].image.getpixel((31, 0))[2] == raw[1, 2 + 2048 + 31]
    raw[0, 1] = 100
    raw.tofile(tmp_path / "test.bin")
    with pytest.raises(PatchlightError, match="'test-00000' has class 100; the classes of 'cifar100-test' are 0 to 99"):
        open_data("cifar100", tmp_path)[0]
    (tmp_path / "test.bin").write_bytes(b"")
    assert "has no images" in refused("cifar100", tmp_path)


def test_counting() -> None:
    grids = counting_grids(12, seed=3, part="test")
    data = open_data("counting", count=12, seed=3)
    batch = load_batch(data, range(12), Preprocess((48, 48), (0.5,) * 3, (0.5,) * 3))
    torch.testing.assert_close(batch.images, grids.images)
    assert batch.labels is not None
    assert torch.equal(batch.labels, grids.labels)
    masked = open_data("counting", count=12, seed=3, masks=True)
    assert len(masked) == int((grids.labels > 0).sum())
    for sample in masked:
        assert sample.mask is not None
        assert sample.label is not None
        assert int(sample.mask.sum()) == 16 * 16 * sample.label
        red = np.asarray(sample.image)[sample.mask.numpy() == 1]
        assert (red == (255, 0, 0)).all()
    with pytest.raises(PatchlightError, match="unknown split 'val'; give test or train or validation"):
        open_data("counting", split="val")
    with pytest.raises(PatchlightError, match="data set 'pets' needs a path"):
        open_data("pets")
