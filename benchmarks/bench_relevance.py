"""TransAtt beside a plain float64 forward and backward, alone and in a batch, and beside its slow, literal version."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import patchlight as pl
from benchmarks.common import device, medians, record
from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from tests.literal.lrp import Literal


def main(batch: int = 16) -> None:
    torch.manual_seed(0)
    vit = pl.load("deit_tiny_patch16_224", pretrained=False, device=device())
    double = pl.wrap(copy.deepcopy(vit.model).double())
    images = torch.randn(batch, 3, *vit.preprocess.size, device=device())
    targets = Targets(torch.arange(batch)[:, None] % vit.classes)
    request = resolve("transatt")

    def plain(some: Tensor) -> None:
        x = some.double().requires_grad_()
        torch.autograd.grad(double.model(x).gather(1, targets.index[: len(x)].to(x.device)).sum(), x)

    def transatt(some: Tensor) -> None:
        compute(vit, some, [request], targets[: len(some)], 0)

    seconds = medians(
        {
            "plain, batch": lambda: plain(images),
            "transatt, batch": lambda: transatt(images),
            "plain, one": lambda: plain(images[:1]),
            "transatt, one": lambda: transatt(images[:1]),
            "literal, one": lambda: Literal(double, images[:1].double(), 0, "ours").transatt(),
        },
        repeats=3,
    )
    rows = [
        [f"transatt / float64 forward + backward, batch {batch}", seconds["transatt, batch"] / seconds["plain, batch"]],
        ["transatt / float64 forward + backward, one image", seconds["transatt, one"] / seconds["plain, one"]],
        [f"per image in a batch of {batch} / alone", seconds["transatt, batch"] / batch / seconds["transatt, one"]],
        ["literal version / transatt, one image", seconds["literal, one"] / seconds["transatt, one"]],
    ]
    table = [[str(name), f"{ratio:.2f}"] for name, ratio in rows]
    record("relevance", "Relevance, deit_tiny, float64", ["what", "ratio"], table)


if __name__ == "__main__":
    main()
