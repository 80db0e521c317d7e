"""A tiny training with dropout, and readers of its logs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from tests.families import FAMILIES, randomise

TARGET = [1, 2]
NAMES = {"patchlight/probability", "patchlight/auto/ins-del", "patchlight/random/ins-del", "patchlight/seconds"}


def images() -> torch.Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def data(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(2)), torch.arange(count) % 7


def model(family: str = "vit") -> nn.Module:
    found = randomise(FAMILIES[family]()).train()
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return found


def train(net: nn.Module, log: Callable[[int], None] = lambda step: None, steps: int = 5) -> nn.Module:
    """A training loop that samples batches and dropout from torch's generator."""
    torch.manual_seed(0)
    pictures, classes = data()
    optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        log(step)
        some = torch.randint(len(pictures), (4,))
        nn.functional.cross_entropy(net(pictures[some]), classes[some]).backward()
        optimiser.step()
        optimiser.zero_grad()
    return net


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def events(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, Any]]]:
    """The numbers and pictures of TensorBoard's files below a folder, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers: dict[str, dict[int, float]] = {}
    pictures: dict[str, dict[int, Any]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        read = EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0}).Reload()
        for name in read.Tags()["scalars"]:
            numbers.setdefault(name, {}).update({e.step: e.value for e in read.Scalars(name)})
        for name in read.Tags()["images"]:
            shown = {e.step: np.asarray(Image.open(io.BytesIO(e.encoded_image_string))) for e in read.Images(name)}
            pictures.setdefault(name, {}).update(shown)
    return numbers, pictures
