"""Values of few images, and maps that are measured on what they are not of."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import patchlight as pl
from patchlight.metrics.base import Evaluation
from patchlight.zoo import pocket
from tests.bench.small import pictures
from tests.helpers import command, refuses

QUICK = ("--metric", "deletion", "--set", "deletion.steps=2")


def photos(folder: Path, count: int = 2) -> Path:
    return pictures(folder / "photos", count)


def saved_maps(folder: Path, *options: str) -> tuple[str, str]:
    images, maps = str(photos(folder)), str(folder / "maps")
    command("explain", images, "--method", "genatt", "--save", maps, "--out", f"{folder}/out/", *options)
    return images, maps


def other_weights(folder: Path) -> str:
    """The bundled model's weights, of which one number is another."""
    tensors = {k: v.float() for k, v in load_file(pocket.WEIGHTS).items()}
    tensors["blocks.3.mlp.fc1.bias"][5] += 1e-3
    save_file(tensors, folder / "other.safetensors")
    return str(folder / "other.safetensors")


def test_one_image_has_no_interval(tmp_path: Path) -> None:
    vit = pl.load("pocket")
    images = sorted(photos(tmp_path, 1).iterdir())
    found = pl.evaluate(vit, images, "genatt", "deletion", steps=2)
    assert all(math.isnan(side) for side in found.interval())


def test_six_images_have_an_interval(tmp_path: Path) -> None:
    found = pl.evaluate(pl.load("pocket"), sorted(photos(tmp_path, 6).iterdir()), "genatt", "deletion", steps=2)
    low, high = found.interval()
    assert low < found.mean < high
    assert "mean of 6 images" in repr(found)
    nothing = Evaluation("deletion", torch.empty(0, dtype=torch.float64), False, (0.0, 1.0))
    assert math.isnan(nothing.interval()[0])
    assert "0 images" in repr(nothing)


def test_maps_of_other_weights_are_refused(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path).iterdir())
    maps = pl.explain(vit, images, "genatt")
    other = pl.load("pocket", weights=other_weights(tmp_path))
    refuses(("other weights", "maps.scores"), pl.evaluate, other, images, maps, "deletion", steps=2)
    assert pl.evaluate(vit, images, maps, "deletion", steps=2).count == 2
    assert pl.evaluate(other, images, maps.scores, "deletion", steps=2).count == 2


def test_a_weight_that_changes_in_place_is_noticed(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path).iterdir())
    maps = pl.explain(vit, images, "genatt")
    with torch.no_grad():
        vit.model.get_parameter("blocks.5.attn.proj.weight")[7, 7] += 1e-4
    refuses("other weights", pl.evaluate, vit, images, maps, "deletion", steps=2)


def test_another_picture_of_the_same_name_is_refused(tmp_path: Path) -> None:
    images, maps = saved_maps(tmp_path)
    shutil.copy(f"{images}/0.png", f"{images}/1.png")
    told = command("evaluate", maps, "--images", images, *QUICK, "--json", code=3, says=("is not the image",))
    found = json.loads(told[: told.rindex("}") + 1])
    assert [list(r["values"]) for r in found["results"]] == [["0.png"]]


def test_images_in_another_order_are_refused(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path, 3).iterdir())
    maps = pl.explain(vit, images, "genatt")
    refuses(("image 0 is not the one", "maps.scores"), pl.evaluate, vit, images[::-1], maps, "deletion", steps=2)
    assert pl.evaluate(vit, images[1:], maps[1:], "deletion", steps=2).count == 2


def test_hashes_survive_saving(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path).iterdir())
    maps = pl.explain(vit, images, "genatt")
    again = pl.Attribution.load(maps.save(tmp_path / "maps"))
    assert (again.weights, again.images) == (maps.weights, maps.images)
    assert again.weights
    assert len(set(again.images)) == 2
    assert again[1].images == maps.images[1:]


def test_maps_of_classes_that_a_model_has_not_are_refused(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path).iterdir())
    maps = pl.explain(vit, images, "genatt")
    for wrong in (802, -1, 10):
        odd = replace(maps, target=torch.tensor([1, wrong]))
        refuses((f"class {wrong}", "10 classes"), pl.evaluate, vit, images, odd, "deletion", steps=2)
    odd.save(tmp_path / "saved" / "0" / "genatt")
    command("evaluate", str(tmp_path / "saved"), "--images", str(tmp_path / "photos"), *QUICK, code=2)


def test_pixel_maps_are_measured(tmp_path: Path) -> None:
    vit, images = pl.load("pocket"), sorted(photos(tmp_path).iterdir())
    maps = pl.explain(vit, images, "ixg", level="pixel")
    quick: dict[str, dict[str, int]] = {"deletion": {"steps": 4}, "max-sensitivity": {"samples": 2}}
    found = pl.evaluate(vit, images, maps, quick, batch_size=2)
    assert found["deletion"].count == found["max-sensitivity"].count == 2
    assert torch.equal(pl.explain(vit, images, "ixg", level="pixel").scores, maps.scores)
