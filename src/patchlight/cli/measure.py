"""What `patchlight evaluate` does batch by batch: find saved maps or make them, and measure them; failures are told."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.cli.common import read_class, say
from patchlight.core.errors import PatchlightError, nearest, spelled

if TYPE_CHECKING:
    from patchlight.anatomy.base import Anatomy
    from patchlight.core.attribution import Attribution
    from patchlight.data import Batch, Data
    from patchlight.metrics.base import Evaluation

BATCH = 64
Saved = Mapping[str, Mapping[str, Path]]
"""Folders of saved attributions by image and method."""


@dataclass(frozen=True)
class Task:
    """A checked request; `saved` are the maps to measure, else the methods explain."""

    metrics: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    target: str | None
    seed: int
    batch_size: int
    saved: Saved | None


@dataclass(frozen=True)
class Done:
    """What was found: by method, the names of its images and the evaluation of every metric."""

    model: str
    task: Task
    names: dict[str, list[str]] = field(default_factory=dict)
    found: dict[str, dict[str, Evaluation]] = field(default_factory=dict)
    errors: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fail(self, name: str, sentence: str) -> None:
        self.errors.append({"image": name, "error": sentence})
        say(f"failed: {sentence}")

    def warn(self, words: str) -> None:
        if words not in self.warnings:
            self.warnings.append(words)
            say(f"warning: {words}")


def find_maps(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Path]]:
    """The attributions saved below a folder by image and method; `explain` leaves out a suffix nobody needs."""
    if not folder.is_dir():
        raise PatchlightError(f"no folder of maps at '{folder}'; `patchlight explain … --save {folder}` writes one")
    found: dict[str, dict[str, Path]] = {}
    for about in sorted(folder.rglob("attribution.json")):
        image = spelled(about.parent.parent.relative_to(folder).as_posix())
        found.setdefault(image, {})[about.parent.name] = about.parent
    if not found:
        raise PatchlightError(f"no maps in '{folder}'; `patchlight explain … --save {folder}` writes them")
    saved = {}
    stems = Counter(_stem(name) for name in names)
    for name in names:
        keys = (name, _stem(name)) if stems[_stem(name)] == 1 else (name,)
        match = next((found.pop(key) for key in map(spelled, keys) if key in found), None)
        if match is not None:
            saved[name] = match
    if not saved:
        first = next(iter(found))
        raise PatchlightError(
            f"no map in '{folder}' is of an image in --images: '{first}' is not; {nearest(first, names)}"
        )
    return saved | found


def _stem(name: str) -> str:
    return Path(name).with_suffix("").as_posix()


def with_maps(data: Data, saved: Mapping[str, Any], methods: Sequence[str], folder: Path) -> Data:
    """The images that have maps; a method without any map is refused."""
    known = sorted({name for each in saved.values() for name in each})
    unknown = next((name for name in methods if name not in known), None)
    if unknown is not None:
        raise PatchlightError(f"no map in '{folder}' is by '{unknown}'; {nearest(unknown, known)}")
    return data.select([i for i, name in enumerate(data.names) if name in saved])


def measure(task: Task, vit: Anatomy, data: Data, advance: Callable[[int], None]) -> Done:
    """Batch by batch: one batch of images and maps is all that is held at a time."""
    from patchlight.data import batches, labelled
    from patchlight.metrics.base import Evaluation

    done = Done(vit.name, task, {name: [] for name in task.methods})
    parts: dict[str, dict[str, list[Evaluation]]] = {m: {k: [] for k in task.metrics} for m in task.methods}
    foreign = data.labels is not None and len(data.labels) != vit.outcomes
    if foreign:
        done.warn(f"the labels of {data.name} are not the classes of {vit.name}, and are left out")
    for orphan in sorted(set(task.saved or ()) - set(data.names)):
        done.fail(orphan, f"the maps of '{orphan}' have no image in --images")
    some_labels = data.labels is not None and not foreign
    for loaded in batches(data, vit, BATCH):
        batch = replace(loaded, labels=None) if foreign else loaded
        some_labels = some_labels or batch.labels is not None
        if _by_label(task, vit) and some_labels:
            batch = labelled(batch)
        for name, sentence in batch.failures:
            done.fail(name, sentence)
        if batch.labels is not None and bool((batch.labels < 0).any()):
            bare = batch.names[int((batch.labels < 0).nonzero()[0])]
            done.warn(f"'{bare}' has no label; where a metric reads it, the class explained counts as true")
        if batch.names:
            for method, rows, maps in _maps(task, vit, batch, done):
                names = [batch.names[i] for i in rows]
                _tell_constant(done, method, maps, names)
                for metric, evaluation in _measure(task, vit, batch, rows, maps).items():
                    parts[method][metric].append(evaluation)
                    _tell(done, method, metric, evaluation, names)
                done.names[method].extend(names)
                advance(len(batch.names) + len(batch.failures))
    for method, own in parts.items():
        done.found[method] = {metric: Evaluation.joined(each) for metric, each in own.items() if each}
    if not any(done.found.values()):
        raise PatchlightError(f"nothing could be measured: {done.errors[0]['error']}")
    return done


def _maps(task: Task, vit: Anatomy, batch: Batch, done: Done) -> Iterator[tuple[str, list[int], Attribution]]:
    """By method: which images of the batch have a map, and the maps."""
    from patchlight.core.attribution import Attribution
    from patchlight.core.fingerprints import of_images
    from patchlight.engine import explain
    from patchlight.study.sources import check_model

    if task.saved is None:
        with _quiet():
            made = explain(vit, batch.images, task.methods, _target(task, vit, batch), seed=task.seed, finite=False)
        for method, maps in made.items():
            yield method, list(range(len(batch.names))), maps
        return
    shown = of_images(vit.place(batch.images))
    for method in task.methods:
        rows: list[int] = []
        each: list[Attribution] = []
        for i, name in enumerate(batch.names):
            folder = task.saved[name].get(method)
            try:
                if folder is None:
                    raise PatchlightError(f"there is no map of '{name}' by '{method}'")
                one = Attribution.load(folder)
                if one.model != vit.name:
                    done.warn(f"the maps are of {one.model}, but are measured on {vit.name}")
                check_model(one, vit)
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
                done.fail(name, str(error))
        if rows:
            yield method, rows, Attribution.joined(each)


def _by_label(task: Task, vit: Anatomy) -> bool:
    """Whether each image is asked about its own label, and not about a class that is called so."""
    return task.target == "label" and "label" not in (vit.labels or ())


def _target(task: Task, vit: Anatomy, batch: Batch) -> Any:
    """The class asked about; `label` is the true one of each image."""
    if task.target is None:
        return None
    if _by_label(task, vit):
        if batch.labels is None:
            raise PatchlightError("--target label needs the images' labels; name the kind of data with --data")
        return batch.labels
    return read_class(task.target, vit)


def _measure(task: Task, vit: Anatomy, batch: Batch, rows: list[int], maps: Attribution) -> dict[str, Evaluation]:
    from patchlight.study.evaluate import evaluate

    target = _target(task, vit, batch)
    if target is batch.labels and target is not None:
        target = target[rows]
    with _quiet():
        return evaluate(
            vit,
            batch.images[rows],
            maps,
            task.metrics,
            target,
            labels=None if batch.labels is None else batch.labels[rows],
            boxes=None if batch.boxes is None else [batch.boxes[i] for i in rows],
            masks=None if batch.masks is None else batch.masks[rows],
            seed=task.seed,
            batch_size=task.batch_size,
            current=task.saved is None,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, which number the images of a batch: `_tell` names them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _tell(done: Done, method: str, metric: str, evaluation: Evaluation, names: Sequence[str]) -> None:
    for name, reason in zip(names, evaluation.reasons, strict=True):
        if reason:
            done.warn(f"{metric} of {method} has no value for '{name}': {reason}")


def _tell_constant(done: Done, method: str, maps: Attribution, names: Sequence[str]) -> None:
    from patchlight.core.statistics import constant

    dead = constant(maps.scores.flatten(1)).nonzero().flatten().tolist()
    if dead:
        more = f" and of {len(dead) - 1} more" if len(dead) > 1 else ""
        done.warn(f"the map of '{names[dead[0]]}'{more} by {method} is constant; it is ordered by a seeded draw")
