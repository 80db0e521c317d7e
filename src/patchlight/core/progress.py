"""How far a long piece of work is: told to a function, or drawn as a bar on a terminal or in a notebook.

Such a bar comes after two seconds, so that short work stays silent, and goes when the work is done. `watched` looks
inside the work on one image: it hears of every chunk, and can stop it there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchlight.core.errors import Cancelled, PatchlightError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Progress = Callable[[int, int | None], None]
"""Called with how much is done and of how much; None where only the end will tell."""
Update = Callable[[float, int | None], None]
"""The same, of work that may be done in part."""
PATIENCE = 2.0
"""Seconds before a bar is shown."""
_SHOWN = threading.Lock()
"""Held while there is a bar: work inside that work, or in another thread beside it, draws none of its own."""


@dataclass
class Watcher:
    """Follows the forward passes of a thread, and may stop them.

    Args:
        report: Called with the number of passes done and their total, which grows with each round of a method.
        cancelled: Returns whether to stop.
    """

    report: Callable[[int, int], None] = lambda done, total: None
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
        self.report(self.done, self.total)

    def check(self) -> None:
        """Stop here, where that is wanted."""
        if self.cancelled():
            raise Cancelled(f"stopped after {self.done} of {self.total} forwards")


_WATCHED: ContextVar[Watcher | None] = ContextVar("watched", default=None)


def current_watcher() -> Watcher:
    """Who watches what this thread does; nobody, where nobody does."""
    return _WATCHED.get() or Watcher()


@contextlib.contextmanager
def watch(watch: Watcher) -> Iterator[None]:
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
    with exclusive_bar(), shown:
        shown.add_task(words, total=None)
        yield shown


@contextlib.contextmanager
def show_progress(progress: Progress | bool | None, words: str) -> Iterator[Update]:
    """A function to call with the images done and their number as work proceeds.

    Args:
        progress: True for a progress bar that appears after two seconds, a function that is called with whole images,
            or False or None for neither.
        words: What the bar says.
    """
    if progress is True:
        with _late_bar(words) as tell:
            yield tell
    elif progress is None or progress is False:
        yield _silent
    elif callable(progress):
        yield lambda done, total: progress(done, total) if isinstance(done, int) else None
    else:
        kind = type(progress).__name__
        raise PatchlightError(f"progress {progress!r} is a {kind}; give True, False or a function of (done, total)")


def _silent(done: float, total: int | None) -> None:
    """Show nothing."""


@contextlib.contextmanager
def exclusive_bar() -> Iterator[bool]:
    """Whether there is no other bar; while this lasts, no other comes."""
    mine = _SHOWN.acquire(blocking=False)
    try:
        yield mine
    finally:
        if mine:
            _SHOWN.release()


@contextlib.contextmanager
def _late_bar(words: str) -> Iterator[Update]:
    """A bar on a terminal or in a notebook after PATIENCE, unless the work is over by then or there is another bar."""
    with exclusive_bar() as mine:
        lock = threading.Lock()
        now: tuple[float, int | None] = 0, None
        shown: Any = None

        def draw() -> None:
            if shown is not None:
                shown.n, shown.total = round(now[0], 1), now[1]
                shown.refresh()

        def start() -> None:
            nonlocal shown
            from tqdm.auto import tqdm

            with lock:
                if not timer.finished.is_set():
                    shown = tqdm(desc=words, leave=False, disable=None)
                    draw()

        def tell(done: float, total: int | None) -> None:
            nonlocal now
            with lock:
                now = done, total
                draw()

        timer = threading.Timer(PATIENCE, start)
        timer.daemon = True
        if mine and sys.stderr is not None:
            timer.start()
        try:
            yield tell
        finally:
            with lock:
                timer.cancel()
                if shown is not None:
                    shown.close()
