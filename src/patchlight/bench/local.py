"""Runs a recipe into a folder: cuts the missing values into units, hands them to an executor, stores the results."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchlight.bench.events import End, Listener, Start, UnitEnd, UnitStart
from patchlight.bench.executors import Executor, Finished, InProcess, WorkerDied, Workers, cores, devices_of, worker_job
from patchlight.bench.manifest import MERGED, Manifest, PlannedGroup, write_manifest
from patchlight.bench.plan import WHOLE, Group, Plan, Shard, Unit, load_model, plan, source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import CellValues, map_bytes, table_bytes
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, assemble_unit, load_planned, lost_unit, open_data
from patchlight.core.attribution import versions
from patchlight.core.errors import PatchlightError
from patchlight.evidence.ablation import free_chunk

if TYPE_CHECKING:
    from patchlight.data import Data

OTHER_VERSION = "the run was started with another version of"
LASTING = (OTHER_VERSION, MERGED)
"""First words of the notes that stay in the manifest."""
DEATHS = 3
"""A unit fails after this many worker processes died while running it."""
SECONDS = 30.0
"""Target duration of a unit."""
EACH = 4
"""Units per worker and group, at least."""
MOST = 4096
"""Images per unit, at most: rows and maps are in memory until the unit is stored."""
PAUSE = 0.5
"""Seconds between two checks whether to stop."""
GRACE = 25.0
"""Seconds after SIGTERM until the process exits even if a unit is running."""
PREEMPTED = 75
"""Exit code of a stopped run that the same command resumes (EX_TEMPFAIL)."""


@dataclass(frozen=True)
class RunOptions:
    """How a recipe is run; no option changes a value.

    Args:
        text: The recipe's text, for the manifest.
        quick: Whether the recipe's quick settings are used, for the manifest.
        retry: Run failed values again.
        shard: The part of the images to run; each shard has its own folder and owner.
        device: `cpu`, `cuda`, `cuda:1`, or `cuda:all` for a worker on each GPU.
        workers: Number of worker processes; by default one per device, and on a cluster as many as fit.
        ray: Address of a Ray cluster that runs the units; `auto` is the cluster of this machine.
        threads: Number of threads of a new run; a resumed run keeps its number.
        data: A data set in Python that replaces the recipe's data.
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
    """The outcome of a run.

    Attributes:
        values: Number of values of the complete run.
        before: Number of values that existed before.
        now: Number of values that were stored.
        reused: Number of stored values that earlier plans measured.
        left: Number of values that are missing because the run was stopped.
    """

    values: int
    before: int
    now: int
    reused: int
    left: int
    failures: dict[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PreparedRun:
    """A prepared run: its store, plan and resources, and notes on changes."""

    store: Store
    plan: Plan
    resources: Resources
    notes: tuple[str, ...]


def run(
    recipe: Recipe,
    out: str | Path,
    options: RunOptions | None = None,
    stop: threading.Event | None = None,
    listen: Listener = lambda event: None,
) -> Summary:
    """Run the missing values of a recipe; an interrupted run resumes where it stopped.

    A resumed run keeps the chunk size and number of threads of the first, so it gives bit-identical values on the same
    machine. Only one process at a time may run a shard.

    Args:
        recipe: What to measure.
        out: The run folder.
        options: How to run it.
        stop: Set by another thread to stop the run: units in flight are finished, and no other unit is started.
        listen: Called with every event.
    """
    options, stop, store = options or RunOptions(), stop or threading.Event(), Store(out)
    if options.ray is not None:
        from patchlight.bench.ray import run_on_cluster

        return run_on_cluster(recipe, store, options, stop, listen)
    devices = devices_of(options.device)
    workers = options.workers or len(devices)
    store.make(options.shard)
    with store.owned(options.shard):
        threads = options.threads or (max(1, cores() // workers) if workers > 1 else None)
        prepared = prepare_run(store, recipe, options, devices[0], threads, listen)
        executor: Executor
        if workers == 1:
            executor = InProcess(prepared.resources, listen)
        else:
            load_model.cache_clear()  # every worker loads its own model
            job = worker_job(prepared.resources, torch.get_num_threads())
            each = [devices[i % len(devices)] for i in range(workers)]
            executor = Workers(job, each, store.folder / "logs")
        return work(prepared, options, executor, stop, listen)


def prepare_run(
    store: Store, recipe: Recipe, options: RunOptions, device: str, threads: int | None, listen: Listener
) -> PreparedRun:
    """Plan the run and update the folder to the plan; an error if another process uses another plan."""
    folder = store.folder_of(options.shard)
    earlier = store.read_manifest()
    check_same_run(store, earlier, recipe, device)
    open_data.cache_clear()  # the data may have changed
    earlier_images = None
    if earlier is not None and earlier.resolved == recipe and store.busy() != [folder]:
        earlier_images = earlier.images
    planned = plan(recipe, options.data, listen=listen, device=device, earlier_images=earlier_images)
    with store.planning():
        earlier = store.read_manifest()  # another shard may have written it: its chunk size and threads are used
        check_same_run(store, earlier, recipe, device)
        busy = [other for other in store.busy() if other != folder]
        if earlier is not None and earlier.plan != planned.key and busy:
            raise PatchlightError(
                f"{store.worker(busy[0])}, on another plan (other settings, images, weights or version of "
                "Patchlight); wait until it ends, or use another --out"
            )
        resources, notes = _resources(earlier, device, planned, options.data, threads)
        scope = [folder] if busy else store.shards()
        store.sweep(scope)
        notes += [f"{damage} and is measured again" for damage in store.drop_damaged(scope)]
        if not busy or earlier is None:
            notes += store.arrange(planned)  # so that no row is read under another plan
            write_manifest(store.manifest_path, _manifest(planned, options, resources, earlier, notes))
        for files in store.failed(scope if options.shard == WHOLE else [folder]) if options.retry else ():
            store.set_aside(files)
    return PreparedRun(store, planned, resources, tuple(notes))


@dataclass
class Flight:
    """A unit that is running, the values that earlier plans measured, and how many processes died while running it."""

    unit: Unit
    measured: CellValues
    deaths: int = 0


def work(
    prepared: PreparedRun, options: RunOptions, executor: Executor, stop: threading.Event, listen: Listener
) -> Summary:
    """Run all units of the shard on the executor and store their results, until all are done or the run is stopped."""
    store, planned = prepared.store, prepared.plan
    cutter = Cutter(planned, options.shard, store.units(planned))
    before, now, reused = cutter.done, 0, 0
    listen(
        Start(
            planned.values, before, prepared.notes, len(planned.images), list(planned.recipe.models), str(store.folder)
        )
    )
    flying: dict[Future[Finished], Flight] = {}
    again: list[Flight] = []
    died: list[str] = []
    folder = store.folder_of(options.shard)
    try:
        while True:
            while not stop.is_set() and len(flying) < (slots := executor.slots):
                flight = again.pop() if again else _next(cutter, slots, store, options.retry, listen)
                if flight is None:
                    break
                flying[_submit(flight, executor)] = flight
            if not flying and (stop.is_set() or not (again or cutter.left)):
                break
            if not flying:  # no worker is available
                stop.wait(PAUSE)
            for future in wait(flying, PAUSE, FIRST_COMPLETED).done:
                flight = flying.pop(future)
                try:
                    finished = future.result()
                except WorkerDied as error:
                    died += [str(error)] if str(error) not in died else []
                    flight.deaths += 1
                    again.append(flight)
                    continue
                unit, result = flight.unit, finished.result
                if not store.folder.is_dir():
                    raise PatchlightError(
                        f"'{store.folder}' is missing: the folder was moved or deleted during the run; run again with "
                        "--out DIR, its place now"
                    )
                store.keep(unit.key, table_bytes(result), map_bytes(result.maps), folder)
                if not flight.measured and not all(row.error for row in result.rows):
                    cutter.record_time(unit, finished.seconds)
                now, reused = now + unit.values, reused + len(flight.measured)
                listen(UnitEnd(unit.key, unit.values, finished.seconds, result.rows, len(flight.measured)))
    finally:
        executor.close()
    failures = store.failures(store.shards() if options.shard == WHOLE else [folder])
    listen(End(failures, planned.values, before + now))
    left = cutter.left + sum(flight.unit.values for flight in again)
    return Summary(planned.values, before, now, reused, left, failures, (*planned.notes, *prepared.notes, *died))


def _next(cutter: Cutter, workers: int, store: Store, retry: bool, listen: Listener) -> Flight | None:
    """The next unit, with the values that earlier plans measured."""
    unit = cutter.cut(workers)
    if unit is None:
        return None
    listen(UnitStart(unit.group.label, list(unit.group.methods), len(unit.images), unit.key))
    return Flight(unit, store.before(unit, failed_too=not retry))


def _submit(flight: Flight, executor: Executor) -> Future[Finished]:
    """Start a unit; no worker is needed if all its values were measured or too many processes died of it."""
    if len(flight.measured) < flight.unit.values and flight.deaths < DEATHS:
        return executor.submit(flight.unit, flight.measured)
    if flight.deaths >= DEATHS:
        result = lost_unit(flight.unit, f"{flight.deaths} processes died while they ran it")
    else:
        result = assemble_unit(flight.unit, flight.measured)
    future: Future[Finished] = Future()
    future.set_result(Finished(result, 0.0))
    return future


class Cutter:
    """Cuts the missing values of a shard into units of about `SECONDS`, in complete batches.

    Models come one after the other, because loading is slow. Within a model, all methods advance through the images
    together, so that an incomplete run can be compared. The first unit of a group is one batch; its time determines the
    size of the others.
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
        """The number of values that are not in a unit yet."""
        return sum(self._images(group) * len(group.hashes) for group in self.plan.groups)

    def _images(self, group: Group) -> int:
        total = len(self.plan.images)
        return sum(min(group.batch_size, total - start) for start in self.todo[group.key])

    def cut(self, workers: int = 1) -> Unit | None:
        """The next unit, small enough to keep all workers busy; None if nothing is left."""
        open_groups = [group for group in self.plan.groups if self.todo[group.key]]
        if not open_groups:
            return None
        models = list(self.plan.recipe.models)
        group = min(open_groups, key=lambda group: (models.index(group.label), self.todo[group.key][0]))
        todo, size = self.todo[group.key], group.batch_size
        most = size
        if group.key in self.seconds:
            most = unit_size(group, SECONDS / max(self.seconds[group.key], 1e-9))
            most = most if workers == 1 else min(most, unit_size(group, self._images(group) / (workers * EACH)))
        count = 1
        while count < len(todo) and count * size < most and todo[count] == todo[0] + count * size:
            count += 1
        self.todo[group.key] = todo[count:]
        return self.plan.unit(group, todo[0], min(todo[0] + count * size, len(self.plan.images)))

    def record_time(self, unit: Unit, seconds: float) -> None:
        """Record the time of a unit; the fastest counts, because the first includes warm-up."""
        each = seconds / len(unit.images)
        self.seconds[unit.group.key] = min(each, self.seconds.get(unit.group.key, each))


def unit_size(group: Group, images: float) -> int:
    """The number of images of a unit: about `images`, in complete batches."""
    return max(1, -(-int(min(images, MOST)) // group.batch_size)) * group.batch_size


def check_same_run(store: Store, earlier: Manifest | None, recipe: Recipe, device: str) -> None:
    """Refuse a folder with a run of another recipe, or of another kind of device."""
    if earlier is None:
        return
    if earlier.resolved.name != recipe.name:
        raise PatchlightError(
            f"'{store.folder}' holds a run of '{earlier.resolved.name}', not of '{recipe.name}'; use another --out"
        )
    if torch.device(earlier.device).type != torch.device(device).type:
        raise PatchlightError(
            f"this run was started on {earlier.device}; {device} rounds differently; use --device "
            f"{earlier.device} or another --out"
        )


def _resources(
    earlier: Manifest | None, device: str, planned: Plan, data: Data | None, threads: int | None
) -> tuple[Resources, list[str]]:
    """The chunk size and threads of the first run, else of this machine; and notes on changes."""
    if earlier is None:
        if threads is not None:
            torch.set_num_threads(threads)
        return Resources(device, free_chunk(load_planned(planned.groups[0], device)), data), []
    notes = []
    if earlier.threads != torch.get_num_threads():
        torch.set_num_threads(earlier.threads)
        notes.append(f"{earlier.threads} threads are used, as in the first run")
    changed = sorted(name for name, version in versions().items() if earlier.versions.get(name) != version)
    if changed:
        notes.append(f"{OTHER_VERSION} {', '.join(changed)}")
    return Resources(device, earlier.chunk, data), notes


def _manifest(
    planned: Plan, options: RunOptions, resources: Resources, earlier: Manifest | None, notes: Sequence[str]
) -> Manifest:
    """The manifest of a run; versions and lasting notes of an earlier manifest stay.

    Without a text, that of an earlier manifest with the same recipe is used.
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
            method: {metric: group.hashes[method, metric] for metric in planned.recipe.metrics}
            for group in planned.groups
            for method in group.methods
        },
    )


@contextlib.contextmanager
def preemptible() -> Iterator[threading.Event]:
    """An event that SIGTERM sets. The process exits after the units in flight, or after `GRACE` seconds."""
    stop = threading.Event()
    timer = threading.Timer(GRACE, os._exit, (PREEMPTED,))
    timer.daemon = True

    def request_stop(*signals: Any) -> None:
        if not stop.is_set():
            timer.start()
            stop.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    earlier = signal.signal(signal.SIGTERM, request_stop)
    try:
        yield stop
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, earlier)
