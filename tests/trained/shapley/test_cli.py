"""`patchlight shapley train`, then `explain --explainer`, with the bundled model on a handful of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchlight.core.recipes import parse_as, read_text
from patchlight.trained.shapley.settings import ShapleyRecipe
from tests.trained.diffmask.test_cli import call, folder  # noqa: F401

FEW = [
    *("--set", "steps=2", "--set", "surrogate_steps=2", "--set", "batch_size=2", "--set", "log_every=1"),
    *("--set", "masks=2", "--set", "rank=1", "--set", "check=1"),
]


def test_train_then_explain(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    words = ["--data", folder, "--out", tmp_path / "sh", "--held-out", folder, *FEW]
    code, told = call("shapley", "train", *words, "--json")
    assert code == 0, told
    result = json.loads(told)
    assert (result["step"], result["surrogate"]["step"], result["held_out"]["images"]) == (2, 2, 2)
    assert (tmp_path / "sh" / "metrics.csv").read_text().startswith("step,steps,loss,even")
    assert (tmp_path / "sh" / "surrogate" / "metrics.csv").read_text().startswith("step,steps,loss,untrained")
    code, told = call("shapley", "train", *words)
    assert code == 0, told
    assert "Use it: patchlight explain photo.jpg --model pocket --method vit-shapley" in told
    photo = folder / "cat" / "0.png"
    explain = ["--method", "vit-shapley,rawatt", "--explainer", tmp_path / "sh", "--out", tmp_path / "x.png"]
    code, told = call("explain", photo, *explain)
    assert code == 0, told
    assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no data was given"),
        (["--data", "FOLDER", "--set", "rat=1"], "no setting 'rat'"),
        (["--data", "FOLDER", "--set", "batch_size=64"], "fewer than one batch of 64"),
        (["--data", "FOLDER", "--preset", "papr"], "no ViT-Shapley preset"),
    ],
)
def test_wrong_requests_are_one_sentence(words: list[str], told: str, folder: Path, tmp_path: Path) -> None:  # noqa: F811
    code, said = call("shapley", "train", "--out", tmp_path / "sh", *(w.replace("FOLDER", str(folder)) for w in words))
    assert code == 2
    assert told in said
    assert "Traceback" not in said


def test_the_recipe_is_valid() -> None:
    recipe = parse_as(ShapleyRecipe, read_text("shapley-cifar10", "shapley"), "recipe")
    assert recipe.training(seed=3).seed == 3
    assert recipe.model.name == "pocket"
