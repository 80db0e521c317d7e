"""Training DiffMask beside a frozen model: what a step of the shared loop does, and beta at its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy
from patchlight.anatomy.load import wrap
from patchlight.errors import PatchlightError, TrainingWarning, Unsupported, warn
from patchlight.evidence.precision import casting, lowered
from patchlight.progress import Progress as ToldProgress
from patchlight.targets import kl_divergence
from patchlight.trained import loop
from patchlight.trained.batches import check_data, epoch_of, images_and_labels
from patchlight.trained.checkpoint import Parts
from patchlight.trained.devices import Devices
from patchlight.trained.diffmask.calibration import Finish, calibrate, finish
from patchlight.trained.diffmask.gates import DiffMask, Gates, masked_logits, new_gates, observe, why_not
from patchlight.trained.diffmask.objective import Multipliers, penalty
from patchlight.trained.diffmask.settings import Callback, Progress, Settings
from patchlight.trained.optimiser import Lookahead
from patchlight.trained.precision import training

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
    progress: ToldProgress | bool = True,
) -> DiffMask:
    """Train gates for a frozen model on batches of images, or of (images, labels): labels are only checked.

    Minimise what is kept subject to KL(p_clean || p_masked) <= m: with lambda_k of the last gate k used,
    loss = penalty + lambda_k (KL - m). A step is two forwards and one backward of the model. With `out`, checkpoints
    and `metrics.csv` go there, and a run that was killed goes on from its last checkpoint to the same weights. At the
    end beta is set so that KL <= m holds for the mask itself, on `finish` batches of `held_out`, images the model was
    not trained on (without it, of the training images, on which a model is surer and the divergence smaller). `initial`
    are gates to begin with. `progress` is as in `explain`, of steps; `callback` gets the numbers. Under
    `accelerate launch` every process takes its share of the batches.
    """
    vit = wrap(vit)
    settings = (settings or Settings()).decided(vit)
    folder = None if out is None else Path(out)
    reason = why_not(vit)
    if reason is not None:
        raise Unsupported(f"DiffMask cannot be trained here: {reason}")
    check_data(vit, loader)
    if held_out is not None:
        check_data(vit, held_out, "calibrate on")
    frozen = lowered(vit, settings.precision)
    devices = Devices(frozen)
    shared = devices.share(loader)
    learner = GateLearner(frozen, shared, settings, devices, initial)
    with training(frozen, settings.precision):
        result = loop.run(learner, shared, settings, devices, callback, folder, resume, progress)
        done = learner.finish(loader if held_out is None else held_out)
    if done is not None:
        result["finish"] = asdict(done)
    explainer = DiffMask.of(learner.network, vit, settings=settings.model_dump(), result=result)
    if folder is not None and devices.main:
        explainer.save(folder)
    return explainer


class GateLearner(loop.Learner[Progress]):
    """Gates, their multipliers, and what moves both."""

    network: Gates
    columns = ("kl", "kept", "agreement", "loss")
    remedy = "lower gate_rate and baseline_rate"

    def __init__(
        self,
        vit: Anatomy,
        loader: Iterable[Any],
        settings: Settings,
        devices: Devices,
        initial: DiffMask | None = None,
    ) -> None:
        s = settings
        self.vit, self.settings, self.devices = vit, settings, devices
        self.network = gates = self._first_gates(loader, initial)
        self.joined = devices.joined(gates)
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
        self.generator = torch.Generator(vit.device)
        self.done = torch.zeros(3, gates.count)
        """By gate: running agreement and kept share, and how often it was drawn; `weighted` draws read them."""
        self.warned: set[str] = set()

    def _first_gates(self, loader: Iterable[Any], initial: DiffMask | None) -> Gates:
        s, vit = self.settings, self.vit
        gates = new_gates(vit, s.seed, alpha=s.alpha, beta=s.beta, learn_baseline=s.baseline == "learned")
        if initial is not None:
            if (initial.gates.count, initial.gates.width) != (gates.count, gates.width):
                raise PatchlightError(
                    f"the initial gates are {initial.gates.count} of width {initial.gates.width}; "
                    f"{vit.name} needs {gates.count} of width {gates.width}"
                )
            gates.load_state_dict(initial.gates.state_dict())
        elif s.calibrate is not None:
            images, _ = images_and_labels(next(epoch_of(loader, s.seed, 0)))
            with vit.steady(), casting(vit, s.precision):
                seen = observe(vit, vit.place(images))
            calibrate(gates, seen.h0, torch.stack(seen.states), s.calibrate)
        return gates

    def step(self, batch: Any, index: int) -> Tensor:
        vit, s = self.vit, self.settings
        images = vit.place(images_and_labels(batch)[0])
        rng = np.random.default_rng([s.seed, index])
        k = self.draw(rng)
        generator = self.generator.manual_seed(int(rng.integers(2**62)) + self.devices.rank)
        self.optimiser.set_rates(min(1.0, (index + 1) / s.warmup) if s.warmup else 1.0)
        with casting(vit, s.precision):
            seen = observe(vit, images)
        uniform = torch.rand(k + 1, *seen.h0.shape[:2], generator=generator, device=vit.device, dtype=seen.h0.dtype)
        price = self._prices(len(images), generator)
        patches, log_keep = self.joined(seen.h0, torch.stack(seen.states[: k + 1]), uniform, price * (s.alpha * SLOPE))
        with casting(vit, s.precision):
            logits = masked_logits(vit, images, patches)
        kl = kl_divergence(seen.logits, logits, vit.outputs)
        cost = penalty(log_keep, s.penalty, s.floor)
        weight = self.multipliers[k] * price.exp()
        loss = torch.addcmul(cost, weight, kl - s.margin)
        self.devices.backward(loss.mean())
        self.optimiser.step()
        self.optimiser.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            same = (logits > 0) == (seen.logits > 0) if vit.outputs.alone else logits.argmax(1) == seen.logits.argmax(1)
            agreed = same.view(len(same), -1).to(kl).mean(1)
            told = torch.stack([kl, penalty(log_keep, "keep"), agreed, loss])
            told = self.devices.mean((told if s.prices == 1 else told[:, ::2]).mean(1).float())
            self.multipliers.step(k, told[0], s.margin)
        if s.gates == "weighted":
            self._remember(k, told)
        return told

    def _prices(self, count: int, generator: torch.Generator) -> Tensor:
        """The logarithm of every image's price [B]: 0 for the even ones, uniform for the odd."""
        drawn = torch.rand(count, generator=generator, device=self.vit.device)
        price = (drawn * 2 - 1) * math.log(self.settings.prices)
        price[::2] = 0
        return price

    def draw(self, rng: np.random.Generator) -> int:
        """The last gate k of a batch."""
        shares = self._shares()
        if self.settings.gates == "weighted":
            agreement, kept, drawn = self.done.numpy()
            shares[(agreement > 0.75) & (kept < 0.1) & (drawn > 100)] *= 0.1
        return int(rng.choice(len(shares), p=shares / shares.sum()))

    def _shares(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How often each k is the last gate of a batch."""
        count = self.network.count
        shares = np.full(count, 1 / count)
        if self.settings.gates in ("half", "all"):
            shares *= 0.5 if self.settings.gates == "half" else 0.0
            shares[-1] += 1 - shares.sum()
        return shares

    def _remember(self, k: int, told: Tensor, decay: float = 0.9) -> None:
        new = torch.stack([told[2], told[1]]).cpu()
        self.done[:2, k] = torch.where(self.done[2, k] > 0, decay * self.done[:2, k] + (1 - decay) * new, new)
        self.done[2, k] += 1

    def report(self, step: int, steps: int, means: dict[str, float], seconds: float) -> Progress:
        multiplier = torch.stack([v.detach() for v in self.multipliers.values]).mean().item()
        now = Progress(step, steps, **means, multiplier=multiplier, seconds=seconds)
        self.warn(now)
        return now

    def warn(self, now: Progress) -> None:
        """Tell, once each, of the two ways in which training fails."""
        if now.step < max(2 * self.settings.warmup, 200):
            return
        told = {
            "everything": now.kept < 0.01 and now.kl > 2 * self.settings.margin,
            "nothing": now.kept > 0.99 and now.step >= min(now.steps / 3, LATE),
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

    def state(self) -> Parts:
        return {
            "gates": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
            "multipliers": self.multipliers.state(),
            "draws": {"done": self.done},
        }

    def restore(self, parts: Parts) -> None:
        self.network.load_state_dict(parts["gates"])
        self.optimiser.restore(parts["optimiser"])
        self.multipliers.restore(parts["multipliers"])
        self.done = parts["draws"]["done"]

    def finish(self, loader: Iterable[Any]) -> Finish | None:
        """The last calibration, which the checkpoint does not hold: a longer run goes on from gates as trained.

        Several processes all read the same batches, and so agree.
        """
        vit, s = self.vit, self.settings
        if s.finish == 0:
            return None
        some = itertools.islice(epoch_of(loader, s.seed, LAST_EPOCH), s.finish)
        batches = (vit.place(images_and_labels(batch)[0]) for batch in some)
        done = finish(self.network, vit, batches, s.margin, lambda: casting(vit, s.precision))
        if done.shift > 0 and done.kept > 0.99 and self.optimiser.taken >= 200:
            told = f"{done.kept:.1%} of the patches must be kept to hold the margin {s.margin:g}"
            warn(f"{told}: train longer, or raise margin", TrainingWarning)
        return done
