"""`patchlight figure`: a figure of a paper by name, drawn with one's own model and images; `--list` tells which."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli.common import print_json, print_table, progress, read_settings, say, showing_warnings
from patchlight.cli.complete import complete_figure, complete_model
from patchlight.cli.names import Row, find_row, known_names, table
from patchlight.cli.options import AsJson, DataKind, ModelOptions, Seed, Settings, command
from patchlight.cli.tables import describe
from patchlight.core.errors import PatchlightError, nearest


@command
def figure(
    *,
    name: Annotated[
        str | None,
        typer.Argument(help="Which figure (`patchlight figure --list`).", autocompletion=complete_figure),
    ] = None,
    tell: Annotated[bool, typer.Option("--list", help="List the figures, or with NAME the settings of one.")] = False,
    model: ModelOptions,
    images: Annotated[
        list[Path] | None, typer.Option(help="Images: a folder, or files; repeatable.", metavar="PATH")
    ] = None,
    data: DataKind = None,
    listed: Annotated[
        str | None,
        typer.Option(
            "--image-list", help="A text file of the images to use: names or indices, one per line.", metavar="FILE"
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Take this many of the images, evenly spread over them.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Class to explain, a name or index; else the label where known, or prediction.")
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="A second model, where a figure has two.", autocompletion=complete_model)
    ] = None,
    other_weights: Annotated[Path | None, typer.Option(help="Weights of the second model.")] = None,
    explainer: Annotated[Path | None, typer.Option(help="Folder of a trained explainer, where one is needed.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write: .pdf, .svg or .png; by default NAME.pdf.")] = None,
    numbers: Annotated[
        Path | None, typer.Option(help="File for the numbers that the figure shows: .csv or .json.")
    ] = None,
    settings: Settings = None,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw a figure of one of the papers, by name, with your own model and images."""
    if tell or name is None:
        if name is None and not tell:
            raise PatchlightError("no figure was named; `patchlight figure --list` lists them")
        _tell(name, bool(model.plugin), as_json)
        return
    row = _row(_rows(bool(model.plugin)), name)
    path = out or Path(f"{row['name']}.pdf")
    _check(path, numbers, images, force)
    own = read_settings([row["name"]], settings or [], "figure")[row["name"]]
    _check_settings(row, own)
    with progress("loading the model"):
        vit = model.load()
        second = None if other is None else ModelOptions(other, other_weights, model.labels, device=model.device).load()
        from patchlight.core.targets import read_class
        from patchlight.data import open_images
        from patchlight.data.spec import DataSpec
        from patchlight.zoo import pocket

        every = open_images(images or [pocket.PHOTOS], data, vit.labels, listed)
        shown = every.select(DataSpec(kind=data or "folder", images=count).chosen(every.names))
        asked = None if target is None else read_class(target, vit.outcomes, vit.labels)
    from patchlight.report.figures import draw

    with showing_warnings():
        given: dict[str, Any] = {
            "target": asked,
            "other": second,
            "explainer": explainer,
            "numbers": numbers,
            "seed": seed,
        }
        drawn = draw(row["name"], vit, shown, path, **given, **own)
    width, height = (round(float(side), 2) for side in drawn.get_size_inches())
    if as_json:
        about = {"figure": row["name"], "model": vit.name, "seed": seed, "settings": own}
        table = None if numbers is None else str(numbers)
        print_json({**about, "written": str(path), "inches": [width, height], "numbers": table})
    else:
        beside = "" if numbers is None else f" and {numbers}"
        print(f"Wrote {path} ({width} x {height} inches){beside}")


def _check(path: Path, numbers: Path | None, images: list[Path] | None, force: bool) -> None:
    """Refuse, before anything slow is imported, what cannot be read or written."""
    missing = next((given for given in images or () if not given.exists()), None)
    if missing is not None:
        raise PatchlightError(f"no image or folder at '{missing}'")
    for written in filter(None, (path, numbers)):
        if written.is_dir() or (written.exists() and not force):
            raise PatchlightError(f"'{written}' exists already; choose another place, or --force to replace it")
    from patchlight.core.drawing.pictures import figure_format

    figure_format(path)


def _check_settings(row: dict[str, Any], own: dict[str, Any]) -> None:
    from patchlight.core.registry import resolve_settings, settings_of
    from patchlight.report.figures import FIGURES

    resolve_settings(row["name"], settings_of(FIGURES[row["name"]].function), {}, own)


def _rows(plugins: bool) -> list[dict[str, Any]]:
    with progress("loading the figures"):
        rows: list[dict[str, Any]] = figure_rows() if plugins else table()["figures"]
    return rows


def figure_rows() -> list[dict[str, Any]]:
    """All that is told of every figure."""
    from patchlight.report.figures import FIGURES, list_figures

    return [{**asdict(info), "text": inspect.getdoc(FIGURES[info.name].function) or ""} for info in list_figures()]


def _row(rows: list[Row], name: str) -> Row:
    """The figure of that name or alias, or what is near."""
    row = find_row(rows, name)
    if row is None:
        raise PatchlightError(f"no figure is called '{name}'; {nearest(name, known_names(rows))}")
    return row


def _tell(name: str | None, plugins: bool, as_json: bool) -> None:
    rows = _rows(plugins)
    if as_json:
        print_json(rows if name is None else _row(rows, name))
    elif name is not None:
        row = _row(rows, name)
        describe(row, f"{row['paper']}; needs {', '.join(row['needs'])}")
    else:
        headings = ("figure", "the paper's", "what it shows", "needs")
        print_table(headings, [(r["name"], r["paper"], r["shows"], ", ".join(r["needs"])) for r in rows])
        say(
            "`patchlight figure --list NAME` tells more; `patchlight figure NAME --images FOLDER --out fig.pdf` draws "
            "one"
        )
