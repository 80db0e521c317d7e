"""`patchlight bench`: run a recipe into a folder, see how far it is, and make tables and a report of it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import (
    SOME_FAILED,
    AsJson,
    Debug,
    Device,
    NoPretrained,
    Plugin,
    Sigmoid,
    answering,
    print_json,
    progress,
    read_settings,
    say,
)
from patchlight.cli.complete import complete_model, one_of
from patchlight.cli.recipes import RecipeGiven, list_recipes
from patchlight.errors import PatchlightError
from patchlight.progress import alone, clock

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from patchlight.bench.events import Event, Listener
    from patchlight.bench.local import Summary
    from patchlight.bench.recipe import Recipe
    from patchlight.bench.rows import Row

bench = typer.Typer(name="bench", help="Measure methods on a model and data, as a recipe says.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="DIR")]
SHOWN = 8
bench.command("list")(list_recipes)


@bench.command()
def run(
    recipe: RecipeGiven,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was broken off goes on.")],
    quick: Annotated[bool, typer.Option("--quick", help="With the recipe's quick settings.")] = False,
    images: Annotated[int | None, typer.Option(min=1, help="How many images, spread over the data.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=NAME: your model for the recipe's of that label (NAME, if it has one); repeatable.",
            autocompletion=complete_model,
        ),
    ] = None,
    weights: Annotated[list[str] | None, typer.Option(help="Weights of each --model, in order.")] = None,
    labels: Annotated[list[str] | None, typer.Option(help="Class names of each --model, in order.")] = None,
    preprocess: Annotated[
        list[str] | None,
        typer.Option(help="How images of each --model are prepared, in order: a processor's folder, or a file."),
    ] = None,
    sigmoid: Sigmoid = False,
    no_pretrained: NoPretrained = False,
    data: Annotated[str | None, typer.Option(help="Folder of the data, or KIND:FOLDER.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Class to explain: label or prediction.", autocompletion=one_of("label", "prediction")),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a method or metric of the recipe: label.key=value.")
    ] = None,
    plugin: Plugin = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.")] = None,
    device: Device = "cpu",
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print events, a line of JSON each.")] = False,
    debug: Debug = False,
) -> None:
    """Run a recipe. What is done already is left alone; failures are counted and do not stop it."""
    with answering(as_json, debug):
        with progress("reading the recipe"):
            from patchlight.anatomy.preprocessing import as_spec
            from patchlight.bench.local import run as run_local
            from patchlight.bench.recipe import override, read_recipe

            read, text = read_recipe(recipe)
            own = read_settings([*read.methods, *read.metrics], settings or [])
            about = {"labels": labels or (), "preprocess": [as_spec(each) for each in preprocess or ()]}
            flags = {"sigmoid": sigmoid or None, "pretrained": False if no_pretrained else None}
            chosen = override(
                read, model or (), weights or (), data, images, quick, seed, target, own, about=about, flags=flags
            )
        try:
            with _watching(chosen, as_json) as listen:
                summary = run_local(chosen, out, text=text, device=device, quick=quick, retry=retry, listen=listen)
        except KeyboardInterrupt:
            say(f"stopped; what is done is kept in '{out}', and the same command goes on")
            raise
        if not as_json:
            _conclude(summary, out)
        if summary.failures:
            raise typer.Exit(SOME_FAILED)


@bench.command()
def status(folder: Folder, as_json: AsJson = False, debug: Debug = False) -> None:
    """How far a run is, and what failed."""
    with answering(as_json, debug):
        from patchlight.bench.store import Store

        store = Store(folder)
        manifest, failures = store.manifest(), store.failures()
        finished, damaged = store.finished()
        models = dict.fromkeys(shard.model for shard in manifest.shards)
        images = {m: sum(len(shard.images) for shard in finished if shard.model == m) for m in models}
        state = {
            "recipe": manifest.resolved.name,
            "quick": manifest.quick,
            "shards": len(manifest.shards),
            "done": len(finished),
            "images": images,
            "failures": failures,
            "damaged": len(damaged),
            "notes": manifest.notes,
        }
        if as_json:
            print_json(state)
            return
        quick = ", quick" if manifest.quick else ""
        print(f"{manifest.resolved.name}{quick}: {len(finished)} of {len(manifest.shards)} shards done")
        for model, count in images.items():
            print(f"  {model}: {count} images")
        if damaged:
            print(f"{len(damaged)} shards are damaged; run the benchmark again to mend them")
        _tell(failures, manifest.notes, print)


@bench.command()
def report(
    folder: Folder,
    html: Annotated[Path | None, typer.Option(help="Write the whole report to this file.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print the tables as LaTeX.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the numbers as CSV, timing columns last.")] = False,
    plugin: Plugin = None,
    debug: Debug = False,
) -> None:
    """The tables of a run: Markdown by default."""
    with answering(False, debug):
        if latex and csv:
            raise PatchlightError("--latex and --csv both print; give one of them")
        with progress("reading the run"):
            from patchlight.bench.html import write_html
            from patchlight.bench.tables import as_csv, as_latex, as_markdown, gather

            gathered = gather(folder)
        if html is not None:
            with progress("writing the report"):
                write_html(gathered, html)
            say(f"wrote {html}")
        if latex or csv or html is None:
            print(as_latex(gathered) if latex else as_csv(gathered) if csv else as_markdown(gathered), end="")
        for note in gathered.notes if latex or csv or html is not None else ():  # Markdown has them
            say(f"note: {note}")


def _conclude(summary: Summary, out: Path) -> None:
    total = f"{summary.shards} shard{'s' if summary.shards != 1 else ''}"
    done = f"{summary.before} of {total} done already" if summary.before else total
    partly = f", {summary.partly} partly" if summary.partly else ""
    say(f"{done}{partly}; {summary.shards - summary.before} run now")
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
def _watching(recipe: Recipe, as_json: bool) -> Iterator[Listener]:
    """A listener: lines of JSON, a live display on a terminal, or silence."""
    if as_json:
        yield _print_event
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda event: None
        return
    board = Board(recipe)
    with alone(), Live(get_renderable=board.show, console=console, refresh_per_second=4, transient=True):
        yield board.listen


def _print_event(event: Event) -> None:
    from patchlight.bench.rows import failed

    told = {"event": event.event, **vars(event)}
    if "rows" in told:
        told["failed"] = failed(told.pop("rows"))
    print(json.dumps(told), flush=True)


@dataclass
class Board:
    """The live display: shards done, rate, time left, failures, and the means so far."""

    recipe: Recipe
    shards: int = 0
    done: int = 0
    before: int = 0
    images: int = 0
    failed: int = 0
    now: str = "loading the model"
    begun: float = field(default_factory=time.monotonic)
    sums: dict[tuple[str, str, str], tuple[float, int]] = field(default_factory=dict)

    def listen(self, event: Event) -> None:
        from patchlight.bench.events import Planning, ShardEnd, ShardStart, Start, Step

        match event:
            case Start():
                self.shards, self.done, self.before = event.shards, event.done, event.done
                self.begun = time.monotonic()
            case Planning():
                self.now = f"reading the images, {event.read} of {event.images}"
            case ShardStart():
                self.now = f"{event.model}, {event.images} images"
            case Step():
                self.now = f"{event.stage} {event.method}"
            case ShardEnd():
                self.count(event.rows)

    def count(self, rows: Sequence[Row]) -> None:
        """A shard is done, with these rows."""
        self.done += 1
        self.images += len({row.image for row in rows})
        for row in rows:
            self.failed += bool(row.error)
            if row.value is not None:
                key = row.model, row.method, row.metric
                total, count = self.sums.get(key, (0.0, 0))
                self.sums[key] = total + row.value, count + 1

    def show(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        spent = time.monotonic() - self.begun
        since = self.done - self.before
        left = spent / since * (self.shards - self.done) if since else None
        line = f"{self.done} of {self.shards} shards"
        line += f" ({self.before} done already)" if self.before else ""
        line += f"  {self.images / spent:.2f} images/s, {clock(left)} left" if left is not None else ""
        line += f"  {self.failed} values failed" if self.failed else ""
        bar = ProgressBar(total=max(self.shards, 1), completed=self.done, width=60)
        return Group(Text(line), bar, Text(self.now, style="dim"), *self._tables())

    def _tables(self) -> Iterator[Table]:
        from rich.table import Table

        for model in self.recipe.models:
            if not any(key[0] == model for key in self.sums):
                continue
            table = Table("mean so far", *self.recipe.metrics, title=model, box=None, pad_edge=False)
            for method in self.recipe.methods:
                found = [self.sums.get((model, method, n)) for n in self.recipe.metrics]
                shown = [
                    f"{s[0] / s[1] * m.scale:.{m.digits}f}" if s else "–"
                    for s, m in zip(found, self.recipe.metrics.values(), strict=True)
                ]
                table.add_row(method, *shown)
            yield table
