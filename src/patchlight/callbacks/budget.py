"""Limits the time that a log may take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic

from patchlight.core.errors import PatchlightError
from patchlight.core.progress import Watcher, watch


class Budget:
    """A time budget for logging; a step is expected to take as long as the last one.

    Args:
        share: Maximum share of the time since `begin`; None for no limit.
        seconds: Maximum seconds per step; None for no limit.
    """

    def __init__(self, share: float | None, seconds: float | None) -> None:
        if share is not None and not 0 < share <= 1:
            raise PatchlightError(
                f"budget is {share!r}; give a share of the training time above 0 and up to 1, or None"
            )
        if seconds is not None and not seconds > 0:
            raise PatchlightError(f"seconds is {seconds!r}; give a number above 0, or None")
        self.share, self.seconds = share, seconds
        self.began: float | None = None
        self.spent, self.last = 0.0, 0.0

    def begin(self) -> None:
        """Start the clock, unless it is running."""
        self.began = monotonic() if self.began is None else self.began

    def lacks(self) -> str:
        """Why there is no time now; empty if there is."""
        if self.share is None or self.began is None or not self.last:
            return ""
        allowed = self.share * (monotonic() - self.began)
        if self.spent + self.last <= allowed:
            return ""
        left = max(0.0, allowed - self.spent)
        return f"it takes {self.last:.3g} s, and {left:.3g} s of a budget of {100 * self.share:g} % are left"

    @contextlib.contextmanager
    def spending(self) -> Iterator[Callable[[], float]]:
        """Count the time of a block, and cancel it after `seconds` at the next chunk of variants.

        Yields a function that returns the seconds so far.
        """
        begin = monotonic()
        limit = self.seconds
        try:
            with watch(Watcher(cancelled=lambda: limit is not None and monotonic() - begin > limit)):
                yield lambda: monotonic() - begin
        finally:
            self.last = monotonic() - begin
            self.spent += self.last
