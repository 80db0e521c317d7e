"""`patchlight bench list`: the recipes that come with the package, told without importing torch."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

import typer

from patchlight.cli.common import AsJson, Debug, answering, console, print_json, say
from patchlight.cli.complete import complete_recipe

RecipeGiven = Annotated[
    str,
    typer.Argument(
        help="A recipe: the name of a bundled one (`patchlight bench list`), or a TOML file.",
        metavar="RECIPE",
        autocompletion=complete_recipe,
    ),
]


def list_recipes(
    name: Annotated[
        str | None, typer.Argument(help="One recipe, to print its TOML.", autocompletion=complete_recipe)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the bundled recipes: whose tables they repeat, what is measured, on which models and data; or print one."""
    with answering(as_json, debug):
        if name is not None:
            from patchlight.core.recipes import read_text

            text = read_text(name)
            print_json(tomllib.loads(text)) if as_json else print(text, end="")
            return
        rows = recipe_rows()
        if as_json:
            print_json(rows)
            return
        from rich.table import Table

        table = Table("recipe", "paper", "measures", "models", "data", "methods", "metrics", box=None, pad_edge=False)
        for row in rows:
            words = [row["name"], row["paper"], *(", ".join(row[key]) for key in ("measures", "models")), row["data"]]
            table.add_row(*words, str(row["methods"]), str(row["metrics"]))
        console().print(table)
        say("`patchlight bench run NAME --out DIR` runs one, `patchlight bench list NAME` prints it")


def recipe_rows() -> list[dict[str, Any]]:
    """Every bundled recipe of the benchmark: whose it is, its metrics, models by label, data, and counts."""
    from patchlight.core.recipes import bundled

    rows = []
    for name, file in bundled("bench").items():
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
