"""Maps of bags of tiles: heat at the places of the tiles, or a bar chart of the highest and lowest tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from patchlight.core.drawing.heat import HEAT, SIGNED, colour_map, robust_scale
from patchlight.core.drawing.pictures import figure_picture
from patchlight.core.drawing.shown import ShownFigure
from patchlight.core.errors import PatchlightError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDS = 16
"""Number of tiles at each end of the bar chart."""


def draw_tiles(ax: Axes, scores: Tensor, coordinates: Any = None) -> None:
    """Draw the scores [n] of tiles into axes.

    Args:
        ax: The axes.
        scores: A score for each tile.
        coordinates: The place [n,2] of each tile, x and y from the top left; None: a bar chart of the 16 highest and
            the 16 lowest tiles.
    """
    scale = robust_scale(scores)
    values, colours = scores.double().numpy(), colour_map(SIGNED if scale.signed else HEAT)
    if coordinates is not None:
        places = _places(coordinates, len(values))
        low, size = -scale.high if scale.signed else scale.low, min(400.0, max(4.0, 2e4 / len(values)))
        x, y = places.T
        drawn = ax.scatter(x, y, size, values, marker="s", cmap=colours, vmin=low, vmax=scale.high)
        ax.set_aspect("equal", "datalim")
        ax.invert_yaxis()
        ax.get_figure().colorbar(drawn, ax=ax, label="score")  # type: ignore[union-attr]
        return
    order = np.argsort(-values, kind="stable")
    shown = order if len(order) <= 2 * ENDS else np.concatenate([order[:ENDS], order[-ENDS:]])
    shades = scale(scores[shown.copy()].double()).numpy()
    ax.bar(range(len(shown)), values[shown], color=colours(0.5 + shades / 2 if scale.signed else 0.85 * shades))
    ax.set_xticks(range(len(shown)), [str(tile) for tile in shown], rotation=90, fontsize="small")
    if len(shown) < len(order):
        ax.axvline(ENDS - 0.5, color="grey", linestyle="dotted")
    ax.set_xlabel("tile")
    ax.set_ylabel("score")


def tiles_picture(scores: Tensor) -> Image.Image:
    """The bar chart as a picture."""
    fig = ShownFigure(figsize=(6.4, 3.2), layout="constrained")
    draw_tiles(fig.subplots(), scores)
    return figure_picture(fig)


def _places(coordinates: Any, tiles: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    places = np.asarray(coordinates, dtype=np.float64)
    if places.shape != (tiles, 2):
        raise PatchlightError(
            f"coordinates have shape {list(places.shape)}, and the bag has {tiles} tiles; give x and y of each: "
            f"[{tiles},2]"
        )
    if not np.isfinite(places).all():
        raise PatchlightError("coordinates contain NaN or infinity")
    return places
