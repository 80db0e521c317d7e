"""The bundled model and photographs: what the model card says, and the model gets the photographs right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.zoo import pocket
from patchlight.zoo.cifar10 import load_cifar10


def test_the_file_is_the_one_described() -> None:
    about = pocket.description()
    assert pocket.check_file()
    assert pocket.WEIGHTS.stat().st_size <= 9_000_000
    assert about["accuracy"] >= 0.9
    model = pocket.build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == about["parameters"]


def test_pocket_loads_by_name_with_labels_and_preprocessing() -> None:
    vit = pl.load("pocket")
    assert min(vit.grid) >= 8
    assert vit.labels == list(pocket.classes())
    assert vit.preprocess.mean == tuple(pocket.description()["mean"])


def test_every_photograph_is_licensed_and_recognised() -> None:
    vit = pl.load("pocket")
    index = json.loads((pocket.PHOTOS / "photos.json").read_text(encoding="utf-8"))
    photos = index if isinstance(index, list) else index["photos"]
    text = (pocket.PHOTOS / "LICENSES.md").read_text(encoding="utf-8")
    assert {p["file"] for p in photos} == {p.name for p in pocket.PHOTOS.glob("*.jpg")}
    for photo in photos:
        assert f"## {photo['file']}" in text
        assert photo["licence"]
        ((label, _),) = vit.predict(pocket.PHOTOS / photo["file"], k=1)[0]
        assert label == photo["label"], photo["file"]


def test_the_cats_map_lies_on_the_cat() -> None:
    """The cat's face fills the middle of its photograph: the best tenth of the patches is not on the border."""
    vit = pl.load("pocket")
    best = pl.explain(vit, pocket.PHOTOS / "cat.jpg", "ixg.skipplus.libra", target="cat").top_patches(6)[0]
    on_border = ((best == 0) | (best == 7)).any(1).sum()
    assert on_border <= 2


def test_cifar10_is_read_from_plain_files(tmp_path: Path) -> None:
    sizes = {"train": 50_000, "test": 10_000}
    arrays = {f"x_{part}": np.zeros((n, 32, 32, 3), np.uint8) for part, n in sizes.items()}
    arrays |= {f"y_{part}": (np.arange(n) % 10).astype(np.uint8) for part, n in sizes.items()}
    arrays["x_test"][7] = 200
    np.savez(tmp_path / "cifar10.npz", **arrays)
    data = load_cifar10(tmp_path)
    assert np.array_equal(data.x_test, arrays["x_test"])
    assert np.array_equal(data.y_train, arrays["y_train"])
    np.savez(tmp_path / "cifar10.npz", **(arrays | {"x_test": arrays["x_test"][:10]}))
    with pytest.raises(ValueError, match=r"the test part .* is not CIFAR-10: images \(10, 32, 32, 3\)"):
        load_cifar10(tmp_path)
    with pytest.raises(Exception, match=r"bin|npz"):
        load_cifar10(tmp_path / "nowhere")
