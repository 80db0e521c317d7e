"""The cost of `auto` for questions about boxes and regions, relative to a forward and backward pass of the model.

    python -m benchmarks.bench_questions [--device cuda] [--rounds 9]

Random weights in the sizes of YOLOS-S and DPT-B; one image. Both sides alternate, and the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import patchlight as pl
from benchmarks.common import _settle, record


def yolos() -> tuple[nn.Module, tuple[int, int], Any]:
    """A detector in the size of YOLOS-S."""
    config = transformers.YolosConfig(
        hidden_size=384, num_attention_heads=6, intermediate_size=1536, image_size=[512, 864], num_labels=91
    )
    return transformers.YolosForObjectDetection(config), (512, 864), pl.heads.Box(query=0)


def dpt() -> tuple[nn.Module, tuple[int, int], Any]:
    """A segmenter in the size of DPT-B."""
    config = transformers.DPTConfig(image_size=384, num_labels=150, backbone_out_indices=[2, 5, 8, 11])
    question = pl.heads.Region(box=(100, 100, 280, 280), label=3)
    return transformers.DPTForSemanticSegmentation(config), (384, 384), question


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call, with the work of the device."""
    _settle()
    begin = time.perf_counter()
    run()
    _settle()
    return time.perf_counter() - begin


def ratio(build: Callable[[], tuple[nn.Module, tuple[int, int], Any]], device: str, rounds: int) -> dict[str, Any]:
    """Seconds of both sides and their ratio."""
    torch.manual_seed(0)
    model, size, question = build()
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    model = model.eval().to(device)
    vit = pl.wrap(model, preprocess=pl.Preprocess(size))
    image = torch.randn(1, 3, *size, device=device)

    def plain() -> None:
        leaf = image.clone().requires_grad_()
        out = model(leaf)
        torch.autograd.grad(out.logits.float().sum(), leaf)

    def halved() -> None:
        with torch.autocast(device, torch.bfloat16):
            plain()

    def explained(graph: bool = False) -> None:
        pl.explain(asked, image, "auto", target=0, progress=False, compile=graph)

    asked = vit.ask(question).prepared(image)
    explained(), plain(), halved()
    times = [(timed(plain), timed(halved), timed(explained)) for _ in range(rounds)]
    full, half, auto = (statistics.median(side) for side in zip(*times, strict=True))
    fresh = timed(lambda: pl.explain(vit, image + 0.1, "auto", head=question, progress=False))
    graphs: list[float] = []
    if device == "cuda":
        with contextlib.suppress(pl.PatchlightError, RuntimeError):
            explained(True)
            graphs = [timed(lambda: explained(True)) for _ in range(rounds)]
    return {
        "forward and backward, ms": round(1e3 * full, 2),
        "forward and backward, bf16, ms": round(1e3 * half, 2),
        "auto, ms": round(1e3 * auto, 2),
        "ratio": round(statistics.median(c / a for a, _, c in times), 3),
        "ratio to bf16": round(statistics.median(c / b for _, b, c in times), 3),
        "with the question prepared for a new image, ms": round(1e3 * fresh, 2),
        "auto (graph), ms": round(1e3 * statistics.median(graphs), 2) if graphs else "not available",
    }


def main() -> None:
    """Print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    args, _ = parser.parse_known_args()
    results: dict[str, Any] = {}
    for build in (yolos, dpt):
        results[build.__name__] = ratio(build, args.device, args.rounds)
        print(build.__name__, json.dumps(results[build.__name__]), flush=True)
    titles = {"yolos": "detector in the size of YOLOS-S, a box", "dpt": "segmenter in the size of DPT-B, a region"}
    rows = [
        [titles[name], what, str(value), "1.5" * what.startswith("ratio")]
        for name, values in results.items()
        for what, value in values.items()
    ]
    title = "`auto` for boxes and regions beside a forward and backward pass, one image"
    record("questions", title, ["model", "what", "value", "at most"], rows, "python -m benchmarks.bench_questions")


if __name__ == "__main__":
    main()
