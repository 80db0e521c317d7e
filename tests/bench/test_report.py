"""Reports: what they say is what the store holds, and equal stores give equal reports."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchlight.bench.html import as_html
from patchlight.bench.local import run
from patchlight.bench.manifest import write_manifest
from patchlight.bench.recipe import override
from patchlight.bench.statistics import method_gaps
from patchlight.bench.store import Store
from patchlight.bench.tables import RunTables, as_csv, as_latex, as_markdown, read_tables
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import bootstrap_weights, percentiles
from patchlight.study.ranking import SAMPLES
from tests.bench.small import recipe, replaced


@pytest.fixture(scope="module")
def out(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    store = Store(Path(shutil.copytree(whole, folder)))
    write_manifest(store.manifest_path, store.manifest().model_copy(update={"recipe": "# the recipe's own <words>"}))
    return folder


@pytest.fixture(scope="module")
def tables(out: Path) -> RunTables:
    return read_tables(out)


def test_csv_has_full_precision_and_timing_last(out: Path, tables: RunTables) -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(tables))))
    assert list(rows[0])[-3:] == ["rank", "explain_seconds", "measure_seconds"]
    assert len(rows) == 8
    columns = Store(out).results().columns
    for row in rows:
        values = columns[row["model"], row["method"], row["metric"]].values
        assert float(row["mean"]) == pytest.approx(float(values.mean()), abs=1e-15)
        assert float(row["low"]) <= float(row["mean"]) <= float(row["high"])
    ins = {row["method"]: row for row in rows if row["metric"] == "Ins"}
    assert ins["GenAtt"]["published"] == "0.5"
    best = max(ins, key=lambda m: float(ins[m]["mean"]))
    assert ins[best]["mark"] == "best"
    deleted = {row["method"]: row for row in rows if row["metric"] == "Del"}
    assert deleted[min(deleted, key=lambda m: float(deleted[m]["mean"]))]["mark"] == "best"
    assert sum(float(row["rank"]) for row in ins.values()) == pytest.approx(1 + 2 + 3 + 4)


def test_markdown_scales_and_marks(tables: RunTables) -> None:
    table = as_markdown(tables)
    assert "| method | Ins ↑ | Del ↓ | s/image |" in table
    assert "Incomplete" not in table
    cell = tables.by_key["Pocket", "GenAtt", "Del"]
    assert f"{100 * cell.mean:.1f}" in next(line for line in table.splitlines() if line.startswith("| GenAtt"))
    assert "(0.500)" in table
    assert table.count("**") == 2 * sum(c.mark == "best" for c in tables.cells)


def test_differences_to_a_method_are_paired(tables: RunTables) -> None:
    """Each is the difference of the two means; the interval is that of the images' differences, resampled."""
    found = method_gaps(tables.results, tables.recipe, "Pocket", "GenAtt")
    columns = tables.results.columns
    weights = bootstrap_weights(6, SAMPLES)
    for (method, metric), gap in found.items():
        own, other = (columns["Pocket", name, metric] for name in (method, "GenAtt"))
        apart = own.values - other.values
        assert gap.difference == pytest.approx(float(apart.mean()), abs=1e-12)
        assert (gap.low, gap.high) == pytest.approx(percentiles(weights @ apart / 6), abs=1e-12)
        better = gap.low > 0 if own.higher_is_better else gap.high < 0
        assert gap.standing == ("" if gap.low <= 0 <= gap.high else "better" if better else "worse")
    assert {method for method, _ in found} == set(tables.recipe.methods) - {"GenAtt"}
    table = as_markdown(tables, "GenAtt")
    assert "| difference to GenAtt | Ins ↑ | Del ↓ |" in table
    assert f"{100 * found['Random', 'Del'].difference:+.1f} [" in table
    assert "difference to" not in as_markdown(tables)
    with pytest.raises(PatchlightError, match="the run has no method 'GenAt'; did you mean 'GenAtt'"):
        as_markdown(tables, "GenAt")


def test_latex_is_escaped(tables: RunTables) -> None:
    table = as_latex(tables)
    assert r"Ins $\uparrow$ & Del $\downarrow$" in table
    assert table.count(r"\textbf{") == sum(c.mark == "best" for c in tables.cells)
    assert table.count(r" \\") == 1 + 4
    cell = tables.by_key["Pocket", "Random", "Del"]
    half = rf"{100 * cell.mean:.1f}%s {{\scriptsize$\pm${50 * (cell.high - cell.low):.1f}}}"
    assert half % {"tied": r"$^\dagger$"}.get(cell.mark, "") in table.replace(r"\textbf{", "").replace("} {", " {")


def test_values_that_do_not_exist_are_counted(tables: RunTables) -> None:
    from dataclasses import replace

    lost = [replace(c, undefined=2, images=4) if c.metric == "Ins" else c for c in tables.cells]
    table = as_markdown(replace(tables, cells=tuple(lost)))
    assert "- Ins: undefined on 2 of 6 images by its protocol." in table
    assert "have no value" not in as_markdown(tables)


def test_html_is_whole_by_itself_and_the_same_for_equal_stores(out: Path, tables: RunTables, tmp_path: Path) -> None:
    page = as_html(tables)
    shutil.copytree(out, tmp_path / "copy")
    assert as_html(read_tables(tmp_path / "copy")) == page
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert "<script" not in page
    assert page.count("<img ") == 6 * (1 + 4)
    assert "the recipe&#39;s own &lt;words&gt;" in page
    assert page.count("<svg ") == 2 + 2 + 1, "two curves, two diagrams of ranks, and the times"
    assert len(page) < 1e6


def test_the_only_method_has_examples_and_newer_metadata_is_left_out(images: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save

    one = recipe(images)
    one = one.model_copy(update={"methods": {"GenAtt": one.methods["GenAtt"]}, "published": {}})
    run(one, tmp_path / "run")
    for path in list((tmp_path / "run" / "maps").iterdir()):
        with safe_open(path, "pt") as file:
            about = file.metadata()
        about["preprocess"] = json.dumps({**json.loads(about["preprocess"]), "sharpen": 1})
        replaced(path, save(load_file(path), {**about, "mood": '"good"'}))
    page = as_html(read_tables(tmp_path / "run"))
    assert page.count("<img ") == 6 * (1 + 1)


def test_photographs_that_are_gone_leave_the_maps(tables: RunTables, tmp_path: Path, out: Path) -> None:
    from dataclasses import replace

    gone = replace(tables, recipe=override(tables.recipe, data=str(tmp_path / "nowhere")))
    page = as_html(gone)
    assert page.count("<img ") == 6 * 4


def test_the_commands_print_and_refuse(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = CliRunner().invoke(app, ["bench", "report", str(out), "--html", str(page)])
    assert done.exit_code == 0
    assert page.stat().st_size > 10_000
    printed = CliRunner().invoke(app, ["bench", "report", str(out), "--format", "csv"])
    assert printed.stdout.startswith("model,method,metric,mean,")
    table = CliRunner().invoke(app, ["bench", "report", str(out)])
    assert ("note: " in printed.stderr, "note: " in table.stderr) == ("- Note: " in table.stdout, False), "told once"
    differences = CliRunner().invoke(app, ["bench", "report", str(out), "--baseline", "GenAtt"]).stdout
    assert "difference to GenAtt" in differences
    for wrong in (
        ["report", str(tmp_path / "none")],
        ["status", str(tmp_path)],
        ["report", str(out), "--format", "text"],
        ["report", str(out), "--format", "csv", "--baseline", "GenAtt"],
        ["report", str(out), "--html", str(page), "--baseline", "GenAtt"],
    ):
        assert CliRunner().invoke(app, ["bench", *wrong]).exit_code == 2
    with pytest.raises(PatchlightError, match="there is no run"):
        read_tables(tmp_path)
