"""The cost of `auto` for questions about boxes and regions, relative to a forward and backward pass of the model.

    python -m benchmarks.bench_questions [--device cuda] [--rounds 9]

Random weights in the sizes of YOLOS-S and DPT-B; one image. Both sides alternate, and the median of the ratios counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import patchlight as pl


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
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
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

    def explained() -> None:
        pl.explain(asked, image, "auto", target=0, progress=False)

    asked = vit.ask(question).prepared(image)
    explained(), plain()
    pairs = [(timed(plain), timed(explained)) for _ in range(rounds)]
    fresh = timed(lambda: pl.explain(vit, image + 0.1, "auto", head=question, progress=False))
    return {
        "forward and backward, ms": round(1e3 * statistics.median(a for a, _ in pairs), 2),
        "auto, ms": round(1e3 * statistics.median(b for _, b in pairs), 2),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "with the question prepared for a new image, ms": round(1e3 * fresh, 2),
    }


def main() -> None:
    """Print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for build in (yolos, dpt):
        try:
            results[build.__name__] = ratio(build, args.device, args.rounds)
        except (AttributeError, pl.PatchlightError) as error:
            results[build.__name__] = str(error)
        print(build.__name__, json.dumps(results[build.__name__]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
