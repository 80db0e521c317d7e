"""Work in queues: a thread each, jobs that report their progress, time limits and cancellation.

Quick work (a forward or a few), slow work (thousands) and files have a queue each, so that the page follows the hand
while a slow method runs.
"""

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
from patchlight.web.schemas import JobProgress, JobStatus, Kind

T = TypeVar("T")
LOG = logging.getLogger("patchlight.web")
KEPT, FILES, MINUTES, ROOM = 256, 16, 15, 64 * 2**20
"""Finished jobs that are remembered, those of them with their file, for how long, and characters of their events."""
INTERVAL = 0.1
"""Seconds between two events about progress."""


class QueueFull(PatchlightError):
    """Too much work is waiting already."""

    status = 429


class TimeLimitExceeded(PatchlightError):
    """A piece of work took longer than is allowed."""

    status = 503


@dataclass(eq=False)
class Control:
    """What stops a piece of work: `stop` is set, or it has run for `limit` seconds."""

    limit: float
    stop: threading.Event = field(default_factory=threading.Event)
    begun: float | None = None

    @property
    def late(self) -> bool:
        return self.begun is not None and time.monotonic() - self.begun > self.limit

    def run(self, function: Callable[[], T], tell: Callable[[int, int], None] = lambda done, total: None) -> T:
        """Call a function; `tell` hears of every chunk of its work, after which it can be stopped."""
        self.begun = time.monotonic()
        if self.stop.is_set():
            raise Cancelled("cancelled")
        try:
            with watch(Watcher(tell, lambda: self.stop.is_set() or self.late)):
                return function()
        except Cancelled:
            if self.stop.is_set() or not self.late:
                raise
            raise TimeLimitExceeded(f"it took longer than {self.limit:.0f} seconds and was stopped") from None


class WorkQueue:
    """A thread that does one piece of work after another; at most `most` wait, and each may take `limit` seconds."""

    def __init__(self, name: str, most: int, limit: float, threads: int) -> None:
        self.limit, self._most = limit, most
        self.pool = ThreadPoolExecutor(1, f"patchlight-{name}", torch.set_num_threads, (threads,))
        self._turn = asyncio.Lock()  # what waits for it can be cancelled and is gone; what waits in the pool is not
        self._waiting: set[asyncio.Task[Any]] = set()

    def submit(self, function: Callable[[], T]) -> asyncio.Task[T]:
        """Have a function called in the thread when its turn has come."""
        if len(self._waiting) >= self._most:
            raise QueueFull(f"{self._most} requests are waiting already; try again in a moment")
        task = asyncio.create_task(self._call(function))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def run(self, function: Callable[[], T]) -> T:
        """What a function gives, computed in the thread."""
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
    """A job in a queue: its events go to whoever listens, those of the past too.

    `done` ends with the job and never fails; `file` is the bytes, type and name of what a job made.
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
        self.tell("job")
        function(self)

    def _progressed(self, done: int, total: int) -> None:
        self.status.progress = JobProgress(done=done, total=total)
        now = time.monotonic()
        if now - self._last >= INTERVAL:
            self._last = now
            self.tell("job")

    async def cancel(self) -> None:
        """Stop it within a chunk of its work; one that waits is over at once."""
        self.control.stop.set()
        if self.control.begun is None and self.over is None:
            self._task.cancel()
            await asyncio.wait([self.done])

    def tell(self, name: str, data: str | None = None) -> None:
        """Add an event: the job's own state, or a result as JSON."""
        if self.control.begun is not None:
            self.status.seconds = round(time.monotonic() - self.control.begun, 3)
        data = data if data is not None else self.status.model_dump_json(exclude={"maps", "measured"})
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._add, name, data)

    def _add(self, name: str, data: str) -> None:
        if name == "job":
            self._events = [event for event in self._events if event[1] != "job"]  # the last one says it all
        self._count += 1
        self._events.append((self._count, name, data))
        self._changed.set()
        self._changed = asyncio.Event()

    async def events(self) -> AsyncIterator[tuple[str, str]]:
        """The names and data of all events, until that of the end."""
        last, name = 0, ""
        while name != "end":
            changed = self._changed
            for last, name, data in [event for event in self._events if event[0] > last]:  # noqa: B007
                yield name, data
            if name != "end":
                await changed.wait()

    @property
    def letters(self) -> int:
        """Characters of its events."""
        return sum(len(data) for _, _, data in self._events)

    @property
    def old(self) -> bool:
        """Whether it was over long ago."""
        return self.over is not None and time.monotonic() - self.over > 60 * MINUTES

    async def _settle(self) -> None:
        try:
            await self._task
            self.status.state = "done"
        except (Cancelled, asyncio.CancelledError):
            self.status.state, self.status.error = "cancelled", "cancelled"
        except Exception as error:
            self.status.state, self.status.error = "failed", describe_error(error)
            if not isinstance(error, PatchlightError):
                LOG.error("a job of kind '%s' failed", self.status.kind, exc_info=error)
        del self._task  # an error holds all that was computed with, and a job is kept for long
        self.over = time.monotonic()
        self.tell("job")
        self.tell("end", self.status.model_dump_json())


def describe_error(error: BaseException) -> str:
    """One sentence for the client; an unexpected error is named by its kind alone."""
    if isinstance(error, PatchlightError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory has run out; ask for less at once"
    return f"this failed with an unexpected {type(error).__name__}; the server's log says more"


class JobStore(dict[str, RunningJob]):
    """Jobs by their ids; the oldest finished ones are forgotten."""

    def add(self, job: RunningJob) -> None:
        self._forget()
        self[job.status.id] = job

    def find(self, name: str) -> RunningJob | None:
        job = self.get(name)
        return None if job is None or job.old else job

    def _forget(self) -> None:
        finished = [name for name, job in self.items() if job.over is not None]
        letters = sum(job.letters for job in self.values())
        for name in finished:
            if self[name].old or len(self) > KEPT or letters > ROOM:
                letters -= self.pop(name).letters
        for job in [job for job in self.values() if job.file is not None][:-FILES]:
            job.file = job.status.file = None
