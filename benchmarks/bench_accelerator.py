"""White-box methods on CUDA, beside the same model's own forward + backward in bfloat16 with fused attention.

Batches are those that `explain` chooses by itself unless said otherwise; the baseline has the same. `(graph)` is
`compile=True`. Authors' TransAtt takes 0.255 s an image on the same card, batch 1, the only one it takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch

import patchlight as pl
from benchmarks.bench_whitebox import one_pass_names
from benchmarks.common import medians, record
from patchlight.testing import spearman

LARGE = "vit_large_patch14_dinov2"
MODELS = {"ViT-B/16 @224": ("vit_base_patch16_224", 224), "ViT-L/14 @518": (LARGE, 518)}
ALONE = {"genatt": 1.5, "rollout": 1.5, "tokentm": 1.5, "ixg.plus.libra": 2.0, "decompx.skipplus": 2.0}
AUTHORS = 0.255
"""Seconds an image of the authors' TransAtt, ViT-B/16 on one H200."""


def main() -> None:
    if not torch.cuda.is_available():
        print("the accelerator benchmark needs CUDA")
        return
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    for title, (name, size) in MODELS.items():
        rows += _large(title, name, size)
    rows += _small()
    rows += _relevance()
    rows += _paths()
    header = ["model", "what", "batch", "ms an image", "ratio", "at most"]
    record("accelerator", "White-box methods on an accelerator, against forward + backward in bf16", header, rows)


def opened(name: str, size: int = 224) -> tuple[torch.nn.Module, pl.Anatomy]:
    torch.manual_seed(0)
    given: dict[str, Any] = {} if size == 224 else {"img_size": size}
    model = timm.create_model(name, num_classes=1000, **given).cuda().eval().requires_grad_(False)
    return model, pl.wrap(model, name=name)


def trained(model: torch.nn.Module, images: torch.Tensor) -> Callable[[], object]:
    """Forward and backward to the image in bfloat16, as people write it."""

    def task() -> object:
        with torch.autocast("cuda", torch.bfloat16):
            given = images.clone().requires_grad_()
            return torch.autograd.grad(model(given)[:, 0].float().sum(), given)

    return task


def explained(
    vit: pl.Anatomy, images: torch.Tensor, what: str | Sequence[str], **settings: Any
) -> Callable[[], object]:
    return lambda: pl.explain(vit, images, what, target=0, batch_size=len(images), **settings)


def _rows(
    title: str, batch: int, tasks: dict[str, Callable[[], object]], limits: dict[str, float], repeats: int = 3
) -> list[list[str]]:
    """Times and ratios of tasks to the first of them."""
    seconds = medians(tasks, repeats)
    base = next(iter(seconds.values()))
    return [
        [title, name, str(batch), f"{1e3 * s / batch:.3f}", f"{s / base:.2f}", f"{limits.get(name, '')}"]
        for name, s in seconds.items()
    ]


def _large(title: str, name: str, size: int) -> list[list[str]]:
    model, vit = opened(name, size)
    batch = 256 if size == 224 else 32
    images = torch.randn(batch, 3, size, size, device="cuda")
    tasks: dict[str, Callable[[], object]] = {"forward + backward, bf16": trained(model, images)}
    tasks |= {method: explained(vit, images, method) for method in ALONE}
    limits = ALONE | ({"ixg.plus.libra": 1.5, "decompx.skipplus": 1.5} if size == 224 else {})
    names = one_pass_names()
    every = f"{len(names)} one-pass methods"
    if size == 224:
        tasks[every] = explained(vit, images, names)
        tasks[every + ", fp16"] = explained(vit, images, names, precision="fp16")
        limits[every] = 3.0
    rows = _rows(title, batch, tasks, limits)
    images = images[:8]
    peaks = [_peak(task) for task in (trained(model, images), explained(vit, images, "genatt"))]
    return [*rows, [title, "genatt: peak memory", "8", "", f"{peaks[1] / peaks[0]:.2f}", "1.3" if size == 518 else ""]]


def _peak(task: Callable[[], object]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    task()
    return torch.cuda.max_memory_allocated()


def _small(batch: int = 16) -> list[list[str]]:
    model, vit = opened("vit_tiny_patch16_224")
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    names = one_pass_names()
    every = f"{len(names)} one-pass methods"
    tasks = {
        "forward + backward, bf16": trained(model, images),
        "genatt": explained(vit, images, "genatt"),
        "genatt (graph)": explained(vit, images, "genatt", compile=True),
        every: explained(vit, images, names),
        every + " (graph)": explained(vit, images, names, compile=True),
    }
    limits = {"genatt (graph)": 1.5, every + " (graph)": 2.0}
    return _rows("ViT-tiny @224", batch, tasks, limits, 9) + _gates(batch)


def _gates(batch: int) -> list[list[str]]:
    """DiffMask's explaining beside a forward of the bundled model."""
    vit = pl.load("pocket", device="cuda")
    images = torch.randn(batch, 3, *vit.preprocess.size, device="cuda")

    def forward() -> object:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return vit.model(images)

    tasks = {
        "forward, bf16": forward,
        "diffmask": explained(vit, images, "diffmask"),
        "diffmask (graph)": explained(vit, images, "diffmask", compile=True),
    }
    return _rows("pocket", batch, tasks, {}, 9)


def _relevance(batch: int = 64) -> list[list[str]]:
    _, vit = opened("vit_base_patch16_224")
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    rows = []
    for precision in ("auto", "full"):
        task = {"transatt": explained(vit, images, "transatt", precision=precision)}
        seconds = medians(task, 3)["transatt"] / batch
        what = f"transatt, {precision}; times as fast as the authors'"
        least = "60 or more" if precision == "auto" else ""
        rows.append(["ViT-B/16 @224", what, str(batch), f"{1e3 * seconds:.2f}", f"{AUTHORS / seconds:.0f}", least])
    return rows


def _paths(steps: int = 50, batch: int = 4) -> list[list[str]]:
    """ig and smoothgrad beside captum, at equal steps; the ratio is captum's time to ours."""
    try:
        from captum.attr import IntegratedGradients, NoiseTunnel, Saliency
    except ImportError:
        return []
    model, vit = opened("vit_base_patch16_224")
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    theirs = IntegratedGradients(model)
    tunnel = NoiseTunnel(Saliency(model))
    noise = {"nt_type": "smoothgrad", "nt_samples": steps, "stdevs": 1.0, "abs": True, "target": 0}
    tasks = {
        "ig": lambda: theirs.attribute(images, target=0, n_steps=steps, method="gausslegendre"),
        "smoothgrad": lambda: tunnel.attribute(images, **noise),
    }
    settings = {"ig": {"level": "pixel", "steps": steps}, "smoothgrad": {"preset": "tis", "samples": steps}}
    rows = []
    for name, task in tasks.items():
        ours = {p: explained(vit, images, name, precision=p, **settings[name]) for p in ("full", "auto")}
        seconds = medians({"captum": task, **ours}, 3)
        for precision, limit in (("full", "1 or more"), ("auto", "3 or more")):
            ratio, ms = seconds["captum"] / seconds[precision], 1e3 * seconds[precision] / batch
            what = f"{name}, {precision}, {steps} steps; times as fast as captum"
            rows.append(["ViT-B/16 @224", what, str(batch), f"{ms:.1f}", f"{ratio:.2f}", limit])
    found = pl.explain(vit, images, "ig", target=0, precision="full", **settings["ig"]).scores.flatten(1)
    other = tasks["ig"]().sum(1).flatten(1).cpu()
    worst = min(spearman(a, b) for a, b in zip(found, other, strict=True))
    error = float((found - other).abs().max() / other.abs().max())
    rows.append(
        ["ViT-B/16 @224", "ig, full, and captum: Spearman, relative error", "4", "", f"{worst:.6f}", f"{error:.0e}"]
    )
    return rows


if __name__ == "__main__":
    main()
