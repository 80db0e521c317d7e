"""Rows of the measured tables in docs/results, by method."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from patchlight.methods.base import METHODS
from tools.docs.staging import DOCS

_NAME = re.compile(r"^[`*]*([\w+.-]+)[`*]*(?:[ (,].*)?$")


@dataclass(frozen=True)
class Rows:
    """Some rows of one table, with its page, heading and columns."""

    page: str
    title: str
    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables(page: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """The tables of a page, each with the heading above it."""
    heading, block = "", list[str]()
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 2:
            yield heading, _cells(block[0]), [_cells(row) for row in block[2:]]
        block = []


def method_of(cell: str) -> str:
    """The method that the first cell of a row names, or an empty string."""
    match = _NAME.match(cell)
    if match is None:
        return ""
    found = METHODS.lookup(match[1].lower().split(".")[0])
    return found.name if found is not None else ""


def measured(name: str, most: int = 6) -> list[Rows]:
    """Tables with rows of a method: these rows, and that of `random` if there is one."""
    found = []
    for page in sorted((DOCS / "results").glob("*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for heading, head, rows in tables(page):
            own = [row for row in rows if method_of(row[0]) == name and any(c.isdigit() for c in "".join(row[1:]))]
            if head[0].lower() != "method" or not own:
                continue
            random = [row for row in rows if method_of(row[0]) == "random" and name != "random"]
            found.append(Rows(page.stem, title, heading if heading != title else "", head, [*own, *random]))
    return found[:most]
