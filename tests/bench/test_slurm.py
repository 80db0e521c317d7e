"""The sbatch file: read as sbatch and bash read it, and its body run here with SLURM's commands stood in for."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchlight.bench.local import run
from patchlight.bench.recipe import parse
from patchlight.bench.slurm import Job, script, slurm_time
from patchlight.cli import app
from patchlight.core.errors import PatchlightError
from tests.bench.small import pictures, rows, text
from tests.registries import restored

STRANGE = "my runs/50% $HOME `id` 'q' \"p\" \\ #1 é"
JOB = Job("64", "2h")
STUB = """\
#!{python}
import json, os, subprocess, sys
with open({told!r}, "a") as file:
    file.write(json.dumps([{name!r}, sys.argv[1:], sys.stdin.read() if {name!r} == "sbatch" else ""]) + "\\n")
if {name!r} == "srun":
    words = sys.argv[1:]
    while words[0].startswith("--"):
        words.pop(0)
    step = subprocess.Popen(words)
    with open({told!r} + ".pid", "w") as file:
        file.write(str(step.pid))
    sys.exit(step.wait())
sys.exit(int(os.environ.get("STUB_CODE", "0")) if {name!r} == "program" else 0)
"""
SLOW = """\
import time

import torch

import patchlight as pl


@pl.own_passes("test-slow", paper="none", ignores_class=True)
def slow(ask: pl.Ask):
    time.sleep(2.0)
    return torch.rand(len(ask.images), *ask.vit.grid)
"""


def written(out: str = "runs/x", job: Job = JOB, run: tuple[str, ...] = ("program", "run")) -> str:
    return script("small", out, run, ("program", "report", out), job)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with SLURM's commands and a program, which write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "sbatch", "scontrol", "program"):
        text = STUB.format(python=sys.executable, told=str(tmp_path / "told"), name=name)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def ran(text: str, commands: Path, task: int = 1, code: int = 0, **env: str) -> tuple[int, list[list]]:
    """The file run as a task of an array: what it ends with, and the calls of the commands."""
    slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "77", "STUB_CODE": str(code), **env}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    (commands.parent / "job.sh").write_text(text)
    (commands.parent / "told").unlink(missing_ok=True)
    done = subprocess.run(["bash", "job.sh"], cwd=commands.parent, env={**os.environ, "PATH": path, **slurm})
    return done.returncode, [json.loads(line) for line in (commands.parent / "told").read_text().splitlines()]


def read_by_sbatch(text: str) -> Iterator[str]:
    """The options of the #SBATCH lines: words, in which a backslash keeps what follows it, up to a # or the end."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if line.startswith("#SBATCH "):
            word, kept = "", False
            for letter in line.removeprefix("#SBATCH "):
                if not kept and letter == "\\":
                    kept = True
                    continue
                if not kept and (letter.isspace() or letter in "#\"'"):
                    raise AssertionError(f"sbatch stops reading at {letter!r} in {line}")
                word, kept = word + letter, False
            yield word


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("2h", "02:00:00"),
        ("90m", "01:30:00"),
        ("1d12h", "1-12:00:00"),
        ("2h30m15s", "02:30:15"),
        (" 2H ", "02:00:00"),
        ("48h", "2-00:00:00"),
        ("90", "01:30:00"),  # SLURM's plain number is minutes
        ("90:30", "01:30:30"),
        ("02:00:00", "02:00:00"),
        ("1-12", "1-12:00:00"),
        ("1-12:30", "1-12:30:00"),
        ("1-12:00:00", "1-12:00:00"),
    ],
)
def test_times_are_written_as_slurm_does(given: str, meant: str) -> None:
    assert slurm_time(given) == meant


@pytest.mark.parametrize("bad", ["", "2hh", "h", "1:2:3:4", "soon", "-1", "0", "0h", "2h-3", "1.5h", "m2"])
def test_another_time_is_refused(bad: str) -> None:
    with pytest.raises(PatchlightError, match="give hours and minutes as 2h, 90m or 1d12h"):
        slurm_time(bad)


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (replace(JOB, array="0"), "'0' is not a valid array; give a number of tasks"),
        (replace(JOB, array="1-64"), "'1-64' is not a valid array; give a number of tasks"),
        (replace(JOB, array="64%0"), "'64%0' is not a valid array"),
        (replace(JOB, mem="lots"), "'lots' is not a valid amount of memory; give for example 32G"),
        (replace(JOB, partition="gpu\nrm -r ~"), "is not printable"),
    ],
)
def test_what_slurm_would_not_take_is_refused(job: Job, told: str) -> None:
    with pytest.raises(PatchlightError, match=told):
        written(job=job)


def test_sbatch_reads_what_was_asked() -> None:
    job = Job("64%8", "1d12h", 8, 2, "32G", "big gpus", "me#1", "me@home.org", ["module load cuda"])
    assert list(read_by_sbatch(written(STRANGE, job))) == [
        "--job-name=small",
        "--array=1-64%8",
        "--time=1-12:00:00",
        "--partition=big gpus",
        "--account=me#1",
        "--cpus-per-task=8",
        "--gres=gpu:2",
        "--mem=32G",
        "--requeue",
        "--signal=TERM@60",
        "--open-mode=append",
        f"--output={STRANGE.replace('%', '%%')}/logs/%A_%a.log",
    ]


def test_bash_reads_it_without_complaint() -> None:
    full = Job(
        "64%8", "2h", 8, 2, "32G", "gpu", "me", "me@home.org", ["module load cuda", "source 'my venv'/bin/activate"]
    )
    for job in (written(), written(STRANGE, full, ("program", STRANGE))):
        done = subprocess.run(["bash", "-n"], input=job, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_task_runs_its_part_as_a_step(commands: Path) -> None:
    asked = ("program", "run", "a recipe.toml", "--out", STRANGE, "--model", f"{STRANGE}=x", "--set", "RISE.n=3")
    code, calls = ran(written(STRANGE, replace(JOB, cpus=8), asked), commands, task=3)
    words = [*asked[1:], "--shard", "3/64"]
    assert code == 0
    assert calls == [["srun", ["--cpus-per-task=8", "program", *words], ""], ["program", words, ""]]


def test_the_first_task_asks_once_for_the_report_after_the_array(commands: Path, tmp_path: Path) -> None:
    job = replace(JOB, account="me", partition="gpu", mail="me@home.org", setup=["export GREETING='good day'"])
    whole = written(STRANGE, job)
    _, calls = ran(whole, commands)
    name, options, body = calls[0]
    assert name == "sbatch"
    assert options[-1] == "--dependency=afterany:77"
    assert {"--account=me", "--partition=gpu", "--mail-user=me@home.org", "--mail-type=END,FAIL"} <= set(options)
    assert f"--output={STRANGE.replace('%', '%%')}/logs/report.log" in options
    assert [call[0] for call in calls] == ["sbatch", "srun", "program"]
    _, calls = ran(body, commands)
    assert calls == [["program", ["report", STRANGE], ""]]
    _, calls = ran(whole, commands, SLURM_RESTART_COUNT="1")
    assert [call[0] for call in calls] == ["srun", "program"]


@pytest.mark.parametrize(("code", "queued"), [(0, False), (75, True), (3, False), (2, False)])
def test_a_task_that_was_asked_to_stop_is_queued_again(commands: Path, code: int, queued: bool) -> None:
    ended, calls = ran(written(), commands, task=5, code=code)
    assert ended == code
    assert (["scontrol", ["requeue", "77_5"], ""] in calls) == queued


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "it's small.toml"
    path.write_text(text(pictures(tmp_path / "my images", 4)))
    return path


def printed(recipe: Path, *words: str) -> str:
    asked = [
        "bench",
        "slurm",
        str(recipe),
        "--out",
        str(recipe.parent / "a run"),
        "--array",
        "2",
        "--time",
        "2h",
        *words,
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_line_passes_on_what_is_run(recipe: Path, commands: Path) -> None:
    chosen = ["--model", "Pocket=pocket", "--limit", "3", "--set", "Ins.steps=2", "--quick", "--seed", "7"]
    job = printed(recipe, *chosen, "--gpus", "1", "--setup", "patchlight() { program; }")
    assert (recipe.parent / "a run" / "logs").is_dir()
    assert "#SBATCH --gres=gpu:1\n" in job
    words = ran(job.replace(" patchlight bench", " program bench"), commands, task=2)[1][1][1]
    assert words[:3] == ["bench", "run", str(recipe)]
    assert words[-4:] == ["--out", str(recipe.parent / "a run"), "--shard", "2/2"]
    given = dict(pairwise(words))
    assert {"--model": "Pocket=pocket", "--limit": "3", "--set": "Ins.steps=2", "--seed": "7"}.items() <= given.items()
    assert "--quick" in words
    assert given["--device"] == "cuda"


def test_bad_words_are_refused_and_nothing_is_made(recipe: Path) -> None:
    asked = ["bench", "slurm", str(recipe), "--out", str(recipe.parent / "run"), "--array", "2", "--time", "later"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 'later' is not a valid duration; give hours and minutes")
    assert not (recipe.parent / "run").exists()


@pytest.mark.slow
def test_the_tasks_of_an_array_do_the_whole_run(recipe: Path, commands: Path) -> None:
    job = printed(recipe)
    code, calls = ran(job, commands)
    assert code == 0
    assert ran(job, commands, task=2)[0] == 0
    out = recipe.parent / "a run"
    run(parse(recipe.read_text()), recipe.parent / "local")
    assert rows(out) == rows(recipe.parent / "local")
    report = next(body for name, _, body in calls if name == "sbatch")
    assert subprocess.run(["bash"], input=report, text=True).returncode == 0
    assert (out / "report.html").stat().st_size > 100_000


@pytest.mark.slow
def test_a_task_asked_to_stop_is_queued_again_and_resumes(recipe: Path, commands: Path) -> None:
    slow = recipe.parent / "slow.py"
    slow.write_text(SLOW)
    recipe.write_text(recipe.read_text().replace("[methods]", '[methods]\nSlow = "test-slow"'))
    with restored():
        job = printed(recipe, "--plugin", str(slow))
    units = recipe.parent / "a run" / "shards" / "1-of-2" / "units"

    def stop() -> None:
        while not units.is_dir() or not any(units.glob("*.parquet")):
            time.sleep(0.05)
        os.kill(int((commands.parent / "told.pid").read_text()), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    code, calls = ran(job, commands)
    assert code == 75
    assert ["scontrol", ["requeue", "77_1"], ""] in calls
    before = {path.name for path in units.iterdir()}
    code, calls = ran(job, commands, SLURM_RESTART_COUNT="1")
    assert code == 0
    assert [call[0] for call in calls] == ["srun"]
    assert before < {path.name for path in units.iterdir()}


def test_the_page_shows_the_file_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    shown = page.partition("```bash\n")[2].partition("```")[0]
    asked = page.partition("patchlight bench slurm tis-table-1 ")[2].partition(" > job.sh")[0].replace("\\\n", "")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "slurm", "tis-table-1", *shlex.split(asked)])
    assert result.stdout == shown
