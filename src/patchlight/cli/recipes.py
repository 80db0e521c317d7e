"""The recipes of the benchmark: the options that choose one, and `patchlight bench list`, which imports no torch."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import print_json, print_table, progress, read_settings, say
from patchlight.cli.complete import complete_model, complete_recipe, one_of
from patchlight.cli.options import AsJson, Device, ImageList, NoPretrained, Plugin, Sigmoid, command

if TYPE_CHECKING:
    from patchlight.bench.recipe import Recipe


@dataclass(frozen=True)
class RecipeOptions:
    """The options that say what is run: `recipe` is the recipe as it is to be run, `text` its file's text."""

    name: Annotated[
        str,
        typer.Argument(
            help="A recipe: the name of a bundled one (`patchlight bench list`), or a TOML file.",
            metavar="RECIPE",
            autocompletion=complete_recipe,
        ),
    ]
    quick: Annotated[bool, typer.Option("--quick", help="With the recipe's quick settings.")] = False
    images: Annotated[int | None, typer.Option(min=1, help="How many images, spread over the data.")] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="LABEL=NAME: your model for the recipe's of that label (NAME, if it has one); repeatable.",
            autocompletion=complete_model,
        ),
    ] = None
    weights: Annotated[list[str] | None, typer.Option(help="Weights of each --model, in order.")] = None
    labels: Annotated[list[str] | None, typer.Option(help="Class names of each --model, in order.")] = None
    preprocess: Annotated[
        list[str] | None,
        typer.Option(help="How images of each --model are prepared, in order: a processor's folder, or a file."),
    ] = None
    sigmoid: Sigmoid = False
    no_pretrained: NoPretrained = False
    data: Annotated[str | None, typer.Option(help="Folder of the data, or KIND:FOLDER.")] = None
    listed: ImageList = None
    target: Annotated[
        str | None,
        typer.Option(help="Class to explain: label or prediction.", autocompletion=one_of("label", "prediction")),
    ] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of a method or metric of the recipe: label.key=value.")
    ] = None
    plugin: Plugin = None
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.")] = None
    device: Device = "cpu"

    @functools.cached_property
    def _read(self) -> tuple[Recipe, str]:
        with progress("reading the recipe"):
            from patchlight.anatomy.preprocessing import as_spec
            from patchlight.bench.recipe import override, read_recipe

            read, text = read_recipe(self.name)
            settings = read_settings([*read.methods, *read.metrics], self.settings or [])
            about = {"labels": self.labels or (), "preprocess": [as_spec(each) for each in self.preprocess or ()]}
            flags = {"sigmoid": self.sigmoid or None, "pretrained": False if self.no_pretrained else None}
            sizes = {key: getattr(self, key) for key in ("data", "images", "listed", "quick", "seed", "target")}
            given = {"models": self.model or (), "weights": self.weights or (), **sizes, "settings": settings}
            return override(read, **given, about=about, flags=flags), text

    @property
    def recipe(self) -> Recipe:
        return self._read[0]

    @property
    def text(self) -> str:
        return self._read[1]


@command
def list_recipes(
    name: Annotated[
        str | None, typer.Argument(help="One recipe, to print its TOML.", autocompletion=complete_recipe)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the bundled recipes: whose tables they repeat, what is measured, on which models and data; or print one."""
    if name is not None:
        from patchlight.core.recipes import read_text

        text = read_text(name)
        print_json(tomllib.loads(text)) if as_json else print(text, end="")
        return
    rows = recipe_rows()
    if as_json:
        print_json(rows)
        return
    keys = ("name", "paper", "measures", "models", "data", "methods", "metrics")
    cells = [[", ".join(row[key]) if key in ("measures", "models") else str(row[key]) for key in keys] for row in rows]
    print_table(("recipe", *keys[1:]), cells)
    say("`patchlight bench run NAME --out DIR` runs one, `patchlight bench list NAME` prints it")


def recipe_rows() -> list[dict[str, Any]]:
    """Every bundled recipe of the benchmark: whose it is, its metrics, models by label, data, and counts."""
    from patchlight.core.recipes import bundled_recipes

    rows = []
    for name, file in bundled_recipes("bench").items():
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        rows.append(
            {
                "name": name,
                "paper": recipe["paper"],
                "measures": list(dict.fromkeys(_named(recipe["metrics"], "metric").values())),
                "models": _named(recipe["models"], "name"),
                "data": recipe["data"]["kind"],
                "methods": len(recipe["methods"]),
                "metrics": len(recipe["metrics"]),
            }
        )
    return rows


def _named(table: dict[str, Any], key: str) -> dict[str, str]:
    """By label, what the entries of a recipe's table name; a lone string is a name."""
    return {label: own if isinstance(own, str) else own[key] for label, own in table.items()}
