"""The formulas of methods and metrics, from docs/formulas.toml, as blocks of MathML for their pages."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from html import escape
from typing import Any

from tools.docs.mathml import mathml
from tools.docs.staging import DOCS

_PIECES = re.compile(r"(\$[^$]+\$[,.;:)’]*|`[^`]+`)")


@cache
def known() -> Any:
    """All there is: `symbols`, and by name `methods` and `metrics`."""
    return tomllib.loads((DOCS / "formulas.toml").read_text(encoding="utf-8"))


def in_html(words: str) -> str:
    """Words with `code` and $formulas$ in them as HTML."""

    def piece(part: str) -> str:
        if part.startswith("$"):
            _, latex, marks = part.split("$")
            return f'<span class="kept">{mathml(latex)}{marks}</span>' if marks else mathml(latex)
        return (
            f'<code class="docutils literal">{escape(part[1:-1])}</code>'
            if part.startswith("`")
            else escape(part, quote=False)
        )

    return "".join(map(piece, _PIECES.split(words)))


def _raw(html: str) -> str:
    return f"```{{raw}} html\n{html}\n```"


def _line(latex: str) -> str:
    """A line of formulas; those that \\qquad parts stand below each other where there is no room."""
    return '<div class="formula">' + "".join(f"<div>{mathml(p, block=True)}</div>" for p in parts(latex)) + "</div>"


def parts(latex: str) -> list[str]:
    """The formulas of a line."""
    return [part.strip() for part in latex.split(r"\qquad")]


def block(kind: str, name: str) -> str:
    """The formulas of one of the `methods` or `metrics` and what their symbols are; nothing where it has none."""
    entry = known()[kind][name]
    if "none" in entry:
        return ""
    shown = "\n".join(map(_line, entry["latex"]))
    index = "index.html" if kind == "methods" else "../methods/index.html"
    more = f'<a href="{index}#symbols">Symbols of all pages</a>'
    return _raw(f'{shown}\n<p class="symbols">{in_html(entry["where"])} {more}.</p>')


def symbols() -> str:
    """The section of the methods' index that says what symbols mean on every page."""
    rows = "\n".join(
        f"<tr><td>{in_html(symbol)}</td><td>{in_html(words)}</td></tr>" for symbol, words in known()["symbols"].items()
    )
    table = f'<div class="table-wrapper docutils container"><table class="docutils">\n{rows}\n</table></div>'
    return f"## Symbols\n\n{_raw(table)}"
