"""Real weights and photographs: predictions are right, and every kind of input gives the same map."""

from __future__ import annotations

import csv

import pytest
import torch
from PIL import Image

import patchlight as pl
from tests.reference import shared_dir


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_real_models(name: str) -> None:
    data = shared_dir() / "data"
    photos = data / "imagenet-val-1000"
    labels = photos / "classes.csv"
    vit = pl.load(name, weights=data / "weights" / f"{name}_imagenet1k.safetensors", labels=labels)
    with (photos / "boxes.csv").open(newline="") as file:
        truth = {row["image"]: int(row["class_index"]) for row in csv.DictReader(file)}
    chosen = sorted(truth)[:40]
    paths = [photos / "images" / f"{image}.jpg" for image in chosen]
    right = vit.logits(vit.batch(paths)).argmax(1) == torch.tensor([truth[image] for image in chosen])
    assert right.float().mean() > 0.55, "about three quarters of the validation images are recognised"

    some = paths[:2]
    by_path = pl.explain(vit, some, ["rawatt", "rollout", "genatt", "ixg", "gradcam", "random"], target=[1, 2])
    by_picture = pl.explain(vit, [Image.open(p) for p in some], list(by_path), target=[1, 2])
    by_tensor = pl.explain(vit, vit.batch(some), list(by_path), target=[1, 2])
    for method, expected in by_path.items():
        assert torch.equal(by_picture[method].scores, expected.scores), method
        assert torch.equal(by_tensor[method].scores, expected.scores), method
    assert pl.explain(vit, str(some[0]), target="tench").labels == ("tench, Tinca tinca",)
