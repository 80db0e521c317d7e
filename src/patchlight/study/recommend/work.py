"""Run measurements within a time budget: costs are predicted from earlier ones, steps that do not fit are skipped."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import first_line
from patchlight.core.files import finite_or_none
from patchlight.core.statistics import FEWEST, spearman
from patchlight.core.targets import ScoreName, Targets, target_scores, top_classes
from patchlight.evidence.fills import fill_images, painted
from patchlight.metrics.base import MetricRequest, lacking
from patchlight.metrics.sanity import random_parameters, twin
from patchlight.study.cost import explain_forwards, measure_seconds
from patchlight.study.evaluate import unwrap
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import AGREEMENT, Panel
from patchlight.study.recommend.record import BLANKED, MODEL, UNTRAINED, RaceRecord
from patchlight.study.run import MeasureOptions, measure
from patchlight.study.sources import Source, compute_maps, map_function

EXPLANATION = "explanation"
"""The step before any metric: computing the map."""
GROUP = 8
"""The largest number of images at a time."""
LATEST = 5
"""The number of measurements that a prediction uses."""
MAPS = 2**26
"""Numbers in cached maps (256 MiB); if there are more, the least recently used maps are dropped."""
MARGIN = 1.25
"""A step is started only if this many times its predicted time is left."""


class Clock:
    """The time of a run in seconds: budget, time spent, and time left before a reserve for the end."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.budget, self._start = budget, time.monotonic() - spent
        self.reserve = min(1.0 + 0.02 * budget, 0.2 * budget)

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds until the reserve begins."""
        return self.budget - self.reserve - self.spent


class RaceWorker:
    """Explains and measures images by their places, and records every cell; `forward` is the time of a pass."""

    def __init__(
        self,
        gallery: Gallery,
        panel: Panel,
        record: RaceRecord,
        clock: Clock,
        forward: float,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.vit, self.gallery, self.panel, self.record, self.clock = gallery.vit, gallery, panel, record, clock
        self._seed: int = record.about["seed"]
        self._forward, self._progress = forward, progress
        self._costs: dict[tuple[str, str], deque[float]] = {}
        self._maps: dict[tuple[str, int], tuple[Tensor, float]] = {}
        self._classes: dict[int, Tensor] = {}
        self._cache: dict[Any, Any] = {}

    def cost(self, method: str, metric: str) -> float:
        """Seconds per image: the median of the latest measurements, or an estimate before the first one."""
        if (method, metric) in self._costs:
            return median(self._costs[method, metric])
        if metric == EXPLANATION:
            return self._forward * explain_forwards(self.panel.methods[method], self.vit)
        if metric == AGREEMENT:
            return self.cost(method, EXPLANATION)
        request = self.panel.metrics[metric]
        others = [median(seconds) for (_, other), seconds in self._costs.items() if other == metric]
        if others and not request.metric.explains:
            return median(others)
        return measure_seconds(request, self.vit, self._forward, self.cost(method, EXPLANATION))

    def seconds(self, method: str, places: Sequence[int], metrics: Sequence[str]) -> float:
        """Predicted seconds of the missing cells."""
        missing = {metric: self._missing(method, metric, places) for metric in metrics}
        unexplained = [p for p in set().union(*missing.values()) if (method, p) not in self._maps]
        measuring = sum(len(unmeasured) * self.cost(method, metric) for metric, unmeasured in missing.items())
        return measuring + len(unexplained) * self.cost(method, EXPLANATION)

    def seconds_new(self, method: str, images: int) -> float:
        """Predicted seconds of explaining and scoring this many new images."""
        return images * sum(self.cost(method, metric) for metric in (EXPLANATION, *self.panel.deciding))

    def fill(self, method: str, places: Sequence[int], metrics: Sequence[str], until: float = 0.0) -> bool:
        """Measure the missing cells, as many images at a time as fit before `until` seconds are left.

        Returns:
            False if there was not enough time, or the method failed and was left out.
        """
        waiting = [p for p in places if any(self._missing(method, metric, [p]) for metric in metrics)]
        while waiting and method not in self.record.left_out:
            per_image = max(self.seconds(method, waiting[:1], metrics), 1e-6)
            measured = all((method, metric) in self._costs for metric in (EXPLANATION, *metrics))
            fitting = int((self.clock.left - until) / (MARGIN * per_image))
            count = min(GROUP if measured else 1, len(waiting), fitting)
            if count < 1:
                return False
            readable, waiting = [p for p in waiting[:count] if self.gallery.readable(p)], waiting[count:]
            if readable:
                self._fill(method, readable, metrics)
            self._progress()
        return method not in self.record.left_out

    def _missing(self, method: str, metric: str, places: Sequence[int]) -> list[int]:
        return [p for p in places if (p, method, metric) not in self.record]

    def _fill(self, method: str, places: Sequence[int], metrics: Sequence[str]) -> None:
        try:
            with warnings.catch_warnings(), self.vit.settled():
                warnings.simplefilter("ignore")
                self._explain(method, places)
                for metric in metrics:
                    if missing := self._missing(method, metric, places):
                        with self._failures(method, metric, missing):
                            self._measure(method, metric, missing)
        except Exception as error:  # one method's failure must not end the race
            self.record.leave_out(method, f"it failed: {first_line(error)}")

    @contextmanager
    def _failures(self, method: str, metric: str, places: Sequence[int]) -> Iterator[None]:
        """Record an error as the reason of these cells, unless the metric decides."""
        try:
            yield
        except Exception as error:
            if metric in self.panel.deciding:
                raise
            for place in places:
                self.record.add(place, method, metric, error=f"it failed: {first_line(error)}")

    def _record_seconds(self, method: str, metric: str, start: float, images: int) -> float:
        """Seconds per image since `start`, recorded for predictions."""
        each = (time.monotonic() - start) / images
        self._costs.setdefault((method, metric), deque(maxlen=LATEST)).append(each)
        return round(each, 6)

    def _explain(self, method: str, places: Sequence[int]) -> None:
        """Compute the maps that are not cached; the least recently used ones are dropped from the cache."""
        missing = [p for p in places if (method, p) not in self._maps]
        for place in set(places) - set(missing):
            self._maps[method, place] = self._maps.pop((method, place))
        if missing:
            start = time.monotonic()
            maps = self._compute(method, missing, self._seed)
            each = self._record_seconds(method, EXPLANATION, start, len(missing))
            self._maps |= {(method, place): (scores, each) for place, scores in zip(missing, maps, strict=True)}
        while len(self._maps) > len(places) and sum(scores.numel() for scores, _ in self._maps.values()) > MAPS:
            del self._maps[next(iter(self._maps))]

    def _compute(self, method: str, places: Sequence[int], seed: int) -> Tensor:
        request, batch = self.panel.methods[method], self.gallery.batch(places)
        return compute_maps(self.vit, batch, [request], self.targets(places), seed)[0].maps.float().cpu()

    def _measure(self, method: str, metric: str, places: Sequence[int]) -> None:
        start = time.monotonic()
        maps, times = zip(*(self._maps[method, p] for p in places), strict=True)
        columns, reasons = self._columns(method, metric, places, torch.stack(maps))
        each = self._record_seconds(method, metric, start, len(places))
        for i, place in enumerate(places):
            for label, column in columns.items():
                value = None if reasons[i] else finite_or_none(float(column[i]))
                seconds = each if label == metric else 0.0
                rest = {"note": reasons[i], "measure_seconds": seconds, "explain_seconds": times[i]}
                self.record.add(place, method, label, value, **rest)

    def _columns(
        self, method: str, metric: str, places: Sequence[int], maps: Tensor
    ) -> tuple[dict[str, Tensor], Sequence[str]]:
        """The values [n] of a metric and of its parts, and why some do not exist."""
        if metric == AGREEMENT:
            agreement = spearman(maps.flatten(1), self._compute(method, places, self._seed + 1).flatten(1))
            return {metric: agreement.where(maps.flatten(1).isfinite().all(1), torch.nan)}, [""] * len(places)
        request, function = self.panel.metrics[metric], map_function(self.panel.methods[method])
        sources = {method: Source(maps.to(self.vit.device), method=function, targets=self.targets(places))}
        options = MeasureOptions(seed=self._seed, progress=False, current=True, cache=self._cache)
        outcomes = measure(self.vit, self.gallery.batch(places), sources, {method: [request]}, options)
        evaluation = unwrap(outcomes)[method][metric]
        sides = {"insertion": "lif", "deletion": "mif"} if metric.startswith("srg ") else {}
        parts = {metric.replace("srg", side, 1): evaluation.parts[name] for side, name in sides.items()}
        return {metric: evaluation.values, **parts}, evaluation.reasons

    def score_untrained(self, method: str, places: Sequence[int]) -> None:
        """Measure the method's score on an untrained copy of the model, for the class that the copy predicts.

        As many images are measured as there is time for, but at least six; failures are recorded.
        """
        missing = self._missing(method, UNTRAINED, places)
        per_image = max(MARGIN * self.seconds_new(method, 1), 1e-6)
        chosen = missing[: max(0, int(self.clock.left / per_image))]
        if not chosen or len(places) - len(missing) + len(chosen) < FEWEST:
            return
        with warnings.catch_warnings(), self._failures(method, UNTRAINED, chosen):  # not every model can be copied
            warnings.simplefilter("ignore")
            if UNTRAINED not in self._cache:
                copy = twin(self.vit)
                copy.model.load_state_dict(random_parameters(self.vit.model, self._seed), strict=False)
                self._cache[UNTRAINED] = copy
            metrics = [self.panel.metrics[label] for label in self.panel.deciding]
            options = MeasureOptions(seed=self._seed, batch_size=len(chosen), progress=False)
            sources = {method: self.panel.methods[method]}
            outcomes = measure(self._cache[UNTRAINED], self.gallery.batch(chosen), sources, {method: metrics}, options)
            scores = unwrap(outcomes)[method]
            signed = [self.panel.sign(label) * evaluation.values for label, evaluation in scores.items()]
            for place, value in zip(chosen, torch.stack(signed).mean(0).tolist(), strict=True):
                self.record.add(place, method, UNTRAINED, finite_or_none(value))
        self._progress()

    def targets(self, places: Sequence[int]) -> Targets:
        """The predicted class of each image."""
        unknown = [p for p in places if p not in self._classes]
        if unknown:
            index = top_classes(self.vit.logits(self.gallery.batch(unknown)), self.vit.outputs).index
            self._classes |= dict(zip(unknown, index.cpu(), strict=True))
        return Targets(torch.stack([self._classes[p] for p in places]).to(self.vit.device))

    def blank(self, places: Sequence[int]) -> None:
        """Measure the class's score, and its change when each fill replaces the whole image."""
        requests = [self.panel.metrics[label] for label in self.panel.deciding]
        fills = {str(r.settings["fill"]): r.settings["fill"] for r in requests if "fill" in r.settings}
        missing = [p for p in self._missing(MODEL, "score", places) if self.gallery.readable(p)]
        if not missing or not fills:
            return
        batch, targets, score = self.gallery.batch(missing), self.targets(missing), _score(requests[0], self.vit)
        rows, nothing = torch.arange(len(batch)), torch.zeros_like(batch[:, :1], dtype=torch.bool)

        def scores(images: Tensor) -> Tensor:
            return target_scores(self.vit.logits(images), targets, score, self.vit.outputs).flatten()

        columns = {"score": scores(batch)}
        for name, fill in fills.items():
            empty = painted(batch, fill_images(fill, batch, self.vit, self._seed), rows, nothing)
            columns[f"{BLANKED} {name}"] = scores(empty) - columns["score"]
        for label, column in columns.items():
            for place, value in zip(missing, column.tolist(), strict=True):
                self.record.add(place, MODEL, label, finite_or_none(value))


def _score(request: MetricRequest, vit: Anatomy) -> ScoreName:
    """The score that a metric reads; by default the probability, or the logit if the model has no probabilities."""
    setting = request.settings.get("score", request.settings.get("quantity"))
    default: ScoreName = "probability" if lacking("probability", vit) is None else "logit"
    return next((name for name in get_args(ScoreName) if name == setting), default)
