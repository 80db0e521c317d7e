"""Sheets of paper: pictures in rows, or axes, with a note below, at a column's or a page's width, at 300 dots an inch.

Lines are in Okabe and Ito's colours, which colour-blind readers tell apart; bands are 95 % intervals over images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchlight.core.drawing.heat import colour_map
from patchlight.core.drawing.pictures import SCALES, colour_bar, inches
from patchlight.core.statistics import FEWEST, bootstrap_weights
from patchlight.report.figures.numbers import record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from patchlight.core.drawing.shown import ShownFigure

COLUMN, PAGE = 3.3, 6.9
"""Widths in inches: of a column of a paper, and of its page."""
DPI = 300
WORDS, NOTE = 7.0, 5.5
LINE, NOTE_LINE = 0.125, 0.095
EDGE, GAP, LABEL_GAP = 0.04, 0.035, 0.06
WIDEST_LABEL = 0.75
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's, the yellow last."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Tile:
    """A picture with words above and below it; `numbers` are those in the words, by what they are."""

    picture: Image.Image
    title: str = ""
    caption: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Pictures side by side, with words to their left."""

    cells: Sequence[Tile | None]
    label: str = ""


def style(index: int) -> dict[str, Any]:
    """How the line of this number is drawn: its colour, marker and, beyond the colours, dashes."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "markersize": 3.2,
        "linewidth": 1.1,
    }


def wrapped(words: str, width: float, size: float = WORDS, behind: str = " ∘.-/") -> list[str]:
    """Lines that fit a width in inches: broken behind spaces and a few signs (not inside a number), else anywhere."""
    lines = [""]
    marked = re.sub(rf"([{re.escape(behind)}])(?!\d)| ", lambda found: found[0] + "\0", words)
    for part in marked.split("\0"):
        for piece in _pieces(part, width, size):
            if lines[-1] and inches((lines[-1] + piece).rstrip(), size) > width:
                lines.append("")
            lines[-1] += piece
    return [line.strip() for line in lines if line.strip()]


def _pieces(part: str, width: float, size: float) -> list[str]:
    if inches(part.rstrip(), size) <= width:
        return [part]
    most = next((n for n in range(len(part) - 1, 1, -1) if inches(part[:n], size) <= width), 1)
    humps = (n for n in range(most, 0, -1) if part[n].isupper() and part[n - 1].islower())
    most = next(humps, most)  # Smooth|Grad
    return [part[:most], *_pieces(part[most:], width, size)]


def sheet(note: str, height: float, width: float = PAGE) -> ShownFigure:
    """An empty figure for axes (which keep out of each other's way), with the note below."""
    from patchlight.core.drawing.shown import ShownFigure

    lines = wrapped(note, width - 2 * EDGE, NOTE, " ")
    below = EDGE + NOTE_LINE * len(lines) + (0.03 if lines else 0.0)
    whole = height + below
    fig = ShownFigure(figsize=(width, whole), dpi=DPI, facecolor="white", layout="constrained")
    engine: Any = fig.get_layout_engine()
    engine.set(rect=(0.0, below / whole, 1.0, 1.0 - below / whole), w_pad=0.03, h_pad=0.03)
    _write_note(fig, lines, width, whole)
    return fig


def _write_note(fig: ShownFigure, lines: Sequence[str], width: float, height: float) -> None:
    for n, line in enumerate(reversed(lines)):
        y = (EDGE + n * NOTE_LINE) / height
        words = fig.text(EDGE / width, y, line, size=NOTE, color="0.35", va="bottom")
        words.set_in_layout(False)


def pictures(
    note: str,
    rows: Sequence[Row],
    width: float = PAGE,
    scales: Sequence[bool] = (False,),
    largest: float = 1.15,
) -> ShownFigure:
    """Rows of pictures, as large as the width allows and at most `largest` inches, with the note below.

    Few of them make a narrower sheet.

    `scales` are the kinds of heat whose colours are explained: unsigned (False) and signed (True).
    """
    from patchlight.core.drawing.shown import ShownFigure

    labels = [wrapped(row.label, WIDEST_LABEL) for row in rows]
    left = EDGE + max((inches(line, WORDS) + LABEL_GAP for label in labels for line in label), default=0.0)
    columns = max(len(row.cells) for row in rows)
    side = min(largest, (width - left - EDGE - (columns - 1) * GAP) / columns)
    first = next(cell for row in rows for cell in row.cells if cell is not None).picture
    tall = side * first.height / first.width
    width = max(min(width, COLUMN), left + EDGE + columns * (side + GAP) - GAP)
    titles = [_above(row, side, "title") for row in rows]
    captions = [_above(row, side, "caption") for row in rows]
    heads = [LINE * max(map(len, own), default=0) + (0.03 if any(own) else 0.0) for own in titles]
    feet = [LINE * max(map(len, own), default=0) + (0.03 if any(own) else 0.0) for own in captions]
    lines = wrapped(note, width - 2 * EDGE, NOTE, " ")
    bottom = EDGE + NOTE_LINE * len(lines) + 0.05 + LINE * len(scales)
    height = EDGE + sum(heads) + sum(feet) + len(rows) * (tall + GAP) + bottom
    fig = ShownFigure(figsize=(width, height), dpi=DPI, facecolor="white")

    def place(picture: Any, x: float, y: float, w: float, h: float) -> None:
        axes = fig.add_axes((x / width, y / height, w / width, h / height))
        axes.imshow(np.asarray(picture), interpolation="antialiased", aspect="auto")
        axes.set_axis_off()

    def write(words: str, x: float, y: float, size: float = WORDS, **where: Any) -> None:
        fig.text(x / width, y / height, words, size=size, **where)

    y = height - EDGE
    for row, label, title, caption, head, foot in zip(rows, labels, titles, captions, heads, feet, strict=True):
        y -= head + tall
        middle = y + tall / 2 + LINE * (len(label) - 1) / 2
        for n, line in enumerate(label):
            write(line, left - LABEL_GAP, middle - n * LINE, ha="right", va="center")
        for c, cell in enumerate(row.cells):
            x = left + c * (side + GAP)
            if cell is not None:
                place(cell.picture, x, y, side, tall)
            for n, line in enumerate(reversed(title[c])):
                write(line, x + side / 2, y + tall + 0.035 + n * LINE, ha="center", va="bottom")
            for n, line in enumerate(caption[c]):
                write(line, x + side / 2, y - 0.02 - n * LINE, ha="center", va="top")
        y -= foot + GAP
    _write_scales(write, place, scales, bottom)
    _write_note(fig, lines, width, height)
    _record_cells(fig, rows)
    return fig


def _record_cells(fig: ShownFigure, rows: Sequence[Row]) -> None:
    """Keep the numbers below pictures; a row without a label goes by the title of its first picture."""
    for row in rows:
        panel = row.label or next((cell.title for cell in row.cells if cell is not None), "")
        for cell in row.cells:
            for quantity, value in ({} if cell is None else cell.numbers).items():
                record(fig, cell.title if cell is not None else "", value, panel=panel, quantity=quantity)


def _above(row: Row, side: float, which: str) -> list[list[str]]:
    return [[] if cell is None else wrapped(getattr(cell, which), side) for cell in row.cells]


def _write_scales(write: Any, place: Any, scales: Sequence[bool], bottom: float) -> None:
    for k, signed in enumerate(scales):
        low, high = SCALES[signed]
        y, begin = bottom - (k + 1) * LINE, EDGE + inches(low, NOTE) + 0.05
        write(low, EDGE, y + 0.035, NOTE, va="center", color="0.25")
        place(colour_bar(signed), begin, y, 0.6, 0.07)
        write(high, begin + 0.65, y + 0.035, NOTE, va="center", color="0.25")


def tidy(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Small words, no box, a faint grid."""
    axes.set_title(title, size=WORDS + 0.5)
    axes.set_xlabel(x, size=WORDS)
    axes.set_ylabel(y, size=WORDS)
    axes.tick_params(labelsize=WORDS - 0.5, length=2, width=0.5)
    axes.grid(color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.5)


def legend(axes: Axes, columns: int = 0, fontsize: float = WORDS - 0.5, loc: Any = "best") -> None:
    """The names of the lines: inside of the axes, or in so many columns above all of the figure."""
    if columns:
        handles, words = axes.get_legend_handles_labels()
        above: Any = {"loc": "outside upper center", "ncols": columns}
        axes.get_figure().legend(handles, words, fontsize=fontsize, frameon=False, **above)  # type: ignore[union-attr]
    else:
        axes.legend(fontsize=fontsize, frameon=False, loc=loc)


def show(axes: Axes, picture: Any, title: str = "", label: str = "") -> None:
    """A picture instead of axes, with words above and to its left."""
    axes.imshow(np.asarray(picture), interpolation="antialiased")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, size=WORDS)
    axes.set_ylabel(label, size=WORDS)
    for spine in axes.spines.values():
        spine.set_visible(False)


def mean_interval(values: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The mean over images of values [B,P] and its bootstrapped 95 % interval [P] each; NaN below six images."""
    values = values.double().cpu()
    mean = values.mean(0)
    if len(values) < FEWEST:
        nothing = torch.full_like(mean, torch.nan)
        return mean, nothing, nothing
    spread = bootstrap_weights(len(values), seed=seed) @ values / len(values)
    low, high = torch.quantile(spread, torch.tensor([0.025, 0.975], dtype=spread.dtype), dim=0)
    return mean, low, high


def line(
    axes: Axes,
    x: Sequence[float] | Tensor,
    values: Tensor,
    label: str,
    index: int,
    names: Sequence[Any] | None = None,
    **more: Any,
) -> None:
    """The mean of values [B,P] over x [P], in the colour of a number, with its interval as a band.

    The numbers are kept with the figure; `names` are the places on the axis by name.
    """
    mean, low, high = mean_interval(values)
    places = torch.as_tensor(x).tolist() if names is None else names
    for place, *own in zip(places, mean.tolist(), low.tolist(), high.tolist(), strict=True):
        record(axes, label, own[0], (own[1], own[2]), x=place, images=len(values))
    where = torch.as_tensor(x).double().cpu()
    looks = {**style(index), **more}
    axes.plot(where.numpy(), mean.numpy(), label=label, **looks)
    if bool(low.isfinite().all()):
        axes.fill_between(
            where.numpy(), low.numpy(), high.numpy(), color=looks["color"], alpha=0.18, linewidth=0, zorder=1
        )


def coloured(
    values: Tensor, ends: tuple[float, float] | None = None, colours: str = "inferno", side: int = 240
) -> Image.Image:
    """Numbers [h,w] as colours between two ends, else from the lowest to the highest; at least `side` pixels high."""
    low, high = (float(values.min()), float(values.max())) if ends is None else ends
    scaled = np.clip((values.detach().double().cpu().numpy() - low) / (high - low if high > low else 1.0), 0, 1)
    picture = Image.fromarray(np.uint8(np.round(255 * np.asarray(colour_map(colours)(scaled))[..., :3])))
    times = max(1, -(-side // picture.height))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def in_bands(cells: Sequence[Tile], most: int) -> list[Row]:
    """Cells in rows of at most so many, all about as long."""
    count = -(-len(cells) // most)
    each = -(-len(cells) // count)
    return [Row(cells[begin : begin + each]) for begin in range(0, len(cells), each)]


def dots(
    axes: Axes, found: Sequence[tuple[float, float, float]], labels: Sequence[str], colours: Sequence[str]
) -> None:
    """A dot for each mean, the first uppermost, with its interval (low, high) as a bar."""
    places = np.arange(len(found))[::-1]
    for place, (mean, low, high), colour in zip(places, found, colours, strict=True):
        if low == low:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6, alpha=0.45, solid_capstyle="butt")
        axes.plot([mean], [place], "o", color=colour, markersize=3.4)
    axes.set_yticks(places, labels)
    axes.set_ylim(-0.6, len(found) - 0.4)
