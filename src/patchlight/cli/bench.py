"""`patchlight bench`: run a recipe into a folder, see how far it is, and make tables and a report of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import SOME_FAILED, print_json, progress, say
from patchlight.cli.options import AsJson, Plugin, command
from patchlight.cli.planning import plan_run
from patchlight.cli.recipes import RecipeOptions, list_recipes
from patchlight.cli.sharing import compare, export, merge, print_per_image, tell_unused
from patchlight.cli.slurm import print_job
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.bench.events import Event, Listener
    from patchlight.bench.local import Summary

bench = typer.Typer(name="bench", help="Measure methods on a model and data, as a recipe says.", no_args_is_help=True)
Out = Annotated[Path, typer.Option(help="Folder of the run; one that was broken off goes on.")]
Folder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="DIR")]
SHOWN = 8
bench.command("list")(list_recipes)
bench.command("plan")(plan_run)
bench.command("merge")(merge)
bench.command("compare")(compare)
bench.command("export")(export)
bench.command("slurm")(print_job)


@bench.command()
@command
def run(
    chosen: RecipeOptions,
    out: Out,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; with --device cuda:all one per GPU.")] = None,
    shard: Annotated[str | None, typer.Option(help="I/N: this part of the images, as in 3/16.")] = None,
    ray: Annotated[str | None, typer.Option(help="On a Ray cluster: auto, or HOST:PORT.", metavar="ADDRESS")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="An exported run, or another: what it knows is not measured again.", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print events, a line of JSON each.")] = False,
) -> None:
    """Run a recipe. What is done already is left alone; failures are counted and do not stop it.

    A run, or a shard of one, is the work of one process at a time. SIGTERM stops it after what it is doing, with exit
    code 75; the same command resumes it.
    """
    from patchlight.bench.executors import devices_of
    from patchlight.bench.local import PREEMPTED, RunOptions, preemptible
    from patchlight.bench.local import run as run_recipe
    from patchlight.bench.plan import WHOLE, Shard
    from patchlight.bench.share import bring

    options = RunOptions(
        text=chosen.text,
        quick=chosen.quick,
        retry=retry,
        shard=Shard.parse(shard) if shard is not None else WHOLE,
        device=chosen.device,
        workers=workers,
        ray=ray,
    )
    if source is not None:
        device = chosen.device if ray is not None else devices_of(chosen.device)[0]
        bring(source, out, chosen.recipe, device, progress=not as_json)
    try:
        with preemptible() as stop, _watching(as_json) as listen:
            summary = run_recipe(chosen.recipe, out, options, stop, listen)
    except KeyboardInterrupt:
        say(f"stopped; what is done is kept in '{out}', and the same command resumes it")
        raise
    if not as_json:
        _conclude(summary, out)
        if source is not None:
            tell_unused(source, out, summary)
    if stop.asked.is_set() and summary.left:
        raise typer.Exit(PREEMPTED)
    if summary.failures:
        raise typer.Exit(SOME_FAILED)


@bench.command()
@command
def status(folder: Folder, as_json: AsJson = False) -> None:
    """How far a run is, and what failed."""
    from patchlight.bench.store import Store

    store = Store(folder)
    manifest, results = store.manifest(), store.results()
    models = {
        model: sum(len(c) - c.undone for (label, *_), c in results.columns.items() if label == model)
        for model in manifest.resolved.models
    }
    done, workers = sum(models.values()), store.workers()
    state = {
        "recipe": manifest.resolved.name,
        "quick": manifest.quick,
        "values": manifest.values,
        "done": done,
        "incomplete": done < manifest.values,
        "models": models,
        "workers": workers,
        "failures": results.failures,
        "notes": [*manifest.notes, *results.notes],
    }
    if as_json:
        print_json(state)
        return
    quick = ", quick" if manifest.quick else ""
    incomplete = ", incomplete" if done < manifest.values else ""
    print(f"{manifest.resolved.name}{quick}: {done} of {manifest.values} values done{incomplete}")
    for model, count in models.items():
        print(f"  {model}: {count} of {manifest.values // len(models)}")
    for worker in workers:
        print(f"at work: {worker}")
    _tell(results.failures, [*manifest.notes, *results.notes], print)


@bench.command()
@command
def report(
    folder: Folder,
    html: Annotated[Path | None, typer.Option(help="Write the whole report to this file.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print the tables as LaTeX.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the numbers as CSV, timing columns last.")] = False,
    per_image: Annotated[bool, typer.Option("--per-image", help="Print a line of CSV for each value.")] = False,
    against: Annotated[
        str | None, typer.Option(help="A method of the run: add every other method's difference to it (Markdown).")
    ] = None,
    plugin: Plugin = None,
) -> None:
    """The tables of a run: Markdown by default."""
    printing = [f"--{name}" for name, given in (("latex", latex), ("csv", csv), ("per-image", per_image)) if given]
    if len(printing) > 1:
        raise PatchlightError(f"{printing[0]} and {printing[1]} both print; give one of them")
    if per_image and html is not None:
        raise PatchlightError("--per-image prints CSV and writes no report; leave out --html")
    if against is not None and (printing or html is not None):
        raise PatchlightError(f"--against adds a table to the Markdown; leave out {(*printing, '--html')[0]}")
    if per_image:
        print_per_image(folder)
        return
    with progress("reading the run"):
        from patchlight.bench.html import write_html
        from patchlight.bench.tables import as_csv, as_latex, as_markdown, read_tables

        tables = read_tables(folder)
    if html is not None:
        with progress("writing the report"):
            write_html(tables, html)
        say(f"wrote {html}")
    if latex or csv or html is None:
        print(as_latex(tables) if latex else as_csv(tables) if csv else as_markdown(tables, against), end="")
    if latex or csv or html is not None:  # Markdown contains the notes
        for note in filter(None, (tables.incomplete, *tables.notes)):
            say(f"note: {note}")


def _conclude(summary: Summary, out: Path) -> None:
    done = f"{summary.before} of {summary.values} values done already" if summary.before else f"{summary.values} values"
    reused = f", {summary.reused} known from earlier" if summary.reused else ""
    left = f"; {summary.left} left, and the same command goes on" if summary.left else ""
    say(f"{done}; {summary.now - summary.reused} measured now{reused}{left}")
    _tell(summary.failures, summary.notes, say)
    say(f"`patchlight bench report {out}` shows the table")


def _tell(failures: Mapping[str, int], notes: Sequence[str], tell: Callable[[str], None]) -> None:
    if failures:
        tell(f"{sum(failures.values())} values failed:")
        for reason, count in list(failures.items())[:SHOWN]:
            tell(f"  {count} x {reason}")
        if len(failures) > SHOWN:
            tell(f"  and {len(failures) - SHOWN} other reasons")
    for note in notes:
        tell(f"note: {note}")


@contextlib.contextmanager
def _watching(as_json: bool) -> Iterator[Listener]:
    """A listener: lines of JSON, or a progress bar on a terminal."""
    if as_json:
        yield _print_event
        return
    with progress("loading the model") as show:
        yield partial(_show_event, show)


def _print_event(event: Event) -> None:
    from patchlight.bench.rows import failed

    told = {"event": event.event, **vars(event)}
    if "rows" in told:
        told["failed"] = failed(told.pop("rows"))
    print(json.dumps(told), flush=True)


def _show_event(show: Callable[..., None], event: Event) -> None:
    from patchlight.bench.events import Planning, Start, StepEnd, UnitEnd, UnitStart

    match event:
        case Start():
            show(total=event.values - event.done)
        case Planning():
            show(description=f"reading the images, {event.read} of {event.images}")
        case UnitStart():
            show(description=f"{event.model}, {', '.join(event.methods)}, {event.images} images")
        case StepEnd():
            show(description=f"{event.stage} {event.method}")
        case UnitEnd():
            show(advance=len(event.rows))
