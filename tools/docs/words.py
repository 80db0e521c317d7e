"""Docstrings and tables as Markdown and reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import dedent
from typing import Any

from patchlight.core.registry import split_docstring

_CODE = re.compile(r"(`[^`]+`)")


def as_markdown(text: str) -> str:
    """Plain text with `code`, as Markdown; everything else is escaped."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|#~$])", r"\\\1", part) for part in _CODE.split(text)
    )


def as_rst(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring, plain text with `code`, as reStructuredText; examples (`>>>`) are kept."""
    found: list[str] = []
    example = False
    for line in lines:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        found.append(line if example else _rst_line(line))
    return found


def _rst_line(line: str) -> str:
    return "".join(
        f"`{part}`" if part.startswith("`") else re.sub(r"([\\*_|])", r"\\\1", part) for part in _CODE.split(line)
    )


def _blocks(function: Any) -> list[str]:
    """The blocks of a docstring that blank lines separate, without `Args:`."""
    return [part for part in re.split(r"\n\s*\n", split_docstring(function)[0]) if part.strip()]


def paragraphs(function: Any) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(part.split()) for part in _blocks(function)]


def as_blocks(function: Any) -> list[str]:
    """A docstring as blocks of Markdown: paragraphs, and indented formulas line by line. `Args:` is left out."""
    return [
        f"```text\n{dedent(part)}\n```" if part.startswith(" ") else as_markdown(" ".join(part.split()))
        for part in _blocks(function)
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    cells = [[str(cell).replace("\n", " ") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def code(value: object) -> str:
    """A value as code in a cell of a table; a dash for none."""
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return f"`{text}`" if text else "–"


def toctree(entries: Iterable[str], *, hidden: bool = True, caption: str = "") -> str:
    """A toctree of pages."""
    options = [":hidden:"] * hidden + [f":caption: {caption}"] * bool(caption)
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])
