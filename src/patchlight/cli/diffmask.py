"""`patchlight diffmask train` and `patchlight diffmask counting`: make an explainer, and put it to the paper's test."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import (
    SOME_FAILED,
    AsJson,
    Debug,
    Device,
    Labels,
    Settings,
    Weights,
    answering,
    load_model,
    print_json,
    progress,
    read_settings,
    say,
)
from patchlight.errors import PatchlightError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from patchlight.trained.diffmask import Progress
    from patchlight.trained.diffmask.recipe import Recipe

diffmask = typer.Typer(name="diffmask", help="Train the explainer VISION DIFFMASK, and test it.", no_args_is_help=True)


@diffmask.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder for the explainer; an interrupted run there goes on.")],
    recipe: Annotated[Path | None, typer.Option(help="A TOML recipe; options given beside it win.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of images, or of CIFAR-10.")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Images the model was not trained on, to set beta by at the end.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="pocket, a timm name, hf:NAME or torchvision:NAME.")] = None,
    weights: Weights = None,
    labels: Labels = None,
    initial: Annotated[Path | None, typer.Option(help="An explainer whose gates training begins with.")] = None,
    preset: Annotated[str | None, typer.Option(help="default, paper or code.")] = None,
    settings: Settings = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 0,
    resume: Annotated[bool, typer.Option(help="Whether a run that lies in the folder goes on.")] = True,
    device: Device = "cpu",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train DiffMask for a model: gates that keep the few patches its output depends on."""
    with answering(as_json, debug):
        with progress("loading the model") as bar:
            asked = _recipe(recipe, data, held_out, model, weights, labels, initial, preset)
            changes = read_settings(["train"], settings or [])["train"]
            chosen = asked.training(**changes)
            from patchlight.trained.diffmask import load
            from patchlight.trained.diffmask import train as train_gates
            from patchlight.trained.diffmask.recipe import loader_of, open_images

            vit = load_model(asked.model.name, asked.model.weights, asked.model.labels, device)
            if asked.model.mean is not None or asked.model.std is not None:
                from dataclasses import replace

                statistics = {"mean": asked.model.mean, "std": asked.model.std}
                vit.preprocess = replace(vit.preprocess, **{k: v for k, v in statistics.items() if v is not None})  # type: ignore[arg-type]
            first = None if asked.initial is None else load(asked.initial)
            loader = loader_of(open_images(asked.data, vit), vit, chosen.batch_size, workers)
            held = None
            if asked.held_out is not None:
                where = asked.held_out.path or asked.data.path
                images = open_images(asked.held_out.model_copy(update={"path": where}), vit)
                held = loader_of(images, vit, chosen.batch_size, workers)
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
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
        str, typer.Option(help="small (minutes on a CPU) or paper (ViT-Base, an accelerator).")
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


def _recipe(
    path: Path | None,
    data: Path | None,
    held_out: Path | None,
    model: str | None,
    weights: Path | None,
    labels: Path | None,
    initial: Path | None,
    preset: str | None,
) -> Recipe:
    """The recipe's file, if any, with what was given beside it."""
    from patchlight.trained.diffmask.recipe import Images, Recipe, read_recipe

    recipe = Recipe() if path is None else read_recipe(path)
    if path is None and data is None:
        raise PatchlightError("no data was given; name a folder of images or of CIFAR-10 with --data, or a --recipe")
    given: dict[str, Any] = {"name": model, "weights": weights, "labels": labels}
    about = recipe.model.model_copy(update={k: v for k, v in given.items() if v is not None})
    images = recipe.data if data is None else recipe.data.model_copy(update={"path": data})
    rest: dict[str, Any] = {k: v for k, v in {"initial": initial, "preset": preset}.items() if v is not None}
    if held_out is not None:
        rest["held_out"] = (recipe.held_out or Images()).model_copy(update={"path": held_out})
    return recipe.model_copy(update={"model": about, "data": images, **rest})


def _watch(bar: Bar) -> Any:
    def tell(now: Progress) -> None:
        words = f"KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        bar.update(bar.task_ids[0], description=words, completed=now.step, total=now.steps)

    return tell
