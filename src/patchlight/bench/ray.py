"""Runs a recipe on a Ray cluster: units are tasks on its nodes, and this process stores their results.

Only this process needs the run folder. Every node needs the same version of Patchlight, and the data and weights at the
same paths.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
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
from patchlight.bench.executors import Finished, WorkerDied, worker_job
from patchlight.bench.local import PAUSE, PreparedRun, RunOptions, Summary, prepare_run, work
from patchlight.bench.plan import Unit, load_model, source_digest
from patchlight.bench.recipe import Recipe
from patchlight.bench.rows import CellValues
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
"""Threads per task, at most, if the number of workers is not set."""
ANSWER = 120.0
"""Seconds to wait for a node to report its version of Patchlight; a slower node is checked with its first unit."""
PATIENCE = 60.0
"""Seconds for which the cluster may have no node that can run a task, for example while nodes are replaced."""


def run_on_cluster(
    recipe: Recipe, store: Store, options: RunOptions, stop: threading.Event, listen: Listener
) -> Summary:
    """Run a recipe on the cluster at `options.ray`; with a CUDA device, each task has one GPU."""
    device = "cuda" if options.device.startswith("cuda") else options.device
    with connect_to(options.ray or "auto"):
        task = _task(__version__, source_digest())
        notes = _check_nodes(task)
        store.make(options.shard)
        with store.owned(options.shard):
            prepared = prepare_run(store, recipe, options, device, _threads(device, options.workers), listen)
            load_model.cache_clear()  # every node loads its own model
            cluster = Cluster(prepared, task, options.workers)
            return work(replace(prepared, notes=(*prepared.notes, *notes)), options, cluster, stop, listen)


class Cluster:
    """A Ray cluster as an executor, with as many tasks as fit, or `workers`."""

    def __init__(self, prepared: PreparedRun, task: Callable[..., Any], workers: int | None) -> None:
        self.workers, self.device = workers, prepared.resources.device
        self.threads, self.gpus = torch.get_num_threads(), int(self.device == "cuda")
        # With max_calls=0, Ray keeps a GPU process, and its model, after a task
        self.task = ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=0, max_calls=0)(task)
        self.job = ray.put(worker_job(prepared.resources, self.threads))
        self.last_room = time.monotonic()
        if not self.room():
            raise PatchlightError(self._no_room())

    def room(self) -> int:
        """How many tasks the cluster can run at once."""
        return sum(_tasks(node["Resources"], self.threads, self.gpus) for node in ray.nodes() if node["Alive"])

    @property
    def slots(self) -> int:
        room = self.room()
        self.last_room = time.monotonic() if room else self.last_room
        if time.monotonic() - self.last_room > PATIENCE:
            raise PatchlightError(
                f"for {PATIENCE:.0f} seconds, no node of the Ray cluster has had {self._needs()}, which a task needs; "
                "finished units are stored, and the same command resumes the run when `ray status` shows nodes again"
            )
        return self.workers or room

    def submit(self, unit: Unit, measured: CellValues) -> Future[Finished]:
        outcome: Future[Finished] = Future()

        def end(answer: Future[dict[str, Any]]) -> None:
            error = answer.exception()
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                outcome.set_exception(WorkerDied(_death(error)))
            elif error is not None:
                outcome.set_exception(error)
            elif answer.result()["state"] != "done":
                outcome.set_exception(PatchlightError(_sentence(answer.result())))
            else:
                outcome.set_result(answer.result()["finished"])

        self.task.remote(self.job, pickle.dumps(unit), measured).future().add_done_callback(end)
        return outcome

    def close(self) -> None:
        """Do nothing: running tasks end with the connection."""

    def _needs(self) -> str:
        """The CPUs and GPUs of a task, in words."""
        return f"{self.threads} CPU{'s' * (self.threads > 1)}{' and a GPU' if self.gpus else ''}"

    def _no_room(self) -> str:
        """Why no task can run. A resumed run keeps its number of threads, which may exceed that of every node."""
        sentence = f"no node of the Ray cluster has {self._needs()}, which a task needs"
        if self.threads > _threads(self.device, self.workers):
            return (
                f"the run was started with {self.threads} threads, but {sentence}; use another --out, or larger nodes"
            )
        return f"{sentence}; `ray status` lists the nodes"


def _death(error: RayError) -> str:
    named = re.search(r"Node IP: ([^\s,]+)", str(error)) if isinstance(error, NodeDiedError) else None
    what = f"node {named[1]}" if named else "a worker process"
    return f"{what} died ({type(error).__name__}); its units were run elsewhere"


@contextlib.contextmanager
def connect_to(address: str) -> Iterator[None]:
    """Connect to a Ray cluster; an existing connection is used and stays open."""
    if ray.is_initialized():
        yield
        return
    if address != "auto" or _last_cluster():
        _check_reachable(_last_cluster() if address == "auto" else address)
    main, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    with contextlib.redirect_stdout(cast(TextIO, OwnOutput(sys.stdout))):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise PatchlightError(
                f"no Ray cluster was found (--ray {address}); start one with `ray start --head`, or give its address"
            ) from error
        except RuntimeError as error:
            raise PatchlightError(
                f"the connection to the Ray cluster failed: {' '.join(str(error).split())}"
            ) from error
        if main:
            signal.signal(signal.SIGTERM, handler)  # ray.init replaced the handler
        try:
            yield
        finally:
            ray.shutdown()


class OwnOutput:
    """A stream without the output of Ray's own threads; notes of the run report failed nodes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        foreign = threading.current_thread().name.startswith("ray_")
        return len(text) if foreign else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _last_cluster() -> str:
    """The address that "auto" uses, which may be that of a dead cluster; empty if there is none."""
    record = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    address = os.environ.get("RAY_ADDRESS") or (record.read_text(encoding="utf-8") if record.is_file() else "")
    return address if re.fullmatch(r"[^/\s]+:\d+", address) else ""


def _check_reachable(address: str) -> None:
    """Refuse an address without a cluster at once; Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise PatchlightError(
            f"--ray {address} is not an address; give auto, or HOST:PORT as `ray start --head` prints it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise PatchlightError(
            f"no Ray cluster answers at {address} ({error}); `ray start --head` starts one"
        ) from error


def _check_nodes(task: Callable[..., Any]) -> list[str]:
    """Refuse nodes with another version of Patchlight or none; return notes on other libraries that differ."""
    pending, check = {}, ray.remote(num_cpus=0, max_retries=0)(task)
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            pending[check.options(scheduling_strategy=there).remote()] = node
    notes, until = [], time.monotonic() + ANSWER
    while pending and time.monotonic() < until:
        for ref in ray.wait(list(pending), timeout=PAUSE)[0]:
            node = _node_name(pending.pop(ref))
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
                listing = ", ".join(f"{name} {version} (here {versions()[name]})" for name, version in other.items())
                notes.append(f"node {node} has {listing}")
    return notes


def _node_name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _sentence(answer: Mapping[str, Any]) -> str:
    """Why a node did not run a task."""
    if answer["state"] == "refused":
        advice = "install the same version of Patchlight on every node"
        return f"node {answer['host']} of the Ray cluster {answer['why']}; {advice}"
    return f"on node {answer['host']}: {answer['why']}"


def _threads(device: str, workers: int | None) -> int:
    """Threads per task, such that every node can run one task, and a GPU node one task per GPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    able = [node for node in nodes if device != "cuda" or node.get("GPU")]
    each = [int(node["CPU"] / (node["GPU"] if device == "cuda" else 1)) for node in able]
    threads_wanted = int(sum(node["CPU"] for node in able)) // workers if workers else THREADS
    return max(1, min([threads_wanted, *each]))


def _tasks(resources: Mapping[str, float], threads: int, gpus: int) -> int:
    """How many tasks with these threads and GPUs a node can run at once."""
    room = int(resources.get("CPU", 0)) // threads
    return min(room, int(resources.get("GPU", 0)) // gpus) if gpus else room


def _task(version: str, code: str) -> Callable[..., Any]:
    """The function that runs on the nodes. Ray sends an inner function by value, so it also runs without Patchlight."""

    def run_unit(job: str = "", unit: bytes = b"", measured: Any = None) -> dict[str, Any]:
        import platform

        host = platform.node()

        def refused(why: str) -> dict[str, Any]:
            return {"state": "refused", "host": host, "why": why}

        try:
            import patchlight

            if patchlight.__version__ != version:
                return refused(f"has Patchlight {patchlight.__version__}, but this is {version}")
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
            finished = execute(job, unit, measured)
        except (PatchlightError, MemoryError, OSError) as error:
            return {"state": "failed", "host": host, "why": " ".join(str(error).split()) or type(error).__name__}
        return {"state": "done", "host": host, "finished": finished}

    return run_unit
