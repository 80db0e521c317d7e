"""The page about the architecture speaks of what is there: rooms, and the functions of its three journeys."""

from __future__ import annotations

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


def test_there_are_three_journeys_of_at_most_ten_hops() -> None:
    assert [title.split(":")[0] for title in JOURNEYS] == ["One image", "One map", "One recipe"]
    for title, hops in JOURNEYS.items():
        assert 3 <= len(hops) <= 10, title
        assert all("`patchlight." in hop for hop in hops), f"{title}: a hop names no function"


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
    missing = [name for name in rooms if f"`{name}`" not in PAGE and name != "testing.py"]
    assert not missing, f"docs/architecture.md says nothing about {missing}"


def test_every_public_name_is_on_the_page() -> None:
    table = PAGE.partition("\n## Public names\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)`", table)
    assert sorted(named) == pl.__all__
