"""The page about the architecture speaks of what is there: rooms, and the functions of its three journeys."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import patchlight as pl

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
JOURNEYS = {
    section.partition("\n")[0]: re.findall(r"^\d+\. .*$", section, re.MULTILINE)
    for section in PAGE.split("\n## ")[1:]
    if section.startswith("One ")
}
NAMES = sorted(set(re.findall(r"`(patchlight\.[\w.]+)`", PAGE)))


def test_there_are_three_journeys_of_at_most_eight_steps() -> None:
    assert [title.split(":")[0] for title in JOURNEYS] == ["One image", "One map", "One recipe"]
    for title, hops in JOURNEYS.items():
        assert 3 <= len(hops) <= 8, title
        assert all("`patchlight." in hop for hop in hops), f"{title}: a step names no function"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_named_exists_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:  # a method of a class
        module, _, kind = module.rpartition(".")
        home = getattr(importlib.import_module(module), kind)
        module = home.__module__
    found = getattr(home, attribute)
    if inspect.isroutine(found) or inspect.isclass(found):
        assert found.__module__ == module, f"{attribute} is at home in {found.__module__}"


def test_every_room_is_on_the_page() -> None:
    home = ROOT / "src" / "patchlight"
    rooms = [p.name for p in home.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()]
    rooms = [name if name.endswith(".py") else f"{name}/" for name in rooms]
    missing = [name for name in rooms if f"`{name}`" not in PAGE]
    assert not missing, f"docs/architecture.md says nothing about {missing}"


def test_every_public_name_is_on_the_page() -> None:
    table = PAGE.partition("\n## Public names\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", table)
    assert sorted(named) == pl.__all__


SOURCES = sorted((ROOT / "src" / "patchlight").rglob("*.py"))
SETTINGS = {"layer_map", "own_passes", "ablates", "register_metric", "register_composition"}
"""Decorators of functions whose parameters are the settings that users give."""


def test_there_are_at_most_five_modules_at_the_top_level() -> None:
    assert len(list((ROOT / "src" / "patchlight").glob("*.py"))) <= 5


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_functions_have_at_most_eight_parameters() -> None:
    """Outside the command line and the public names, whose keywords are for users."""
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in SOURCES
        if "cli" not in file.parts and file.name != "kernels.py"  # a kernel takes numbers alone
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _parameters(node) > 8
        and not _public(node, file)
    ]
    assert not long


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([one for one in every if one.arg not in ("self", "cls")])


def _public(node: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> bool:
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    registers = bool(decorators & SETTINGS) or any(name.endswith("_metric") for name in decorators)
    return registers or node.name in pl.__all__ or node.name in PUBLIC.get(file.name, ())


PUBLIC = {
    "opened.py": {"__init__"},  # pl.Anatomy, which authors of families call
    "log.py": {"__init__"},  # pl.callbacks.TrainingLog
    "base.py": {"draw"},  # patchlight.report.figures.draw
    "train.py": {"train"},  # pl.diffmask.train, pl.shapley.train
    "heat.py": {"overlay"},  # Attribution.overlay
    "testing.py": {"check_metric"},
    "taps.py": {"scaled_dot_product_attention"},  # torch's own signature
}
"""By file, further functions that users call."""
