"""A progress bar is shown only for long work in a terminal, one at a time, and disappears at the end."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any

import pytest

import patchlight as pl
from patchlight.core import progress
from patchlight.core.progress import bar, show_progress
from tests.families import images, shared


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr; bars appear after 50 ms."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    return Terminal()


def work(tell: Any, steps: int = 3, seconds: float = 0.08) -> None:
    for done in range(1, steps + 1):
        time.sleep(seconds)
        tell(done, steps)


def drawn(terminal: Terminal, words: str) -> None:
    """Wait for text that another thread writes."""
    until = time.monotonic() + 10
    while words not in terminal.getvalue():
        assert time.monotonic() < until, f"'{words}' is not in {terminal.getvalue()!r}"
        time.sleep(0.02)


def test_long_work_shows_a_bar_that_goes_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(True, "explaining") as tell:
        work(tell)
        drawn(terminal, "explaining")
        drawn(terminal, "3/3")
    assert terminal.getvalue().endswith("\r"), "its line is cleared"
    assert not any(isinstance(t, threading.Timer) and not t.finished.is_set() for t in threading.enumerate())


def test_short_work_is_silent(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 30)
    with show_progress(True, "explaining") as tell:
        work(tell)
    vit = shared("vit")
    pl.explain(vit, images(vit))
    assert terminal.getvalue() == ""


def test_explain_and_evaluate_draw_bars_by_themselves(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    vit = shared("vit")
    batch = images(vit)

    def slowly() -> Any:
        for image in batch:
            time.sleep(0.1)
            yield image

    att = pl.explain(vit, slowly(), batch_size=1)
    assert "explaining" in terminal.getvalue()
    pl.evaluate(vit, slowly(), att, "sparseness", batch_size=1)
    assert "measuring" in terminal.getvalue()
    before = terminal.getvalue()
    pl.explain(vit, slowly(), batch_size=1, progress=False)
    assert terminal.getvalue() == before


def test_nothing_where_nobody_watches(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_progress(True, "explaining") as tell:
        work(tell)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", None)
    with show_progress(True, "explaining") as tell:
        work(tell, 1, 0)


def test_one_bar_at_a_time(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with show_progress(True, "outer") as outer, show_progress(True, "inner") as inner:
        work(inner)
        work(outer)
        drawn(terminal, "outer")
    assert "inner" not in terminal.getvalue()
    with bar("loading"), show_progress(True, "within") as tell:
        work(tell)
    assert "within" not in terminal.getvalue()
    with show_progress(True, "afterwards") as tell:
        work(tell)
        drawn(terminal, "afterwards")


def test_an_error_takes_the_bar_away(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)

    def broken() -> None:
        with show_progress(True, "explaining") as tell:
            work(tell)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        broken()
    assert "explaining" in terminal.getvalue()
    left = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == left, "nothing refreshes it any more"


def test_a_function_receives_whole_images() -> None:
    told: list[Any] = []
    with show_progress(lambda done, total: told.append((done, total)), "") as tell:
        tell(1, 3)
        tell(1.5, 3)
        tell(2, None)
    assert told == [(1, 3), (2, None)]
