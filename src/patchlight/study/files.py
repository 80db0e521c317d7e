"""Images in files: explain them, or measure maps of them, batch by batch. What fails is reported, the rest is done."""

from __future__ import annotations

import csv
import io
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
from patchlight.core.errors import NotFinite, PatchlightError, escape_surrogates, nearest
from patchlight.core.files import csv_cell
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
"""Images that are held at a time."""


@dataclass(frozen=True)
class FileLog:
    """What failed, by the path or name of an image, and what was warned of; `say` prints each when it comes."""

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
    """An image that was read, what the model sees of it, its maps by method, and its best classes."""

    path: Path
    tensor: Tensor
    picture: Image
    maps: dict[str, Attribution] = field(default_factory=dict)
    predictions: list[tuple[str, float]] = field(default_factory=list)


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
    """The images that can be read and explained, in order; one batch is all that is held at a time."""
    size = options.batch_size or EXPLAINED
    for begin in range(0, len(paths), size):
        read = list(_read(paths[begin : begin + size], vit, log))
        if read:
            yield from _explain(read, vit, options, log)


def _read(paths: Sequence[Path], vit: Anatomy, log: FileLog) -> Iterator[ExplainedFile]:
    for path in paths:
        try:
            image = open_image(path)
            yield ExplainedFile(path, vit.batch(image), seen(image, vit.preprocess.size, vit.preprocess))
        except (PatchlightError, MemoryError) as error:
            log.fail(str(path), str(error) or f"'{path}' does not fit into memory")


def _explain(
    read: Sequence[ExplainedFile], vit: Anatomy, options: ExplainOptions, log: FileLog
) -> Iterator[ExplainedFile]:
    """Explain together, or one by one where a map is not finite; an image without a finite map fails."""
    batch = torch.cat([one.tensor for one in read])
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
        for one in read:
            yield from _explain([one], vit, options, log)
        return
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            log.warn(" ".join(str(warning.message).split()))
    for i, (one, best) in enumerate(zip(read, vit.predict(batch, k=3), strict=True)):
        yield replace(one, maps={label: own[i] for label, own in maps.items()}, predictions=best)


SavedMaps = Mapping[str, Mapping[str, Path]]
"""Folders of saved attributions by image and method."""


@dataclass(frozen=True)
class MeasureTask:
    """What is measured: the maps in `saved` by `methods`, or else those that `requests` make.

    `target` is the name or index of a class, or `label` for each image's own.
    """

    metrics: Sequence[MetricRequest]
    methods: Sequence[str]
    requests: Sequence[Request] = ()
    saved: SavedMaps | None = None
    target: str | None = None
    seed: int = 0
    batch_size: int = 16

    def classes(self, vit: Anatomy, batch: Batch) -> Any:
        """The class asked about; `label` is the true one of each image."""
        if self.target is None:
            return None
        if not self.by_label(vit):
            return read_class(self.target, vit.outcomes, vit.labels)
        if batch.labels is None:
            raise PatchlightError("--target label needs the images' labels; name the kind of data with --data")
        return batch.labels

    def by_label(self, vit: Anatomy) -> bool:
        """Whether each image is asked about its own label, and not about a class that is called so."""
        return self.target == "label" and "label" not in (vit.labels or ())


@dataclass(frozen=True)
class MeasuredFiles:
    """By method, the names of its images and the evaluation of every metric."""

    names: dict[str, list[str]]
    evaluations: dict[str, dict[str, Evaluation]]

    def to_json(self) -> list[dict[str, Any]]:
        """A row for each method and metric, with the value of every image."""
        return [
            {
                "method": method,
                "metric": metric,
                "mean": _number(one.mean),
                "interval": _interval(one),
                "higher_is_better": one.higher_is_better,
                "images": one.count,
                "undefined": len(one) - one.count,
                "settings": one.settings,
                "values": dict(zip(self.names[method], map(_number, one.values.tolist()), strict=True)),
            }
            for method, own in self.evaluations.items()
            for metric, one in own.items()
        ]

    def to_csv(self) -> str:
        """A line for each image, method and metric."""
        text = io.StringIO()
        lines = csv.writer(text)
        lines.writerow(["image", "method", "metric", "value", "reason"])
        for method, own in self.evaluations.items():
            for metric, one in own.items():
                for name, value, reason in zip(self.names[method], one.values.tolist(), one.reasons, strict=True):
                    known = "" if value != value else value
                    lines.writerow([csv_cell(each) for each in (name, method, metric, known, reason)])
        return text.getvalue()


def _interval(one: Evaluation) -> list[float | None] | None:
    low, high = one.interval()
    return None if low != low else [_number(low), _number(high)]


def _number(value: float) -> float | None:
    return None if value != value else round(value, 6)


def find_maps(
    folder: Path, data: Data, methods: Sequence[str], whole: bool = True
) -> tuple[dict[str, dict[str, Path]], list[str], Data]:
    """The attributions saved below a folder, by image and method.

    Args:
        folder: What `patchlight explain … --save` wrote; it leaves out a suffix that no name needs.
        data: The images.
        methods: The methods to measure; by default all that have maps. One without any map is refused.
        whole: Whether maps of other images are kept, to be reported.

    Returns:
        The folders of the maps, the methods, and the images that have maps.
    """
    if not folder.is_dir():
        raise PatchlightError(f"no folder of maps at '{folder}'; `patchlight explain … --save {folder}` writes one")
    found: dict[str, dict[str, Path]] = {}
    for about in sorted(folder.rglob("attribution.json")):
        image = escape_surrogates(about.parent.parent.relative_to(folder).as_posix())
        found.setdefault(image, {})[about.parent.name] = about.parent
    if not found:
        raise PatchlightError(f"no maps in '{folder}'; `patchlight explain … --save {folder}` writes them")
    saved = {}
    stems = Counter(_stem(name) for name in data.names)
    for name in data.names:
        keys = (name, _stem(name)) if stems[_stem(name)] == 1 else (name,)
        match = next((found.pop(key) for key in map(escape_surrogates, keys) if key in found), None)
        if match is not None:
            saved[name] = match
    if not saved:
        first = next(iter(found))
        raise PatchlightError(
            f"no map in '{folder}' is of an image in --images: '{first}' is not; {nearest(first, data.names)}"
        )
    saved |= found if whole else {}
    known = sorted({name for each in saved.values() for name in each})
    unknown = next((name for name in methods if name not in known), None)
    if unknown is not None:
        raise PatchlightError(f"no map in '{folder}' is by '{unknown}'; {nearest(unknown, known)}")
    return saved, list(methods) or known, data.select([i for i, name in enumerate(data.names) if name in saved])


def _stem(name: str) -> str:
    return Path(name).with_suffix("").as_posix()


def measure_files(
    task: MeasureTask, vit: Anatomy, data: Data, log: FileLog, advance: Callable[[int], None]
) -> MeasuredFiles:
    """Explain images or read their saved maps, and measure them; one batch is all that is held at a time."""
    names: dict[str, list[str]] = {method: [] for method in task.methods}
    parts: dict[str, dict[str, list[Evaluation]]] = {method: {} for method in task.methods}
    for orphan in sorted(set(task.saved or ()) - set(data.names)):
        log.fail(orphan, f"the maps of '{orphan}' have no image in --images")
    for batch in _batches(task, vit, data, log):
        made: Mapping[str, tuple[list[int], Attribution]] = {}
        if batch.names:
            with warnings.catch_warnings():  # they number the images of a batch, which are named below
                warnings.simplefilter("ignore", UserWarning)
                made = _maps(task, vit, batch, log)
                measured = _measure(task, vit, batch, made)
        for method, (rows, maps) in made.items():
            shown = [batch.names[i] for i in rows]
            names[method] += shown
            _warn_constant(method, maps, shown, log)
            for metric, evaluation in measured[method].items():
                parts[method].setdefault(metric, []).append(evaluation)
                for name, reason in zip(shown, evaluation.reasons, strict=True):
                    if reason:
                        log.warn(f"{metric} of {method} has no value for '{name}': {reason}")
        advance((len(batch.names) + len(batch.failures)) * len(task.methods))
    evaluations = {
        method: {metric: Evaluation.concat(each) for metric, each in own.items()} for method, own in parts.items()
    }
    if not any(evaluations.values()):
        raise PatchlightError(f"nothing could be measured: {log.errors[0][1]}")
    return MeasuredFiles(names, evaluations)


def _batches(task: MeasureTask, vit: Anatomy, data: Data, log: FileLog) -> Iterator[Batch]:
    """The images with those of their labels that are classes of the model."""
    foreign = data.labels is not None and len(data.labels) != vit.outcomes
    if foreign:
        log.warn(f"the labels of {data.name} are not the classes of {vit.name}, and are left out")
    some_labels = data.labels is not None and not foreign
    for loaded in batches(data, vit, MEASURED):
        batch = replace(loaded, labels=None) if foreign else loaded
        some_labels = some_labels or batch.labels is not None
        if task.by_label(vit) and some_labels:
            batch = labelled(batch)
        for name, sentence in batch.failures:
            log.fail(name, sentence)
        if batch.labels is not None and bool((batch.labels < 0).any()):
            bare = batch.names[int((batch.labels < 0).nonzero()[0])]
            log.warn(f"'{bare}' has no label; where a metric reads it, the class explained counts as true")
        yield batch


def _maps(task: MeasureTask, vit: Anatomy, batch: Batch, log: FileLog) -> dict[str, tuple[list[int], Attribution]]:
    """By method: which images of the batch have a map, and the maps."""
    if task.saved is None:
        made = explain(vit, batch.images, task.requests, task.classes(vit, batch), seed=task.seed, finite=False)
        return {method: (list(range(len(batch.names))), maps) for method, maps in made.items()}
    shown = hash_images(vit.place(batch.images))
    loaded: dict[str, tuple[list[int], Attribution]] = {}
    for method in task.methods:
        rows: list[int] = []
        each: list[Attribution] = []
        for i, name in enumerate(batch.names):
            try:
                one = _load(task.saved[name].get(method), name, method)
                if one.model != vit.name:
                    log.warn(f"the maps are of {one.model}, but are measured on {vit.name}")
                check_model(one, vit)
                folder = task.saved[name][method]
                if one.images and one.images[0] != shown[i]:
                    raise PatchlightError(f"'{name}' is not the picture that the map in '{folder}' was made of")
                if each and one.scores.shape != each[0].scores.shape:
                    raise PatchlightError(
                        f"the map in '{folder}' has shape {list(one.scores.shape)}, those before it "
                        f"{list(each[0].scores.shape)}; measure maps of one size at a time"
                    )
                rows.append(i)
                each.append(one)
            except PatchlightError as error:
                log.fail(name, str(error))
        if rows:
            loaded[method] = rows, Attribution.concat(each)
    return loaded


def _load(folder: Path | None, name: str, method: str) -> Attribution:
    if folder is None:
        raise PatchlightError(f"there is no map of '{name}' by '{method}'")
    return Attribution.load(folder)


def _measure(
    task: MeasureTask, vit: Anatomy, batch: Batch, made: Mapping[str, tuple[list[int], Attribution]]
) -> dict[str, Any]:
    """By method, the evaluations of its maps; methods that have maps of the same images are measured together."""
    alike: dict[tuple[int, ...], dict[str, Attribution]] = {}
    for method, (rows, maps) in made.items():
        alike.setdefault(tuple(rows), {})[method] = maps
    measured: dict[str, Any] = {}
    classes = task.classes(vit, batch)
    for group, together in alike.items():
        rows = list(group)
        measured |= evaluate(
            vit,
            batch.images[rows],
            together,
            task.metrics,
            classes[rows] if isinstance(classes, Tensor) else classes,
            labels=None if batch.labels is None else batch.labels[rows],
            boxes=None if batch.boxes is None else [batch.boxes[i] for i in rows],
            masks=None if batch.masks is None else batch.masks[rows],
            seed=task.seed,
            batch_size=task.batch_size,
            current=task.saved is None,
        )
    return measured


def _warn_constant(method: str, maps: Attribution, names: Sequence[str], log: FileLog) -> None:
    dead = constant(maps.scores.flatten(1)).nonzero().flatten().tolist()
    if dead:
        more = f" and of {len(dead) - 1} more" if len(dead) > 1 else ""
        log.warn(f"the map of '{names[dead[0]]}'{more} by {method} is constant; it is ordered by a seeded draw")
