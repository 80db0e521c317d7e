"""Pictures, drawn without a display: heat over an image, figures of several methods, and HTML for notebooks."""

from patchlight.core.drawing.heat import overlay, robust_scale
from patchlight.core.drawing.notebook import figure_html, heat_html, heat_picture, maps_html, table_html
from patchlight.core.drawing.pictures import (
    describe_prediction,
    figure_bytes,
    figure_format,
    figure_picture,
    maps_figure,
    percent,
    photo_figure,
    seen_figure,
    short,
)

__all__ = [
    "describe_prediction",
    "figure_bytes",
    "figure_format",
    "figure_html",
    "figure_picture",
    "heat_html",
    "heat_picture",
    "maps_figure",
    "maps_html",
    "overlay",
    "percent",
    "photo_figure",
    "robust_scale",
    "seen_figure",
    "short",
    "table_html",
]
