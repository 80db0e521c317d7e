"""Filling cells within a time: what each takes is predicted from what was measured; what does not fit is not begun."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import first_line
from patchlight.core.files import finite_or_none
from patchlight.core.statistics import FEWEST, spearman
from patchlight.core.targets import ScoreName, Targets, predicted, score_of
from patchlight.evidence.fills import fill_images, painted
from patchlight.methods.maps import compute
from patchlight.methods.requests import Request
from patchlight.metrics.base import Measure, MetricRequest
from patchlight.metrics.quantities import lacking
from patchlight.metrics.sanity import random_parameters, twin
from patchlight.study.recommend.cells import EXPLANATION, FALL, MODEL, UNTRAINED, Cell, Cells
from patchlight.study.recommend.gallery import Gallery
from patchlight.study.recommend.panel import AGREEMENT, Metrics, forwards
from patchlight.study.sources import maps_by

GROUP = 8
"""Images that are worked on at a time, at most."""
LATEST = 5
"""Measurements of one thing that its prediction is made of."""
MAPS = 2**26
"""Numbers of the maps that are kept, 256 MiB; beyond that the maps that were not used for longest are made again."""
MARGIN = 1.25
"""How much longer than predicted anything may take, and still fit."""


class Clock:
    """The time there is: seconds since the beginning, and until the end, for which some are kept in `reserve`."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.budget, self._begun = budget, time.monotonic() - spent
        self.reserve = min(1.0 + 0.02 * budget, 0.2 * budget)

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Until what is kept for the end."""
        return self.budget - self.reserve - self.spent


def forward_seconds(vit: Anatomy, image: Tensor, most: float) -> float:
    """Seconds of one forward of an image [1,C,H,W] among eight, the fastest of some that take `most` seconds in all."""
    batch, found = image.repeat(GROUP, 1, 1, 1), list[float]()
    while len(found) < 3 and (not found or sum(found) < most):
        begun = time.monotonic()
        vit.logits(batch).cpu()  # a GPU only queues the work: one waits for what it gives
        found.append(time.monotonic() - begun)
    return min(found) / GROUP


class Costs:
    """Seconds an image by method and metric, as measured; before that a guess, in forwards of the model."""

    def __init__(self, forward: float, requests: Mapping[str, Request], metrics: Metrics, vit: Anatomy) -> None:
        self.forward, self._requests, self._metrics, self._vit = forward, requests, metrics, vit
        self._seen: dict[tuple[str, str], deque[float]] = {}

    def add(self, method: str, metric: str, seconds: float) -> None:
        """What one image has just taken."""
        self._seen.setdefault((method, metric), deque(maxlen=LATEST)).append(seconds)

    def measured(self, method: str, metric: str) -> bool:
        return (method, metric) in self._seen

    def of(self, method: str, metric: str) -> float:
        """Seconds an image: the median of the latest, so that one hiccup of the machine does not decide."""
        if (method, metric) in self._seen:
            return median(self._seen[method, metric])
        if metric == EXPLANATION:
            return self.forward * forwards(self._requests[method], self._vit)
        if metric == AGREEMENT:
            return self.of(method, EXPLANATION)
        request = self._metrics.requests[metric]
        if request.metric.explains:
            times = int(request.settings.get("samples", self._vit.depth + 3))
            return times * self.of(method, EXPLANATION)
        others = [median(seen) for (_, other), seen in self._seen.items() if other == metric]
        steps = request.settings.get("steps", request.settings.get("points", 10)) or 100
        return median(others) if others else self.forward * (2 * int(steps) + 2)


class Worker:
    """Explains and measures images by their places; every finished cell goes to `cells`."""

    def __init__(
        self,
        vit: Anatomy,
        gallery: Gallery,
        requests: Mapping[str, Request],
        metrics: Metrics,
        cells: Cells,
        clock: Clock,
        seed: int,
        forward: float,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self.vit, self.gallery, self.requests, self.metrics = vit, gallery, requests, metrics
        self.cells, self.clock, self._seed, self._tell = cells, clock, seed, tell
        self._maps: dict[tuple[str, int], Tensor] = {}
        self._numbers = 0
        self._classes: dict[int, Tensor] = {}
        self._hashes: dict[int, str] = {}
        self._kept: dict[Any, Any] = {}
        self.costs = Costs(forward, requests, metrics, vit)

    def seconds(self, method: str, places: Sequence[int], metrics: Sequence[str]) -> float:
        """What is missing of these cells, in predicted seconds."""
        missing = [[p for p in places if (p, method, metric) not in self.cells] for metric in metrics]
        unexplained = [p for p in set().union(*missing) if (method, p) not in self._maps]
        measured = sum(len(own) * self.costs.of(method, metric) for own, metric in zip(missing, metrics, strict=True))
        return measured + len(unexplained) * self.costs.of(method, EXPLANATION)

    def seconds_new(self, method: str, images: int, metrics: Sequence[str]) -> float:
        """Predicted seconds of so many images of which nothing is done."""
        return images * sum(self.costs.of(method, metric) for metric in (EXPLANATION, *metrics))

    def fill(self, method: str, places: Sequence[int], metrics: Sequence[str], until: float = 0.0) -> bool:
        """Fill what is missing of these cells, as many images at a time as fit before `until` seconds are left.

        False where time did not allow all, or the method failed, which is told in `cells`.
        """
        waiting = [p for p in places if any((p, method, metric) not in self.cells for metric in metrics)]
        while waiting and method not in self.cells.left_out:
            one = max(self.seconds(method, waiting[:1], metrics), 1e-6)
            known = all(self.costs.measured(method, metric) for metric in (EXPLANATION, *metrics))
            room = (self.clock.left - until) / (MARGIN * one)
            count = min(GROUP if known else 1, len(waiting), int(room))
            if count < 1:
                return False
            some, waiting = [p for p in waiting[:count] if self.gallery.readable(p)], waiting[count:]
            if some:
                self._fill(method, some, metrics)
            self._tell()
        return method not in self.cells.left_out

    def _fill(self, method: str, places: Sequence[int], metrics: Sequence[str]) -> None:
        try:
            with warnings.catch_warnings(), self.vit.settled():
                warnings.simplefilter("ignore")
                self._explain(method, places)
                for metric in metrics:
                    some = [p for p in places if (p, method, metric) not in self.cells]
                    if some:
                        self._measure_or_tell(method, metric, some)
        except Exception as error:  # one method's failure must not end the race
            self.cells.leave_out(method, f"it failed: {first_line(error)}")

    def _measure_or_tell(self, method: str, metric: str, places: Sequence[int]) -> None:
        """Measure; a metric that does not decide may fail, and its cells say why."""
        try:
            self._measure(method, metric, places)
        except Exception as error:
            if metric in self.metrics.deciding:
                raise
            for place in places:
                self.cells.add(Cell(place, self.hash(place), method, metric, None, 0.0, first_line(error)))

    def _explain(self, method: str, places: Sequence[int]) -> None:
        some = [p for p in places if (method, p) not in self._maps]
        for place in set(places) - set(some):
            self._maps[method, place] = self._maps.pop((method, place))  # used now, so it goes last
        if not some:
            return
        begun = time.monotonic()
        maps = self._made(method, some, self._seed)
        each = (time.monotonic() - begun) / len(some)
        self.costs.add(method, EXPLANATION, each)
        for place, one in zip(some, maps, strict=True):
            self._keep(method, place, one)
            if (place, method, EXPLANATION) not in self.cells:
                self.cells.add(Cell(place, self.hash(place), method, EXPLANATION, None, round(each, 6)))

    def _keep(self, method: str, place: int, one: Tensor) -> None:
        """Keep a map; those that were not used for longest give way, never those of the images at work."""
        self._maps[method, place] = one
        self._numbers += one.numel()
        while self._numbers > MAPS and len(self._maps) > GROUP:
            self._numbers -= self._maps.pop(next(iter(self._maps))).numel()

    def _made(self, method: str, places: Sequence[int], seed: int) -> Tensor:
        found = compute(self.vit, self.gallery.batch(places), [self.requests[method]], self.targets(places), seed)[1]
        return found[0][:, 0].detach().float().cpu()

    def _measure(self, method: str, metric: str, places: Sequence[int]) -> None:
        maps = torch.stack([self._maps[method, p] for p in places])
        broken = (~maps.flatten(1).isfinite()).any(1)
        begun = time.monotonic()
        if metric == AGREEMENT:
            other = self._made(method, places, self._seed + 1)
            values, reasons = spearman(maps.flatten(1), other.flatten(1)), dict[int, str]()
            parts: Mapping[str, Tensor] = {}
        else:
            request = self.metrics.requests[metric]
            measured = request.of(self._given(method, places, maps.masked_fill(broken[:, None, None], 0.0)))
            values, reasons, parts = measured.values.cpu(), dict(measured.reasons), measured.parts
        each = (time.monotonic() - begun) / len(places)
        self.costs.add(method, metric, each)
        columns = {metric: values, **self._sides(metric, parts)}
        for i, place in enumerate(places):
            reason = "the map holds NaN or infinite values" if bool(broken[i]) else reasons.get(i, "")
            for label, column in columns.items():
                value = None if reason else finite_or_none(float(column[i]))
                seconds = round(each, 6) if label == metric else 0.0
                self.cells.add(Cell(place, self.hash(place), method, label, value, seconds, reason))

    def _sides(self, metric: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Insertion and deletion, which the deciding metrics are made of, as columns of their own."""
        words = {"insertion": ("lif", "insertion"), "deletion": ("mif", "deletion")}
        if not metric.startswith("srg "):
            return {}
        found = {side: next((parts[n] for n in names if n in parts), None) for side, names in words.items()}
        return {metric.replace("srg", side, 1): own for side, own in found.items() if own is not None}

    def _given(self, method: str, places: Sequence[int], maps: Tensor) -> Measure:
        return Measure(
            self.vit,
            self.gallery.batch(places),
            maps.to(self.vit.device),
            self.targets(places),
            method=maps_by(self.requests[method]),
            seed=self._seed,
            kept=self._kept,
            current=True,
        )

    def untrained(self, method: str, places: Sequence[int]) -> None:
        """The method's score on an untrained copy of the model, for the class that this predicts, where time allows.

        On as many images as fit, if six then have it; where it fails, the cells say why.
        """
        missing = [p for p in places if (p, method, UNTRAINED) not in self.cells]
        one = max(MARGIN * self.seconds_new(method, 1, self.metrics.deciding), 1e-6)
        some = missing[: max(0, int(self.clock.left / one))]
        if not some or len(places) - len(missing) + len(some) < FEWEST:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._untrained(method, some)
        except Exception as error:  # a model that cannot be copied is not compared with its copy
            reason = f"it failed: {first_line(error)}"
            for place in some:
                self.cells.add(Cell(place, self.hash(place), method, UNTRAINED, None, 0.0, reason))
        self._tell()

    def _untrained(self, method: str, places: Sequence[int]) -> None:
        if UNTRAINED not in self._kept:
            other, drawn = twin(self.vit), random_parameters(self.vit.model, self._seed)
            with torch.no_grad():
                for name, parameter in other.model.named_parameters():
                    parameter.copy_(drawn[name])
            self._kept[UNTRAINED] = other
        other = self._kept[UNTRAINED]
        begun = time.monotonic()
        batch = self.gallery.batch(places)
        targets, made = compute(other, batch, [self.requests[method]], None, self._seed)
        given = Measure(other, batch, made[0][:, 0].detach().float(), targets, seed=self._seed)
        signed = [self.metrics.sign(m) * self.metrics.requests[m].of(given).values for m in self.metrics.deciding]
        score = torch.stack([one.double().cpu() for one in signed]).mean(0)
        each = round((time.monotonic() - begun) / len(places), 6)
        for place, value in zip(places, score.tolist(), strict=True):
            self.cells.add(Cell(place, self.hash(place), method, UNTRAINED, finite_or_none(value), each))

    def targets(self, places: Sequence[int]) -> Targets:
        """The predicted class of each image."""
        unknown = [p for p in places if p not in self._classes]
        if unknown:
            index = predicted(self.vit.logits(self.gallery.batch(unknown)), self.vit.outputs).index
            self._classes |= dict(zip(unknown, index.cpu(), strict=True))
        return Targets(torch.stack([self._classes[p] for p in places]).to(self.vit.device))

    def hash(self, place: int) -> str:
        if place not in self._hashes:
            self._hashes[place] = self.gallery.hashes([place])[0]
        return self._hashes[place]

    def fall(self, places: Sequence[int]) -> None:
        """How far the class's score falls without the image, by fill, and what it is; 1 + fills forwards an image."""
        deciding = [self.metrics.requests[label] for label in self.metrics.deciding]
        fills = {str(r.settings["fill"]): r for r in deciding if "fill" in r.settings}
        some = [p for p in places if (p, MODEL, "score") not in self.cells and self.gallery.readable(p)]
        if not some or not fills:
            return
        begun = time.monotonic()
        batch, targets = self.gallery.batch(some), self.targets(some)
        score = _score(next(iter(fills.values())), self.vit)
        clean = score_of(self.vit.logits(batch), targets, score, self.vit.outputs).flatten()
        columns = {"score": clean}
        every, nothing = torch.arange(len(batch)), torch.zeros_like(batch[:, :1], dtype=torch.bool)
        for fill, request in fills.items():
            filling = fill_images(request.settings["fill"], batch, self.vit, self._seed)
            empty = painted(batch, filling, every, nothing)
            bare = score_of(self.vit.logits(empty), targets, score, self.vit.outputs).flatten()
            columns[f"{FALL} {fill}"] = clean - bare
        each = (time.monotonic() - begun) / len(some) / len(columns)
        for i, place in enumerate(some):
            for label, column in columns.items():
                self.cells.add(
                    Cell(place, self.hash(place), MODEL, label, finite_or_none(float(column[i])), round(each, 6))
                )


def _score(request: MetricRequest, vit: Anatomy) -> ScoreName:
    """What a metric reads of a class; where that is no score, its probability, or its logit if the model has none."""
    found = request.settings.get("score", request.settings.get("quantity"))
    other: ScoreName = "probability" if lacking("probability", vit) is None else "logit"
    return next((name for name in get_args(ScoreName) if name == found), other)
