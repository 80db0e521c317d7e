"""Figures for papers: rows of pictures, or axes, with a note below, as wide as a column or a page, at 300 dpi.

Lines have Okabe and Ito's colours, which colour-blind readers can distinguish; bands are 95 % intervals over images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchlight.core.drawing.heat import colour_map
from patchlight.core.drawing.pictures import Print, draw_rows, label_width, wrap_lines, write_note
from patchlight.core.drawing.pictures import Row as Row
from patchlight.core.drawing.pictures import Tile as Tile
from patchlight.core.statistics import FEWEST, bootstrap_weights
from patchlight.report.figures.numbers import record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from patchlight.core.drawing.shown import ShownFigure

COLUMN, PAGE = 3.3, 6.9
"""Widths of a paper's column and page, in inches."""
DPI = 300
WORDS = 7.0
PAPER = Print(WORDS, 5.5, 0.125, 0.095, 0.04, 0.035, 0.06)
WIDEST_LABEL = 0.75
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's colours, yellow last."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


def style(index: int) -> dict[str, Any]:
    """Style of the line with this index: colour, marker and, after the last colour, dashes."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "markersize": 3.2,
        "linewidth": 1.1,
    }


def blank(note: str, height: float, width: float = PAGE) -> ShownFigure:
    """An empty figure with the note below; its axes are laid out without overlaps."""
    from patchlight.core.drawing.shown import ShownFigure

    lines = wrap_lines(note, width - 2 * PAPER.edge, PAPER.small, " ")
    below = PAPER.edge + PAPER.small_line * len(lines) + (0.03 if lines else 0.0)
    total = height + below
    fig = ShownFigure(figsize=(width, total), dpi=DPI, facecolor="white", layout="constrained")
    engine: Any = fig.get_layout_engine()
    engine.set(rect=(0.0, below / total, 1.0, 1.0 - below / total), w_pad=0.03, h_pad=0.03)
    write_note(fig, lines, PAPER)
    return fig


def pictures(
    note: str,
    rows: Sequence[Row],
    width: float = PAGE,
    scales: Sequence[bool] = (False,),
    largest: float = 1.15,
) -> ShownFigure:
    """A figure of rows of pictures with the note below.

    The figure is at most `width` inches wide and a picture at most `largest`. `scales` are the colour scales to
    explain: unsigned (False), signed (True).
    """
    fitted = [replace(row, label="\n".join(wrap_lines(row.label, WIDEST_LABEL, WORDS))) for row in rows]
    columns = max(len(row.cells) for row in rows)
    side = min(largest, (width - label_width(fitted, PAPER) - PAPER.edge - (columns - 1) * PAPER.gap) / columns)
    fitted = [replace(row, cells=[_wrap_tile(cell, side) for cell in row.cells]) for row in fitted]
    fig = draw_rows(fitted, side, PAPER, DPI, scales, note, min(width, COLUMN))
    _record_cells(fig, rows)
    return fig


def _wrap_tile(tile: Tile | None, side: float) -> Tile | None:
    if tile is None:
        return None
    title, caption = ("\n".join(wrap_lines(words, side, WORDS)) for words in (tile.title, tile.caption))
    return replace(tile, title=title, caption=caption)


def _record_cells(fig: ShownFigure, rows: Sequence[Row]) -> None:
    """Record the numbers in captions; a row without a label is named by the title of its first picture."""
    for row in rows:
        panel = row.label or next((cell.title for cell in row.cells if cell is not None), "")
        for cell in row.cells:
            for quantity, value in ({} if cell is None else cell.numbers).items():
                record(fig, cell.title if cell is not None else "", value, panel=panel, quantity=quantity)


def tidy(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Set the title and labels in small print, with two spines and a faint grid."""
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
    """Add a legend: inside the axes, or in some columns above the figure."""
    if columns:
        handles, words = axes.get_legend_handles_labels()
        above: Any = {"loc": "outside upper center", "ncols": columns}
        axes.get_figure().legend(handles, words, fontsize=fontsize, frameon=False, **above)  # type: ignore[union-attr]
    else:
        axes.legend(fontsize=fontsize, frameon=False, loc=loc)


def show(axes: Axes, picture: Any, title: str = "", label: str = "") -> None:
    """Show a picture in axes without ticks, with a title above and a label to its left."""
    axes.imshow(np.asarray(picture), interpolation="antialiased")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, size=WORDS)
    axes.set_ylabel(label, size=WORDS)
    for spine in axes.spines.values():
        spine.set_visible(False)


def mean_interval(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [P] over images of values [B,P], and the ends of its bootstrap 95 % interval; NaN below six images."""
    values = values.double().cpu()
    mean = values.mean(0)
    if len(values) < FEWEST:
        nothing = torch.full_like(mean, torch.nan)
        return mean, nothing, nothing
    spread = bootstrap_weights(len(values)) @ values / len(values)
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
    """Draw the mean of values [B,P] over x [P] with its interval as a band, and record the numbers.

    `index` is the number of the line, for its style, which `more` changes. `names` are the names of the positions in
    the recorded numbers.
    """
    mean, low, high = mean_interval(values)
    places = torch.as_tensor(x).tolist() if names is None else names
    for place, *numbers in zip(places, mean.tolist(), low.tolist(), high.tolist(), strict=True):
        record(axes, label, numbers[0], (numbers[1], numbers[2]), x=place, images=len(values))
    where = torch.as_tensor(x).double().cpu()
    looks = {**style(index), **more}
    axes.plot(where.numpy(), mean.numpy(), label=label, **looks)
    if bool(low.isfinite().all()):
        axes.fill_between(
            where.numpy(), low.numpy(), high.numpy(), color=looks["color"], alpha=0.18, linewidth=0, zorder=1
        )


def colour_picture(values: Tensor, ends: tuple[float, float] | None = None, colours: str = "inferno") -> Image.Image:
    """Numbers [h,w] as colours, between `ends` or the lowest and the highest; at least 240 pixels high."""
    low, high = (float(values.min()), float(values.max())) if ends is None else ends
    scaled = np.clip((values.detach().double().cpu().numpy() - low) / (high - low if high > low else 1.0), 0, 1)
    picture = Image.fromarray(np.uint8(np.round(255 * np.asarray(colour_map(colours)(scaled))[..., :3])))
    times = max(1, -(-240 // picture.height))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def dots(
    axes: Axes, values: Sequence[tuple[float, float, float]], labels: Sequence[str], colours: Sequence[str]
) -> None:
    """Draw a dot for each mean, the first on top, with its interval (low, high) as a bar."""
    places = np.arange(len(values))[::-1]
    for place, (mean, low, high), colour in zip(places, values, colours, strict=True):
        if low == low:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6, alpha=0.45, solid_capstyle="butt")
        axes.plot([mean], [place], "o", color=colour, markersize=3.4)
    axes.set_yticks(places, labels)
    axes.set_ylim(-0.6, len(values) - 0.4)
