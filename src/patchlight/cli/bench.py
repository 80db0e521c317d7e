"""`patchlight bench`: run a recipe into a folder, show its status, and make tables and a report of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import SOME_FAILED, print_json, progress, say, show, show_text
from patchlight.cli.complete import one_of
from patchlight.cli.options import Plugin, add_commands, command, group
from patchlight.cli.planning import plan_run
from patchlight.cli.recipes import RecipeOptions, list_recipes
from patchlight.cli.sharing import compare, explain_unused, export, merge, print_per_image
from patchlight.cli.slurm import print_job
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.files import write_atomic

if TYPE_CHECKING:
    from patchlight.bench.events import Event, Listener
    from patchlight.bench.local import Summary

bench = group("bench", "Measure methods on models and data, as a recipe describes.")
Folder = Annotated[Path, typer.Argument(metavar="FOLDER")]
REASONS_SHOWN = 8
STYLES = ("markdown", "latex", "csv", "per-image")


@command
def run(
    chosen: RecipeOptions,
    out: Path,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    shard: str | None = None,
    ray: str | None = None,
    retry: bool = False,
    source: Path | None = None,
    as_json: bool = False,
) -> None:
    """Run a recipe. Finished values are kept; failures are counted and do not stop the run.

    Only one process may work on a run, or on a shard of it. SIGTERM stops it after the current step with exit code 75;
    the same command resumes it.
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
        say(f"stopped; finished values are kept in '{out}', and the same command resumes the run")
        raise
    if not as_json:
        _print_summary(summary, out)
        if source is not None:
            explain_unused(source, out, summary)
    if stop.is_set() and summary.left:
        raise typer.Exit(PREEMPTED)
    if summary.failures:
        raise typer.Exit(SOME_FAILED)


@command
def status(folder: Folder, as_json: bool = False) -> None:
    """Show how much of a run is done, and what failed."""
    from patchlight.bench.store import Store

    store = Store(folder)
    manifest, results = store.manifest(), store.results()
    models = {
        model: sum(len(c) - c.undone for (label, *_), c in results.columns.items() if label == model)
        for model in manifest.resolved.models
    }
    done, workers = sum(models.values()), store.workers()
    notes, incomplete = [*manifest.notes, *results.notes], done < manifest.values
    if as_json:
        recipe = {"recipe": manifest.resolved.name, "quick": manifest.quick, "values": manifest.values, "done": done}
        state = {"incomplete": incomplete, "models": models, "workers": workers, "failures": results.failures}
        print_json({**recipe, **state, "notes": notes})
        return
    name = f"{manifest.resolved.name}{', quick' if manifest.quick else ''}"
    show(f"{name}: {done} of {manifest.values} values done{', incomplete' if incomplete else ''}")
    for model, count in models.items():
        show(f"  {model}: {count} of {manifest.values // len(models)}")
    for worker in workers:
        show(f"running: {worker}")
    _print_failures(results.failures, notes, show)


@command
def report(
    folder: Folder,
    html: Path | None = None,
    style: Annotated[str | None, typer.Option(autocompletion=one_of(*STYLES))] = None,
    baseline: str | None = None,
    plugin: Plugin = None,
) -> None:
    """Print the tables of a run, or write a report."""
    if style is not None and style not in STYLES:
        raise PatchlightError(f"no format is called '{style}'; {nearest(style, STYLES)}")
    if style == "per-image" and html is not None:
        raise PatchlightError("--format per-image prints CSV and cannot be combined with --html")
    if baseline is not None and (style not in (None, "markdown") or html is not None):
        raise PatchlightError("--baseline adds a table to the Markdown; leave out --html and --format")
    if style == "per-image":
        print_per_image(folder)
        return
    with progress("reading the run"):
        from patchlight.bench.html import as_html
        from patchlight.bench.tables import as_csv, as_latex, as_markdown, read_tables

        tables = read_tables(folder)
    if html is not None:
        with progress("writing the report"):
            write_atomic(html, as_html(tables).encode(errors="backslashreplace"))
        say(f"Wrote {html}")
    if style is not None or html is None:
        show_text({"latex": as_latex, "csv": as_csv}.get(style or "", partial(as_markdown, against=baseline))(tables))
    if style in ("latex", "csv") or html is not None:  # Markdown contains the notes
        for note in filter(None, (tables.incomplete, *tables.notes)):
            say(f"note: {note}")


def _print_summary(summary: Summary, out: Path) -> None:
    done = f"{summary.before} of {summary.values} values were done" if summary.before else f"{summary.values} values"
    reused = f", {summary.reused} reused" if summary.reused else ""
    left = f"; {summary.left} left: run the same command to resume" if summary.left else ""
    say(f"{done}; {summary.now - summary.reused} measured now{reused}{left}")
    _print_failures(summary.failures, summary.notes, say)
    say(f"Table: patchlight bench report {out}")


def _print_failures(failures: Mapping[str, int], notes: Sequence[str], print_line: Callable[[str], None]) -> None:
    if failures:
        print_line(f"{sum(failures.values())} values failed:")
        for reason, count in list(failures.items())[:REASONS_SHOWN]:
            print_line(f"  {count} x {reason}")
        if len(failures) > REASONS_SHOWN:
            print_line(f"  and {len(failures) - REASONS_SHOWN} other reasons")
    for note in notes:
        print_line(f"note: {note}")


@contextlib.contextmanager
def _watching(as_json: bool) -> Iterator[Listener]:
    """A listener that prints lines of JSON, or updates a progress bar."""
    if as_json:
        yield _print_event
        return
    with progress("loading the model") as update:
        yield partial(_show_event, update)


def _print_event(event: Event) -> None:
    fields = {"event": event.event, **vars(event)}
    if "rows" in fields:
        fields["failed"] = sum(bool(row.error) for row in fields.pop("rows"))
    print(json.dumps(fields), flush=True)


def _show_event(update: Callable[..., None], event: Event) -> None:
    from patchlight.bench.events import Planning, Start, StepEnd, UnitEnd, UnitStart

    match event:
        case Start():
            update(total=event.values - event.done)
        case Planning():
            update(description=f"reading the images, {event.read} of {event.images}")
        case UnitStart():
            update(description=f"{event.model}, {', '.join(event.methods)}, {event.images} images")
        case StepEnd():
            update(description=f"{event.stage} {event.method}")
        case UnitEnd():
            update(advance=len(event.rows))


add_commands(bench, list=list_recipes, plan=plan_run, run=run, status=status, report=report)
add_commands(bench, merge=merge, compare=compare, export=export, slurm=print_job)
