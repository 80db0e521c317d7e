"""The training loop: an interrupted training resumes where it stopped.

Samples depend only on the seed and the step, so a checkpoint has no random state. A failed training starts again with a
seed that is derived from the first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, TrainingWarning, Unsupported, warn
from patchlight.core.extras import import_extra
from patchlight.core.files import check_writable, write_atomic
from patchlight.core.progress import Progress, Update, show_progress
from patchlight.evidence.precision import Precision, rounding
from patchlight.trained.batches import check_data, epoch_of, length_of
from patchlight.trained.explainer import Explainer
from patchlight.trained.settings import Training

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

E = TypeVar("E", bound=Explainer[Any])
Report = TypeVar("Report", bound="DataclassInstance")
"""A progress report: numbers with `step`, `steps` and `seconds` among them."""
Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by name, by the part of the training they belong to."""


class Devices:
    """The processes of `accelerate launch`; in a single process, loader and network are unchanged."""

    def __init__(self, vit: Anatomy) -> None:
        accelerate = import_extra("accelerate", "training needs", "train")
        self._accelerator = accelerate.Accelerator(cpu=vit.device.type == "cpu", device_placement=False)
        self._alone = self._accelerator.num_processes == 1
        self.rank = int(self._accelerator.process_index)
        self.main = bool(self._accelerator.is_main_process)
        if not self._alone:
            vit.model.to(self._accelerator.device)

    def share(self, loader: Iterable[Any]) -> Iterable[Any]:
        """A loader of the batches of this process."""
        return loader if self._alone else self._accelerator.prepare(loader)

    def parallel(self, network: nn.Module) -> nn.Module:
        """The network to call in each step, with gradients averaged over all processes."""
        return network if self._alone else self._accelerator.prepare_model(network)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean of numbers over all processes."""
        return numbers if self._alone else self._accelerator.reduce(numbers, "mean")


@dataclass(frozen=True)
class TrainingRun:
    """The batches, settings, callbacks and output folder of a training; `loader` has the batches of this process."""

    loader: Iterable[Any]
    settings: Training
    devices: Devices
    callback: Callable[[Any], None] | None = None
    out: Path | None = None
    resume: bool = True
    progress: Progress | bool = True

    def finish(self, kind: type[E], network: nn.Module, vit: Anatomy, result: dict[str, Any]) -> E:
        """Make the explainer, and save it to the output folder."""
        explainer = kind.of(network, vit, settings=self.settings.model_dump(), result=result)
        if self.out is not None and self.devices.main:
            explainer.save(self.out)
        return explainer


def check_training(
    kind: type[Explainer[Any]], vit: Anatomy, loader: Iterable[Any], held_out: Iterable[Any] | None, use: str
) -> None:
    """Refuse a model that cannot have an explainer of a kind, and wrong batches; `use` is the purpose of `held_out`."""
    reason = kind.why_not(vit)
    if reason is not None:
        raise Unsupported(f"{kind.title} cannot be trained here: {reason}")
    check_data(vit, loader)
    if held_out is not None:
        check_data(vit, held_out, use)


@contextlib.contextmanager
def training(vit: Anatomy, precision: Precision) -> Iterator[None]:
    """Enable gradients for a training of a network beside a fixed model.

    Matrix products may use TF32 unless the precision is full; gradients of narrow weights are slow without it.
    """
    with vit.steady(), torch.inference_mode(False), torch.enable_grad(), rounding(vit, precision):
        yield


class Diverged(Exception):
    """Raised by `Learner.step` if a training has failed, with the reason; it starts again with a new seed."""


class Learner(ABC, Generic[Report]):
    """A network that is trained beside a frozen model, with its optimiser and other state."""

    network: nn.Module
    columns: tuple[str, ...]
    """The names of the numbers that `step` returns; `loss` is one of them."""
    remedy: str
    """What to change if the loss is not finite."""
    report_kind: ClassVar[type[Any]]
    """The dataclass of a report: `step`, `steps`, `columns` and `seconds`."""

    @abstractmethod
    def step(self, batch: Any, index: int) -> Tensor:
        """Take step `index` with a batch, and return the numbers of `columns`."""

    def start(self, seed: int, restarts: int) -> None:
        """Start again with this seed; needed only if `step` raises `Diverged`."""
        raise NotImplementedError

    def report(self, step: int, steps: int, means: dict[str, float], seconds: float) -> Report:
        """Make a report from the means of `columns` since the last one."""
        report: Report = self.report_kind(step=step, steps=steps, **means, seconds=seconds)
        return report

    @abstractmethod
    def state(self) -> Parts:
        """Everything that `restore` needs to resume to the same weights."""

    @abstractmethod
    def restore(self, parts: Parts) -> None:
        """Restore a state; a KeyError or RuntimeError if it belongs to another model."""


def train_steps(learner: Learner[Report], run: TrainingRun, words: str = "training") -> dict[str, Any]:
    """Take all steps, resuming from the checkpoint in `run.out`, and return the last report.

    If the training started again, `failed_attempts` in the report lists the seed, step and reason of each failure.
    `run.out` gets `checkpoint.safetensors`, `metrics.csv` and, if set, TensorBoard's files.

    Args:
        learner: What is trained.
        run: Batches, settings and output.
        words: The title of the progress bar.
    """
    loop = _Loop(learner, run)
    if run.out is not None:
        check_writable(run.out)
        loop.resume(run.out, run.resume)
    with show_progress(run.progress if run.devices.main else False, words) as advance:
        loop.go(advance)
    return {**loop.last, **({"failed_attempts": loop.failed} if loop.failed else {})}


def count_steps(settings: Training, loader: Iterable[Any]) -> int:
    """The number of steps of a training."""
    return settings.steps or math.ceil(settings.epochs * length_of(loader))


def fresh_seed(seed: int, restarts: int) -> int:
    """The seed after a number of restarts; the first attempt uses the seed itself."""
    return int(np.random.default_rng([seed, restarts, 11]).integers(2**31)) if restarts else seed


class _Loop(Generic[Report]):
    """The state of a training."""

    def __init__(self, learner: Learner[Report], run: TrainingRun) -> None:
        self.learner, self.loader, self.settings, self.devices = learner, run.loader, run.settings, run.devices
        self.callback, self.out = run.callback, run.out
        self.steps = count_steps(run.settings, run.loader)
        self.step, self.saved, self.epoch_length = 0, 0, 0
        self.window: list[Tensor] = []
        """The numbers of the steps since the last report."""
        self.last: dict[str, Any] = {}
        self.failed: list[dict[str, Any]] = []
        """Seed, step and reason of the failed attempts."""
        self.began = self.saved_at = time.monotonic()

    @property
    def seed(self) -> int:
        return fresh_seed(self.settings.seed, len(self.failed))

    def go(self, advance: Update) -> None:
        """Take all remaining steps."""
        while self.step < self.steps:
            try:
                self._epoch(advance)
            except Diverged as failure:
                self._restart(str(failure))

    def _epoch(self, advance: Update) -> None:
        """Take the remaining steps of an epoch."""
        every = self.settings.checkpoint_steps
        epoch = self.step // self.epoch_length if self.epoch_length else 0
        position = epoch * self.epoch_length
        for batch in epoch_of(self.loader, self.seed, epoch):
            position += 1
            if position <= self.step:
                continue
            self.window.append(self.learner.step(batch, self.step))
            self.step += 1
            advance(self.step, self.steps)
            if self.step % self.settings.log_every == 0 or self.step == self.steps:
                self._report()
            due = time.monotonic() - self.saved_at > 60 * self.settings.checkpoint_minutes
            if due or self.step == self.steps or (every is not None and self.step % every == 0):
                self._save()
            if self.step == self.steps:
                return
        if position == epoch * self.epoch_length:
            raise PatchlightError("the loader gave no batch; give one that can be iterated once per epoch")
        self.epoch_length = position if not self.epoch_length else self.epoch_length

    def _restart(self, reason: str) -> None:
        """Start again at step 0 with the next seed, and write a checkpoint."""
        self.failed.append({"seed": self.seed, "step": self.step + 1, "reason": reason})
        warn(f"step {self.step + 1}: {reason}; training starts again with seed {self.seed}", TrainingWarning)
        self.learner.start(self.seed, len(self.failed))
        self.step, self.last = 0, {}
        self.window.clear()
        self._save()

    def _report(self) -> None:
        means = self._finite_means()
        self.window.clear()
        report = self.learner.report(self.step, self.steps, means, time.monotonic() - self.began)
        self.last = asdict(report)
        if not self.devices.main:
            return
        if self.out is not None:
            append_metrics(self.out / "metrics.csv", self.last)
            if self.settings.tensorboard:
                _tensorboard(self.out, self.last)
        if self.callback is not None:
            self.callback(report)

    def _finite_means(self) -> dict[str, float]:
        means = dict(zip(self.learner.columns, torch.stack(self.window).mean(0).tolist(), strict=True))
        loss: float = means["loss"]
        if not math.isfinite(loss) or not all(bool(p.isfinite().all()) for p in self.learner.network.parameters()):
            saved = f"; the checkpoint of step {self.saved} is in '{self.out}'" if self.saved else ""
            advice = f"check the images, or {self.learner.remedy}"
            raise PatchlightError(f"the loss became {loss} by step {self.step}{saved}; {advice}")
        return means

    def _save(self) -> None:
        """Write the checkpoint, unless a number is not finite."""
        if self.out is None:
            return
        if self.window:
            self._finite_means()
        if self.devices.main:
            window = torch.stack(self.window) if self.window else torch.empty(0, len(self.learner.columns))
            header = {"step": self.step, "settings": self.settings.resume_settings(), "epoch": self.epoch_length}
            header |= {"last": self.last or None, "failed_attempts": self.failed}
            parts = {**self.learner.state(), "window": {"told": window}}
            write_checkpoint(self.out / "checkpoint.safetensors", header, parts)
        self.saved, self.saved_at = self.step, time.monotonic()

    def resume(self, out: Path, resume: bool) -> None:
        """Restore the checkpoint in `out`, if there is one."""
        path, metrics = out / "checkpoint.safetensors", out / "metrics.csv"
        if not resume or not path.is_file():
            metrics.unlink(missing_ok=True)
            return
        header, parts = read_checkpoint(path)
        current, saved = self.settings.resume_settings(), header["settings"]
        if current != saved:
            other = ", ".join(sorted(k for k in current if current[k] != saved.get(k)))
            raise PatchlightError(f"'{out}' holds a run with another {other}; choose another folder, or do not resume")
        self.failed = header.get("failed_attempts", [])
        if self.failed:
            self.learner.start(self.seed, len(self.failed))
        try:
            self.learner.restore(parts)
        except (KeyError, RuntimeError) as error:
            raise PatchlightError(f"the checkpoint in '{out}' belongs to another model") from error
        device = next(self.learner.network.parameters()).device
        self.window = list(parts["window"]["told"].to(device))
        self.step = self.saved = int(header["step"])
        self.epoch_length = int(header["epoch"])
        self.last = header["last"] or {}
        cut_metrics(metrics, self.step, len(self.failed))


def _tensorboard(out: Path, row: dict[str, Any]) -> None:
    module = "torch.utils.tensorboard"
    tensorboard = import_extra(module, "the setting tensorboard needs", "train", package="tensorboard")
    with tensorboard.SummaryWriter(str(out)) as writer:
        for name in (key for key in row if key not in ("step", "steps", "seconds")):
            writer.add_scalar(name, row[name], row["step"])


def write_checkpoint(path: Path, header: Mapping[str, Any], parts: Parts) -> None:
    """Write the parts of a training as one safetensors file, with a header as JSON."""
    from safetensors.torch import save

    tensors = {f"{a}/{b}": t.detach().cpu().contiguous() for a, part in parts.items() for b, t in part.items()}
    text = json.dumps(header)
    write_atomic(path, save(tensors, {"about": text, "sum": _checksum(text, tensors)}))


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of everything in a checkpoint, which detects silent damage."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict[str, Any], Parts]:
    """Read the header and the parts of a checkpoint."""
    from safetensors import SafetensorError, safe_open

    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if header["sum"] != _checksum(header["about"], tensors):
            raise ValueError("its checksum does not match")
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise PatchlightError(f"'{path}' is damaged, or of an earlier version; remove it to start again") from error
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    return json.loads(header["about"]), parts


def append_metrics(path: Path, row: Mapping[str, float]) -> None:
    """Append a report to `metrics.csv`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if first:
            file.write(",".join(row) + "\n")
        file.write(",".join(f"{value:.6g}" for value in row.values()) + "\n")


def cut_metrics(path: Path, step: int, restarts: int = 0) -> None:
    """Remove the reports after a checkpoint, and an incomplete last line."""
    if not path.is_file():
        return
    head, *rows = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    names = head.split(",")

    def is_before(row: str) -> bool:
        values = dict(zip(names, row.split(","), strict=False))
        if len(values) < len(names):
            return False
        attempt = int(values.get("restarts", 0))
        return attempt < restarts or (attempt == restarts and float(values["step"]) <= step)

    try:
        write_atomic(path, ("\n".join([head, *filter(is_before, rows)]) + "\n").encode())
    except (KeyError, ValueError) as error:
        raise PatchlightError(f"'{path}' is damaged; remove it, and the training resumes") from error
