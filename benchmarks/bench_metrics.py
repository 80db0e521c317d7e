"""Insertion and deletion against bare forwards of the same count and chunk, and pixel-flipping against quantus'."""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial

import numpy as np
import timm
import torch
from torch import Tensor, nn

import patchlight as pl
from benchmarks.common import device, medians, record
from patchlight.evidence.precision import Precision

STEPS = 224


class Grey(nn.Module):
    """A model of grey images, so that a pixel is one feature, as quantus counts them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.expand(-1, 3, -1, -1))


def bare(model: nn.Module, image: Tensor, count: int, chunk: int, half: bool) -> Tensor:
    """`count` forwards of the model in chunks, nothing else; on an accelerator in bfloat16."""
    images = image.expand(chunk, -1, -1, -1).contiguous()
    with torch.no_grad():
        for begin in range(0, count, chunk):
            some = images[: min(chunk, count - begin)]
            logits = model(some.bfloat16() if half else some)
    return logits


def flipped(quantus: object, model: nn.Module, grey: Tensor, maps: Tensor, target: int, steps: int) -> np.ndarray:
    """quantus' curve [B,P]: `steps` equal steps to 0."""
    metric = quantus.PixelFlipping(  # type: ignore[attr-defined]
        features_in_step=maps[0].numel() // steps,
        abs=False,
        normalise=False,
        perturb_baseline=0.0,
        disable_warnings=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = metric(
            model=model,
            x_batch=grey.cpu().numpy(),
            y_batch=np.full(len(grey), target),
            a_batch=maps[:, None].numpy(),
            softmax=True,
            device=device(),
            channel_first=True,
        )
    return np.array(found)


def _fresh(name: str) -> pl.Anatomy:
    torch.manual_seed(0)
    plain = timm.create_model(name).eval().requires_grad_(False).to(device())
    nn.init.normal_(plain.head.weight, std=0.05)
    return pl.wrap(plain, name=name)


def main(chunk: int = 64, repeats: int = 3) -> None:
    on_gpu = device() == "cuda"
    name = "vit_base_patch16_224" if on_gpu else "vit_tiny_patch16_224"
    vit = _fresh(name)
    half = copy.deepcopy(vit.model).bfloat16() if on_gpu else vit.model
    chunk, images = (512, 8) if on_gpu else (chunk, 1)
    batch = torch.randn(images, 3, 224, 224, device=device())
    maps = torch.rand(images, 14, 14)
    count = 2 * (STEPS + 1) * images
    precision: Precision = "auto" if on_gpu else "full"

    def measured() -> object:
        return pl.evaluate(
            vit, batch, maps, ["insertion", "deletion"], 0, steps=STEPS, chunk=chunk, precision=precision
        )

    tasks = {
        f"{count} bare forwards": lambda: bare(half, batch[:1], count, chunk, on_gpu),
        f"insertion and deletion, {STEPS} steps each, {images} image(s)": measured,
    }
    seconds = medians(tasks, repeats)
    base = next(iter(seconds.values()))
    rows = [[what, f"{s * 1e3:.0f} ms", f"{s / base:.2f}"] for what, s in seconds.items()]
    for some in dict.fromkeys(["vit_tiny_patch16_224", name]):
        rows += _against_quantus(vit if some == name else _fresh(some), repeats, chunk)
    record("metrics", f"Metrics, {name}, chunks of {chunk}", ["what", "median", "ratio"], rows)


def _against_quantus(vit: pl.Anatomy, repeats: int, chunk: int) -> list[list[str]]:
    """Deletion to 0 in equal steps, in full precision, on one image and on a batch; the curves must agree."""
    try:
        import quantus
    except ImportError:
        print("quantus is not installed; its rows are left out", file=sys.stderr)
        return []
    rows = []
    for images in (1, 8):
        steps = STEPS if device() == "cuda" or images == 1 else STEPS // 8
        grey = torch.randn(images, 1, 224, 224, device=device())
        order = torch.stack([torch.randperm(224 * 224) for _ in range(images)]).view(images, 224, 224).float()
        theirs = partial(flipped, quantus, Grey(vit.model).eval(), grey, order, 0, steps)
        ours = partial(
            pl.evaluate,
            vit,
            grey.expand(-1, 3, -1, -1),
            order,
            "deletion",
            0,
            steps=steps,
            fill="zero",
            first=False,
            chunk=chunk,
        )
        tasks = {"quantus": theirs, "patchlight": partial(ours, precision="full")}
        if device() == "cuda":
            tasks["patchlight in bfloat16"] = partial(ours, precision="auto")
        off = float(np.abs(ours(precision="full").curve.numpy() - theirs()).max())
        assert off <= 1e-4, f"the curves differ by {off}"
        seconds = medians(tasks, repeats)
        what = f"{vit.name}, {images} image(s), {steps} steps"
        rows += [
            [f"pixel-flipping, {who}, {what}", f"{s * 1e3:.0f} ms", f"{s / seconds['patchlight']:.2f}"]
            for who, s in seconds.items()
        ]
        rows[1 - len(seconds)][0] += f" (patchlight's values in full precision differ by {off:.0e})"
    return rows


if __name__ == "__main__":
    main()
