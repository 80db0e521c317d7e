"""The cost of `auto` for questions about boxes and regions, relative to a forward and backward pass of the model.

    python -m benchmarks.bench_questions [--device cuda] [--rounds 9]

Random weights in the sizes of YOLOS-S and DPT-B; one image. Both sides alternate, and the median of the ratios counts.
On a CPU it is CPU time on one thread, and bfloat16 and graphs are left out.
"""

from __future__ import annotations

import argparse
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
    question = pl.heads.Region(box=(100, 100, 280, 280))
    return transformers.DPTForSemanticSegmentation(config), (384, 384), question


def timed(run: Callable[[], Any]) -> float:
    """Seconds of one call, with the work of the device; without a device, CPU time."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    _settle()
    begin = clock()
    run()
    _settle()
    return clock() - begin


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
    explained(), plain()
    times = [(timed(plain), timed(explained)) for _ in range(rounds)]
    full, auto = (statistics.median(side) for side in zip(*times, strict=True))
    fresh = timed(lambda: pl.explain(vit, image + 0.1, "auto", head=question, progress=False))
    found: dict[str, Any] = {
        "forward and backward, ms": round(1e3 * full, 2),
        "auto, ms": round(1e3 * auto, 2),
        "ratio": round(statistics.median(b / a for a, b in times), 3),
        "with the question prepared for a new image, ms": round(1e3 * fresh, 2),
    }
    if device == "cuda":
        halved(), explained(True)
        half = [(timed(halved), timed(explained)) for _ in range(rounds)]
        found["forward and backward, bf16, ms"] = round(1e3 * statistics.median(a for a, _ in half), 2)
        found["ratio to bf16"] = round(statistics.median(b / a for a, b in half), 3)
        graphs = [timed(lambda: explained(True)) for _ in range(rounds)]
        found["auto (graph), ms"] = round(1e3 * statistics.median(graphs), 2)
    return found


def main() -> None:
    """Print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    args, _ = parser.parse_known_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
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
    clock = "" if torch.cuda.is_available() else "; CPU time on one thread"
    title = f"`auto` for boxes and regions beside a forward and backward pass, one image{clock}"
    command = f"python -m benchmarks.bench_questions --device {args.device} --rounds {args.rounds}"
    record("questions", title, ["model", "what", "value", "at most"], rows, command)


if __name__ == "__main__":
    main()
