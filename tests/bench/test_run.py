"""Runs: resumed to the bit, failures as rows, one process at a time, and a store that survives what may happen."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import sys
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

from patchlight.bench import shard as shard_room
from patchlight.bench.events import Event, Planning, Start
from patchlight.bench.local import run
from patchlight.bench.plan import plan
from patchlight.bench.recipe import override, parse
from patchlight.bench.rows import TIMING
from patchlight.bench.shard import Resources, run_shard
from patchlight.bench.store import Store
from patchlight.cli import app
from patchlight.data import Data, Sample
from patchlight.errors import PatchlightError
from patchlight.methods.base import METHODS, Ask, register_method
from tests.bench.small import pictures, recipe, replaced, text

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["patchlight.bench", "patchlight.methods", "patchlight.metrics.deletion", "timm"])


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed; never write into it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe(images), out)
    return out


def shards(out: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows of all shards by file, without their timing."""
    found = {}
    for path in sorted((out / "shards").glob("*.parquet")):
        table = pq.read_table(path)
        found[path.stem.rpartition("-")[0]] = table.drop_columns([*TIMING]).to_pylist()
    return found


def test_a_run_has_a_row_for_each_image_method_and_metric(images: Path, whole: Path) -> None:
    rows = [row for found in shards(whole).values() for row in found]
    assert len(rows) == 6 * 4 * 2
    assert all(0 <= row["value"] <= 1 and not row["error"] for row in rows)
    assert {len(row["curve"]) for row in rows} == {4}
    results = Store(whole).results()
    assert results.images == {"Pocket": [f"{i}.png" for i in range(6)]}
    column = results.columns["Pocket", "GenAtt", "Del"]
    assert not column.higher_is_better
    assert column.x is not None
    assert column.x[-1] == 1


def test_rows_are_what_explain_and_evaluate_give(images: Path, whole: Path) -> None:
    import patchlight as pl

    vit = pl.load("pocket")
    batch = vit.batch([images / "0.png", images / "1.png"])
    maps = pl.explain(vit, batch, "rollout", fusion="max")
    expected = pl.evaluate(vit, batch, maps, "deletion", steps=3)
    column = Store(whole).results().columns["Pocket", "Rollout (max)", "Del"]
    assert torch.equal(column.values[:2], expected.values)
    assert expected.curve is not None
    assert column.curve is not None
    assert torch.equal(column.curve[:2].float(), expected.curve.float())


def test_a_second_run_does_nothing_and_says_so(images: Path, whole: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (whole / "shards").iterdir()}
    summary = run(recipe(images), whole)
    assert (summary.shards, summary.before) == (3, 3)
    assert {p: p.stat().st_mtime_ns for p in (whole / "shards").iterdir()} == before


def test_a_new_method_leaves_the_others_alone(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(recipe(images), tmp_path / "run")
    asked: list[list[str]] = []
    original = shard_room.explain

    def counted(vit: Any, batch: Any, methods: Any, *args: Any, **options: Any) -> Any:
        asked.append([request.label for request in methods])
        return original(vit, batch, methods, *args, **options)

    monkeypatch.setattr(shard_room, "explain", counted)
    more = parse(text(images).replace('Random = "random"', 'Random = "random"\nRaw = "rawatt"'))
    summary = run(more, tmp_path / "run")
    assert (summary.before, summary.partly) == (0, 3)
    assert asked == [["Raw"]] * 3
    results = Store(tmp_path / "run").results()
    assert {m for _, m, _ in results.columns} == {"GenAtt", "Rollout (max)", "Rollout", "Random", "Raw"}
    old = Store(whole).results()
    for key, column in old.columns.items():
        assert torch.equal(column.values, results.columns[key].values)
    store = Store(tmp_path / "run")
    assert set(store.read_maps(store.manifest().shards[0]).scores) == set(more.methods)


def test_the_key_follows_what_matters_and_not_the_paths(images: Path, tmp_path: Path) -> None:
    one = plan(recipe(images)).shards[0]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for picture in images.iterdir():
        (moved / picture.name).write_bytes(picture.read_bytes())
    assert plan(recipe(moved)).shards[0].key == one.key
    for changed in (override(recipe(images), seed=1), override(recipe(images), quick=True)):
        assert plan(changed).shards[0].key != one.key


def test_the_key_follows_what_is_in_the_images(images: Path, tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images")
    before = [shard.key for shard in plan(recipe(folder)).shards]
    with Image.open(folder / "2.png") as picture:
        picture.putpixel((0, 0), (1, 2, 3))
        picture.save(folder / "2.png")
    after = [shard.key for shard in plan(recipe(folder)).shards]
    assert [a == b for a, b in zip(after, before, strict=True)] == [True, False, True]
    (folder / "2.png").write_bytes(b"not a picture")
    broken = plan(recipe(folder)).shards[1].key
    assert broken not in (after[1], before[1])
    folder.rename(tmp_path / "moved")
    assert plan(recipe(tmp_path / "moved")).shards[1].key == broken


def test_the_key_follows_classes_boxes_and_masks(images: Path) -> None:
    with Image.open(images / "0.png") as opened:
        picture = opened.convert("RGB")
    mask = torch.zeros(64, 72, dtype=torch.int8)
    mask[:9] = 1
    shifted = mask.roll(1, 0)
    box = torch.tensor([[1.0, 2.0, 30.0, 40.0]])
    samples = [
        Sample("a", picture),
        Sample("a", picture, label=1),
        Sample("a", picture, label=2),
        Sample("a", picture, boxes=box),
        Sample("a", picture, boxes=box + 1),
        Sample("a", picture, mask=mask),
        Sample("a", picture, mask=shifted),
    ]
    keys = [plan(recipe(images), Data("one", ["a"], lambda name, s=s: s)).shards[0].key for s in samples]  # type: ignore[misc]
    assert len(set(keys)) == len(samples)


def test_the_key_follows_the_code(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan(recipe(images)).shards[0].key
    monkeypatch.setattr(sys.modules[plan.__module__], "source_digest", lambda: "other code")
    assert plan(recipe(images)).shards[0].key != one


def test_long_planning_is_told(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[plan.__module__], "PATIENCE", -1.0)
    heard: list[Event] = []
    plan(recipe(images), listen=heard.append)
    assert heard == [Planning(i + 1, 6) for i in range(6)]


def test_images_are_spread_over_the_data(images: Path) -> None:
    names = [name for shard in plan(override(recipe(images), images=3)).shards for name in shard.names]
    assert names == ["0.png", "2.png", "4.png"]
    assert plan(override(recipe(images), images=9)).notes == (
        "9 images were asked for; the data has 6, and all are used",
    )


def test_white_box_methods_share_one_call(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    original = shard_room.explain

    def counted(vit: Any, batch: Any, methods: Any, *args: Any, **options: Any) -> Any:
        asked.append([request.label for request in methods])
        return original(vit, batch, methods, *args, **options)

    monkeypatch.setattr(shard_room, "explain", counted)
    run_shard(plan(recipe(images)).shards[0], Resources())
    assert asked == [["GenAtt", "Rollout (max)", "Rollout"], ["Random"]]


@pytest.fixture
def broken_methods() -> Iterator[None]:
    @register_method("test-nan", paper="none", agnostic=True)
    def nan(ask: Ask) -> Tensor:
        maps = torch.rand(len(ask.images), *ask.vit.grid)
        maps[0, 0, 0] = torch.nan
        return maps

    @register_method("test-raises", paper="none", agnostic=True)
    def raises(ask: Ask) -> Tensor:
        raise RuntimeError("it broke")

    @register_method("test-refuses", paper="none", agnostic=True, refuses=lambda settings, vit: "no reason at all")
    def refuses(ask: Ask) -> Tensor:
        raise AssertionError

    yield
    for name in ("test-nan", "test-raises", "test-refuses"):
        METHODS.remove(name)


@pytest.mark.usefixtures("broken_methods")
def test_what_fails_is_a_row_with_its_reason_and_the_run_goes_on(tmp_path: Path, whole: Path) -> None:
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
    assert all("1.png" in c.errors[1] and bool(c.values[1].isnan()) for c in columns.values())
    assert columns["Pocket", "NaN", "Ins"].errors[0] == "the map holds NaN or infinite values"
    assert columns["Pocket", "Raises", "Ins"].errors[2] == "RuntimeError: it broke"
    assert "no reason at all" in columns["Pocket", "Refuses", "Del"].errors[2]
    kept = torch.tensor([i for i in range(6) if i != 1])
    good = Store(whole).results().columns["Pocket", "GenAtt", "Ins"].values
    assert torch.allclose(columns["Pocket", "GenAtt", "Ins"].values[kept], good[kept], atol=1e-6)
    status = CliRunner().invoke(app, ["bench", "status", str(tmp_path / "run"), "--json"])
    told = json.loads(status.stdout)
    assert (told["done"], told["shards"]) == (3, 3)
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
    assert (kept.before, kept.failures) == (2, failed.failures)
    (folder / "1.png").write_bytes(good)
    mended = run(recipe(folder), tmp_path / "run")
    assert (mended.before, mended.failures) == (1, {})


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[Path]:
    """A method that fails until this file is there."""
    works = tmp_path / "works"

    @register_method("test-flaky", paper="none", agnostic=True)
    def flaky(ask: Ask) -> Tensor:
        if not works.exists():
            raise RuntimeError("it broke")
        return (
            torch.arange(ask.vit.grid[0] * ask.vit.grid[1]).view(1, *ask.vit.grid).float().repeat(len(ask.images), 1, 1)
        )

    yield works
    METHODS.remove("test-flaky")


def test_failures_are_kept_until_a_retry_and_do_not_come_back(tmp_path: Path, flaky: Path) -> None:
    folder = pictures(tmp_path / "images", 4)
    one = text(folder).replace('Random = "random"', 'Random = "test-flaky"')
    more = [parse(f'{one}\n[methods.{name}]\nmethod = "rawatt"') for name in ("A", "B", "C", "D")]
    for each in (parse(one), *more[:3]):
        assert sum(run(each, tmp_path / "run").failures.values()) == 4 * 2
    flaky.touch()
    assert sum(run(parse(one), tmp_path / "run").failures.values()) == 4 * 2
    mended = run(parse(one), tmp_path / "run", retry=True)
    assert (mended.before, mended.failures) == (0, {})
    assert run(more[3], tmp_path / "run").failures == {}


def test_of_several_files_the_one_without_failures_is_believed(images: Path, tmp_path: Path) -> None:
    small = override(recipe(images), images=2)
    run(small, tmp_path / "run")
    store, shard = Store(tmp_path / "run"), plan(small).shards[0]
    files = store.files()[shard.place, shard.key]
    assert files.rows is not None
    assert files.maps is not None
    good = pq.read_table(files.rows)
    failed = good.set_column(good.column_names.index("error"), "error", pa.array(["it broke"] * len(good)))
    sink = pa.BufferOutputStream()
    pq.write_table(failed, sink)
    for key in ("0" * 16, "f" * 16):
        for path, data in ((files.rows, sink.getvalue().to_pybytes()), (files.maps, files.maps.read_bytes())):
            other = path.with_name(f"{shard.place}-{key}-x{path.suffix}")
            other.touch()
            replaced(other, data)
    known = store.before(shard)
    assert set(known.rows) == set(shard.cells.values())
    assert not any(row.error for rows in known.rows.values() for row in rows)
    assert set(known.maps) == set(known.rows)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_told_and_loses_nothing(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import patchlight.files as files

    original, written = os.fsync, 0

    def full(handle: int) -> None:
        nonlocal written
        written += 1
        if written > 4:
            raise OSError(number, os.strerror(number))
        original(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(PatchlightError, match=os.strerror(number)):
        run(recipe(images), tmp_path / "run")
    monkeypatch.undo()
    assert not [p for p in (tmp_path / "run").rglob(".*") if p.name != ".lock"], "no half files are left"
    summary = run(recipe(images), tmp_path / "run")
    assert (summary.shards, summary.before) == (3, 1)
    assert shards(tmp_path / "run") == shards(whole)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(images: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PatchlightError, match="no permission"):
        run(recipe(images), tmp_path / "run")


def test_a_folder_of_other_things_is_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PatchlightError, match=r"is not a run: it holds 'thesis\.tex'"):
        run(recipe(images), tmp_path)


def test_what_a_killed_first_write_left_is_cleared_away(images: Path, tmp_path: Path) -> None:
    for name in (".manifest.json-ab12_x9z", ".report.html-abcdefgh"):
        (tmp_path / name).write_text("{")
    assert run(override(recipe(images), images=2), tmp_path).shards == 1
    assert not (tmp_path / ".manifest.json-ab12_x9z").exists()


def test_another_recipe_into_the_same_folder_is_refused(images: Path, tmp_path: Path) -> None:
    small = override(recipe(images), images=2)
    run(small, tmp_path / "run")
    before = (tmp_path / "run" / "manifest.json").read_bytes()
    with pytest.raises(PatchlightError, match="holds a run of 'small', not of 'other'; give another --out"):
        run(small.model_copy(update={"name": "other"}), tmp_path / "run")
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
    rows = run_shard(plan(asked).shards[0], Resources()).rows
    assert {(row.image, row.target) for row in rows} == {
        (f"{name}/a.jpg", labels.index(name)) for name in ("truck", "dog")
    }
    (tmp_path / "images" / "truck").rename(tmp_path / "images" / "trukc")
    shard_room.opened.cache_clear()
    with pytest.raises(PatchlightError, match=r"has class 'trukc', which is not one; did you mean 'truck'\?"):
        run_shard(plan(asked).shards[0], Resources())
    predicted = run_shard(plan(override(asked, target="prediction")).shards[0], Resources()).rows
    assert all(row.value is not None for row in predicted)


def test_print_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    from patchlight.cli.common import print_json

    print_json({"a": [1.5, float("nan")], "b": (float("inf"), {"c": float("-inf")}), "d": Path("x")})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"a": [1.5, None], "b": [None, {"c": None}], "d": "x"}


def test_newer_and_damaged_files(images: Path, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    run(recipe(images), out)
    first, second, _ = sorted((out / "shards").glob("*.parquet"))
    table = pq.read_table(first)
    sink = pa.BufferOutputStream()
    pq.write_table(table.append_column("mood", pa.array(["good"] * len(table))), sink)
    replaced(first, sink.getvalue().to_pybytes())
    results = Store(out).results()
    assert results.notes == ("column 'mood' was written by a newer Patchlight and is left out",)
    old = Store(whole).results()
    assert all(torch.equal(c.values, old.columns[k].values) for k, c in results.columns.items())
    second.write_bytes(second.read_bytes()[:100])
    results = Store(out).results()
    assert "is damaged and left out" in " ".join(results.notes)
    assert len(results.images["Pocket"]) == 4
    told = json.loads(CliRunner().invoke(app, ["bench", "status", str(out), "--json"]).stdout)
    assert (told["done"], told["shards"], told["damaged"], told["images"]) == (2, 3, 1, {"Pocket": 4})
    summary = run(recipe(images), out)
    assert summary.before == 2
    assert len(Store(out).results().images["Pocket"]) == 6
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    for doing in (lambda: run(recipe(images), out), Store(out).results):
        with pytest.raises(PatchlightError, match="made by a newer Patchlight"):
            doing()


def test_another_device_is_refused(images: Path, tmp_path: Path) -> None:
    run(override(recipe(images), images=2), tmp_path / "run")
    with pytest.raises(PatchlightError, match="begun on cpu"):
        run(override(recipe(images), images=2), tmp_path / "run", device="cuda")


def _hold(out: Path, held: Any) -> None:
    with Store(out).locked():
        held.set()
        time.sleep(600)


def test_a_second_process_is_refused_until_the_first_is_gone(images: Path, tmp_path: Path) -> None:
    held = FORKING.Event()
    process = FORKING.Process(target=_hold, args=(tmp_path / "run", held))
    process.start()
    try:
        assert held.wait(120)
        with pytest.raises(PatchlightError, match="another process is at work"):
            run(recipe(images), tmp_path / "run")
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert run(override(recipe(images), images=2), tmp_path / "run").shards == 1


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
    from patchlight.bench.tables import as_csv, gather

    chance = random.Random(kills)
    begun = time.perf_counter()
    assert not _killed(images, tmp_path / "timed", 600.0)
    length = time.perf_counter() - begun
    out = tmp_path / "run"
    hit = [_killed(images, out, chance.random() * chance.choice([0.1, 0.4]) * length) for _ in range(kills)]
    assert any(hit)
    run(recipe(images), out)
    assert shards(out) == shards(whole)
    tables = [
        [line.rsplit(",", len(TIMING))[0] for line in as_csv(gather(folder)).splitlines()] for folder in (out, whole)
    ]
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1 + 4 * 2


def test_an_image_that_changes_after_planning_is_noticed(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 2)
    shard = plan(recipe(folder)).shards[0]
    with Image.open(folder / "1.png") as picture:
        picture.putpixel((0, 0), (1, 2, 3))
        picture.save(folder / "1.png")
    shard_room.opened.cache_clear()
    rows = run_shard(shard, Resources()).rows
    assert {row.error for row in rows if row.image == "0.png"} == {""}
    told = "'1.png' has changed since the run was planned; run the same command again"
    assert {row.error for row in rows if row.image == "1.png"} == {told}
    (folder / "1.png").unlink()
    shard_room.opened.cache_clear()
    assert {row.error for row in run_shard(shard, Resources()).rows if row.image == "1.png"} == {told}


def test_a_metric_without_its_annotations_is_told_at_planning(images: Path) -> None:
    point = 'Ins = {metric = "pointing-game"}'
    both = text(images).replace('Ins = {metric = "insertion", steps = 3}', point).replace("insertion = {steps = 2}", "")
    said = "'Ins' needs boxes or masks, and the 'folder' data at "
    assert plan(parse(both)).notes[0].startswith(said)
    alone = "\n".join(line for line in both.splitlines() if "deletion" not in line).replace('"Ins", "Del"', '"Ins"')
    with pytest.raises(PatchlightError, match=f"{said}.* has none; give data that has"):
        plan(parse(alone.replace("[0.5, nan]", "[0.5]")))
    with pytest.raises(PatchlightError, match="the data has none; give --target prediction"):
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
    one, other = plan(parse(own)).shards[0].cells, plan(recipe(images)).shards[0].cells
    assert {pair for pair in one if one[pair] != other[pair]} == {("GenAtt", "Ins"), ("GenAtt", "Del")}
