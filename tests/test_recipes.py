"""Bundled recipes: they lie in the package, and a name finds them where a path does not."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

from patchlight.bench.recipe import read_recipe
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.core.recipes import KINDS, bundled_recipes, find_recipe, read_text

from .bench.small import text

ROOT = Path(__file__).parents[1]


def told(given: str | Path, kind: str = "bench") -> str:
    with pytest.raises(PatchlightError) as error:
        find_recipe(given, kind)
    return str(error.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_recipes_are_files_of_the_package() -> None:
    names = {kind: list(bundled_recipes(kind)) for kind in KINDS}
    assert {"tis-table-1", "tis-table-4", "vit-shapley", "posterior"} <= set(names["bench"])
    assert names["diffmask"] == ["diffmask-cifar10", "diffmask-imagenet"]
    assert names["shapley"] == ["shapley-cifar10"]


def test_other_files_are_no_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes" / "bench"
    folder.mkdir(parents=True)
    for name in (".DS_Store", "one.toml", "one.toml.orig"):
        (folder / name).touch()
    monkeypatch.setattr(resources, "files", lambda name: tmp_path)
    assert list(bundled_recipes()) == ["one"]


def test_recipes_are_in_the_wheel(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    inside = {
        name for name in ZipFile(wheel).namelist() if name.startswith("patchlight/recipes/") and name.endswith(".toml")
    }
    assert inside == {
        f"patchlight/recipes/{kind}/{name}.toml" for kind in (*KINDS, "figures") for name in bundled_recipes(kind)
    }


def test_a_name_is_a_bundled_recipe_and_a_path_a_file(here: Path) -> None:
    file = here / "tis-table-1.toml"
    file.write_text(text(here), encoding="utf-8")
    (here / "tis-table-1").write_text("nothing", encoding="utf-8")
    assert read_recipe("tis-table-1")[0].name == "tis-table-1"
    for given in ("tis-table-1.toml", "./tis-table-1.toml", file, Path("tis-table-1.toml")):
        assert read_recipe(given)[0].name == "small"
    assert read_text("./tis-table-1") == "nothing"
    assert read_text(Path("tis-table-1")) == "nothing"


def test_an_unknown_recipe_is_reported_with_the_nearest(here: Path) -> None:
    assert told("tis-table1").startswith("no bundled recipe is called 'tis-table1'; did you mean 'tis-table-1'")
    assert told("recipes/tis-table-1.toml").startswith("no recipe at 'recipes/tis-table-1.toml'; did you mean 'tis-ta")
    assert told("TIS-Table-9.toml").startswith("no recipe at 'TIS-Table-9.toml'; did you mean 'tis-table-")
    (here / "mine.toml").write_text("", encoding="utf-8")
    assert told("mine") == "no bundled recipe is called 'mine'; did you mean 'mine.toml'?"
    with pytest.raises(PatchlightError, match="cannot be read as a recipe"):
        read_text(here)


def test_a_recipe_of_another_command_is_reported() -> None:
    said = (
        "no bundled recipe is called 'shapley-cifar10' for `patchlight bench`; that is a recipe of `patchlight shapley`"
    )
    assert told("shapley-cifar10") == said
    assert "that is a recipe of `patchlight bench`" in told("tis-table-1", "diffmask")


def test_bench_list() -> None:
    done = CliRunner().invoke(app, ["bench", "list"])
    assert done.exit_code == 0
    assert all(name in done.stdout for name in bundled_recipes())
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["bench", "list", "--json"]).stdout)}
    assert list(rows) == list(bundled_recipes())
    recipe, written = read_recipe("tis-table-3")
    assert CliRunner().invoke(app, ["bench", "list", "tis-table-3"]).stdout == written
    assert json.loads(CliRunner().invoke(app, ["bench", "list", "tis-table-3", "--json"]).stdout)["name"] == recipe.name
    assert CliRunner().invoke(app, ["bench", "list", "tis-tabel"]).exit_code == 2
    assert rows["tis-table-3"] == {
        "name": "tis-table-3",
        "paper": recipe.paper,
        "measures": ["pointing-game", "sparseness"],
        "models": {label: model.name for label, model in recipe.models.items()},
        "data": "imagenet",
        "methods": len(recipe.methods),
        "metrics": 2,
    }


def test_commands_take_a_bundled_recipe_by_name(tmp_path: Path) -> None:
    run = ["bench", "run", "tis-table-1", "--out", str(tmp_path / "run"), "--images", str(tmp_path / "absent")]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 2
    assert "absent' does not exist; give the folder of ImageNet" in done.output
    for command in ("diffmask", "shapley"):
        train = [command, "train", "--recipe", f"{command}-cifar10", "--images", str(tmp_path / "absent")]
        done = CliRunner().invoke(app, [*train, "--out", str(tmp_path / command)])
        assert done.exit_code == 2
        assert "absent' does not exist; give the folder of CIFAR-10" in done.output
