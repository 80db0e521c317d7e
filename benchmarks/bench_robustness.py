"""Max-sensitivity beside captum's, with the same method, the same draws and the same values."""

from __future__ import annotations

from collections.abc import Callable

import timm
import torch
from captum.attr import InputXGradient
from captum.metrics import sensitivity_max
from torch import Tensor

import patchlight as pl
from benchmarks.common import device, medians, record
from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.methods.requests import resolve
from patchlight.metrics.base import MapFunction
from patchlight.metrics.robustness import uniform_noise
from patchlight.study.sources import map_function

IMAGES, DRAWS, RADIUS = 4, 10, 0.02
Explanation = Callable[[Tensor | tuple[Tensor, ...]], tuple[Tensor]]


def ours(vit: Anatomy, images: Tensor, method: MapFunction) -> Tensor:
    """All draws of all images, batched."""
    return pl.evaluate(vit, images, method, "max-sensitivity", target=0, samples=DRAWS, radius=RADIUS).values


def one_by_one(images: Tensor, explain: Explanation) -> Tensor:
    """captum as the TIS paper calls it: an image at a time, a draw at a time."""
    found = []
    for image in images:
        torch.manual_seed(0)
        found.append(sensitivity_max(explain, image[None], _uniform, RADIUS, DRAWS, max_examples_per_batch=1))
    return torch.cat(found)


def at_once(images: Tensor, explain: Explanation) -> Tensor:
    """captum with everything in one batch."""
    noise = uniform_noise(tuple(images.shape[1:]), DRAWS, RADIUS, 0).to(images).repeat(len(images), 1, 1, 1)
    return sensitivity_max(explain, images, lambda given: given + noise, RADIUS, DRAWS)


def _uniform(images: Tensor, radius: float) -> Tensor:
    return images + torch.empty(images.shape).uniform_(-radius, radius).to(images)


def as_captum_asks(vit: Anatomy, method: MapFunction) -> Explanation:
    def explain(given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor]:
        images = given[0] if isinstance(given, tuple) else given
        return (method(vit, images, Targets(torch.zeros(len(images), 1, dtype=torch.long)), 0),)

    return explain


def captums_own(model: torch.nn.Module) -> Explanation:
    attribute = InputXGradient(model).attribute

    def explain(given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor]:
        images = given[0] if isinstance(given, tuple) else given
        with torch.enable_grad():
            return (attribute(images.clone().requires_grad_(), target=0).sum(1).detach(),)

    return explain


def main() -> None:
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224").eval().requires_grad_(False).to(device())
    torch.nn.init.trunc_normal_(plain.head.weight, std=0.05)
    vit = pl.wrap(plain, name="vit_tiny")
    images = torch.randn(IMAGES, 3, 224, 224, device=device())
    genatt, ixg = map_function(resolve("genatt")), map_function(resolve("ixg", {"level": "pixel"}))
    rows = []
    for name, method, theirs in (
        ("genatt in both", genatt, as_captum_asks(vit, genatt)),
        ("ixg on pixels, each its own", ixg, captums_own(plain)),
    ):
        values = [f(images, theirs).double().cpu() for f in (one_by_one, at_once)]
        mine = ours(vit, images, method)
        apart = max(float(((v - mine) / mine).abs().max()) for v in values)
        seconds = medians(
            {
                "patchlight": lambda m=method: ours(vit, images, m),
                "captum, all at once": lambda t=theirs: at_once(images, t),
                "captum, one by one": lambda t=theirs: one_by_one(images, t),
            },
            repeats=3,
        )
        base = seconds["patchlight"]
        rows += [[name, who, f"{s * 1e3:.0f} ms", f"{s / base:.2f}", f"{apart:.0e}"] for who, s in seconds.items()]
    title = f"Max-sensitivity, vit_tiny, {IMAGES} images, {DRAWS} samples each"
    record("robustness", title, ["method", "who", "median", "over patchlight", "values differ by"], rows)


if __name__ == "__main__":
    main()
