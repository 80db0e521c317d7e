"""Extras: the package's metadata and the table in the code say the same, and a missing one is one kind of sentence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from patchlight.core.extras import EXTRAS, missing_extra, missing_extras

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
IMPORTED = {"scikit-image": "skimage", "open_clip_torch": "open_clip"}


def packages(extra: str) -> set[str]:
    names = (re.split(r"[<>=!\[; ]", requirement, maxsplit=1)[0] for requirement in OPTIONAL[extra])
    return {IMPORTED.get(name, name) for name in names}


def test_the_table_is_that_of_the_package_metadata() -> None:
    assert set(EXTRAS) == set(OPTIONAL) - {"all"}
    for name, extra in EXTRAS.items():
        assert set(extra.modules) == packages(name), name


def test_all_is_all_of_them() -> None:
    (everything,) = OPTIONAL["all"]
    inside = re.fullmatch(r"patchlight\[(.+)\]", everything)
    assert inside is not None
    assert set(inside[1].split(",")) == set(EXTRAS)


def test_every_range_has_a_lower_end() -> None:
    required = [*PROJECT["dependencies"], *(one for name in EXTRAS for one in OPTIONAL[name])]
    assert all(">=" in requirement for requirement in required)


def test_a_missing_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchlight.core.extras.find_spec", lambda name: None if name == "uvicorn" else name)
    assert [(extra.name, absent) for extra, absent in missing_extras()] == [("web", ["uvicorn"])]
    told = str(missing_extra("superpixels need", "scikit-image", "lime", "use unit='patch'"))
    assert told == "superpixels need scikit-image: pip install 'patchlight[lime]', or use unit='patch'"
    with pytest.raises(KeyError):
        missing_extra("this needs", "nothing", "nowhere")


def test_there_is_one_place_that_says_it() -> None:
    """What to install is said by `missing_extra`, and by what names an extra that there is."""
    for file in (ROOT / "src").rglob("*.py"):
        for name in re.findall(r"pip install '?patchlight\[(\w+)\]", file.read_text(encoding="utf-8")):
            assert name in EXTRAS or name in ("all", "NAME"), file


def test_the_page_about_installing_has_the_same_table() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert told.pop("all")
    assert told == {name: extra.purpose for name, extra in EXTRAS.items()}
