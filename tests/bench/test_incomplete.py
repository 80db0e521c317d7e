"""Reports of interrupted runs: every cell states its images, and only shared images are compared."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from patchlight.bench.compare import as_json, compare
from patchlight.bench.compare import as_markdown as compare_markdown
from patchlight.bench.html import as_html
from patchlight.bench.statistics import rank_methods, table_cells
from patchlight.bench.store import Store
from patchlight.bench.tables import as_latex, as_markdown, read_tables
from patchlight.cli import app
from tests.bench.synthetic import synthesise

MISSING = "Incomplete: 20 of 120 values are missing"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods on twelve images; the last method ran on the first two images only."""
    folder = tmp_path_factory.mktemp("incomplete") / "run"
    synthesise(folder, images=12, methods=5, metrics=2, unit=2, undone=5)
    return folder


def test_markdown_starts_with_incomplete_and_shows_n_where_it_differs(interrupted: Path) -> None:
    page = as_markdown(read_tables(interrupted), against="genatt")
    assert MISSING in page.splitlines()[2]
    assert page.index(MISSING) < page.index("| method |")
    table, differences = page.split("difference to genatt")
    short = re.findall(r"n = (\d+)", next(line for line in table.splitlines() if line.startswith("| ixg")))
    assert short == ["2", "2"]
    assert "n = 12" not in page
    assert "n = " not in next(line for line in table.splitlines() if line.startswith("| genatt"))
    short = re.findall(r"n = (\d+)", next(line for line in differences.splitlines() if line.startswith("| ixg")))
    assert short == ["2", "2"]


def test_html_latex_and_the_command_say_incomplete(interrupted: Path, tmp_path: Path) -> None:
    run = read_tables(interrupted)
    page = as_html(run)
    assert page.index(MISSING) < page.index("<table")
    assert page.count("n = 2") >= 2 + 1, "in the cells and in the legend of the curves"
    assert f"% {MISSING}" in as_latex(run)
    for option in (["--csv"], ["--latex"], ["--html", str(tmp_path / "r.html")]):
        assert MISSING in CliRunner().invoke(app, ["bench", "report", str(interrupted), *option]).stderr


def test_the_best_method_is_chosen_on_shared_images(interrupted: Path) -> None:
    """A method that ran on the easy half only has the highest mean, and is the worst on those images."""
    store = Store(interrupted)
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
    changed = replace(results, columns=columns)
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


def test_comparisons_of_runs_say_incomplete(interrupted: Path, tmp_path: Path) -> None:
    synthesise(tmp_path / "complete", images=12, methods=5, metrics=2, unit=2)
    found = compare(tmp_path / "complete", interrupted)
    page = compare_markdown(found)
    assert f"{MISSING} in '{interrupted}'" in page.splitlines()[2]
    assert as_json(found)["incomplete"] == list(found.incomplete) != []
    assert compare(tmp_path / "complete", tmp_path / "complete").incomplete == ()
    printed = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "complete"), str(interrupted), "--csv"])
    assert MISSING in printed.stderr


def test_a_complete_run_shows_no_n(tmp_path: Path) -> None:
    synthesise(tmp_path / "run", images=12, methods=5, metrics=2, unit=2, seed=3)
    page = as_markdown(read_tables(tmp_path / "run"))
    assert "Incomplete" not in page


def test_methods_that_ignore_the_class_are_marked_where_labels_are_explained(interrupted: Path) -> None:
    run = read_tables(interrupted)
    labels = replace(run, recipe=run.recipe.model_copy(update={"target": "label"}))
    for render in (as_markdown, as_latex, as_html):
        assert render(run).count("ignores the class") == 0
        assert render(labels).count("ignores the class") == 1, "rollout alone"
