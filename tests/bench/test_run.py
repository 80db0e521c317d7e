"""Runs: resumed to the bit, failures as rows, and a store that survives what may happen."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

from patchlight.bench import unit as unit_room
from patchlight.bench.events import Event, Planning, Start, UnitEnd
from patchlight.bench.local import RunOptions, run
from patchlight.bench.plan import Unit, plan
from patchlight.bench.recipe import override, parse
from patchlight.bench.rows import TIMING
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, run_unit
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.methods.base import METHODS, Ask, own_passes
from patchlight.study import run as driver
from tests.bench.processes import FORKING
from tests.bench.small import cells, pictures, recipe, replaced, rows, text, units


def explained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The methods of every call of `explain`, from now on."""
    asked: list[list[str]] = []
    original = driver.explain

    def counted(vit: Any, batch: Any, methods: Any, *args: Any, **options: Any) -> Any:
        asked.append([request.label for request in methods])
        return original(vit, batch, methods, *args, **options)

    monkeypatch.setattr(driver, "explain", counted)
    return asked


def test_a_run_has_a_row_for_each_image_method_and_metric(images: Path, whole: Path) -> None:
    found = rows(whole)
    assert len(found) == 6 * 4 * 2
    assert all(0 <= row["value"] <= 1 and not row["error"] for row in found)
    assert {len(row["curve"]) for row in found} == {4}
    results = Store(whole).results()
    assert results.images == {"Pocket": tuple(f"{i}.png" for i in range(6))}
    column = results.columns["Pocket", "GenAtt", "Del"]
    assert not column.higher_is_better
    assert column.x is not None
    assert column.x[-1] == 1


def test_rows_are_what_explain_and_evaluate_give(images: Path, whole: Path) -> None:
    import patchlight as pl

    vit = pl.load("pocket")
    column = Store(whole).results().columns["Pocket", "Rollout (max)", "Del"]
    curves = Store(whole).curves("Pocket", "Rollout (max)", "Del")
    assert curves is not None
    torch.testing.assert_close(column.mean_curve, curves.double().mean(0), rtol=1e-12, atol=0)
    for i in range(2):
        batch = vit.batch([images / f"{i}.png"])
        maps = pl.explain(vit, batch, "rollout", fusion="max")
        expected = pl.evaluate(vit, batch, maps, "deletion", steps=3)
        assert torch.equal(column.values[i : i + 1], expected.values)
        assert expected.curve is not None
        assert torch.equal(curves[i : i + 1], expected.curve.float())


def test_a_new_method_leaves_the_others_alone(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    asked = explained(monkeypatch)
    more = parse(text(images).replace('Random = "random"', 'Random = "random"\nRaw = "rawatt"'))
    summary = run(more, tmp_path / "run")
    assert (summary.before, summary.now, summary.reused) == (12, 48, 36)
    assert asked[:6] == [["Raw"]] * 6
    assert {label for labels in asked for label in labels} == {"Raw"}
    results = Store(tmp_path / "run").results()
    assert {m for _, m, _ in results.columns} == {"GenAtt", "Rollout (max)", "Rollout", "Random", "Raw"}
    old = Store(whole).results()
    for key, column in old.columns.items():
        assert torch.equal(column.values, results.columns[key].values)
    maps = Store(tmp_path / "run").maps("Pocket", ["0.png", "4.png"])
    assert set(maps.scores) == set(more.methods)
    assert all(bool(scores.isfinite().all()) and len(scores) == 2 for scores in maps.scores.values())


def test_a_value_depends_on_what_matters_and_not_on_paths(images: Path, tmp_path: Path) -> None:
    one = cells(plan(recipe(images)))
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for picture in images.iterdir():
        (moved / picture.name).write_bytes(picture.read_bytes())
    assert cells(plan(recipe(moved))) == one
    assert not set(cells(plan(override(recipe(images), seed=1))).values()) & set(one.values())
    quick = cells(plan(override(recipe(images), quick=True)))
    assert {key[3] for key in one if quick[key] != one[key]} == {"Ins"}
    fewer = cells(plan(override(recipe(images), images=3)))
    assert all(one[key] == cell for key, cell in fewer.items())


def test_long_planning_is_reported(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from patchlight.bench import contents

    monkeypatch.setattr(contents, "PATIENCE", -1.0)
    heard: list[Event] = []
    plan(recipe(images), listen=heard.append)
    assert heard == [Planning(6, 6)]


def test_images_are_spread_over_the_data(images: Path) -> None:
    assert plan(override(recipe(images), images=3)).images.names == ("0.png", "2.png", "4.png")
    assert plan(override(recipe(images), images=9)).notes == (
        "9 images were requested; the data has 6, and all are used",
    )


def test_white_box_methods_share_one_call(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = explained(monkeypatch)
    for unit in units(plan(override(recipe(images), images=1))):
        run_unit(unit, Resources())
    assert asked == [["GenAtt", "Rollout (max)", "Rollout"], ["Random"]]


def test_units_are_a_few_methods_where_metrics_take_long_and_a_whole_pass_where_they_do_not(images: Path) -> None:
    many = "".join(f'\n[methods.G{i}]\nmethod = "genatt"\nstart = {i}\n' for i in range(4))
    asking = plan(parse(text(images) + many))
    assert [list(group.methods) for group in asking.groups] == [
        ["GenAtt", "Rollout (max)", "Rollout", "G0"],
        ["Random"],
        ["G1", "G2", "G3"],
    ]
    assert {group.batch_size for group in asking.groups} == {1}
    free = parse(
        text(images).replace('{metric = "insertion", steps = 3}', '"sparseness"').replace("insertion = {steps = 2}", "")
        + many
    )
    free = free.model_copy(update={"metrics": {"Ins": free.metrics["Ins"]}})
    assert [(len(group.methods), group.batch_size) for group in plan(free).groups] == [(7, 2), (1, 1)]


def test_values_do_not_depend_on_the_size_of_units(images: Path, tmp_path: Path, whole: Path) -> None:
    from patchlight.bench import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "SECONDS", 1e-6)
        run(recipe(images), tmp_path / "run")
    assert len(list((tmp_path / "run" / "units").iterdir())) == 12
    assert rows(tmp_path / "run") == rows(whole)


@pytest.fixture
def broken_methods() -> Iterator[None]:
    @own_passes("test-nan", paper="none", ignores_class=True)
    def nan(ask: Ask) -> Tensor:
        maps = torch.rand(len(ask.images), *ask.vit.grid)
        maps[0, 0, 0] = torch.nan
        return maps

    @own_passes("test-raises", paper="none", ignores_class=True)
    def raises(ask: Ask) -> Tensor:
        raise RuntimeError("it broke")

    @own_passes("test-refuses", paper="none", ignores_class=True, refuses=lambda settings, vit: "no reason at all")
    def refuses(ask: Ask) -> Tensor:
        raise AssertionError

    yield
    for name in ("test-nan", "test-raises", "test-refuses"):
        METHODS.remove(name)


@pytest.mark.usefixtures("broken_methods")
def test_what_fails_is_a_row_with_its_reason_and_the_run_continues(tmp_path: Path, whole: Path) -> None:
    folder = pictures(tmp_path / "images")
    (folder / "1.png").write_bytes(b"not a picture")
    more = text(folder).replace(
        'Random = "random"',
        'Random = "random"\nNaN = "test-nan"\nRaises = "test-raises"\nRefuses = "test-refuses"',
    )
    path = tmp_path / "r.toml"
    path.write_text(more, encoding="utf-8")
    result = CliRunner().invoke(app, ["bench", "run", str(path), "--out", str(tmp_path / "run")])
    assert result.exit_code == 3, result.output
    results = Store(tmp_path / "run").results()
    columns = results.columns
    assert all("1.png" in c.errors[1].as_py() and bool(c.values[1].isnan()) for c in columns.values())
    assert columns["Pocket", "NaN", "Ins"].errors[0].as_py() == "the map contains NaN or infinite values"
    assert columns["Pocket", "Raises", "Ins"].errors[2].as_py() == "RuntimeError: it broke"
    assert "no reason at all" in columns["Pocket", "Refuses", "Del"].errors[2].as_py()
    kept = torch.tensor([i for i in range(6) if i != 1])
    good = Store(whole).results().columns["Pocket", "GenAtt", "Ins"].values
    assert torch.allclose(columns["Pocket", "GenAtt", "Ins"].values[kept], good[kept], atol=1e-6)
    status = CliRunner().invoke(app, ["bench", "status", str(tmp_path / "run"), "--json"])
    told = json.loads(status.stdout)
    assert (told["done"], told["values"]) == (84, 84)
    assert told["failures"]["RuntimeError: it broke"] == 5 * 2
    report = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "run")])
    assert "values failed: RuntimeError: it broke" in report.stdout


def test_an_image_that_is_mended_is_run_again(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 4)
    good = (folder / "1.png").read_bytes()
    (folder / "1.png").write_bytes(b"not a picture")
    failed = run(recipe(folder), tmp_path / "run")
    assert sum(failed.failures.values()) == 4 * 2
    kept = run(recipe(folder), tmp_path / "run")
    assert (kept.before, kept.failures) == (32, failed.failures)
    (folder / "1.png").write_bytes(good)
    mended = run(recipe(folder), tmp_path / "run")
    assert (mended.now - mended.reused, mended.failures) == (8, {})


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[Path]:
    """A method that fails until this file is there."""
    works = tmp_path / "works"

    @own_passes("test-flaky", paper="none", ignores_class=True)
    def flaky(ask: Ask) -> Tensor:
        if not works.exists():
            raise RuntimeError("it broke")
        return (
            torch.arange(ask.vit.grid[0] * ask.vit.grid[1]).view(1, *ask.vit.grid).float().repeat(len(ask.images), 1, 1)
        )

    yield works
    METHODS.remove("test-flaky")


def test_failures_are_kept_until_a_retry_and_do_not_come_back(tmp_path: Path, flaky: Path) -> None:
    folder = pictures(tmp_path / "images", 2)
    one = text(folder).replace('Random = "random"', 'Random = "test-flaky"')
    more = [parse(f'{one}\n[methods.{name}]\nmethod = "rawatt"') for name in ("A", "B", "C", "D")]
    for each in (parse(one), *more[:3]):
        assert sum(run(each, tmp_path / "run").failures.values()) == 2 * 2
    flaky.touch()
    assert sum(run(parse(one), tmp_path / "run").failures.values()) == 2 * 2
    mended = run(parse(one), tmp_path / "run", RunOptions(retry=True))
    assert (mended.before, mended.now, mended.failures) == (12, 4, {})
    assert run(more[3], tmp_path / "run").failures == {}
    for steps in range(4, 10):  # whatever their checksums, the last of two files of a unit is believed
        own = override(more[3], settings={"Del": {"steps": steps}})
        assert run(own, tmp_path / "run").failures == {}


def test_labels_that_change_while_others_are_at_work_are_seen(tmp_path: Path) -> None:
    from patchlight.data import open_data

    folder = pictures(tmp_path / "images", 2)
    labels = tmp_path / "labels.csv"
    labels.write_text("0.png,0\n1.png,1\n")
    told = text(folder).replace('[data]\nkind = "folder"', '[data]\nkind = "files"')
    told = told.replace(
        f'path = "{folder.as_posix()}"', f'path = "{folder.as_posix()}"\noptions = {{labels = "{labels}"}}'
    )
    asked = parse(told)
    first = plan(asked)
    assert plan(asked, earlier_images=first.images).key == first.key
    labels.write_text("0.png,0\n1.png,7\n")
    assert open_data("files", folder, labels=labels)[1].label is not None
    assert plan(asked, earlier_images=first.images).key != first.key


def test_where_labels_lie_is_no_part_of_a_value(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 2)
    found = []
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("0.png,0\n1.png,1\n")
        told = text(folder).replace(
            f'path = "{folder.as_posix()}"', f'path = "{folder.as_posix()}"\noptions = {{labels = "{tmp_path / name}"}}'
        )
        found.append(cells(plan(parse(told))))
    assert found[0] == found[1]


def test_of_several_files_the_one_without_failures_is_believed(images: Path, tmp_path: Path) -> None:
    small = override(recipe(images), images=1)
    run(small, tmp_path / "run")
    store, unit = Store(tmp_path / "run"), units(plan(small))[0]
    files = store.files()[unit.key]
    assert files.rows is not None
    assert files.maps is not None
    good = pq.read_table(files.rows)
    failed = good.set_column(good.column_names.index("error"), "error", pa.array(["it broke"] * len(good)))
    sink = pa.BufferOutputStream()
    pq.write_table(failed, sink)
    for key in ("0" * 16, "f" * 16):
        for path, data in ((files.rows, sink.getvalue().to_pybytes()), (files.maps, files.maps.read_bytes())):
            other = path.with_name(f"{key}-x{path.suffix}")
            other.touch()
            replaced(other, data)
    for own in store.files().values():
        store.set_aside(own)
    known = store.before(unit)
    assert set(known) == {cell for pair in unit.group.hashes for cell in unit.cells(pair)}
    assert not any(one.row.error or one.map is None for one in known.values())


def test_a_full_disk_is_reported_and_loses_nothing(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import patchlight.core.files as files

    original, written = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(PatchlightError, match=os.strerror(errno.ENOSPC)):
        run(recipe(images), tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").rglob(".*")), "no half files are left"
    summary = run(recipe(images), tmp_path / "run")
    assert 0 < summary.before < summary.values
    assert rows(tmp_path / "run") == rows(whole)


def test_a_folder_that_is_moved_during_a_run_resumes_where_it_is_now(images: Path, tmp_path: Path, whole: Path) -> None:
    finished = 0

    def move(event: Event) -> None:
        nonlocal finished
        finished += isinstance(event, UnitEnd)
        if finished == 2 and isinstance(event, UnitEnd):
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(PatchlightError, match="was moved or deleted during the run"):
        run(recipe(images), tmp_path / "run", listen=move)
    assert not (tmp_path / "run").exists(), "a second folder with the rest"
    summary = run(recipe(images), tmp_path / "moved")
    assert 0 < summary.before < summary.values
    assert rows(tmp_path / "moved") == rows(whole)


def test_memory_that_ran_out_is_a_reason_and_a_retry_measures_it(images: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    @own_passes("test-memory", paper="none", ignores_class=True)
    def full(ask: Ask) -> Tensor:
        calls.append(len(ask.images))
        if len(calls) in (2, 3, 4):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        cells = ask.vit.grid[0] * ask.vit.grid[1]
        return torch.arange(cells).view(1, *ask.vit.grid).float().repeat(len(ask.images), 1, 1)

    try:
        short = parse(text(images).replace('Random = "random"', 'Random = "test-memory"'))
        failures = run(short, tmp_path / "run").failures
        assert failures
        assert set(failures) == {"one image does not fit into memory; give fewer methods at once"}
        assert run(short, tmp_path / "run", RunOptions(retry=True)).failures == {}
    finally:
        METHODS.remove("test-memory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(images: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PatchlightError, match="no permission"):
        run(recipe(images), tmp_path / "run")


def test_a_folder_of_other_things_is_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PatchlightError, match=r"is not a run: it contains 'thesis\.tex'"):
        run(recipe(images), tmp_path)


def test_what_a_killed_first_write_left_is_cleared_away(images: Path, tmp_path: Path) -> None:
    for name in (".manifest.json-ab12_x9z", ".report.html-abcdefgh"):
        (tmp_path / name).write_text("{")
    assert run(override(recipe(images), images=2), tmp_path).now == 16
    assert not (tmp_path / ".manifest.json-ab12_x9z").exists()


def test_another_recipe_or_device_for_the_same_folder_is_refused(images: Path, tmp_path: Path) -> None:
    small = override(recipe(images), images=2)
    run(small, tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(PatchlightError, match="holds a run of 'small', not of 'other'; use another --out"):
        run(small.model_copy(update={"name": "other"}), tmp_path / "run")
    with pytest.raises(PatchlightError, match="started on cpu"):
        run(small, tmp_path / "run", RunOptions(device="cuda"))
    assert (tmp_path / "run" / "manifest.json").read_bytes() == before


def test_class_names_of_a_folder_are_looked_up_among_the_models(tmp_path: Path) -> None:
    import patchlight as pl
    from patchlight.zoo import pocket

    labels = pl.load("pocket").labels
    assert labels is not None
    photo = next(iter(sorted(pocket.PHOTOS.glob("*.jpg"))))
    for name in ("truck", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "a.jpg").write_bytes(photo.read_bytes())
    asked = override(recipe(tmp_path / "images"), target="label")
    found = run_unit(units(plan(asked))[1], Resources()).rows
    found = [*run_unit(units(plan(asked))[0], Resources()).rows, *found]
    assert {(row.image, row.target) for row in found} == {
        (f"{name}/a.jpg", labels.index(name)) for name in ("truck", "dog")
    }
    (tmp_path / "images" / "truck").rename(tmp_path / "images" / "trukc")
    unit_room.open_data.cache_clear()
    with pytest.raises(PatchlightError, match=r"has the unknown class 'trukc'; did you mean 'truck'\?"):
        run_unit(units(plan(asked))[0], Resources())
    predicted = run_unit(units(plan(override(asked, target="prediction")))[0], Resources()).rows
    assert all(row.value is not None for row in predicted)


def test_print_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    from patchlight.cli.common import print_json

    print_json({"a": [1.5, float("nan")], "b": (float("inf"), {"c": float("-inf")}), "d": Path("x")})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"a": [1.5, None], "b": [None, {"c": None}], "d": "x"}


def test_newer_and_damaged_files(images: Path, tmp_path: Path, whole: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    first, second, *_ = sorted((out / "units").glob("*.parquet"))
    table = pq.read_table(first)
    sink = pa.BufferOutputStream()
    pq.write_table(table.append_column("mood", pa.array(["good"] * len(table))), sink)
    replaced(first, sink.getvalue().to_pybytes())
    results = Store(out).results()
    assert results.notes == ("column 'mood' was written by a newer version of Patchlight and is left out",)
    old = Store(whole).results()
    assert all(torch.equal(c.values, old.columns[k].values) for k, c in results.columns.items())
    second.write_bytes(second.read_bytes()[:100])
    results = Store(out).results()
    assert "is damaged and left out" in " ".join(results.notes)
    undone = sum(column.undone for column in results.columns.values())
    assert 0 < undone < 48
    told = json.loads(CliRunner().invoke(app, ["bench", "status", str(out), "--json"]).stdout)
    assert (told["done"], told["values"], told["models"]) == (48 - undone, 48, {"Pocket": 48 - undone})
    assert "is damaged" in " ".join(told["notes"])
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    for doing in (lambda: run(recipe(images), out), Store(out).results):
        with pytest.raises(PatchlightError, match="written by a newer version of Patchlight"):
            doing()


def _run(folder: Path, out: Path, began: Any) -> None:
    torch.set_num_threads(1)

    def listen(event: Event) -> None:
        if isinstance(event, Start):
            began.set()

    run(recipe(folder), out, listen=listen)


def _killed(folder: Path, out: Path, after: float) -> bool:
    """Begin a run in another process and kill it so many seconds after it began to work; whether it still ran."""
    began = FORKING.Event()
    process = FORKING.Process(target=_run, args=(folder, out, began))
    process.start()
    while process.is_alive() and not began.wait(0.01):
        pass
    process.join(after)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    return alive


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_it_ends_the_same(
    images: Path, tmp_path: Path, whole: Path, kills: int
) -> None:
    from patchlight.bench.tables import as_csv, read_tables

    chance = random.Random(kills)
    begun = time.perf_counter()
    assert not _killed(images, tmp_path / "timed", 600.0)
    length = time.perf_counter() - begun
    out = tmp_path / "run"
    hit = [_killed(images, out, chance.random() * chance.choice([0.1, 0.4]) * length) for _ in range(kills)]
    assert any(hit)
    run(recipe(images), out)
    assert rows(out) == rows(whole)
    tables = [
        [line.rsplit(",", len(TIMING))[0] for line in as_csv(read_tables(folder)).splitlines()]
        for folder in (out, whole)
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1 + 4 * 2


def test_an_image_that_changes_after_planning_is_noticed(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 2)
    unit = Unit(plan(recipe(folder)).groups[0], 0, plan(recipe(folder)).images)
    with Image.open(folder / "1.png") as picture:
        picture.putpixel((0, 0), (1, 2, 3))
        picture.save(folder / "1.png")
    unit_room.open_data.cache_clear()
    found = run_unit(unit, Resources()).rows
    assert {row.error for row in found if row.image == "0.png"} == {""}
    told = "'1.png' has changed since the run was planned; run the same command again"
    assert {row.error for row in found if row.image == "1.png"} == {told}
    (folder / "1.png").unlink()
    unit_room.open_data.cache_clear()
    assert {row.error for row in run_unit(unit, Resources()).rows if row.image == "1.png"} == {told}


def test_a_metric_without_its_annotations_is_reported_at_planning(images: Path) -> None:
    point = 'Ins = {metric = "pointing-game"}'
    both = text(images).replace('Ins = {metric = "insertion", steps = 3}', point).replace("insertion = {steps = 2}", "")
    said = "'Ins' needs boxes or masks, but the 'folder' data at "
    assert plan(parse(both)).notes[0].startswith(said)
    alone = "\n".join(line for line in both.splitlines() if "deletion" not in line).replace('"Ins", "Del"', '"Ins"')
    with pytest.raises(PatchlightError, match=f"{said}.* has none; use data that has"):
        plan(parse(alone.replace("[0.5, nan]", "[0.5]")))
    with pytest.raises(PatchlightError, match="the data has none; use --target prediction"):
        plan(override(recipe(images), target="label"))


def test_maps_are_enlarged_as_their_method_says(images: Path, tmp_path: Path) -> None:
    import patchlight as pl

    own = text(images).replace('GenAtt = "genatt"', 'GenAtt = {method = "genatt", upsampling = "nearest"}')
    run(override(parse(own), images=2), tmp_path / "run")
    vit = pl.load("pocket")
    batch = vit.batch([images / "0.png", images / "3.png"])
    expected = pl.evaluate(vit, batch, pl.explain(vit, batch, "genatt"), "deletion", steps=3, upsampling="nearest")
    columns = Store(tmp_path / "run").results().columns
    torch.testing.assert_close(columns["Pocket", "GenAtt", "Del"].values, expected.values, atol=1e-6, rtol=0)
    one, other = cells(plan(parse(own))), cells(plan(recipe(images)))
    assert {key[2:] for key in one if one[key] != other[key]} == {("GenAtt", "Ins"), ("GenAtt", "Del")}
