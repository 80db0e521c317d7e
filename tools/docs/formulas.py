"""The formulas of methods and metrics, from docs/formulas.toml, as blocks of MathML for their pages."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from html import escape, unescape
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert_to_element

from tools.docs.staging import DOCS

LIMITS = ("max", "min", "argmax", "argmin")
"""Operators whose index stands below them in a block."""
_PIECES = re.compile(r"(\$[^$]+\$[,.;:)’]*|`[^`]+`)")


@cache
def known() -> Any:
    """All formulas: `symbols`, and by name `methods` and `metrics`."""
    return tomllib.loads((DOCS / "formulas.toml").read_text(encoding="utf-8"))


def mathml(latex: str, block: bool = False) -> str:
    """A formula as an inline or block `math` element; its LaTeX is the alternative text.

    Raises:
        ValueError: The formula contains an unknown command.
    """
    math = convert_to_element(latex, display="block" if block else "inline")
    for element in math.iter():
        element.text = None if element.text is None else unescape(element.text)
        if (element.text or "").startswith("\\"):
            raise ValueError(f"unknown command {element.text} in the formula {latex!r}")
        if block and element.tag == "msub" and element[0].text in LIMITS:
            element.tag = "munder"
    del math.attrib["xmlns"]  # HTML has no namespaces
    math.set("alttext", latex)
    if block:
        rows = list(math)
        semantics = ElementTree.SubElement(math, "semantics")
        for row in rows:
            math.remove(row)
            semantics.append(row)
        ElementTree.SubElement(semantics, "annotation", encoding="application/x-tex").text = latex
    return ElementTree.tostring(math, encoding="unicode")


def in_html(words: str) -> str:
    """Text with `code` and $formulas$, as HTML."""

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
    """A line of formulas; those separated by \\qquad wrap on narrow screens."""
    return '<div class="formula">' + "".join(f"<div>{mathml(p, block=True)}</div>" for p in parts(latex)) + "</div>"


def parts(latex: str) -> list[str]:
    """The formulas of a line."""
    return [part.strip() for part in latex.split(r"\qquad")]


def block(kind: str, name: str) -> str:
    """The formulas of a method or metric with their symbols, or an empty string."""
    entry = known()[kind][name]
    if "none" in entry:
        return ""
    shown = "\n".join(map(_line, entry["latex"]))
    index = "index.html" if kind == "methods" else "../methods/index.html"
    more = f'<a href="{index}#symbols">Symbols of all pages</a>'
    return _raw(f'{shown}\n<p class="symbols">{in_html(entry["where"])} {more}.</p>')


def symbols() -> str:
    """The section of the methods' index that explains the symbols."""
    rows = "\n".join(
        f"<tr><td>{in_html(symbol)}</td><td>{in_html(words)}</td></tr>" for symbol, words in known()["symbols"].items()
    )
    table = f'<div class="table-wrapper docutils container"><table class="docutils">\n{rows}\n</table></div>'
    return f"## Symbols\n\n{_raw(table)}"
