"""Docstrings of the public names: every parameter has its line, and examples run."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import patchlight as pl
from patchlight.zoo.pocket import PHOTOS

SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)", re.MULTILINE)


def public() -> dict[str, Any]:
    """The public functions and classes, without exceptions."""
    names = {name: getattr(pl, name) for name in pl.__all__}
    things = {name: thing for name, thing in names.items() if inspect.isfunction(thing) or inspect.isclass(thing)}
    return {n: t for n, t in things.items() if not (inspect.isclass(t) and issubclass(t, BaseException))}


def parameters(thing: Any) -> list[str]:
    if inspect.isclass(thing):
        return [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    return list(inspect.signature(thing).parameters)


@pytest.mark.parametrize("name", sorted(public()))
def test_every_parameter_has_its_line(name: str) -> None:
    section = SECTION.search(inspect.getdoc(public()[name]) or "")
    lines = re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE) if section else []
    missing = [each for each in parameters(public()[name]) if each not in lines and not each.startswith("_")]
    assert not missing, f"{name} has no line under `Args:` for {missing}"


def modules() -> list[str]:
    rooms = ["core", "study", "data"]
    walked = (pkgutil.walk_packages([f"{pl.__path__[0]}/{room}"], f"patchlight.{room}.") for room in rooms)
    return sorted(module.name for each in walked for module in each)


@pytest.mark.parametrize("name", modules())
def test_examples_of_modules_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples of public names use: a model, its maps, and the files that they name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("DISPLAY", raising=False)
    (tmp_path / "photos").mkdir()
    for photo in ("cat", "dog"):
        shutil.copy(PHOTOS / f"{photo}.jpg", tmp_path / "photos")
    shutil.copy(PHOTOS / "cat.jpg", tmp_path)
    Path("my_method.py").write_text("")
    Path("labels.csv").write_text("cat,cat\ndog,dog\n")
    from matplotlib import pyplot

    vit, photos = pl.load("pocket"), ["photos/cat.jpg", "photos/dog.jpg"]
    maps = pl.explain(vit, photos, ["genatt", "rollout"])
    values = {"vit": vit, "photos": photos, "images": photos, "maps": maps}
    return values | {"pl": pl, "plt": pyplot, "att": maps["genatt"], "other": maps["rollout"]}


@pytest.mark.parametrize(
    "name", ["explain", "evaluate", "compare", "open_data", "load_plugin", "figure", "Attribution", "Attributions"]
)
def test_examples_of_public_names_run(name: str, places: dict[str, Any]) -> None:
    """Those that need a model are skipped by doctest itself; here they have one."""
    for test in doctest.DocTestFinder(exclude_empty=True).find(public()[name], name):
        for example in test.examples:
            exec(example.source, places)
