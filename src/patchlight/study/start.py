"""The first block of a composition, chosen for a model by measuring it on some images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import Target
from patchlight.methods.requests import check_supported, resolve
from patchlight.study.evaluate import evaluate

QUICK = {"ins-del": {"steps": 10}}
"""Settings of a metric that are enough for a choice among a few blocks."""


@dataclass(frozen=True)
class StartChoice:
    """The results of a method with each first block, on the same images.

    Args:
        method: The method.
        metric: The metric.
        starts: The first blocks that were compared.
        means: The mean of the metric for each.
        gains: The mean improvement of the best one over each.
        errors: The standard error of each gain.
    """

    method: str
    metric: str
    starts: tuple[int, ...]
    means: tuple[float, ...]
    gains: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def start(self) -> int:
        """The best first block; the lowest if several are equal."""
        return self.starts[self.gains.index(0.0)]

    def __str__(self) -> str:
        rows = zip(self.starts, self.means, self.gains, self.errors, strict=True)
        lines = [f"{s:5d}  {mean:8.4f}  {gain:+.4f} ± {error:.4f}" for s, mean, gain, error in rows]
        head = f"{self.method} by {self.metric}: start={self.start} is best\nstart      mean  gain of the best ± error"
        return "\n".join([head, *lines])


def choose_start(
    vit: Anatomy | nn.Module,
    images: Any,
    method: str = "decompx",
    metric: str = "ins-del",
    target: Target = None,
    starts: Sequence[int] | None = None,
    **settings: Any,
) -> StartChoice:
    """Choose the first block of a method with a setting `start`, such as `decompx`, `genatt` or `ixg.skipplus.libra`.

    All blocks are measured on the same images, and the best mean wins. With few images several blocks are equally good;
    the errors show it.

    Args:
        vit: The model.
        images: Some images, as in `explain`; not those that results are reported on.
        method: The method.
        metric: The metric; "completeness-error" needs no removal. "ins-del" has 10 steps.
        target: The class, as in `explain`.
        starts: The first blocks to compare; None: all.
        settings: Settings of the metric.

    Example:
        >>> choice = pl.choose_start(vit, images, "genatt")                                     # doctest: +SKIP
        >>> pl.explain(vit, other_images, "genatt", start=choice.start)                         # doctest: +SKIP
    """
    vit = wrap(vit)
    request = resolve(method).suited(vit)
    if "start" not in request.settings:
        raise PatchlightError(
            f"'{method}' has no first block to choose; 'decompx', 'genatt' or 'ixg.skipplus' have one"
        )
    check_supported(request, vit)
    several = tuple(range(vit.depth)) if starts is None else tuple(int(start) for start in starts)
    if not several:
        raise PatchlightError("starts is empty; give at least one block")
    maps = {str(start): {"method": method, "start": start} for start in several}
    metric_settings = {**QUICK.get(metric, {}), **settings}
    evaluations = evaluate(vit, images, maps, metric, target, progress=False, **metric_settings)
    sign = 1.0 if evaluations[str(several[0])].higher_is_better else -1.0
    values = torch.stack([evaluations[str(start)].values for start in several])  # [S,B]
    means = values.nanmean(1)
    best = int((sign * means).nan_to_num(-torch.inf).argmax())
    apart = sign * (values[best] - values)
    count = apart.isfinite().sum(1).clamp_min(1)
    errors = (((apart - apart.nanmean(1, keepdim=True)) ** 2).nanmean(1) / (count - 1).clamp_min(1)).sqrt()
    columns = (tuple(column.tolist()) for column in (means, apart.nanmean(1), errors))
    return StartChoice(method, metric, several, *columns)
