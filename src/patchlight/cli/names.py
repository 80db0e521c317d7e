"""The names that the command line lists and completes, cached so that torch need not be imported for them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.files import cache_folder, write_atomic
from patchlight.core.plugins import GROUP

PACKAGE = Path(__file__).parents[1]
Row = dict[str, Any]
"""A method, metric or figure with everything that is shown of it."""


@cache
def table(kind: Literal["registries", "models"] = "registries") -> dict[str, Any]:
    """Methods, metrics, figures and kinds of data, or the models, from the cache if it is up to date.

    Models have their own table because collecting them imports timm.
    """
    key, place = _key(), hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:8]
    path = cache_folder() / f"names-{kind}-{place}.json"  # one file for each installation
    with contextlib.suppress(OSError, ValueError, KeyError):
        cached: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if cached["key"] == key:
            return cached
    text = json.dumps({"key": key, **(from_registries() if kind == "registries" else _models())})
    with contextlib.suppress(PatchlightError):  # a read-only home folder: they are collected again next time
        write_atomic(path, text.encode())
    collected: dict[str, Any] = json.loads(text)
    return collected


def known_names(rows: Sequence[Row]) -> list[str]:
    """The names and aliases in these rows."""
    return [name for row in rows for name in (row["name"], *row["aliases"])]


def find_row(rows: Sequence[Row], name: str, noun: str) -> Row:
    """The row of that name or alias; an unknown name is refused with the nearest ones."""
    row = next((row for row in rows if name == row["name"] or name in row["aliases"]), None)
    if row is None:
        raise PatchlightError(f"no {noun} is called '{name}'; {nearest(name, known_names(rows))}")
    return row


def from_registries() -> dict[str, Any]:
    """The table, collected from the registries."""
    from patchlight.cli.figure import figure_rows
    from patchlight.data import KINDS
    from patchlight.study.catalogue import RECOMMENDED, method_rows, metric_rows

    return {
        "recommended": RECOMMENDED,
        "methods": method_rows(),
        "metrics": metric_rows(),
        "figures": figure_rows(),
        "data": sorted(KINDS),
    }


def _models() -> dict[str, Any]:
    from patchlight.anatomy.load import list_models

    return {"models": list_models()}


def _key() -> str:
    """A hash of what the names depend on: the package's files, timm's version and installed plugins."""
    named = [*PACKAGE.rglob("*.py"), *(PACKAGE / "recipes" / "figures").glob("*.toml")]
    files = [(path, path.stat()) for path in sorted(named)]
    state = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in files]
    plugins = sorted(f"{p.value} {p.dist and p.dist.version}" for p in metadata.entry_points(group=GROUP))
    return hashlib.sha256(repr((state, metadata.version("timm"), plugins)).encode()).hexdigest()[:16]
