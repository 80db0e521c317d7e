"""Trains DiffMask beside a frozen model: the steps of the training loop, and the last calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, TrainingWarning, warn
from patchlight.core.progress import Progress
from patchlight.core.targets import kl_divergence
from patchlight.evidence.precision import casting, lowered
from patchlight.trained.batches import epoch_of, images_and_labels, last_batches
from patchlight.trained.diffmask.calibration import Finish, calibrate, finish
from patchlight.trained.diffmask.gates import DiffMask, Gates, Seen, masked_logits, new_gates, observe
from patchlight.trained.diffmask.objective import Multipliers, penalty
from patchlight.trained.diffmask.settings import Callback, DiffMaskProgress, DiffMaskSettings
from patchlight.trained.diffmask.watch import EVERY, FAILURES, Watch, probe_sums, read_probe
from patchlight.trained.loop import (
    Devices,
    Diverged,
    Learner,
    Parts,
    TrainingRun,
    check_training,
    count_steps,
    train_steps,
    training,
)
from patchlight.trained.optimiser import Lookahead

SLOPE = 0.4 / math.log(10)
"""Shift of the gates, in units of alpha, per factor e of the price: 0.4 for a factor of ten."""


def train(
    vit: Anatomy | nn.Module,
    loader: Iterable[Any],
    settings: DiffMaskSettings | None = None,
    callback: Callback | None = None,
    out: str | Path | None = None,
    initial: DiffMask | None = None,
    resume: bool = True,
    held_out: Iterable[Any] | None = None,
    progress: Progress | bool = True,
) -> DiffMask:
    """Train gates for a frozen model.

    The gates keep as few patches as possible subject to KL(p_clean || p_masked) <= m:
    loss = penalty + lambda_k (KL - m), with the multiplier of the last gate k in use. A step takes two forwards and one
    backward of the model. A failed training (the output is lost, nothing is masked, or patches that do not matter stay
    open) starts again with a new seed, at most `settings.restarts` times; the explainer's
    `about["result"]["failed_attempts"]` lists the failures. Under `accelerate launch` the processes share the batches.

    Args:
        vit: The model; it is not changed.
        loader: Preprocessed batches of images or of (images, labels), iterated once per epoch; labels are only checked.
        settings: How to train; `DiffMaskSettings()` by default.
        callback: Called with a `DiffMaskProgress` every `log_every` steps.
        out: Folder for the explainer, its checkpoints and `metrics.csv`; a killed run resumes to the same weights.
        initial: An explainer whose gates training starts from.
        resume: Whether to resume a training in `out`.
        held_out: Images the model was not trained on, for the last calibration; by default the training images, on
            which a model is more certain and the divergence smaller.
        progress: As in `explain`, in steps.
    """
    vit = wrap(vit)
    settings = (settings or DiffMaskSettings()).with_precision(vit)
    check_training(DiffMask, vit, loader, held_out, "calibrate on")
    frozen = lowered(vit, settings.precision)
    devices = Devices(frozen)
    folder = None if out is None else Path(out)
    run = TrainingRun(devices.share(loader), settings, devices, callback, folder, resume, progress)
    learner = GateLearner(frozen, run.loader, settings, devices, initial)
    with training(frozen, settings.precision):
        result = train_steps(learner, run)
        done = learner.finish(loader if held_out is None else held_out)
    if done is not None:
        result["finish"] = asdict(done)
    return run.finish(DiffMask, learner.network, vit, result)


@dataclass(frozen=True)
class MaskedBatch:
    """A batch under sampled masks: the Lagrangian and its parts [B], sum_i log P(z_i != 0) [B,P], and the logits."""

    loss: Tensor
    kl: Tensor
    log_keep: Tensor
    logits: Tensor


class GateLearner(Learner[DiffMaskProgress]):
    """The gates, their multipliers, and the optimisers of both."""

    network: Gates
    columns = ("kl", "kept", "agreement", "loss")
    remedy = "lower gate_rate and baseline_rate"

    def __init__(
        self,
        vit: Anatomy,
        loader: Iterable[Any],
        settings: DiffMaskSettings,
        devices: Devices,
        initial: DiffMask | None = None,
    ) -> None:
        self.vit, self.loader, self.settings, self.devices, self.initial = vit, loader, settings, devices, initial
        self.generator = torch.Generator(vit.device)
        self.start(settings.seed, 0)

    def start(self, seed: int, restarts: int) -> None:
        """Make new gates and optimisers."""
        s, vit = self.settings, self.vit
        self.seed, self.restarts = seed, restarts
        self.first_images = vit.place(images_and_labels(next(epoch_of(self.loader, seed, 0)))[0])
        """The images of the first calibration and of all probes."""
        self.network = gates = self._first_gates()
        self.parallel = self.devices.parallel(gates)
        self.multipliers = Multipliers(
            gates.count, s.lambda_start, s.lambda_low, s.lambda_high, s.lambda_rate, s.lambda_update, vit.device
        )
        names = {n: p for n, p in gates.named_parameters() if p.requires_grad}
        gate_rate, baseline_rate = s.rates(gates.width)
        groups = [
            {"params": [p for n, p in names.items() if n != "baseline"], "lr": gate_rate},
            {"params": [p for n, p in names.items() if n == "baseline"], "lr": baseline_rate},
        ]
        for group in groups:
            group["initial_lr"] = group["lr"]
        adam = torch.optim.Adam([g for g in groups if g["params"]], fused=vit.device.type == "cuda")
        self.optimiser = Lookahead(adam, names)
        self.done = torch.zeros(3, gates.count)
        """By gate: running agreement and kept share, and how often it was sampled; used by `weighted`."""
        self.watch = Watch(s.margin, s.warmup, count_steps(s, self.loader))
        self.warned: set[str] = set()

    def _first_gates(self) -> Gates:
        s, vit, initial = self.settings, self.vit, self.initial
        options = {"learn_baseline": s.baseline == "learned", "learn_beta": s.learn_beta}
        gates = new_gates(vit, self.seed, alpha=s.alpha, beta=s.beta, **options)
        if initial is not None:
            if (initial.gates.count, initial.gates.width) != (gates.count, gates.width):
                raise PatchlightError(
                    f"the initial gates are {initial.gates.count} of width {initial.gates.width}; "
                    f"{vit.name} needs {gates.count} of width {gates.width}"
                )
            gates.load_state_dict(initial.gates.state_dict())
        elif s.calibrate is not None:
            with vit.steady(), casting(vit, s.precision):
                seen = observe(vit, self.first_images)
            calibrate(gates, seen.h0, torch.stack(seen.states), s.calibrate)
        return gates

    def sampled(self, images: Tensor, seen: Seen, k: int, uniform: Tensor, price: Tensor) -> MaskedBatch:
        """The objective of each image, penalty + lambda_k price (KL - m), with the gates 0 .. k.

        `uniform` [k+1,B,P] in (0, 1) are the samples of the gates, and `price` [B] the log prices of the images.
        """
        vit, s = self.vit, self.settings
        patches, log_keep = self.parallel(
            seen.h0, torch.stack(seen.states[: k + 1]), uniform, price * (s.alpha * SLOPE)
        )
        with casting(vit, s.precision):
            logits = masked_logits(vit, images, patches)
        kl = kl_divergence(seen.logits, logits, vit.outputs)
        cost = penalty(log_keep, s.penalty, s.floor)
        loss = torch.addcmul(cost, self.multipliers[k] * price.exp(), kl - s.margin)
        return MaskedBatch(loss, kl, log_keep, logits)

    def step(self, batch: Any, index: int) -> Tensor:
        vit, s = self.vit, self.settings
        images = vit.place(images_and_labels(batch)[0])
        rng = np.random.default_rng([self.seed, index])
        k = self.draw(rng)
        generator = self.generator.manual_seed(int(rng.integers(2**62)) + self.devices.rank)
        self.optimiser.set_rates(min(1.0, (index + 1) / s.warmup) if s.warmup else 1.0)
        with casting(vit, s.precision):
            seen = observe(vit, images)
        uniform = torch.rand(k + 1, *seen.h0.shape[:2], generator=generator, device=vit.device, dtype=seen.h0.dtype)
        now = self.sampled(images, seen, k, uniform, self._prices(len(images), generator))
        self.devices.backward(now.loss.mean())
        self.optimiser.step()
        self.optimiser.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            numbers = self._numbers(now, seen.logits)
            self.multipliers.step(k, numbers[0], s.margin)
        if s.gates == "weighted":
            self._remember(k, numbers)
        if (index + 1) % EVERY == 0 or index + 1 == self.watch.steps:
            self._probe(index + 1)
        return numbers

    def _numbers(self, now: MaskedBatch, clean: Tensor) -> Tensor:
        """The numbers of `columns`: means over the images at price 1."""
        logits, kl = now.logits, now.kl
        same = (logits > 0) == (clean > 0) if self.vit.outputs.independent else logits.argmax(1) == clean.argmax(1)
        agreed = same.view(len(same), -1).to(kl).mean(1)
        numbers = torch.stack([kl, now.log_keep.exp().mean(-1), agreed, now.loss])
        return self.devices.mean((numbers if self.settings.prices == 1 else numbers[:, ::2]).mean(1).float())

    def _probe(self, step: int) -> None:
        """Probe the mask; a lasting failure starts the training again, or gives one warning."""
        s, vit, images = self.settings, self.vit, self.first_images
        sums = probe_sums(self.network, vit, images, s.margin, self.generator, s.precision)
        now = read_probe(self.devices.mean(sums.float()), len(images))
        failure = self.watch.add(step, now)
        if failure is None or failure in self.warned:
            return
        numbers = f"kept {now.kept:.1%}, KL {now.kl:.3g}"
        if self.restarts < s.restarts:
            raise Diverged(f"{FAILURES[failure].partition(':')[0]} ({numbers})")
        self.warned.add(failure)
        warn(f"step {step}: {FAILURES[failure]} ({numbers})", TrainingWarning)

    def _prices(self, count: int, generator: torch.Generator) -> Tensor:
        """The log price of each image [B]: 0 for even indices, uniform for odd ones."""
        uniform = torch.rand(count, generator=generator, device=self.vit.device)
        price = (uniform * 2 - 1) * math.log(self.settings.prices)
        price[::2] = 0
        return price

    def draw(self, rng: np.random.Generator) -> int:
        """Sample the last gate k of a batch."""
        shares = self._shares()
        if self.settings.gates == "weighted":
            agreement, kept, count = self.done.numpy()
            shares[(agreement > 0.75) & (kept < 0.1) & (count > 100)] *= 0.1
        return int(rng.choice(len(shares), p=shares / shares.sum()))

    def _shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The probability of each k to be the last gate of a batch."""
        count = self.network.count
        shares = np.full(count, 1 / count)
        if self.settings.gates in ("half", "all"):
            shares *= 0.5 if self.settings.gates == "half" else 0.0
            shares[-1] += 1 - shares.sum()
        return shares

    def _remember(self, k: int, numbers: Tensor) -> None:
        new, decay = torch.stack([numbers[2], numbers[1]]).cpu(), 0.9
        self.done[:2, k] = torch.where(self.done[2, k] > 0, decay * self.done[:2, k] + (1 - decay) * new, new)
        self.done[2, k] += 1

    def report(self, step: int, steps: int, means: dict[str, float], seconds: float) -> DiffMaskProgress:
        moving = self.multipliers.values[-1:] if self.settings.gates == "all" else self.multipliers.values
        multiplier = torch.stack([v.detach() for v in moving]).mean().item()
        return DiffMaskProgress(step, steps, **means, multiplier=multiplier, seconds=seconds, restarts=self.restarts)

    def state(self) -> Parts:
        return {
            "gates": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
            "multipliers": self.multipliers.state(),
            "draws": {"done": self.done},
            "watch": {"state": self.watch.state},
        }

    def restore(self, parts: Parts) -> None:
        self.network.load_state_dict(parts["gates"])
        self.optimiser.restore(parts["optimiser"])
        self.multipliers.restore(parts["multipliers"])
        self.done = parts["draws"]["done"]
        self.watch.state = parts["watch"]["state"]

    def finish(self, loader: Iterable[Any]) -> Finish | None:
        """Run the last calibration. The checkpoint does not contain it, so a longer training resumes without it.

        All processes read the same batches, so their results agree.
        """
        vit, s = self.vit, self.settings
        if s.finish == 0:
            return None
        batches = (vit.place(images_and_labels(batch)[0]) for batch in last_batches(loader, s.seed, s.finish))
        done = finish(self.network, vit, batches, s.margin, s.precision)
        if done.shift > 0 and done.kept > 0.99 and self.optimiser.taken >= 200:
            reason = f"{done.kept:.1%} of the patches must be kept to hold the margin {s.margin:g}"
            warn(f"{reason}: train longer, or raise margin", TrainingWarning)
        return done
