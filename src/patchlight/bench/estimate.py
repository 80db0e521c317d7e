"""Estimates the time and memory of a run from a timed sample of every group; nothing is stored."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from patchlight.anatomy.opened import Anatomy
from patchlight.bench.local import SECONDS, unit_size
from patchlight.bench.plan import Group, Plan
from patchlight.bench.unit import Resources, load_planned, run_unit
from patchlight.evidence.ablation import free_chunk

SAMPLE = 60.0
"""Seconds after which the sample of a group is cut off."""


@dataclass(frozen=True)
class Estimated:
    """The cost of one image of a group; if `cut`, the sample was cut off and the cost is a lower bound.

    `forwards` counts the images and variants that pass through the model. `memory` is the peak in bytes, including the
    model (on a CPU, the peak of this process so far). `failures` lists why values of the sample failed.
    """

    model: str
    methods: tuple[str, ...]
    images: int
    values: int
    batch_size: int
    seconds: float
    forwards: float
    memory: int
    units: int
    cut: bool
    failures: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds for all images in one process."""
        return self.seconds * self.images


class _Enough(BaseException):
    """The sample took too long. Not an Exception, so that methods do not catch it."""


def estimate_costs(plan: Plan, device: str = "cpu", limit: float = SAMPLE) -> list[Estimated]:
    """Run the first batch of every group, twice if that is quick, and extrapolate to all images."""
    return [_estimate(plan, group, device, limit) for group in plan.groups]


def _estimate(plan: Plan, group: Group, device: str, limit: float) -> Estimated:
    vit = load_planned(group, device)
    resources = Resources(device, free_chunk(vit))
    unit = plan.unit(group, 0, min(group.batch_size, len(plan.images)))
    images, cut, failures = len(unit.images), False, tuple[str, ...]()
    on_cuda = vit.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(vit.device)
    best, forwards = math.inf, 0
    for _ in range(2):  # the first run includes warm-up
        with _counting(vit, limit) as count:
            begin = time.perf_counter()
            try:
                done = run_unit(unit, resources)
                failures = tuple(dict.fromkeys(row.error for row in done.rows if row.error))
            except _Enough:
                cut = math.isinf(best)
            best = min(best, time.perf_counter() - begin)
        forwards = max(forwards, count[0])
        if cut or best > limit / 2:
            break
    memory = torch.cuda.max_memory_allocated(vit.device) if on_cuda else _peak()
    rest = len(plan.images) - images
    size = unit_size(group, SECONDS / best * images)
    return Estimated(
        model=group.label,
        methods=tuple(group.methods),
        images=len(plan.images),
        values=len(plan.images) * len(group.hashes),
        batch_size=group.batch_size,
        seconds=best / images,
        forwards=forwards / images,
        memory=memory,
        units=1 + -(-rest // size),
        cut=cut,
        failures=failures,
    )


def _peak() -> int:
    """The peak memory of this process in bytes."""
    import resource  # not available on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextlib.contextmanager
def _counting(vit: Anatomy, limit: float) -> Iterator[list[int]]:
    """Count the inputs of the model's first block, and stop after `limit` seconds; the model is not changed."""
    count, until = [0], time.perf_counter() + limit
    first = vit.blocks[0] if len(vit.blocks) else vit.model

    def count_inputs(module: object, inputs: tuple[object, ...]) -> None:
        if module is first:
            count[0] += len(inputs[0]) if inputs and isinstance(inputs[0], torch.Tensor) else 1
        if time.perf_counter() > until:
            raise _Enough

    handle = register_module_forward_pre_hook(count_inputs)
    try:
        yield count
    finally:
        handle.remove()
