"""Running a recipe into a folder: what is missing is cut into units, which an executor runs, and stored."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchlight.bench.events import End, Listener, Start, UnitEnd, UnitStart
from patchlight.bench.executors import Executor, Finished, InProcess, WorkerDied, Workers, cores, devices_of, job_of
from patchlight.bench.manifest import MERGED, Manifest, PlannedGroup, write_manifest
from patchlight.bench.plan import WHOLE, Group, Plan, Shard, Unit, load_model, plan, source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Before, map_bytes, table_bytes
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, assembled, loaded, lost, opened
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
SECONDS = 30.0
"""How long a unit should take."""
EACH = 4
"""Units that every worker should have of a group."""
MOST = 4096
"""Images a unit may have, whose rows and maps are kept in memory until it is done."""
PAUSE = 0.5
"""Seconds between two looks at a wish to stop."""
GRACE = 25.0
"""Seconds after which a process that was asked to stop ends, whatever it does."""
PREEMPTED = 75
"""The exit code of a run that was asked to stop: the same command resumes it (EX_TEMPFAIL)."""


@dataclass(frozen=True)
class RunOptions:
    """How a recipe is run; none of it changes a value.

    Args:
        text: The recipe as it was written, for the manifest.
        quick: Whether the recipe's quick settings are in force, for the manifest.
        retry: Run again what failed.
        shard: The part of the images to run; each shard has its own folder and owner.
        device: `cpu`, `cuda`, `cuda:1`, or `cuda:all` for a worker on each GPU.
        workers: Worker processes; by default one for each device, and on a cluster as many as it has room for.
        ray: Address of a Ray cluster whose nodes are the workers; `auto` is the one this machine belongs to.
        threads: Threads of a new run; a resumed run has those it was begun with.
        data: Images given in Python, in place of the recipe's.
    """

    text: str = ""
    quick: bool = False
    retry: bool = False
    shard: Shard = WHOLE
    device: str = "cpu"
    workers: int | None = None
    ray: str | None = None
    threads: int | None = None
    data: Data | None = None


@dataclass(frozen=True)
class Summary:
    """What a run did: values in all, done before, done now, reused from earlier plans; failures, by reason.

    `left` are values of this shard that are still to be done, because it was asked to stop.
    """

    values: int
    before: int
    now: int
    reused: int
    left: int
    failures: dict[str, int]
    notes: tuple[str, ...]


@dataclass
class Stop:
    """A wish to stop: the units in flight are finished, and nothing begun after them."""

    asked: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Begun:
    """A run that is begun or resumed: its plan, what it runs on, and notes on what changed."""

    store: Store
    plan: Plan
    resources: Resources
    notes: tuple[str, ...]


def run(
    recipe: Recipe,
    out: str | Path,
    options: RunOptions | None = None,
    stop: Stop | None = None,
    listen: Listener = lambda event: None,
) -> Summary:
    """Run what is missing of a recipe into the folder `out`; an interrupted run resumes where it was.

    A shard is run by one process at a time. The chunk size and number of threads of the first run are kept, so that a
    resumed run gives the same numbers to the bit on the same machine. `listen` is given every event.
    """
    options, stop, store = options or RunOptions(), stop or Stop(), Store(out)
    if options.ray is not None:
        from patchlight.bench.ray import run_on_cluster

        return run_on_cluster(recipe, store, options, stop, listen)
    devices = devices_of(options.device)
    workers = options.workers or len(devices)
    store.make(options.shard)
    with store.owned(options.shard):
        threads = options.threads or (max(1, cores() // workers) if workers > 1 else None)
        begun = begin(store, recipe, options, devices[0], threads, listen)
        executor: Executor
        if workers == 1:
            executor = InProcess(begun.resources, listen)
        else:
            load_model.cache_clear()  # the workers have their own
            job = job_of(begun.plan, begun.resources, torch.get_num_threads())
            each = [devices[i % len(devices)] for i in range(workers)]
            executor = Workers(job, each, store.folder / "logs")
        return work(begun, options, executor, stop, listen)


def begin(
    store: Store, recipe: Recipe, options: RunOptions, device: str, threads: int | None, listen: Listener
) -> Begun:
    """Plan, and bring the folder in line with the plan; refused where another shard is at work on another plan."""
    folder = store.folder_of(options.shard)
    earlier = store.read_manifest()
    check_same_run(store, earlier, recipe, device)
    opened.cache_clear()  # the data may have changed since this process last looked
    known = None
    if earlier is not None and earlier.resolved == recipe and store.held() != [folder]:
        known = earlier.images
    planned = plan(recipe, options.data, listen=listen, device=device, known=known)
    with store.planning():
        earlier = store.read_manifest()  # another shard may have been first: its chunk and threads are used
        check_same_run(store, earlier, recipe, device)
        others = [other for other in store.held() if other != folder]
        alone = not others
        if earlier is not None and earlier.plan != planned.key and others:
            raise PatchlightError(
                f"{store.worker(others[0])}, on another plan (other settings, images, weights or Patchlight); wait "
                "until it has ended, or give another --out"
            )
        resources, notes = _resources(earlier, device, planned, options.data, threads)
        scope = store.shards() if alone else [folder]
        store.sweep(scope)
        notes += [f"{damage}: made again" for damage in store.drop_damaged(scope)]
        if alone or earlier is None:
            notes += store.arrange(planned)  # so that no row is read under another plan
            write_manifest(store.manifest_path, _manifest(planned, options, resources, earlier, notes))
        for files in store.failed(scope if options.shard == WHOLE else [folder]) if options.retry else ():
            store.set_aside(files)
    return Begun(store, planned, resources, tuple(notes))


@dataclass
class Flight:
    """A unit under way, what was known of it, and how many processes died of it."""

    unit: Unit
    known: Before
    deaths: int = 0


def work(begun: Begun, options: RunOptions, executor: Executor, stop: Stop, listen: Listener) -> Summary:
    """Hand unit after unit of the shard to the executor and store what comes back, until all is done or a stop."""
    store, planned = begun.store, begun.plan
    cutter = Cutter(planned, options.shard, store.units(planned))
    before, now, reused = cutter.done, 0, 0
    listen(
        Start(planned.values, before, begun.notes, len(planned.images), list(planned.recipe.models), str(store.folder))
    )
    flying: dict[Future[Finished], Flight] = {}
    again: list[Flight] = []
    died: list[str] = []
    folder = store.folder_of(options.shard)
    try:
        while True:
            while not stop.asked.is_set() and len(flying) < (slots := executor.slots):
                flight = again.pop() if again else _next(cutter, slots, store, options.retry, listen)
                if flight is None:
                    break
                flying[_submitted(flight, executor)] = flight
            if not flying and (stop.asked.is_set() or not (again or cutter.left)):
                break
            if not flying:  # no worker is there at present
                stop.asked.wait(PAUSE)
            for future in wait(flying, PAUSE, FIRST_COMPLETED).done:
                flight = flying.pop(future)
                try:
                    finished = future.result()
                except WorkerDied as error:
                    died += [str(error)] if str(error) not in died else []
                    flight.deaths += 1
                    again.append(flight)
                    continue
                unit, rows = flight.unit, finished.done.rows
                store.keep(unit.key, table_bytes(finished.done), map_bytes(finished.done.maps), folder)
                if not flight.known and not all(row.error for row in rows):
                    cutter.time(unit, finished.seconds)
                now, reused = now + unit.values, reused + len(flight.known)
                listen(UnitEnd(unit.key, unit.values, finished.seconds, rows, len(flight.known)))
    finally:
        executor.close()
    failures = store.failures(store.shards() if options.shard == WHOLE else [folder])
    listen(End(failures, planned.values, before + now))
    left = cutter.left + sum(flight.unit.values for flight in again)
    return Summary(planned.values, before, now, reused, left, failures, (*planned.notes, *begun.notes, *died))


def _next(cutter: Cutter, workers: int, store: Store, retry: bool, listen: Listener) -> Flight | None:
    """The next unit, with what earlier plans know of it."""
    unit = cutter.cut(workers)
    if unit is None:
        return None
    listen(UnitStart(unit.group.label, list(unit.group.methods), len(unit.images), unit.key))
    return Flight(unit, store.before(unit, failed_too=not retry))


def _submitted(flight: Flight, executor: Executor) -> Future[Finished]:
    """A unit under way; one that is known, or of which too many processes died, needs no worker."""
    if len(flight.known) < flight.unit.values and flight.deaths < DEATHS:
        return executor.submit(flight.unit, flight.known)
    future: Future[Finished] = Future()
    if flight.deaths >= DEATHS:
        future.set_result(Finished(lost(flight.unit, f"{flight.deaths} processes died while they ran it"), 0.0))
    else:
        future.set_result(Finished(assembled(flight.unit, flight.known), 0.0))
    return future


class Cutter:
    """Cuts what is left of a shard into units of about `SECONDS`, in whole batches.

    One model after the other, as loading takes long, and of each all methods on the first images first, so that
    methods can be compared on what is done of a run. The first unit of a group is one batch, whose time says how large
    the others are.
    """

    def __init__(self, planned: Plan, shard: Shard, units: Sequence[Unit]) -> None:
        self.plan = planned
        self.done = sum(unit.values for unit in units)
        self.seconds: dict[str, float] = {}
        places: dict[str, set[int]] = {}
        for unit in units:
            places.setdefault(unit.group.key, set()).update(range(unit.start, unit.stop))
        self.todo: dict[str, list[int]] = {}
        for group in planned.groups:
            begin, end = shard.span(len(planned.images), group.batch_size)
            starts = range(begin, end, group.batch_size)
            self.todo[group.key] = [start for start in starts if start not in places.get(group.key, ())]

    @property
    def left(self) -> int:
        """Values of the shard that are not cut yet."""
        return sum(self._images(group) * len(group.made) for group in self.plan.groups)

    def _images(self, group: Group) -> int:
        total = len(self.plan.images)
        return sum(min(group.batch_size, total - start) for start in self.todo[group.key])

    def cut(self, workers: int = 1) -> Unit | None:
        """The next unit, small enough that all workers have some; None where nothing is left."""
        open_groups = [group for group in self.plan.groups if self.todo[group.key]]
        if not open_groups:
            return None
        models = list(self.plan.recipe.models)
        group = min(open_groups, key=lambda group: (models.index(group.label), self.todo[group.key][0]))
        todo, size = self.todo[group.key], group.batch_size
        most = size
        if group.key in self.seconds:
            most = size_of(group, SECONDS / max(self.seconds[group.key], 1e-9))
            most = most if workers == 1 else min(most, size_of(group, self._images(group) / (workers * EACH)))
        count = 1
        while count < len(todo) and count * size < most and todo[count] == todo[0] + count * size:
            count += 1
        self.todo[group.key] = todo[count:]
        return self.plan.unit(group, todo[0], min(todo[0] + count * size, len(self.plan.images)))

    def time(self, unit: Unit, seconds: float) -> None:
        """Note what a unit took; what runs first is slow, so the quickest counts."""
        each = seconds / len(unit.images)
        self.seconds[unit.group.key] = min(each, self.seconds.get(unit.group.key, each))


def size_of(group: Group, images: float) -> int:
    """About so many images, in whole batches."""
    return max(1, -(-int(min(images, MOST)) // group.batch_size)) * group.batch_size


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


def _resources(
    earlier: Manifest | None, device: str, planned: Plan, data: Data | None, threads: int | None
) -> tuple[Resources, list[str]]:
    """Chunk and threads of the run as it was begun, else of this machine, and notes where they changed."""
    if earlier is None:
        if threads is not None:
            torch.set_num_threads(threads)
        return Resources(device, free_chunk(loaded(planned.groups[0], device)), data), []
    notes = []
    if earlier.threads != torch.get_num_threads():
        torch.set_num_threads(earlier.threads)
        notes.append(f"{earlier.threads} threads are used, as when the run was begun")
    changed = sorted(name for name, version in versions().items() if earlier.versions.get(name) != version)
    if changed:
        notes.append(f"{OTHER_VERSION} {', '.join(changed)}")
    return Resources(device, earlier.chunk, data), notes


def _manifest(
    planned: Plan, options: RunOptions, resources: Resources, earlier: Manifest | None, notes: Sequence[str]
) -> Manifest:
    """What the run is; versions are those it was begun with, and notes of a change of them, or of a merge, stay.

    A text that is not given is the earlier one, where the recipe is.
    """
    text, quick = options.text, options.quick
    if not text and earlier is not None and earlier.resolved == planned.recipe:
        text, quick = earlier.recipe, earlier.quick
    changed = [*(earlier.notes if earlier else ()), *notes]
    return Manifest(
        resolved=planned.recipe,
        recipe=text,
        quick=quick,
        notes=(*planned.notes, *dict.fromkeys(note for note in changed if note.startswith(LASTING))),
        device=resources.device,
        chunk=resources.chunk,
        threads=torch.get_num_threads(),
        versions=earlier.versions if earlier else versions(),
        code=source_digest(),
        plan=planned.key,
        groups=tuple(
            PlannedGroup(key=g.key, model=g.label, methods=tuple(g.methods), batch_size=g.batch_size)
            for g in planned.groups
        ),
        images=planned.images,
        models={group.label: group.digest for group in planned.groups},
        classes=planned.groups[0].classes,
        made={
            method: {metric: group.made[method, metric] for metric in group.metrics}
            for group in planned.groups
            for method in group.methods
        },
    )


@contextlib.contextmanager
def preemptible() -> Iterator[Stop]:
    """A stop that SIGTERM asks for: after the units in flight, or `GRACE` seconds if they take longer."""
    stop = Stop()
    timer = threading.Timer(GRACE, os._exit, (PREEMPTED,))
    timer.daemon = True

    def ask(*signals: Any) -> None:
        if not stop.asked.is_set():
            timer.start()
            stop.asked.set()

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield stop
        return
    earlier = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, earlier)
