"""The method of CONTRIBUTING.md, added as written there, is a method like any other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import patchlight as pl
from patchlight.methods.base import METHODS
from patchlight.testing import check_method, contract_names
from tests.families import images, shared

NAME = "positive-gradient"


@pytest.fixture
def added() -> Iterator[str]:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 15
    exec(compile(code[1].replace("from __future__", "#"), "CONTRIBUTING.md", "exec"), {"__name__": "example"})
    yield NAME
    METHODS.remove(NAME)


def test_a_method_added_in_one_place_appears_everywhere(added: str) -> None:
    assert added in [m.name for m in pl.list_methods()]
    assert added in contract_names()
    listing = CliRunner().invoke(__import__("patchlight.cli", fromlist=["app"]).app, ["methods", "--json"])
    assert added in [m["name"] for m in json.loads(listing.stdout)]
    vit = shared("vit", torch.float64)
    check_method(added, vit, images(vit, 2))
    with pl.trace(vit, images(vit)) as t:
        literal = (t.attention[-1] * t.attention_gradients[-1].relu()).mean(1)[:, 0]
    torch.testing.assert_close(pl.explain(vit, images(vit), added).scores, vit.patches(literal).float())
    maps = pl.explain(vit, images(vit), [f"{added}.plus.libra", f"{added}.rollout"])
    assert all(bool(torch.isfinite(m.scores).all()) for m in maps.values())
    assert pl.explain(vit, images(vit), added, power=2).settings["power"] == 2
