"""What the commands that train an explainer share: their options, the recipe, and the images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from patchlight.cli.complete import complete_model, complete_training_recipe, one_of
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.anatomy.base import Anatomy
    from patchlight.anatomy.spec import ModelSpec
    from patchlight.trained.recipe import TrainingRecipe
    from patchlight.trained.settings import Training

R = TypeVar("R", bound="TrainingRecipe")
ExplainerFolder = Annotated[Path, typer.Option(help="Folder for the explainer; an interrupted run there goes on.")]
RecipeGiven = Annotated[
    str | None,
    typer.Option(
        help="A recipe, a TOML file or a bundled one's name; options given beside it win.",
        autocompletion=complete_training_recipe,
    ),
]
TrainingData = Annotated[str | None, typer.Option(help="Folder of images, or of CIFAR-10; or KIND:FOLDER.")]
TrainedModel = Annotated[
    str | None,
    typer.Option(
        help="pocket, a timm name, hf:NAME, open_clip:NAME or torchvision:NAME.", autocompletion=complete_model
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="default, paper or code.", autocompletion=one_of("default", "paper", "code"))
]
Workers = Annotated[int, typer.Option(min=0, help="Processes that read images.")]
Resume = Annotated[bool, typer.Option(help="Whether a run that lies in the folder goes on.")]


def recipe_of(
    kind: type[R],
    given: str | None,
    data: str | None,
    listed: str | None,
    held_out: str | None,
    model: str | None,
    weights: Path | None,
    labels: Path | None,
    said: dict[str, Any],
    beside: dict[str, Any],
) -> R:
    """The recipe, if one was given, with what was given beside it; `said` is about the model, `beside` all else."""
    from patchlight.core.recipes import parse_as, read_text
    from patchlight.trained.recipe import data_at

    recipe = kind() if given is None else parse_as(kind, read_text(given, kind.command), given)
    images = recipe.data if data is None else data_at(data, recipe.data)
    if images is None:
        raise PatchlightError("no data was given; name a folder of images or of CIFAR-10 with --data, or a --recipe")
    images = images if listed is None else images.with_list(listed)
    held = recipe.held_out if held_out is None else data_at(held_out, recipe.held_out)
    if held is not None and not held.path:
        held = held.model_copy(update={"path": images.path})
    asked = model_spec(model, weights, labels, said, recipe.model)
    others = {key: value for key, value in beside.items() if value is not None}
    return recipe.model_copy(update={"model": asked, "data": images, "held_out": held, **others})


def model_spec(
    model: str | None, weights: Path | None, labels: Path | None, said: dict[str, Any], base: ModelSpec | None = None
) -> ModelSpec:
    """The model that the options name, else `base`, else the bundled one."""
    from patchlight.anatomy.preprocessing import as_spec
    from patchlight.anatomy.spec import ModelSpec

    prepared = None if said["preprocess"] is None else as_spec(said["preprocess"])
    first = ModelSpec(name="pocket") if base is None else base
    return first.other(model, weights=_text(weights), labels=_text(labels), **{**said, "preprocess": prepared})


def loaders(recipe: TrainingRecipe, vit: Anatomy, settings: Training, workers: int) -> tuple[Any, Any]:
    """The batches to train on, and of the images held out where there are some."""
    from patchlight.trained.recipe import loader_of, open_images

    def read(spec: Any) -> Any:
        return loader_of(open_images(spec, vit, settings.seed), vit, settings.batch_size, workers)

    assert recipe.data is not None
    return read(recipe.data), None if recipe.held_out is None else read(recipe.held_out)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
