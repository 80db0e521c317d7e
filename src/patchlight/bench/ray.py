"""A run on a Ray cluster: its units are tasks on whatever nodes there are, and this process stores what they give.

It alone sees the run's folder. Data and weights lie at the same paths on every node, and the same Patchlight is
installed there.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import torch

from patchlight import __version__
from patchlight.bench.events import Listener
from patchlight.bench.executors import Finished, WorkerDied, job_of, spelled
from patchlight.bench.local import PAUSE, Begun, RunOptions, Stop, Summary, begin, work
from patchlight.bench.plan import Unit, load_model, source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import Before
from patchlight.bench.store import Store
from patchlight.core.attribution import versions
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra

try:
    import ray
    from ray.exceptions import NodeDiedError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise missing_extra("--ray needs", "Ray", "ray") from error

THREADS = 4
"""Threads of a task at most, where nobody says how many tasks there shall be."""
ANSWER = 120.0
"""Seconds within which a node says which Patchlight it has; one that takes longer says so with its first unit."""
PATIENCE = 60.0
"""Seconds for which a cluster may have no node that can run a task, as when all are replaced."""


def run_on_cluster(recipe: Recipe, store: Store, options: RunOptions, stop: Stop, listen: Listener) -> Summary:
    """Run a recipe on the nodes of the cluster at `options.ray`; a task has a GPU where the device is one."""
    device = "cuda" if options.device.startswith("cuda") else options.device
    with connected(options.ray or "auto"):
        task = _task(__version__, source_digest())
        notes = _check_nodes(task)
        store.make(options.shard)
        with store.owned(options.shard):
            begun = begin(store, recipe, options, device, _threads(device, options.workers), listen)
            load_model.cache_clear()  # the nodes have their own
            cluster = Cluster(begun, task, options.workers)
            return work(replace(begun, notes=(*begun.notes, *notes)), options, cluster, stop, listen)


class Cluster:
    """The nodes of a Ray cluster as an executor: as many tasks as they have room for, or `workers`."""

    def __init__(self, begun: Begun, task: Callable[..., Any], workers: int | None) -> None:
        self.workers, self.device = workers, begun.resources.device
        self.threads, self.gpus = torch.get_num_threads(), int(self.device == "cuda")
        # Ray would end a process that had a GPU after each task, and its model with it, but for max_calls
        self.task = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=0, max_calls=0)(task)
        self.job = ray.put(job_of(begun.plan, begun.resources, self.threads))
        self.seen = time.monotonic()
        if not self.room():
            raise PatchlightError(self._no_room())

    def room(self) -> int:
        """How many tasks the cluster can run at once."""
        return sum(_tasks(node["Resources"], self.threads, self.gpus) for node in ray.nodes() if node["Alive"])

    @property
    def slots(self) -> int:
        room = self.room()
        self.seen = time.monotonic() if room else self.seen
        if time.monotonic() - self.seen > PATIENCE:
            raise PatchlightError(
                f"no node of the Ray cluster has had {self._needs()} for {PATIENCE:.0f} seconds, which a task needs; "
                "what is done is kept, and the same command resumes it once `ray status` shows nodes again"
            )
        return self.workers or room

    def submit(self, unit: Unit, known: Before) -> Future[Finished]:
        outcome: Future[Finished] = Future()

        def end(answer: Future[dict[str, Any]]) -> None:
            error = answer.exception()
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                outcome.set_exception(WorkerDied(_death(error)))
            elif error is not None:  # what nobody expected
                outcome.set_exception(error)
            elif answer.result()["state"] != "done":
                outcome.set_exception(PatchlightError(_sentence(answer.result())))
            else:
                outcome.set_result(answer.result()["finished"])

        self.task.remote(self.job, spelled(unit), known).future().add_done_callback(end)
        return outcome

    def close(self) -> None:
        """What still runs ends with the connection."""

    def _needs(self) -> str:
        """What a node must have for a task, in words."""
        return f"{self.threads} CPU{'s' * (self.threads > 1)}{' and a GPU' if self.gpus else ''}"

    def _no_room(self) -> str:
        """Why nothing can run; a run that was begun elsewhere keeps its threads, which may be more than any node's."""
        sentence = f"no node of the Ray cluster has {self._needs()}, which a task needs"
        if self.threads > _threads(self.device, self.workers):
            return f"the run was begun with {self.threads} threads, and {sentence}; give another --out, or larger nodes"
        return f"{sentence}; `ray status` tells what is there"


def _death(error: RayError) -> str:
    named = re.search(r"Node IP: ([^\s,]+)", str(error)) if isinstance(error, NodeDiedError) else None
    what = f"node {named[1]}" if named else "a worker process"
    return f"{what} died ({type(error).__name__}); what it did was done elsewhere"


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

    def unit(job: str = "", about: Any = None, known: Any = None) -> dict[str, Any]:
        import platform

        host = platform.node()

        def refused(why: str) -> dict[str, Any]:
            return {"state": "refused", "host": host, "why": why}

        try:
            import patchlight

            if patchlight.__version__ != version:
                return refused(f"has Patchlight {patchlight.__version__}, and this is {version}")
            from patchlight.bench.executors import execute
            from patchlight.bench.plan import source_digest
            from patchlight.core.attribution import versions
            from patchlight.core.errors import PatchlightError
        except Exception as error:
            return refused(f"cannot run a benchmark ({type(error).__name__}: {error})")
        if source_digest() != code:
            return refused(f"has other code of Patchlight {version} (hash {source_digest()}, here {code})")
        if not job:
            return {"state": "ready", "host": host, "versions": versions()}
        try:
            finished = execute(job, about, known)
        except (PatchlightError, MemoryError, OSError) as error:
            return {"state": "failed", "host": host, "why": " ".join(str(error).split()) or type(error).__name__}
        return {"state": "done", "host": host, "finished": finished}

    return unit
