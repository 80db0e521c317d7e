"""How much of a training's time its log may take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic

from patchlight.core.errors import PatchlightError
from patchlight.core.progress import Watcher, watch


class Budget:
    """At most a `share` of the time since `begin`, and `seconds` each time; None sets no limit.

    What the first time takes is not known before; a time after it is expected to take what the last one took.
    """

    def __init__(self, share: float | None, seconds: float | None) -> None:
        if share is not None and not 0 < share <= 1:
            raise PatchlightError(f"budget is {share!r}; give a share of the training's time above 0, up to 1, or None")
        if seconds is not None and not seconds > 0:
            raise PatchlightError(f"seconds is {seconds!r}; give a number above 0, or None")
        self.share, self.seconds = share, seconds
        self.began: float | None = None
        self.spent, self.last = 0.0, 0.0

    def begin(self) -> None:
        """The training has begun, unless it had."""
        self.began = monotonic() if self.began is None else self.began

    def lacks(self) -> str:
        """Why there is no time now, in words; empty where there is."""
        if self.share is None or self.began is None or not self.last:
            return ""
        allowed = self.share * (monotonic() - self.began)
        if self.spent + self.last <= allowed:
            return ""
        left = max(0.0, allowed - self.spent)
        return f"it takes {self.last:.3g} s, and {left:.3g} s of a budget of {100 * self.share:g} % are left"

    @contextlib.contextmanager
    def spending(self) -> Iterator[Callable[[], float]]:
        """Inside, time is spent; what runs longer than `seconds` is cancelled, at the next chunk of variants.

        What it gives tells the seconds since.
        """
        begin = monotonic()
        limit = self.seconds
        try:
            with watch(Watcher(cancelled=lambda: limit is not None and monotonic() - begin > limit)):
                yield lambda: monotonic() - begin
        finally:
            self.last = monotonic() - begin
            self.spent += self.last
