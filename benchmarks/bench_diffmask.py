"""The cost of DiffMask: a training step against the frozen model's own work, and an explanation against one forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import Tensor

import patchlight as pl
from benchmarks.common import device, medians, record
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.precision import lowered
from patchlight.trained.diffmask import DiffMask, DiffMaskSettings
from patchlight.trained.diffmask.gates import new_gates
from patchlight.trained.diffmask.train import GateLearner
from patchlight.trained.loop import Devices, training

BATCH = 32
TRAINING = {"cpu": [(8, "full", 1)], "cuda": [(64, "bf16", 20), (256, "bf16", 10)]}
"""By device: batch, precision, and how many steps are timed together."""


class Forever:
    """A loader that repeats one batch."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.images


def bare_step(vit: Anatomy, images: Tensor, precision: str) -> None:
    """Two forwards and one backward of the frozen model."""
    cast: Any = torch.autocast(images.device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with cast:
        with torch.no_grad():
            vit.readout(vit.run(vit.embed(images)))
        tokens = vit.embed(images).detach().requires_grad_()
        vit.readout(vit.run(tokens)).float().square().sum().backward()


def times(count: int, task: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            task()

    return run


def trained(vit: Anatomy) -> list[list[str]]:
    rows = []
    for batch, precision, count in TRAINING[device()]:
        images = torch.randn(batch, 3, 224, 224, device=device())
        settings = DiffMaskSettings.preset(precision=precision, steps=10**9)
        low = lowered(vit, settings.precision)
        learner = GateLearner(low, Forever(images), settings, Devices(low))

        def step(learner: GateLearner = learner, images: Tensor = images) -> None:
            learner.step(images, 0)

        def bare(images: Tensor = images, precision: str = precision) -> None:
            bare_step(vit, images, precision)

        def cast(low: Anatomy = low, images: Tensor = images, precision: str = precision) -> None:
            bare_step(low, images, precision)

        with vit.steady(), training(low, settings.precision):
            seconds = medians(
                {
                    "bare": times(count, bare),
                    "bare, weights cast beforehand": times(count, cast),
                    "step": times(count, step),
                },
                repeats=7,
            )
        for name in ("bare", "bare, weights cast beforehand") if precision == "bf16" else ("bare",):
            label = f"training, batch {batch}, {precision}; two forwards and one backward" + name.removeprefix("bare")
            mine, theirs = (1e3 * seconds[k] / count for k in ("step", name))
            rows.append([label, f"{mine:.1f} ms", f"{theirs:.1f} ms", f"{theirs / mine:.2f} of its throughput"])
    return rows


def explaining(vit: Anatomy) -> list[list[str]]:
    images = torch.randn(BATCH, 3, 224, 224, device=device())
    explainer = DiffMask.of(new_gates(vit), vit)
    count = 20 if device() == "cuda" else 1
    seconds = medians(
        {
            "forward": times(count, lambda: vit.logits(images)),
            "explain": times(count, lambda: pl.explain(vit, images, "diffmask", explainer=explainer)),
        },
        repeats=15,
    )
    mine, theirs = (1e3 * seconds[k] / count for k in ("explain", "forward"))
    return [[f"explaining, batch {BATCH}; one forward", f"{mine:.1f} ms", f"{theirs:.1f} ms", f"{mine / theirs:.2f}"]]


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10).eval().requires_grad_(False).to(device())
    vit = pl.wrap(model, name="vit_tiny")
    rows = [*explaining(vit), *trained(vit)]
    record("diffmask", "DiffMask and the model alone, vit_tiny", ["measurement", "DiffMask", "model", "ratio"], rows)


if __name__ == "__main__":
    main()
