"""Estimates: forwards are counted, what is slow is cut off and said to be so, and nothing is kept."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from patchlight.bench.estimate import estimate_costs
from patchlight.bench.plan import plan
from patchlight.bench.recipe import parse
from patchlight.cli import app
from patchlight.methods.base import METHODS, Ask, own_passes
from tests.bench.small import recipe, text


def test_forwards_are_those_of_the_pass_and_of_the_metrics(images: Path) -> None:
    passes, drawn = estimate_costs(plan(recipe(images)))
    assert (passes.methods, drawn.methods) == (("GenAtt", "Rollout (max)", "Rollout"), ("Random",))
    # the class, then of each method insertion and deletion at four points; one pass for three of them
    assert drawn.forwards == 1 + 2 * 4
    assert passes.forwards == 1 + 1 + 3 * 2 * 4
    assert passes.total == pytest.approx(6 * passes.seconds)
    assert passes.memory > 2**20
    assert not passes.cut
    assert passes.units >= 2


@pytest.fixture
def slow() -> Iterator[None]:
    @own_passes("test-slow", paper="none", ignores_class=True)
    def slow(ask: Ask) -> Tensor:
        for _ in range(600):
            ask.vit.logits(ask.images)
            time.sleep(0.1)
        return torch.rand(len(ask.images), *ask.vit.grid)

    @own_passes("test-broken", paper="none", ignores_class=True)
    def broken(ask: Ask) -> Tensor:
        raise RuntimeError("it broke")

    yield
    for name in ("test-slow", "test-broken"):
        METHODS.remove(name)


@pytest.mark.usefixtures("slow")
def test_what_takes_too_long_is_cut_off_and_what_fails_is_reported(images: Path) -> None:
    own = text(images).replace('GenAtt = "genatt"', 'GenAtt = "test-slow"').replace('"random"', '"test-broken"')
    slow, _, broken = estimate_costs(plan(parse(own)), limit=1.0)
    assert slow.cut
    assert 0.9 < slow.seconds < 30
    assert broken.failures == ("RuntimeError: it broke",)
    assert not broken.cut


def test_the_command_prints_a_plan_and_an_estimate(images: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text(images))
    shown = CliRunner().invoke(app, ["bench", "plan", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "6 images x 1 model x 4 methods x 2 metrics = 48 values, in 2 groups" in shown.stdout
    result = CliRunner().invoke(app, ["bench", "plan", str(path), "--estimate", "--json"])
    told = json.loads(result.stdout)
    assert (told["values"], told["images"], len(told["groups"])) == (48, 6, 2)
    assert told["hours"] * 3600 == pytest.approx(sum(group["total"] for group in told["groups"]))
    assert told["units"] >= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.toml"], "nothing is run into a folder"
