"""`patchlight bench merge`, `compare` and `export`: runs put together, side by side, and given to others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import print_json, progress, say
from patchlight.cli.options import AsJson, Plugin, command
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.bench.local import Summary

Runs = Annotated[list[Path], typer.Argument(help="Folders of runs, or exports of them.", metavar="DIR...")]
New = Annotated[Path, typer.Option(help="An empty folder, or one that is yet to be made.")]


@command
def merge(runs: Runs, out: New, as_json: AsJson = False) -> None:
    """Put runs of one recipe together: shards, or other methods on the same images. Nothing is computed.

    What does not belong together is refused. The result is a run like any other, which `bench run` goes on with.
    """
    from patchlight.bench.share import merge as merge_runs

    merged = merge_runs(runs, out, progress=True)
    if as_json:
        print_json({"out": str(out), **vars(merged)})
        return
    for note in merged.notes:
        say(f"note: {note}")
    say(f"{merged.done} of {merged.values} values in '{out}'; `patchlight bench report {out}` shows the table")


@command
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="FIRST")],
    second: Annotated[Path, typer.Argument(help="The folder of another.", metavar="SECOND")],
    csv: Annotated[bool, typer.Option("--csv", help="Print the numbers as CSV.")] = False,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Two runs side by side on the images both have: what differs between them, and every difference's interval."""
    if csv and as_json:
        raise PatchlightError("--csv and --json both print; give one of them")
    with progress("comparing the runs"):
        from patchlight.bench import compare as comparing

        found = comparing.compare(first, second)
    if as_json:
        print_json(comparing.as_json(found))
        return
    print(comparing.as_csv(found) if csv else comparing.as_markdown(found), end="")
    for note in (*found.incomplete, *(one.text for one in found.differences)) if csv else ():  # Markdown contains them
        say(f"note: {note}")


@command
def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.", metavar="DIR")],
    out: New,
    licence: Annotated[str | None, typer.Option(help="Licence of the values and maps, as in CC-BY-4.0.")] = None,
    data_licence: Annotated[str | None, typer.Option(help="Licence of the images they were made from.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run for others: per-image Parquet, maps, a data card; no path of this machine, and no image.

    They add a method of theirs with `bench run --from`, and nothing that is there is measured again.
    """
    from patchlight.bench.share import export as export_run

    exported = export_run(folder, out, licence, data_licence, progress=True)
    if as_json:
        print_json({"out": str(out), **vars(exported)})
        return
    for note in exported.notes:
        say(f"note: {note}")
    for option, given in (("--licence", licence), ("--data-licence", data_licence)):
        if given is None:
            say(f"note: the card says that a licence is unknown; {option} names it")
    say(f"{exported.values} values in {exported.files} files; read '{out / 'README.md'}' before you publish it")


def print_per_image(folder: Path) -> None:
    """A line of CSV for each image, method and metric, a unit at a time."""
    from patchlight.bench.opened import Opened, write_csv

    with progress("reading the run"):
        run = Opened(folder)
    sys.stdout.flush()
    write_csv(run, sys.stdout.buffer)


def tell_unused(source: Path, out: Path, summary: Summary) -> None:
    """Where nothing of another run could be used, say why."""
    from patchlight.bench.compare import differences
    from patchlight.bench.store import Store

    if summary.reused or not summary.now:
        return
    told = differences(Store(source).manifest(), Store(out).manifest(), f"'{source}'", f"'{out}'")
    say(f"note: nothing of '{source}' could be used" + "".join(f"; {one.text}" for one in told if one.incompatible))
