"""Charts as inline SVG for documents that open offline: lines, dots with intervals, and mean ranks.

Matplotlib draws them without pyplot; equal data give equal bytes. Colours are CSS variables (`--m0`, …, `--ink`,
`--soft`, `--line`) with a default, so that a page can set others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from patchlight.core.drawing.pictures import vector_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7a4b94", "#8c6d31", "#d62728", "#17becf", "#6b6b6b", "#393b79"),
)
INK, SOFT, RULE = "#1c2430", "#5d6876", "#dfe4ea"
DASHES = ("", "7 3", "2 3")
"""SVG dash patterns of lines; the second and third are for lines beyond the palette."""
WORDS = 11.5
"""Font size, in pixels of the chart."""
_VARIABLES = {
    **{colour: f"var(--m{place}, {colour})" for place, colour in enumerate(PALETTE)},
    **{colour: f"var(--{name}, {colour})" for name, colour in (("ink", INK), ("soft", SOFT), ("line", RULE))},
}


@dataclass(frozen=True)
class Line:
    """A line of a chart; `dash` is an SVG dash pattern. Values that are not finite are gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dash: str = ""


@dataclass(frozen=True)
class Band:
    """A shaded range of values over x."""

    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str = SOFT


@dataclass(frozen=True)
class Dot:
    """A value in a dot chart, with its interval if that is finite; `words` is the tooltip."""

    name: str
    value: float
    colour: str
    low: float = float("nan")
    high: float = float("nan")
    words: str = ""


def line_style(place: int) -> tuple[str, str]:
    """Colour and dash of the line with this index."""
    return PALETTE[place % len(PALETTE)], DASHES[place // len(PALETTE) % len(DASHES)]


def line_chart(
    lines: Sequence[Line],
    *,
    x: str = "",
    y: str = "",
    y_limits: tuple[float, float] | None = None,
    bands: Sequence[Band] = (),
    percent: bool = False,
    legend: bool = False,
    words: str = "",
) -> str:
    """A chart of lines, as inline SVG.

    Args:
        lines: The lines, later ones above earlier ones.
        x: Label of the x axis.
        y: Label of the y axis.
        y_limits: Lowest and highest value of the y axis; by default those of the lines.
        bands: Shaded ranges, below the lines.
        percent: Whether x are fractions, shown as 0 %, 25 %, …, 100 %.
        legend: Whether the names of the lines are shown below the chart.
        words: Description for screen readers.
    """
    fig, axes = _axes((460, 250))
    for band in bands:
        axes.fill_between(band.x, band.low, band.high, color=band.colour, alpha=0.16, linewidth=0, clip_on=False)
    for line in lines:
        dash = tuple(float(length) / 2.2 for length in line.dash.split())
        (drawn,) = axes.plot(line.x, line.y, color=line.colour, linewidth=2.2, clip_on=False)
        drawn.set_linestyle((0, dash) if dash else "-")
        drawn.set_gid(_title(line.name))
    if percent:
        axes.set_xlim(0, 1)
        axes.set_xticks(quarters := (0.0, 0.25, 0.5, 0.75, 1.0), [f"{100 * share:.0f} %" for share in quarters])
    else:
        axes.margins(x=0)
        _round_ticks(axes.xaxis)
    if y_limits is not None:
        axes.set_ylim(y_limits[0], y_limits[1] if y_limits[1] > y_limits[0] else y_limits[0] + 1)
    _round_ticks(axes.yaxis)
    axes.grid(axis="y", color=RULE, linewidth=1, clip_on=False)
    axes.set_xlabel(_drawable(x), parse_math=False)
    axes.set_ylabel(_drawable(y), parse_math=False)
    if legend and lines:
        _legend(fig, axes.lines, [line.name for line in lines])
    return _svg(fig, words, [line.name for line in lines])


def dot_chart(
    dots: Sequence[Dot],
    *,
    x: str = "",
    log: bool = False,
    zero: bool = False,
    legend: Mapping[str, str] | None = None,
    width: float = 760,
    words: str = "",
) -> str:
    """A chart with a row per dot, the first on top, as inline SVG.

    Args:
        dots: Values with their names, colours and intervals.
        x: Label of the axis.
        log: Whether the axis is logarithmic.
        zero: Whether the axis includes zero, with a dashed line there.
        legend: Names of colours, by colour.
        width: Width in pixels; the height follows from the number of dots.
        words: Description for screen readers.
    """
    from matplotlib.lines import Line2D

    fig, axes = _axes((width, 60 + 22 * len(dots)))
    places = range(len(dots))[::-1]
    if log:
        axes.set_xscale("log")
    if zero:
        axes.axvline(0, color=SOFT, linewidth=1, linestyle=(0, (3, 3)), clip_on=False)
    for place, dot in zip(places, dots, strict=True):
        if np.isfinite([dot.low, dot.high]).all():
            axes.plot([dot.low, dot.high], [place, place], color=dot.colour, linewidth=2, clip_on=False)
        (mark,) = axes.plot([dot.value], [place], "o", color=dot.colour, markersize=8, clip_on=False)
        mark.set_gid(_title(dot.words or dot.name))
    axes.set_yticks(list(places), [_drawable(dot.name) for dot in dots], parse_math=False)
    axes.set_ylim(-0.6, len(dots) - 0.4)
    axes.grid(axis="x", color=RULE, linewidth=1, clip_on=False)
    axes.set_xlabel(_drawable(x), parse_math=False)
    _round_ticks(axes.xaxis, log)
    if legend:
        marks = [Line2D([], [], color=colour, marker="o", linestyle="") for colour in legend]
        _legend(fig, marks, list(legend.values()))
    return _svg(fig, words, [dot.words or dot.name for dot in dots])


def rank_chart(
    means: Mapping[str, float],
    groups: Sequence[Sequence[str]],
    critical: float,
    colours: Mapping[str, str],
    words: str = "",
) -> str:
    """A critical-difference diagram: names below an axis of mean ranks; a bar joins those that do not differ.

    Args:
        means: Mean rank by name; 1 is best.
        groups: Names that do not differ significantly.
        critical: The critical difference of two mean ranks.
        colours: Colour by name.
        words: Description for screen readers.
    """
    order = sorted(means, key=lambda name: (means[name], name))
    half, span = (len(order) + 1) // 2, max(len(order) - 1, 1)
    ties = [(means[group[0]], means[group[-1]]) for group in groups]
    deep = 0.6 + 0.35 * len(ties)
    fig, axes = _axes((520, 60 + 19 * (deep + half)))
    axes.set_axis_off()
    axes.set_xlim(1 - 0.55 * span, 1 + 1.55 * span)
    axes.set_ylim(deep + half, -1.6)
    ink: dict[str, Any] = {"color": INK, "linewidth": 1, "clip_on": False}

    def write(text: str, x: float, y: float, across: str, **style: Any) -> None:
        axes.text(x, y, _drawable(text), ha=across, va="center", parse_math=False, **style)

    axes.plot([1, 1 + span], [0, 0], **ink)
    for rank in range(1, len(order) + 1):
        axes.plot([rank, rank], [-0.2, 0], **ink)
        write(str(rank), rank, -0.55, "center", color=SOFT, size=10)
    end = 1 + min(critical, span)
    axes.plot([1, 1, 1, end, end, end], [-1.4, -1.0, -1.2, -1.2, -1.4, -1.0], **ink)
    write(f"CD {critical:.2f}", 1 - 0.03 * span, -1.2, "right", color=SOFT)
    for place, (first, last) in enumerate(ties):
        height = 0.45 + 0.35 * place
        axes.plot([first, last], [height, height], color=INK, linewidth=4, solid_capstyle="round", clip_on=False)
    for place, name in enumerate(order):
        left = place < half
        y, side = deep + (place if left else len(order) - 1 - place) + 0.5, 1 - 0.04 * span if left else 1 + 1.04 * span
        axes.plot([means[name], means[name], side], [0, y, y], color=colours[name], linewidth=1.5, clip_on=False)
        shown = f"{name}  {means[name]:.2f}"
        write(shown, side + (-0.02 if left else 0.02) * span, y, "right" if left else "left", color=INK)
    return _svg(fig, words)


def _axes(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """A figure of a size in pixels with one pair of axes, in the colours of the page."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
    fig.patch.set_visible(False)
    axes = fig.add_subplot()
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(SOFT)
    axes.tick_params(which="both", length=0, labelcolor=SOFT, labelsize=WORDS, pad=7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=SOFT, size=WORDS)
    return fig, axes


def _round_ticks(axis: Any, log: bool = False) -> None:
    """Put ticks at up to seven round numbers; on a logarithmic axis, at powers of ten."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axis.set_major_locator(LogLocator() if log else MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _legend(fig: Figure, marks: Iterable[Any], names: Sequence[str]) -> None:
    """Add a legend below the chart, which becomes taller by its lines."""
    width, height = fig.get_size_inches()
    columns = max(1, min(len(names), int(72 * width / (45 + 6.8 * max(map(len, names))))))
    fig.set_size_inches(width, height + (8 + 1.5 * WORDS * -(-len(names) // columns)) / 72)
    legend = fig.legend(
        list(marks),
        [f"\u200b{_drawable(name)}" for name in names],  # matplotlib skips names that begin with an underscore
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=WORDS,
        labelcolor=SOFT,
        handlelength=1.8,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _drawable(words: str) -> str:
    """Text without characters that cannot be drawn or encoded as UTF-8."""
    return "".join(c if c.isprintable() else " " for c in words.encode(errors="backslashreplace").decode())


def _title(words: str) -> str:
    """The id that marks where a tooltip goes in the SVG."""
    return f"title-{hashlib.sha256(words.encode(errors='backslashreplace')).hexdigest()[:12]}"


def _svg(fig: Figure, words: str, titles: Iterable[str] = ()) -> str:
    """A figure as an svg element without a fixed size and unused ids, with colours as variables."""
    text = vector_bytes(fig, "svg").decode()
    text = text[text.index("<svg") :]
    noise = r"<!--.*?-->\s*|<style.*?</style>\s*|<g id=\"[^\"]*\"/>\s*|(?<=\n)\s+| transform=\"rotate\(-0 [^)]*\)\""
    text = re.sub(noise, "", text, flags=re.DOTALL)
    for title in titles:
        text = text.replace(f'<g id="{_title(title)}">', f"<g><title>{escape(_drawable(title))}</title>")
    ids = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    stamp = hashlib.sha256(text.encode()).hexdigest()[:8]
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{m[1]}{stamp}"' if m[1] in ids else "", text)
    text = re.sub(r'(href="|url\()#([^")]+)', rf"\g<1>#\g<2>{stamp}", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: _VARIABLES.get(m[0], m[0]), text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    width, height = (float(side) * 72 for side in fig.get_size_inches())
    opening = (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(_drawable(words))}" '
        f'style="display:block;width:100%;max-width:{width * 1.6:g}px;height:auto;stroke-linejoin:round">'
    )
    return opening + text[text.index(">") + 1 :].strip()
