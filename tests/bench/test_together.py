"""Many processes in one folder: each unit once, the result that of one, and nothing lost when some of them end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from patchlight.bench import queue, workers
from patchlight.bench.claims import Claims
from patchlight.bench.local import run
from patchlight.bench.plan import plan
from patchlight.bench.queue import Part, Stop
from patchlight.bench.recipe import override
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, run_unit
from patchlight.bench.workers import event_of, run_workers
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from tests.bench.processes import begun, keys, together, told
from tests.bench.small import pictures, recipe, rows, text, units


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of one process."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe(images), out)
    return rows(out)


@pytest.mark.parametrize(
    "count", [2, pytest.param(8, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow)]
)
def test_many_processes_do_each_unit_once(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]], count: int
) -> None:
    did = together(images, tmp_path / "run", tmp_path / "logs", count, seconds=1e-6)
    assert sorted(keys(did)) == sorted(set(keys(did))) == sorted(unit.key for unit in units(plan(recipe(images)), 1))
    assert rows(tmp_path / "run") == whole


def test_parts_together_are_the_whole_in_one_folder_or_in_several(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    for i in (1, 2, 3):
        summary = run(recipe(images), tmp_path / "run", part=Part(i, 3))
        assert not summary.left
    assert rows(tmp_path / "run") == whole
    apart: set[str] = set()
    for i in (1, 2):
        run(recipe(images), tmp_path / f"run{i}", part=Part(i, 2))
        apart |= {json.dumps(row) for row in rows(tmp_path / f"run{i}")}
    assert apart == {json.dumps(row) for row in whole}


@pytest.mark.parametrize(("images_", "count"), [(6, 3), (7, 3), (2, 16), (50, 7), (1, 1)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_unit_is_in_a_part(images_: int, count: int, size: int) -> None:
    class Stretch:
        def __init__(self, start: int) -> None:
            self.start, self.stop = start, min(start + size, images_)

    cut: list[Any] = [Stretch(start) for start in range(0, images_, size)]
    parts = [[unit for unit in cut if Part(i, count).has(unit, images_)] for i in range(1, count + 1)]
    assert {id(unit) for part in parts for unit in part} == {id(unit) for unit in cut}
    if size == 1:
        assert sum(map(len, parts)) == images_, "no image is in two parts"
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("given", ["17/16", "0/16", "3", "a/b", "1/0", "-1/2", "3/16/2"])
def test_parts_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(PatchlightError, match=f"--shard {given} is not possible"):
        Part.parse(given)


def test_a_process_that_is_killed_leaves_its_unit_to_another(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    first = begun(images, tmp_path / "run", logs / "0.txt", seconds=1e-6)
    while not any(one["event"] == "unit" for one in told(logs)):
        time.sleep(0.01)
    second = begun(images, tmp_path / "run", logs / "1.txt", seconds=1e-6)
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    second.join(600)
    assert second.exitcode == 0
    assert rows(tmp_path / "run") == whole


def test_a_group_whose_first_unit_is_done_and_not_timed_is_gone_on_with(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*args: Any) -> int:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(queue, "unit_size", killed)
        with pytest.raises(Killed):
            run(recipe(images), tmp_path / "run")
    assert Store(tmp_path / "run").done()
    assert not list((tmp_path / "run" / "sizes").iterdir())
    summary = run(recipe(images), tmp_path / "run")
    assert (summary.before + summary.now, summary.left) == (48, 0)
    assert rows(tmp_path / "run") == whole
    assert len(list((tmp_path / "run" / "sizes").iterdir())) == 2


def test_who_comes_while_a_group_is_timed_waits_for_its_size(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(recipe(images), out, stop=asked())
    unit = units(plan(recipe(images)))[0]
    other = Claims(out)
    stop = Stop()
    with other.present():
        other.tell(ready=True)
        assert other.take(unit.key).state == "mine"
        Store(out).write(unit, run_unit(unit, Resources()))
        waited: list[Any] = []

        def listen(event: Any) -> None:
            if event.event == "wait":
                waited.append(event)
                stop.asked.set()

        summary = run(recipe(images), out, stop=stop, listen=listen)
    assert len(waited) == 1
    assert summary.left == 36, "nothing of the group was begun, and it is not taken for done"


def test_a_full_disk_under_one_of_several_stops_it_alone(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    logs, out = tmp_path / "logs", tmp_path / "run"
    logs.mkdir()
    run(recipe(images), out, stop=asked())
    crew = [begun(images, out, logs / "0.txt", most=2048), begun(images, out, logs / "1.txt")]
    for process in crew:
        process.join(600)
    assert [process.exitcode for process in crew] == [2, 0]
    (error,) = [one["error"] for one in told(logs) if one["event"] == "error"]
    assert "cannot be written: File too large" in error
    assert rows(out) == whole


def asked() -> Stop:
    stop = Stop()
    stop.asked.set()
    return stop


def test_a_run_that_is_asked_to_stop_does_and_goes_on_later(
    images: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    stop = Stop()
    summary = run(recipe(images), tmp_path / "run", stop=stop, listen=lambda event: stop.asked.set())
    assert (summary.now, summary.left) == (0, 48)
    logs = tmp_path / "logs"
    logs.mkdir()
    process = begun(images, tmp_path / "run", logs / "0.txt", preemptible=True, seconds=1e-6)
    while not keys(told(logs)):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 75
    assert keys(told(logs)) == keys(told(logs), "unit"), "the unit in flight was finished"
    assert 0 < run(recipe(images), tmp_path / "run").before < 48
    assert rows(tmp_path / "run") == whole


SLOW = """\
import time
import torch
from patchlight.methods.base import Ask, own_passes

@own_passes("test-slow", paper="none", agnostic=True)
def slow(ask: Ask) -> torch.Tensor:
    time.sleep(600)
    return torch.rand(len(ask.images), *ask.vit.grid)
"""
ENDS = """\
import sys
from patchlight.bench import queue, workers
workers.GRACE = 1.0
from patchlight.cli import main
sys.argv = ["patchlight", *sys.argv[1:]]
main()
"""


def test_a_unit_that_takes_too_long_is_given_up_when_asked_to_stop(images: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "r.toml").write_text(text(images).replace('GenAtt = "genatt"', 'GenAtt = "test-slow"'))
    command = ["bench", "run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, *command, "--plugin", str(tmp_path / "slow.py")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while json.loads(process.stdout.readline())["event"] != "unit":
        pass
    process.terminate()
    assert process.wait(60) == 75
    claims = Claims(tmp_path / "run")
    assert not claims.others(), "it has said goodbye"


def test_a_unit_of_which_processes_die_becomes_failures(images: Path, tmp_path: Path) -> None:
    small = override(recipe(images), images=1)
    out = tmp_path / "run"
    run(small, out, stop=asked())
    unit, *_ = units(plan(small))
    other = Claims(out)
    with other.present():
        other.tell(ready=True)
        for number in range(3):
            dead = Claims(out).own
            dead = replace(dead, pid=0)
            (out / "owners" / f"{dead.id}.json").write_text(json.dumps(vars(dead)))
            (out / "claims" / f"{unit.key}.{number}").write_text(dead.id)
        summary = run(small, out)
    assert summary.failures == {"3 processes died while they ran it": unit.values}
    assert run(small, out, retry=True).failures == {}


def test_others_with_another_patchlight_or_another_plan_are_not_joined(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = override(recipe(images), images=1)
    run(small, out, stop=asked())
    other = Claims(out)
    with other.present():
        pid = os.getpid()
        other.tell(version="0.0.1", code="x", plan="x", ready=True)
        with pytest.raises(
            PatchlightError, match=f"process {pid} on .* is at work in .* with Patchlight 0.0.1, and this"
        ):
            run(small, out)
        other.tell(version="", code="abc")
        with pytest.raises(PatchlightError, match=r"with other code of Patchlight .* \(hash abc, here"):
            run(small, out)
        other.tell(code="")
        with pytest.raises(PatchlightError, match=r"is at work in .* on another plan"):
            run(small, out)
        other.tell(plan="")
        assert run(small, out).now == 8


def test_workers_do_what_one_process_does(images: Path, tmp_path: Path, whole: list[dict[str, Any]]) -> None:
    heard: list[Any] = []
    threads = torch.get_num_threads()
    summary = run_workers(recipe(images), tmp_path / "run", 2, listen=heard.append)
    torch.set_num_threads(threads)
    assert (summary.values, summary.now, summary.left) == (48, 48, 0)
    assert [event.event for event in (heard[0], heard[-1])] == ["start", "end"]
    assert sum(event.values for event in heard if event.event == "done") == 48
    if Store(tmp_path / "run").manifest().threads == threads:
        assert rows(tmp_path / "run") == whole


def test_workers_that_cannot_work_say_why(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(workers, "DEATHS", 1)
    with pytest.raises(PatchlightError, match=r"worker \d ended with exit code 1; see logs/worker-\d\.txt"):
        run_workers(recipe(images), tmp_path / "run", 2)


def test_events_come_back_from_their_json(images: Path, tmp_path: Path) -> None:
    heard: list[Any] = []
    run(override(recipe(images), images=1), tmp_path / "run", listen=heard.append)
    for event in heard:
        about = {**vars(event), "event": event.event}
        if "rows" in about:
            about["rows"] = [vars(row) for row in event.rows]
        again = event_of(json.loads(json.dumps(about)))
        assert type(again) is type(event)
        assert json.dumps(vars(again), default=vars) == json.dumps(vars(event), default=vars)


def test_the_command_line_refuses_what_is_no_part(images: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text(images))
    asked = ["bench", "run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*asked, "--shard", "17/16"])
    assert result.exit_code == 2
    assert "of 16 shards give 1/16 to 16/16" in result.output
    result = CliRunner().invoke(app, [*asked, "--device", "cuda:all"])
    assert result.exit_code == 2 or torch.cuda.is_available()


def test_what_died_elsewhere_does_not_stop_a_changed_plan(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from patchlight.bench import claims

    out, small = tmp_path / "run", override(recipe(images), images=1)
    run(small, out, stop=asked())
    ghost = replace(Claims(out).own, host="node7", machine="another", plan="x", code="x", version="0.0.1", ready=True)
    (out / "owners" / f"{ghost.id}.json").write_text(json.dumps(vars(ghost)))
    monkeypatch.setattr(claims, "EXPIRY", 0.5)
    heard: list[Any] = []
    assert run(small, out, listen=heard.append).now == 8
    assert heard[0].event == "wait"


def test_what_failed_is_not_run_again_while_others_are_at_work(images: Path, tmp_path: Path) -> None:
    out, small = tmp_path / "run", override(recipe(images), images=1)
    run(small, out, stop=asked())
    other = Claims(out)
    with other.present():
        other.tell(ready=True)
        with pytest.raises(PatchlightError, match=r"others are at work in .*; give --retry when they have ended"):
            run(small, out, retry=True)


def test_a_first_unit_that_failed_says_nothing_about_the_others(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "images", 6)
    (folder / "0.png").write_bytes(b"not a picture")
    run(recipe(folder), tmp_path / "run")
    store = Store(tmp_path / "run")
    assert {store.size(group) for group in plan(recipe(folder)).groups} == {4}, (
        "not all five, at the speed of a failure"
    )


def test_a_part_that_is_stopped_at_its_first_unit_has_something_left(images: Path, tmp_path: Path) -> None:
    summary = run(recipe(images), tmp_path / "run", part=Part(1, 64), stop=asked())
    assert summary.left > 0
