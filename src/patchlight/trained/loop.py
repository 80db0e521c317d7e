"""The loop of every training: it can be killed at any moment and resumes where it was.

A learner's samples are functions of the seed and the step alone, so a checkpoint holds weights and optimiser, no random
state. A training that has failed starts again with a seed that is a function of the first one.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, TrainingWarning, Unsupported, warn
from patchlight.core.extras import missing_extra
from patchlight.core.files import check_writable
from patchlight.core.progress import Progress, Update, show_progress
from patchlight.evidence.precision import Precision, rounding
from patchlight.trained.batches import check_data, epoch_of, length_of
from patchlight.trained.checkpoint import Parts, append_metrics, cut_metrics, read_checkpoint, write_checkpoint
from patchlight.trained.devices import Devices
from patchlight.trained.explainer import Explainer
from patchlight.trained.settings import Training

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

E = TypeVar("E", bound=Explainer[Any])
Report = TypeVar("Report", bound="DataclassInstance")
"""How far a training is: numbers, `step`, `steps` and `seconds` among them."""


@dataclass(frozen=True)
class TrainingRun:
    """What surrounds the steps of a training: its batches and settings, who is informed, and where it is written."""

    loader: Iterable[Any]
    """This process's share of the batches."""
    settings: Training
    devices: Devices
    callback: Callable[[Any], None] | None = None
    out: Path | None = None
    resume: bool = True
    progress: Progress | bool = True

    def finish(self, kind: type[E], network: nn.Module, vit: Anatomy, result: dict[str, Any]) -> E:
        """The explainer of what was trained, saved where the run is written."""
        explainer = kind.of(network, vit, settings=self.settings.model_dump(), result=result)
        if self.out is not None and self.devices.main:
            explainer.save(self.out)
        return explainer


def check_training(
    kind: type[Explainer[Any]], vit: Anatomy, loader: Iterable[Any], held_out: Iterable[Any] | None, use: str
) -> None:
    """Refuse, before any work, a model that cannot have such an explainer, and wrong batches; `use` is of held_out."""
    reason = kind.why_not(vit)
    if reason is not None:
        raise Unsupported(f"{kind.title} cannot be trained here: {reason}")
    check_data(vit, loader)
    if held_out is not None:
        check_data(vit, held_out, use)


@contextlib.contextmanager
def training(vit: Anatomy, precision: Precision) -> Iterator[None]:
    """Around a whole training: gradients are on, whatever surrounds the call, and the model is what it is now.

    Products may round to TF32 unless all is full: the gradient of a small network's weights, a narrow one, is slow
    otherwise.
    """
    with vit.steady(), torch.inference_mode(False), torch.enable_grad(), rounding(vit, precision):
        yield


class Diverged(Exception):
    """A training has failed, with the reason; raised by `Learner.step` to start again with a fresh seed."""


class Learner(ABC, Generic[Report]):
    """What is trained: a network beside a frozen model, and all that moves with it."""

    network: nn.Module
    columns: tuple[str, ...]
    """The names of what `step` returns; `loss` is one of them."""
    remedy: str
    """What to change when the loss is not a number."""
    report_kind: ClassVar[type[Any]]
    """The dataclass of a report: `step`, `steps`, `columns` and `seconds`."""

    @abstractmethod
    def step(self, batch: Any, index: int) -> Tensor:
        """Forward, backward and optimiser for a batch, `index` batches after the first; the numbers of `columns`."""

    def start(self, seed: int, restarts: int) -> None:
        """Begin again from this seed, after so many restarts; only for a learner whose `step` raises `Diverged`."""
        raise NotImplementedError

    def report(self, step: int, steps: int, means: dict[str, float], seconds: float) -> Report:
        """The report on the means of `columns` since the last one; the place to warn."""
        report: Report = self.report_kind(step=step, steps=steps, **means, seconds=seconds)
        return report

    @abstractmethod
    def state(self) -> Parts:
        """All that `restore` needs to go on to the same weights."""

    @abstractmethod
    def restore(self, parts: Parts) -> None:
        """Take up a state; a KeyError or RuntimeError where it is another model's."""


def train_steps(learner: Learner[Report], run: TrainingRun, words: str = "training") -> dict[str, Any]:
    """Take all steps, from the checkpoint in `run.out` on where there is one; returns the last report, by name.

    Where a training started again, `failed_attempts` beside it lists the seed, the step and the reason of each failure.
    The progress bar is called `words`. `run.out` gets `checkpoint.safetensors` and `metrics.csv`, and TensorBoard's
    files where the settings say so.
    """
    loop = _Loop(learner, run)
    if run.out is not None:
        check_writable(run.out)
        loop.resume(run.out, run.resume)
    with show_progress(run.progress if run.devices.main else False, words) as tell:
        loop.go(tell)
    return {**loop.last, **({"failed_attempts": loop.failed} if loop.failed else {})}


def count_steps(settings: Training, loader: Iterable[Any]) -> int:
    """How many steps a training takes in all."""
    return settings.steps or math.ceil(settings.epochs * length_of(loader))


def fresh_seed(seed: int, restarts: int) -> int:
    """The seed of a training that has started again so often; before that, its own."""
    return int(np.random.default_rng([seed, restarts, 11]).integers(2**31)) if restarts else seed


class _Loop(Generic[Report]):
    """Where a run stands."""

    def __init__(self, learner: Learner[Report], run: TrainingRun) -> None:
        self.learner, self.loader, self.settings, self.devices = learner, run.loader, run.settings, run.devices
        self.callback, self.out = run.callback, run.out
        self.steps = count_steps(run.settings, run.loader)
        self.step, self.saved, self.epoch_length = 0, 0, 0
        self.window: list[Tensor] = []
        """What the steps since the last report returned."""
        self.last: dict[str, Any] = {}
        self.failed: list[dict[str, Any]] = []
        """The attempts before this one: seed, step and reason."""
        self.began = self.saved_at = time.monotonic()

    @property
    def seed(self) -> int:
        return fresh_seed(self.settings.seed, len(self.failed))

    def go(self, tell: Update) -> None:
        """All steps from where the run stands."""
        while self.step < self.steps:
            try:
                self._epoch(tell)
            except Diverged as failure:
                self._restart(str(failure))

    def _epoch(self, tell: Update) -> None:
        """The steps that are left of an epoch."""
        every = self.settings.checkpoint_steps
        epoch = self.step // self.epoch_length if self.epoch_length else 0
        position = epoch * self.epoch_length
        for batch in epoch_of(self.loader, self.seed, epoch):
            position += 1
            if position <= self.step:
                continue
            self.window.append(self.learner.step(batch, self.step))
            self.step += 1
            tell(self.step, self.steps)
            if self.step % self.settings.log_every == 0 or self.step == self.steps:
                self._report()
            due = time.monotonic() - self.saved_at > 60 * self.settings.checkpoint_minutes
            if due or self.step == self.steps or (every is not None and self.step % every == 0):
                self._save()
            if self.step == self.steps:
                return
        if position == epoch * self.epoch_length:
            raise PatchlightError("the loader gave no batch; give one that can be walked once for each epoch")
        self.epoch_length = position if not self.epoch_length else self.epoch_length

    def _restart(self, reason: str) -> None:
        """Begin again at step 0 with the next seed; the checkpoint records it."""
        self.failed.append({"seed": self.seed, "step": self.step + 1, "reason": reason})
        warn(f"step {self.step + 1}: {reason}; training starts again with seed {self.seed}", TrainingWarning)
        self.learner.start(self.seed, len(self.failed))
        self.step, self.last = 0, {}
        self.window.clear()
        self._save()

    def _report(self) -> None:
        means = self._finite_means()
        self.window.clear()
        now = self.learner.report(self.step, self.steps, means, time.monotonic() - self.began)
        self.last = asdict(now)
        if not self.devices.main:
            return
        if self.out is not None:
            append_metrics(self.out / "metrics.csv", self.last)
            if self.settings.tensorboard:
                _tensorboard(self.out, self.last)
        if self.callback is not None:
            self.callback(now)

    def _finite_means(self) -> dict[str, float]:
        means = dict(zip(self.learner.columns, torch.stack(self.window).mean(0).tolist(), strict=True))
        loss: float = means["loss"]
        if not math.isfinite(loss) or not all(bool(p.isfinite().all()) for p in self.learner.network.parameters()):
            kept = f"; the checkpoint of step {self.saved} is kept in '{self.out}'" if self.saved else ""
            told = f"the loss became {loss} by step {self.step}{kept}"
            raise PatchlightError(f"{told}; check the images, or {self.learner.remedy}")
        return means

    def _save(self) -> None:
        """One file, whole or not at all; nothing that is not finite is ever written."""
        if self.out is None:
            return
        if self.window:
            self._finite_means()
        if self.devices.main:
            told = torch.stack(self.window) if self.window else torch.empty(0, len(self.learner.columns))
            about = {"step": self.step, "settings": self.settings.fixed(), "epoch": self.epoch_length}
            about |= {"last": self.last or None, "failed_attempts": self.failed}
            parts = {**self.learner.state(), "window": {"told": told}}
            write_checkpoint(self.out / "checkpoint.safetensors", about, parts)
        self.saved, self.saved_at = self.step, time.monotonic()

    def resume(self, out: Path, wanted: bool) -> None:
        """Take up the checkpoint in `out`, where there is one."""
        path, metrics = out / "checkpoint.safetensors", out / "metrics.csv"
        if not wanted or not path.is_file():
            metrics.unlink(missing_ok=True)
            return
        about, parts = read_checkpoint(path)
        mine, theirs = self.settings.fixed(), about["settings"]
        if mine != theirs:
            other = ", ".join(sorted(k for k in mine if mine[k] != theirs.get(k)))
            raise PatchlightError(f"'{out}' holds a run with another {other}; choose another folder, or do not resume")
        self.failed = about.get("failed_attempts", [])
        if self.failed:
            self.learner.start(self.seed, len(self.failed))
        try:
            self.learner.restore(parts)
        except (KeyError, RuntimeError) as error:
            raise PatchlightError(f"the checkpoint in '{out}' was made for another model") from error
        device = next(self.learner.network.parameters()).device
        self.window = list(parts["window"]["told"].to(device))
        self.step = self.saved = int(about["step"])
        self.epoch_length = int(about["epoch"])
        self.last = about["last"] or {}
        cut_metrics(metrics, self.step, len(self.failed))


def _tensorboard(out: Path, row: dict[str, Any]) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing_extra("the setting tensorboard needs", "tensorboard", "train") from error
    with SummaryWriter(str(out)) as writer:
        for name in (key for key in row if key not in ("step", "steps", "seconds")):
            writer.add_scalar(name, row[name], row["step"])
