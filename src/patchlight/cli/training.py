"""What the commands that train an explainer share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from patchlight.cli.common import read_settings, show
from patchlight.cli.complete import complete_recipe
from patchlight.cli.options import ModelOptions
from patchlight.cli.recipes import data_place

if TYPE_CHECKING:
    from patchlight.trained.recipe import TrainingRecipe

R = TypeVar("R", bound="TrainingRecipe")


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training, besides those of its model."""

    out: Annotated[Path, typer.Option(help="Folder for the explainer; an interrupted training there is resumed.")]
    recipe: Annotated[str | None, typer.Option(autocompletion=complete_recipe)] = None
    images: Annotated[str | None, typer.Option(help="Folder of images, or of CIFAR-10.")] = None
    data: str | None = None
    listed: str | None = None
    held_out: str | None = None
    settings: list[str] | None = None
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0
    resume: Annotated[bool, typer.Option(help="Whether to resume a training in the folder.")] = True

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of the training that --set changes."""
        return read_settings(["train"], self.settings or [])["train"]

    def read(self, kind: type[R], model: ModelOptions, **changes: Any) -> R:
        """The recipe, if one was given, with the changes of the options; changes that are None are ignored."""
        model.check()
        recipe = kind() if self.recipe is None else kind.read(self.recipe)
        update = {key: value for key, value in changes.items() if value is not None}
        update |= {"model": model.spec(recipe.model)}
        place = data_place(self.images, self.data)
        return recipe.model_copy(update=update).with_data(place, self.listed, self.held_out)


def advance(update: Callable[..., None], now: Any, words: str) -> None:
    """Update the progress bar of a training."""
    update(description=words, completed=now.step, total=now.steps)


def print_use(model: str, method: str, out: Path) -> None:
    """Print how the explainer is used."""
    show(f"Use it: patchlight explain photo.jpg --model {model} --method {method} --explainer {out}")
