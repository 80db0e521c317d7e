"""`patchlight diffmask`: train an explainer, import a published one, and run the paper's faithfulness task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import SOME_FAILED, print_json, progress, read_settings, say, showing_warnings
from patchlight.cli.complete import one_of
from patchlight.cli.options import AsJson, Device, ModelOptions, Settings, TrainedModelOptions, command
from patchlight.cli.training import TrainingOptions, advance, print_use

if TYPE_CHECKING:
    from patchlight.trained.diffmask import DiffMaskProgress

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
@command
def train(
    training: TrainingOptions,
    model: TrainedModelOptions,
    initial: Annotated[Path | None, typer.Option(help="An explainer whose gates training begins with.")] = None,
    preset: Preset = None,
    as_json: AsJson = False,
) -> None:
    """Train DiffMask for a model: gates that keep the few patches its output depends on."""
    with progress("loading the model") as show:
        from patchlight.trained.diffmask import load
        from patchlight.trained.diffmask import train as train_gates
        from patchlight.trained.diffmask.settings import DiffMaskRecipe

        recipe = training.read(DiffMaskRecipe, model, initial=None if initial is None else str(initial))
        settings = recipe.training(preset, **training.changes)
        with showing_warnings():
            vit = recipe.model.load(model.device)
            first = None if recipe.initial is None else load(recipe.initial)
            loader, held = recipe.loaders(vit, settings, training.workers)
            explainer = train_gates(vit, loader, settings, _watch(show), training.out, first, training.resume, held)
    result = explainer.about["result"]
    if as_json:
        print_json({"explainer": str(training.out), "model": vit.name, **result})
        return
    end = result.get("finish", result)
    print(f"{explainer!r} in {training.out}: KL {end['kl']:.3f}, kept {end['kept']:.1%}{_restarts(result)}")
    print_use(recipe.model.name, "diffmask", training.out)


@diffmask.command("import")
@command
def import_file(
    file: Annotated[
        Path, typer.Argument(help="Checkpoint of the authors' code (.ckpt), or its tensors (.safetensors).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the explainer.")],
    model: ModelOptions,
    alpha: Annotated[
        float | None, typer.Option(help="Scale of the gates' stretch; by default as the file says.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Import gates that the authors of the paper published; only tensors and numbers are read, no code is run."""
    with progress("loading the model"), showing_warnings():
        from patchlight.trained.diffmask import import_gates

        vit = model.spec().load(model.device)
        explainer = import_gates(file, vit, alpha)
        explainer.save(out)
    if as_json:
        print_json({"explainer": str(out), "model": vit.name, **explainer.about["imported"]})
    else:
        print(f"{explainer!r} in {out}: imported from {file.name}, alpha {explainer.gates.alpha:g}")
        print_use(model.model, "diffmask", out)


@diffmask.command()
@command
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
) -> None:
    """The paper's faithfulness task, end to end; exits with 3 when DiffMask is exact on under 95 % of the grids."""
    with progress("loading") as show, showing_warnings():
        from patchlight.study.counting import ENOUGH, CountingTask, run, table

        changes = read_settings(["train"], settings or [])["train"]
        task = CountingTask(size, preset or "default", seed, device, distractors, grids, changes)
        result = run(out, task, lambda words: show(description=words), _watch(show))
    rows = result.rows
    if as_json:
        print_json([{**asdict(row), "exact": row.exact} for row in rows])
    else:
        print(table(rows), end="")
    if words := _restarts(result.explainer.about["result"]):
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


def _watch(show: Callable[..., None]) -> Any:
    def watch(now: DiffMaskProgress) -> None:
        again = f"restart {now.restarts}  " if now.restarts else ""
        far = f"KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        advance(show, now, again + far)

    return watch
