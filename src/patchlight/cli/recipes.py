"""Recipes of the benchmark: the options that choose one, and `patchlight bench list`, which imports no torch."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import print_json, print_table, progress, read_settings, say, show_text
from patchlight.cli.complete import complete_recipe, one_of
from patchlight.cli.options import Plugin, command
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.bench.recipe import Recipe


def data_place(images: str | None, kind: str | None) -> str | None:
    """The data set that --images and --data name, as a recipe writes it: `KIND:FOLDER` or `FOLDER`."""
    if kind is None:
        return images
    if images is None:
        name, _, folder = kind.partition(":")
        raise PatchlightError(f"--data is a kind of data set; write --images {folder or 'FOLDER'} --data {name}")
    from patchlight.data import KINDS

    KINDS.find(kind)
    return f"{kind}:{images}"


@dataclass(frozen=True)
class RecipeOptions:
    """The options that choose and change a recipe: `recipe` is the result, `text` the text of its file."""

    name: Annotated[str, typer.Argument(metavar="RECIPE", autocompletion=complete_recipe)]
    quick: bool = False
    images: str | None = None
    data: str | None = None
    listed: str | None = None
    limit: Annotated[int | None, typer.Option(min=1)] = None
    model: list[str] | None = None
    weights: list[str] | None = None
    labels: list[str] | None = None
    preprocess: list[str] | None = None
    sigmoid: bool = False
    no_pretrained: bool = False
    target: Annotated[str | None, typer.Option(autocompletion=one_of("label", "prediction"))] = None
    settings: list[str] | None = None
    plugin: Plugin = None
    seed: int | None = None
    device: str = "cpu"

    @functools.cached_property
    def _read(self) -> tuple[Recipe, str]:
        with progress("reading the recipe"):
            from patchlight.anatomy.preprocessing import as_spec
            from patchlight.bench.recipe import override, read_recipe

            read, text = read_recipe(self.name)
            settings = read_settings([*read.methods, *read.metrics], self.settings or [])
            per_model = {"labels": self.labels or (), "preprocess": [as_spec(each) for each in self.preprocess or ()]}
            flags = {"sigmoid": self.sigmoid or None, "pretrained": False if self.no_pretrained else None}
            options = {key: getattr(self, key) for key in ("listed", "quick", "seed", "target")}
            options |= {"data": data_place(self.images, self.data), "images": self.limit, "settings": settings}
            models: dict[str, Any] = {
                "models": self.model or (),
                "weights": self.weights or (),
                "model_options": per_model,
                "flags": flags,
            }
            return override(read, **options, **models), text

    @property
    def recipe(self) -> Recipe:
        return self._read[0]

    @property
    def text(self) -> str:
        return self._read[1]


@command
def list_recipes(
    name: Annotated[str | None, typer.Argument(autocompletion=complete_recipe)] = None,
    as_json: bool = False,
) -> None:
    """List the bundled recipes with their papers, metrics, models and data, or print one."""
    if name is not None:
        from patchlight.core.recipes import read_text

        text = read_text(name)
        print_json(tomllib.loads(text)) if as_json else show_text(text)
        return
    rows = recipe_rows()
    if as_json:
        print_json(rows)
        return
    keys = ("name", "paper", "measures", "models", "data", "methods", "metrics")
    cells = [[", ".join(row[key]) if key in ("measures", "models") else str(row[key]) for key in keys] for row in rows]
    print_table(("recipe", *keys[1:]), cells)
    say("Run one: patchlight bench run NAME --out FOLDER. Print one: patchlight bench list NAME")


def recipe_rows() -> list[dict[str, Any]]:
    """Every bundled recipe of the benchmark: its paper, metrics, models by label, data, and counts."""
    from patchlight.core.recipes import bundled_recipes

    rows = []
    for name, file in bundled_recipes("bench").items():
        recipe = tomllib.loads(file.read_text(encoding="utf-8"))
        rows.append(
            {
                "name": name,
                "paper": recipe["paper"],
                "measures": list(dict.fromkeys(_by_label(recipe["metrics"], "metric").values())),
                "models": _by_label(recipe["models"], "name"),
                "data": recipe["data"]["kind"],
                "methods": len(recipe["methods"]),
                "metrics": len(recipe["metrics"]),
            }
        )
    return rows


def _by_label(table: dict[str, Any], key: str) -> dict[str, str]:
    """By label, the names in a recipe's table; an entry that is only text is a name."""
    return {label: entry if isinstance(entry, str) else entry[key] for label, entry in table.items()}
