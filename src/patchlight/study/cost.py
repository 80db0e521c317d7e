"""Cost estimates before anything is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import LongRun, warn
from patchlight.core.registry import Settings
from patchlight.core.text import duration, plural
from patchlight.methods.base import Ablates, LayerMap
from patchlight.methods.requests import Request
from patchlight.metrics.base import MetricRequest

LONG = 60.0
"""Seconds above which a warning comes before the start."""
BATCH = 8
"""Images per forward pass when its time is measured."""


def explain_forwards(request: Request, vit: Anatomy | None = None) -> float:
    """About how many forward passes one map costs."""
    base, settings = request.name.split(".")[0], request.settings
    samples = float(settings.get("samples", settings.get("steps", 1)))
    patches = 196 if vit is None else vit.cells
    forwards = {
        **dict.fromkeys(("tis", "posterior", "kernel-shap"), 4 + samples / 2),
        **dict.fromkeys(("rise", "lime", "hsic"), samples),
        **dict.fromkeys(("ig", "smoothgrad", "dave"), 3 * samples),
        **dict.fromkeys(("occlusion", "pami", "atman", "caap"), float(patches)),
        **{"bt-h": 2 * samples, "bt-t": 2 * samples, "tam": 2 * samples, "score-cam": 400.0, "vit-cx": 200.0},
        **{"search": 4 + samples / 2 + _search_forwards(settings, patches), "random": 0.05},
        **{"mda": 500 + float(settings.get("candidates") or 28) * patches / float(settings.get("side", 1)) ** 2},
        **{"decompx-bias": float(patches), **dict.fromkeys(("alti", "gradcam-aug"), 20.0)},
        **dict.fromkeys(("globenc", "lrp", "transatt"), 12.0),
    }
    usual = 4.0 if isinstance(request.method, LayerMap) else 100.0 if isinstance(request.method, Ablates) else 10.0
    return forwards.get(base, usual)


def _search_forwards(settings: Settings, patches: int) -> float:
    """About how many forward passes a search takes; a set and its complement together have the tokens of one."""
    regions = patches / float(settings.get("side", 1)) ** 2
    each = {"lazy": 3.0, "greedy": regions / 2, "phasewin": regions / 3}
    forwards = each.get(settings.get("schedule", "guided"), float(settings.get("candidates") or 0)) * regions
    budget = settings.get("budget")
    return forwards if budget is None else min(forwards, budget / 2)


def measure_seconds(request: MetricRequest, vit: Anatomy, forward: float, explanation: float) -> float:
    """About how many seconds a metric needs for one image, given those of a forward pass and of a map."""
    settings = request.settings
    if request.metric.explains:
        return int(settings.get("samples", vit.depth + 3)) * explanation
    shares = len(settings.get("shares", (1.0,)))
    if request.metric.ablates and "samples" in settings:  # random sets of patches
        return (1 + int(settings["samples"]) * shares) * forward
    steps = settings.get("steps", settings.get("points", shares if "shares" in settings else 10)) or 100
    return (2 * int(steps) + 2) * forward if request.metric.ablates else forward


def comparison_seconds(
    vit: Anatomy, requests: Sequence[Request], metrics: Sequence[MetricRequest], forward: float
) -> float:
    """About how many seconds it takes to explain one image with all methods and measure the maps with all metrics."""
    maps = [forward * explain_forwards(request, vit) for request in requests]
    return sum(each + sum(measure_seconds(metric, vit, forward, each) for metric in metrics) for each in maps)


def forward_seconds(vit: Anatomy, image: Tensor, most: float) -> float:
    """Seconds per image [1,C,H,W] of a forward pass of eight, the fastest of three within about `most` seconds."""
    vit.logits(image)  # the first pass of a process is slower
    batch, times = image.repeat(BATCH, 1, 1, 1), list[float]()
    while len(times) < 3 and (not times or sum(times) < most):
        start = time.monotonic()
        vit.logits(batch).cpu()  # a GPU queues the work; copying the result waits for it
        times.append(time.monotonic() - start)
    return min(times) / BATCH


def warn_if_long(vit: Anatomy, count: int, requests: Sequence[Request], metrics: Sequence[MetricRequest]) -> None:
    """Warn if explaining and measuring `count` images will take more than a minute."""
    if count * comparison_seconds(vit, requests, metrics, 1.0) < 20:  # forward passes: not worth timing one
        return
    blank = vit.place(torch.zeros(1, *vit.input_shape))
    seconds = count * comparison_seconds(vit, requests, metrics, forward_seconds(vit, blank, 0.5))
    if seconds > LONG:
        what = f"{plural(len(requests), 'method')} by {plural(len(metrics), 'metric')} on {plural(count, 'image')}"
        fine = next((m.metric.name for m in metrics if (m.settings.get("steps") or 0) > 28), None)
        coarser = ", or fewer steps: steps=28" if fine else ""
        words = f"measuring {what} will take about {duration(seconds)}; fewer images or methods take less{coarser}"
        warn(words, LongRun)
