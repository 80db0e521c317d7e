"""Writes files completely or not at all."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchlight.core.errors import PatchlightError

FORMULA = r"^[=+\-@\t\r]"
"""Text that begins with one of these characters is a formula in spreadsheets."""


def cache_folder() -> Path:
    """The folder of cached files: PATCHLIGHT_CACHE, else patchlight/ below XDG_CACHE_HOME or ~/.cache."""
    folder, base = os.environ.get("PATCHLIGHT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(folder) if folder else Path(base or "~/.cache").expanduser() / "patchlight"


def write_atomic(path: str | Path, data: bytes, durable: bool = False) -> Path:
    """Write a file under a temporary name, then rename it, so that it is never incomplete.

    Args:
        path: The file; missing folders are created.
        data: Its content.
        durable: Flush to the disk before the rename, so that a power cut does not leave an empty file.
    """
    path, part = Path(path), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:
        raise PatchlightError(f"'{path}' cannot be written: {error.strerror or error}") from error
    finally:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)
    return path


def finite_or_none(value: Any) -> Any:
    """A value for JSON: NaN and infinity become None, also inside mappings and lists.

    >>> finite_or_none({"a": [1.5, float("nan")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite_or_none(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file: text that a spreadsheet would interpret as a formula is prefixed with an apostrophe.

    >>> csv_cell("=1+1"), csv_cell(-1.5)
    ("'=1+1", -1.5)
    """
    return f"'{value}" if isinstance(value, str) and re.match(FORMULA, value) else value


def csv_text(head: Sequence[str], rows: Iterable[Iterable[Any]], end: str = "\n") -> str:
    """Rows as CSV, with `end` after each line; None and NaN become empty, and text is escaped by `csv_cell`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator=end)
    writer.writerow(head)
    writer.writerows(["" if v is None or v != v else csv_cell(v) for v in row] for row in rows)
    return out.getvalue()


def check_writable(path: str | Path) -> None:
    """Raise an error if a path cannot be written; call it before long work."""
    path = Path(path).absolute()
    folder = path if path.is_dir() else next(p for p in path.parents if p.exists())
    if not folder.is_dir():
        raise PatchlightError(f"'{path}' cannot be written: '{folder}' is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PatchlightError(f"'{path}' cannot be written: no permission to write in '{folder}'")
