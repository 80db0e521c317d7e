"""What several papers' figures are made of: a column for every image, and numbers as colours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchlight.core.attribution import Attribution, Attributions
from patchlight.core.drawing.heat import colour_map
from patchlight.core.drawing.shown import ShownFigure
from patchlight.core.errors import DegenerateMap
from patchlight.core.statistics import FEWEST, constant
from patchlight.report.figures.base import Drawing
from patchlight.report.figures.sheet import COLUMN, PAGE, Cell, Row, pictures

FEW = 5
"""Images that fit a column of a paper."""
Shown = Callable[[int, str, Attribution], Image.Image]
"""From the number of an image, a label and its maps to a picture."""


def of_prediction(drawing: Drawing) -> Drawing:
    """The same, with the classes predicted in place of the true ones: they are explained unless others are asked."""
    return replace(drawing, labels=drawing.predictions)


def tell_bands(drawing: Drawing, what: str = "bands") -> None:
    """Say what bands (or bars) are, or why there are none."""
    enough = len(drawing) >= FEWEST
    drawing.say(f"{what}: 95 % intervals over images" if enough else f"no intervals with fewer than {FEWEST} images")


def explained(drawing: Drawing, methods: Mapping[str, Any] | Sequence[str]) -> Attributions:
    """The maps of all images; those that are constant, and so have no heat, are told in the note."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        maps = drawing.explain(methods)
    dead = {label: int(constant(att.scores.flatten(1)).sum()) for label, att in maps.items()}
    if any(dead.values()):
        told = ", ".join(f"{count} of {label}" for label, count in dead.items() if count)
        drawing.say(f"maps that are constant have no heat: {told}")
    return maps


def by_method(drawing: Drawing, maps: Mapping[str, Attribution], shown: Shown | None = None) -> ShownFigure:
    """A column for every image, a row for every method: what speaks for the class, or what `shown` makes of it."""

    def positive(i: int, label: str, att: Attribution) -> Image.Image:
        return drawing.heat(i, att.scores[i], True, att)

    make = positive if shown is None else shown
    names = [drawing.name_of(int(index)) for index in drawing.classes]
    rows = [Row([Cell(picture, name) for picture, name in zip(drawing.pictures, names, strict=True)], "Input")]
    rows += [Row([Cell(make(i, label, att)) for i in range(len(drawing))], label) for label, att in maps.items()]
    few = len(drawing) <= FEW
    return pictures(drawing.note, rows, COLUMN if few else PAGE, largest=0.72 if few else 0.8)


def coloured(
    values: Tensor, low: float = 0.0, high: float = 1.0, colours: str = "inferno", side: int = 240
) -> Image.Image:
    """Numbers [h,w] from low to high as colours, at least `side` pixels high."""
    array = values.detach().double().cpu().numpy()
    scaled = np.clip((array - low) / (high - low if high > low else 1.0), 0, 1)
    picture = Image.fromarray(np.uint8(np.round(255 * np.asarray(colour_map(colours)(scaled))[..., :3])))
    times = max(1, -(-side // picture.height))
    return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)


def stretched(values: Tensor, colours: str = "inferno") -> Image.Image:
    """The same from the lowest to the highest of the numbers."""
    return coloured(values, float(values.min()), float(values.max()), colours)
