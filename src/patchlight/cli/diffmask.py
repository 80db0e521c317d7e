"""`patchlight diffmask train` and `patchlight diffmask counting`: make an explainer, and put it to the paper's test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import (
    SOME_FAILED,
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
    say,
    telling_warnings,
)
from patchlight.cli.complete import one_of
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

    from patchlight.trained.diffmask import Progress

diffmask = typer.Typer(name="diffmask", help="Train the explainer VISION DIFFMASK, and test it.", no_args_is_help=True)


@diffmask.command()
def train(
    out: ExplainerFolder,
    recipe: RecipeGiven = None,
    data: TrainingData = None,
    listed: ImageList = None,
    held_out: Annotated[
        str | None, typer.Option(help="Images the model was not trained on, to set beta by at the end.")
    ] = None,
    model: TrainedModel = None,
    weights: Weights = None,
    labels: Labels = None,
    preprocess: Preprocessed = None,
    sigmoid: Sigmoid = False,
    no_pretrained: NoPretrained = False,
    initial: Annotated[Path | None, typer.Option(help="An explainer whose gates training begins with.")] = None,
    preset: Preset = None,
    settings: Settings = None,
    plugin: Plugin = None,
    workers: Workers = 0,
    resume: Resume = True,
    device: Device = "cpu",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train DiffMask for a model: gates that keep the few patches its output depends on."""
    with answering(as_json, debug):
        with progress("loading the model") as bar:
            said = of_model(preprocess, sigmoid, no_pretrained)
            from patchlight.trained.diffmask import load
            from patchlight.trained.diffmask import train as train_gates
            from patchlight.trained.diffmask.recipe import DiffMaskRecipe

            beside = {"initial": None if initial is None else str(initial), "preset": preset}
            asked = recipe_of(DiffMaskRecipe, recipe, data, listed, held_out, model, weights, labels, said, beside)
            chosen = asked.training(**read_settings(["train"], settings or [])["train"])
            with telling_warnings():
                vit = asked.model.load(device)
                first = None if asked.initial is None else load(asked.initial)
                loader, held = loaders(asked, vit, chosen, workers)
                explainer = train_gates(vit, loader, chosen, _watch(bar), out, first, resume, held)
        result = explainer.about["result"]
        if as_json:
            print_json({"explainer": str(out), "model": vit.name, **result})
        else:
            end = result.get("finish", result)
            print(f"{explainer!r} in {out}: KL {end['kl']:.3f}, kept {end['kept']:.1%}")
            model_name = asked.model.name
            print(f"Use it: patchlight explain photo.jpg --model {model_name} --method diffmask --explainer {out}")


@diffmask.command()
def counting(
    out: Annotated[Path, typer.Option(help="Folder for the ViT, the explainer and the table.")],
    preset: Annotated[
        str,
        typer.Option(
            help="small (minutes on a CPU) or paper (ViT-Base, an accelerator).",
            autocompletion=one_of("small", "paper"),
        ),
    ] = "small",
    seed: Annotated[int, typer.Option(help="Seed of the grids, the ViT and the gates.")] = 0,
    distractors: Annotated[int, typer.Option(help="Colours besides red: 5 (the released code) or 6 (the paper).")] = 5,
    grids: Annotated[int, typer.Option(min=1, help="Held-out grids to judge on.")] = 100,
    settings: Settings = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The paper's faithfulness task, end to end; exits with 3 when DiffMask is exact on under 95 % of the grids."""
    with answering(as_json, debug):
        with progress("loading") as bar:
            from dataclasses import asdict

            from patchlight.trained.diffmask.counting_task import ENOUGH, run, table

            def tell(words: str) -> None:
                bar.update(bar.task_ids[0], description=words)

            changes = read_settings(["train"], settings or [])["train"]
            rows = run(out, preset, seed, device, distractors, grids, tell, _watch(bar), changes)  # type: ignore[arg-type]
        if as_json:
            print_json([{**asdict(row), "exact": row.exact} for row in rows])
        else:
            print(table(rows), end="")
        if rows[0].exact < ENOUGH:
            say(f"DiffMask is exact on {rows[0].exact:.1%} of the grids, under {ENOUGH:.0%}")
            raise typer.Exit(SOME_FAILED)


def _watch(bar: Bar) -> Any:
    def tell(now: Progress) -> None:
        words = f"KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        bar.update(bar.task_ids[0], description=words, completed=now.step, total=now.steps)

    return tell
