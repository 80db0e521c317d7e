"""Comparing runs: what differs is told first, and differences are those of the images both have."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchlight.bench.compare import as_csv, as_markdown, compare
from patchlight.bench.store import Store
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from tests.bench.conftest import Shared
from tests.bench.test_merge import changed_rows, copied, values


def test_a_run_and_its_copy_are_equal(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.whole, tmp_path / "copy")
    found = compare(shared.whole, tmp_path / "copy")
    assert found.differences == ()
    assert len(found.cells) == 4
    for one in found.cells:
        assert (one.gap.difference, one.gap.images, one.equal, one.gap.standing) == (0.0, 6, 6, "")
    assert "are the same" in as_markdown(found)


def test_differences_are_paired_on_the_images_of_both(shared: Shared, tmp_path: Path) -> None:
    """Every value changes; the means, differences and intervals are those a loop gives."""
    shutil.copytree(shared.whole, tmp_path / "other")
    draw = random.Random(0)
    changed_rows(tmp_path / "other", "value", lambda value: value + 0.1 + 0.05 * draw.random())
    names = Store(shared.whole).manifest().images
    found = compare(shared.whole, tmp_path / "other")
    a, b = values(shared.whole), values(tmp_path / "other")
    for one in found.cells:
        key = one.model, one.method, one.metric
        pairs = [(a[*key, name][1], b[*key, name][1]) for name in names.names]
        gaps = [y - x for x, y in pairs]
        assert one.gap.first == pytest.approx(sum(x for x, _ in pairs) / 6, rel=1e-12)
        assert one.gap.second == pytest.approx(sum(y for _, y in pairs) / 6, rel=1e-12)
        assert one.gap.difference == pytest.approx(sum(gaps) / 6, rel=1e-9)
        means = sorted(sum(draw.choices(gaps, k=6)) / 6 for _ in range(4000))
        assert one.gap.low == pytest.approx(means[100], abs=0.1 * (max(gaps) - min(gaps)))
        assert one.gap.high == pytest.approx(means[-100], abs=0.1 * (max(gaps) - min(gaps)))
        assert 0.1 <= min(gaps) <= one.gap.low < one.gap.difference < one.gap.high <= max(gaps)
        assert one.gap.standing == ("better" if one.metric == "Ins" else "worse")
    assert "▲" in as_markdown(found)
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [float(row["difference"]) for row in rows] == [one.gap.difference for one in found.cells]


def test_images_that_only_one_has_or_that_changed_do_not_count(shared: Shared, tmp_path: Path) -> None:
    images = Store(shared.whole).manifest().images
    contents = ("other", *images.contents[1:])
    other = copied(shared.whole, tmp_path / "other", images=replace(images, contents=contents))
    found = compare(shared.whole, other)
    assert found.images == 5
    assert all(math.isnan(one.gap.low) and one.gap.images == 5 and not one.gap.standing for one in found.cells)
    assert "different contents of 1 image" in found.differences[0].text
    other = copied(shared.whole, tmp_path / "none", images=replace(images, contents=("x",) * 6))
    with pytest.raises(PatchlightError, match="no image in common"):
        compare(shared.whole, other)


def test_what_differs_comes_first(shared: Shared, tmp_path: Path) -> None:
    versions = {**Store(shared.method).manifest().versions, "torch": "1.0"}
    other = copied(shared.method, tmp_path / "other", models={"Pocket": "0" * 16}, code="1" * 16, versions=versions)
    found = compare(shared.whole, other)
    told = [one.text for one in found.differences]
    assert any("the code of Patchlight" in line for line in told)
    assert any(line.startswith("torch: ") for line in told)
    assert any("methods that only" in line and "'Random'" in line for line in told)
    assert {(one.method, one.note) for one in found.cells} == {("GenAtt", "other model")}
    page = as_markdown(found)
    assert page.index("the code of Patchlight") < page.index("| method |")
    assert [one.incompatible for one in found.differences] == sorted(
        (one.incompatible for one in found.differences), reverse=True
    )


def test_micro_averages_are_resampled_as_such() -> None:
    """A ratio of sums is not the mean of ratios."""
    import torch

    from patchlight.bench.statistics import paired_gaps
    from patchlight.core.statistics import Resamples
    from patchlight.metrics.base import Evaluation

    def made(hits: list[float]) -> Evaluation:
        parts = {"hit": torch.tensor(hits), "all": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])}
        ratio = parts["hit"] / parts["all"]
        return Evaluation("m", ratio.double(), True, (0, 1), parts=parts, combine=lambda s: s["hit"] / s["all"])

    gap = paired_gaps({"": (made([0, 1, 1, 1, 1, 1]), made([1, 1, 1, 1, 1, 4]))}, Resamples(6, 3))[""]
    assert (gap.first, gap.second) == (pytest.approx(5 / 21), pytest.approx(9 / 21))


def test_the_command_prints_each_form(shared: Shared) -> None:
    words = ["bench", "compare", str(shared.first), str(shared.whole)]
    answer = CliRunner().invoke(app, [*words, "--json"])
    told = json.loads(answer.stdout)
    assert told["images"] == 6
    assert {row["metric"] for row in told["compared"]} == {"Ins", "Del"}
    assert "| method | metric |" in CliRunner().invoke(app, words).stdout
    assert CliRunner().invoke(app, [*words, "--format", "csv"]).stdout.startswith("model,method,metric,first")
    assert CliRunner().invoke(app, [*words, "--format", "csv", "--json"]).exit_code == 2
