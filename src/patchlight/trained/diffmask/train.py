"""Training DiffMask beside a frozen model: a short loop that can be killed at any moment and goes on where it was.

Every draw is a function of the seed and the step alone, so a checkpoint holds weights and optimiser, no random state.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy
from patchlight.anatomy.load import wrap
from patchlight.errors import PatchlightError, Unsupported, warn
from patchlight.evidence.precision import chosen, tf32
from patchlight.files import check_writable
from patchlight.targets import kl_divergence
from patchlight.trained.diffmask.batches import check_data, epoch_of, images_and_labels, length_of
from patchlight.trained.diffmask.calibration import Finish, calibrate, finish
from patchlight.trained.diffmask.checkpoint import append_metrics, cut_metrics, read_checkpoint, write_checkpoint
from patchlight.trained.diffmask.gates import DiffMask, Gates, masked_logits, new_gates, observe, why_not
from patchlight.trained.diffmask.objective import Lookahead, Multipliers, penalty
from patchlight.trained.diffmask.settings import Callback, Progress, Settings, TrainingWarning, fixed

SLOPE = 0.4 / math.log(10)
"""How many alphas a factor e of the price shifts the gates: 0.4 for a factor of ten."""
LATE = 1000
"""Steps by which something must be masked: many runs begin by opening every gate."""
LAST_EPOCH = 2**31
"""The order of batches from which the last calibration takes its own."""


def train(
    vit: Anatomy | nn.Module,
    loader: Iterable[Any],
    settings: Settings | None = None,
    callback: Callback | None = None,
    out: str | Path | None = None,
    initial: DiffMask | None = None,
    resume: bool = True,
    held_out: Iterable[Any] | None = None,
) -> DiffMask:
    """Train gates for a frozen model on batches of images, or of (images, labels): labels are only checked.

    Minimise what is kept subject to KL(p_clean || p_masked) <= m: with lambda_k of the last gate k used,
    loss = penalty + lambda_k (KL - m). A step is two forwards and one backward of the model. With `out`, checkpoints
    and `metrics.csv` go there, and a run that was killed goes on from its last checkpoint to the same weights. At the
    end beta is set so that KL <= m holds for the mask itself, on `finish` batches of `held_out`, images the model was
    not trained on (without it, of the training images, on which a model is surer and the divergence smaller). `initial`
    are gates to begin with. Under `accelerate launch` every process takes its share of the batches.
    """
    vit, settings = wrap(vit), settings or Settings()
    settings = settings.model_copy(update={"precision": chosen(settings.precision, vit.device, vit.dtype)})
    reason = why_not(vit)
    if reason is not None:
        raise Unsupported(f"DiffMask cannot be trained here: {reason}")
    check_data(vit, loader)
    if held_out is not None:
        check_data(vit, held_out, "calibrate on")
    frozen = lowered(vit, settings)
    run = _Run(frozen, loader, settings, Path(out) if out is not None else None, initial, callback)
    if run.out is not None:
        check_writable(run.out)
        run.resume(resume)
    # The gradient of the gates' weights, a narrow product, is slow in full float32.
    rounded = tf32() if settings.precision != "full" and vit.device.type == "cuda" else contextlib.nullcontext()
    with frozen.steady(), torch.inference_mode(False), torch.enable_grad(), rounded:
        run.go()
        run.finish(loader if held_out is None else held_out)
    explainer = DiffMask.of(run.gates, vit, settings=settings.model_dump(), result=run.summary())
    if run.out is not None and run.main:
        explainer.save(run.out)
    return explainer


class _Run:
    """The state of one training."""

    def __init__(
        self,
        vit: Anatomy,
        loader: Iterable[Any],
        settings: Settings,
        out: Path | None,
        initial: DiffMask | None,
        callback: Callback | None,
    ) -> None:
        self.vit, self.settings, self.out, self.callback = vit, settings, out, callback
        self.accelerator = _accelerator(vit)
        self.main = bool(self.accelerator.is_main_process)
        if self.accelerator.num_processes > 1:
            vit.model.to(self.accelerator.device)
            loader = self.accelerator.prepare(loader)
        self.loader, self.device = loader, vit.device
        self.gates = self._first_gates(initial)
        self.multipliers = Multipliers(
            self.gates.count,
            settings.lambda_start,
            settings.lambda_low,
            settings.lambda_high,
            settings.lambda_rate,
            settings.lambda_update,
            self.device,
        )
        names = {n: p for n, p in self.gates.named_parameters() if p.requires_grad}
        gate_rate, baseline_rate = settings.rates(self.gates.width)
        groups = [
            {"params": [p for n, p in names.items() if n != "baseline"], "lr": gate_rate},
            {"params": [p for n, p in names.items() if n == "baseline"], "lr": baseline_rate},
        ]
        for group in groups:
            group["initial_lr"] = group["lr"]
        adam = torch.optim.Adam([g for g in groups if g["params"]], fused=self.device.type == "cuda")
        self.optimiser = Lookahead(adam, names)
        self.generator = torch.Generator(self.device)
        self.step, self.saved, self.epoch_length = 0, 0, 0
        self.steps = settings.steps or math.ceil(settings.epochs * length_of(loader))
        self.done = torch.zeros(3, self.gates.count)
        """By gate: running agreement and kept share, and how often it was drawn; `weighted` draws read them."""
        self.window: list[Tensor] = []
        self.last: Progress | None = None
        self.finished: Finish | None = None
        self.began = time.monotonic()
        self.warned: set[str] = set()

    def _first_gates(self, initial: DiffMask | None) -> Gates:
        s, vit = self.settings, self.vit
        options = {
            "alpha": s.alpha,
            "beta": s.beta,
            "learn_baseline": s.baseline == "learned",
        }
        gates = new_gates(vit, s.seed, **options)
        if initial is not None:
            if (initial.gates.count, initial.gates.width) != (gates.count, gates.width):
                raise PatchlightError(
                    f"the initial gates are {initial.gates.count} of width {initial.gates.width}; "
                    f"{vit.name} needs {gates.count} of width {gates.width}"
                )
            gates.load_state_dict(initial.gates.state_dict())
        elif s.calibrate is not None:
            images, _ = images_and_labels(next(epoch_of(self.loader, s.seed, 0)))
            with vit.steady(), self._cast():
                seen = observe(vit, vit.place(images))
            calibrate(gates, seen.h0, torch.stack(seen.states), s.calibrate)
        return gates

    def go(self) -> None:
        """All steps from where the run stands."""
        model = self.accelerator.prepare_model(self.gates) if self.accelerator.num_processes > 1 else self.gates
        saved_at = time.monotonic()
        while self.step < self.steps:
            epoch = self.step // self.epoch_length if self.epoch_length else 0
            position = epoch * self.epoch_length
            for batch in epoch_of(self.loader, self.settings.seed, epoch):
                position += 1
                if position <= self.step:
                    continue
                self._one(model, batch)
                if self.step % self.settings.log_every == 0 or self.step == self.steps:
                    self._report()
                due = time.monotonic() - saved_at > 60 * self.settings.checkpoint_minutes
                every = self.settings.checkpoint_steps
                if due or self.step == self.steps or (every is not None and self.step % every == 0):
                    self._save()
                    saved_at = time.monotonic()
                if self.step == self.steps:
                    return
            if position == epoch * self.epoch_length:
                raise PatchlightError("the loader gave no batch; give one that can be walked once for each epoch")
            self.epoch_length = position if not self.epoch_length else self.epoch_length

    def finish(self, loader: Iterable[Any]) -> None:
        """The last calibration, which the checkpoint does not hold: a longer run goes on from gates as trained.

        Several processes all read the same batches, and so agree.
        """
        s = self.settings
        if s.finish == 0:
            return
        some = itertools.islice(epoch_of(loader, s.seed, LAST_EPOCH), s.finish)
        batches = (self.vit.place(images_and_labels(batch)[0]) for batch in some)
        self.finished = finish(self.gates, self.vit, batches, s.margin, self._cast)
        if self.finished.shift > 0 and self.finished.kept > 0.99 and self.step >= 200:
            told = f"{self.finished.kept:.1%} of the patches must be kept to hold the margin {s.margin:g}"
            warn(f"{told}: train longer, or raise margin", TrainingWarning)

    def _one(self, model: nn.Module, batch: Any) -> None:
        vit, s = self.vit, self.settings
        images, _ = images_and_labels(batch)
        images = vit.place(images)
        rng = np.random.default_rng([s.seed, self.step])
        k = self._draw(rng)
        noise = int(rng.integers(2**62)) + int(self.accelerator.process_index)
        self.optimiser.set_rates(min(1.0, (self.step + 1) / s.warmup) if s.warmup else 1.0)
        with self._cast():
            seen = observe(vit, images)
        generator = self.generator.manual_seed(noise)
        uniform = torch.rand(k + 1, *seen.h0.shape[:2], generator=generator, device=self.device, dtype=seen.h0.dtype)
        price = self._prices(len(images), generator)
        patches, log_keep = model(seen.h0, torch.stack(seen.states[: k + 1]), uniform, price * (s.alpha * SLOPE))
        with self._cast():
            logits = masked_logits(vit, images, patches)
        kl = kl_divergence(seen.logits, logits, vit.sigmoid)
        cost = penalty(log_keep, s.penalty, s.floor)
        weight = self.multipliers[k] * price.exp()
        loss = torch.addcmul(cost, weight, kl - s.margin)
        self.accelerator.backward(loss.mean())
        self.optimiser.step()
        self.optimiser.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            same = (logits > 0) == (seen.logits > 0) if vit.sigmoid else logits.argmax(1) == seen.logits.argmax(1)
            agreed = same.view(len(same), -1).to(kl).mean(1)
            told = torch.stack([kl, penalty(log_keep, "keep"), agreed, loss])
            told = (told if s.prices == 1 else told[:, ::2]).mean(1).float()
            if self.accelerator.num_processes > 1:
                told = self.accelerator.reduce(told, "mean")
            self.multipliers.step(k, told[0], s.margin)
        self.window.append(told)
        if s.gates == "weighted":
            self._remember(k, told)
        self.step += 1

    def _prices(self, count: int, generator: torch.Generator) -> Tensor:
        """The logarithm of every image's price [B]: 0 for the even ones, uniform for the odd."""
        price = (torch.rand(count, generator=generator, device=self.device) * 2 - 1) * math.log(self.settings.prices)
        price[::2] = 0
        return price

    def _draw(self, rng: np.random.Generator) -> int:
        shares = self._shares()
        if self.settings.gates == "weighted":
            agreement, kept, drawn = self.done.numpy()
            shares[(agreement > 0.75) & (kept < 0.1) & (drawn > 100)] *= 0.1
        return int(rng.choice(len(shares), p=shares / shares.sum()))

    def _shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How often each k is the last gate of a batch."""
        shares = np.full(self.gates.count, 1 / self.gates.count)
        if self.settings.gates in ("half", "all"):
            shares *= 0.5 if self.settings.gates == "half" else 0.0
            shares[-1] += 1 - shares.sum()
        return shares

    def _remember(self, k: int, told: Tensor, decay: float = 0.9) -> None:
        new = torch.stack([told[2], told[1]]).cpu()
        self.done[:2, k] = torch.where(self.done[2, k] > 0, decay * self.done[:2, k] + (1 - decay) * new, new)
        self.done[2, k] += 1

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.precision == "bf16":
            return torch.autocast(self.vit.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _report(self) -> None:
        kl, kept, agreement, loss = torch.stack(self.window).mean(0).tolist()
        self.window.clear()
        self._check_finite(loss)
        lambdas = torch.stack([v.detach() for v in self.multipliers.values]).mean().item()
        seconds = time.monotonic() - self.began
        self.last = Progress(self.step, self.steps, kl, kept, agreement, loss, lambdas, seconds)
        self._warn(self.last)
        if not self.main:
            return
        if self.out is not None:
            append_metrics(self.out / "metrics.csv", self.last)
            if self.settings.tensorboard:
                self._tensorboard(self.last)
        if self.callback is not None:
            self.callback(self.last)

    def _check_finite(self, loss: float) -> None:
        if math.isfinite(loss) and all(bool(torch.isfinite(p).all()) for p in self.optimiser.names.values()):
            return
        kept = f"; the checkpoint of step {self.saved} is kept in '{self.out}'" if self.saved else ""
        raise PatchlightError(
            f"the loss became {loss} by step {self.step}{kept}; check the images, or lower gate_rate and baseline_rate"
        )

    def _warn(self, now: Progress) -> None:
        if now.step < max(2 * self.settings.warmup, 200):
            return
        told = {
            "everything": now.kept < 0.01 and now.kl > 2 * self.settings.margin,
            "nothing": now.kept > 0.99 and now.step >= min(self.steps / 3, LATE),
        }
        advice = {
            "everything": "everything is masked and the output is lost: lower gate_rate and baseline_rate (the wider "
            "the model, the lower), or raise beta or calibrate, or lambda_start",
            "nothing": "nothing is masked: lower beta or calibrate, raise margin, or lower lambda_start",
        }
        for name in (n for n, is_so in told.items() if is_so and n not in self.warned):
            self.warned.add(name)
            share = f"kept {now.kept:.1%}, KL {now.kl:.3g}"
            warn(f"step {now.step}: {advice[name]} ({share})", TrainingWarning)

    def _tensorboard(self, now: Progress) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PatchlightError("tensorboard is not installed; pip install patchlight[train]") from error
        with SummaryWriter(str(self.out)) as writer:  # type: ignore[no-untyped-call]
            for name in ("kl", "kept", "agreement", "loss", "multiplier"):
                writer.add_scalar(name, getattr(now, name), now.step)  # type: ignore[no-untyped-call]

    def summary(self) -> dict[str, Any]:
        """What is kept about the training: its last report, and all gates at the end."""
        told: dict[str, Any] = {} if self.last is None else asdict(self.last)
        return told if self.finished is None else {**told, "finish": asdict(self.finished)}

    def _save(self) -> None:
        """One file, whole or not at all; nothing that is not finite is ever written."""
        if self.out is None:
            return
        if self.window:
            self._check_finite(float(torch.stack(self.window)[:, 3].mean()))
        if self.main:
            parts = {
                "gates": dict(self.gates.state_dict()),
                "optimiser": self.optimiser.state(),
                "multipliers": self.multipliers.state(),
                "draws": {"done": self.done},
                "window": {"told": torch.stack(self.window) if self.window else torch.empty(0, 4)},
            }
            about = {"step": self.step, "settings": fixed(self.settings), "epoch": self.epoch_length}
            about["last"] = None if self.last is None else asdict(self.last)
            write_checkpoint(self.out / "checkpoint.safetensors", about, parts)
        self.saved = self.step

    def resume(self, wanted: bool) -> None:
        """Take up the checkpoint in `out`, where there is one."""
        assert self.out is not None
        path = self.out / "checkpoint.safetensors"
        if not wanted or not path.is_file():
            if (self.out / "metrics.csv").exists():
                (self.out / "metrics.csv").unlink()
            return
        about, parts = read_checkpoint(path)
        if about["settings"] != fixed(self.settings):
            mine = fixed(self.settings)
            other = sorted(k for k in mine if mine[k] != about["settings"].get(k))
            raise PatchlightError(
                f"'{self.out}' holds a run with another {', '.join(other)}; choose another folder, or do not resume"
            )
        try:
            self.gates.load_state_dict(parts["gates"])
            self.optimiser.restore(parts["optimiser"])
            self.multipliers.restore(parts["multipliers"])
            self.done = parts["draws"]["done"]
        except (KeyError, RuntimeError) as error:
            raise PatchlightError(f"the checkpoint in '{self.out}' was made for another model") from error
        self.window = list(parts["window"]["told"].to(self.device))
        self.step = self.saved = int(about["step"])
        self.epoch_length = int(about["epoch"])
        self.last = Progress(**about["last"]) if about.get("last") else None
        cut_metrics(self.out / "metrics.csv", self.step)


def lowered(vit: Anatomy, settings: Settings) -> Anatomy:
    """The frozen model; under `precision="bf16"` a view whose linear maps and convolutions have bfloat16 weights.

    Autocast would cast them at every use, to the same values: a third of all launches of a small model's forward.
    """
    if settings.precision != "bf16" or not vit.castable:
        return vit
    return vit.view(torch.bfloat16, only=(nn.Linear, nn.Conv2d))


def _accelerator(vit: Anatomy) -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise PatchlightError(
            "training needs accelerate, which is not installed; pip install patchlight[train]"
        ) from error
    return Accelerator(cpu=vit.device.type == "cpu", device_placement=False)
