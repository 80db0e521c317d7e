"""A run on a Ray cluster: its units are tasks on whatever nodes there are, and this process keeps what they give.

It alone sees the run's folder, where it takes units as any other process does. Data and weights lie at the same paths
on every node, and the same Patchlight is installed there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from patchlight import __version__
from patchlight.bench.claims import Claim, Claims
from patchlight.bench.events import End, Listener, Start, UnitEnd, UnitStart, Waiting
from patchlight.bench.local import DEATHS, Summary, begin
from patchlight.bench.plan import Group, Images, Unit, load_model, source_digest
from patchlight.bench.queue import PAUSE, SECONDS, WHOLE, Begun, Part, Queue, Stop, lasted, steady
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Before, Done
from patchlight.bench.store import Store
from patchlight.bench.unit import Resources, assembled, lost, run_unit
from patchlight.core.attribution import versions
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.plugins import load_plugin, loaded_files

try:
    import ray
    from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskCancelledError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise missing_extra("--ray needs", "Ray", "ray") from error

AHEAD = 2
"""Tasks given to Ray for each that can run at once: none waits for its unit, and units are not taken long before."""
THREADS = 4
"""Threads of a task at most, where nobody says how many tasks there shall be."""
ANSWER = 120.0
"""Seconds within which a node says which Patchlight it has; one that takes longer says so with its first unit."""
PATIENCE = 60.0
"""Seconds for which a cluster may have no node that can run a task, as when all are replaced."""


def run_ray(
    recipe: Recipe,
    out: str | Path,
    address: str = "auto",
    *,
    text: str = "",
    device: str = "cpu",
    quick: bool = False,
    retry: bool = False,
    part: Part = WHOLE,
    workers: int | None = None,
    stop: Stop | None = None,
    listen: Listener = lambda event: None,
) -> Summary:
    """What `run` does, by the nodes of the Ray cluster at `address` ("auto": the one this machine belongs to).

    A task has a GPU where `device` is one. There are as many at once as the cluster has room for, or `workers`.
    """
    stop, store = stop or Stop(), Store(out)
    device = "cuda" if device.startswith("cuda") else device
    with connected(address):
        task = _task(__version__, source_digest())
        notes = _check_nodes(task)
        store.make()
        claims = Claims(store.folder)
        with claims.present():
            stop.leave = lambda: claims.tell(gone=True)
            threads = _threads(device, workers)
            begun = begin(store, claims, recipe, text, device, quick, retry, threads=threads, stop=stop, listen=listen)
            load_model.cache_clear()  # the nodes have their own
            queue = Queue(begun, part, stop, listen)
            before = queue.values_done()
            whole = begun.whole
            listen(Start(whole.values, before, begun.notes, len(whole.images), list(recipe.models), str(store.folder)))
            fleet = Fleet(begun, queue, task, workers, stop, listen)
            fleet.work()
            failures = store.failures()
            listen(End(failures, whole.values, queue.values_done()))
            notes = [*whole.notes, *begun.notes, *notes, *fleet.notes]
            return Summary(whole.values, before, fleet.now, fleet.reused, queue.left(), failures, tuple(notes))


@dataclass
class Flight:
    """A unit under way on some node; `deaths` are processes that died of it, in this run and before."""

    unit: Unit
    claim: Claim
    known: Before
    deaths: int


class Fleet:
    """The tasks of a run: units are taken as there is room for them, and stored as they come back."""

    def __init__(
        self,
        begun: Begun,
        queue: Queue,
        task: Callable[..., Any],
        workers: int | None,
        stop: Stop,
        listen: Listener,
    ) -> None:
        self.begun, self.queue, self.workers, self.stop, self.listen = begun, queue, workers, stop, listen
        self.threads, self.gpus = torch.get_num_threads(), int(begun.resources.device == "cuda")
        # Ray would end a process that had a GPU after each task, and its model with it, but for max_calls
        self.task = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=0, max_calls=0)(task)
        self.order = ray.put(_order(begun, self.threads))
        self.flying: dict[Any, Flight] = {}
        self.notes: list[str] = []
        self.now = self.reused = 0

    def work(self) -> None:
        """Until all of the part is done, or a stop is asked for and what runs then is done."""
        if not self._room():
            raise PatchlightError(self._no_room())
        waits = stopping = False
        seen = time.monotonic()
        try:
            while True:
                seen = time.monotonic() if self._room() else seen
                if time.monotonic() - seen > PATIENCE:
                    raise PatchlightError(
                        f"no node of the Ray cluster has had {self._needs()} for {PATIENCE:.0f} seconds, which a task "
                        "needs; what is done is kept, and the same command goes on once `ray status` shows nodes again"
                    )
                if self.stop.asked.is_set() and not stopping:
                    stopping = True
                    for ref in list(self.flying)[self._room() :]:  # the others run already
                        ray.cancel(ref)
                while not stopping and len(self.flying) < (self.workers or AHEAD * self._room()):
                    found = self.queue.take()
                    if found is None:
                        break
                    self._take(*found)
                if self.flying:
                    waits = False
                    for ref in ray.wait(list(self.flying), num_returns=1, timeout=PAUSE)[0]:
                        self._land(self.flying.pop(ref), ref)
                elif stopping or not self.queue.open():
                    return
                else:
                    if not waits:
                        self.listen(Waiting(len(self.begun.claims.others())))
                        waits = True
                    self.stop.asked.wait(PAUSE)
                    self.queue.done |= self.begun.store.done()
        finally:
            for ref in self.flying:
                ray.cancel(ref, force=True)

    def _room(self) -> int:
        """How many tasks the cluster can run at once."""
        return sum(_tasks(node["Resources"], self.threads, self.gpus) for node in ray.nodes() if node["Alive"])

    def _needs(self) -> str:
        """What a node must have for a task, in words."""
        return f"{self.threads} CPU{'s' * (self.threads > 1)}{' and a GPU' if self.gpus else ''}"

    def _no_room(self) -> str:
        """Why nothing can run; a run that was begun elsewhere keeps its threads, which may be more than any node's."""
        told = f"no node of the Ray cluster has {self._needs()}, which a task needs"
        if self.threads > _threads(self.begun.resources.device, self.workers):
            return f"the run was begun with {self.threads} threads, and {told}; give another --out, or larger nodes"
        return f"{told}; `ray status` tells what is there"

    def _take(self, unit: Unit, claim: Claim) -> None:
        known = self.begun.store.before(unit, failed_too=not self.begun.retry)
        self.listen(UnitStart(unit.group.label, list(unit.group.methods), len(unit.images), unit.key))
        flight = Flight(unit, claim, known, claim.deaths)
        if len(known) == unit.values:
            done = assembled(unit, known)
            self._keep(flight, done, lasted(done.rows, 0.0, known=True))
        else:
            self._send(flight)

    def _send(self, flight: Flight) -> None:
        """Have a unit run somewhere; one of which processes died before counts as failed in the end."""
        if flight.deaths >= DEATHS:
            self._keep(flight, lost(flight.unit, f"{flight.deaths} processes died while they ran it"), SECONDS)
            return
        sizes = len(self.begun.whole.images) if self.queue.sizes(flight.unit) else 0
        self.flying[self.task.remote(self.order, _spelled(flight.unit), flight.known, sizes)] = flight

    def _land(self, flight: Flight, ref: Any) -> None:
        """Store what a task gave; where its process or node died, send the unit elsewhere."""
        try:
            answer = ray.get(ref)
        except RayTaskError:  # what nobody expected
            raise
        except TaskCancelledError:  # a stop was asked for
            return
        except RayError as error:
            flight.deaths += 1
            self._note_death(error)
            if not self.stop.asked.is_set():
                self._send(flight)
            return
        if answer["state"] != "done":
            raise PatchlightError(_sentence(answer))
        self._keep(flight, answer["done"], answer["seconds"])

    def _keep(self, flight: Flight, done: Done, seconds: float) -> None:
        unit = flight.unit
        self.begun.store.write(unit, done)
        self.queue.finished(unit, flight.claim, seconds)
        self.listen(UnitEnd(unit.key, unit.values, seconds, done.rows))
        self.now, self.reused = self.now + unit.values, self.reused + len(flight.known)

    def _note_death(self, error: RayError) -> None:
        named = re.search(r"Node IP: ([^\s,]+)", str(error)) if isinstance(error, NodeDiedError) else None
        what = f"node {named[1]}" if named else "a worker process"
        told = f"{what} died ({type(error).__name__}); what it did was done elsewhere"
        self.notes += [told] if told not in self.notes else []


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to the Ray cluster; one that is there already is used and left."""
    if ray.is_initialized():
        yield
        return
    if address != "auto" or _last_cluster():
        _check_reachable(_last_cluster() if address == "auto" else address)
    main, kept = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(cast(TextIO, Ours(sys.stdout))):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise PatchlightError(
                f"no Ray cluster was found (--ray {address}); begin one with `ray start --head`, or give its address"
            ) from error
        except RuntimeError as error:
            raise PatchlightError(f"the Ray cluster cannot be used: {' '.join(str(error).split())}") from error
        if main:
            signal.signal(signal.SIGTERM, kept)  # Ray has put its own in place
        try:
            yield
        finally:
            ray.shutdown()


class Ours:
    """A stream without what Ray's threads print: what happens to nodes is told by this process, in its own words."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        foreign = threading.current_thread().name.startswith("ray_")
        return len(text) if foreign else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _last_cluster() -> str:
    """The address that Ray means by "auto", which may be that of a cluster that is dead; empty where it has none."""
    noted = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    found = os.environ.get("RAY_ADDRESS") or (noted.read_text(encoding="utf-8") if noted.is_file() else "")
    return found if re.fullmatch(r"[^/\s]+:\d+", found) else ""


def _check_reachable(address: str) -> None:
    """Refuse an address at which nobody answers: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise PatchlightError(f"--ray {address} is no address; give auto, or HOST:PORT as `ray start --head` tells it")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise PatchlightError(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` begins one"
        ) from error


def _check_nodes(task: Callable[..., Any]) -> list[str]:
    """Refuse nodes that have another Patchlight, or none; notes where other versions of what it builds on differ."""
    asked, check = {}, ray.remote(num_cpus=0, max_retries=0)(task)
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[check.options(scheduling_strategy=there).remote()] = node
    notes, until = [], time.monotonic() + ANSWER
    while asked and time.monotonic() < until:
        for ref in ray.wait(list(asked), timeout=PAUSE)[0]:
            node = _named(asked.pop(ref))
            try:
                answer = ray.get(ref)
            except NodeDiedError:
                continue
            except RayError as error:
                answer = {"state": "refused", "why": f"cannot run a benchmark ({type(error).__name__})"}
            if answer["state"] != "ready":
                raise PatchlightError(_sentence({**answer, "host": node}))
            other = {name: v for name, v in answer["versions"].items() if versions().get(name) not in (None, v)}
            if other:
                told = ", ".join(f"{name} {version} (here {versions()[name]})" for name, version in other.items())
                notes.append(f"node {node} has {told}")
    return notes


def _named(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _sentence(answer: Mapping[str, Any]) -> str:
    """Why a node did not do what it was asked."""
    if answer["state"] == "refused":
        return f"node {answer['host']} of the Ray cluster {answer['why']}; install the same Patchlight on every node"
    return f"on node {answer['host']}: {answer['why']}"


def _threads(device: str, workers: int | None) -> int:
    """Threads for each task, so that every node has room for one, and a node with GPUs for one on each."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    able = [node for node in nodes if device != "cuda" or node.get("GPU")]
    each = [int(node["CPU"] / (node["GPU"] if device == "cuda" else 1)) for node in able]
    wanted = int(sum(node["CPU"] for node in able)) // workers if workers else THREADS
    return max(1, min([wanted, *each]))


def _tasks(resources: Mapping[str, float], threads: int, gpus: int) -> int:
    """How many tasks of so many threads and GPUs a node can run at once."""
    room = int(resources.get("CPU", 0)) // threads
    return min(room, int(resources.get("GPU", 0)) // gpus) if gpus else room


def _task(version: str, code: str) -> Callable[..., Any]:
    """What runs on the nodes. A function in a function travels whole, so that one without Patchlight can say so."""

    def unit(order: str = "", told: Any = None, before: Any = None, sizes: int = 0) -> dict[str, Any]:
        import platform

        host = platform.node()

        def refused(why: str) -> dict[str, Any]:
            return {"state": "refused", "host": host, "why": why}

        try:
            import patchlight

            if patchlight.__version__ != version:
                return refused(f"has Patchlight {patchlight.__version__}, and this is {version}")
            from patchlight.bench.plan import source_digest
            from patchlight.bench.ray import work
            from patchlight.core.attribution import versions
            from patchlight.core.errors import PatchlightError
        except Exception as error:
            return refused(f"cannot run a benchmark ({type(error).__name__}: {error})")
        if source_digest() != code:
            return refused(f"has other code of Patchlight {version} (hash {source_digest()}, here {code})")
        if not order:
            return {"state": "ready", "host": host, "versions": versions()}
        try:
            done, seconds = work(order, told, before, sizes)
        except (PatchlightError, MemoryError, OSError) as error:
            return {"state": "failed", "host": host, "why": " ".join(str(error).split()) or type(error).__name__}
        return {"state": "done", "host": host, "done": done, "seconds": seconds}

    return unit


def _order(begun: Begun, threads: int) -> str:
    """What all tasks of a run are told, as JSON."""
    return json.dumps(
        {
            "recipe": begun.whole.recipe.model_dump_json(),
            "plugins": [[path, Path(path).read_text(encoding="utf-8")] for path in loaded_files()],
            "folder": os.getcwd(),
            "threads": threads,
            "device": begun.resources.device,
            "chunk": begun.resources.chunk,
        }
    )


@lru_cache(maxsize=1)
def _prepared(order: str) -> tuple[Recipe, Resources]:
    """A worker process, made ready for a run, once: plugins loaded, paths meant as they were where it was begun."""
    told = json.loads(order)
    with contextlib.suppress(OSError):
        os.chdir(told["folder"])
    torch.set_num_threads(told["threads"])
    for path, text in told["plugins"]:
        if not Path(path).is_file() or Path(path).read_text(encoding="utf-8") != text:
            path = Path(tempfile.mkdtemp(prefix="patchlight-")) / Path(path).name
            path.write_text(text, encoding="utf-8")
        load_plugin(path)
    return Recipe.model_validate_json(told["recipe"]), Resources(told["device"], told["chunk"])


def work(order: str, told: Mapping[str, Any], before: Before, sizes: int) -> tuple[Done, float]:
    """Run a unit here, in a worker process: what it gave, and the seconds it took.

    Those of a group's first unit say how large the others shall be, of `sizes` images in all.
    """
    recipe, resources = _prepared(order)
    unit = _unit(recipe, told)
    begin = time.perf_counter()
    done = run_unit(unit, resources, before)
    seconds = lasted(done.rows, time.perf_counter() - begin, bool(before))
    return done, steady(unit, done.rows, seconds, sizes, resources) if sizes else seconds


def _spelled(unit: Unit) -> dict[str, Any]:
    """A unit in plain values: what the recipe does not say of it."""
    group = unit.group
    return {
        "label": group.label,
        "digest": group.digest,
        "classes": group.classes,
        "methods": list(group.methods),
        "made": [[*pair, made] for pair, made in group.made.items()],
        "batch_size": group.batch_size,
        "start": unit.start,
        "images": asdict(unit.images),
        "key": unit.key,
    }


def _unit(recipe: Recipe, told: Mapping[str, Any]) -> Unit:
    """The unit that was meant."""
    group = Group(
        told["label"],
        recipe.models[told["label"]],
        told["digest"],
        recipe.data,
        told["classes"],
        {label: recipe.methods[label] for label in told["methods"]},
        recipe.metrics,
        {(method, metric): made for method, metric, made in told["made"]},
        recipe.target,
        recipe.seed,
        told["batch_size"],
    )
    unit = Unit(group, told["start"], Images(**told["images"]))
    assert unit.key == told["key"], "a unit is the same everywhere"
    return unit
