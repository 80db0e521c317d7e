"""`compare`: explain images with several methods, measure the maps, and show one table and one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import Attributions
from patchlight.core.display import text_table
from patchlight.core.drawing.pictures import map_title
from patchlight.core.errors import check_keywords, integer
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.frames import make_frame
from patchlight.core.images import image_list
from patchlight.core.photos import MOST, Photos
from patchlight.core.progress import Progress
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.statistics import FEWEST, SIGNS, Mark, Resamples
from patchlight.core.targets import Score, Target, Targets
from patchlight.core.text import plural
from patchlight.engine import attribution_of, default_batch_size
from patchlight.methods.base import Estimate
from patchlight.methods.requests import Request, resolve
from patchlight.metrics.base import (
    Evaluation,
    MetricRequest,
    all_intervals,
    evaluations_html,
    resolve_metric,
    summaries,
)
from patchlight.study.cost import warn_if_long
from patchlight.study.evaluate import unwrap
from patchlight.study.ranking import SAMPLES, mark_best, shared_ranks
from patchlight.study.run import MeasureOptions, measure
from patchlight.study.sources import Annotations

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame

    from patchlight.core.drawing.shown import ShownFigure

CHEAP = {"ins-del": {"steps": 28}}
"""The default metric of `compare` and `patchlight evaluate`: by itself, `ins-del` has eight times as many steps."""


@partial(check_keywords, advice="give settings with their metric or method: metrics={'deletion': {'steps': 28}}")
@undisturbed
def compare(
    vit: Anatomy | nn.Module,
    images: Any,
    methods: Selection,
    metrics: Selection | None = None,
    target: Target = None,
    *,
    labels: Any = None,
    boxes: Sequence[Any] | None = None,
    masks: Any = None,
    score: Score | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    shown: int = 4,
    progress: Progress | bool = True,
) -> Comparison:
    """Explain images with every method, measure the maps with every metric, and show both in one table and one figure.

    Images are processed in batches, and only a number per image is kept, so a stream may have any length. A comparison
    that will take more than a minute starts with a warning and an estimate.

    Args:
        vit: The model.
        images: As in `explain`.
        methods: Method names, or a dict of labels and settings, as in `explain`.
        metrics: Metric names, or a dict of labels and settings, as in `evaluate`. Default: insertion minus deletion in
            28 steps.
        target: The classes to explain, as in `explain`.
        labels: The true classes, as in `evaluate`.
        boxes: Boxes of the objects, as in `evaluate`.
        masks: Masks of the objects, as in `evaluate`.
        score: What is explained: "logit", "probability", "cosine" or a function of the logits.
        seed: Random seed.
        batch_size: Images per batch.
        shown: The number of images whose maps and small photographs are kept for the figure; at most 16.
        progress: As in `explain`.

    Example:
        >>> comparison = pl.compare(vit, photos, ["genatt", "tis", "random"])                   # doctest: +SKIP
        >>> comparison.best                                                                     # doctest: +SKIP
        'tis'
    """
    vit = wrap(vit)
    requests = resolve_all(methods, {}, Request, "method", lambda label, settings: resolve(label, settings, score))
    metric_requests = resolve_all(CHEAP if metrics is None else metrics, {}, MetricRequest, "metric", resolve_metric)
    first = _FirstMaps(vit, Photos(vit.preprocess, min(integer("shown", shown, 0), MOST)))
    size = default_batch_size(vit) if batch_size is None else batch_size
    annotations = Annotations(labels, boxes, masks)
    options = MeasureOptions(target, annotations, seed, size, progress, note=first.photos.add, watch=first.see)
    sources = {request.label: request for request in requests}
    warn_if_long(vit, _count(images), requests, metric_requests)
    evaluations = unwrap(measure(vit, images, sources, dict.fromkeys(sources, metric_requests), options))
    ignoring = [r.label for r in requests if r.suited(vit).ignores_class and r.name != "random"]
    by_method = {label: dict(by_metric) for label, by_metric in evaluations.items()}
    return Comparison(vit.name, by_method, first.maps(requests, seed), tuple(ignoring))


def _count(images: Any) -> int:
    """The number of images; 1 for a stream, whose length is not known."""
    images = image_list(getattr(images, "dataset", images))  # a DataLoader counts batches, its data set images
    return 1 if isinstance(images, Tensor) and images.ndim == 3 else len(images) if hasattr(images, "__len__") else 1


class _FirstMaps:
    """Collects the maps of the first images."""

    def __init__(self, vit: Anatomy, photos: Photos) -> None:
        self.vit, self.photos = vit, photos
        self.targets: list[Targets] = []
        self.hashes: list[str] = []
        self.scores: dict[str, list[Tensor]] = {}

    def see(self, batch: Tensor, targets: Targets, maps: Mapping[str, Tensor]) -> None:
        room = slice(0, self.photos.most - len(self.hashes))
        if room.stop <= 0:
            return
        self.photos.see(batch[room])
        self.hashes.extend(hash_images(batch[room]))
        self.targets.append(targets[room])
        for label, scores in maps.items():
            self.scores.setdefault(label, []).append(scores[room].detach().float().cpu())

    def maps(self, requests: Sequence[Request], seed: int) -> Attributions:
        if not self.targets:
            return Attributions()
        origin = {"weights": identity(self.vit), "images": tuple(self.hashes), "photos": tuple(self.photos.photos)}
        targets = Targets.concat(self.targets)
        estimates = ((r, Estimate(torch.cat(self.scores[r.label])[:, None])) for r in requests)
        return Attributions((r.label, attribution_of(self.vit, r, e, targets, seed, origin)) for r, e in estimates)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`: evaluations by method and metric, and maps of the first images.

    Printing it shows a table with 95 % intervals that marks the best method and those without a significant
    difference to it.

    Args:
        model: The name of the model.
        evaluations: Evaluations by method and metric.
        maps: The maps of the first images by method.
        ignores_class: The methods that give every class the same map.
    """

    model: str
    evaluations: dict[str, dict[str, Evaluation]]
    maps: Attributions
    ignores_class: tuple[str, ...] = ()

    @property
    def methods(self) -> list[str]:
        """The labels of the methods."""
        return list(self.evaluations)

    @property
    def metrics(self) -> list[str]:
        """The labels of the metrics."""
        return list(next(iter(self.evaluations.values())))

    @property
    def best(self) -> str | None:
        """The best method by the first metric; None if the methods do not differ significantly (see `marks`)."""
        return next((m for m in self.methods if self.marks[m, self.metrics[0]] == "best"), None)

    @property
    def cells(self) -> dict[tuple[str, str], Evaluation]:
        """Evaluations by (method, metric)."""
        return {(method, name): self.evaluations[method][name] for method in self.methods for name in self.metrics}

    def column(self, metric: str) -> dict[str, Evaluation]:
        """The evaluations of one metric by method."""
        return {method: by_metric[metric] for method, by_metric in self.evaluations.items()}

    @cached_property
    def marks(self) -> dict[tuple[str, str], Mark]:
        """By (method, metric): "best", "tied" (no significant difference to the best; paired bootstrap, 5 %) or "".

        Nothing is marked if Friedman's test finds no difference between the methods, or if fewer than six images have
        values of all methods.
        """
        resamples = Resamples(max(map(len, self.cells.values()), default=0), SAMPLES)
        by_metric = {name: mark_best(self.column(name), resamples) for name in self.metrics}
        return {(method, name): mark for name, marks in by_metric.items() for method, mark in marks.items()}

    @cached_property
    def ranks(self) -> dict[tuple[str, str], float]:
        """By (method, metric): the mean rank, 1 being the best, over the images that all share; at least six."""
        ranks: dict[tuple[str, str], float] = {}
        for name in self.metrics:
            methods, places = shared_ranks(self.column(name))
            if places is not None:
                ranks |= {(method, name): float(mean) for method, mean in zip(methods, places.mean(0), strict=True)}
        return ranks

    def to_frame(self) -> DataFrame:
        """A pandas table with a row per method and metric."""
        intervals = all_intervals(self.cells)
        rows = [
            {
                "method": method,
                "metric": metric,
                "mean": cell.mean,
                "low": intervals[method, metric][0],
                "high": intervals[method, metric][1],
                "count": cell.count,
                "higher_is_better": cell.higher_is_better,
                "mark": self.marks[method, metric],
                "rank": self.ranks.get((method, metric), float("nan")),
                "ignores_class": method in self.ignores_class,
            }
            for (method, metric), cell in self.cells.items()
        ]
        return make_frame({key: [row[key] for row in rows] for key in rows[0]})

    def figure(self, path: str | Path | None = None) -> ShownFigure:
        """A figure of the first images: a row per image and a column per method.

        Args:
            path: A file to write the figure to as well; its suffix is the format.
        """
        return self.maps.figure(path)

    def __str__(self) -> str:
        values, rows = summaries(self.cells), []
        for method in self.methods:
            cells = (f"{values[method, name]} {SIGNS[self.marks[method, name]]}".rstrip() for name in self.metrics)
            rows.append([self._name(method), *cells])
        headings = ["method", *(f"{name} {self.column(name)[self.methods[0]].arrow}" for name in self.metrics)]
        return "\n".join([self._title, "", text_table(headings, rows), self._legend])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import figure_html

        named = {self._name(method): by_metric for method, by_metric in self.evaluations.items()}
        marks = {(self._name(method), name): mark for (method, name), mark in self.marks.items()}
        table = evaluations_html(named, marks, self._title, self._legend)
        return table + (figure_html(self.figure(), "maps of the first images by method") if self.maps else "")

    def _name(self, method: str) -> str:
        """The name of a method in tables, including the method that "auto" or "best" stands for."""
        title = map_title(method, self.maps[method]) if method in self.maps else method
        return f"{title} (ignores the class)" if method in self.ignores_class else title

    @property
    def _title(self) -> str:
        images = len(next(iter(next(iter(self.evaluations.values())).values())))
        return f"{self.model}, {plural(images, 'image')}, mean [95 % interval]"

    @property
    def _legend(self) -> str:
        """The meaning of the marks, and why some are missing."""
        marked = {name for (_, name), mark in self.marks.items() if mark}
        few = [name for name in self.metrics if min(cell.count for cell in self.column(name).values()) < FEWEST]
        alike = [name for name in self.metrics if name not in marked and name not in few and len(self.methods) > 1]
        parts = [
            "* best, † no significant difference to the best (paired bootstrap, 5 %)" if marked else "",
            f"no significant differences by {', '.join(alike)} (Friedman test, 5 %)" if alike else "",
            f"fewer than {FEWEST} images have a value of {', '.join(few)}, too few for intervals" if few else "",
        ]
        return "; ".join(filter(None, parts))
