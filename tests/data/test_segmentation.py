"""ImageNet-S, ImageNet-Segmentation and Oxford Pets, with small files and real trimaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess
from patchlight.data import batches, load_batch, open_data
from tests.reference import shared_dir

from .files import picture, save_array, write

CATEGORIES = ["n01484850", "n01440764", "n01443537"]  # unsorted: ids 1, 2, 3 are classes 0, 1, 2
SAME = Preprocess((30, 40))


def refused(kind: str, path: Path, **options: object) -> str:
    with pytest.raises(PatchlightError) as error:
        open_data(kind, path, **options)
    return str(error.value)


def class_ids(ids: np.ndarray) -> np.ndarray:
    """As ImageNet-S stores them: R + 256 G."""
    return np.stack([ids % 256, ids // 256, np.zeros_like(ids)], -1)


@pytest.fixture
def imagenet_s(tmp_path: Path) -> Path:
    root = tmp_path / "ImageNetS3"
    ids = np.zeros((30, 40), dtype=np.int64)
    ids[:10, :10], ids[10:, :20], ids[:, 30:] = 1, 2, 1000
    picture(root / "validation/n01443537/ILSVRC2012_val_00000009.JPEG")
    save_array(root / "validation-segmentation/n01443537/ILSVRC2012_val_00000009.png", class_ids(ids))
    return root


def test_imagenet_s(imagenet_s: Path) -> None:
    assert "give categories=" in refused("imagenet-s", imagenet_s)
    write(imagenet_s.parent / "data/categories/ImageNetS_categories_im3.txt", "\n".join(CATEGORIES))
    write(imagenet_s.parent / "data/categories/ImageNetS_categories_im1.txt", CATEGORIES[0])
    data = open_data("imagenet-s", imagenet_s)
    assert data.names == ["ILSVRC2012_val_00000009"]
    batch = load_batch(data, [0], SAME)
    assert batch.failures == []
    assert batch.labels is not None
    assert batch.labels.tolist() == [1], "the largest class is not the ignored region"
    expected = torch.zeros(30, 40, dtype=torch.int8)
    expected[10:, :20] = 1
    assert batch.masks is not None
    assert torch.equal(batch.masks[0], expected)
    assert data[0].label == 1


def test_imagenet_s_bad_masks(imagenet_s: Path) -> None:
    categories = write(imagenet_s / "list.txt", "\n".join(CATEGORIES))
    data = open_data("imagenet-s", imagenet_s, categories=categories)
    path = imagenet_s / "validation-segmentation/n01443537/ILSVRC2012_val_00000009.png"
    for ids, sentence in {4: "has class id 4; ids are 0, 1 to 3, and 1000", 60000: "has class id 60000"}.items():
        save_array(path, class_ids(np.full((30, 40), ids)))
        assert sentence in load_batch(data, [0], SAME).failures[0][1]
    save_array(path, class_ids(np.full((30, 40), 1000)))
    assert "has no object" in load_batch(data, [0], SAME).failures[0][1]
    save_array(path, class_ids(np.ones((30, 41), dtype=np.int64)))
    assert "is 41 x 30, but its image 40 x 30" in load_batch(data, [0], SAME).failures[0][1]
    path.unlink()
    assert "no image at" in load_batch(data, [0], SAME).failures[0][1]
    write(categories, "n99999999")
    assert "'n99999999' in the list of categories is not a synset" in refused(
        "imagenet-s", imagenet_s, categories=categories
    )


def write_mat(path: Path, images: list[np.ndarray], masks: list[np.ndarray], ids: list[str]) -> None:
    """As MATLAB 7.3 writes cells: references to arrays with their axes reversed, masks one cell deeper."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for key, cells in {"img": images, "gt": masks, "id": ids}.items():
            table = file.create_dataset(f"value/{key}", (len(cells), 1), dtype=h5py.ref_dtype)
            for i, cell in enumerate(cells):
                data = np.array([[ord(c)] for c in cell], dtype=np.uint16) if isinstance(cell, str) else cell.T
                stored = file.create_dataset(f"refs/{key}{i}", data=data)
                if key == "gt":
                    inner = file.create_dataset(f"refs/cell{i}", (1, 1), dtype=h5py.ref_dtype)
                    inner[0, 0] = stored.ref
                    stored = inner
                table[i, 0] = stored.ref


def test_imagenet_segmentation(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (30, 40, 3), dtype=np.uint8) for _ in range(3)]
    masks = [(generator.random((30, 40)) > 0.5).astype(np.uint8) for _ in range(2)] + [np.zeros((30, 40), np.uint8)]
    file = tmp_path / "gtsegs_ijcv.mat"
    write_mat(file, images, masks, ["n01443537_1", "n00000000_7", "n01440764_2"])
    for path in (file, tmp_path):
        data = open_data("imagenet-segmentation", path)
        assert data.names == [f"segmentation-{i:04d}" for i in range(3)]
    np.testing.assert_array_equal(np.asarray(data[1].image), images[1])
    assert data[1].mask is not None
    np.testing.assert_array_equal(data[1].mask.numpy(), masks[1])
    assert (data[0].label, data[1].label) == (1, None)
    batch = load_batch(data, [0, 1, 2], SAME, workers=2)
    assert batch.names == data.names[:2]
    assert batch.labels is not None
    assert (batch.labels < 0).sum() == 1, "one of the two has none, and the other keeps its own"
    assert batch.failures == [(data.names[2], f"the mask of '{data.names[2]}' has no object; remove the image")]
    file.write_bytes(file.read_bytes()[:300])
    assert "is not a MATLAB 7.3 file, or it is truncated" in refused("imagenet-segmentation", tmp_path)


def test_a_mat_file_of_something_else(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "gtsegs_ijcv.mat", "w") as file:
        file["other"] = 1
    assert "has no 'value/img', so it is not gtsegs_ijcv.mat" in refused("imagenet-segmentation", tmp_path)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    trimap = np.full((30, 40), 2)
    trimap[5:20, 5:20], trimap[8:16, 8:16] = 3, 1
    for name in ("Birman_1", "beagle_7", "Abyssinian_100"):
        picture(tmp_path / "images" / f"{name}.jpg")
        save_array(tmp_path / "annotations/trimaps" / f"{name}.png", trimap)
    write(tmp_path / "images/Birman_1.mat", "the official images have such files among them")
    return tmp_path


def test_pets(pets: Path) -> None:
    data = open_data("pets", pets)
    assert data.labels == ["Abyssinian", "beagle", "Birman"], "upper and lower case alike, as the official ids"
    assert {s.name: s.label for s in data} == {"Abyssinian_100": 0, "beagle_7": 1, "Birman_1": 2}
    mask = data[0].mask
    assert mask is not None
    assert [int((mask == v).sum()) for v in (1, 0, -1)] == [64, 1200 - 225, 225 - 64]
    write(pets / "annotations/list.txt", "#Image CLASS-ID SPECIES BREED ID\nbeagle_7 2 2 1\nAbyssinian_100 1 1 1\n")
    write(pets / "annotations/test.txt", "Abyssinian_100 1 1 1\nBirman_9 1 1 1\n")
    assert open_data("pets", pets).names == ["beagle_7", "Abyssinian_100"]
    test = open_data("pets", pets, split="test")
    batch = load_batch(test, [0, 1], SAME)
    assert batch.names == ["Abyssinian_100"]
    assert "no image at" in batch.failures[0][1]
    assert "no split 'valid'" in refused("pets", pets, split="valid")


def test_bad_trimaps(pets: Path) -> None:
    data = open_data("pets", pets)
    save_array(pets / "annotations/trimaps/Birman_1.png", np.full((30, 40), 7))
    save_array(pets / "annotations/trimaps/beagle_7.png", np.full((30, 40), 2))
    (pets / "annotations/trimaps/Abyssinian_100.png").write_bytes(b"no picture")
    told = dict(load_batch(data, [0, 1, 2], SAME).failures)
    assert "has values other than 1, 2 and 3" in told["Birman_1"]
    assert "has no object" in told["beagle_7"]
    assert "not a readable image" in told["Abyssinian_100"]


def test_the_real_trimaps() -> None:
    data = open_data("pets", shared_dir() / "data" / "pets-370")
    assert len(data) == 370
    assert data.labels is not None
    assert len(data.labels) == 37
    for batch in batches(data.select(every=10), Preprocess((224, 224), crop_pct=0.9), 20):
        assert batch.failures == []
        assert batch.masks is not None
        assert set(batch.masks.unique().tolist()) == {-1, 0, 1}
        animal = (batch.masks == 1).float().mean((1, 2))
        assert 0.005 < float(animal.min()) < float(animal.max()) < 1
