"""`patchlight shapley train`: train a ViT-Shapley explainer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from patchlight.cli.common import print_json, progress, show
from patchlight.cli.complete import one_of
from patchlight.cli.options import TrainedModelOptions, add_commands, command, group
from patchlight.cli.training import TrainingOptions, advance, print_use

shapley = group("shapley", "Train a ViT-Shapley explainer.")


@shapley.callback()
def _shapley() -> None:
    """Keep `train` a command of its own although it is the only one."""


@command
def train(
    training: TrainingOptions,
    model: TrainedModelOptions,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Preset: default, paper (the paper's text) or code (the authors' code).",
            autocompletion=one_of("default", "paper", "code"),
        ),
    ] = None,
    as_json: bool = False,
) -> None:
    """Train ViT-Shapley for a model: a network that gives the Shapley values of all patches in one forward pass."""
    with progress("loading the model") as update:
        from patchlight.trained.shapley import train as train_values
        from patchlight.trained.shapley.settings import ShapleyRecipe

        def watch(now: Any) -> None:
            surrogate = hasattr(now, "untrained")
            reference = f"untrained {now.untrained:.4g}" if surrogate else f"equal values {now.even:.4g}"
            advance(update, now, f"{'surrogate' if surrogate else 'values'}: loss {now.loss:.4g}  {reference}")

        recipe = training.read(ShapleyRecipe, model)
        settings = recipe.training(preset, **training.changes)
        vit = recipe.model.load(model.device)
        loader, held_out = recipe.loaders(vit, settings, training.workers)
        explainer = train_values(vit, loader, settings, watch, training.out, training.resume, held_out)
    result = explainer.about["result"]
    if as_json:
        print_json({"explainer": str(training.out), "model": vit.name, **result})
        return
    end = result.get("held_out", result)
    show(f"{explainer!r} in {training.out}: loss {end['loss']:.4g}; equal values for all patches {end['even']:.4g}")
    print_use(recipe.model.name, "vit-shapley", training.out)


add_commands(shapley, train=train)
