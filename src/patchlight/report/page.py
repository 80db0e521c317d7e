"""What pages that open offline share: colours of lines, round numbers on axes, pictures inside the file, templates."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import TYPE_CHECKING

from patchlight.core.drawing.charts import PALETTE as PALETTE
from patchlight.core.drawing.page import data_url as data_url

if TYPE_CHECKING:
    from jinja2 import Template


def page_template(package: str, name: str) -> Template:
    """A template of a package's folder `templates`: every word is escaped, and a name that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def page_style() -> str:
    """The style sheet that pages begin with; it may stand in a style element as it is."""
    return files("patchlight.core.drawing").joinpath("templates", "page.css").read_text(encoding="utf-8")


def round_values(low: float, high: float) -> list[float]:
    """The multiples of 1, 2 or 5 times a power of ten from low to high: at most seven, coarse enough to read.

    >>> round_values(-0.07, 0.51)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9))) / 10
    factor = next(f for f in (1, 2, 5, 10, 20, 50) if (high - low) / (f * step) <= 6)
    size = factor * step
    return [round(k * size, 12) for k in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]
