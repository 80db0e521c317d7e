"""Explain images in files, or measure maps of them, batch by batch; failures are reported and skipped."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution
from patchlight.core.drawing.heat import seen
from patchlight.core.errors import NoDetection, NotFinite, PatchlightError, escape_surrogates, nearest
from patchlight.core.files import csv_text
from patchlight.core.fingerprints import hash_images
from patchlight.core.images import open_image
from patchlight.core.statistics import constant
from patchlight.core.targets import Target, read_class
from patchlight.data import Batch, Data, batches, labelled
from patchlight.engine import explain
from patchlight.methods.requests import Request
from patchlight.metrics.base import Evaluation, MetricRequest
from patchlight.study.evaluate import evaluate
from patchlight.study.sources import check_model

EXPLAINED, MEASURED = 16, 64
"""Images in memory at a time."""


@dataclass(frozen=True)
class FileLog:
    """Failures by path or name of an image, and warnings; `say` is called with each message."""

    say: Callable[[str], None] = lambda words: None
    errors: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fail(self, name: str, sentence: str) -> None:
        self.errors.append((name, sentence))
        self.say(f"failed: {sentence}")

    def warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)
            self.say(f"warning: {words}")


@dataclass(frozen=True)
class ExplainedFile:
    """An image, as a picture and as the model's input, its maps by method, and its best classes."""

    path: Path
    tensor: Tensor
    picture: Image | None
    maps: dict[str, Attribution] = field(default_factory=dict)
    predictions: list[tuple[str, float]] = field(default_factory=list)
    size: tuple[int, int] | None = None
    """Width and height of the photograph."""
    vit: Anatomy | None = None
    """The model, with its question prepared for the image if it has one."""


@dataclass(frozen=True)
class ExplainOptions:
    """How files are explained."""

    requests: Sequence[Request]
    target: Target = None
    seed: int = 0
    batch_size: int | None = None


def explain_files(
    vit: Anatomy, paths: Sequence[Path], options: ExplainOptions, log: FileLog
) -> Iterator[ExplainedFile]:
    """Yield the images that can be read and explained, in order; only one batch is in memory."""
    size = options.batch_size or EXPLAINED
    for begin in range(0, len(paths), size):
        read = list(_read(paths[begin : begin + size], vit, log))
        if read:
            yield from _explain(read, vit, options, log)


def _read(paths: Sequence[Path], vit: Anatomy, log: FileLog) -> Iterator[ExplainedFile]:
    for path in paths:
        try:
            if vit.layout.inputs != "images":
                yield ExplainedFile(path, vit.batch(path), None)
                continue
            image = open_image(path)
            picture = seen(image, vit.preprocess.size, vit.preprocess)
            yield ExplainedFile(path, vit.batch(image), picture, size=image.size)
        except (PatchlightError, MemoryError) as error:
            log.fail(str(path), str(error) or f"'{path}' does not fit into memory")


def _explain(
    read: Sequence[ExplainedFile], vit: Anatomy, options: ExplainOptions, log: FileLog
) -> Iterator[ExplainedFile]:
    """Explain images together, or one by one if a map is not finite (a failure) or if the model has a question."""
    if vit.question is not None and vit.question.general is None:
        for file in read:
            try:
                yield from _explain([file], vit.prepared(file.tensor, file.size), options, log)
            except NoDetection as error:
                log.warn(f"{file.path.name}: {error}")
            except PatchlightError as error:
                log.fail(str(file.path), str(error))
        return
    batch = torch.cat([file.tensor for file in read])
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            maps = explain(
                vit, batch, options.requests, options.target, seed=options.seed, batch_size=options.batch_size
            )
    except NotFinite as error:
        if len(read) == 1:
            log.fail(str(read[0].path), f"'{read[0].path}': {error}")
            return
        for file in read:
            yield from _explain([file], vit, options, log)
        return
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            log.warn(" ".join(str(warning.message).split()))
    for i, (file, best) in enumerate(zip(read, vit.predict(batch, k=3), strict=True)):
        yield replace(file, maps={label: att[i] for label, att in maps.items()}, predictions=best, vit=vit)


SavedMaps = Mapping[str, Mapping[str, Path]]
"""Folders of saved attributions by image and method."""


@dataclass(frozen=True)
class MeasureTask:
    """What is measured.

    Attributes:
        metrics: The metrics.
        methods: The methods by label.
        requests: The methods that compute maps.
        saved: Saved maps, instead of computed ones.
        target: The name or index of a class, or "label" for the true class of each image.
        seed: Random seed.
        batch_size: Images per batch.
    """

    metrics: Sequence[MetricRequest]
    methods: Sequence[str]
    requests: Sequence[Request] = ()
    saved: SavedMaps | None = None
    target: str | None = None
    seed: int = 0
    batch_size: int = 16

    def classes(self, vit: Anatomy, batch: Batch) -> Any:
        """The classes to score."""
        if self.target is None:
            return None
        if not self.by_label(vit):
            return read_class(self.target, vit.outcomes, vit.labels)
        if batch.labels is None:
            raise PatchlightError("--target label needs labels; give the kind of data with --data")
        return batch.labels

    def by_label(self, vit: Anatomy) -> bool:
        """Whether the target is the true class of each image, and not a class called "label"."""
        return self.target == "label" and "label" not in (vit.labels or ())


@dataclass(frozen=True)
class MeasuredFiles:
    """By method, the names of its images and the evaluations by metric."""

    names: dict[str, list[str]]
    evaluations: dict[str, dict[str, Evaluation]]

    def to_json(self) -> list[dict[str, Any]]:
        """A row for each method and metric, with the value of every image."""
        return [
            {
                "method": method,
                "metric": metric,
                "mean": _number(evaluation.mean),
                "interval": _interval(evaluation),
                "higher_is_better": evaluation.higher_is_better,
                "images": evaluation.count,
                "undefined": len(evaluation) - evaluation.count,
                "settings": evaluation.settings,
                "values": dict(zip(self.names[method], map(_number, evaluation.values.tolist()), strict=True)),
            }
            for method, by_metric in self.evaluations.items()
            for metric, evaluation in by_metric.items()
        ]

    def to_csv(self) -> str:
        """A line for each image, method and metric."""
        rows = (
            (name, method, metric, value, reason)
            for method, by_metric in self.evaluations.items()
            for metric, each in by_metric.items()
            for name, value, reason in zip(self.names[method], each.values.tolist(), each.reasons, strict=True)
        )
        return csv_text(["image", "method", "metric", "value", "reason"], rows, end="\r\n")


def _interval(evaluation: Evaluation) -> list[float | None] | None:
    low, high = evaluation.interval()
    return None if low != low else [_number(low), _number(high)]


def _number(value: float) -> float | None:
    return None if value != value else round(value, 6)


def find_maps(
    folder: Path, data: Data, methods: Sequence[str], keep_others: bool = True
) -> tuple[dict[str, dict[str, Path]], list[str], Data]:
    """Find the attributions that `patchlight explain … --save` wrote to a folder.

    Image names there lack the suffix if it is not needed. Returns the folders of the maps by image and method, the
    methods (`methods`, or by default all that have maps), and the images that have maps. With `keep_others`, maps of
    other images are returned as well, so that they are reported.
    """
    if not folder.is_dir():
        raise PatchlightError(f"no folder of maps at '{folder}'; `patchlight explain … --save {folder}` writes one")
    folders: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.rglob("attribution.json")):
        image = escape_surrogates(file.parent.parent.relative_to(folder).as_posix())
        folders.setdefault(image, {})[file.parent.name] = file.parent
    if not folders:
        raise PatchlightError(f"no maps in '{folder}'; `patchlight explain … --save {folder}` writes them")
    saved = {}
    stems = Counter(_stem(name) for name in data.names)
    for name in data.names:
        keys = (name, _stem(name)) if stems[_stem(name)] == 1 else (name,)
        match = next((folders.pop(key) for key in map(escape_surrogates, keys) if key in folders), None)
        if match is not None:
            saved[name] = match
    if not saved:
        first = next(iter(folders))
        raise PatchlightError(
            f"the maps in '{folder}' belong to none of --images: there is no '{first}'; {nearest(first, data.names)}"
        )
    saved |= folders if keep_others else {}
    available = sorted({name for each in saved.values() for name in each})
    unknown = next((name for name in methods if name not in available), None)
    if unknown is not None:
        raise PatchlightError(f"no map in '{folder}' is by '{unknown}'; {nearest(unknown, available)}")
    return saved, list(methods) or available, data.select([i for i, name in enumerate(data.names) if name in saved])


def _stem(name: str) -> str:
    return Path(name).with_suffix("").as_posix()


def measure_files(
    task: MeasureTask, vit: Anatomy, data: Data, log: FileLog, advance: Callable[[int], None]
) -> MeasuredFiles:
    """Explain images or read their saved maps, and measure them; only one batch is in memory."""
    names: dict[str, list[str]] = {method: [] for method in task.methods}
    parts: dict[str, dict[str, list[Evaluation]]] = {method: {} for method in task.methods}
    for unused in sorted(set(task.saved or ()) - set(data.names)):
        log.fail(unused, f"the maps of '{unused}' have no image in --images")
    for batch in _batches(task, vit, data, log):
        maps: Mapping[str, tuple[list[int], Attribution]] = {}
        if batch.names:
            with warnings.catch_warnings():  # they number the images of a batch; the log names them
                warnings.simplefilter("ignore", UserWarning)
                maps = _maps(task, vit, batch, log)
                measured = _measure(task, vit, batch, maps)
        for method, (rows, att) in maps.items():
            measured_names = [batch.names[i] for i in rows]
            names[method] += measured_names
            _warn_constant(method, att, measured_names, log)
            for metric, evaluation in measured[method].items():
                parts[method].setdefault(metric, []).append(evaluation)
                for name, reason in zip(measured_names, evaluation.reasons, strict=True):
                    if reason:
                        log.warn(f"{metric} of {method} has no value for '{name}': {reason}")
        advance((len(batch.names) + len(batch.failures)) * len(task.methods))
    evaluations = {
        method: {metric: Evaluation.concat(each) for metric, each in by_metric.items()}
        for method, by_metric in parts.items()
    }
    if not any(evaluations.values()):
        raise PatchlightError(f"nothing could be measured: {log.errors[0][1]}")
    return MeasuredFiles(names, evaluations)


def _batches(task: MeasureTask, vit: Anatomy, data: Data, log: FileLog) -> Iterator[Batch]:
    """The images; their labels are dropped if they are not classes of the model."""
    foreign = data.labels is not None and len(data.labels) != vit.outcomes
    if foreign:
        log.warn(f"the labels of {data.name} are not the classes of {vit.name} and are ignored")
    some_labels = data.labels is not None and not foreign
    for loaded in batches(data, vit, MEASURED):
        batch = replace(loaded, labels=None) if foreign else loaded
        some_labels = some_labels or batch.labels is not None
        if task.by_label(vit) and some_labels:
            batch = labelled(batch)
        for name, sentence in batch.failures:
            log.fail(name, sentence)
        if batch.labels is not None and bool((batch.labels < 0).any()):
            unlabelled = batch.names[int((batch.labels < 0).nonzero()[0])]
            log.warn(f"'{unlabelled}' has no label; metrics that need it use the explained class instead")
        yield batch


def _maps(task: MeasureTask, vit: Anatomy, batch: Batch, log: FileLog) -> dict[str, tuple[list[int], Attribution]]:
    """By method: the indices of the images that have a map, and the maps."""
    if task.saved is None:
        maps = explain(vit, batch.images, task.requests, task.classes(vit, batch), seed=task.seed, finite=False)
        return {method: (list(range(len(batch.names))), att) for method, att in maps.items()}
    hashes = hash_images(vit.place(batch.images))
    loaded: dict[str, tuple[list[int], Attribution]] = {}
    for method in task.methods:
        rows: list[int] = []
        parts: list[Attribution] = []
        for i, name in enumerate(batch.names):
            try:
                folder = task.saved[name].get(method)
                if folder is None:
                    raise PatchlightError(f"there is no map of '{name}' by '{method}'")
                att = Attribution.load(folder)
                if att.model != vit.name:
                    log.warn(f"the maps are of {att.model}, but are measured on {vit.name}")
                check_model(att, vit)
                if att.images and att.images[0] != hashes[i]:
                    raise PatchlightError(f"'{name}' is not the image that the map in '{folder}' explains")
                if parts and att.scores.shape != parts[0].scores.shape:
                    raise PatchlightError(
                        f"the map in '{folder}' has shape {list(att.scores.shape)}, the previous ones "
                        f"{list(parts[0].scores.shape)}; measure maps of one size at a time"
                    )
                rows.append(i)
                parts.append(att)
            except PatchlightError as error:
                log.fail(name, str(error))
        if rows:
            loaded[method] = rows, Attribution.concat(parts)
    return loaded


def _measure(
    task: MeasureTask, vit: Anatomy, batch: Batch, maps: Mapping[str, tuple[list[int], Attribution]]
) -> dict[str, Any]:
    """By method, the evaluations of its maps; methods with maps of the same images are measured together."""
    groups: dict[tuple[int, ...], dict[str, Attribution]] = {}
    for method, (rows, att) in maps.items():
        groups.setdefault(tuple(rows), {})[method] = att
    measured: dict[str, Any] = {}
    classes = task.classes(vit, batch)
    for indices, by_method in groups.items():
        rows = list(indices)
        part = batch.select(rows)
        measured |= evaluate(
            vit,
            part.images,
            by_method,
            task.metrics,
            classes[rows] if isinstance(classes, Tensor) else classes,
            labels=part.labels,
            boxes=part.boxes,
            masks=part.masks,
            seed=task.seed,
            batch_size=task.batch_size,
            current=task.saved is None,
        )
    return measured


def _warn_constant(method: str, maps: Attribution, names: Sequence[str], log: FileLog) -> None:
    flat = constant(maps.scores.flatten(1)).nonzero().flatten().tolist()
    if flat:
        more = f" and {len(flat) - 1} more" if len(flat) > 1 else ""
        log.warn(f"the map of '{names[flat[0]]}'{more} by {method} is constant; its patches are in random order")
