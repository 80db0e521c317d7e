"""What is in a piece of HTML, which must be well formed, and that nothing in a figure overlaps."""

from __future__ import annotations

from html.parser import HTMLParser

from matplotlib.figure import Figure

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """The elements with their attributes and the words of a page; every element must be closed, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"left open: {self._open}"

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check_apart(fig: Figure, slack: float) -> None:
    """Axes and words lie inside the figure and apart from each other, but for so many dots."""
    fig.canvas.draw()
    boxes = [axes.get_window_extent() for axes in fig.axes]
    boxes += [text.get_window_extent() for text in fig.texts if text.get_text().strip()]
    for i, a in enumerate(boxes):
        assert min(a.x0, a.y0, fig.bbox.x1 - a.x1, fig.bbox.y1 - a.y1) >= -slack, "inside the figure"
        for b in boxes[:i]:
            apart = a.x1 <= b.x0 + slack or b.x1 <= a.x0 + slack or a.y1 <= b.y0 + slack or b.y1 <= a.y0 + slack
            assert apart, (i, a, b)
