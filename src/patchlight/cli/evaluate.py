"""`patchlight evaluate`: how far maps can be trusted, as a table, JSON or CSV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchlight.cli.common import (
    SOME_FAILED,
    console,
    print_json,
    progress,
    read_settings,
    say,
    split_names,
)
from patchlight.cli.complete import complete_methods, complete_metrics, complete_preset
from patchlight.cli.options import AsJson, DataKind, Force, ImageList, ModelOptions, Seed, Settings, command
from patchlight.core.errors import PatchlightError
from patchlight.core.files import check_writable, write_atomic

if TYPE_CHECKING:
    from patchlight.study.files import MeasuredFiles


@command
def evaluate(
    *,
    maps: Annotated[
        Path | None, typer.Argument(help="What `patchlight explain … --save` wrote.", metavar="[MAPS_DIR]")
    ] = None,
    images: Annotated[Path | None, typer.Option(help="The images: a folder, or one image.")] = None,
    metric: Annotated[
        str,
        typer.Option(help="Names, separated by commas (`patchlight metrics`).", autocompletion=complete_metrics),
    ] = "ins-del",
    method: Annotated[
        str | None,
        typer.Option(
            help="Methods to explain with first; with MAPS_DIR, those of its methods to measure.",
            autocompletion=complete_methods,
        ),
    ] = None,
    model: ModelOptions,
    target: Annotated[
        str | None, typer.Option(help="Class asked about, a name or index, or 'label'; else what the maps explain.")
    ] = None,
    data: DataKind = None,
    listed: ImageList = None,
    preset: Annotated[
        str | None, typer.Option(help="Preset of every metric, such as tis.", autocompletion=complete_preset)
    ] = None,
    settings: Settings = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="File for one line per image and metric.")] = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 16,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure explanations: saved maps, or methods that explain the images first."""
    if images is None:
        raise PatchlightError("no images were given; name their folder with --images FOLDER")
    if maps is None and method is None:
        raise PatchlightError("nothing to measure; give a folder of saved maps, or --method NAME")
    if not images.exists():
        raise PatchlightError(f"no image or folder at '{images}'")
    if csv_file is not None:
        check_writable(csv_file.parent)
        if csv_file.is_dir() or (csv_file.exists() and not force):
            raise PatchlightError(f"'{csv_file}' exists already; choose another file, or --force to replace it")
    metrics, methods = split_names(metric), split_names(method)
    named = [*metrics, *(methods if maps is None else [])]
    own = read_settings(named, settings or [], "metric", "metric or method" if named != metrics else "")
    from patchlight.data import open_images
    from patchlight.methods.requests import resolve
    from patchlight.metrics.base import resolve_metric
    from patchlight.study.files import FileLog, MeasureTask, find_maps, measure_files

    task = MeasureTask(
        [resolve_metric(name, ({"preset": preset} if preset else {}) | own[name]) for name in metrics],
        methods,
        [resolve(name, own[name]) for name in methods] if maps is None else [],
        target=target,
        seed=seed,
        batch_size=batch_size,
    )
    log = FileLog(say)
    with progress("loading the model") as show:
        vit = model.load()
        shown = open_images([images], data, vit.labels, listed)
        if maps is not None:
            saved, methods, shown = find_maps(maps, shown, methods, whole=listed is None)
            task = replace(task, saved=saved, methods=methods)
        show(description="measuring", total=len(shown) * len(methods))
        measured = measure_files(task, vit, shown, log, lambda count: show(advance=count))
    if as_json:
        about = {"model": vit.name, "target": target, "seed": seed, "results": measured.to_json()}
        errors = [{"image": name, "error": sentence} for name, sentence in log.errors]
        print_json(about | {"errors": errors, "warnings": log.warnings})
    else:
        _print(measured, vit.name, len(log.errors))
    if csv_file is not None:
        write_atomic(csv_file, measured.to_csv().encode(errors="surrogateescape"))
        say(f"Wrote {csv_file}")
    if log.errors:
        raise typer.Exit(SOME_FAILED)


def _print(measured: MeasuredFiles, model: str, failed: int) -> None:
    """A line per method and a column per metric."""
    from rich.table import Table

    from patchlight.core.statistics import FEWEST

    rows = [(method, own) for method, own in measured.evaluations.items() if own]
    headings = [f"{name} {one.arrow}" for name, one in rows[0][1].items()]
    counts = {len(measured.names[method]) for method, _ in rows}
    title = f"{model}, {' to '.join(map(str, sorted({min(counts), max(counts)})))} image(s), mean [95 % interval]"
    table = Table("method", *headings, title=title, title_justify="left", title_style="bold")
    for method, own in rows:
        table.add_row(method, *(one.summary for one in own.values()))
    console().print(table)
    if min(one.count for _, own in rows for one in own.values()) < FEWEST:
        print(f"no interval where fewer than {FEWEST} images have a value: too few to say how sure a mean is")
    if failed:
        print(f"{failed} failed; the means are over the others")
