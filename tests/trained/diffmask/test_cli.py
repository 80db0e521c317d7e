"""`patchlight diffmask` and `--explainer`, with the bundled model on a handful of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import patchlight as pl
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.study import counting
from patchlight.trained.diffmask import DiffMaskSettings
from patchlight.trained.diffmask.settings import DiffMaskRecipe
from tests.helpers import command

FEW = ["--set", "steps=2", "--set", "batch_size=2", "--set", "log_every=1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    return tmp_path / "data"


def call(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.output


def test_train_then_explain(folder: Path, tmp_path: Path) -> None:
    code, told = call("diffmask", "train", "--data", folder, "--out", tmp_path / "dm", *FEW, "--json")
    assert code == 0, told
    assert json.loads(told)["step"] == 2
    assert (tmp_path / "dm" / "metrics.csv").read_text().startswith("step,steps,kl,kept")
    held = ["--held-out", folder, "--set", "finish=1"]
    code, told = call("diffmask", "train", "--data", folder, "--out", tmp_path / "held", *FEW, *held, "--json")
    assert code == 0, told
    assert json.loads(told)["finish"]["images"] == 2
    photo = folder / "cat" / "0.png"
    words = ["--method", "diffmask,rawatt", "--explainer", tmp_path / "dm", "--out", tmp_path / "x.png"]
    code, told = call("explain", photo, *words)
    assert code == 0, told
    assert (tmp_path / "x.png").is_file()
    code, told = call(
        "explain", photo, "--method", "rawatt", "--explainer", tmp_path / "dm", "--out", tmp_path / "y.png"
    )
    assert code == 2
    assert "--explainer is for methods diffmask" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "nowhere"], "'nowhere' does not exist"),
        ([], "no data was given"),
        (["--recipe", "nothing.toml"], "no recipe at 'nothing.toml'"),
        (["--data", "FOLDER", "--set", "gate_rat=1"], "no setting 'gate_rat'"),
        (["--data", "FOLDER", "--set", "batch_size=64"], "fewer than one batch of 64"),
        (["--data", "FOLDER/cat"], "fewer than one batch of 32"),
        (["--data", "FOLDER", "--preset", "papr"], "no DiffMask preset"),
        (["--data", "FOLDER", "--preset", "code"], "no DiffMask preset is called 'code'"),
        (["--data", "FOLDER", "--initial", "nowhere"], "no DiffMask explainer"),
    ],
)
def test_wrong_requests_are_one_sentence(words: list[str], told: str, folder: Path, tmp_path: Path) -> None:
    code, said = call("diffmask", "train", "--out", tmp_path / "dm", *(w.replace("FOLDER", str(folder)) for w in words))
    assert code == 2
    assert told in said
    assert "Traceback" not in said


def test_one_class_is_refused(folder: Path, tmp_path: Path) -> None:
    for image in (folder / "dog").iterdir():
        image.unlink()
    code, told = call("diffmask", "train", "--data", folder, "--out", tmp_path / "dm", *FEW)
    assert code == 2
    assert "all of class" in told


def test_recipes_are_valid(tmp_path: Path) -> None:
    cifar = DiffMaskRecipe.read("diffmask-cifar10")
    assert cifar.training(seed=3).seed == 3
    assert cifar.model.name == "pocket"
    paper = cifar.training("paper", precision="full")
    assert paper == DiffMaskSettings.preset("paper"), "a preset given beside a recipe wins over its settings"
    assert cifar.training("default").steps == cifar.training().steps == 3000
    imagenet = DiffMaskRecipe.read("diffmask-imagenet").training()
    assert imagenet.penalty == "count"
    assert (imagenet.alpha, imagenet.gate_rate, imagenet.baseline_rate, imagenet.lambda_rate) == (20, 1e-5, 5e-3, 0.15)
    (tmp_path / "bad.toml").write_text("[modle]\nname = 'x'\n")
    with pytest.raises(PatchlightError, match="line 1: there is no key 'modle'; did you mean 'model'"):
        DiffMaskRecipe.read(tmp_path / "bad.toml")


def test_the_room_is_reached_by_its_name() -> None:
    assert pl.diffmask.train is not None
    assert pl.diffmask.load is not None


def test_a_counting_task_that_is_not_passed_exits_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = counting.Exactness("diffmask", 0.5, 0.25, 0.5, False)
    result = SimpleNamespace(rows=[missed], explainer=SimpleNamespace(about={"result": {}}))
    monkeypatch.setattr(counting, "run", lambda *args: result)
    command("diffmask", "counting", "--out", str(tmp_path), code=3, says=("exact on 50.0% of the grids",))
