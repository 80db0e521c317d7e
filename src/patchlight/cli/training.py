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
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.trained.recipe import TrainingRecipe
    from patchlight.trained.settings import Training

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

    def read(self, kind: type[R], model: ModelOptions, **beside: Any) -> R:
        """The recipe, if one was given, with what the options say, and those of `beside` that are not None."""
        from patchlight.trained.recipe import data_at

        recipe = kind() if self.recipe is None else kind.read(self.recipe)
        images = recipe.data if self.data is None else data_at(self.data, recipe.data)
        if images is None:
            raise PatchlightError(
                "no data was given; name a folder of images or of CIFAR-10 with --data, or a --recipe"
            )
        images = images if self.listed is None else images.with_list(self.listed)
        held = recipe.held_out if self.held_out is None else data_at(self.held_out, recipe.held_out)
        if held is not None and not held.path:
            held = held.model_copy(update={"path": images.path})
        others = {key: value for key, value in beside.items() if value is not None}
        update = {"model": model.spec(recipe.model), "data": images, "held_out": held, **others}
        return recipe.model_copy(update=update)

    def loaders(self, recipe: TrainingRecipe, vit: Anatomy, settings: Training) -> tuple[Any, Any]:
        """The batches to train on, and of the images held out where there are some."""
        from patchlight.trained.recipe import loader_of, open_images

        def read(spec: Any) -> Any:
            return loader_of(open_images(spec, vit, settings.seed), vit, settings.batch_size, self.workers)

        assert recipe.data is not None
        return read(recipe.data), None if recipe.held_out is None else read(recipe.held_out)


def advance(show: Callable[..., None], now: Any, words: str) -> None:
    """Show how far a training is."""
    show(description=words, completed=now.step, total=now.steps)


def print_use(model: str, method: str, out: Path) -> None:
    """Say how the explainer is used."""
    print(f"Use it: patchlight explain photo.jpg --model {model} --method {method} --explainer {out}")
