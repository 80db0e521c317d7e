"""`patchlight diffmask`: train an explainer, import a published one, and run the paper's faithfulness task."""

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
    RecipeGiven,
    Resume,
    TrainedModel,
    TrainingData,
    Workers,
    loaders,
    model_spec,
    recipe_of,
)

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from patchlight.trained.diffmask import Progress

diffmask = typer.Typer(
    name="diffmask", help="Train or import the explainer VISION DIFFMASK, and test it.", no_args_is_help=True
)
Preset = Annotated[
    str | None,
    typer.Option(
        help="default (ours), paper (the paper's text) or authors (their released code).",
        autocompletion=one_of("default", "paper", "authors"),
    ),
]


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

            beside = {"initial": None if initial is None else str(initial)}
            asked = recipe_of(DiffMaskRecipe, recipe, data, listed, held_out, model, weights, labels, said, beside)
            chosen = asked.training(preset, **read_settings(["train"], settings or [])["train"])
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
            print(f"{explainer!r} in {out}: KL {end['kl']:.3f}, kept {end['kept']:.1%}{_restarts(result)}")
            _print_use(asked.model.name, out)


@diffmask.command("import")
def import_file(
    file: Annotated[
        Path, typer.Argument(help="Checkpoint of the authors' code (.ckpt), or its tensors (.safetensors).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the explainer.")],
    model: TrainedModel = None,
    weights: Weights = None,
    labels: Labels = None,
    preprocess: Preprocessed = None,
    sigmoid: Sigmoid = False,
    no_pretrained: NoPretrained = False,
    alpha: Annotated[
        float | None, typer.Option(help="Scale of the gates' stretch; by default as the file says.")
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Import gates that the authors of the paper published; only tensors and numbers are read, no code is run."""
    with answering(as_json, debug):
        with progress("loading the model"), telling_warnings():
            said = of_model(preprocess, sigmoid, no_pretrained)
            from patchlight.trained.diffmask import import_gates

            vit = model_spec(model, weights, labels, said).load(device)
            explainer = import_gates(file, vit, alpha)
            explainer.save(out)
        if as_json:
            print_json({"explainer": str(out), "model": vit.name, **explainer.about["imported"]})
        else:
            print(f"{explainer!r} in {out}: imported from {file.name}, alpha {explainer.gates.alpha:g}")
            _print_use(model or "pocket", out)


@diffmask.command()
def counting(
    out: Annotated[Path, typer.Option(help="Folder for the ViT, the explainer and the table.")],
    size: Annotated[
        str,
        typer.Option(
            help="small (minutes on a CPU) or base (ViT-Base as in the paper, an accelerator).",
            autocompletion=one_of("small", "base"),
        ),
    ] = "small",
    preset: Preset = None,
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
        with progress("loading") as bar, telling_warnings():
            from dataclasses import asdict

            from patchlight.trained.diffmask.counting_task import ENOUGH, run, table

            def tell(words: str) -> None:
                bar.update(bar.task_ids[0], description=words)

            changes = read_settings(["train"], settings or [])["train"]
            done = run(out, size, preset or "default", seed, device, distractors, grids, tell, _watch(bar), changes)
        rows = done.verdicts
        if as_json:
            print_json([{**asdict(row), "exact": row.exact} for row in rows])
        else:
            print(table(rows), end="")
        if words := _restarts(done.explainer.about["result"]):
            say("DiffMask" + words.replace(";", "", 1))
        if rows[0].exact < ENOUGH:
            say(f"DiffMask is exact on {rows[0].exact:.1%} of the grids, under {ENOUGH:.0%}")
            raise typer.Exit(SOME_FAILED)


def _restarts(result: dict[str, Any]) -> str:
    """How often a training started again and why, for the end of a line."""
    failed = result.get("failed_attempts", [])
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    reasons = "; ".join(f"step {one['step']}: {one['reason']}" for one in failed)
    return f"; started again {times} ({reasons})" if failed else ""


def _print_use(model: str, out: Path) -> None:
    print(f"Use it: patchlight explain photo.jpg --model {model} --method diffmask --explainer {out}")


def _watch(bar: Bar) -> Any:
    def tell(now: Progress) -> None:
        again = f"restart {now.restarts}  " if now.restarts else ""
        words = f"{again}KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        bar.update(bar.task_ids[0], description=words, completed=now.step, total=now.steps)

    return tell
