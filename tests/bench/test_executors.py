"""Shards and workers: each shard has one owner, together they are the run, and nothing is lost when processes end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patchlight.bench import executors, local
from patchlight.bench.local import Cutter, RunOptions, run
from patchlight.bench.plan import WHOLE, Shard, plan
from patchlight.bench.recipe import override, parse
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from patchlight.core.plugins import load_plugin
from tests.bench.processes import events, start_run
from tests.bench.small import pictures, recipe, rows, text
from tests.registries import restored

PLUGIN = """\
import os
import time

import torch

from patchlight.methods.base import Ask, own_passes


@own_passes("test-slow", paper="none", ignores_class=True)
def slow(ask: Ask) -> torch.Tensor:
    time.sleep(600)
    return torch.rand(len(ask.images), *ask.vit.grid)


@own_passes("test-deadly", paper="none", ignores_class=True)
def deadly(ask: Ask) -> torch.Tensor:
    os._exit(9)
"""
PATIENT = """\
import sys
from patchlight.bench import local
from patchlight.cli import main

if __name__ == "__main__":
    local.GRACE = 1.0
    sys.argv = ["patchlight", *sys.argv[1:]]
    main()
"""


def requested_stop() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def test_a_run_is_the_union_of_its_shards(images: Path, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    for i in (1, 2, 3):
        summary = run(recipe(images), out, RunOptions(shard=Shard(i, 3)))
        assert (summary.now, summary.left, summary.before) == (16, 0, 16 * (i - 1))
    assert sorted(path.name for path in (out / "shards").iterdir()) == ["1-of-3", "2-of-3", "3-of-3"]
    assert rows(out) == rows(whole)
    results = Store(out).results()
    assert not any(column.undone for column in results.columns.values())
    assert (run(recipe(images), out).before, Store(out).workers()) == (48, [])
    more = run(override(recipe(images), seed=1), out)
    assert (more.before, more.now) == (0, 48), "what shards hold of another plan is put aside"
    assert len(rows(out)) == 48
    assert run(recipe(images), out).now == 0, "and comes back"
    assert rows(out) == rows(whole)


def test_what_a_shard_left_is_done_by_a_run_without_shards(images: Path, tmp_path: Path, whole: Path) -> None:
    run(recipe(images), tmp_path / "run", RunOptions(shard=Shard(2, 3)))
    summary = run(recipe(images), tmp_path / "run", RunOptions(shard=Shard(1, 2)))
    assert (summary.before, summary.now) == (16, 16), "an image is in no two shards, however the run was divided"
    summary = run(recipe(images), tmp_path / "run")
    assert (summary.before, summary.now) == (32, 16)
    assert rows(tmp_path / "run") == rows(whole)


@pytest.mark.parametrize(("total", "count"), [(6, 3), (7, 3), (2, 16), (50, 7), (1, 1)])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_every_image_is_in_one_shard_and_no_batch_is_cut(total: int, count: int, batch_size: int) -> None:
    spans = [Shard(i, count).span(total, batch_size) for i in range(1, count + 1)]
    assert [i for begin, end in spans for i in range(begin, end)] == list(range(total))
    assert all(begin % batch_size == 0 or begin == total for begin, _ in spans)


@pytest.mark.parametrize("given", ["17/16", "0/16", "3", "a/b", "1/0", "-1/2", "3/16/2", f"{5000 * '9'}/3"])
def test_shards_that_are_none_are_refused(given: str) -> None:
    words = "; with 16 shards, give 1/16 to 16/16" if given.endswith("/16") else ""
    with pytest.raises(PatchlightError, match=f"--shard '{given}' is not valid{words}"):
        Shard.parse(given)


def test_a_second_process_on_a_shard_is_told_who_holds_it(images: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log.txt"
    store = Store(out)
    store.make(Shard(1, 2))
    with store.owned(Shard(1, 2)):
        holder = rf"process {os.getpid()} on \S+ \(since 20\S+ \S+\)"
        process = start_run(images, out, log, RunOptions(shard=Shard(1, 2)))
        process.join(600)
        assert process.exitcode == 2
        (error,) = events(log, "error")
        with pytest.raises(PatchlightError, match=rf"^{holder} is working on shard 1-of-2 of .*run'; wait"):
            raise PatchlightError(error["error"])
        for shard in (WHOLE, Shard(1, 3)):
            with pytest.raises(PatchlightError, match=rf"^{holder} .*; wait until it ends, or use --shard with"):
                run(recipe(images), out, RunOptions(shard=shard))
        summary = run(recipe(images), out, RunOptions(shard=Shard(2, 2)))
        assert summary.now == 24
        with pytest.raises(PatchlightError, match=rf"^{holder}, .* on another plan"):
            run(override(recipe(images), seed=1), out, RunOptions(shard=Shard(2, 2)))
        state = json.loads(CliRunner().invoke(app, ["bench", "status", str(out), "--json"]).stdout)
        assert [f"process {os.getpid()} on" in worker for worker in state["workers"]] == [True]
    assert run(recipe(images), out).now == 24


def test_who_is_at_work_on_another_plan_is_named_not_oneself(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    store = Store(out)
    run(recipe(images), out, RunOptions(shard=Shard(2, 2)), requested_stop())
    with store.owned(Shard(2, 2)), pytest.raises(PatchlightError, match=r", on shard 2-of-2 of .*, on another plan"):
        run(override(recipe(images), seed=1), out, RunOptions(shard=Shard(1, 2)))


def test_units_are_whole_batches_of_about_half_a_minute(images: Path) -> None:
    planned = plan(recipe(images))
    cutter = Cutter(planned, WHOLE, [])
    first, second = cutter.cut(), cutter.cut()
    assert first is not None
    assert second is not None
    assert [(unit.start, unit.stop) for unit in (first, second)] == [(0, 1), (0, 1)], "of both groups, the first image"
    cutter.record_time(first, local.SECONDS / 2)
    cutter.record_time(second, local.SECONDS / 100)
    cuts = [cutter.cut(), cutter.cut(), cutter.cut(), cutter.cut()]
    assert [(u.group.methods == first.group.methods, u.start, u.stop) for u in cuts if u is not None] == [
        (True, 1, 3),
        (False, 1, 6),
        (True, 3, 5),
        (True, 5, 6),
    ]
    assert (cutter.cut(), cutter.left) == (None, 0)
    shared = Cutter(planned, WHOLE, [first])
    shared.record_time(first, 1e-6)
    shared.todo[planned.groups[1].key] = []
    sizes = [len(unit.images) for unit in iter(lambda: shared.cut(2), None)]
    assert sizes == [1] * 5, "both workers have some"


def test_a_first_unit_that_failed_says_nothing_about_the_others(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 6)
    (folder / "0.png").write_bytes(b"not a picture")
    heard: list[Any] = []
    run(recipe(folder), tmp_path / "run", listen=heard.append)
    sizes = [event.images for event in heard if event.event == "unit"]
    assert sizes[:4] == [1, 1, 1, 1]


def test_a_run_that_is_asked_to_stop_does_and_resumes(images: Path, tmp_path: Path, whole: Path) -> None:
    stop = threading.Event()
    summary = run(recipe(images), tmp_path / "run", stop=stop, listen=lambda event: stop.set())
    assert (summary.now, summary.left) == (0, 48)
    assert run(recipe(images), tmp_path / "run", RunOptions(shard=Shard(1, 6)), requested_stop()).left == 8
    log = tmp_path / "log.txt"
    process = start_run(images, tmp_path / "run", log, seconds=1e-6)
    while not events(log, "done"):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75
    assert len(events(log, "done")) == len(events(log, "unit")), "the unit in flight was finished"
    assert 0 < run(recipe(images), tmp_path / "run").before < 48
    assert rows(tmp_path / "run") == rows(whole)


def plugin_command(folder: Path, images: Path, method: str) -> list[str]:
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "r.toml").write_text(text(images).replace('GenAtt = "genatt"', f'GenAtt = "{method}"'))
    (folder / "main.py").write_text(PATIENT)
    words = [str(folder / "main.py"), "bench", "run", str(folder / "r.toml"), "--out", str(folder / "run"), "--json"]
    return [sys.executable, *words, "--plugin", str(folder / "plugin.py")]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_unit_that_takes_too_long_is_given_up_when_asked_to_stop(images: Path, tmp_path: Path, workers: int) -> None:
    command = [*plugin_command(tmp_path, images, "test-slow"), "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "unit":
        pass
    process.terminate()
    assert process.wait(60) == 75
    assert not Store(tmp_path / "run").busy()


def test_workers_do_what_one_process_does_and_a_unit_that_kills_them_fails_alone(
    images: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    monkeypatch.setattr(local, "DEATHS", 2)
    heard: list[Any] = []
    options = RunOptions(workers=2, threads=torch.get_num_threads())
    with restored():
        load_plugin(tmp_path / "plugin.py")
        more = parse(text(images).replace("[methods]", '[methods]\nDeadly = "test-deadly"'))
        summary = run(override(more, images=1), tmp_path / "run", options, listen=heard.append)
    assert (summary.values, summary.now, summary.left) == (10, 10, 0)
    assert summary.failures == {"2 processes died while they ran it": 2}
    assert [event.event for event in (heard[0], heard[-1])] == ["start", "end"]
    assert sum(event.values for event in heard if event.event == "done") == 10
    others = [row for row in rows(tmp_path / "run") if row["method"] != "Deadly"]
    assert others == [row for row in rows(whole) if row["image"] == "0.png"]
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["worker-1.txt", "worker-2.txt"]


def test_a_worker_that_dies_between_units_is_replaced(images: Path, tmp_path: Path) -> None:
    planned = plan(override(recipe(images), images=1))
    unit = Cutter(planned, WHOLE, []).cut()
    assert unit is not None
    workers = executors.Workers(executors.worker_job(Resources("cpu", 8), 1), ["cpu"], tmp_path / "logs")
    try:
        (process,) = workers.pools[0]._processes.values()
        process.kill()
        while not workers.pools[0]._broken:
            time.sleep(0.01)
        assert len(workers.submit(unit, {}).result(120).result.rows) == unit.values
    finally:
        workers.close()


def test_workers_that_cannot_start_say_so(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_prepare_worker", os._exit)
    with pytest.raises(PatchlightError, match=r"worker 1 did not start; see '.*worker-1\.txt'"):
        run(override(recipe(images), images=1), tmp_path / "run", RunOptions(workers=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_all_cuda_devices_are_refused_where_there_is_none(images: Path, tmp_path: Path) -> None:
    with pytest.raises(PatchlightError, match="--device cuda:all: this machine has no CUDA device"):
        run(recipe(images), tmp_path / "run", RunOptions(device="cuda:all"))
