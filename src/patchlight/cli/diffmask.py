"""`patchlight diffmask`: train an explainer, import a published one, and run the counting task of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchlight.cli.common import SOME_FAILED, print_json, progress, read_settings, say, show, show_text
from patchlight.cli.complete import one_of
from patchlight.cli.options import (
    ModelOptions,
    TrainedModelOptions,
    add_commands,
    command,
    group,
)
from patchlight.cli.training import TrainingOptions, advance, print_use
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.trained.diffmask import DiffMaskProgress

diffmask = group("diffmask", "Train, import or test a VISION DIFFMASK explainer.")
Preset = Annotated[
    str | None,
    typer.Option(
        help="Preset: default (ours), paper (the paper's text) or authors (their released code).",
        autocompletion=one_of("default", "paper", "authors"),
    ),
]


@command
def train(
    training: TrainingOptions,
    model: TrainedModelOptions,
    initial: Path | None = None,
    preset: Preset = None,
    as_json: bool = False,
) -> None:
    """Train DiffMask for a model: gates that keep the few patches that its output depends on."""
    with progress("loading the model") as update:
        from patchlight.trained.diffmask import load
        from patchlight.trained.diffmask import train as train_gates
        from patchlight.trained.diffmask.settings import DiffMaskRecipe

        recipe = training.read(DiffMaskRecipe, model, initial=None if initial is None else str(initial))
        settings = recipe.training(preset, **training.changes)
        first = None if recipe.initial is None else load(recipe.initial)
        vit = recipe.model.load(model.device)
        loader, held_out = recipe.loaders(vit, settings, training.workers)
        watch = _watch(update)
        explainer = train_gates(vit, loader, settings, watch, training.out, first, training.resume, held_out)
    result = explainer.about["result"]
    if as_json:
        print_json({"explainer": str(training.out), "model": vit.name, **result})
        return
    end = result.get("finish", result)
    show(f"{explainer!r} in {training.out}: KL {end['kl']:.3f}, kept {end['kept']:.1%}{_restarts(result)}")
    print_use(recipe.model.name, "diffmask", training.out)


@command
def import_file(
    file: Annotated[
        Path, typer.Argument(help="Checkpoint of the authors' code (.ckpt), or its tensors (.safetensors).")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the explainer.")],
    model: ModelOptions,
    alpha: float | None = None,
    as_json: bool = False,
) -> None:
    """Import gates that the authors published. Only tensors and numbers are read; no code in the file is run."""
    if not file.is_file():
        raise PatchlightError(f"no file at '{file}'")
    model.check()
    with progress("loading the model"):
        from patchlight.trained.diffmask import import_gates

        vit = model.load()
        explainer = import_gates(file, vit, alpha)
        explainer.save(out)
    if as_json:
        print_json({"explainer": str(out), "model": vit.name, **explainer.about["imported"]})
    else:
        show(f"{explainer!r} in {out}: imported from {file.name}, alpha {explainer.gates.alpha:g}")
        print_use(model.model, "diffmask", out)


@command
def counting(
    out: Annotated[Path, typer.Option(help="Folder for the ViT, the explainer and the table.")],
    size: str = "small",
    preset: Preset = None,
    seed: int = 0,
    distractors: int = 5,
    grids: Annotated[int, typer.Option(min=1)] = 100,
    settings: list[str] | None = None,
    device: str = "cpu",
    as_json: bool = False,
) -> None:
    """Run the counting task of the paper. The exit code is 3 if DiffMask is exact on fewer than 95 % of the grids."""
    with progress("loading") as update:
        from patchlight.study.counting import ENOUGH, CountingTask, run, table

        changes = read_settings(["train"], settings or [])["train"]
        task = CountingTask(size, preset or "default", seed, device, distractors, grids, changes)
        result = run(out, task, lambda words: update(description=words), _watch(update))
    rows = result.rows
    if as_json:
        print_json([{**asdict(row), "exact": row.exact} for row in rows])
    else:
        show_text(table(rows))
    if words := _restarts(result.explainer.about["result"]):
        say("DiffMask" + words.replace(";", "", 1))
    if rows[0].exact < ENOUGH:
        say(f"DiffMask is exact on {rows[0].exact:.1%} of the grids, fewer than {ENOUGH:.0%}")
        raise typer.Exit(SOME_FAILED)


def _restarts(result: dict[str, Any]) -> str:
    """How often a training restarted and why, for the end of a line."""
    failed = result.get("failed_attempts", [])
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    reasons = "; ".join(f"step {one['step']}: {one['reason']}" for one in failed)
    return f"; restarted {times} ({reasons})" if failed else ""


def _watch(update: Callable[..., None]) -> Any:
    def watch(now: DiffMaskProgress) -> None:
        restart = f"restart {now.restarts}  " if now.restarts else ""
        state = f"KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        advance(update, now, restart + state)

    return watch


add_commands(diffmask, train=train, counting=counting, **{"import": import_file})
