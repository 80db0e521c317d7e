"""What there is, known without importing torch: listed.json, which `python -m tools.listed` makes of the registries.

It is believed as long as the files it was made of are the same; the command line then answers at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from patchlight.core.plugins import GROUP

TABLE = Path(__file__).with_name("listed.json")
_HERE = Path(__file__).parents[1]
_SOURCES = (
    "methods/*.py",
    "metrics/*.py",
    "evidence/*.py",
    "data/*.py",
    "report/figures/*.py",
    "core/registry.py",
    "anatomy/load.py",
    "anatomy/names.py",
    "cli/tables.py",
)


@cache
def table() -> dict[str, Any]:
    """The table as it lies there: methods, metrics, figures, models, kinds of data, and the sums of its sources."""
    read: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return read


def rows(what: str) -> list[dict[str, Any]] | None:
    """Methods, metrics or figures; None where the table is older than what it was made of, or plugins are installed."""
    believed = table()["sources"] == sums() and not metadata.entry_points(group=GROUP)
    known: list[dict[str, Any]] | None = table()[what] if believed else None
    return known


def models() -> list[str] | None:
    """The names of the models; None where another timm is installed than the table was made with."""
    known: list[str] | None = (
        table()["models"] if rows("methods") and table()["timm"] == metadata.version("timm") else None
    )
    return known


def sums() -> dict[str, str]:
    """A short hash of every file that the table depends on."""
    files = sorted(path for pattern in _SOURCES for path in _HERE.glob(pattern))
    return {path.relative_to(_HERE).as_posix(): _sum(path) for path in files}


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:12]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names with `pattern` in them, or like it where it has wildcards.

    >>> matching(["deit_tiny", "vit_tiny"], "deit*"), matching(["deit_tiny", "vit_tiny"], "vit")
    (['deit_tiny'], ['vit_tiny'])
    """
    wanted = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return sorted({name for name in names if fnmatch(name, wanted)})
