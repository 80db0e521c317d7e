"""A matplotlib figure that a notebook shows without pyplot, whatever backend is active."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from patchlight.core.drawing.pictures import figure_bytes

CSS = 96
"""Dots per inch of a page, on which a figure has its size on paper, whatever its resolution."""


class ShownFigure(Figure):
    """A Figure drawn without a display; `numbers` are the recorded numbers (`patchlight.report.figures.numbers`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.numbers: list[Any] = []
        FigureCanvasAgg(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        FigureCanvasAgg(self)  # matplotlib restores a canvas that cannot draw

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The picture, and its size on a page."""
        width, height = self.page_size
        return figure_bytes(self, "figure.png"), {"width": width, "height": height}

    @property
    def page_size(self) -> tuple[int, int]:
        """Width and height on a page, in pixels."""
        width, height = self.get_size_inches()
        return round(width * CSS), round(height * CSS)
