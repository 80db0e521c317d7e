"""Queues of work with a thread each, and jobs that report progress and can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from patchlight.core.errors import Cancelled, PatchlightError
from patchlight.core.progress import Watcher, watch
from patchlight.web import Refused
from patchlight.web.schemas import JobProgress, JobStatus, Kind

T = TypeVar("T")
LOG = logging.getLogger("patchlight.web")
KEPT, FILES, MINUTES, ROOM = 256, 16, 15, 64 * 2**20
"""Finished jobs that are remembered, how many of them with their file, for how long, and characters of all events."""
INTERVAL = 0.1
"""Seconds between two progress events."""


@dataclass(eq=False)
class Control:
    """Stops a piece of work when `stop` is set or after `limit` seconds."""

    limit: float
    stop: threading.Event = field(default_factory=threading.Event)
    started: float | None = None

    @property
    def late(self) -> bool:
        return self.started is not None and time.monotonic() - self.started > self.limit

    def run(self, function: Callable[[], T], report: Callable[[int, int], None] = lambda done, total: None) -> T:
        """Call a function. `report` gets the progress after every chunk, where the work can also be stopped."""
        self.started = time.monotonic()
        if self.stop.is_set():
            raise Cancelled("Cancelled.")
        try:
            with watch(Watcher(report, lambda: self.stop.is_set() or self.late)):
                return function()
        except Cancelled:
            if self.stop.is_set() or not self.late:
                raise
            raise Refused(503, f"This took longer than {self.limit:.0f} seconds and was stopped.") from None


class WorkQueue:
    """A thread that runs one piece of work after another; at most `most` wait, and each may take `limit` seconds."""

    def __init__(self, name: str, most: int, limit: float, threads: int) -> None:
        self.limit, self._most = limit, most
        self.pool = ThreadPoolExecutor(1, f"patchlight-{name}", torch.set_num_threads, (threads,))
        self._turn = asyncio.Lock()  # work that waits here can be cancelled; in the pool it cannot
        self._waiting: set[asyncio.Task[Any]] = set()

    def submit(self, function: Callable[[], T]) -> asyncio.Task[T]:
        """Run a function in the thread when its turn has come."""
        if len(self._waiting) >= self._most:
            raise Refused(429, f"{self._most} requests are waiting; try again in a moment.", **{"retry-after": "1"})
        task = asyncio.create_task(self._call(function))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def run(self, function: Callable[[], T]) -> T:
        """The result of a function that runs in the thread."""
        control = Control(self.limit)
        try:
            return await self.submit(lambda: control.run(function))
        except asyncio.CancelledError:
            control.stop.set()
            raise

    async def _call(self, function: Callable[[], T]) -> T:
        async with self._turn:
            self._waiting.discard(asyncio.current_task())
            return await asyncio.get_running_loop().run_in_executor(self.pool, function)


class RunningJob:
    """A job in a queue. Listeners get its events, including those of the past.

    `file` is the bytes, media type and name of the file that the job made; `done` ends with the job and never fails.
    """

    def __init__(self, kind: Kind, queue: WorkQueue, function: Callable[[RunningJob], object]) -> None:
        self.status = JobStatus(id=secrets.token_urlsafe(16), kind=kind, state="waiting")
        self.file: tuple[bytes, str, str] | None = None
        self.over: float | None = None
        self.control = Control(queue.limit)
        self._events: list[tuple[int, str, str]] = []
        self._count, self._last = 0, 0.0
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = queue.submit(lambda: self.control.run(lambda: self._start(function), self._progressed))
        self.done = asyncio.create_task(self._settle())

    def _start(self, function: Callable[[RunningJob], object]) -> None:
        self.status.state = "running"
        self.emit("job")
        function(self)

    def _progressed(self, done: int, total: int) -> None:
        self.status.progress = JobProgress(done=done, total=total)
        now = time.monotonic()
        if now - self._last >= INTERVAL:
            self._last = now
            self.emit("job")

    async def cancel(self) -> None:
        """Stop the job within a chunk of its work; a waiting job ends at once."""
        self.control.stop.set()
        if self.control.started is None and self.over is None:
            self._task.cancel()
            await asyncio.wait([self.done])

    def emit(self, name: str, data: str | None = None) -> None:
        """Add an event: the job's state, or a result as JSON."""
        if self.control.started is not None:
            self.status.seconds = round(time.monotonic() - self.control.started, 3)
        data = data if data is not None else self.status.model_dump_json(exclude={"maps", "measured"})
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._add, name, data)

    def _add(self, name: str, data: str) -> None:
        if name == "job":
            self._events = [event for event in self._events if event[1] != "job"]  # only the newest state matters
        self._count += 1
        self._events.append((self._count, name, data))
        self._changed.set()
        self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[tuple[str, str]]:
        """The names and data of all events up to the last one, `end`."""
        last, name = 0, ""
        while name != "end":
            changed = self._changed
            for last, name, data in [event for event in self._events if event[0] > last]:  # noqa: B007
                yield name, data
            if name != "end":
                await changed.wait()

    @property
    def characters(self) -> int:
        """Number of characters of its events."""
        return sum(len(data) for _, _, data in self._events)

    @property
    def expired(self) -> bool:
        """Whether the job ended more than MINUTES ago."""
        return self.over is not None and time.monotonic() - self.over > 60 * MINUTES

    async def _settle(self) -> None:
        try:
            await self._task
            self.status.state = "done"
        except (Cancelled, asyncio.CancelledError):
            self.status.state, self.status.error = "cancelled", "Cancelled."
        except Exception as error:
            self.status.state, self.status.error = "failed", describe_error(error)
            if not isinstance(error, PatchlightError):
                LOG.error("A job of kind '%s' failed.", self.status.kind, exc_info=error)
        del self._task  # an error keeps the computation's tensors alive, and jobs are remembered
        self.over = time.monotonic()
        self.emit("job")
        self.emit("end", self.status.model_dump_json())


def describe_error(error: BaseException) -> str:
    """One sentence for the client; of an unexpected error only its type is named."""
    if isinstance(error, PatchlightError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "Out of memory; ask for less at once."
    return f"Unexpected {type(error).__name__}; the server's log has the details."


class JobStore(dict[str, RunningJob]):
    """Jobs by id; the oldest finished ones are forgotten."""

    def add(self, job: RunningJob) -> None:
        self._forget()
        self[job.status.id] = job

    def find(self, name: str) -> RunningJob | None:
        job = self.get(name)
        return None if job is None or job.expired else job

    def _forget(self) -> None:
        finished = [name for name, job in self.items() if job.over is not None]
        characters = sum(job.characters for job in self.values())
        for name in finished:
            if self[name].expired or len(self) > KEPT or characters > ROOM:
                characters -= self.pop(name).characters
        for job in [job for job in self.values() if job.file is not None][:-FILES]:
            job.file = job.status.file = None
