"""`patchlight bench slurm`: a run as a SLURM array, printed as a file for sbatch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from patchlight.cli.common import say
from patchlight.cli.options import command, option_words
from patchlight.cli.recipes import RecipeOptions


@command
def print_job(
    chosen: RecipeOptions,
    out: Annotated[Path, typer.Option(help="Folder of the run, which all tasks see.")],
    array: Annotated[str, typer.Option(help="Tasks, each for an equal part of the images; 64%8: eight at once.")],
    time: Annotated[str, typer.Option(help="Time of a task: 2h, 90m, 1-12:00:00; one that needs more goes on later.")],
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors of a task.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a task; it runs there unless --device says otherwise.")] = 0,
    mem: Annotated[str | None, typer.Option(help="Memory of a task: 32G.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    mail: Annotated[str | None, typer.Option(help="Address that is told when the report is there.")] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of the shell to begin with: 'source venv/bin/activate'; repeatable."),
    ] = None,
) -> None:
    """Print a file for sbatch that runs a recipe as an array of tasks, and reports when all of them are over.

    A task that is preempted, or whose time is up, goes back into the queue and on from where it was.
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
    chosen.recipe.data.check_given()
    text = script(chosen.recipe.name, str(out), run, report, job)
    (out / "logs").mkdir(parents=True, exist_ok=True)  # where SLURM writes what tasks print, before they begin
    print(text, end="")
    say("`sbatch FILE` begins it; `patchlight bench status` tells how far it is")
