"""Figures: rows of pictures with titles, labels and colour scales; maps have a row per image, a column per method."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from patchlight.core.attribution import Attribution
from patchlight.core.drawing.heat import GREY, blend, is_signed, robust_scale, seen, tint
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_atomic
from patchlight.core.images import Picture, Preprocess, image_list, open_image
from patchlight.core.layout import Layout
from patchlight.core.photos import SIDE, as_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from patchlight.anatomy.opened import Anatomy
    from patchlight.core.drawing.shown import ShownFigure

Prediction = tuple[str, float] | str
T = TypeVar("T")

DPI, DENSE, COARSEST = 144, 16, 90
"""Dots per inch for up to DENSE pictures; larger figures are drawn coarser, to stay below about a megabyte."""
CELL = 1.4
"""Width of a picture, in inches."""
LETTERS, MAX_ROWS, BAND = 16, 64, 10
"""Letters per line of a label, maximum rows of a figure, and maximum columns of a band; others are in bands below."""
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".pdf": "pdf", ".svg": "svg"}
SCALES = {
    False: ("lowest", "highest (each map to its 99th percentile)"),
    True: ("against", "for (each map to ± its 99th percentile)"),
}

IGNORES_CLASS = "ignores the class"
"""The label of maps that are the same for every class."""
_SETTINGS = threading.Lock()
"""Protects matplotlib's settings, which all threads share."""


@dataclass(frozen=True)
class Print:
    """Sizes of text and gaps: `words` and `small` in points, all others in inches."""

    words: float
    small: float
    line: float
    small_line: float
    edge: float
    gap: float
    label_gap: float


SCREEN = Print(8.5, 7.0, 0.165, 0.13, 0.1, 0.05, 0.1)


@dataclass(frozen=True)
class Tile:
    """A picture with a title above and a caption below; `numbers` has the numbers in the caption by quantity."""

    picture: Image.Image
    title: str = ""
    caption: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Pictures side by side, with a label to their left."""

    cells: Sequence[Tile | None]
    label: str = ""


@dataclass(frozen=True)
class _Column:
    title: str
    scores: Tensor
    signed: bool
    covers: tuple[float, ...]


def maps_figure(
    images: Any,
    maps: Attribution | Mapping[str, Attribution] | Sequence[Attribution],
    predictions: Sequence[Prediction] | None = None,
    titles: Sequence[str] | None = None,
    vit: Anatomy | None = None,
    path: str | Path | None = None,
) -> ShownFigure:
    """A figure of maps over the images that they explain: see `pl.figure`."""
    maps = _by_name(maps)
    first = next(iter(maps.values()))
    if not first.pictures:
        takes = Layout(first.grid, axes=first.axes).inputs
        raise PatchlightError(f"this figure draws pictures, and {first.model} takes {takes}; maps.figure() draws them")
    images = [images] if isinstance(images, Tensor) and images.ndim == 3 else image_list(images)
    if not isinstance(images, Iterable):
        raise PatchlightError(f"images={images!r} cannot be shown; give the images that the maps explain")
    images = list(images)
    preprocess = vit.preprocess if vit is not None else first.preprocess
    pictures = [_picture(image, first, preprocess) for image in images]
    return _figure(maps, pictures, images, predictions, titles, vit, path)


def photo_figure(maps: Mapping[str, Attribution], path: str | Path | None = None) -> ShownFigure:
    """A figure of maps over their stored small photographs."""
    maps = _by_name(maps)
    first = next(iter(maps.values()))
    if not first.pictures:
        from patchlight.core.drawing.arrays import arrays_figure

        return arrays_figure(maps, path)
    if not first.photos:
        raise PatchlightError("these maps have no photographs; give the images to pl.figure")
    rows = {name: att[: len(first.photos)] for name, att in maps.items()}
    return _figure(rows, [as_picture(photo, SIDE) for photo in first.photos], path=path)


def seen_figure(
    pictures: Sequence[Image.Image], maps: Mapping[str, Attribution], predictions: Sequence[Prediction], vit: Anatomy
) -> ShownFigure:
    """A figure of maps over pictures of the model's input."""
    return _figure(_by_name(maps), pictures, predictions=predictions, vit=vit)


def _figure(
    maps: Mapping[str, Attribution],
    pictures: Sequence[Image.Image],
    images: Sequence[Any] = (),
    predictions: Sequence[Prediction] | None = None,
    titles: Sequence[str] | None = None,
    vit: Anatomy | None = None,
    path: str | Path | None = None,
) -> ShownFigure:
    if path is not None:
        figure_format(path)
    _check_counts(maps, len(pictures))
    same_classes = len({att.captions for att in maps.values()}) == 1
    columns = [column for label, att in maps.items() for column in _columns(label, att, same_classes)]
    titles = [column.title for column in columns] if titles is None else titles
    if len(titles) != len(columns):
        raise PatchlightError(f"{len(titles)} titles for {len(columns)} columns; give one per column")
    lines = [
        [part for line in title.split("\n") for part in wrap_lines(line, CELL, SCREEN.words, " .")] for title in titles
    ]
    labels = _row_labels(images, next(iter(maps.values())), predictions, vit, same_classes)
    rows = []
    for band in in_bands(range(len(columns)), BAND):
        for r, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            tiles = [Tile(_heat(picture, columns[c], r), "" if r else "\n".join(lines[c])) for c in band]
            rows.append(Row([Tile(picture), *tiles], label))
    dpi = DPI * min(1.0, (DENSE / (len(pictures) * (len(columns) + 1))) ** 0.5)
    scales = sorted({column.signed for column in columns})
    fig = draw_rows(rows, CELL, SCREEN, max(dpi, COARSEST), scales, _sentence(next(iter(maps.values()))))
    if path is not None:
        write_atomic(path, figure_bytes(fig, path))
    return fig


def _sentence(att: Attribution) -> str:
    """The words of the answer to one image, with their gains."""
    if len(att.words) != 1:
        return ""
    return "Answer (gains in nats): " + " ".join(f"{word.word} ({word.gain:.1f})" for word in att.words[0])


def _heat(picture: Image.Image, column: _Column, r: int) -> Image.Image:
    return blend(picture, column.scores[r], robust_scale(column.scores[r], column.signed), covers=column.covers)


def in_bands(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """Items in groups of at most `most`, all about equally long."""
    count = -(-len(items) // most)
    each = -(-len(items) // count)
    return [items[begin : begin + each] for begin in range(0, len(items), each)]


def draw_rows(
    rows: Sequence[Row],
    side: float,
    sizes: Print,
    dpi: float,
    scales: Sequence[bool] = (),
    note: str = "",
    width: float = 0.0,
) -> ShownFigure:
    """A figure of rows of pictures, with colour scales and a note below; texts may have several lines.

    Args:
        rows: The pictures.
        side: Width of a picture, in inches.
        sizes: Sizes of print and gaps.
        dpi: Dots per inch.
        scales: The colour scales to explain: unsigned (False), signed (True).
        note: Text below the pictures, which is wrapped.
        width: Minimum width of the figure, in inches.
    """
    from patchlight.core.drawing.shown import ShownFigure

    edge, gap, line = sizes.edge, sizes.gap, sizes.line
    left, first = label_width(rows, sizes), next(cell for row in rows for cell in row.cells if cell is not None)
    tall = side * first.picture.height / first.picture.width
    across = max(len(row.cells) for row in rows)
    widest = max((sum(inches(w, sizes.small) for w in SCALES[signed]) + _BAR + 0.12 for signed in scales), default=0.0)
    width = max(width, left + edge + across * (side + gap) - gap, widest + 2 * edge)
    lines = wrap_lines(note, width - 2 * edge, sizes.small, " ")
    titles, captions = (
        [
            [[] if cell is None or not getattr(cell, part) else getattr(cell, part).split("\n") for cell in row.cells]
            for row in rows
        ]
        for part in ("title", "caption")
    )
    heads, feet = (
        [line * max(map(len, row), default=0) + (0.03 if any(row) else 0.0) for row in texts]
        for texts in (titles, captions)
    )
    bottom = edge + sizes.small_line * len(lines) + 0.05 + line * len(scales)
    height = edge + sum(heads) + sum(feet) + len(rows) * (tall + gap) + bottom
    fig = ShownFigure(figsize=(width, height), dpi=dpi, facecolor="white")

    def place(picture: Any, x: float, y: float, w: float, h: float) -> None:
        axes = fig.add_axes((x / width, y / height, w / width, h / height))
        axes.imshow(np.asarray(picture), interpolation="antialiased", aspect="auto")
        axes.set_axis_off()

    def write(words: str, x: float, y: float, size: float = sizes.words, **where: Any) -> None:
        fig.text(x / width, y / height, words, size=size, **where)

    y = height - edge
    for row, title, caption, head, foot in zip(rows, titles, captions, heads, feet, strict=True):
        y -= head + tall
        for c, cell in enumerate(row.cells):
            x = left + c * (side + gap)
            if cell is not None:
                place(cell.picture, x, y, side, tall)
            for n, words in enumerate(reversed(title[c])):
                write(words, x + side / 2, y + tall + 0.035 + n * line, ha="center", va="bottom")
            for n, words in enumerate(caption[c]):
                write(words, x + side / 2, y - 0.02 - n * line, ha="center", va="top")
        if row.label:
            aligned: dict[str, Any] = {"ha": "right", "va": "center", "multialignment": "right", "linespacing": 1.25}
            write(row.label, left - sizes.label_gap, y + tall / 2, **aligned)
        y -= foot + gap
    for k, signed in enumerate(scales):
        low, high = SCALES[signed]
        y, begin = bottom - (k + 1) * line, edge + inches(low, sizes.small) + 0.05
        write(low, edge, y + 0.035, sizes.small, va="center", color="0.25")
        place(colour_bar(signed), begin, y, _BAR, 0.01 * sizes.small + 0.015)
        write(high, begin + _BAR + 0.05, y + 0.035, sizes.small, va="center", color="0.25")
    write_note(fig, lines, sizes)
    return fig


def label_width(rows: Sequence[Row], sizes: Print) -> float:
    """The width of the edge and of the labels to the left of the pictures, in inches."""
    lines = [words for row in rows if row.label for words in row.label.split("\n")]
    return sizes.edge + max((inches(words, sizes.words) + sizes.label_gap for words in lines), default=0.0)


def write_note(fig: Figure, lines: Sequence[str], sizes: Print) -> None:
    """Write the lines of a note at the bottom of a figure."""
    width, height = fig.get_size_inches()
    for n, words in enumerate(reversed(lines)):
        y = (sizes.edge + n * sizes.small_line) / height
        text = fig.text(sizes.edge / width, y, words, size=sizes.small, color="0.35", va="bottom")
        text.set_in_layout(False)


def wrap_lines(words: str, width: float, size: float, behind: str = " ∘.-/") -> list[str]:
    """Break text into lines of a width in inches, after spaces and a few signs (not in a number), or else anywhere."""
    lines = [""]
    marked = re.sub(rf"([{re.escape(behind)}])(?!\d)| ", lambda match: match[0] + "\0", words)
    for part in marked.split("\0"):
        for piece in _pieces(part, width, size):
            if lines[-1] and inches((lines[-1] + piece).rstrip(), size) > width:
                lines.append("")
            lines[-1] += piece
    return [line.strip() for line in lines if line.strip()]


def _pieces(part: str, width: float, size: float) -> list[str]:
    """Break a long word into pieces of a width, before a capital letter if there is one (Smooth|Grad)."""
    if inches(part.rstrip(), size) <= width:
        return [part]
    most = next((n for n in range(len(part) - 1, 1, -1) if inches(part[:n], size) <= width), 1)
    most = next((n for n in range(most, 0, -1) if part[n].isupper() and part[n - 1].islower()), most)
    return [part[:most], *_pieces(part[most:], width, size)]


def _by_name(maps: Attribution | Mapping[str, Attribution] | Sequence[Attribution]) -> dict[str, Attribution]:
    """Attributions by title; in a list, the titles are the methods' names, numbered if a method occurs twice."""
    if isinstance(maps, Mapping):
        named = {str(name): att for name, att in maps.items()}
    else:
        listed = [maps] if isinstance(maps, Attribution) else list(maps) if isinstance(maps, Sequence) else [maps]
        methods = [getattr(att, "method", "") for att in listed]
        numbered = [f"{m} ({methods[: i + 1].count(m)})" if methods.count(m) > 1 else m for i, m in enumerate(methods)]
        named = dict(zip(numbered, listed, strict=True))
    if not named:
        raise PatchlightError("a figure needs at least one map; none was given")
    wrong = [type(att).__name__ for att in named.values() if not isinstance(att, Attribution)]
    if wrong:
        raise PatchlightError(f"a map is a {wrong[0]}; give an Attribution, a list of them, or a dict by title")
    return named


def ignores_class(att: Attribution) -> bool:
    """Whether a map is labelled `IGNORES_CLASS`; random maps are not."""
    return att.ignores_class and att.method != "random"


def map_title(label: str, att: Attribution) -> str:
    """The label of a map, with the chosen method if the label is "auto" or "best"."""
    return f"{att.method} ({label})" if label in ("auto", "best") and att.method != label else label


def figure_format(path: str | Path) -> str:
    """The format of a figure file, by its suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise PatchlightError(f"'{path}' is not a figure file; its name must end in {', '.join(FORMATS)}")
    return FORMATS[suffix]


def figure_bytes(fig: Figure, path: str | Path) -> bytes:
    """The contents of a figure file with that name; equal figures give equal bytes.

    A PDF embeds its fonts as TrueType (Type 42), as journals require; the text of an SVG is drawn as outlines.
    """
    kind = figure_format(path)
    out = io.BytesIO()
    if kind in ("pdf", "svg"):
        return vector_bytes(fig, kind, outlines=True)
    options: dict[str, Any] = {"optimize": True} if kind == "png" else {"quality": 92}
    figure_picture(fig).save(out, format=kind, dpi=(fig.dpi, fig.dpi), **options)
    return out.getvalue()


def vector_bytes(fig: Figure, kind: str, outlines: bool = False) -> bytes:
    """A figure as PDF or SVG, without dates and random ids; `outlines` draws the text of an SVG as paths."""
    import matplotlib

    out = io.BytesIO()
    omitted = ("CreationDate",) if kind == "pdf" else ("Date",) if outlines else ("Date", "Creator", "Format", "Type")
    fonts: Any = {"svg.fonttype": "path" if outlines else "none", "pdf.fonttype": 42, "svg.hashsalt": "patchlight"}
    # text is shown in another font, so glyphs that are missing in matplotlib's do not matter
    silent = contextlib.nullcontext() if outlines else warnings.catch_warnings(action="ignore", category=UserWarning)
    with _SETTINGS, silent, matplotlib.rc_context(fonts):
        fig.savefig(out, format=kind, metadata=dict.fromkeys(omitted))
    return out.getvalue()


def figure_picture(fig: Figure) -> Image.Image:
    """A figure as a PIL image."""
    fig.canvas.draw()
    pixels = np.asarray(fig.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    return Image.fromarray(np.ascontiguousarray(pixels))


def describe_prediction(prediction: Prediction, probable: bool = True) -> str:
    """A prediction in words, with a percentage if scores are probabilities.

    >>> describe_prediction(("tabby, tabby cat", 0.871)), describe_prediction(("this cat", 0.871), probable=False)
    ('tabby 87 %', 'this cat 0.871')
    """
    if isinstance(prediction, str):
        return prediction
    label, value = prediction
    return f"{short(label)} {percent(value) if probable else format(value, '.3g')}"


def short(label: str) -> str:
    """The first of the comma-separated names of a label."""
    return label.split(",")[0].strip()


def percent(probability: float) -> str:
    """A probability as a rounded percentage.

    >>> percent(0.871), percent(0.9996), percent(0.0004)
    ('87 %', '> 99 %', '< 1 %')
    """
    rounded = round(100 * probability)
    return "> 99 %" if rounded == 100 and probability < 1 else "< 1 %" if rounded == 0 else f"{rounded} %"


_BAR = 0.6
"""Width of a colour scale, in inches."""
_PERCENTAGE = re.compile(r"(.*?)\s*((?:[<>] )?\d+ %)?", re.DOTALL)


def colour_bar(signed: bool) -> Any:
    """A colour scale as it looks over medium grey."""
    rgb, opacity = tint(np.linspace(-1.0 if signed else 0.0, 1.0, 128)[None], signed)
    darkest, contrast = GREY[signed]
    return rgb * opacity + (darkest + contrast / 2) * (1 - opacity)


def inches(words: str, size: float) -> float:
    """The width of text at a font size, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    width, _, _ = TextToPath().get_text_width_height_descent(words or " ", FontProperties(size=size), ismath=False)
    return 1.06 * float(width) / 72  # letters are drawn on whole pixels, which makes text slightly wider


def _picture(image: Picture | Tensor, att: Attribution, preprocess: Preprocess | None) -> Image.Image:
    if not isinstance(image, Tensor):
        return seen(image, att.image_size, preprocess)
    if preprocess is None:
        raise PatchlightError("to show a preprocessed tensor, give vit=, whose normalisation is needed")
    return seen(preprocess.picture(image), att.image_size)


def _check_counts(maps: Mapping[str, Attribution], count: int) -> None:
    for name, att in maps.items():
        if len(att) != count:
            raise PatchlightError(f"'{name}' explains {len(att)} images, but {count} images were given")
    if count > MAX_ROWS:
        raise PatchlightError(f"a figure has at most {MAX_ROWS} rows; {count} images were given")


def _columns(label: str, att: Attribution, same_classes: bool) -> list[_Column]:
    """A column per class; its title has the method, and the class unless the labels of rows have it."""
    signed, title = is_signed(att.scores), map_title(label, att)
    badge = f"\n{IGNORES_CLASS}" if ignores_class(att) else ""
    if att.scores.ndim == 3:
        caption = short(att.target_names[0]) + "".join(f"\nagainst {short(other)}" for other in att.against_names[:1])
        words = caption if len(set(att.captions)) == 1 else "various classes"
        heading = title if same_classes else f"{title}\n{words}"
        return [_Column(heading + badge, att.scores, signed, att.covers)]
    count = att.scores.shape[1]
    columns = []
    for t in range(count):
        names = set(att.target_names[t::count])
        words = short(names.pop()) if len(names) == 1 else f"({t + 1})"
        columns.append(_Column(f"{title}\n{words}{badge}", att.scores[:, t], signed, att.covers))
    return columns


def _row_labels(
    images: Sequence[Any],
    att: Attribution,
    predictions: Sequence[Prediction] | None,
    vit: Anatomy | None,
    same_classes: bool,
) -> list[str]:
    """The label of each row: the prediction, and the explained class if it differs and all columns explain it."""
    tensors = all(isinstance(image, Tensor) for image in images)
    if predictions is None and vit is not None and (tensors or vit.channels in (1, 3)):
        shown = images if tensors else [open_image(image) for image in images]
        predictions = [top[0] for top in vit.predict(shown, k=1)]
    probable = vit is None or vit.probable
    several = _several_words(att) if same_classes else []
    if several:
        words = [""] * len(att) if predictions is None else [describe_prediction(p, probable) for p in predictions]
        return [_wrap(f"{prediction} {classes}".strip()) for prediction, classes in zip(words, several, strict=True)]
    one_class = same_classes and att.scores.ndim == 3
    explained = [short(label) for label in att.target_names] if one_class else [""] * len(att)
    opposed = [f"against {short(label)}" for label in att.against_names if one_class] or [""] * len(att)
    if predictions is None:
        return ["\n".join(map(_wrap, filter(None, words))) or " " for words in zip(explained, opposed, strict=True)]
    if len(predictions) != len(att):
        raise PatchlightError(f"{len(predictions)} predictions for {len(att)} images; give one per image")
    labels = []
    for prediction, name, against in zip(predictions, explained, opposed, strict=True):
        same = isinstance(prediction, str) or short(prediction[0]) == name
        target = f"for {name}" if name and (against or not same) else ""
        lines = [describe_prediction(prediction, probable), target, against]
        labels.append("\n".join(map(_wrap, filter(None, lines))))
    return labels


def _several_words(att: Attribution) -> list[str]:
    """The explained classes of each row, with the numbers of their columns, if rows have different classes."""
    count = att.scores.shape[1] if att.scores.ndim == 4 else 0
    rows = [tuple(map(short, att.target_names[r * count : (r + 1) * count])) for r in range(len(att))]
    if len(set(rows)) <= 1:
        return []
    return [", ".join(f"({t + 1}) {label}" for t, label in enumerate(row)) for row in rows]


def _wrap(words: str) -> str:
    """Break text into lines of at most LETTERS letters; a percentage at the end has its own line."""
    label, percentage = _PERCENTAGE.fullmatch(words).groups()  # type: ignore[union-attr]
    return "\n".join([*textwrap.wrap(label, LETTERS), *([percentage] if percentage else [])]) or " "
