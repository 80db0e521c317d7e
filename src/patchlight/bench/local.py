"""Running a plan in this process, beside any others: unit after unit, what is done already left alone."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from patchlight import __version__
from patchlight.bench.claims import Claims
from patchlight.bench.events import End, Listener, Start, UnitEnd, UnitStart, Waiting
from patchlight.bench.manifest import MERGED, Manifest, PlannedGroup, PlannedImages, write_manifest
from patchlight.bench.plan import Images, Plan, plan, source_digest
from patchlight.bench.queue import PAUSE, WHOLE, Begun, Part, Queue, Stop, lasted, steady
from patchlight.bench.recipe import Recipe
from patchlight.bench.results import counted
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, loaded, lost, opened, run_unit
from patchlight.core.attribution import versions
from patchlight.core.errors import PatchlightError
from patchlight.evidence.ablation import free_chunk

if TYPE_CHECKING:
    from patchlight.data import Data

OTHER_VERSION = "the run was begun with another version of"
LASTING = (OTHER_VERSION, MERGED)
"""How notes begin that a run keeps."""
DEATHS = 3
"""Processes that may die of a unit before it counts as failed."""


@dataclass(frozen=True)
class Summary:
    """What a run did: values in all, done before, done now, reused from earlier plans; failures, by reason.

    `left` are values of this part that are still to be done, because it was asked to stop.
    """

    values: int
    before: int
    now: int
    reused: int
    left: int
    failures: dict[str, int]
    notes: tuple[str, ...]


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    text: str = "",
    device: str = "cpu",
    quick: bool = False,
    retry: bool = False,
    part: Part = WHOLE,
    workers: int = 1,
    data: Data | None = None,
    threads: int | None = None,
    stop: Stop | None = None,
    listen: Listener = lambda event: None,
) -> Summary:
    """Run what is missing of a recipe into the store `out`; a run that was broken off goes on where it was.

    Any number of processes may do so at once: each unit is done by one of them. `part` confines this one to a share of
    the images; units are small enough for all parts, and for so many `workers`. `retry` runs again what failed. The
    chunk size and number of threads of the first run are kept, so that a resumed run gives the same numbers to the bit
    on the same machine. `data` are images given in Python, in place of the recipe's. `listen` is told of every step.
    """
    stop = stop or Stop()
    store = Store(out)
    store.make()
    claims = Claims(store.folder)
    with claims.present():
        stop.leave = lambda: claims.tell(gone=True)
        begun = begin(store, claims, recipe, text, device, quick, retry, data, threads, stop, listen)
        return work(replace(begun, shares=part.count * workers), part, stop, listen)


def begin(
    store: Store,
    claims: Claims,
    recipe: Recipe,
    text: str = "",
    device: str = "cpu",
    quick: bool = False,
    retry: bool = False,
    data: Data | None = None,
    threads: int | None = None,
    stop: Stop | None = None,
    listen: Listener = lambda event: None,
) -> Begun:
    """Plan, and bring the folder in line with the plan; refused where others are at work there on another one.

    Of those that begin at once, one plans first: the others need not look at every image.
    """
    stop = stop or Stop()
    if not (claims.settled() and claims.my_turn()):
        listen(Waiting(len(claims.others())))
        while not (claims.settled() and claims.my_turn()) and not stop.asked.wait(PAUSE / 5):
            pass
    if retry and not claims.alone and not any(other.pid == os.getppid() for other in claims.others()):
        raise PatchlightError(f"others are at work in '{store.folder}'; give --retry when they have ended")
    earlier = store.read_manifest()
    check_same_run(store, earlier, recipe, device)
    _check_same_code(store, claims)
    opened.cache_clear()  # the data may have changed since this process last looked
    joins = earlier is not None and not claims.alone and earlier.resolved == recipe
    known = (
        Images(*(getattr(earlier.images, name) for name in Images.__dataclass_fields__)) if earlier and joins else None
    )
    whole = plan(recipe, data, listen=listen, device=device, known=known)
    claims.tell(plan=whole.key, version=__version__, code=source_digest())
    resources, notes = _resources(earlier, device, whole, data, threads)
    if earlier is None and not write_manifest(
        store.manifest_path, _manifest(whole, text, quick, resources, None, notes), True
    ):
        earlier = store.manifest()  # another was first: its chunk and threads are used
        check_same_run(store, earlier, recipe, device)
        resources, notes = _resources(earlier, device, whole, data, threads)
    _check_same_plan(store, claims, whole)
    if claims.alone:
        store.sweep()
        notes += [f"{told}: made again" for told in store.drop_damaged()]
    units = list(store.units(whole))
    if earlier is not None and (claims.alone or earlier.plan != whole.key):
        store.set_aside({unit.key for unit in units})  # so that no row is ever read under another plan
        write_manifest(store.manifest_path, _manifest(whole, text, quick, resources, earlier, notes))
    if claims.alone or earlier is None or earlier.plan != whole.key:
        store.arrange({unit.key for unit in units})
        if retry and claims.alone:
            failed = _failed(store)
            for unit in (unit for unit in units if unit.key in failed):
                store.discard(unit)
    claims.tell(ready=True)
    return Begun(store, claims, whole, resources, retry, tuple(notes))


def work(begun: Begun, part: Part, stop: Stop, listen: Listener) -> Summary:
    """Take unit after unit of this part until none is left, or a stop is asked for."""
    store, whole = begun.store, begun.whole
    queue = Queue(begun, part, stop, listen)
    before = queue.values_done()
    listen(Start(whole.values, before, begun.notes, len(whole.images), list(whole.recipe.models), str(store.folder)))
    now, reused, errors = 0, 0, list[str]()
    for unit, claim in queue:
        started = time.perf_counter()
        known = store.before(unit, failed_too=not begun.retry)
        listen(UnitStart(unit.group.label, list(unit.group.methods), len(unit.images), unit.key))
        if claim.deaths < DEATHS:
            done = run_unit(unit, begun.resources, known, listen)
        else:
            done = lost(unit, f"{claim.deaths} processes died while they ran it")
        seconds = lasted(done.rows, time.perf_counter() - started, bool(known))
        store.write(unit, done)
        sizes = queue.sizes(unit)
        queue.finished(
            unit, claim, steady(unit, done.rows, seconds, len(whole.images), begun.resources) if sizes else seconds
        )
        listen(UnitEnd(unit.key, unit.values, seconds, done.rows, len(known)))
        now, reused = now + unit.values, reused + len(known)
        errors += [row.error for row in done.rows]
    failures = store.failures() if part == WHOLE else counted([Counter(filter(None, errors))])
    listen(End(failures, whole.values, queue.values_done()))
    return Summary(whole.values, before, now, reused, queue.left(), failures, (*whole.notes, *begun.notes))


def _failed(store: Store) -> set[str]:
    """The keys of the units in which something failed."""
    tables = {key: files.table(["error"]) for key, files in store.files().items()}
    return {key for key, table in tables.items() if table is not None and any(table["error"].to_pylist())}


def check_same_run(store: Store, earlier: Manifest | None, recipe: Recipe, device: str) -> None:
    """Refuse a folder of another recipe's run, or of one on another kind of device."""
    if earlier is None:
        return
    if earlier.resolved.name != recipe.name:
        raise PatchlightError(
            f"'{store.folder}' holds a run of '{earlier.resolved.name}', not of '{recipe.name}'; give another --out"
        )
    if torch.device(earlier.device).type != torch.device(device).type:
        raise PatchlightError(
            f"this run was begun on {earlier.device}, and {device} rounds differently; give --device "
            f"{earlier.device} or another --out"
        )


def _check_same_code(store: Store, claims: Claims) -> None:
    """Refuse to join others that have another Patchlight: each would make the other's rows anew."""
    for other in claims.others():
        if other.version and other.version != __version__:
            what = f"Patchlight {other.version}, and this is {__version__}"
        elif other.code and other.code != source_digest():
            what = f"other code of Patchlight {__version__} (hash {other.code}, here {source_digest()})"
        else:
            continue
        raise PatchlightError(f"process {other.pid} on {other.host} is at work in '{store.folder}' with {what}")


def _check_same_plan(store: Store, claims: Claims, whole: Plan) -> None:
    """Refuse to change the plan under others' hands."""
    for other in claims.others():
        if other.plan and other.plan != whole.key:
            raise PatchlightError(
                f"process {other.pid} on {other.host} is at work in '{store.folder}' on another plan (other settings, "
                "images or weights); wait for it, or give another --out"
            )


def _resources(
    earlier: Manifest | None, device: str, whole: Plan, data: Data | None, threads: int | None
) -> tuple[Resources, list[str]]:
    """Chunk and threads of the run as it was begun, else of this machine, and notes where they changed."""
    if earlier is None:
        if threads is not None:
            torch.set_num_threads(threads)
        return Resources(device, free_chunk(loaded(whole.groups[0], device)), data), []
    notes = []
    if earlier.threads != torch.get_num_threads():
        torch.set_num_threads(earlier.threads)
        notes.append(f"{earlier.threads} threads are used, as when the run was begun")
    changed = sorted(name for name, version in versions().items() if earlier.versions.get(name) != version)
    if changed:
        notes.append(f"{OTHER_VERSION} {', '.join(changed)}")
    return Resources(device, earlier.chunk, data), notes


def _manifest(
    whole: Plan, text: str, quick: bool, resources: Resources, earlier: Manifest | None, notes: Sequence[str]
) -> Manifest:
    """What the run is; versions are those it was begun with, and notes of a change of them, or of a merge, stay.

    A text that is not given is the earlier one, where the recipe is.
    """
    if not text and earlier is not None and earlier.resolved == whole.recipe:
        text, quick = earlier.recipe, earlier.quick
    changed = [*(earlier.notes if earlier else ()), *notes]
    images = whole.images
    return Manifest(
        resolved=whole.recipe,
        recipe=text,
        quick=quick,
        notes=(*whole.notes, *dict.fromkeys(note for note in changed if note.startswith(LASTING))),
        device=resources.device,
        chunk=resources.chunk,
        threads=torch.get_num_threads(),
        versions=earlier.versions if earlier else versions(),
        code=source_digest(),
        plan=whole.key,
        groups=tuple(
            PlannedGroup(key=g.key, model=g.label, methods=tuple(g.methods), batch_size=g.batch_size)
            for g in whole.groups
        ),
        images=PlannedImages(indices=images.indices, names=images.names, contents=images.contents),
        models={group.label: group.digest for group in whole.groups},
        classes=whole.groups[0].classes,
        made={
            method: {metric: group.made[method, metric] for metric in group.metrics}
            for group in whole.groups
            for method in group.methods
        },
    )
