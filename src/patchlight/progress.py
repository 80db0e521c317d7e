"""How far a long piece of work is: told to a function, or drawn as a bar on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from patchlight.errors import PatchlightError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Progress = Callable[[int, int | None], None]
"""Called with how much is done and of how much; None where only the end will tell."""


@contextlib.contextmanager
def bar(words: str, watched: bool = False) -> Iterator[Bar]:
    """A bar on stderr with one task; `watched`: only where somebody watches, and gone afterwards."""
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
    with Progress(*columns, console=console, transient=watched, disable=watched and not console.is_terminal) as shown:
        shown.add_task(words, total=None)
        yield shown


@contextlib.contextmanager
def telling(progress: Progress | bool | None, words: str) -> Iterator[Progress]:
    """What to call as work goes on: `progress` itself, a bar on stderr for True, nothing for False and None."""
    if progress is None or progress is False:
        yield lambda done, total: None
    elif progress is True:
        with bar(words) as shown:
            yield lambda done, total: shown.update(shown.task_ids[0], completed=done, total=total)
    elif callable(progress):
        yield progress
    else:
        kind = type(progress).__name__
        raise PatchlightError(f"progress {progress!r} is a {kind}; give True, False or a function of (done, total)")
