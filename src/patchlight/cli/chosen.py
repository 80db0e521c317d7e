"""What is run: the options that commands of the benchmark have in common, and the recipe they choose."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from patchlight.cli.common import Device, ImageList, NoPretrained, Plugin, Sigmoid, progress, read_settings
from patchlight.cli.complete import complete_model, one_of
from patchlight.cli.recipes import RecipeGiven

if TYPE_CHECKING:
    from patchlight.bench.recipe import Recipe


@dataclass(frozen=True)
class Chosen:
    """A recipe as it is to be run, its text, and what was given for it at the command line."""

    given: dict[str, Any]

    @property
    def device(self) -> str:
        return str(self.given["device"])

    @property
    def quick(self) -> bool:
        return bool(self.given["quick"])

    @functools.cached_property
    def _read(self) -> tuple[Recipe, str]:
        with progress("reading the recipe"):
            return self._chosen()

    def _chosen(self) -> tuple[Recipe, str]:
        from patchlight.anatomy.preprocessing import as_spec
        from patchlight.bench.recipe import override, read_recipe

        given = self.given
        read, text = read_recipe(given["recipe"])
        about = {"labels": given["labels"] or (), "preprocess": [as_spec(each) for each in given["preprocess"] or ()]}
        flags = {"sigmoid": given["sigmoid"] or None, "pretrained": False if given["no_pretrained"] else None}
        own = read_settings([*read.methods, *read.metrics], given["settings"] or [])
        models = given["model"] or (), given["weights"] or ()
        sizes = {name: given[name] for name in ("data", "images", "listed", "quick", "seed", "target")}
        return override(read, *models, **sizes, settings=own, about=about, flags=flags), text

    @property
    def recipe(self) -> Recipe:
        return self._read[0]

    @property
    def text(self) -> str:
        """The recipe as it was written."""
        return self._read[1]

    @property
    def words(self) -> list[str]:
        """The words at the command line that choose the same."""
        found = [str(self.given["recipe"])]
        for name, value in self.given.items():
            option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
            if name == "recipe" or value is None or value is False:
                continue
            for one in value if isinstance(value, list) else [value]:
                found += [option] if one is True else [option, str(one)]
        return found


OPTIONS = {"settings": "--set", "listed": "--list"}
"""Options that are not called as their parameters are."""


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options that say what is run, before its own; it is given them as `chosen`."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in wanted}
        command(chosen=Chosen(given), **own)

    mine, shared = _parameters(command), _parameters(_options)
    wanted = [name for name in mine if name != "chosen"]
    every = [*shared.values(), *(mine[name] for name in wanted)]
    every.sort(key=lambda one: one.default is not inspect.Parameter.empty)
    run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in every}
    del run.__wrapped__
    return run


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    hints = get_type_hints(function, {**function.__globals__, "Chosen": Chosen}, include_extras=True)
    found = inspect.signature(function).parameters
    return {
        name: one.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY) for name, one in found.items()
    }


def _options(
    recipe: RecipeGiven,
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
    listed: ImageList = None,
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
) -> None:
    """What `choosing` gives a command."""
