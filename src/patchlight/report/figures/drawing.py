"""The input of a figure: a model, and images with their annotations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from PIL import Image
from pydantic import BeforeValidator
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution, Attributions
from patchlight.core.drawing.heat import blend, is_signed, robust_scale, seen
from patchlight.core.drawing.pictures import IGNORES_CLASS, ignores_class, short
from patchlight.core.errors import DegenerateMap, PatchlightError, warn
from patchlight.core.images import list_images, open_image, to_batch
from patchlight.core.progress import Progress
from patchlight.core.statistics import FEWEST, constant
from patchlight.core.targets import Target, resolve_targets, top_classes
from patchlight.data import Data, Sample
from patchlight.data.base import load_batch
from patchlight.engine import default_batch_size, explain
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.base import Evaluations
from patchlight.report.figures import sheet
from patchlight.report.figures.sheet import PAGE, Row
from patchlight.study.evaluate import evaluate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from patchlight.core.drawing.shown import ShownFigure

NO_METHODS: dict[str, Any] = {}
ANNOTATIONS = ("labels", "boxes", "masks")


def split_names(methods: Any) -> Any:
    """Split a string of comma-separated names into a list."""
    return [name.strip() for name in methods.split(",") if name.strip()] if isinstance(methods, str) else methods


def by_label(methods: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Methods by label; a name without a label is its own label."""
    return dict(methods) if isinstance(methods, Mapping) else {name: name for name in methods}


Methods = Annotated[dict[str, Any] | list[str], BeforeValidator(split_names)]
"""Names of methods, or names or settings by label, as `explain` takes them."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """The input of a figure: a model, and images with their annotations.

    Attributes:
        vit: The model.
        images: Preprocessed images [B,C,H,W], in main memory.
        pictures: What a person sees of the images.
        labels: True classes [B], -1 if unknown; None if none were given.
        boxes: One [n,4] per image, on the model's input.
        masks: Outlines [B,H,W], on the model's input.
        user_target: The class that the user wants explained.
        other: A second model.
        explainer: Folder of a trained explainer.
        seed: Seed of methods and metrics that sample.
        progress: Whether a progress bar is shown, or the bar.
        stand_in: What the paper's figure was drawn with.
        notes: Sentences below the figure.
        indices: The indices of these images among those given.
        read: Reads some of the given images for another model.
    """

    vit: Anatomy
    images: Tensor
    pictures: list[Image.Image]
    labels: Tensor | None = None
    boxes: list[Tensor] | None = None
    masks: Tensor | None = None
    user_target: Target = None
    other: Anatomy | None = None
    explainer: Path | None = None
    seed: int = 0
    progress: Progress | bool = False
    stand_in: str = ""
    notes: list[str] = field(default_factory=list)
    indices: tuple[int, ...] = ()
    read: Callable[[Anatomy, Sequence[int]], Drawing] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def select(self, rows: Iterable[int]) -> Drawing:
        """The drawing of some of the images; notes are shared."""
        rows = list(rows)

        def part(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(value[i] for i in rows)
            return None if value is None else value[rows]

        target = part(self.user_target) if isinstance(self.user_target, list) else self.user_target
        fields = ("images", "pictures", "indices", *ANNOTATIONS)
        return replace(self, user_target=target, **{name: part(getattr(self, name)) for name in fields})

    def of(self, vit: Anatomy) -> Drawing:
        """The same images, preprocessed for another model, with boxes and masks on its input."""
        assert self.read is not None
        images = self.read(vit, self.indices)
        return replace(self, vit=vit, **{key: getattr(images, key) for key in ("images", "pictures", *ANNOTATIONS)})

    def of_prediction(self) -> Drawing:
        """The same with predicted classes in place of true ones; a target of the user still has priority."""
        return replace(self, labels=self.predictions)

    @property
    def models(self) -> list[Drawing]:
        """The drawing of each model: the first, and the second if there is one."""
        return [self] if self.other is None else [self, self.of(self.other)]

    @property
    def target(self) -> Target:
        """The class to explain: the user's; else the true ones if all are known; else None (the prediction)."""
        if self.user_target is not None or self.labels is None or bool((self.labels < 0).any()):
            return self.user_target
        return self.labels.tolist()

    @property
    def logits(self) -> Tensor:
        """The model's logits [B,C] of all images, computed in batches."""
        parts = self.images.split(default_batch_size(self.vit))
        return torch.cat([self.vit.logits(part).cpu() for part in parts])

    @property
    def predictions(self) -> Tensor:
        """The predicted classes [B]."""
        return top_classes(self.logits, self.vit.outputs).index[:, 0]

    @property
    def classes(self) -> Tensor:
        """The explained classes [B]."""
        targets = resolve_targets(self.target, len(self), self.vit.outcomes, self.vit.labels)
        return self.predictions if targets is None else targets.index[:, 0].cpu()

    @property
    def class_names(self) -> list[str]:
        """The first name of each explained class."""
        return [self.name_of(index) for index in self.classes.tolist()]

    def name_of(self, index: int) -> str:
        """The first name of a class."""
        return short(self.vit.label(int(index)))

    def working(self, methods: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
        """The methods that work on this model; the note names those that do not."""
        labelled = by_label(methods)
        reasons = {}
        for label, method in labelled.items():
            request = resolve(label, {"method": method} if isinstance(method, str) else method).suited(self.vit)
            reasons[label] = refusal(request, self.vit)
        refused = [label for label, reason in reasons.items() if reason is not None]
        if refused:
            self.say(f"{', '.join(refused)} left out: not available for {self.vit.name}")
        if not labelled:
            raise PatchlightError("no method was given; give methods=['genatt', …]")
        if len(refused) == len(labelled):
            reason = reasons[refused[0]]
            raise PatchlightError(f"none of the methods {', '.join(labelled)} works on {self.vit.name}: {reason}")
        return {label: method for label, method in labelled.items() if reasons[label] is None}

    def explain(self, methods: Mapping[str, Any] | Sequence[str], target: Target = None) -> Attributions:
        """Maps of all images by every method that works; the note names class-agnostic methods and constant maps."""
        target = self.target if target is None else target
        with warnings.catch_warnings(action="ignore", category=DegenerateMap):
            maps = explain(self.vit, self.images, self.working(methods), target, seed=self.seed, progress=self.progress)
        empty = {label: int(constant(att.scores.flatten(-2).flatten(0, -2)).sum()) for label, att in maps.items()}
        if any(empty.values()):
            counts = ", ".join(f"{count} of {label}" for label, count in empty.items() if count)
            self.say(f"constant maps have no heat: {counts}")
        agnostic = [label for label, att in maps.items() if ignores_class(att)]
        if agnostic:
            self.say(f"{', '.join(agnostic)}: {IGNORES_CLASS}")
        return maps

    def evaluate(self, maps: Any, metrics: Any, **options: Any) -> Evaluations:
        """Evaluate maps, or methods, on all images.

        If the true classes are not known, the explained ones count as true, and the note says so.
        """
        labels = self.labels
        if labels is None or bool((labels < 0).any()):
            labels = self.classes
            self.say("the true classes are unknown, so the explained ones count as true")
        annotations: dict[str, Any] = {"labels": labels, "boxes": self.boxes, "masks": self.masks}
        settings = {"seed": self.seed, "progress": self.progress, "target": self.target, **annotations, **options}
        evaluations: Evaluations = evaluate(self.vit, self.images, maps, metrics, **settings)
        return evaluations

    def heat(self, i: int, scores: Tensor, positive: bool = False, att: Attribution | None = None) -> Image.Image:
        """Scores [h,w] over picture i; `positive` shows only positive scores."""
        shown = scores.detach().float().cpu()
        shown = shown.clamp_min(0) if positive else shown
        scale = robust_scale(shown, False if positive else is_signed(shown))
        return blend(self.pictures[i], shown, scale, covers=(1.0, 1.0) if att is None else att.covers)

    def positive(self, i: int, att: Attribution, *class_number: int) -> Image.Image:
        """The positive part of the map of image i; with several classes, of the class with that number."""
        return self.heat(i, att.scores[(i, *class_number)], True, att)

    def say(self, words: str) -> None:
        """Add a sentence to the note."""
        if words not in self.notes:
            self.notes.append(words)

    def say_intervals(self, what: str = "bands") -> None:
        """Add the meaning of bands (or bars) to the note, or why there are none."""
        enough = len(self) >= FEWEST
        self.say(f"{what}: 95 % intervals over images" if enough else f"no intervals for fewer than {FEWEST} images")

    @property
    def note(self) -> str:
        """The text below the figure: its model and images, those of the paper, and the notes."""
        models = self.vit.name if self.other is None else f"{self.vit.name} and {self.other.name}"
        count = f"{len(self)} image{'' if len(self) == 1 else 's'}"
        drawn = f"Drawn with {models} and {count}" + (f"; the paper: {self.stand_in}" if self.stand_in else "")
        return ". ".join([drawn, *(words[:1].upper() + words[1:] for words in self.notes)]) + "."

    def sheet(self, height: float, width: float = PAGE) -> ShownFigure:
        """An empty figure with the note below; later notes are not on it."""
        return sheet.blank(self.note, height, width)

    def pictures_over_chart(
        self, rows: Sequence[Row], side: float, chart: float, spare: float = 0.0
    ) -> tuple[ShownFigure, Axes]:
        """A figure with rows of pictures above one chart, and the axes of the chart.

        `side` is the height of a row, `chart` that of the chart and `spare` that of titles, in inches.
        """
        fig = self.sheet(len(rows) * side + chart + spare)
        grid = fig.add_gridspec(len(rows) + 1, len(rows[0].cells), height_ratios=[*[side] * len(rows), chart])
        for r, row in enumerate(rows):
            for c, tile in enumerate(row.cells):
                assert tile is not None
                sheet.show(fig.add_subplot(grid[r, c]), tile.picture, tile.title, "" if c else row.label)
        return fig, fig.add_subplot(grid[len(rows), :])

    def rows(self, rows: Sequence[Row], width: float = PAGE, signed: Sequence[bool] = (False,)) -> ShownFigure:
        """Rows of pictures with the note below."""
        return sheet.pictures(self.note, rows, width, signed)


def read_drawing(vit: Anatomy, images: Any, annotations: Mapping[str, Any], most: int | None) -> Drawing:
    """Preprocess images and their annotations, by name; unreadable images are skipped, at most `most` are taken."""
    data = None if isinstance(images, Tensor) else images if isinstance(images, Data) else _as_data(images)
    count = len(images) if data is None else len(data)
    for what, values in annotations.items():
        if values is not None and len(values) != count:
            raise PatchlightError(f"{len(values)} {what} for {count} images; give one per image")

    def read(model: Anatomy, indices: Sequence[int]) -> Drawing:
        drawing = _of_tensor(model, images, indices) if data is None else _of_data(model, data, indices)
        parts: dict[str, Any] = {}
        if annotations["labels"] is not None:
            targets = resolve_targets(list(annotations["labels"]), count, model.outcomes, model.labels)
            assert targets is not None
            parts["labels"] = targets.index[:, 0][list(indices)]
        if model is vit or model.preprocess == vit.preprocess:  # boxes and masks lie on the first model's input
            if annotations["boxes"] is not None:
                parts["boxes"] = [annotations["boxes"][i] for i in indices]
            if annotations["masks"] is not None:
                parts["masks"] = torch.stack([torch.as_tensor(annotations["masks"][i]) for i in indices])
        return replace(drawing, **parts, indices=tuple(indices), read=read)

    return read(vit, range(count)[:most] if data is None else _readable(data, most))


def _readable(data: Data, most: int | None) -> list[int]:
    """Indices of the first `most` images that can be read."""
    good: list[int] = []
    for i in range(len(data)):
        if most is not None and len(good) == most:
            break
        try:
            data[i]
            good.append(i)
        except PatchlightError as error:
            warn(f"skipped: {error}", UserWarning)
    if not good:
        raise PatchlightError("none of the images can be read; give other images")
    return good


def _of_data(vit: Anatomy, data: Data, indices: Sequence[int]) -> Drawing:
    batch = load_batch(data, indices, vit)
    if batch.failures:
        raise PatchlightError(batch.failures[0][1])
    shown = [seen(data[i].image, vit.preprocess.size, vit.preprocess) for i in indices]
    foreign = batch.labels is not None and data.labels is not None and len(data.labels) != vit.outcomes
    drawing = Drawing(vit, batch.images, shown, None if foreign else batch.labels, batch.boxes, batch.masks)
    if foreign:
        drawing.say(f"the labels of {data.name} are not the classes of {vit.name}, so they are not used")
    return drawing


def _of_tensor(vit: Anatomy, images: Tensor, indices: Sequence[int]) -> Drawing:
    batch = to_batch(images[list(indices)].cpu(), vit.preprocess, vit.channels)
    shown = [seen(vit.preprocess.picture(image), vit.preprocess.size) for image in batch]
    return Drawing(vit, batch, shown)


def _as_data(images: Any) -> Data:
    """Paths, pictures or a folder as a data set without annotations."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        images = list_images(Path(images))
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    if not isinstance(images, Sequence) or not images:
        raise PatchlightError(f"images are {images!r}; give a folder, paths, PIL images, a tensor or a data set")
    wrong = next((image for image in images if not isinstance(image, str | Path | Image.Image)), None)
    if wrong is not None:
        raise PatchlightError(f"an image was given as {type(wrong).__name__}; give a path or a PIL image")
    named = {f"{i}": image for i, image in enumerate(images)}
    return Data("images", list(named), lambda name: Sample(name, open_image(named[name])))
