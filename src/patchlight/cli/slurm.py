"""`patchlight bench slurm`: print a batch file that runs a recipe as a SLURM array."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from patchlight.cli.common import say, show_text
from patchlight.cli.options import command, option_words
from patchlight.cli.recipes import RecipeOptions


@command
def print_job(
    chosen: RecipeOptions,
    out: Path,
    array: str,
    time: str,
    cpus: Annotated[int | None, typer.Option(min=1)] = None,
    gpus: Annotated[int, typer.Option(min=0)] = 0,
    mem: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    mail: str | None = None,
    setup: list[str] | None = None,
) -> None:
    """Print a file for sbatch that runs a recipe as an array of tasks, and then writes the report.

    A task that is preempted or reaches its time limit is requeued and resumes.
    """
    from patchlight.bench.slurm import Job, script

    if gpus and chosen.device == "cpu":
        chosen = replace(chosen, device="cuda" if gpus == 1 else "cuda:all")
    job = Job(array, time, cpus, gpus, mem, partition, account, mail, setup or ())
    program = ["patchlight"] if setup else [sys.executable, "-m", "patchlight"]
    run = [*program, "bench", "run", *option_words(chosen), "--out", str(out)]
    report = [*program, "bench", "report", str(out), "--html", str(out / "report.html")]
    for plugin in chosen.plugin or ():
        report += ["--plugin", plugin]
    chosen.recipe.data.check_path()
    text = script(chosen.recipe.name, str(out), run, report, job)
    (out / "logs").mkdir(parents=True, exist_ok=True)  # SLURM writes there before the first task starts
    show_text(text)
    say("Start it with sbatch FILE. Progress: patchlight bench status FOLDER")
