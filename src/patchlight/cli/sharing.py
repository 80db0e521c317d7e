"""`patchlight bench merge`, `compare` and `export`: combine runs, compare them, and share them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import print_json, progress, say, show_text
from patchlight.cli.complete import one_of
from patchlight.cli.options import Plugin, command
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.bench.local import Summary


@command
def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="FOLDER")],
    out: Path,
    as_json: bool = False,
) -> None:
    """Combine runs of one recipe: shards, or other methods on the same images. Nothing is computed.

    Runs that do not belong together are refused. `bench run` can resume the result.
    """
    from patchlight.bench.share import merge as merge_runs

    merged = merge_runs(runs, out, progress=True)
    if as_json:
        print_json({"out": str(out), **vars(merged)})
        return
    for note in merged.notes:
        say(f"note: {note}")
    say(f"{merged.done} of {merged.values} values in '{out}'. Table: patchlight bench report {out}")


@command
def compare(
    first: Annotated[Path, typer.Argument(metavar="FIRST")],
    second: Annotated[Path, typer.Argument(metavar="SECOND")],
    style: Annotated[str, typer.Option(autocompletion=one_of("markdown", "csv"))] = "markdown",
    plugin: Plugin = None,
    as_json: bool = False,
) -> None:
    """Compare two runs on the images that both have, with an interval for every difference."""
    if style not in ("markdown", "csv"):
        raise PatchlightError(f"no format is called '{style}'; give markdown or csv")
    if style == "csv" and as_json:
        raise PatchlightError("--format csv and --json cannot be combined; give one of them")
    with progress("comparing the runs"):
        from patchlight.bench import compare as comparing

        comparison = comparing.compare(first, second)
    if as_json:
        print_json(comparing.as_json(comparison))
    elif style == "csv":
        show_text(comparing.as_csv(comparison))
        for note in (*comparison.incomplete, *(one.text for one in comparison.differences)):
            say(f"note: {note}")
    else:
        show_text(comparing.as_markdown(comparison))


@command
def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Path,
    licence: str | None = None,
    data_licence: str | None = None,
    as_json: bool = False,
) -> None:
    """Write a run for others: values per image as Parquet, maps and a data card. No local paths and no images.

    Others add their method with `bench run --from`; nothing in the export is measured again.
    """
    from patchlight.bench.share import export as export_run

    exported = export_run(folder, out, licence, data_licence, progress=True)
    if as_json:
        print_json({"out": str(out), **vars(exported)})
        return
    for note in exported.notes:
        say(f"note: {note}")
    for option, value in (("--licence", licence), ("--data-licence", data_licence)):
        if value is None:
            say(f"note: the data card has an unknown licence; name it with {option}")
    say(f"{exported.values} values in {exported.files} files. Read '{out / 'README.md'}' before you publish it.")


def print_per_image(folder: Path) -> None:
    """Print a line of CSV for each image, method and metric, one unit of the run at a time."""
    from patchlight.bench.opened import Opened, write_csv

    with progress("reading the run"):
        run = Opened(folder)
    sys.stdout.flush()
    write_csv(run, sys.stdout.buffer)


def explain_unused(source: Path, out: Path, summary: Summary) -> None:
    """If nothing of another run could be used, print why."""
    from patchlight.bench.compare import differences
    from patchlight.bench.store import Store

    if summary.reused or not summary.now:
        return
    reasons = differences(Store(source).manifest(), Store(out).manifest(), f"'{source}'", f"'{out}'")
    texts = "".join(f"; {one.text}" for one in reasons if one.incompatible)
    say(f"note: no value of '{source}' could be used{texts}")
