"""`evaluate`: measure maps of images by metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.progress import Progress
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import Target
from patchlight.metrics.base import Evaluation, Evaluations, MetricRequest, resolve_metric
from patchlight.study.run import BATCH, MeasureOptions, Outcome, measure
from patchlight.study.sources import Annotations


@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Mapping[str, Any] | list[str],
    metric: Selection = ...,
    target: Target = ...,
    **options: Any,
) -> Evaluations: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module, images: Any, maps: Any, metric: str = ..., target: Target = ..., **options: Any
) -> Evaluation: ...
@overload
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Sequence[str] | Mapping[str, Mapping[str, Any] | str] | Sequence[MetricRequest],
    target: Target = ...,
    **options: Any,
) -> Evaluations: ...
@undisturbed
def evaluate(
    vit: Anatomy | nn.Module,
    images: Any,
    maps: Any,
    metric: Selection | Sequence[MetricRequest] = "ins-del",
    target: Target = None,
    *,
    labels: Any = None,
    boxes: Sequence[Any] | None = None,
    masks: Any = None,
    seed: int = 0,
    batch_size: int = BATCH,
    progress: Progress | bool = True,
    current: bool = False,
    **settings: Any,
) -> Evaluation | Evaluations:
    """Measure maps of images: an Attribution, an array [B,h,w], a method's name, or a callable that explains.

    A dict of these, such as `explain` gives for several methods, or a list of names gives a dict by label. `images`
    and `progress` are as in `explain`: a generator or DataLoader is read as it comes, and explained with the methods
    that are given by name (or as a dict with their settings), all in one pass. A callable takes (vit, images [B,C,H,W],
    targets, seed) and gives maps [B,h,w].

    `metric`: a name, a list, or a dict of names and settings (a setting `metric` makes the name a free label); the
    latter two give a dict. `target`: the class asked about; by default the one an Attribution explains, else the
    prediction. `labels` are the true classes (default: the target; None where one is not known); True takes those that
    come with a loader's images, as (images, labels), which must be classes of this model. `boxes` are one [n,4] per
    image and `masks` [B,H,W] on the canvas the model sees (`patchlight.data` makes them). `current` says that an
    Attribution is what its method makes of these very images, classes and seed, so that a metric which explains images
    itself need not begin with it. Further keywords are the metric's settings.

    >>> pl.evaluate(vit, images, att, metric="deletion", preset="rise").mean      # doctest: +SKIP
    """
    requests = resolve_all(
        metric, settings, MetricRequest, "metric", lambda label, own: resolve_metric(label, own, _OPTIONS)
    )
    if isinstance(maps, list | tuple) and maps and all(isinstance(one, str) for one in maps):
        maps = {name: name for name in maps}
    several = isinstance(maps, Mapping)
    sources = maps if several else {"": maps}
    options = MeasureOptions(target, Annotations(labels, boxes, masks), seed, batch_size, progress, current)
    evaluations = unwrapped(measure(wrap(vit), images, sources, dict.fromkeys(sources, requests), options))
    each = {label: own[metric] if isinstance(metric, str) else own for label, own in evaluations.items()}
    return Evaluations(each, "method") if several else each[""]


_OPTIONS = ("metric", "target", "labels", "boxes", "masks", "seed", "batch_size", "progress", "current")


def unwrapped(outcomes: Mapping[str, Mapping[str, Outcome[Evaluation]]]) -> dict[str, Evaluations]:
    """The evaluations of a measurement in which errors were raised."""
    return {
        label: Evaluations({name: outcome.result for name, outcome in own.items()}) for label, own in outcomes.items()
    }
