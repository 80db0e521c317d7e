"""`patchlight diffmask` and `patchlight shapley`: train explainers, import a published one, and count red patches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from patchlight.cli.common import SOME_FAILED, print_json, progress, read_settings, say, show, show_text
from patchlight.cli.complete import complete_recipe, one_of
from patchlight.cli.options import ModelOptions, TrainedModelOptions, add_commands, command, group
from patchlight.cli.recipes import data_place
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from patchlight.trained.diffmask import DiffMaskProgress
    from patchlight.trained.explainer import Explainer
    from patchlight.trained.recipe import TrainingRecipe

R = TypeVar("R", bound="TrainingRecipe")
diffmask = group("diffmask", "Train, import or test a VISION DIFFMASK explainer.")
shapley = group("shapley", "Train a ViT-Shapley explainer.")
Preset = Annotated[str | None, typer.Option(autocompletion=one_of("default", "paper", "authors"))]


@dataclass(frozen=True)
class TrainingOptions:
    """The options of a training, besides those of its model."""

    out: Path
    recipe: Annotated[str | None, typer.Option(autocompletion=complete_recipe)] = None
    images: str | None = None
    data: str | None = None
    listed: str | None = None
    held_out: str | None = None
    settings: list[str] | None = None
    workers: Annotated[int, typer.Option(min=0)] = 0
    resume: bool = True

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of the training that --set changes."""
        return read_settings(["train"], self.settings or [])["train"]

    def read(self, kind: type[R], model: ModelOptions, **changes: Any) -> R:
        """The recipe, if one was given, with the changes of the options; changes that are None are ignored."""
        model.check()
        recipe = kind() if self.recipe is None else kind.read(self.recipe)
        update = {key: value for key, value in changes.items() if value is not None}
        update |= {"model": model.spec(recipe.model)}
        place = data_place(self.images, self.data)
        return recipe.model_copy(update=update).with_data(place, self.listed, self.held_out)


def _print(explainer: Explainer[Any], out: Path, model: str | None, words: str, facts: dict[str, Any] | None) -> None:
    """Print what an explainer is and how it is used; with `facts`, these as JSON."""
    if facts is not None:
        print_json({"explainer": str(out), "model": explainer.model["name"], **facts})
        return
    show(f"{explainer!r} in {out}: {words}")
    show(f"Use it: patchlight explain photo.jpg --model {model} --method {explainer.kind} --explainer {out}")


@command
def train_gates(
    training: TrainingOptions,
    model: TrainedModelOptions,
    initial: Path | None = None,
    preset: Preset = None,
    as_json: bool = False,
) -> None:
    """Train DiffMask for a model: gates that keep the few patches that its output depends on."""
    with progress("loading the model") as update:
        from patchlight.trained.diffmask import load, train
        from patchlight.trained.diffmask.settings import DiffMaskRecipe

        recipe = training.read(DiffMaskRecipe, model, initial=None if initial is None else str(initial))
        settings = recipe.training(preset, **training.changes)
        first = None if recipe.initial is None else load(recipe.initial)
        vit = recipe.model.load(model.device)
        loader, held_out = recipe.loaders(vit, settings, training.workers)
        explainer = train(vit, loader, settings, _watch(update), training.out, first, training.resume, held_out)
    result = explainer.about["result"]
    end = result.get("finish", result)
    words = f"KL {end['kl']:.3f}, kept {end['kept']:.1%}{_restarts(result)}"
    _print(explainer, training.out, recipe.model.name, words, result if as_json else None)


@command
def train_values(
    training: TrainingOptions,
    model: TrainedModelOptions,
    preset: Annotated[str | None, typer.Option(autocompletion=one_of("default", "paper", "code"))] = None,
    as_json: bool = False,
) -> None:
    """Train ViT-Shapley for a model: a network that gives the Shapley values of all patches in one forward pass."""
    with progress("loading the model") as update:
        from patchlight.trained.shapley import train
        from patchlight.trained.shapley.settings import ShapleyRecipe

        def watch(now: Any) -> None:
            surrogate = hasattr(now, "untrained")
            reference = f"untrained {now.untrained:.4g}" if surrogate else f"equal values {now.even:.4g}"
            words = f"{'surrogate' if surrogate else 'values'}: loss {now.loss:.4g}  {reference}"
            update(description=words, completed=now.step, total=now.steps)

        recipe = training.read(ShapleyRecipe, model)
        settings = recipe.training(preset, **training.changes)
        vit = recipe.model.load(model.device)
        loader, held_out = recipe.loaders(vit, settings, training.workers)
        explainer = train(vit, loader, settings, watch, training.out, training.resume, held_out)
    result = explainer.about["result"]
    end = result.get("held_out", result)
    words = f"loss {end['loss']:.4g}; equal values for all patches {end['even']:.4g}"
    _print(explainer, training.out, recipe.model.name, words, result if as_json else None)


@command
def import_file(
    file: Annotated[Path, typer.Argument()],
    out: Path,
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

        explainer = import_gates(file, model.load(), alpha)
        explainer.save(out)
    words = f"imported from {file.name}, alpha {explainer.gates.alpha:g}"
    _print(explainer, out, model.model, words, explainer.about["imported"] if as_json else None)


@command
def counting(
    out: Path,
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
        rows, explainer = run(out, task, lambda words: update(description=words), _watch(update))
    if as_json:
        print_json([{**asdict(row), "exact": row.exact} for row in rows])
    else:
        show_text(table(rows))
    if words := _restarts(explainer.about["result"]):
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


def _watch(update: Callable[..., None]) -> Callable[[DiffMaskProgress], None]:
    def watch(now: DiffMaskProgress) -> None:
        restart = f"restart {now.restarts}  " if now.restarts else ""
        state = f"KL {now.kl:.3f}  kept {now.kept:.1%}  same {now.agreement:.1%}  lambda {now.multiplier:.3g}"
        update(description=restart + state, completed=now.step, total=now.steps)

    return watch


@shapley.callback()
def _shapley() -> None:
    """Keep `train` a command of its own although it is the only one."""


add_commands(diffmask, train=train_gates, counting=counting, **{"import": import_file})
add_commands(shapley, train=train_values)
