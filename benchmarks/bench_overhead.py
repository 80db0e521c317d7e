"""The benchmark's own share of a run on 64 images of `vit_tiny`: all time outside its forwards and backwards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from PIL import Image

from benchmarks.common import record
from patchlight.bench.local import load_planned, run
from patchlight.bench.plan import plan
from patchlight.bench.recipe import Recipe, override, parse

IMAGES, BATCH, STEPS = 64, 16, 7
NAME = "vit_tiny_patch16_224"
METHODS = ("genatt", "rollout")
RECIPE = """
name = "overhead"
batch_size = {batch_size}
[models.ViT]
name = "{name}"
weights = "{folder}/weights.safetensors"
[data]
kind = "folder"
path = "{folder}/images"
[methods]
{methods}
[metrics]
Ins = {{metric = "insertion", steps = {steps}}}
Del = {{metric = "deletion", steps = {steps}}}
"""


def prepared(folder: Path) -> Recipe:
    """Random weights, smooth images of the size of ImageNet's, and a recipe that uses them."""
    torch.manual_seed(0)
    safetensors.torch.save_file(timm.create_model(NAME).state_dict(), folder / "weights.safetensors")
    (folder / "images").mkdir()
    for i in range(IMAGES):
        small = (torch.rand(12, 16, 3) * 255).byte().numpy()
        Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC).save(folder / "images" / f"{i:03d}.jpg")
    methods = "\n".join(f'{name} = "{name}"' for name in METHODS)
    return parse(RECIPE.format(batch_size=BATCH, name=NAME, folder=folder, methods=methods, steps=STEPS))


class Clock:
    """Seconds spent in wrapped functions, without counting nested calls twice."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def main() -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepared(folder)
        vit = load_planned(plan(recipe).groups[0], "cpu")
        for part in ("embed", "block", "readout"):
            setattr(vit, part, clock.wrap(getattr(vit, part)))
        run(override(recipe, images=BATCH), folder / "warm")
        grad, clock.seconds = torch.autograd.grad, 0.0
        torch.autograd.grad = clock.wrap(grad)
        begin = time.perf_counter()
        try:
            run(recipe, folder / "run")
        finally:
            torch.autograd.grad = grad
        whole = time.perf_counter() - begin
    record(
        "overhead",
        f"Overhead of the benchmark ({IMAGES} images, {NAME}, {len(METHODS)} methods, 2 metrics)",
        ["what", "seconds"],
        [
            ["`bench run`: read, explain, measure, store", f"{whole:.2f}"],
            ["inside the model's forwards and backwards", f"{clock.seconds:.2f}"],
            ["share of everything else", f"{100 * (1 - clock.seconds / whole):.1f} %"],
        ],
    )
