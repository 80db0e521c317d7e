"""How fast TransAtt is: beside a plain float64 forward and backward, alone and in a batch, and its slow version.

    python benchmarks/bench_relevance.py [--model deit_tiny_patch16_224] [--batch 16] [--repeats 5] [--threads 1]

Weights and images are random: neither changes the work. What is compared is timed in turns within one run, and the
median of the ratios of each turn is printed. On a CPU the process's own time counts, not what others do meanwhile.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from torch import Tensor

import patchlight as pl
from patchlight.engine import compute
from patchlight.registry import resolve
from patchlight.targets import Targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.literal.lrp import Literal


def seconds(work: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    vit = pl.wrap(timm.create_model(options.model).to(options.device))
    double = copy.deepcopy(vit.model).double()
    for parameter in double.parameters():
        parameter.requires_grad_(False)
    wrapped = pl.wrap(double)
    batch = torch.randn(options.batch, 3, *vit.preprocess.size, device=options.device)
    targets = Targets(torch.arange(options.batch)[:, None] % vit.classes)

    def plain(images: Tensor) -> None:
        x = images.double().requires_grad_()
        logits = double(x)
        torch.autograd.grad(logits.gather(1, targets.index[: len(x)].to(x.device)).sum(), x)

    def transatt(images: Tensor) -> None:
        compute(vit, images, [resolve("transatt")], targets[: len(images)], 0)

    def literal(images: Tensor) -> None:
        for i, image in enumerate(images.double()):
            Literal(wrapped, image[None], int(targets.index[i, 0]), "ours").transatt()

    one = batch[:1]
    work: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(batch),
        "transatt": lambda: transatt(batch),
        "plain, 1": lambda: plain(one),
        "transatt, 1": lambda: transatt(one),
        "literal, 1": lambda: literal(one),
    }
    if options.device != "cpu":
        del work["literal, 1"]
    for job in work.values():
        job()
    times = {name: [] for name in work}
    for _ in range(options.repeats):
        for name, job in work.items():
            times[name].append(seconds(job, options.device))

    def ratio(a: str, b: str, factor: float = 1.0) -> float:
        return statistics.median(factor * x / y for x, y in zip(times[a], times[b], strict=True))

    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    print(f"command: python benchmarks/bench_relevance.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"machine: {where}, {options.threads} thread(s), torch {torch.__version__}; {datetime.date.today()}")
    print(f"{options.model}, batch {options.batch}, {options.repeats} turns, float64")
    for name in work:
        print(f"  {name:12s} {min(times[name]):8.3f} s best, {statistics.median(times[name]):8.3f} s median")
    print(f"transatt / plain forward + backward, batch {options.batch}: {ratio('transatt', 'plain'):.2f} (at most 6)")
    print(f"transatt / plain forward + backward, batch 1: {ratio('transatt, 1', 'plain, 1'):.2f} (at most 6)")
    each = ratio("transatt", "transatt, 1", 1 / options.batch)
    print(f"time per image in a batch of {options.batch} / alone: {each:.2f} (at most 1)")
    if "literal, 1" in work:
        print(f"literal / transatt, one image: {ratio('literal, 1', 'transatt, 1'):.2f} (more than 1)")
        print(f"literal / transatt in a batch, per image: {ratio('literal, 1', 'transatt', options.batch):.2f}")


if __name__ == "__main__":
    main()
