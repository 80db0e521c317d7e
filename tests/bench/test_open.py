"""Opening runs: tables of pyarrow and pandas, maps, notes, and a line of CSV for each value."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import patchlight as pl
from patchlight.bench.opened import PER_IMAGE, Opened
from patchlight.bench.rows import SCHEMA
from patchlight.bench.share import export
from patchlight.bench.store import Store
from patchlight.cli import app
from tests.bench.conftest import Shared
from tests.bench.test_merge import changed_rows, values


def test_a_run_and_its_export_open_alike(shared: Shared, tmp_path: Path) -> None:
    export(shared.whole, tmp_path / "public")
    names = Store(shared.whole).manifest().images.names
    for folder in (shared.whole, tmp_path / "public"):
        run = pl.bench.open(folder)
        table = run.table()
        assert table.schema.names == SCHEMA.names
        found = {(r["model"], r["method"], r["metric"], r["image"]): (r["cell"], r["value"]) for r in table.to_pylist()}
        assert found == values(shared.whole)
        frame = run.frame(["method", "value"])
        assert list(frame.columns) == ["method", "value"]
        assert frame["value"].mean() == pytest.approx(sum(v for _, v in found.values()) / 24)
        maps = run.maps("Pocket", "GenAtt")
        assert maps.images == names == run.images
        assert torch.equal(maps.scores, Store(shared.whole).maps("Pocket", names).scores["GenAtt"])
        assert len(maps) == len(maps.classes) == 6
        assert list(run.recipe.methods) == ["GenAtt", "Random"]
        assert run.notes == ()
        assert run.versions["patchlight"] == pl.__version__


def test_repr_reads_no_rows(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pl.bench.open(shared.whole)
    monkeypatch.setattr(Store, "files", lambda *_: pytest.fail("files were read"))
    assert "run of 'shared': 1 model, 2 methods, 2 metrics on 6 images" in repr(run)


def test_what_is_missing_is_reported(shared: Shared, tmp_path: Path) -> None:
    assert "Incomplete: 12 of 24 values are missing" in pl.bench.open(shared.first).notes[0]
    shutil.copytree(shared.whole, tmp_path / "damaged")
    path = sorted((tmp_path / "damaged" / "maps").glob("*"))[0]
    path.write_bytes(b"")
    assert f"'maps/{path.name}' is damaged" in pl.bench.open(tmp_path / "damaged").notes[0]
    with pytest.raises(pl.PatchlightError, match="no run in"):
        pl.bench.open(tmp_path / "nothing")
    run = pl.bench.open(shared.whole)
    with pytest.raises(pl.PatchlightError, match=r"no method 'GenAt'.*'GenAtt'"):
        run.maps("Pocket", "GenAt")
    with pytest.raises(pl.PatchlightError, match="no column 'valu'"):
        run.table(["valu"])


def test_without_pandas_it_says_so(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = pl.bench.open(shared.whole)
    assert len(run.table(["value"])) == 24
    with pytest.raises(pl.PatchlightError, match=r"pip install 'patchlight\[pandas\]'"):
        run.frame()


def test_per_image_is_csv_of_every_value_in_order(shared: Shared) -> None:
    answer = CliRunner().invoke(app, ["bench", "report", str(shared.whole), "--format", "per-image"])
    assert answer.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(answer.stdout)))
    assert tuple(rows[0]) == PER_IMAGE
    known = values(shared.whole)
    assert {(r["model"], r["method"], r["metric"], r["image"]): float(r["value"]) for r in rows} == {
        key: value for key, (_, value) in known.items()
    }
    assert [r["image"] for r in rows if r["method"] == "GenAtt" and r["metric"] == "Ins"] == sorted(
        {key[3] for key in known}
    )
    assert all(float(r["explain_seconds"]) > 0 and r["shared_by"] == "1" for r in rows)


def test_per_image_has_no_formula_and_empty_cells(shared: Shared, tmp_path: Path) -> None:
    shutil.copytree(shared.whole, tmp_path / "run")
    changed_rows(tmp_path / "run", "note", lambda _: "=1+1")
    changed_rows(tmp_path / "run", "error", lambda _: None)
    changed_rows(tmp_path / "run", "value", lambda _: None)
    answer = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "run"), "--format", "per-image"])
    rows = list(csv.DictReader(io.StringIO(answer.stdout)))
    assert {(r["note"], r["error"], r["value"]) for r in rows} == {("'=1+1", "", "")}
    answer = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "run"), "--format", "per-images"])
    assert "no format is called 'per-images'" in answer.stderr
    answer = CliRunner().invoke(
        app, ["bench", "report", str(tmp_path / "run"), "--format", "per-image", "--html", "x.html"]
    )
    assert "cannot be combined with --html" in answer.stderr


def test_units_are_read_one_at_a_time(shared: Shared) -> None:
    """What is printed for each value needs no more memory than a unit."""
    run = Opened(shared.first)
    tables = run.tables(["image"])
    assert sum(len(table) for table in tables) == len(values(shared.first))
    assert max(len(table) for table in run.tables(["image"])) <= 4
