"""Formulas of methods, set by matplotlib as outlines in the page: no script, no network, and the colour of the text."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Sequence
from functools import cache

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import TextPath

from tools.docs.staging import DOCS

SIZE = 17
LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"}


@cache
def formulas() -> dict[str, list[str]]:
    """The lines of TeX of each method, from docs/formulas.toml."""
    return tomllib.loads((DOCS / "formulas.toml").read_text(encoding="utf-8"))


def line(tex: str) -> str:
    """One line of TeX as an SVG that takes the colour of the text around it."""
    path = TextPath((0, 0), f"${tex}$", size=SIZE, prop=FontProperties(math_fontfamily="stix"))
    box = path.get_extents()
    outline = "".join(
        LETTERS[code] + ("" if code == Path.CLOSEPOLY else " ".join(f"{value:.1f}" for value in points))
        for points, code in path.iter_segments(curves=True, simplify=False)
    )
    left, top, width, height = box.x0 - 1, -box.y1 - 1, box.width + 2, box.height + 2
    return (
        f'<svg role="img" aria-label="{html.escape(tex)}" width="{width:.0f}" '
        f'viewBox="{left:.1f} {top:.1f} {width:.1f} {height:.1f}"><path transform="scale(1 -1)" d="{outline}"/></svg>'
    )


def formula(lines: Sequence[str]) -> str:
    """Lines of TeX, each below the other."""
    return f'<div class="formula">{"".join(map(line, lines))}</div>'
