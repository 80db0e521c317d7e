"""`patchlight diffmask`, `patchlight shapley` and `--explainer`, with the bundled model and a few pictures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from patchlight.core.errors import PatchlightError
from patchlight.study import counting
from patchlight.trained.diffmask import DiffMaskSettings
from patchlight.trained.diffmask.settings import DiffMaskRecipe
from patchlight.trained.shapley.settings import ShapleyRecipe, ShapleySettings
from tests.helpers import command


def few(**settings: object) -> list[str]:
    settings = {"steps": 2, "batch_size": 2, "log_every": 1, **settings}
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


def test_train_diffmask_then_explain(folder: Path, tmp_path: Path) -> None:
    train = ("diffmask", "train", "--images", str(folder), "--json")
    assert json.loads(command(*train, "--out", f"{tmp_path}/dm", *few()))["step"] == 2
    assert (tmp_path / "dm" / "metrics.csv").read_text().startswith("step,steps,kl,kept")
    words = ("--held-out", str(folder), *few(finish=1))
    assert json.loads(command(*train, "--out", f"{tmp_path}/held", *words))["finish"]["images"] == 2
    explain = ("explain", f"{folder}/cat/0.png", "--explainer", f"{tmp_path}/dm", "--out", f"{tmp_path}/x.png")
    command(*explain, "--method", "diffmask,rawatt")
    assert (tmp_path / "x.png").is_file()
    command(*explain, "--method", "rawatt", code=2, says=("--explainer is for the methods diffmask",))


def test_train_shapley_then_explain(folder: Path, tmp_path: Path) -> None:
    words = ("--images", str(folder), "--out", f"{tmp_path}/sh", "--held-out", str(folder))
    train = ("shapley", "train", *words, *few(surrogate_steps=2, masks=2, rank=1, check=1))
    result = json.loads(command(*train, "--json"))
    assert (result["step"], result["surrogate"]["step"], result["held_out"]["images"]) == (2, 2, 2)
    assert (tmp_path / "sh" / "metrics.csv").read_text().startswith("step,steps,loss,even")
    assert (tmp_path / "sh" / "surrogate" / "metrics.csv").read_text().startswith("step,steps,loss,untrained")
    command(*train, says=("Use it: patchlight explain photo.jpg --model pocket --method vit-shapley",))
    explain = ("explain", f"{folder}/cat/0.png", "--explainer", f"{tmp_path}/sh", "--out", f"{tmp_path}/x.png")
    command(*explain, "--method", "vit-shapley,rawatt")
    assert (tmp_path / "x.png").is_file()


@pytest.mark.parametrize(
    ("kind", "words", "says"),
    [
        ("diffmask", "--images nowhere", "'nowhere' does not exist"),
        ("diffmask", "", "no images were given"),
        ("diffmask", "--recipe nothing.toml", "no recipe at 'nothing.toml'"),
        ("diffmask", "--images FOLDER --set batch_size=64", "fewer than one batch of 64"),
        ("diffmask", "--images FOLDER/cat", "fewer than one batch of 32"),
        ("diffmask", "--images FOLDER --preset papr", "no DiffMask preset"),
        ("diffmask", "--images FOLDER --initial nowhere", "does not hold a DiffMask explainer"),
        ("shapley", "", "no images were given"),
        ("shapley", "--images FOLDER --set rat=1", "no setting 'rat'"),
    ],
)
def test_wrong_requests_are_one_sentence(kind: str, words: str, says: str, folder: Path, tmp_path: Path) -> None:
    options = words.replace("FOLDER", str(folder)).split()
    command(kind, "train", "--out", f"{tmp_path}/out", *options, code=2, says=(says,))


def test_one_class_is_refused(folder: Path, tmp_path: Path) -> None:
    for image in (folder / "dog").iterdir():
        image.unlink()
    words = ("--images", str(folder), "--out", f"{tmp_path}/dm", *few())
    command("diffmask", "train", *words, code=2, says=("all of class",))


def test_recipes_are_valid(tmp_path: Path) -> None:
    cifar, shapley = DiffMaskRecipe.read("diffmask-cifar10"), ShapleyRecipe.read("shapley-cifar10")
    for recipe, kind in ((cifar, DiffMaskSettings), (shapley, ShapleySettings)):
        assert recipe.training(seed=3).seed == 3
        assert recipe.model.name == "pocket"
        beside = recipe.training("paper")
        assert all(getattr(beside, key) == value for key, value in kind.presets["paper"].items()), "a preset wins"
    assert cifar.training("paper", precision="full") == DiffMaskSettings.preset("paper")
    assert cifar.training("default").steps == cifar.training().steps == 3000
    imagenet = DiffMaskRecipe.read("diffmask-imagenet").training()
    assert imagenet.penalty == "count"
    assert (imagenet.alpha, imagenet.gate_rate, imagenet.baseline_rate, imagenet.lambda_rate) == (20, 1e-5, 5e-3, 0.15)
    (tmp_path / "bad.toml").write_text("[modle]\nname = 'x'\n")
    with pytest.raises(PatchlightError, match="line 1: there is no key 'modle'; did you mean 'model'"):
        DiffMaskRecipe.read(tmp_path / "bad.toml")


def test_a_counting_task_that_is_not_passed_exits_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = counting.Exactness("diffmask", 0.5, 0.25, 0.5, False)
    result = [missed], SimpleNamespace(about={"result": {}})
    monkeypatch.setattr(counting, "run", lambda *args: result)
    command("diffmask", "counting", "--out", str(tmp_path), code=3, says=("exact on 50.0% of the grids",))
