"""What is logged of a model in training, and when: maps of fixed images as a picture, and numbers under stable names.

The model is only read. Everything runs on its twin, in evaluation mode, and what is drawn leaves the training's own
generators as they were: a training with a log gives the same weights as one without.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.callbacks.budget import Budget
from patchlight.callbacks.writers import Write, open_writer
from patchlight.core.attribution import Attributions
from patchlight.core.drawing import figure_picture
from patchlight.core.drawing.pictures import MAX_ROWS
from patchlight.core.errors import Cancelled, LogSkipped, PatchlightError, first_line, integer, warn
from patchlight.core.images import to_batch
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import ScoreName, Target, Targets, resolve_targets, target_scores
from patchlight.engine import explain
from patchlight.methods.requests import Request, check_supported, resolve
from patchlight.metrics.base import METRICS, MetricRequest, resolve_metric
from patchlight.report.pictures import figure
from patchlight.study.evaluate import evaluate

FLOOR = "random"
"""The method whose number says what a map that knows nothing gets."""
_SPREAD = ("ds_id", "_is_flat_param", "_fsdp_flattened")
"""What DeepSpeed's ZeRO-3 and FullyShardedDataParallel set on parameters of which a process holds a part."""
_TRIES = 2
"""How often a part that takes too long is begun: the first time may be slow for other reasons."""


class TrainingLog:
    """Maps of fixed images, and how faithful they are, every `every` steps of a training: call it with each step.

    `model` is the model in training, or `pl.wrap` of it where there is more to say (labels, preprocessing, a head).
    `images` are few, as `explain` takes them; they are read once. `writer`: a SummaryWriter of TensorBoard, a run of
    wandb, a folder for TensorBoard's files, a function of (step, numbers, pictures), or a list of these. `method` and
    `metric` as in `explain` and `evaluate`; a metric by its name alone is measured in its quick form, and None measures
    nothing. `target`: the classes asked about, best the true ones, so that the question stays the same; by default the
    prediction of each step. `budget` is the share of the training's time that the log may take: a step for which that
    is used up is left out. `seconds` is the most that one step may take: what does not fit is left out. Either is told
    once, and so is whatever else keeps a step from being logged, such as weights that are no longer finite.

    Logged are the picture `patchlight/maps`, the mean score `patchlight/probability` of the classes asked about (or
    `logit`, of a model without probabilities), `patchlight/METHOD/METRIC` of each method and of `random`, and the
    `patchlight/seconds` all this took.

    >>> log = TrainingLog(model, images, SummaryWriter("runs/1"), every=100, target=classes)      # doctest: +SKIP
    >>> for step, batch in enumerate(loader):                                                     # doctest: +SKIP
    ...     ...
    ...     log(step)
    """

    def __init__(
        self,
        model: Anatomy | nn.Module,
        images: Any,
        writer: Any = None,
        *,
        every: int = 100,
        method: Selection = "auto",
        metric: Selection | None = "ins-del",
        target: Target = None,
        budget: float | None = 0.1,
        seconds: float | None = None,
    ) -> None:
        self.vit = wrap(model)
        self.every = integer("every", every, 1)
        self.images = to_batch(images, self.vit.preprocess, self.vit.channels).cpu()
        if len(self.images) > MAX_ROWS:
            raise PatchlightError(f"{len(self.images)} images are too many for a picture; give at most {MAX_ROWS}")
        self.target = target
        asked = resolve_targets(target, len(self.images), self.vit.outcomes, self.vit.labels)
        if asked is not None and asked.count != 1:
            raise PatchlightError(f"target has {asked.count} classes an image; a log is of one class an image")
        self._methods = resolve_all(method, {}, Request, "method", lambda name, own: resolve(name, own))
        for request in self._methods:
            check_supported(request.suited(self.vit), self.vit)
        self._metrics = [] if metric is None else resolve_all(metric, {}, MetricRequest, "metric", _quick)
        for measured in self._metrics:
            measured.suited(self.vit)
        self._write: Write | None = None if writer is None else open_writer(writer)
        self._budget = Budget(budget, seconds)
        self._late: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._last = -1

    def __call__(self, step: int) -> None:
        """Log this step, where it is due and there is time; of several processes only the first does."""
        self._budget.begin()
        if step % self.every or step == self._last or _rank():
            return
        self._last = step
        lacking = self._budget.lacks()
        if lacking:
            self._warn_once("budget", f"step {step} is not logged: {lacking}; give a larger budget= or every=")
            return
        try:
            self.log(step)
        except (PatchlightError, torch.OutOfMemoryError) as error:
            self._warn_once(type(error).__name__, f"step {step} is not logged: {first_line(error)}")

    def log(self, step: int) -> None:
        """Log this step, whatever the budget says; errors are raised."""
        if self._write is None:
            raise PatchlightError("there is no writer; give writer=, such as a SummaryWriter of TensorBoard")
        _check_whole(self.vit.model)
        if self.vit.device.type == "cuda":
            torch.cuda.synchronize(self.vit.device)  # what the training has still to compute is not the log's time
        with _own_draws(self.vit.device), self._budget.spending() as taken:
            numbers, pictures = self._measure_step(step)
            try:
                self._write(step, {**numbers, "patchlight/seconds": taken()}, pictures)
            except Exception as error:  # a full disk or an absent server, say: whatever a writer may raise
                raise PatchlightError(f"its writer failed with {type(error).__name__}: {first_line(error)}") from error

    def attach(self, writer: Callable[[], Any], trained: nn.Module) -> None:
        """Before a trainer's first step: `writer` gives one where none was given, and `trained` holds the model."""
        mine = {id(p) for p in self.vit.model.parameters()}
        if mine and not any(id(p) in mine for p in trained.parameters()):
            raise PatchlightError(
                f"{self.vit.name}, which was given to the callback, has no weight of the model that is trained; give "
                "the same object to both"
            )
        if self._write is None:
            self._write = open_writer(writer())

    def _measure_step(self, step: int) -> tuple[dict[str, float], dict[str, Image.Image]]:
        """Maps first, then the numbers of one method after another, as far as the time goes."""
        numbers: dict[str, float] = {}
        pictures: dict[str, Image.Image] = {}
        maps = Attributions()
        labels = dict.fromkeys([*(request.label for request in self._methods), FLOOR]) if self._metrics else {}
        for label in [part for part in ("", *labels) if self._late[part] < _TRIES]:
            try:
                if not label:
                    maps = explain(self.vit, self.images, self._methods, self.target, progress=False)
                    numbers |= self._mean_score(maps)
                    pictures["patchlight/maps"] = figure_picture(figure(self.images, maps, vit=self.vit))
                elif maps:
                    numbers |= self._measure(label, maps)
            except Cancelled:
                self._late[label] += 1
                what = f"the numbers of {label}" if label else "the maps"
                limit = f"{self._budget.seconds:g} s"
                self._warn_once("late", f"{what} of step {step} took over {limit}; give more seconds=")
                break
        return numbers, pictures

    def _mean_score(self, maps: Attributions) -> dict[str, float]:
        """The mean score of the classes that were explained."""
        first = next(iter(maps.values()))
        against = None if first.against is None else first.against[:, None]
        score: ScoreName = "probability" if self.vit.probable else "logit"
        logits = self.vit.logits(self.images).float().cpu()
        scores = target_scores(logits, Targets(first.target[:, None], against), score, self.vit.outputs)
        return {f"patchlight/{score}": float(scores.mean())}

    def _measure(self, label: str, maps: Attributions) -> dict[str, float]:
        """Every metric of one method; `random` is asked about the same classes."""
        first = next(iter(maps.values()))
        pairs = first.target if first.against is None else list(zip(first.target, first.against, strict=True))
        own = maps.get(label, label)
        found = evaluate(self.vit, self.images, own, self._metrics, pairs, current=label in maps, progress=False)
        return {f"patchlight/{label}/{name}": one.mean for name, one in found.items()}

    def _warn_once(self, kind: str, words: str) -> None:
        """Warn of one kind of trouble once."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{words} (this is told once)", LogSkipped)


def log_maps(model: Anatomy | nn.Module, images: Any, writer: Any, step: int, **options: Any) -> None:
    """Log one step now; options as of `TrainingLog`, whose `every` and `budget` have no meaning here.

    >>> log_maps(model, images, SummaryWriter("runs/1"), step)      # doctest: +SKIP
    """
    TrainingLog(model, images, writer, **options).log(step)


def _quick(label: str, settings: Any) -> MetricRequest:
    """A metric as asked; in its quick form where nothing was said about it."""
    named = str(settings.get("metric", label))
    return resolve_metric(label, settings if {*settings} - {"metric"} else {**METRICS.find(named).quick, **settings})


def _rank() -> int:
    """Which of the processes of a training this is; 0 where it is alone."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if spread else 0


def _check_whole(model: nn.Module) -> None:
    """Refuse weights that are spread over processes: to gather them, all would have to take part."""
    held = list(model.parameters())  # none: they are in the one flat parameter of a module around it
    if not held or any(type(p).__name__ == "DTensor" or any(hasattr(p, mark) for mark in _SPREAD) for p in held):
        raise PatchlightError(
            "the model's weights are spread over processes (FSDP, ZeRO-3, tensor parallelism), and no process has a "
            "whole model to explain; train with DistributedDataParallel, or explain checkpoints"
        )


@contextlib.contextmanager
def _own_draws(device: torch.device) -> Iterator[None]:
    """Inside, random numbers may be drawn; afterwards all generators are as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
