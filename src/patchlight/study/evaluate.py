"""`evaluate`: measure maps of images with metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import Attribution
from patchlight.core.progress import Progress
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import Target
from patchlight.metrics.base import Evaluation, Evaluations, MetricRequest, resolve_metric
from patchlight.study.run import BATCH, MeasureOptions, Outcome, measure
from patchlight.study.sources import Annotations

if TYPE_CHECKING:
    from patchlight.anatomy.heads import Head


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
    head: Head | None = None,
    labels: Any = None,
    boxes: Sequence[Any] | None = None,
    masks: Any = None,
    seed: int = 0,
    batch_size: int = BATCH,
    progress: Progress | bool = True,
    current: bool = False,
    **settings: Any,
) -> Evaluation | Evaluations:
    """Measure maps of images with metrics.

    Args:
        vit: The model.
        images: The images of the maps, as in `explain`. A stream is explained and measured batch by batch.
        maps: An Attribution, an array [B,h,w], the name of a method, a dict {"method": name, …} with its settings, or
            a function of (vit, images [B,C,H,W], targets, seed) that returns maps [B,h,w]. A list of names, or a dict
            of labels and any of these, measures several.
        metric: A name, a list of names, or a dict of names and settings; with {"label": {"metric": name, …}}, the keys
            are free labels.
        target: The class to score. Default: the class that an Attribution explains, else the prediction.
        head: The question, as in `explain`. Default: the one that an Attribution answers.
        labels: The true classes as a list, with None if one is not known; True takes the labels of a loader of
            (images, labels). Default: the target.
        boxes: A tensor [n,4] for each image (xmin, ymin, xmax, ymax) on the model's input; `pl.open_data` provides
            them.
        masks: Masks [B,H,W] on the model's input: 1 object, 0 background, -1 not labelled.
        seed: Random seed.
        batch_size: Images per batch.
        progress: As in `explain`.
        current: Whether an Attribution is the method's result for exactly these images, classes and seed, so that
            metrics which explain images can reuse it.
        settings: Settings of the metric.

    Returns:
        An `Evaluation`; `Evaluations` by metric, by method, or by method and metric if there are several. The maps of
        an Attribution of several classes, such as the words of an answer, count as methods.

    Example:
        >>> pl.evaluate(vit, images, att, metric="deletion", preset="rise").mean                # doctest: +SKIP
    """
    requests = resolve_all(
        metric, settings, MetricRequest, "metric", lambda label, values: resolve_metric(label, values, _OPTIONS)
    )
    if isinstance(maps, list | tuple) and maps and all(isinstance(name, str) for name in maps):
        maps = {name: name for name in maps}
    if isinstance(maps, Attribution) and maps.several and len(set(maps.target_names)) == maps.scores.shape[1]:
        maps = {name: maps.only(name) for name in maps.target_names[: maps.scores.shape[1]]}
    several = isinstance(maps, Mapping)
    sources = maps if several else {"": maps}
    options = MeasureOptions(target, Annotations(labels, boxes, masks), seed, batch_size, progress, current)
    opened = wrap(vit, head)
    if opened.task and opened.question is None:
        opened = wrap(opened, next((m.question for m in sources.values() if isinstance(m, Attribution)), None))
    evaluations = unwrap(measure(opened, images, sources, dict.fromkeys(sources, requests), options))
    results = {label: each[metric] if isinstance(metric, str) else each for label, each in evaluations.items()}
    return Evaluations(results, "method") if several else results[""]


_OPTIONS = ("metric", "target", "head", "labels", "boxes", "masks", "seed", "batch_size", "progress", "current")


def unwrap(outcomes: Mapping[str, Mapping[str, Outcome[Evaluation]]]) -> dict[str, Evaluations]:
    """The evaluations of outcomes without errors."""
    return {
        label: Evaluations({name: outcome.result for name, outcome in by_metric.items()})
        for label, by_metric in outcomes.items()
    }
