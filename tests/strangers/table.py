"""The strangers' table: odd models, inputs, contexts and files that people bring.

Each row asserts that the result is right (against a hand-made one or an invariant), or that it is refused in one clear
sentence. A raw traceback of ours fails the row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from patchlight.cli import app
from patchlight.core.errors import PatchlightError

Row = Callable[[Path], None]
ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    """Enter a function of a temporary folder as a row, under its own name in words."""
    name = function.__name__.replace("_", " ")
    assert name not in ROWS, f"two rows are called '{name}'"
    ROWS[name] = function
    return function


def refuses(action: Callable[[], object], *words: str) -> str:
    """Assert that an action is refused in one sentence that contains `words`; the sentence."""
    try:
        result = action()
    except PatchlightError as error:
        told = str(error)
    else:
        raise AssertionError(f"this should have been refused, but gave {result!r}")
    assert "\n" not in told.strip(), f"more than one sentence: {told}"
    missing = [word for word in words if word not in told]
    assert not missing, f"the refusal does not say {missing}: {told}"
    return told


def command(*words: str, code: int = 0, says: tuple[str, ...] = ()) -> str:
    """Run `patchlight WORDS` and assert its exit code, what it says, and that it shows no traceback; its output."""
    done = CliRunner().invoke(app, list(words))
    told = done.output
    broken = done.exception is not None and not isinstance(done.exception, SystemExit)
    assert not broken, f"{' '.join(words)} broke: {done.exception!r}"
    assert "Traceback" not in told, told
    assert done.exit_code == code, f"exit code {done.exit_code}, not {code}: {told}"
    flat = " ".join(told.split())
    missing = [word for word in says if word not in flat]
    assert not missing, f"the output does not say {missing}: {told}"
    return told
