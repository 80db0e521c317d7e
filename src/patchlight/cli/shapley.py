"""`patchlight shapley train`: make the explainer ViT-Shapley."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import (
    AsJson,
    Debug,
    Device,
    ImageList,
    Labels,
    NoPretrained,
    Plugin,
    Preprocessed,
    Settings,
    Sigmoid,
    Weights,
    answering,
    of_model,
    print_json,
    progress,
    read_settings,
    telling_warnings,
)
from patchlight.cli.training import (
    ExplainerFolder,
    Preset,
    RecipeGiven,
    Resume,
    TrainedModel,
    TrainingData,
    Workers,
    loaders,
    recipe_of,
)

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

shapley = typer.Typer(name="shapley", help="Train the explainer ViT-Shapley.", no_args_is_help=True)


@shapley.callback()
def _shapley() -> None:
    """Train the explainer ViT-Shapley."""


@shapley.command()
def train(
    out: ExplainerFolder,
    recipe: RecipeGiven = None,
    data: TrainingData = None,
    listed: ImageList = None,
    held_out: Annotated[
        str | None, typer.Option(help="Images the model was not trained on, to measure the loss on at the end.")
    ] = None,
    model: TrainedModel = None,
    weights: Weights = None,
    labels: Labels = None,
    preprocess: Preprocessed = None,
    sigmoid: Sigmoid = False,
    no_pretrained: NoPretrained = False,
    preset: Preset = None,
    settings: Settings = None,
    plugin: Plugin = None,
    workers: Workers = 0,
    resume: Resume = True,
    device: Device = "cpu",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train ViT-Shapley for a model: a network that gives the Shapley values of all patches in one forward."""
    with answering(as_json, debug):
        with progress("loading the model") as bar:
            said = of_model(preprocess, sigmoid, no_pretrained)
            from patchlight.trained.shapley import train as train_values
            from patchlight.trained.shapley.recipe import ShapleyRecipe

            asked = recipe_of(
                ShapleyRecipe, recipe, data, listed, held_out, model, weights, labels, said, {"preset": preset}
            )
            chosen = asked.training(**read_settings(["train"], settings or [])["train"])
            with telling_warnings():
                vit = asked.model.load(device)
                loader, held = loaders(asked, vit, chosen, workers)
                explainer = train_values(vit, loader, chosen, _watch(bar), out, resume, held)
        result = explainer.about["result"]
        if as_json:
            print_json({"explainer": str(out), "model": vit.name, **result})
        else:
            end = result.get("held_out", result)
            print(f"{explainer!r} in {out}: loss {end['loss']:.4g}, of equal values {end['even']:.4g}")
            model_name = asked.model.name
            print(f"Use it: patchlight explain photo.jpg --model {model_name} --method vit-shapley --explainer {out}")


def _watch(bar: Bar) -> Any:
    def tell(now: Any) -> None:
        beside = f"untrained {now.untrained:.4g}" if hasattr(now, "untrained") else f"equal values {now.even:.4g}"
        what = "surrogate" if hasattr(now, "untrained") else "values"
        words = f"{what}: loss {now.loss:.4g}  {beside}"
        bar.update(bar.task_ids[0], description=words, completed=now.step, total=now.steps)

    return tell
