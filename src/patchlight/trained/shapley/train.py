"""Trains ViT-Shapley: first a surrogate that works without patches, then the network that predicts the values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.progress import Progress
from patchlight.core.targets import kl_divergence
from patchlight.evidence.ablation import free_chunk
from patchlight.evidence.coalitions import coalition_logits, draw_coalitions, draw_sizes
from patchlight.evidence.precision import casting, lowered
from patchlight.trained.batches import LAST_EPOCH, images_and_labels, last_batches
from patchlight.trained.loop import (
    Devices,
    Learner,
    Parts,
    Report,
    TrainingRun,
    check_training,
    count_steps,
    train_steps,
    training,
)
from patchlight.trained.optimiser import Annealed
from patchlight.trained.shapley.networks import (
    Change,
    Copy,
    Networks,
    Surrogate,
    Values,
    ViTShapley,
    no_patches,
    normalise,
    read_logits,
    read_tokens,
)
from patchlight.trained.shapley.settings import (
    Callback,
    Coalitions,
    ShapleyProgress,
    ShapleySettings,
    SurrogateProgress,
)


def train(
    vit: Anatomy | nn.Module,
    loader: Iterable[Any],
    settings: ShapleySettings | None = None,
    callback: Callback | None = None,
    out: str | Path | None = None,
    resume: bool = True,
    held_out: Iterable[Any] | None = None,
    progress: Progress | bool = True,
) -> ViTShapley:
    """Train ViT-Shapley for a model.

    First a surrogate g, a copy of the model, learns to predict the model's output for the full image from the patches
    of a coalition alone: KL(p(x) || g(x, S)). Then phi learns the values v(S) = p_g(x, S): the mean of
    d (v(empty) + sum_{i in S} phi_i - v(S))^2 over coalitions of the Shapley kernel. A surrogate step takes three
    forwards and a backward; a step of phi takes `masks` + 2 forwards, of half the tokens on average, and a backward.
    Under `accelerate launch` the processes share the batches.

    Args:
        vit: The model; it is not changed.
        loader: Preprocessed batches of images or of (images, labels), iterated once per epoch; labels are only checked.
        settings: How to train; `ShapleySettings()` by default.
        callback: Called with a `SurrogateProgress` or `ShapleyProgress` every `log_every` steps.
        out: Folder for the explainer, its checkpoints and `metrics.csv` (those of the surrogate in `surrogate`); a
            killed training resumes to the same weights.
        resume: Whether to resume a training in `out`.
        held_out: Images the model was not trained on, for the loss at the end.
        progress: As in `explain`, in steps.
    """
    vit = wrap(vit)
    settings = (settings or ShapleySettings()).with_precision(vit)
    check_training(ViTShapley, vit, loader, held_out, "check on")
    frozen = vit.wide()
    devices = Devices(frozen)
    folder = None if out is None else Path(out)
    run = TrainingRun(devices.share(loader), settings, devices, callback, folder, resume, progress)
    with training(frozen, settings.precision):
        surrogate, first = _surrogate(frozen, settings, run)
        learner = ValueLearner(frozen, surrogate, settings, count_steps(settings, run.loader), devices)
        result = train_steps(learner, run, "training phi")
        if first is not None:
            result["surrogate"] = first
        if held_out is not None and settings.check:
            result["held_out"] = learner.check(held_out)
    return run.finish(ViTShapley, Networks(surrogate, learner.network), vit, result)


def _surrogate(vit: Anatomy, settings: ShapleySettings, run: TrainingRun) -> tuple[Surrogate, dict[str, Any] | None]:
    """Train the surrogate and return it with its last report, which is None if the surrogate is the model itself."""
    if settings.surrogate == "model":
        return Surrogate(Change({}, {}, {})), None
    length = {"steps": settings.surrogate_steps, "epochs": settings.surrogate_epochs}
    settings = settings.model_copy(update=length)
    learner = SurrogateLearner(vit, settings, count_steps(settings, run.loader), run.devices)
    out = None if run.out is None else run.out / "surrogate"
    result = train_steps(learner, replace(run, settings=settings, out=out), "training the surrogate")
    return learner.network.requires_grad_(False), result


def _generator(vit: Anatomy, settings: ShapleySettings, index: int, rank: int) -> torch.Generator:
    """The random generator of a step in this process."""
    seed = int(np.random.default_rng([settings.seed, index]).integers(2**62))
    return torch.Generator(vit.device).manual_seed(seed + rank)


class CopyLearner(Learner[Report]):
    """A changed copy of the model, with the optimiser of the change."""

    part: ClassVar[str]
    """The name of the weights in a checkpoint."""
    settings: ShapleySettings
    devices: Devices

    def prepare(self, network: nn.Module, vit: Anatomy, rate: float, steps: int) -> None:
        """Set the network and its optimiser."""
        self.network = network.to(vit.device)
        self.parallel = self.devices.parallel(self.network)
        self.optimiser = Annealed(self.network, rate, self.settings.weight_decay, self.settings.warmup, steps)

    def state(self) -> Parts:
        return {self.part: self.network.state_dict(), "optimiser": self.optimiser.state()}

    def restore(self, parts: Parts) -> None:
        self.network.load_state_dict(parts[self.part])
        self.optimiser.restore(parts["optimiser"])


class SurrogateLearner(CopyLearner[SurrogateProgress]):
    """Trains a copy of the model to work without patches."""

    network: Surrogate
    part, report_kind = "surrogate", SurrogateProgress
    columns = ("loss", "untrained", "agreement")
    remedy = "lower surrogate_rate"

    def __init__(self, vit: Anatomy, settings: ShapleySettings, steps: int, devices: Devices) -> None:
        s = settings
        self.vit, self.settings, self.devices = lowered(vit, s.precision), settings, devices
        self.copy = Copy(vit)
        weights = self.copy.used_weights(_blank(vit), read_logits)
        change = Change.new(weights, self.copy.block_weights(), s.rank, s.seed)
        self.prepare(Surrogate(change), vit, s.surrogate_rate, steps)

    def step(self, batch: Any, index: int) -> Tensor:
        vit, s = self.vit, self.settings
        images = vit.place(images_and_labels(batch)[0])
        z = draw_uniform(len(images), vit.cells, _generator(vit, s, index, self.devices.rank))
        with casting(vit, s.precision, trains=True):
            with torch.no_grad():
                clean = read_logits(vit, images).float()
                before = coalition_logits(vit, images, z, len(images))[:, 0].float()
            masked = self.parallel(self.copy, images, z, max(1, len(images) // 4))[:, 0].float()
        loss = kl_divergence(clean, masked, vit.outputs).mean()
        self.devices.backward(loss)
        self.optimiser.step(index)
        with torch.no_grad():
            same = (masked > 0) == (clean > 0) if vit.outputs.independent else masked.argmax(1) == clean.argmax(1)
            untrained = kl_divergence(clean, before, vit.outputs).mean()
            return self.devices.mean(torch.stack([loss.detach(), untrained, same.float().mean()]))


class ValueLearner(CopyLearner[ShapleyProgress]):
    """Trains the network that predicts the values of the surrogate."""

    network: Values
    part, report_kind = "values", ShapleyProgress
    columns = ("loss", "even")
    remedy = "lower rate"

    def __init__(
        self, vit: Anatomy, surrogate: Surrogate, settings: ShapleySettings, steps: int, devices: Devices
    ) -> None:
        s = settings
        self.settings, self.devices = settings, devices
        with torch.no_grad():
            self.vit = lowered(Copy(vit).apply(surrogate.change), s.precision)
        self.copy = Copy(vit)
        weights = self.copy.used_weights(_blank(vit), read_tokens) if s.backbone == "trained" else {}
        change = Change.new(weights, self.copy.block_weights(), s.rank, s.seed)
        change.load_state_dict({**change.state_dict(), **_shared_state(surrogate.change, change)})
        hidden = max(1, round(s.ratio * vit.width))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(s.seed)
            values = Values(change, vit.width, vit.heads, hidden, vit.outcomes)
        self.prepare(values, vit, s.rate, steps)
        with self.vit.steady(), casting(self.vit, s.precision):
            self.empty = no_patches(self.vit).float()

    def step(self, batch: Any, index: int) -> Tensor:
        loss, even = self.losses(batch, index, self.parallel)
        self.devices.backward(loss)
        self.optimiser.step(index)
        return self.devices.mean(torch.stack([loss.detach(), even]))

    def losses(self, batch: Any, index: int, network: nn.Module) -> tuple[Tensor, Tensor]:
        """The loss of the network on a batch, and the loss of equal values."""
        vit, s = self.vit, self.settings
        images = vit.place(images_and_labels(batch)[0])
        generator = _generator(vit, s, index, self.devices.rank)
        z = draw_pairs(len(images), s.masks, vit.cells, s.coalitions, generator)
        with casting(vit, s.precision, trains=True):
            with torch.no_grad():
                total = self._worth(read_logits(vit, images)) - self.empty
                worth = self._worth(coalition_logits(vit, images, z, free_chunk(vit))) - self.empty
            phi = network(self.copy, images)
        return fit(normalise(phi.float(), total), z, worth), fit(normalise(torch.zeros_like(phi), total), z, worth)

    def _worth(self, logits: Tensor) -> Tensor:
        return self.vit.probabilities(logits.float())

    @torch.no_grad()
    def check(self, loader: Iterable[Any]) -> dict[str, Any]:
        """The losses on held-out images, and the number of images."""
        batches = list(last_batches(loader, self.settings.seed, self.settings.check))
        losses = [self.losses(batch, LAST_EPOCH + i, self.network) for i, batch in enumerate(batches)]
        loss, even = torch.tensor(losses).mean(0).tolist()
        return {"loss": loss, "even": even, "images": sum(len(images_and_labels(batch)[0]) for batch in batches)}


def fit(phi: Tensor, z: Tensor, gain: Tensor) -> Tensor:
    """d times the mean squared error of sum_{i in S} phi_i and v(S) - v(empty) [B,m,C], for coalitions z [B,m,d]."""
    return phi.shape[1] * (z.to(phi) @ phi - gain).square().mean()


def _shared_state(first: Change, other: Change) -> dict[str, Tensor]:
    """The part of a change's state that fits another change."""
    state = other.state_dict()
    return {k: v for k, v in first.state_dict().items() if k in state and v.shape == state[k].shape}


def _blank(vit: Anatomy) -> Tensor:
    """One image of noise, for `Copy.used_weights`."""
    generator = torch.Generator().manual_seed(0)
    return vit.place(torch.randn(1, *vit.input_shape, generator=generator))


def draw_pairs(count: int, masks: int, players: int, kind: Coalitions, generator: torch.Generator) -> Tensor:
    """Sample coalitions z [count,masks,d] (True: member) per image; every second is the complement of the previous.

    `kernel`: size k with P(k) proportional to 1 / (k (d - k)), 0 < k < d, then a uniform subset of that size.
    `binomial`: k as before, then each patch independently with probability 1 - k / d, so sizes vary, and the empty and
    the full coalition occur. `code`: the same with k - 1 instead of k.
    """
    if kind == "kernel":
        return draw_coalitions(count * masks, players, generator).view(count, masks, players)
    size = draw_sizes(count * masks // 2, players, generator) - int(kind == "code")
    drawn = torch.rand(len(size), players, generator=generator, device=generator.device)
    z = drawn < 1 - size[:, None] / players
    return torch.stack([z, ~z], 1).view(count, masks, players)


def draw_uniform(count: int, players: int, generator: torch.Generator) -> Tensor:
    """Sample one coalition z [count,1,d] per image: every patch with probability u, u ~ U(0, 1) per image."""
    u = torch.rand(count, 1, 1, generator=generator, device=generator.device)
    return torch.rand(count, 1, players, generator=generator, device=generator.device) < u
