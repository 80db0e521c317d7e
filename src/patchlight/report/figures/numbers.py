"""The numbers that a figure shows: recorded with the figure, and written as a table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.core.errors import PatchlightError
from patchlight.core.files import csv_text, finite_or_none, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureNumber:
    """A number that a figure shows.

    Attributes:
        panel: Title of the panel.
        series: The line, row or method.
        axis: Label of the x axis.
        x: Position on the x axis.
        quantity: What the number is.
        value: The number, or the mean over images.
        low: Lower end of the 95 % interval; NaN if there is none.
        high: Upper end of the interval.
        images: Number of images.
    """

    panel: str
    series: str
    axis: str
    x: str
    quantity: str
    value: float
    low: float = math.nan
    high: float = math.nan
    images: int | None = None


def record(
    where: Axes | Figure,
    series: str,
    value: float,
    interval: tuple[float, float] = (math.nan, math.nan),
    *,
    x: Any = "",
    images: int | None = None,
    panel: str = "",
    quantity: str = "",
) -> None:
    """Record a number with the figure that shows it; the other arguments are fields of `FigureNumber`.

    Args:
        where: The axes, whose title and labels are the defaults of `panel`, `axis` and `quantity`; or the figure.
        interval: The 95 % interval, `low` and `high`.
    """
    axes: Any = where if hasattr(where, "get_ylabel") else None
    numbers = getattr(where if axes is None else axes.figure, "numbers", None)
    if numbers is not None:
        place = f"{x:g}" if isinstance(x, float) else str(x)
        numbers.append((axes, FigureNumber(panel, series, "", place, quantity, float(value), *interval, images)))


def numbers_of(figure: Figure) -> list[FigureNumber]:
    """The recorded numbers of a figure, with the current labels of their axes."""
    return [number if axes is None else _with_words(number, axes) for axes, number in getattr(figure, "numbers", ())]


def _with_words(number: FigureNumber, axes: Axes) -> FigureNumber:
    """A number with the labels of its axes; panels that share a y axis share its label."""
    sharing = [axes, *axes.get_shared_y_axes().get_siblings(axes)]
    y_words = next((panel.get_ylabel() for panel in sharing if panel.get_ylabel()), "")
    return replace(
        number,
        panel=number.panel or " ".join(axes.get_title().split()),
        axis=" ".join(axes.get_xlabel().split()) if number.x else "",
        quantity=number.quantity or " ".join(y_words.split()),
    )


def check_numbers_path(path: str | Path) -> None:
    """Raise an error unless the path is a CSV or JSON file."""
    if Path(path).suffix.lower() not in (".csv", ".json"):
        raise PatchlightError(f"the numbers of a figure cannot be written to '{path}'; name a .csv or .json file")


def write_numbers(figure: Figure, path: str | Path) -> Path:
    """Write the numbers of a figure as CSV or JSON, atomically."""
    check_numbers_path(path)
    rows = [finite_or_none(asdict(number)) for number in numbers_of(figure)]
    if Path(path).suffix.lower() == ".json":
        return write_atomic(path, (json.dumps(rows, indent=1, ensure_ascii=False) + "\n").encode())
    head = [f.name for f in fields(FigureNumber)]
    return write_atomic(path, csv_text(head, (row.values() for row in rows)).encode())
