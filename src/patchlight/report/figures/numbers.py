"""The numbers that a figure shows, kept with it and written as a table beside it."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchlight.core.errors import PatchlightError
from patchlight.core.files import csv_cell, finite_or_none, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureNumber:
    """A number of a figure: what it is (`quantity`), of which `series` and panel, at which `x` of an axis.

    `low` and `high` are the 95 % interval of a mean over `images`; NaN where there is none.
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
    """Keep a number with the figure that shows it.

    Args:
        where: The axes it is drawn in, or the figure.
        series: Which of the lines, rows or methods it belongs to.
        value: The number, or the mean over images.
        interval: Its 95 % interval.
        x: Its place on the axis: a number or a name.
        images: How many images it is the mean of.
        panel: The panel's name; by default the title of the axes.
        quantity: What the number is; by default the words on the y axis.
    """
    axes: Any = where if hasattr(where, "get_ylabel") else None
    numbers = getattr(where if axes is None else axes.figure, "numbers", None)
    if numbers is not None:
        place = f"{x:g}" if isinstance(x, float) else str(x)
        numbers.append((axes, FigureNumber(panel, series, "", place, quantity, float(value), *interval, images)))


def numbers_of(figure: Figure) -> list[FigureNumber]:
    """The numbers of a figure, with the words of their axes as they are now."""
    return [number if axes is None else _with_words(number, axes) for axes, number in getattr(figure, "numbers", ())]


def _with_words(number: FigureNumber, axes: Axes) -> FigureNumber:
    """A number with the words of its axes; where panels share the y axis, those of the panel that has them."""
    sharing = [axes, *axes.get_shared_y_axes().get_siblings(axes)]
    y_words = next((one.get_ylabel() for one in sharing if one.get_ylabel()), "")
    return replace(
        number,
        panel=number.panel or " ".join(axes.get_title().split()),
        axis=" ".join(axes.get_xlabel().split()) if number.x else "",
        quantity=number.quantity or " ".join(y_words.split()),
    )


def check_numbers_path(path: str | Path) -> None:
    """Refuse a file that is neither CSV nor JSON."""
    if Path(path).suffix.lower() not in (".csv", ".json"):
        raise PatchlightError(f"'{path}' cannot hold the numbers of a figure; name a .csv or .json file")


def write_numbers(figure: Figure, path: str | Path) -> Path:
    """Write the numbers of a figure as CSV or JSON, whole or not at all."""
    check_numbers_path(path)
    rows = [finite_or_none(asdict(number)) for number in numbers_of(figure)]
    if Path(path).suffix.lower() == ".json":
        return write_atomic(path, (json.dumps(rows, indent=1, ensure_ascii=False) + "\n").encode())
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([f.name for f in fields(FigureNumber)])
    writer.writerows([["" if value is None else csv_cell(value) for value in row.values()] for row in rows])
    return write_atomic(path, out.getvalue().encode())
