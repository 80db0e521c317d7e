"""Reports of interrupted runs: every cell states its images, and only shared images are compared."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from patchlight.bench.compare import as_json, compare
from patchlight.bench.compare import as_markdown as compare_markdown
from patchlight.bench.html import as_html
from patchlight.bench.results import Results
from patchlight.bench.statistics import rank_methods, table_cells
from patchlight.bench.store import Store
from patchlight.bench.tables import as_csv, as_latex, as_markdown, read_tables
from patchlight.cli import app
from tests.bench.synthetic import synthesise

MISSING = "Incomplete: 20 of 120 values are missing"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods on twelve images; the last method ran on the first two images only."""
    folder = tmp_path_factory.mktemp("incomplete") / "run"
    synthesise(folder, images=12, methods=5, metrics=2, unit=2, undone=5)
    return folder


def test_markdown_starts_with_incomplete_compares_on_shared_images_and_shows_n(interrupted: Path) -> None:
    run = read_tables(interrupted)
    page = as_markdown(run, against="genatt")
    assert MISSING in page.splitlines()[2]
    assert page.index(MISSING) < page.index("| method |")
    shared, rest = page.split("All values so far, on 11 of 12 images")
    table, differences = rest.split("difference to genatt")
    assert "2 of 12 images, those that all methods have" in shared
    column = run.results.columns["Pocket", "genatt", "insertion"]
    assert f"| genatt | {column.values[:2].mean():.3f} |" in shared
    assert "n = " not in shared
    for method, count in (("ixg", "2"), ("genatt", "11")):
        line = next(line for line in table.splitlines() if line.startswith(f"| {method} "))
        assert re.findall(r"n = (\d+)", line) == [count, count]
    short = re.findall(r"n = (\d+)", next(line for line in differences.splitlines() if line.startswith("| ixg")))
    assert short == ["2", "2"]


def test_html_latex_and_the_command_say_incomplete(interrupted: Path, tmp_path: Path) -> None:
    run = read_tables(interrupted)
    page = as_html(run)
    assert page.index(MISSING) < page.index("<table")
    assert page.count("n = 2") >= 2 + 1, "in the cells and in the legend of the curves"
    assert page.index("those that all methods have") < page.index("All values so far")
    assert f"% {MISSING}" in as_latex(run)
    for option in (["--format", "csv"], ["--format", "latex"], ["--html", str(tmp_path / "r.html")]):
        assert MISSING in CliRunner().invoke(app, ["bench", "report", str(interrupted), *option]).stderr


def uneven_results(folder: Path) -> Results:
    """A method that ran on the easy images only has the highest mean, and is the worst on those images."""
    store = Store(folder)
    results, recipe = store.results(), store.manifest().resolved
    easy = torch.tensor([1.0] * 8 + [0.0] * 4, dtype=torch.float64)
    noise = 0.001 * torch.arange(12, dtype=torch.float64)
    columns = {}
    for (model, method, metric), column in results.columns.items():
        place = list(recipe.methods).index(method)
        values = easy + noise - 0.05 * place
        if method == "ixg":
            values[8:] = torch.nan
        columns[model, method, metric] = replace(column, values=values)
    return replace(results, columns=columns)


def test_the_best_method_is_chosen_on_shared_images(interrupted: Path) -> None:
    changed, recipe = uneven_results(interrupted), Store(interrupted).manifest().resolved
    cell = {(c.method, c.metric): c for c in table_cells(changed, recipe)}
    assert cell["ixg", "insertion"].mean > cell["genatt", "insertion"].mean
    assert {method: cell[method, "insertion"].mark for method in recipe.methods} == {
        **dict.fromkeys(recipe.methods, ""),
        "genatt": "best",
    }
    found = rank_methods(changed, recipe, "Pocket", "insertion")
    assert found is not None
    assert found.images == 8
    assert found.means["ixg"] == 5.0


def test_marks_stand_beside_means_of_the_same_images(interrupted: Path) -> None:
    """The marks are in the table of the shared images, and no mean of other images has one."""
    run = read_tables(interrupted)
    run = replace(run, results=uneven_results(interrupted))
    run = replace(run, cells=tuple(table_cells(run.results, run.recipe)))
    shared, rest = as_markdown(run).split("All values so far")
    table = rest.split("| mean rank |")[0]
    assert "8 of 12 images, those that all methods have" in shared
    assert "| genatt | **1.003** [" in shared
    assert "| genatt | 0.672 [" in table
    assert "†" not in table
    assert "**" not in table
    line = next(csv.DictReader(io.StringIO(as_csv(run))))
    assert (line["method"], line["images"], line["shared_images"], line["mark"]) == ("genatt", "12", "8", "best")
    assert float(line["shared_mean"]) == pytest.approx(1.0035)


def test_comparisons_of_runs_say_incomplete(interrupted: Path, tmp_path: Path) -> None:
    synthesise(tmp_path / "complete", images=12, methods=5, metrics=2, unit=2)
    found = compare(tmp_path / "complete", interrupted)
    page = compare_markdown(found)
    assert f"{MISSING} in '{interrupted}'" in page.splitlines()[2]
    assert as_json(found)["incomplete"] == list(found.incomplete) != []
    assert compare(tmp_path / "complete", tmp_path / "complete").incomplete == ()
    printed = CliRunner().invoke(
        app, ["bench", "compare", str(tmp_path / "complete"), str(interrupted), "--format", "csv"]
    )
    assert MISSING in printed.stderr


def test_status_says_incomplete(interrupted: Path) -> None:
    assert "100 of 120 values done, incomplete" in CliRunner().invoke(app, ["bench", "status", str(interrupted)]).stdout
    printed = CliRunner().invoke(app, ["bench", "status", str(interrupted), "--json"]).stdout
    assert json.loads(printed)["incomplete"] is True


def test_methods_that_ignore_the_class_are_marked_where_labels_are_explained(interrupted: Path) -> None:
    run = read_tables(interrupted)
    labels = replace(run, recipe=run.recipe.model_copy(update={"target": "label"}))
    for render in (as_markdown, as_latex, as_html):
        assert render(run).count("ignores the class") == 0
        assert render(labels).count("ignores the class") == 2, "rollout alone, in both tables"
