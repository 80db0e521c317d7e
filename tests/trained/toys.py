"""A small ViT, batches for it, and a small explainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.precision import casting, lowered
from patchlight.trained import loop
from patchlight.trained.batches import images_and_labels
from patchlight.trained.loop import Devices, Parts
from patchlight.trained.optimiser import moments, restore_moments
from patchlight.trained.settings import Training
from tests.families import randomise

SIDE = 16


def toy(classes: int = 5, depth: int = 2, seed: int = 0) -> Anatomy:
    """Two blocks of width 16 on 4 x 4 patches."""
    torch.manual_seed(0)
    model = VisionTransformer(img_size=SIDE, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=classes)
    return pl.wrap(randomise(model, seed), name="toy", preprocess=pl.Preprocess((SIDE, SIDE)))


def pictures(count: int = 24, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def batches(count: int = 24, size: int = 4, classes: int = 5) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches of (images, labels)."""
    return DataLoader(TensorDataset(pictures(count), torch.arange(count) % classes), size, shuffle=True)


class StudentSettings(Training):
    rate: float = 1e-2


@dataclass(frozen=True)
class Told:
    step: int
    steps: int
    loss: float
    agreement: float
    seconds: float


class Student(loop.Learner[Told]):
    """A linear map of partly hidden pixels that learns the logits of a frozen model."""

    columns = ("loss", "agreement")
    remedy = "lower rate"
    report_kind = Told

    def __init__(self, vit: Anatomy, settings: StudentSettings, devices: Devices) -> None:
        self.vit, self.settings, self.devices = vit, settings, devices
        torch.manual_seed(settings.seed)
        self.network = nn.Linear(3 * SIDE * SIDE, vit.classes)
        self.parallel = devices.parallel(self.network)
        self.names = dict(self.network.named_parameters())
        self.adam = torch.optim.Adam(self.names.values(), settings.rate)

    def step(self, batch: Any, index: int) -> Tensor:
        images, _ = images_and_labels(batch)
        generator = torch.Generator().manual_seed(1000 * self.settings.seed + index)
        shown = torch.rand(images.shape, generator=generator) < 0.8
        with torch.no_grad(), casting(self.vit, self.settings.precision):
            want = self.vit.readout(self.vit.run(self.vit.embed(images))).float()
        found = self.parallel((images * shown).flatten(1))
        loss = F.mse_loss(found, want)
        self.devices.backward(loss)
        self.adam.step()
        self.adam.zero_grad()
        return self.devices.mean(torch.stack([loss.detach(), (found.argmax(1) == want.argmax(1)).float().mean()]))

    def state(self) -> Parts:
        return {"network": self.network.state_dict(), "adam": moments(self.adam, self.names)}

    def restore(self, parts: Parts) -> None:
        self.network.load_state_dict(parts["network"])
        restore_moments(self.adam, self.names, parts["adam"])


def teach(
    settings: StudentSettings,
    out: Path | None = None,
    callback: Callable[[Told], None] | None = None,
    loader: Any = None,
    vit: Anatomy | None = None,
    resume: bool = True,
) -> tuple[nn.Linear, dict[str, Any]]:
    """A trained student of the toy, and its last report."""
    vit = toy() if vit is None else vit
    settings = settings.with_precision(vit)
    frozen = lowered(vit, settings.precision)
    devices = Devices(frozen)
    shared = devices.share(batches() if loader is None else loader)
    student = Student(frozen, settings, devices)
    with loop.training(frozen, settings.precision):
        last = loop.train_steps(student, loop.TrainingRun(shared, settings, devices, callback, out, resume))
    return student.network, last
