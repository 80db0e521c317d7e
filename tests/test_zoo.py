"""The bundled model and photographs: the model card, and correct predictions for the photographs."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
from timm.models.vision_transformer import VisionTransformer

import patchlight as pl
from patchlight.zoo import pocket
from tests.helpers import timm_pocket


def test_the_file_is_the_one_described() -> None:
    about = pocket.description()
    assert pocket.check_file()
    assert pocket.WEIGHTS.stat().st_size <= 9_000_000
    assert about["accuracy"] >= 0.9
    model = pocket.build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == about["parameters"]


def test_pocket_is_timms_model_to_the_bit() -> None:
    """Names, order and initial values of its weights, logits, gradients and maps."""
    torch.manual_seed(1)
    theirs = VisionTransformer(**pocket.description()["architecture"]).state_dict()
    torch.manual_seed(1)
    ours = pocket.build(trained=False).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    vit = pl.load("pocket")
    other = pl.wrap(timm_pocket(), labels=vit.labels, preprocess=vit.preprocess)
    batch = vit.batch([pocket.PHOTOS / "cat.jpg", pocket.PHOTOS / "dog.jpg"])
    assert torch.equal(vit.model(batch), other.model(batch))
    for method in ("fullgrad-plus.libra", "decompx.plus", "genatt"):
        assert torch.equal(pl.explain(vit, batch, method).scores, pl.explain(other, batch, method).scores), method


def test_explaining_with_pocket_imports_no_model_library() -> None:
    code = (
        "import sys, patchlight as pl; from patchlight.zoo.pocket import PHOTOS; "
        "pl.explain(pl.load('pocket'), PHOTOS / 'cat.jpg', 'genatt'); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"timm", "torchvision", "transformers", "open_clip", "torch._dynamo", "matplotlib", "scipy", "pandas"}
    assert not heavy & set(done.stdout.split())


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
    """The cat's face is in the middle, so the best tenth of the patches is not on the border."""
    vit = pl.load("pocket")
    best = pl.explain(vit, pocket.PHOTOS / "cat.jpg", "ixg.skipplus.libra", target="cat").top_patches(6)[0]
    on_border = ((best == 0) | (best == 7)).any(1).sum()
    assert on_border <= 2
