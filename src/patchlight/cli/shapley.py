"""`patchlight shapley train`: make the explainer ViT-Shapley."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from patchlight.cli.common import print_json, progress, showing_warnings
from patchlight.cli.complete import one_of
from patchlight.cli.options import AsJson, TrainedModelOptions, command
from patchlight.cli.training import TrainingOptions, advance, print_use

shapley = typer.Typer(name="shapley", help="Train the explainer ViT-Shapley.", no_args_is_help=True)
Preset = Annotated[
    str | None, typer.Option(help="default, paper or code.", autocompletion=one_of("default", "paper", "code"))
]


@shapley.callback()
def _shapley() -> None:
    """Train the explainer ViT-Shapley."""


@shapley.command()
@command
def train(
    training: TrainingOptions, model: TrainedModelOptions, preset: Preset = None, as_json: AsJson = False
) -> None:
    """Train ViT-Shapley for a model: a network that gives the Shapley values of all patches in one forward."""
    with progress("loading the model") as show:
        from patchlight.trained.shapley import train as train_values
        from patchlight.trained.shapley.settings import ShapleyRecipe

        def watch(now: Any) -> None:
            surrogate = hasattr(now, "untrained")
            beside = f"untrained {now.untrained:.4g}" if surrogate else f"equal values {now.even:.4g}"
            advance(show, now, f"{'surrogate' if surrogate else 'values'}: loss {now.loss:.4g}  {beside}")

        recipe = training.read(ShapleyRecipe, model)
        settings = recipe.training(preset, **training.changes)
        with showing_warnings():
            vit = recipe.model.load(model.device)
            loader, held = recipe.loaders(vit, settings, training.workers)
            explainer = train_values(vit, loader, settings, watch, training.out, training.resume, held)
    result = explainer.about["result"]
    if as_json:
        print_json({"explainer": str(training.out), "model": vit.name, **result})
        return
    end = result.get("held_out", result)
    print(f"{explainer!r} in {training.out}: loss {end['loss']:.4g}, of equal values {end['even']:.4g}")
    print_use(recipe.model.name, "vit-shapley", training.out)
