"""`pl.figure`: maps over the images that they explain."""

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
    """Draw a figure with one row per image and one column per method.

    Each map has its own colour scale. More than ten columns continue in bands below. Methods that ignore the class
    are marked, and "auto" names the method that was chosen.

    Args:
        images: What the maps explain: paths, PIL images or the preprocessed tensor.
        maps: What `explain` returns, or a list of attributions of the same images.
        predictions: Row labels, as (label, probability) or text; by default the predictions of `vit`, else the
            explained class.
        titles: Column titles instead of the methods' names.
        vit: The model.
        path: A file to write as well: png, jpg, webp, pdf or svg.

    >>> pl.figure(images, pl.explain(vit, images, ["genatt", "rollout"]), vit=vit, path="cats.png")  # doctest: +SKIP
    """
    return maps_figure(images, maps, predictions, titles, None if vit is None else wrap(vit), path)
