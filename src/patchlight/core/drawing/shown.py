"""A matplotlib figure that a notebook shows as it is, whatever backend is active and without pyplot."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from patchlight.core.drawing.pictures import figure_bytes

CSS = 96
"""A page's dots per inch: a figure is shown at the size it has on paper, however finely it is drawn."""


class ShownFigure(Figure):
    """A Figure drawn without a display; `numbers` keeps what it shows (`patchlight.report.figures.numbers`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers: list[Any] = []
        FigureCanvasAgg(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        FigureCanvasAgg(self)  # matplotlib takes a canvas that draws nothing

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The picture, and how large a page should show it."""
        width, height = self.page_size
        return figure_bytes(self, "figure.png"), {"width": width, "height": height}

    @property
    def page_size(self) -> tuple[int, int]:
        """Width and height on a page."""
        width, height = self.get_size_inches()
        return round(width * CSS), round(height * CSS)
