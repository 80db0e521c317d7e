"""How far a long piece of work is: told to a function, or drawn as a bar on a terminal or in a notebook.

Such a bar comes after two seconds, so that short work stays silent, and goes when the work is done. `watched` looks
inside the work on one image: it hears of every chunk, and can stop it there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from patchlight.core.errors import Cancelled, PatchlightError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Progress = Callable[[int, int | None], None]
"""Called with how much is done and of how much; None where only the end will tell."""
Tell = Callable[[float, int | None], None]
"""The same, of work that may be done in part."""
PATIENCE = 2.0
"""Seconds before a bar is shown."""
_SHOWN = threading.Lock()
"""Held while there is a bar: work inside that work, or in another thread beside it, draws none of its own."""


@dataclass
class Watcher:
    """Who watches the work of a thread: `tell` hears of the forwards done and to do, `cancelled` says whether to stop.

    What is to do is known a list of variants at a time, so that it grows with the rounds of a method.
    """

    tell: Callable[[int, int], None] = lambda done, total: None
    cancelled: Callable[[], bool] = lambda: False
    done: int = 0
    total: int = 0

    def begin(self, count: int) -> None:
        """So many more are to do."""
        self.total = self.done + count
        self.check()

    def advance(self, count: int) -> None:
        """So many of them are done."""
        self.done += count
        self.tell(self.done, self.total)

    def check(self) -> None:
        """Stop here, where that is wanted."""
        if self.cancelled():
            raise Cancelled(f"stopped after {self.done} of {self.total} forwards")


_WATCHED: ContextVar[Watcher | None] = ContextVar("watched", default=None)


def watching() -> Watcher:
    """Who watches what this thread does; nobody, where nobody does."""
    return _WATCHED.get() or Watcher()


@contextlib.contextmanager
def watched(watch: Watcher) -> Iterator[None]:
    """Inside, every chunk of variants and every pass is told to `watch`, and stops where it says so."""
    before = _WATCHED.set(watch)
    try:
        yield
    finally:
        _WATCHED.reset(before)


@contextlib.contextmanager
def bar(words: str) -> Iterator[Bar]:
    """A bar on stderr with one task, from the beginning; none where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with alone(), shown:
        shown.add_task(words, total=None)
        yield shown


@contextlib.contextmanager
def telling(progress: Progress | bool | None, words: str) -> Iterator[Tell]:
    """What to call as work goes on, with the images done and their number.

    `progress` itself is called with whole images; True draws a bar where somebody watches; False and None do nothing.
    """
    if progress is True:
        shown = _display(words)
        with contextlib.nullcontext(_silent) if shown is None else _late(shown) as tell:
            yield tell
    elif progress is None or progress is False:
        yield _silent
    elif callable(progress):
        yield _whole(progress)
    else:
        kind = type(progress).__name__
        raise PatchlightError(f"progress {progress!r} is a {kind}; give True, False or a function of (done, total)")


def _silent(done: float, total: int | None) -> None:
    """Nobody watches."""


def _whole(progress: Progress) -> Tell:
    return lambda done, total: progress(done, total) if isinstance(done, int) else None


@contextlib.contextmanager
def alone() -> Iterator[bool]:
    """Whether there is no other bar; while this lasts, no other comes."""
    mine = _SHOWN.acquire(blocking=False)
    try:
        yield mine
    finally:
        if mine:
            _SHOWN.release()


@contextlib.contextmanager
def _late(shown: AbstractContextManager[Tell]) -> Iterator[Tell]:
    """Show something after PATIENCE, unless the work is over by then or there is another bar."""
    with alone() as mine, ExitStack() as until_over:
        lock = threading.RLock()
        now: tuple[float, int | None] = 0, None
        draw: Tell = _silent

        def start() -> None:
            nonlocal draw
            with lock:
                if not timer.finished.is_set():
                    draw = until_over.enter_context(shown)
                    draw(*now)

        def tell(done: float, total: int | None) -> None:
            nonlocal now
            with lock:
                now = done, total
                draw(done, total)

        timer = threading.Timer(PATIENCE, start)
        timer.daemon = True
        if mine:
            timer.start()
        try:
            yield tell
        finally:
            with lock:
                timer.cancel()


def _display(words: str) -> AbstractContextManager[Tell] | None:
    """A bar where somebody watches: in a notebook, or on a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        return _in_notebook(words, importlib.import_module("IPython.display").display, time.monotonic())
    return _on_terminal(words) if sys.stderr is not None and sys.stderr.isatty() else None


@contextlib.contextmanager
def _on_terminal(words: str) -> Iterator[Tell]:
    with bar(words) as shown:
        yield lambda done, total: shown.update(shown.task_ids[0], completed=done, total=total)


@contextlib.contextmanager
def _in_notebook(words: str, display: Callable[..., Any], begun: float) -> Iterator[Tell]:
    """An HTML progress element below the cell; five a second at most."""
    handle = display(_Html(""), display_id=True)
    drawn = 0.0

    def draw(done: float, total: int | None) -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn < 0.2:
            return
        drawn = now
        far = "" if total is None else f' value="{done:g}" max="{total}"'
        count = f"{int(done)}" if total is None else f"{int(done)} of {total}"
        left = f", {clock((now - begun) / done * (total - done))} left" if total is not None and done else ""
        handle.update(_Html(f"<progress{far}></progress> {escape(words)} {count}{left}"))

    try:
        yield draw
    finally:
        handle.update(_Html(""))


class _Html(str):
    """Text that a notebook takes as HTML."""

    def _repr_html_(self) -> str:
        return str(self)


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
