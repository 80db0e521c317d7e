"""Executors run units in this process or in worker processes; `patchlight.bench.ray` runs them on a cluster.

An executor takes units and returns futures. Workers compute; only the process that owns the shard writes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from patchlight.bench.events import Listener
from patchlight.bench.plan import Unit
from patchlight.bench.rows import CellValues, UnitResult
from patchlight.bench.unit import Resources, run_unit
from patchlight.core.errors import PatchlightError
from patchlight.core.plugins import load_plugin, loaded_files


class WorkerDied(Exception):
    """The process that ran a unit died; the message names it."""


@dataclass(frozen=True)
class Finished:
    """The result of a unit, and the seconds it took."""

    result: UnitResult
    seconds: float


class Executor(Protocol):
    """Runs units, at most `slots` at once; a future raises `WorkerDied` if its process died."""

    @property
    def slots(self) -> int:
        """How many units may run at once."""

    def submit(self, unit: Unit, measured: CellValues) -> Future[Finished]:
        """Run a unit, except for values that were measured before."""

    def close(self) -> None:
        """End all workers at once."""


def run_timed(
    unit: Unit, resources: Resources, measured: CellValues, listen: Listener = lambda event: None
) -> Finished:
    """Run a unit in this process."""
    begin = time.perf_counter()
    result = run_unit(unit, resources, measured, listen)
    return Finished(result, time.perf_counter() - begin)


class InProcess:
    """Runs units in this process, one after the other."""

    slots = 1

    def __init__(self, resources: Resources, listen: Listener) -> None:
        self.resources, self.listen = resources, listen

    def submit(self, unit: Unit, measured: CellValues) -> Future[Finished]:
        future: Future[Finished] = Future()
        future.set_result(run_timed(unit, self.resources, measured, self.listen))
        return future

    def close(self) -> None:
        """Do nothing: there are no workers."""


class Workers:
    """Worker processes on this machine, each with a device and its share of the cores.

    Every worker is a pool of one process, so a dead process can be assigned to its unit; it is replaced.
    """

    def __init__(self, job: str, devices: Sequence[str], logs: Path) -> None:
        self.job, self.devices, self.logs = job, devices, logs
        logs.mkdir(exist_ok=True)
        self.pools = [self._start(number) for number in range(len(devices))]
        self.busy: set[int] = set()
        started = [pool.submit(os.getpid) for pool in self.pools]
        broken = [i for i, answer in enumerate(started) if isinstance(answer.exception(), BrokenProcessPool)]
        if broken:
            self.close()
            raise PatchlightError(f"worker {broken[0] + 1} did not start; see '{self._log(broken[0])}'")

    @property
    def slots(self) -> int:
        return len(self.pools)

    def _log(self, number: int) -> Path:
        return self.logs / f"worker-{number + 1}.txt"

    def _start(self, number: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _prepare_worker, (str(self._log(number).resolve()),)
        )

    def submit(self, unit: Unit, measured: CellValues) -> Future[Finished]:
        number = next(i for i in range(len(self.pools)) if i not in self.busy)
        self.busy.add(number)
        outcome: Future[Finished] = Future()

        def end(answer: Future[bytes]) -> None:
            if answer.cancelled():  # by `close`: nobody waits for the outcome
                return
            error = answer.exception()
            if isinstance(error, BrokenProcessPool):
                self.pools[number] = self._start(number)
                error = WorkerDied(f"worker {number + 1} died; see logs/{self._log(number).name}")
            self.busy.discard(number)
            try:
                if error is not None:
                    raise error
                outcome.set_result(pickle.loads(answer.result()))
            except BaseException as failure:
                outcome.set_exception(failure)

        task = pickle.dumps((self.job, self.devices[number], pickle.dumps(unit), measured))  # tensors by value
        try:
            answer = self.pools[number].submit(_run_task, task)
        except BrokenProcessPool:  # the process died while it was idle
            self.pools[number] = self._start(number)
            answer = self.pools[number].submit(_run_task, task)
        answer.add_done_callback(end)
        return outcome

    def close(self) -> None:
        for pool in self.pools:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare_worker(log: str) -> None:
    """Redirect output to the log, ignore signals (the owner of the shard handles them), and end with the owner."""
    file = open(log, "a", encoding="utf-8")  # noqa: SIM115
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    assert owner is not None

    def follow() -> None:
        owner.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run_task(task: bytes) -> bytes:
    """Run a pickled unit in a worker."""
    job, device, unit, measured = pickle.loads(task)
    return pickle.dumps(execute(job, unit, measured, device))


def worker_job(resources: Resources, threads: int) -> str:
    """The part of a run that all its workers share, as JSON: plugins with their source, and resources."""
    return json.dumps(
        {
            "plugins": [[path, Path(path).read_text(encoding="utf-8")] for path in loaded_files()],
            "folder": os.getcwd(),
            "threads": threads,
            "device": resources.device,
            "chunk": resources.chunk,
        }
    )


@lru_cache(maxsize=1)
def _prepare_job(job: str) -> Resources:
    """Prepare a worker process for a run, once: change to its working directory and load its plugins."""
    shared = json.loads(job)
    with contextlib.suppress(OSError):
        os.chdir(shared["folder"])
    torch.set_num_threads(shared["threads"])
    for path, text in shared["plugins"]:
        if not Path(path).is_file() or Path(path).read_text(encoding="utf-8") != text:
            path = Path(tempfile.mkdtemp(prefix="patchlight-")) / Path(path).name
            path.write_text(text, encoding="utf-8")
        load_plugin(path)
    return Resources(shared["device"], shared["chunk"])


def execute(job: str, unit: bytes, measured: CellValues, device: str = "") -> Finished:
    """Run a pickled unit in a worker process, after the plugins of the run are loaded."""
    resources = _prepare_job(job)
    return run_timed(pickle.loads(unit), Resources(device or resources.device, resources.chunk), measured)


def devices_of(device: str) -> list[str]:
    """All CUDA devices for `cuda:all`, else the named device.

    >>> devices_of("cpu")
    ['cpu']
    """
    if device != "cuda:all":
        return [device]
    count = torch.cuda.device_count()
    if not count:
        raise PatchlightError("--device cuda:all: this machine has no CUDA device; use --device cpu")
    return [f"cuda:{i}" for i in range(count)]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
