"""Work in lanes: bounded queues with a thread each, jobs that tell how far they are, and cancellation.

Quick work (a forward or a few), slow work (thousands) and files have a lane each, so that the page follows the hand
while a slow method runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from patchlight.core.errors import Cancelled, PatchlightError
from patchlight.core.progress import Watcher, watched
from patchlight.web.schemas import Job, Kind, Progress

T = TypeVar("T")
LOG = logging.getLogger("patchlight.web")
KEPT, FILES, MINUTES, ROOM = 256, 16, 15, 64 * 2**20
"""How many finished jobs are remembered, how many of them with their file, for how long, and how much they told."""
LAST = 10.0
"""Seconds that are waited for the last piece of work of a lane that is closed."""
TOLD = 0.1
"""Seconds between two words about progress."""


class Busy(PatchlightError):
    """Too much work is waiting already."""


class OutOfTime(PatchlightError):
    """A piece of work took longer than is allowed."""


class Lane:
    """A thread that does one piece of work after another; at most `most` wait, and each may take `limit` seconds."""

    def __init__(self, name: str, most: int, limit: float, threads: int) -> None:
        self._most, self.limit, self._threads = most, limit, threads
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name=f"patchlight-{name}", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        with self._changed:
            if len(self._waiting) >= self._most:
                raise Busy(f"{self._most} requests are waiting already; try again in a moment")
            self._waiting.append(work)
            self._changed.notify()

    def drop(self, work: Callable[[], None]) -> None:
        """Forget work that waits."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(work)

    def close(self) -> None:
        """No more work is done than what is under way."""
        with self._changed:
            self._open = False
            self._waiting.clear()
            self._changed.notify()

    def join(self) -> None:
        """Wait for what is under way: a process that ends while torch computes in a thread is aborted."""
        self._thread.join(LAST)

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or not self._open)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except Exception:  # whatever it was, the next ones are done
                LOG.exception("work failed that nobody waits for")
            del work


@dataclass(eq=False)
class Task(Generic[T]):
    """One piece of work in a lane, which is watched: it can be cancelled, and stops when its time is over."""

    function: Callable[[Task[T]], T]
    limit: float
    """Seconds that it may run."""
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[T] = field(init=False)
    stop: threading.Event = field(default_factory=threading.Event)
    begun: float | None = None

    def __post_init__(self) -> None:
        self.done = self.loop.create_future()

    @property
    def late(self) -> bool:
        return self.begun is not None and time.monotonic() - self.begun > self.limit

    def progressed(self, done: int, total: int) -> None:
        """Told of every chunk."""

    def started(self) -> None:
        """Told when its turn has come."""

    def __call__(self) -> None:
        self.begun = time.monotonic()
        try:
            if self.stop.is_set():
                raise Cancelled("cancelled")
            self.started()
            with watched(Watcher(self.progressed, lambda: self.stop.is_set() or self.late)):
                result = self.function(self)
        except BaseException as error:
            told: BaseException = error
            if isinstance(error, Cancelled) and self.late and not self.stop.is_set():
                told = OutOfTime(f"it took longer than {self.limit:.0f} seconds and was stopped")
            self._tell(lambda: self.done.set_exception(told))
        else:
            self._tell(lambda: self.done.set_result(result))

    def _tell(self, settle: Callable[[], None]) -> None:
        def now() -> None:
            if not self.done.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(now)


async def run(lane: Lane, function: Callable[[], T]) -> T:
    """What a function gives, computed in a lane."""
    task = Task[T](lambda _: function(), lane.limit, asyncio.get_running_loop())
    lane.put(task)
    try:
        return await task.done
    except asyncio.CancelledError:
        task.stop.set()
        lane.drop(task)
        raise


Event = tuple[int, str, str]
"""Its number, a name, and data as JSON."""


class Work(Task["Job"]):
    """A job: its state is told to whoever listens, and what happened before is told again."""

    def __init__(self, kind: Kind, lane: Lane, function: Callable[[Work], None]) -> None:
        super().__init__(self._finish, lane.limit, asyncio.get_running_loop())
        self._lane, self._work = lane, function
        self.job = Job(id=secrets.token_urlsafe(16), kind=kind, state="waiting")
        self.file: tuple[bytes, str, str] | None = None
        self.over: float | None = None
        self._events: list[Event] = []
        self._said = 0
        self._heard = asyncio.Event()
        self._lock = threading.Lock()
        self._last = 0.0
        self.done.add_done_callback(self._settled)

    def started(self) -> None:
        self.job.state = "running"
        self.tell("job")

    def progressed(self, done: int, total: int) -> None:
        self.job.progress = Progress(done=done, total=total)
        now = time.monotonic()
        if now - self._last >= TOLD:
            self._last = now
            self.tell("job")

    def begin(self) -> None:
        self._lane.put(self)

    def cancel(self) -> None:
        self.stop.set()
        self._lane.drop(self)
        if self.begun is None and not self.done.done():
            self.done.set_exception(Cancelled("cancelled before it began"))

    def tell(self, name: str, data: str | None = None) -> None:
        """Say something to all who listen: the job's own state, or what was found."""
        if self.begun is not None:
            self.job.seconds = round(time.monotonic() - self.begun, 3)
        said = data if data is not None else self.job.model_dump_json(exclude={"maps", "measured"})
        with self._lock:
            if name == "job":
                self._events = [event for event in self._events if event[1] != "job"]  # the last one tells all
            self._said += 1
            self._events.append((self._said, name, said))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self.loop.call_soon_threadsafe(self._heard.set)

    async def news(self, after: int, patience: float) -> list[Event]:
        """What was said after the event of that number; nothing, where nothing is said within the time."""
        until = self.loop.time() + patience
        while True:
            with self._lock:
                news = [event for event in self._events if event[0] > after]
            if news or self.over is not None or self.loop.time() >= until:
                return news
            self._heard.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), min(0.5, patience))

    @property
    def letters(self) -> int:
        """How much it has told."""
        with self._lock:
            return sum(len(data) for _, _, data in self._events)

    @property
    def old(self) -> bool:
        """Whether it was over long ago."""
        return self.over is not None and time.monotonic() - self.over > 60 * MINUTES

    def _finish(self, task: Task[Job]) -> Job:
        self._work(self)
        return self.job

    def _settled(self, done: asyncio.Future[Job]) -> None:
        error = done.exception()
        if error is None:
            self.job.state = "done"
        elif isinstance(error, Cancelled):
            self.job.state, self.job.error = "cancelled", "cancelled"
        else:
            self.job.state, self.job.error = "failed", in_words(error)
            if not isinstance(error, PatchlightError):
                LOG.error("a job of kind '%s' failed", self.job.kind, exc_info=error)
        self.done = self.loop.create_future()  # an error holds all that was computed with, and a job is kept for long
        self.done.set_result(self.job)
        self._work = lambda _: None
        self.over = time.monotonic()
        self.tell("job")
        self.tell("end", self.job.model_dump_json())


def in_words(error: BaseException) -> str:
    """One sentence for the client; what was not foreseen is told by its kind alone."""
    if isinstance(error, PatchlightError):
        return " ".join(str(error).split())
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory has run out; ask for less at once"
    return f"this failed with an unexpected {type(error).__name__}; the server's log says more"


class Board:
    """The jobs by their ids; the oldest finished ones are forgotten."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Work] = OrderedDict()

    def add(self, work: Work) -> None:
        self._forget()
        self._jobs[work.job.id] = work

    def find(self, name: str) -> Work | None:
        work = self._jobs.get(name)
        return None if work is None or work.old else work

    def all(self) -> list[Work]:
        return list(self._jobs.values())

    def _forget(self) -> None:
        finished = [key for key, work in self._jobs.items() if work.over is not None]
        told = sum(work.letters for work in self._jobs.values())
        for key in finished:
            if self._jobs[key].old or len(self._jobs) > KEPT or told > ROOM:
                told -= self._jobs.pop(key).letters
        for work in [work for work in self._jobs.values() if work.file is not None][:-FILES]:
            work.file = work.job.file = None
