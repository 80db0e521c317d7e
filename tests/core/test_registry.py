"""Registries: names, aliases, typed settings, presets, and their errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field

from patchlight.core.errors import PatchlightError
from patchlight.core.registry import (
    Entry,
    Registry,
    Setting,
    describe_type,
    filter_settings,
    resolve_all,
    resolve_settings,
    settings_of,
)

Steps = Annotated[int, Field(ge=1, le=9)]


def bake(
    dough: object, steps: Steps = 3, fill: Literal["plum", "nut"] | float | None = "plum", hot: bool = False
) -> str:
    """A cake: so many steps.

    Second paragraph.
    """
    return "cake"


CAKE = Entry(
    "cake", bake, paper="a cookbook", aliases=("gateau", "torte"), presets={"sunday": {"steps": 7, "hot": True}}
)


@pytest.fixture
def cakes() -> Registry[Entry]:
    made: Registry[Entry] = Registry("cake")
    for entry in (Entry("pie", bake), CAKE):
        made.add(entry)
    return made


def test_names_and_aliases_lead_to_one_entry(cakes: Registry[Entry]) -> None:
    assert cakes.find("cake") is cakes.find("gateau") is cakes.find("torte") is cakes["cake"] is CAKE
    assert list(cakes) == ["cake", "pie"]
    assert len(cakes) == 2
    assert "cake" in cakes
    assert "gateau" not in cakes, "a mapping of names; aliases are found"
    assert dict(cakes)["pie"].aliases == ()


@pytest.mark.parametrize("name", ["cake", "torte"])
def test_a_name_is_taken_once(cakes: Registry[Entry], name: str) -> None:
    for entry in (Entry(name, bake), Entry("new", bake, aliases=("fine", name))):
        with pytest.raises(PatchlightError, match=f"a cake called '{name}' is already registered"):
            cakes.add(entry)
    assert list(cakes) == ["cake", "pie"]
    with pytest.raises(PatchlightError, match="no cake is called 'fine'"):
        cakes.find("fine")


def test_a_cell_that_is_run_twice_replaces_what_it_registered(cakes: Registry[Entry]) -> None:
    cell = "def mine(dough):\n    pass\nregister('mine', mine, aliases=aliases)"
    names: dict[str, Any] = {"__name__": "__main__", "register": lambda *told, **more: cakes.add(Entry(*told, **more))}
    exec(cell, {**names, "aliases": ("ours",)})
    first = cakes.find("ours")
    exec(cell, {**names, "aliases": ("yours",)})
    assert cakes.find("yours") is cakes["mine"] is not first
    with pytest.raises(PatchlightError, match="no cake is called 'ours'"):
        cakes.find("ours")
    with pytest.raises(PatchlightError, match="a cake called 'mine' is already registered"):
        exec(cell, {**names, "__name__": "elsewhere", "aliases": ()})


def test_a_wrong_name_is_reported_with_the_nearest(cakes: Registry[Entry]) -> None:
    with pytest.raises(PatchlightError, match="no cake is called 'gatau'; did you mean 'gateau'"):
        cakes.find("gatau")
    with pytest.raises(KeyError):
        cakes["gateau"]


@pytest.mark.parametrize("name", ["cake", "torte"])
def test_what_is_removed_leaves_its_names_free(cakes: Registry[Entry], name: str) -> None:
    cakes.remove(name)
    assert list(cakes) == ["pie"]
    for gone in ("cake", "gateau", "torte"):
        with pytest.raises(PatchlightError, match=f"no cake is called '{gone}'"):
            cakes.find(gone)
    assert cakes.add(CAKE) is CAKE
    with pytest.raises(PatchlightError, match="no cake is called 'bread'"):
        cakes.remove("bread")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Registry[Entry]]]:
    """A module that registers a bundled entry when it is imported."""
    made: Registry[Entry] = Registry("cake", ["a_room_of_cakes"])
    (tmp_path / "a_room_of_cakes.py").write_text(
        "from tests.core.test_registry import CAKE, REGISTRIES\nREGISTRIES[0].add(CAKE)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    REGISTRIES[:] = [made]
    yield "a_room_of_cakes", made
    sys.modules.pop("a_room_of_cakes", None)


REGISTRIES: list[Registry[Entry]] = []


@pytest.mark.parametrize(
    "use",
    [
        lambda cakes: cakes.find("cake"),
        lambda cakes: cakes.find("torte"),
        lambda cakes: cakes["cake"],
        lambda cakes: list(cakes),
        len,
        lambda cakes: "cake" in cakes,
        lambda cakes: cakes.remove("gateau"),
    ],
)
def test_rooms_are_opened_when_a_name_is_first_asked_for(use: Any, room: tuple[str, Registry[Entry]]) -> None:
    name, cakes = room
    assert name not in sys.modules
    use(cakes)
    assert name in sys.modules


def test_settings_are_the_typed_arguments_behind_the_first() -> None:
    assert list(settings_of(bake)) == ["steps", "fill", "hot"]
    assert settings_of(bake)["steps"] == Setting("steps", Steps, 3)
    assert {name: str(setting) for name, setting in settings_of(bake).items()} == {
        "steps": "int >= 1 and <= 9 = 3",
        "fill": "'plum' | 'nut' or float or None = 'plum'",
        "hot": "bool = False",
    }
    assert filter_settings(bake, {"steps": 1, "colour": "red"}) == {"steps": 1}
    assert CAKE.summary == "A cake: so many steps."


def test_values_are_defaults_then_a_preset_then_what_is_given() -> None:
    known = settings_of(bake)
    assert resolve_settings("cake", known, {}, {}) == {"steps": 3, "fill": "plum", "hot": False}
    assert resolve_settings("cake", known, CAKE.preset("sunday"), {}) == {"steps": 7, "fill": "plum", "hot": True}
    assert resolve_settings("cake", known, CAKE.preset("sunday"), {"steps": "4", "fill": 2}) == {
        "steps": 4,
        "fill": 2.0,
        "hot": True,
    }
    assert CAKE.preset(None) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stepps": 1}, "'cake' has no setting 'stepps'; did you mean 'steps'"),
        ({"sead": 1}, "'cake' has no setting 'sead'; did you mean 'seed'"),
        ({"steps": 0}, "setting steps=0 of 'cake' is not valid: Input should be greater than or equal to 1"),
        ({"steps": "many"}, "setting steps='many' of 'cake' is not valid"),
        (
            {"steps": torch.zeros(3, 3)},
            r"setting steps=tensor\(\[\[0., 0., 0.\], \[0., 0., 0.\], \[0., 0., 0.\]\]\) of",
        ),
        ({"fill": "jam"}, "setting fill='jam' of 'cake' is not valid: give 'plum' | 'nut' or float or None"),
        ({"n_masks": 2}, "'cake' has no setting 'n_masks'; its settings: steps, fill, hot$"),
    ],
)
def test_wrong_settings_are_reported(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PatchlightError, match=words):
        resolve_settings("cake", settings_of(bake), {}, given, also=["seed"])


def test_wrong_presets_are_reported() -> None:
    with pytest.raises(PatchlightError, match="'cake' has no preset 'sundy'; did you mean 'sunday'"):
        CAKE.preset("sundy")
    with pytest.raises(PatchlightError, match="'pie' has no preset 'sunday'; it has none"):
        Entry("pie", bake).preset("sunday")


def test_what_is_asked_is_a_name_a_list_or_a_dict() -> None:
    def pairs(asked: Any, **settings: Any) -> list[tuple[str, dict[str, Any]]]:
        return resolve_all(asked, settings, tuple, "cake", lambda label, own: (label, dict(own)))

    assert pairs("cake", hot=True) == [("cake", {"hot": True})]
    assert pairs(["cake", "pie", "cake"], hot=True) == [("cake", {"hot": True}), ("pie", {"hot": True})]
    assert pairs({"mine": {"steps": 2}, "pie": {"hot": False}}, hot=True) == [
        ("mine", {"hot": True, "steps": 2}),
        ("pie", {"hot": False}),
    ]
    assert pairs({"mine": "pie", "cake": {}}, hot=True) == [
        ("mine", {"hot": True, "cake": "pie"}),
        ("cake", {"hot": True}),
    ]
    resolved = [("mine", {"steps": 2})]
    assert pairs(resolved, hot=True) == resolved, "what is resolved stays"
    for nothing in ([], {}, ()):
        with pytest.raises(PatchlightError, match="no cake was named; give a name, a list of names, or a dict"):
            pairs(nothing)
    for wrong in (3, [1, 2], {"cake": 3}, {"cake": {}, "pie": None}):
        with pytest.raises(PatchlightError, match="is not a cake; give a name"):
            pairs(wrong)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "int"),
        (None.__class__, "None"),
        (Literal["a", 2], "'a' | 2"),
        (int | None, "int or None"),
        (list[float], "list of float"),
        (tuple[float, ...], "list of float"),
        (int | tuple[Annotated[int, Field(ge=1)], str], "int or (int >= 1, str)"),
        (Annotated[float, Field(gt=0)], "float > 0"),
        (Annotated[float, Field(gt=0, lt=1)] | None, "float > 0 and < 1 or None"),
    ],
)
def test_types_in_words(kind: Any, words: str) -> None:
    assert describe_type(kind) == words
