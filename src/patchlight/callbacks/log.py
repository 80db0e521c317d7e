"""Logs a model during training: maps of fixed images as a picture, and numbers under stable names.

Everything runs on the model's twin in evaluation mode, and the states of all random generators are restored, so a
training with a log gives the same weights as one without.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.callbacks.writers import Write, open_writer
from patchlight.core.attribution import Attributions
from patchlight.core.drawing import figure_picture
from patchlight.core.drawing.pictures import MAX_ROWS
from patchlight.core.errors import Cancelled, LogSkipped, PatchlightError, first_line, integer, warn
from patchlight.core.images import to_batch
from patchlight.core.progress import Watcher, watch
from patchlight.core.registry import Selection, resolve_all
from patchlight.core.targets import ScoreName, Target, Targets, resolve_targets, target_scores
from patchlight.engine import explain
from patchlight.methods.requests import Request, check_supported, resolve
from patchlight.metrics.base import METRICS, MetricRequest, resolve_metric
from patchlight.report.pictures import figure
from patchlight.study.evaluate import evaluate

FLOOR = "random"
"""The method whose number is the level of chance."""
_SHARDED = ("ds_id", "_is_flat_param", "_fsdp_flattened")
"""Attributes of parameters that are sharded by DeepSpeed's ZeRO-3 or FullyShardedDataParallel."""
_TRIES = 2
"""How often a part that takes too long is tried; the first time includes warm-up."""


class Budget:
    """Limits logging to a `share` of the time since `begin`, and to `seconds` per step; None for no limit.

    A step is expected to take as long as the last one.
    """

    def __init__(self, share: float | None, seconds: float | None) -> None:
        if share is not None and not 0 < share <= 1:
            raise PatchlightError(
                f"budget is {share!r}; give a share of the training time above 0 and up to 1, or None"
            )
        if seconds is not None and not seconds > 0:
            raise PatchlightError(f"seconds is {seconds!r}; give a number above 0, or None")
        self.share, self.seconds = share, seconds
        self.began: float | None = None
        self.spent, self.last = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock, unless it is running."""
        self.began = monotonic() if self.began is None else self.began

    def lacks(self) -> str:
        """Why there is not enough time; empty if there is."""
        if self.share is None or self.began is None or not self.last:
            return ""
        allowed = self.share * (monotonic() - self.began)
        if self.spent + self.last <= allowed:
            return ""
        left = max(0.0, allowed - self.spent)
        return f"it takes {self.last:.3g} s, and {left:.3g} s of a budget of {100 * self.share:g} % are left"

    @contextlib.contextmanager
    def spending(self) -> Iterator[Callable[[], float]]:
        """Count the time of a block, and cancel it after `seconds` at the next chunk of variants.

        Yields a function that returns the seconds so far.
        """
        begin = monotonic()
        limit = self.seconds
        try:
            with watch(Watcher(cancelled=lambda: limit is not None and monotonic() - begin > limit)):
                yield lambda: monotonic() - begin
        finally:
            self.last = monotonic() - begin
            self.spent += self.last


class TrainingLog:
    """Logs maps of fixed images and their faithfulness during training; call it with each step.

    It logs the picture `patchlight/maps`, the mean score of the explained classes as `patchlight/probability` (or
    `patchlight/logit` for a model without probabilities), `patchlight/METHOD/METRIC` for each method and for `random`,
    and `patchlight/seconds`. A step that cannot be logged, for example because weights are not finite, gives one
    warning.

    Args:
        model: The model in training, or `pl.wrap` of it with labels, preprocessing or a head.
        images: A few images, in any form that `explain` accepts; they are read once.
        writer: A SummaryWriter of TensorBoard, a wandb run, a folder for TensorBoard's files, a function of
            (step, numbers, pictures), or a list of these.
        every: Log every n-th step.
        method: One or more methods, as in `explain`.
        metric: One or more metrics, as in `evaluate`; a name alone uses the metric's quick settings. None: no metric.
        target: The classes to explain; by default the prediction of each step. Use the true classes to keep the
            question the same.
        budget: Maximum share of the training time; steps beyond it are skipped. None for no limit.
        seconds: Maximum seconds per step; parts beyond it are skipped. None for no limit.

    Example:

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
        targets = resolve_targets(target, len(self.images), self.vit.outcomes, self.vit.labels)
        if targets is not None and targets.count != 1:
            raise PatchlightError(f"target has {targets.count} classes per image; give one class per image")
        self._methods = resolve_all(method, {}, Request, "method", resolve)
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
        """Log this step if it is due and there is time. Of several processes, only the first logs."""
        self._budget.begin()
        if step % self.every or step == self._last or _rank():
            return
        self._last = step
        reason = self._budget.lacks()
        if reason:
            self._warn_once("budget", f"step {step} is not logged: {reason}; give a larger budget= or every=")
            return
        try:
            self.log(step)
        except (PatchlightError, torch.OutOfMemoryError) as error:
            self._warn_once(type(error).__name__, f"step {step} is not logged: {first_line(error)}")

    def log(self, step: int) -> None:
        """Log this step regardless of the budget; errors are raised."""
        if self._write is None:
            raise PatchlightError("there is no writer; give writer=, for example a SummaryWriter of TensorBoard")
        _check_not_sharded(self.vit.model)
        if self.vit.device.type == "cuda":
            torch.cuda.synchronize(self.vit.device)  # pending work of the training is not the log's time
        with _restored_generators(self.vit.device), self._budget.spending() as taken:
            numbers, pictures = self._measure_step(step)
            try:
                self._write(step, {**numbers, "patchlight/seconds": taken()}, pictures)
            except Exception as error:  # writers raise many kinds, for example for a full disk
                raise PatchlightError(f"its writer failed with {type(error).__name__}: {first_line(error)}") from error

    def attach(self, writer: Callable[[], Any], trained: nn.Module) -> None:
        """Prepare for a trainer: check that `trained` contains the model, and open `writer` if none was given."""
        weights = {id(p) for p in self.vit.model.parameters()}
        if weights and not any(id(p) in weights for p in trained.parameters()):
            raise PatchlightError(
                f"{self.vit.name}, which was given to the callback, shares no weights with the model in training; "
                "give the same object to both"
            )
        if self._write is None:
            self._write = open_writer(writer())

    def _measure_step(self, step: int) -> tuple[dict[str, float], dict[str, Image.Image]]:
        """Compute the maps, then the numbers of each method, as long as there is time."""
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
        """All metrics of one method; `random` explains the same classes."""
        first = next(iter(maps.values()))
        pairs = first.target if first.against is None else list(zip(first.target, first.against, strict=True))
        method, current = maps.get(label, label), label in maps
        results = evaluate(self.vit, self.images, method, self._metrics, pairs, current=current, progress=False)
        return {f"patchlight/{label}/{name}": evaluation.mean for name, evaluation in results.items()}

    def _warn_once(self, kind: str, words: str) -> None:
        """Warn once for each kind of problem."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{words} (this warning appears once)", LogSkipped)


def log_maps(model: Anatomy | nn.Module, images: Any, writer: Any, step: int, **options: Any) -> None:
    """Log one step now.

    Args:
        model, images, writer, **options: As in `TrainingLog`; `every` and `budget` have no effect.
        step: The step.
    """
    TrainingLog(model, images, writer, **options).log(step)


def _quick(label: str, settings: Any) -> MetricRequest:
    """A metric, with its quick settings by default."""
    name = str(settings.get("metric", label))
    return resolve_metric(label, settings if {*settings} - {"metric"} else {**METRICS.find(name).quick, **settings})


def _rank() -> int:
    """The rank of this process; 0 for a single process."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if several else 0


def _check_not_sharded(model: nn.Module) -> None:
    """Refuse sharded weights: gathering them would need all processes."""
    weights = list(model.parameters())  # empty if an outer module holds them in one flat parameter
    if not weights or any(type(p).__name__ == "DTensor" or any(hasattr(p, mark) for mark in _SHARDED) for p in weights):
        raise PatchlightError(
            "the model's weights are sharded over processes (FSDP, ZeRO-3, tensor parallelism), so no process has the "
            "complete model; train with DistributedDataParallel, or explain checkpoints"
        )


@contextlib.contextmanager
def _restored_generators(device: torch.device) -> Iterator[None]:
    """Restore the state of all random generators after a block."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
