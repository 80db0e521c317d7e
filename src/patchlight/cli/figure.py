"""`patchlight figure`: draw a figure of a paper with your own model and images; `patchlight figures` lists them."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from patchlight.cli import common
from patchlight.cli.complete import complete_figure
from patchlight.cli.names import find_row, table
from patchlight.cli.options import ModelOptions, Plugin, command
from patchlight.cli.tables import describe
from patchlight.core.errors import PatchlightError


@command
def figure(
    *,
    name: Annotated[str | None, typer.Argument(autocompletion=complete_figure)] = None,
    model: ModelOptions,
    images: list[Path] | None = None,
    data: str | None = None,
    listed: str | None = None,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    target: str | None = None,
    other: str | None = None,
    other_weights: Path | None = None,
    explainer: Path | None = None,
    out: Path | None = None,
    numbers: Path | None = None,
    settings: list[str] | None = None,
    seed: int = 0,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Draw a figure of one of the papers with your own model and images."""
    if name is None:
        raise PatchlightError("no figure was named; `patchlight figures` lists all names")
    from patchlight.core.drawing.pictures import figure_format
    from patchlight.core.registry import resolve_settings, settings_of

    row = find_row(_rows(bool(model.plugin)), name, "figure")
    path = out or Path(f"{row['name']}.pdf")
    common.check_images(images or ())
    figure_format(path)
    own_settings = common.read_settings([row["name"]], settings or [], "figure")[row["name"]]
    from patchlight.data import KINDS, open_images
    from patchlight.report.figures import FIGURES, draw

    resolve_settings(row["name"], settings_of(FIGURES[row["name"]].function), {}, own_settings)
    if data is not None:
        KINDS.find(data)
    model.check(target)
    second = None if other is None else ModelOptions(other, other_weights, model.labels, device=model.device)
    if second is not None:
        second.check()
    common.check_new((path, numbers), force)
    with common.progress("loading the model"):
        vit = model.load()
        other_model = None if second is None else second.load()
        from patchlight.core.targets import read_class
        from patchlight.data.spec import DataSpec
        from patchlight.zoo import pocket

        dataset = open_images(images or [pocket.PHOTOS], data, vit.labels, listed)
        shown = dataset.select(DataSpec(kind=data or "folder", images=limit).select_indices(dataset.names))
        index = None if target is None else read_class(target, vit.outcomes, vit.labels)
    options: dict[str, Any] = {"target": index, "other": other_model, "explainer": explainer, "numbers": numbers}
    drawn = draw(row["name"], vit, shown, path, seed=seed, **options, **own_settings)
    width, height = (round(float(side), 2) for side in drawn.get_size_inches())
    if as_json:
        written = {"written": path, "inches": [width, height], "numbers": numbers}
        common.print_json({"figure": row["name"], "model": vit.name, "seed": seed, "settings": own_settings, **written})
    else:
        common.show(f"Wrote {path} ({width} x {height} inches){'' if numbers is None else f' and {numbers}'}")


@command
def figures(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_figure)] = None,
    plugin: Plugin = None,
    as_json: bool = False,
) -> None:
    """List the figures that `patchlight figure` draws, or the settings of one."""
    rows = _rows(bool(plugin))
    row = None if name is None else find_row(rows, name, "figure")
    if as_json:
        common.print_json(row or rows)
    elif row is not None:
        describe(row, {"Paper": row["paper"], "Needs": ", ".join(row["needs"])})
    else:
        cells = [(r["name"], r["paper"], r["shows"], ", ".join(r["needs"])) for r in rows]
        common.print_table(("figure", "in the paper", "what it shows", "needs"), cells)
        common.say("Details: patchlight figures NAME. Draw one: patchlight figure NAME --images FOLDER")


def _rows(plugins: bool) -> list[dict[str, Any]]:
    with common.progress("loading the figures"):
        rows: list[dict[str, Any]] = figure_rows() if plugins else table()["figures"]
    return rows


def figure_rows() -> list[dict[str, Any]]:
    """Every figure, with its text and settings."""
    from patchlight.report.figures import FIGURES, list_figures

    return [{**asdict(info), "text": inspect.getdoc(FIGURES[info.name].function) or ""} for info in list_figures()]
