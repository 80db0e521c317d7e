"""Progress of long work: reported to a function, or shown as a progress bar on a terminal or in a notebook.

A bar appears after two seconds and disappears when the work is done. `watch` follows the forward passes of one image
and can stop them.
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
"""Called with the number of finished items and the total, which is None if it is not known."""
Update = Callable[[float, int | None], None]
"""As `Progress`, but the number may be a fraction."""
PATIENCE = 2.0
"""Seconds before a bar is shown."""
_SHOWN = threading.Lock()
"""Locked while a bar is shown, so that nested or parallel work does not show another one."""


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
        """Add this many passes to the total."""
        self.total = self.done + count
        self.check()

    def advance(self, count: int) -> None:
        """Report this many passes as done."""
        self.done += count
        self.report(self.done, self.total)

    def check(self) -> None:
        """Raise `Cancelled` if the work must stop."""
        if self.cancelled():
            raise Cancelled(f"stopped after {self.done} of {self.total} forward passes")


_WATCHED: ContextVar[Watcher | None] = ContextVar("watched", default=None)


def current_watcher() -> Watcher:
    """The watcher of this thread; one that does nothing if there is none."""
    return _WATCHED.get() or Watcher()


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Report every chunk of variants and every pass of this thread to a watcher, which may stop them."""
    before = _WATCHED.set(watcher)
    try:
        yield
    finally:
        _WATCHED.reset(before)


@contextlib.contextmanager
def bar(words: str) -> Iterator[Bar]:
    """A progress bar on stderr with one task, shown at once; none without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with exclusive_bar(), shown:
        shown.add_task(words, total=None)
        yield shown


@contextlib.contextmanager
def show_progress(progress: Progress | bool | None, words: str) -> Iterator[Update]:
    """Yields a function to call with the images done and their number.

    Args:
        progress: True for a progress bar that appears after two seconds, a function that is called after each image,
            or False or None for neither.
        words: The text of the bar.
    """
    if progress is True:
        with _late_bar(words) as update:
            yield update
    elif progress is None or progress is False:
        yield lambda done, total: None
    elif callable(progress):
        yield lambda done, total: progress(done, total) if isinstance(done, int) else None
    else:
        kind = type(progress).__name__
        raise PatchlightError(f"progress {progress!r} is a {kind}; give True, False or a function of (done, total)")


@contextlib.contextmanager
def exclusive_bar() -> Iterator[bool]:
    """Prevent other bars in a block; yields False if there is one already."""
    acquired = _SHOWN.acquire(blocking=False)
    try:
        yield acquired
    finally:
        if acquired:
            _SHOWN.release()


@contextlib.contextmanager
def _late_bar(words: str) -> Iterator[Update]:
    """A bar that appears after PATIENCE, unless the work is done by then or there is another bar."""
    with exclusive_bar() as allowed:
        lock = threading.Lock()
        state: tuple[float, int | None] = 0, None
        displayed: Any = None

        def draw() -> None:
            if displayed is not None:
                displayed.n, displayed.total = round(state[0], 1), state[1]
                displayed.refresh()

        def start() -> None:
            nonlocal displayed
            from tqdm.auto import tqdm

            with lock:
                if not timer.finished.is_set():
                    displayed = tqdm(desc=words, leave=False, disable=None)
                    draw()

        def update(done: float, total: int | None) -> None:
            nonlocal state
            with lock:
                state = done, total
                draw()

        timer = threading.Timer(PATIENCE, start)
        timer.daemon = True
        if allowed and sys.stderr is not None:
            timer.start()
        try:
            yield update
        finally:
            with lock:
                timer.cancel()
                if displayed is not None:
                    displayed.close()
