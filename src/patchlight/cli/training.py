"""What the commands that train an explainer share: their options, the recipe, and the images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from patchlight.cli.common import read_settings
from patchlight.cli.complete import complete_training_recipe
from patchlight.cli.options import ImageList, ModelOptions, Settings

if TYPE_CHECKING:
    from patchlight.trained.recipe import TrainingRecipe

R = TypeVar("R", bound="TrainingRecipe")


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training, besides those of its model."""

    out: Annotated[Path, typer.Option(help="Folder for the explainer; an interrupted run there goes on.")]
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe, a TOML file or a bundled one's name; options given beside it win.",
            autocompletion=complete_training_recipe,
        ),
    ] = None
    data: Annotated[str | None, typer.Option(help="Folder of images, or of CIFAR-10; or KIND:FOLDER.")] = None
    listed: ImageList = None
    held_out: Annotated[
        str | None, typer.Option(help="Images the model was not trained on, to measure on at the end.")
    ] = None
    settings: Settings = None
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0
    resume: Annotated[bool, typer.Option(help="Whether a run that lies in the folder goes on.")] = True

    @property
    def changes(self) -> dict[str, Any]:
        """What --set says."""
        return read_settings(["train"], self.settings or [])["train"]

    def read(self, kind: type[R], model: ModelOptions, **changes: Any) -> R:
        """The recipe, if one was given, with what the options say, and those of the changes that are not None."""
        recipe = kind() if self.recipe is None else kind.read(self.recipe)
        given = {key: value for key, value in changes.items() if value is not None}
        given |= {"model": model.spec(recipe.model)}
        return recipe.model_copy(update=given).with_data(self.data, self.listed, self.held_out)


def advance(show: Callable[..., None], now: Any, words: str) -> None:
    """Show how far a training is."""
    show(description=words, completed=now.step, total=now.steps)


def print_use(model: str, method: str, out: Path) -> None:
    """Say how the explainer is used."""
    print(f"Use it: patchlight explain photo.jpg --model {model} --method {method} --explainer {out}")
