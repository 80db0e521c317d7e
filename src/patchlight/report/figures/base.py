"""The registry of figures, and `draw`.

A figure is a function that takes a `Drawing` and returns a matplotlib Figure. Its keyword arguments, typed and with
defaults, are its settings. The text below a figure says which model and images it was drawn with.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.drawing import figure_bytes, figure_format
from patchlight.core.errors import PatchlightError, integer
from patchlight.core.files import check_writable, write_atomic
from patchlight.core.progress import Progress, show_progress
from patchlight.core.registry import Entry, Registry, TableList, make_decorator, resolve_settings, settings_of
from patchlight.core.targets import Target
from patchlight.report.figures.drawing import Drawing, read_drawing
from patchlight.report.figures.numbers import check_numbers_path, write_numbers

if TYPE_CHECKING:
    from patchlight.core.drawing.shown import ShownFigure

NEEDS = {
    "target": ("a target", "the class to explain (target=…; at the command line --target NAME)"),
    "labels": ("labels", "the true classes (labels=…; at the command line --data KIND)"),
    "boxes": ("boxes", "boxes around the objects (boxes=…; at the command line --data KIND)"),
    "masks": ("masks", "outlines of the objects (masks=…; at the command line --data KIND)"),
    "other": ("a second model", "a second model (other=…; at the command line --other NAME)"),
    "explainer": (
        "a trained explainer",
        "a trained explainer (explainer=FOLDER; at the command line --explainer FOLDER)",
    ),
}
"""What a figure may need besides a model and images: in short, and how to give it."""


@dataclass(frozen=True)
class FigureEntry(Entry):
    """A registered figure.

    A figure with the setting `shown` gets that many images, the first ones; other figures get all.

    Attributes:
        shows: What the figure shows, in one sentence.
        needs: Keys of `NEEDS`; "labels or target" means that either is enough.
        stand_in: What the paper's figure was drawn with; empty if unknown.
        least: The smallest number of images.
    """

    shows: str = ""
    needs: AbstractSet[str] = frozenset()
    stand_in: str = ""
    least: int = 1

    def __post_init__(self) -> None:
        unknown = {part for need in self.needs for part in need.split(" or ")} - set(NEEDS)
        if unknown:
            raise PatchlightError(f"figure '{self.name}' needs {sorted(unknown)}; possible needs are {sorted(NEEDS)}")


FIGURES: Registry[FigureEntry] = Registry("figure", ["patchlight.report.figures.papers"])
register_figure = make_decorator(FIGURES, FigureEntry)


@dataclass(frozen=True)
class FigureInfo:
    """A row of the table of figures."""

    name: str
    aliases: tuple[str, ...]
    paper: str
    shows: str
    needs: tuple[str, ...]
    stand_in: str
    settings: dict[str, str]

    def cells(self) -> dict[str, str]:
        needs = ", ".join(self.needs)
        return {"figure": self.name, "paper's": self.paper, "what it shows": self.shows, "needs": needs}


def list_figures() -> TableList[FigureInfo]:
    """All figures: name, place in the paper, what they show, what they need, and their settings."""

    def info(entry: FigureEntry) -> FigureInfo:
        count = "an image" if entry.least == 1 else f"{entry.least} images"
        needs = (" or ".join(NEEDS[part][0] for part in need.split(" or ")) for need in sorted(entry.needs))
        settings = {key: str(setting) for key, setting in settings_of(entry.function).items()}
        words = entry.paper, entry.shows, (count, *needs), entry.stand_in
        return FigureInfo(entry.name, entry.aliases, *words, settings)

    def place(entry: FigureEntry) -> tuple[str, int, str]:
        """Sort key: papers by name, their figures by number, then figures without a number."""
        paper, _, which = entry.name.partition("-")
        return paper, int(which) if which.isdecimal() else 1000, which

    return TableList(info(entry) for entry in sorted(FIGURES.values(), key=place))


def draw(
    name: str,
    vit: Anatomy | nn.Module,
    images: Any,
    path: str | Path | None = None,
    *,
    target: Target = None,
    labels: Sequence[int | str] | Tensor | None = None,
    boxes: Sequence[Tensor] | None = None,
    masks: Tensor | None = None,
    other: Anatomy | nn.Module | None = None,
    explainer: str | Path | None = None,
    numbers: str | Path | None = None,
    seed: int = 0,
    progress: Progress | bool = True,
    **settings: Any,
) -> ShownFigure:
    """Draw a figure of a paper with your model and images.

    Args:
        name: One of `list_figures()`.
        vit: The model.
        images: A folder, paths, PIL images, a preprocessed tensor, or a data set (`pl.open_data`) with its annotations.
        path: A file to write as well: pdf (fonts embedded), svg or png (300 dpi).
        target: The class to explain; by default the true classes if all are known, else the predictions.
        labels: One class per image.
        boxes: One tensor [n,4] per image, on the model's input.
        masks: Outlines [B,H,W], on the model's input.
        other: A second model, for figures that compare two.
        explainer: Folder of a trained explainer, for figures that need one.
        numbers: A .csv or .json file for the numbers that the figure shows.
        seed: Seed of methods and metrics that sample.
        progress: Whether a progress bar is shown, or the bar.
        settings: Settings of the figure.

    >>> draw("skipplus-2", vit, "photos/", "fig.pdf", shown=2)      # doctest: +SKIP
    """
    entry = FIGURES.find(name)
    values = resolve_settings(entry.name, settings_of(entry.function), {}, settings, _OPTIONS)
    if path is not None:
        figure_format(path)
        check_writable(path)
    if numbers is not None:
        check_numbers_path(numbers)
        check_writable(numbers)
    vit = wrap(vit)
    with show_progress(progress, f"drawing {entry.name}"):
        annotations = {"labels": labels, "boxes": boxes, "masks": masks}
        drawing = read_drawing(vit, images, annotations, values.get("shown"))
    drawing = replace(
        drawing,
        user_target=target,
        other=None if other is None else wrap(other),
        explainer=None if explainer is None else Path(explainer),
        seed=integer("seed", seed, 0),
        progress=progress,
        stand_in=entry.stand_in,
    )
    _check_needs(entry, drawing)
    fig: ShownFigure = entry.function(drawing, **values)
    if path is not None:
        write_atomic(path, figure_bytes(fig, path))
    if numbers is not None:
        write_numbers(fig, numbers)
    return fig


_OPTIONS = ("target", "labels", "boxes", "masks", "other", "explainer", "numbers", "seed", "progress", "path")


def _check_needs(entry: FigureEntry, drawing: Drawing) -> None:
    present = {need for need in NEEDS if getattr(drawing, "user_target" if need == "target" else need) is not None}
    present |= {"explainer"} if drawing.vit.name == "pocket" else set()  # the bundled model has its own
    for need in sorted(entry.needs):
        either = need.split(" or ")
        if not present & set(either):
            raise PatchlightError(f"figure '{entry.name}' needs {', or '.join(NEEDS[part][1] for part in either)}")
    if len(drawing) < entry.least:
        raise PatchlightError(f"figure '{entry.name}' needs {entry.least} images; {len(drawing)} can be read")
