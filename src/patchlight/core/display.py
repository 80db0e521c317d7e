"""Shows results in a notebook, in the image viewer, as a file if there is no screen, or as a text table."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any


def show(result: Any, draw: Callable[[], Any]) -> None:
    """Show a result.

    Args:
        result: What a notebook displays.
        draw: Returns a matplotlib figure, which is shown outside of notebooks.
    """
    from patchlight.core.drawing import figure_picture

    if in_notebook():
        sys.modules["IPython"].display.display(result)
        return
    picture = figure_picture(draw())
    if has_screen():
        picture.show()
        return
    handle, path = tempfile.mkstemp(prefix="patchlight-", suffix=".png")
    with os.fdopen(handle, "wb") as file:
        picture.save(file, "png")
    print(f"No screen found; the picture is in {path}")


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as plain text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table, text = Table(*headings, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False), StringIO()
    for row in rows:
        table.add_row(*row)
    Console(file=text, width=10**4, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def has_screen() -> bool:
    """Whether a window can be opened."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
