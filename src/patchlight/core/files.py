"""Writing files whole or not at all, and saying in one sentence why one cannot be written."""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError

FORMULA = r"^[=+\-@\t\r]"
"""How text begins that a spreadsheet takes for a formula."""


def cache_folder() -> Path:
    """The folder of cached files: PATCHLIGHT_CACHE, else patchlight/ below XDG_CACHE_HOME or ~/.cache."""
    own, users = os.environ.get("PATCHLIGHT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(users or "~/.cache").expanduser() / "patchlight"


def write_atomic(path: str | Path, data: bytes, durable: bool = False) -> Path:
    """Write `data` under a temporary name beside `path`, then rename: nobody ever meets half a file.

    `durable` has it on the disk before the rename, so that not even a power cut leaves an empty one.
    """
    path = Path(path)
    with _part(path, data, durable) as part:
        os.replace(part, path)
    return path


@contextlib.contextmanager
def _part(path: Path, data: bytes, durable: bool) -> Iterator[str]:
    """The name of a file beside `path` with `data` in it; what is left of it in the end goes."""
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(part, 0o644)
        yield part
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)


def finite_or_none(value: Any) -> Any:
    """A value as JSON has it: NaN and infinity, also inside of mappings and lists, become None.

    >>> finite_or_none({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite_or_none(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_cell(value: Any) -> Any:
    """A value as a cell of a CSV file: text that a spreadsheet would take for a formula gets a ' before it.

    >>> cell("=1+1"), cell(-1.5)
    ("'=1+1", -1.5)
    """
    return f"'{value}" if isinstance(value, str) and re.match(FORMULA, value) else value


def check_writable(path: str | Path) -> None:
    """Refuse, before any work is done, a path below something that is no folder or may not be written to."""
    path = Path(path).absolute()
    if path.is_dir():
        above = path
    else:
        above = next(p for p in path.parents if p.exists())
    if not above.is_dir():
        raise PatchlightError(f"'{path}' cannot be written: '{above}' is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PatchlightError(f"'{path}' cannot be written: no permission to write in '{above}'")
