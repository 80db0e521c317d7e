"""The verdict as one page with everything in it, which opens anywhere, offline; all words are escaped."""

from __future__ import annotations

import math
from html import escape

from patchlight.core.drawing import table_html
from patchlight.report.page import round_values
from patchlight.study.recommend.verdict import Row, Verdict
from patchlight.study.recommend.words import headings, lines, score_name, sentences, title

COLOURS = {
    **{"best": "#0072b2", "tied": "#009e73", "worse": "#8a8a8a", "behind": "#b8a34a"},
    **{"undecided": "#555555", "baseline": "#d55e00"},
}
"""Of the statuses; they are told in words too."""
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "li{margin:.3em 0}svg text{font:12px system-ui,sans-serif}.patchlight{max-height:none!important;overflow:auto}"
)
_WIDTH, _LINE, _LEFT = 760, 22, 240


def as_html(verdict: Verdict) -> str:
    """The page."""
    name = escape(f"Verdict on {verdict.about['model']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1>{body(verdict)}</body></html>\n"
    )


def body(verdict: Verdict) -> str:
    """The same words as in print, the intervals, the table and the example maps."""
    said = "".join(f"<li>{escape(line)}</li>" for line in sentences(verdict))
    maps = f"<h2>Maps of some images</h2>{verdict.page}" if verdict.page else ""
    return (
        f"<p>{escape(title(verdict))}</p><ul>{said}</ul><h2>Scores</h2>{interval_plot(verdict)}"
        f"{table_html(headings(verdict), lines(verdict))}{maps}"
    )


def interval_plot(verdict: Verdict) -> str:
    """Every method's mean score with its 95 % interval, highest first, as inline SVG; a dashed line at zero."""
    rows = verdict.rows
    if not rows:
        return ""
    ends = [x for row in rows for x in (row.score, row.low, row.high) if math.isfinite(x)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return round(_LEFT + (value - low) / span * (_WIDTH - _LEFT - 20), 1)

    height = _LINE * len(rows) + 40
    drawn = "".join(_mark(row, i, x(row.score), x) for i, row in enumerate(rows))
    zero = f'<line x1="{x(0)}" x2="{x(0)}" y1="4" y2="{height - 30}" stroke="#999" stroke-dasharray="3 3"/>'
    ticks = "".join(
        f'<text x="{x(v)}" y="{height - 14}" text-anchor="middle">{v:g}</text>' for v in round_values(low, high)
    )
    seen = dict.fromkeys(row.status for row in rows)
    legend = " ".join(f'<tspan fill="{COLOURS[status]}">● {escape(status)}</tspan>' for status in seen)
    words = escape(f"score: {score_name(verdict)}; mean and 95 % interval")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height + 26}" width="{_WIDTH}" role="img" aria-label="{words}">'
        f'{zero}{drawn}{ticks}<text x="{_LEFT}" y="{height + 2}">{words}</text>'
        f'<text x="{_LEFT}" y="{height + 20}">{legend}</text></svg>'
    )


def _mark(row: Row, i: int, middle: float, x: object) -> str:
    assert callable(x)
    y, colour = _LINE * i + 16, COLOURS[row.status]
    name = f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(row.method)}</text>'
    line = ""
    if math.isfinite(row.low):
        line = f'<line x1="{x(row.low)}" x2="{x(row.high)}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
    told = escape(f"{row.method}, {row.status}: {row.score:.3f} on {row.images} images")
    return f'{name}{line}<circle cx="{middle}" cy="{y}" r="4" fill="{colour}"><title>{told}</title></circle>'
