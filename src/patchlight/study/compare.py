"""`compare`: methods explain images, metrics measure the maps, and one table and one figure say how they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy, undisturbed
from patchlight.core.attribution import Attributions
from patchlight.core.errors import check_keywords, integer
from patchlight.core.fingerprints import hash_images, identity
from patchlight.core.frames import make_frame
from patchlight.core.photos import MOST, Photos
from patchlight.core.progress import Progress
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.statistics import FEWEST, SIGNS, Mark, Resamples
from patchlight.core.targets import Score, Target, Targets
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
from patchlight.study.evaluate import unwrapped
from patchlight.study.ranking import SAMPLES, compared, placed
from patchlight.study.run import MeasureOptions, measure
from patchlight.study.sources import Annotations

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame

    from patchlight.core.drawing.shown import ShownFigure


P = ParamSpec("P")
R = TypeVar("R")


def _telling(function: Callable[P, R]) -> Callable[P, R]:
    """Say where a setting that is given as a keyword belongs."""
    return check_keywords(function, "settings stand by their metric or method: metrics={'deletion': {'steps': 28}}")


@_telling
@undisturbed
def compare(
    vit: Anatomy | nn.Module,
    images: Any,
    methods: Selection,
    metrics: Selection = "ins-del",
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
    """Explain images with every method and measure the maps with every metric: one table, and one figure.

    `methods` and `metrics` are names, lists of names, or dicts of labels and settings, as `explain` and `evaluate` take
    them; `images`, `target`, `labels`, `boxes`, `masks` and `progress` too. Images that come one after another (a
    generator, a DataLoader) are explained by all methods and measured by all metrics batch by batch, and dropped:
    what is kept is a number per image, and the maps and small photographs of the first `shown` images.

    >>> pl.compare(vit, loader, ["genatt", "rollout", "random"], ["insertion", "deletion"])      # doctest: +SKIP
    """
    vit = wrap(vit)
    asked = resolve_all(methods, {}, Request, "method", lambda label, own: resolve(label, own, score))
    wanted = resolve_all(metrics, {}, MetricRequest, "metric", resolve_metric)
    first = _First(vit, Photos(vit.preprocess, min(integer("shown", shown, 0), MOST)))
    size = default_batch_size(vit) if batch_size is None else batch_size
    annotations = Annotations(labels, boxes, masks)
    options = MeasureOptions(target, annotations, seed, size, progress, note=first.photos.add, watch=first.see)
    sources = {request.label: request for request in asked}
    found = unwrapped(measure(vit, images, sources, dict.fromkeys(sources, wanted), options))
    return Comparison(vit.name, {label: dict(own) for label, own in found.items()}, first.maps(asked, seed))


class _First:
    """The maps of the first images, as they come by."""

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
        for label, own in maps.items():
            self.scores.setdefault(label, []).append(own[room].detach().float().cpu())

    def maps(self, requests: Sequence[Request], seed: int) -> Attributions:
        if not self.targets:
            return Attributions()
        of = {
            "weights": identity(self.vit),
            "images": tuple(self.hashes),
            "photos": tuple(self.photos.kept),
        }
        targets = Targets.concat(self.targets)
        found = ((r, Estimate(torch.cat(self.scores[r.label])[:, None])) for r in requests)
        return Attributions((r.label, attribution_of(self.vit, r, maps, targets, seed, of)) for r, maps in found)


@dataclass(frozen=True, eq=False)
class Comparison:
    """How methods stand under metrics: `evaluations` by method and metric, and `maps` of the first images by method."""

    model: str
    evaluations: dict[str, dict[str, Evaluation]]
    maps: Attributions

    @property
    def methods(self) -> list[str]:
        return list(self.evaluations)

    @property
    def metrics(self) -> list[str]:
        return list(next(iter(self.evaluations.values())))

    @property
    def cells(self) -> dict[tuple[str, str], Evaluation]:
        """By method and metric."""
        return {(method, name): self.evaluations[method][name] for method in self.methods for name in self.metrics}

    def column(self, metric: str) -> dict[str, Evaluation]:
        """What one metric says of every method."""
        return {method: own[metric] for method, own in self.evaluations.items()}

    @cached_property
    def marks(self) -> dict[tuple[str, str], Mark]:
        """By method and metric: "best", "tied" with the best (paired bootstrap, 5 %), or nothing.

        Nothing is marked where Friedman's test does not tell the methods apart, or fewer than six images have values.
        """
        resamples = Resamples(max(map(len, self.cells.values()), default=0), SAMPLES)
        found = {name: compared(self.column(name), resamples) for name in self.metrics}
        return {(method, name): mark for name, marks in found.items() for method, mark in marks.items()}

    @cached_property
    def ranks(self) -> dict[tuple[str, str], float]:
        """By method and metric: the mean rank, 1 the best, over images on which all have a value; none below six."""
        found: dict[tuple[str, str], float] = {}
        for name in self.metrics:
            known, places = placed(self.column(name))
            if places is not None:
                found |= {(method, name): float(mean) for method, mean in zip(known, places.mean(0), strict=True)}
        return found

    def to_frame(self) -> DataFrame:
        """A pandas table, a row per method and metric: mean, interval, images, direction, mark and mean rank."""
        pairs, cells = list(self.cells), list(self.cells.values())
        found = all_intervals(self.cells)
        intervals = [found[pair] for pair in pairs]
        return make_frame(
            {
                "method": [method for method, _ in pairs],
                "metric": [name for _, name in pairs],
                "mean": [cell.mean for cell in cells],
                "low": [low for low, _ in intervals],
                "high": [high for _, high in intervals],
                "count": [cell.count for cell in cells],
                "higher_is_better": [cell.higher_is_better for cell in cells],
                "mark": [self.marks[pair] for pair in pairs],
                "rank": [self.ranks.get(pair, float("nan")) for pair in pairs],
            }
        )

    def figure(self, path: str | Path | None = None) -> ShownFigure:
        """The maps of the first images, a row per image and a column per method; with `path` it is written there."""
        return self.maps.figure(path)

    def __str__(self) -> str:
        rows = [["method", *(f"{name} {self._arrow(name)}" for name in self.metrics)]]
        told = summaries(self.cells)
        for method in self.methods:
            signs = {name: SIGNS[self.marks[method, name]] for name in self.metrics}
            rows.append([method, *(f"{told[method, name]} {sign}".rstrip() for name, sign in signs.items())])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(
            [self._title, "", lines[0], "  ".join("─" * width for width in widths), *lines[1:], self._legend]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import figure_html

        table = evaluations_html(self.evaluations, self.marks, self._title, self._legend)
        return table + (figure_html(self.figure(), "maps of the first images by method") if self.maps else "")

    def _arrow(self, metric: str) -> str:
        return next(iter(self.evaluations.values()))[metric].arrow

    @property
    def _title(self) -> str:
        images = len(next(iter(next(iter(self.evaluations.values())).values())))
        return f"{self.model}, {images} image(s), mean [95 % interval]"

    @property
    def _legend(self) -> str:
        """What the marks mean, and why some are missing."""
        marked = {name for (_, name), mark in self.marks.items() if mark}
        few = [name for name in self.metrics if min(cell.count for cell in self.column(name).values()) < FEWEST]
        alike = [name for name in self.metrics if name not in marked and name not in few and len(self.methods) > 1]
        parts = [
            "* best, † statistically tied with it (paired bootstrap, 5 %)" if marked else "",
            f"methods are not told apart (Friedman, 5 %) by {', '.join(alike)}" if alike else "",
            f"fewer than {FEWEST} images have a value, too few for intervals, of {', '.join(few)}" if few else "",
        ]
        return "; ".join(filter(None, parts))
