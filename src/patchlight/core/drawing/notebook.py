"""HTML of results in a notebook: pictures and small tables in the colours of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchlight.core.attribution import Attribution
from patchlight.core.drawing.arrays import array_figure
from patchlight.core.drawing.heat import (
    HEAT,
    SATURATED,
    SIGNED,
    blend,
    colour_map,
    display_size,
    is_signed,
    robust_scale,
    upsample,
)
from patchlight.core.drawing.page import data_url
from patchlight.core.drawing.pictures import IGNORES_CLASS, figure_picture, ignores_class, map_title
from patchlight.core.drawing.shown import ShownFigure
from patchlight.core.drawing.tiles import tiles_picture
from patchlight.core.photos import as_picture
from patchlight.core.text import plural

SHOWN, ROWS, COLUMNS = 8, 4, 10
"""Maximum number of maps of one attribution, and of rows and methods of several."""
WIDTH, SHARP = 128, 224
"""Width of a picture on the page, and of its file if few are shown."""
_STYLE = (
    ".patchlight{max-height:40em;overflow:auto}.patchlight table{border-collapse:collapse}"
    ".patchlight th,.patchlight td{text-align:left!important;vertical-align:top;padding:2px 10px 2px 0;"
    "border-bottom:1px solid rgba(128,128,128,.35)}.patchlight small{opacity:.7}"
)
"""The style has no colours, to fit light and dark pages; long tables scroll."""
DEEPEST = 4.0
"""The gain, in nats, at which the word of an answer has the deepest shade."""


@dataclass(frozen=True)
class Html:
    """Markup for a table cell; other cells are escaped."""

    text: str


def table_html(
    headings: Sequence[str], rows: Iterable[Sequence[str | Html]], caption: str = "", below: str = ""
) -> str:
    """A table with a caption above and a note below."""
    head = "".join(f"<th>{escape(word)}</th>" for word in headings)
    body = "".join("<tr>" + "".join(f"<td>{_inside(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<div><b>{escape(caption)}</b></div>" if caption else ""
    note = f"<div><small>{escape(below)}</small></div>" if below else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<style>{_STYLE}</style><div class="patchlight">{title}{table}{note}</div>'


def _inside(cell: str | Html) -> str:
    return cell.text if isinstance(cell, Html) else escape(cell)


def shades(words: Sequence[Any]) -> list[float]:
    """The depth of the shade of each word of an answer, from 0 to 1, by its gain."""
    return [min(1.0, max(0.0, word.gain / DEEPEST)) for word in words]


def sentence_html(words: Sequence[Any], prompt: Any = "") -> str:
    """The prompt and the words of an answer, shaded by gain; empty without words."""
    spans = [
        f'<span title="probability {word.probability:.2f}, gain {word.gain:.2f} nats" style="padding:1px 4px;'
        f'border-radius:4px;background:rgba(122,92,220,{0.6 * shade:.2f})">{escape(word.word)}</span>'
        for word, shade in zip(words, shades(words), strict=True)
    ]
    question = f"<small>{escape(prompt)}</small><br>" if prompt and isinstance(prompt, str) else ""
    below = "<br><small>shaded by gain: how much the image adds to the word, up to 4 nats</small>"
    return f'<div class="answer">{question}{" ".join(spans)}{below}</div>' if spans else ""


def heat_html(att: Attribution) -> str:
    """The first maps over their photographs (or as colours only), with their classes, method and model."""
    signed = is_signed(att.scores)
    maps = att.scores.reshape(-1, *att.grid)
    cells = [
        f'<figure style="display:inline-block;margin:2px;width:{WIDTH}px;vertical-align:top">'
        f"{_image(att, i, signed, SHARP)}<figcaption>{escape(label)}</figcaption></figure>"
        for i, label in enumerate(att.captions[:SHOWN])
    ]
    more = f"<p>and {len(maps) - SHOWN} more</p>" if len(maps) > SHOWN else ""
    ends = "blue: against, red: for" if signed else "dark: lowest, bright: highest"
    badge = f"; {IGNORES_CLASS}" if ignores_class(att) else ""
    size = f"{plural(len(att), 'image')}, {'x'.join(map(str, att.grid))} {att.level}s"
    facts = f"{size}; {ends}, up to the 99th percentile{badge}"
    answers = "".join(sentence_html(words, att.head.get("prompt")) for words in att.words)
    return f"<div><b>{escape(att.method)}</b> of {escape(att.model)} ({facts})<br>{answers}{''.join(cells)}{more}</div>"


def maps_html(maps: Mapping[str, Attribution]) -> str:
    """A table with a row per image and class and a column per method; only the first ones are shown."""
    alike = {tuple(att.target.shape) for att in maps.values() if isinstance(att, Attribution)}
    if len(alike) != 1 or not all(isinstance(att, Attribution) for att in maps.values()):
        return f"<pre>{escape(repr(dict(maps)))}</pre>"
    shown = dict(list(maps.items())[:COLUMNS])
    first = next(iter(shown.values()))
    signed = {label: is_signed(att.scores) for label, att in shown.items()}
    rows = []
    for i, word in enumerate(first.captions[:ROWS]):
        photo = _photo(first, i, WIDTH)
        picture = _img(photo, "jpeg", "photograph") if photo is not None else ""
        cells = [Html(_image(att, i, signed[label], WIDTH)) for label, att in shown.items()]
        rows.append([Html(f'<div style="width:{WIDTH}px">{picture}{escape(word)}</div>'), *cells])
    omitted = [
        f"{len(maps) - COLUMNS} more methods" if len(maps) > COLUMNS else "",
        f"{len(first.captions) - ROWS} more maps of each" if len(first.captions) > ROWS else "",
    ]
    below = f"each map up to its own 99th percentile; {', '.join(filter(None, omitted))}".rstrip("; ")
    titles = [map_title(label, att) + f" ({IGNORES_CLASS})" * ignores_class(att) for label, att in shown.items()]
    answers = "".join(sentence_html(words, first.head.get("prompt")) for words in first.words[:ROWS])
    return answers + table_html([first.model, *titles], rows, below=below)


def figure_html(fig: ShownFigure, words: str) -> str:
    """A figure as an inline picture, at most as wide as the page."""
    source = data_url(figure_picture(fig), quality=92)
    return f'<img alt="{escape(words)}" style="width:{fig.page_size[0]}px;max-width:100%" src="{source}">'


def heat_picture(att: Attribution, i: int, signed: bool | None = None, side: int = SHARP) -> Image.Image:
    """Map number i over its photograph, or as colours only without a photograph."""
    if not att.pictures:
        return figure_picture(array_figure(att, i))
    scores = att.scores.reshape(-1, *att.grid)[i]
    signed = is_signed(att.scores) if signed is None else signed
    photo = _photo(att, i, side)
    if att.grid[1] == 1:
        return tiles_picture(scores.flatten())
    if photo is None:
        return _colours(scores, att, signed)
    return blend(photo, scores, robust_scale(scores, signed), covers=att.covers)


def _image(att: Attribution, i: int, signed: bool, side: int) -> str:
    kind = "png" if _photo(att, i, side) is None else "jpeg"
    return _img(heat_picture(att, i, signed, side), kind, att.captions[i])


def _photo(att: Attribution, i: int, side: int) -> Image.Image | None:
    """The photograph of map number i, if there is one, with a longer side of `side`."""
    image = i // max(att.target.numel() // max(len(att), 1), 1)
    return as_picture(att.photos[image], side) if att.pictures and image < len(att.photos) else None


def _colours(scores: Tensor, att: Attribution, signed: bool) -> Image.Image:
    shown = upsample(scores, display_size(att.image_size, 112), covers=att.covers)
    values = robust_scale(scores, signed)(shown).double().numpy()
    colours = colour_map(SIGNED)(0.5 + SATURATED * values / 2) if signed else colour_map(HEAT)(values)
    return Image.fromarray((255 * colours[..., :3]).round().astype(np.uint8))


def _img(picture: Image.Image, kind: str, words: str) -> str:
    """An inline picture."""
    return f'<img alt="{escape(words)}" style="width:{WIDTH}px;display:block" src="{data_url(picture, kind)}">'
