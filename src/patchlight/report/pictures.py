"""`pl.figure`: maps over the images that they explain, as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.core.attribution import Attribution
from patchlight.core.drawing.pictures import Prediction, maps_figure
from patchlight.core.errors import check_keywords
from patchlight.core.images import Picture

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy
    from patchlight.core.drawing.shown import ShownFigure


@check_keywords
def figure(
    images: Picture | Tensor | Sequence[Picture],
    maps: Attribution | Mapping[str, Attribution] | Sequence[Attribution],
    *,
    predictions: Sequence[Prediction] | None = None,
    titles: Sequence[str] | None = None,
    vit: Anatomy | nn.Module | None = None,
    path: str | Path | None = None,
) -> ShownFigure:
    """One row per image, one column per method: the photographs, and each method's heat over them.

    More than ten columns are set in bands below each other.

    `maps` is what `explain` gives, or a list of attributions of the same images. `images` are what the maps explain:
    paths, PIL images or the preprocessed tensor. Row labels are `predictions`, as (label, probability) or in words;
    without them those of `vit`; without it the explained class. An explained class other than the predicted one is
    named below it. `titles` replace the methods' names. Every map is scaled by itself, and the figure says so. With
    `path` it is also written there (png, jpg, webp, pdf or svg).

    >>> pl.figure(images, pl.explain(vit, images, ["genatt", "rollout"]), vit=vit, path="cats.png")  # doctest: +SKIP
    """
    return maps_figure(images, maps, predictions, titles, None if vit is None else wrap(vit), path)
