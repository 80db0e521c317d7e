"""The registry of figures, what a figure is given, and `draw`.

A figure is a function of a `Drawing` (the model, images with what is known of them, a seed) to a matplotlib Figure; its
keyword arguments, typed and with defaults, are its settings. Where a paper's own models are not to be had it runs on
whatever is given, and says so in a line below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict, TypeVar, Unpack

import torch
from PIL import Image
from pydantic import BeforeValidator
from torch import Tensor, nn

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.attribution import Attribution, Attributions
from patchlight.core.drawing import figure_bytes, figure_format, robust_scale
from patchlight.core.drawing.heat import blend, is_signed, seen
from patchlight.core.errors import PatchlightError, integer, warn
from patchlight.core.files import check_writable, write_whole
from patchlight.core.images import list_images, open_image, to_batch
from patchlight.core.progress import Progress, telling
from patchlight.core.registry import Entry, Listed, Registry, Settings, settings_of, settled
from patchlight.core.targets import Target, predicted, resolve_targets
from patchlight.data import Data, Sample
from patchlight.data.base import load_batch
from patchlight.engine import default_batch_size, explain
from patchlight.methods.requests import refusal, resolve
from patchlight.metrics.base import Evaluations
from patchlight.report.figures.numbers import check_numbers_path, write_numbers
from patchlight.report.figures.sheet import PAGE, Row, pictures, sheet
from patchlight.study.evaluate import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from patchlight.core.drawing.shown import ShownFigure

NEEDS = {
    "target": "the class to explain (target=…; at the command line --target NAME)",
    "labels": "the true classes (labels=…; at the command line --data KIND)",
    "boxes": "boxes around the objects (boxes=…; at the command line --data KIND)",
    "masks": "outlines of the objects (masks=…; at the command line --data KIND)",
    "other": "a second model (other=…; at the command line --other NAME)",
    "explainer": "a trained explainer (explainer=FOLDER; at the command line --explainer FOLDER)",
}
"""What a figure may need besides a model and images, and how it is given."""


def _named(methods: Any) -> Any:
    """Names in one string, between commas, as a list."""
    return [name.strip() for name in methods.split(",") if name.strip()] if isinstance(methods, str) else methods


Methods = Annotated[dict[str, Any] | list[str], BeforeValidator(_named)]
"""Names of methods, or by label a name or settings, as `explain` takes them."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """What a figure is given: a model and images with what is known of them.

    `images` [B,C,H,W] are prepared, and wait in main memory however many there are; `pictures` are what a person sees
    of them. `labels` [B] are the true classes, -1 where one is not known; `boxes` one [n,4] per image and `masks`
    [B,H,W] on the model's input; None where nobody gave any. `asked` is the class the user wants explained, `other` a
    second model, `explainer` the folder of a trained explainer. `notes` are said below the figure.
    """

    vit: Anatomy
    images: Tensor
    pictures: list[Image.Image]
    names: list[str]
    labels: Tensor | None = None
    boxes: list[Tensor] | None = None
    masks: Tensor | None = None
    asked: Target = None
    other: Anatomy | None = None
    explainer: Path | None = None
    seed: int = 0
    progress: Progress | bool = False
    stand_in: str = ""
    notes: list[str] = field(default_factory=list)
    chosen: tuple[int, ...] = ()
    """Which of the images given these are."""
    read: Callable[[Anatomy, Sequence[int]], Drawing] | None = None
    """Reads some of the images given for another model."""

    def __len__(self) -> int:
        return len(self.images)

    def select(self, indices: Iterable[int]) -> Drawing:
        """The same with some of its images; notes are still shared."""
        chosen = list(indices)
        asked = self.asked
        if isinstance(asked, Sequence) and not isinstance(asked, str | tuple):
            asked = [asked[i] for i in chosen]
        return replace(
            self,
            images=self.images[chosen],
            pictures=[self.pictures[i] for i in chosen],
            names=[self.names[i] for i in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            boxes=None if self.boxes is None else [self.boxes[i] for i in chosen],
            masks=None if self.masks is None else self.masks[chosen],
            asked=asked,
            chosen=tuple(self.chosen[i] for i in chosen),
        )

    def of(self, vit: Anatomy) -> Drawing:
        """The same images as another model is shown them; boxes and masks as they lie on its input."""
        assert self.read is not None
        found = self.read(vit, self.chosen)
        known = {key: getattr(found, key) for key in ("images", "pictures", "labels", "boxes", "masks")}
        return replace(self, vit=vit, **known)

    @property
    def models(self) -> list[Drawing]:
        """This, and the same with the second model where there is one."""
        return [self] if self.other is None else [self, self.of(self.other)]

    @property
    def target(self) -> Target:
        """The class to explain: the one asked, else the true ones where all are known, else None, the prediction."""
        if self.asked is not None or self.labels is None or bool((self.labels < 0).any()):
            return self.asked
        return self.labels.tolist()

    @property
    def logits(self) -> Tensor:
        """The model's logits [B,C] of all images, batch by batch."""
        parts = self.images.split(default_batch_size(self.vit))
        return torch.cat([self.vit.logits(part).cpu() for part in parts])

    @property
    def predictions(self) -> Tensor:
        """The classes [B] that the model predicts."""
        return predicted(self.logits, self.vit.outputs).index[:, 0]

    @property
    def classes(self) -> Tensor:
        """The classes [B] explained."""
        found = resolve_targets(self.target, len(self), self.vit.outcomes, self.vit.labels)
        return self.predictions if found is None else found.index[:, 0].cpu()

    def working(self, methods: Settings | Sequence[str]) -> dict[str, Any]:
        """Those of the methods that this model can be explained by; the others are named in the note."""
        asked = dict(methods) if isinstance(methods, Mapping) else {name: name for name in methods}
        reasons = {}
        for label, own in asked.items():
            request = resolve(label, {"method": own} if isinstance(own, str) else own).suited(self.vit)
            reasons[label] = refusal(request, self.vit)
        refused = [label for label, reason in reasons.items() if reason is not None]
        if refused:
            self.say(f"{', '.join(refused)} left out, which {self.vit.name} cannot be explained by")
        if len(refused) == len(asked):
            raise PatchlightError(
                f"none of the methods {', '.join(asked)} works on {self.vit.name}: {reasons[refused[0]]}"
                if asked
                else "no method was named; give methods=['genatt', …]"
            )
        return {label: own for label, own in asked.items() if reasons[label] is None}

    def explain(self, methods: Settings | Sequence[str], target: Target = None, **options: Any) -> Attributions:
        """Maps of all images by every method that works here, of the class to explain."""
        wanted = self.target if target is None else target
        given = {"seed": self.seed, "progress": self.progress, **options}
        return explain(self.vit, self.images, self.working(methods), wanted, **given)

    def evaluate(self, maps: Any, metrics: Any, **options: Any) -> Evaluations:
        """What metrics say of maps, or of methods that make them, on all images.

        Where the true classes are not known, those explained count as true, and the note says so.
        """
        labels = self.labels
        if labels is None or bool((labels < 0).any()):
            labels = self.classes
            self.say("true classes are not known, so the classes explained count as true")
        known = {"labels": labels, "boxes": self.boxes, "masks": self.masks}
        given: dict[str, Any] = {
            "target": self.target,
            "seed": self.seed,
            "progress": self.progress,
            **known,
            **options,
        }
        found: Evaluations = evaluate(self.vit, self.images, maps, metrics, **given)
        return found

    def heat(self, i: int, scores: Tensor, positive: bool = False, att: Attribution | None = None) -> Image.Image:
        """Scores [h,w] over picture i; `positive` shows what speaks for the class alone, the brighter the more."""
        shown = scores.detach().float().cpu()
        shown = shown.clamp_min(0) if positive else shown
        covers = (1.0, 1.0) if att is None else att.covers
        return blend(
            self.pictures[i], shown, robust_scale(shown, False if positive else is_signed(shown)), covers=covers
        )

    def name_of(self, index: int) -> str:
        """The first of a class's names."""
        return self.vit.label(int(index)).split(",")[0].strip()

    def say(self, words: str) -> None:
        """Add a sentence to the note."""
        if words not in self.notes:
            self.notes.append(words)

    @property
    def note(self) -> str:
        """The line below: what it was drawn with, what the paper's had, and what else there is to say."""
        models = self.vit.name if self.other is None else f"{self.vit.name} and {self.other.name}"
        count = f"{len(self)} image{'' if len(self) == 1 else 's'}"
        drawn = f"Drawn with {models} and {count}" + (f"; the paper: {self.stand_in}" if self.stand_in else "")
        return ". ".join([drawn, *(words[:1].upper() + words[1:] for words in self.notes)]) + "."

    def sheet(self, height: float, width: float = PAGE) -> ShownFigure:
        """An empty figure with the note below; what is said afterwards is not on it."""
        return sheet(self.note, height, width)

    def rows(self, rows: Sequence[Row], width: float = PAGE, signed: Sequence[bool] = (False,)) -> ShownFigure:
        """Rows of pictures with the note below."""
        return pictures(self.note, rows, width, signed)


@dataclass(frozen=True)
class FigureEntry(Entry):
    """A registered figure.

    `shows`: what is to be seen, in one sentence. `needs`: of NEEDS, what it cannot do without ("labels or target":
    either). `stand_in`: what the paper's own was drawn with, for the note; nothing where that is not known. `least`:
    images it needs at least.
    """

    shows: str = ""
    needs: AbstractSet[str] = frozenset()
    stand_in: str = ""
    least: int = 1


FIGURES: Registry[FigureEntry] = Registry(
    "figure",
    [
        f"patchlight.report.figures.{room}"
        for room in ("diffmask", "skipplus", "tis", "tokentm", "vitcx", "vitcx_appendix")
    ],
)


class AboutFigure(TypedDict, total=False):
    """Keywords of `register_figure`."""

    paper: Required[str]
    shows: Required[str]
    needs: AbstractSet[str]
    stand_in: str
    least: int
    quick: Settings
    aliases: tuple[str, ...]


F = TypeVar("F", bound=Callable[..., "Figure"])


def register_figure(name: str, **about: Unpack[AboutFigure]) -> Callable[[F], F]:
    """Register a figure: a function of a Drawing whose keyword arguments, typed and with defaults, are its settings.

    A figure with a setting `shown` is given that many images, the first ones; another is given all.
    """
    unknown = {one for need in about.get("needs", ()) for one in need.split(" or ")} - set(NEEDS)
    if unknown:
        raise PatchlightError(f"figure '{name}' needs {sorted(unknown)}; what can be given is {sorted(NEEDS)}")

    def register(function: F) -> F:
        FIGURES.add(FigureEntry(name, function, **about))
        return function

    return register


@dataclass(frozen=True)
class FigureInfo:
    """A line of the table of figures."""

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


def list_figures() -> Listed[FigureInfo]:
    """All figures: name, the paper's own, what it shows, what it needs, and its settings."""
    return Listed(
        FigureInfo(
            name,
            entry.aliases,
            entry.paper,
            entry.shows,
            needed(entry),
            entry.stand_in,
            {key: str(setting) for key, setting in settings_of(entry.function).items()},
        )
        for name, entry in sorted(FIGURES.items(), key=lambda item: _place(item[0]))
    )


def needed(entry: FigureEntry) -> tuple[str, ...]:
    """What a figure needs besides a model, in words."""
    count = "an image" if entry.least == 1 else f"{entry.least} images"
    words = {"other": "a second model", "explainer": "a trained explainer", "target": "a target"}
    told = (" or ".join(words.get(one, one) for one in need.split(" or ")) for need in sorted(entry.needs))
    return (count, *told)


def _place(name: str) -> tuple[str, int, str]:
    """Papers by name, their figures by number, then those without one."""
    paper, _, which = name.partition("-")
    return paper, int(which) if which.isdecimal() else 1000, which


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
    """A figure of a paper, drawn with this model and these images.

    `name`: one of `list_figures()`. `images`: a folder, paths, PIL images, a preprocessed tensor, or a data set
    (`pl.open_data`), which brings its labels, boxes and masks; else `labels` are one class per image, `boxes` one [n,4]
    per image and `masks` [B,H,W], both on the model's input. `target`: the class to explain; by default the true ones
    where all are known, else the predictions. `other` is a second model, `explainer` the folder of a trained one, for
    figures that need them. Further keywords are the figure's settings. With `path` it is also written there, whole or
    not at all: pdf (fonts embedded), svg or png (300 dots an inch). `numbers` is a .csv or .json file for the numbers
    that the figure shows.

    >>> draw("skipplus-2", vit, "photos/", "fig.pdf", shown=2)      # doctest: +SKIP
    """
    entry = FIGURES.find(name)
    known = settings_of(entry.function)
    own = settled(entry.name, known, {}, settings, _OPTIONS)
    if path is not None:
        figure_format(path)
        check_writable(path)
    if numbers is not None:
        check_numbers_path(numbers)
        check_writable(numbers)
    vit = wrap(vit)
    given = {"labels": labels, "boxes": boxes, "masks": masks}
    with telling(progress, f"drawing {entry.name}"):
        drawing = _drawing(vit, images, given, own.get("shown"))
    drawing = replace(
        drawing,
        asked=target,
        other=None if other is None else wrap(other),
        explainer=None if explainer is None else Path(explainer),
        seed=integer("seed", seed, 0),
        progress=progress,
        stand_in=entry.stand_in,
    )
    _check_needs(entry, drawing)
    fig: ShownFigure = entry.function(drawing, **own)
    if path is not None:
        write_whole(path, figure_bytes(fig, path))
    if numbers is not None:
        write_numbers(fig, numbers)
    return fig


_OPTIONS = ("target", "labels", "boxes", "masks", "other", "explainer", "numbers", "seed", "progress", "path")


def _check_needs(entry: FigureEntry, drawing: Drawing) -> None:
    there = {need for need in NEEDS if getattr(drawing, "asked" if need == "target" else need) is not None}
    there |= {"explainer"} if drawing.vit.name == "pocket" else set()  # the bundled model brings its own
    for need in sorted(entry.needs):
        either = need.split(" or ")
        if not there & set(either):
            raise PatchlightError(f"figure '{entry.name}' needs {', or '.join(NEEDS[one] for one in either)}")
    if len(drawing) < entry.least:
        raise PatchlightError(f"figure '{entry.name}' needs {entry.least} images; {len(drawing)} can be read")


def _drawing(vit: Anatomy, images: Any, given: Mapping[str, Any], most: int | None) -> Drawing:
    """The images prepared, with what is known of them; those that cannot be read are left out and told."""
    data = None if isinstance(images, Tensor) else images if isinstance(images, Data) else _as_data(images)
    count = len(images) if data is None else len(data)
    for what, own in given.items():
        if own is not None and len(own) != count:
            raise PatchlightError(f"{len(own)} {what} for {count} images; give one per image")

    def read(model: Anatomy, chosen: Sequence[int]) -> Drawing:
        if data is None:
            return _of_tensor(model, images, chosen)
        return _of_data(model, data, chosen)

    def with_given(model: Anatomy, chosen: Sequence[int]) -> Drawing:
        drawing = read(model, chosen)
        known: dict[str, Any] = {}
        if given["labels"] is not None:
            known["labels"] = _classes(given["labels"], model)[list(chosen)]
        if model is vit or model.preprocess == vit.preprocess:  # theirs lie on the first model's input
            for what in ("boxes", "masks"):
                if given[what] is not None:
                    known[what] = [given[what][i] for i in chosen]
            if "masks" in known:
                known["masks"] = torch.stack([torch.as_tensor(mask) for mask in known["masks"]])
        return replace(drawing, **known, chosen=tuple(chosen), read=with_given)

    return with_given(vit, range(count)[:most] if data is None else _readable(data, most))


def _readable(data: Data, most: int | None) -> list[int]:
    """The first images that can be read, at most so many."""
    good: list[int] = []
    for i in range(len(data)):
        if most is not None and len(good) == most:
            break
        try:
            data[i]
            good.append(i)
        except PatchlightError as error:
            warn(f"left out: {error}", UserWarning)
    if not good:
        raise PatchlightError("none of the images can be read; give other images")
    return good


def _of_data(vit: Anatomy, data: Data, chosen: Sequence[int]) -> Drawing:
    batch = load_batch(data, chosen, vit)
    if batch.failures:
        raise PatchlightError(batch.failures[0][1])
    shown = [seen(data[i].image, vit.preprocess.size, vit.preprocess) for i in chosen]
    foreign = batch.labels is not None and data.labels is not None and len(data.labels) != vit.outcomes
    labels = None if foreign else batch.labels
    drawing = Drawing(vit, batch.images, shown, batch.names, labels, batch.boxes, batch.masks)
    if foreign:
        drawing.say(f"the labels of {data.name} are not the classes of {vit.name}, and are left out")
    return drawing


def _of_tensor(vit: Anatomy, images: Tensor, chosen: Sequence[int]) -> Drawing:
    batch = to_batch(images[list(chosen)].cpu(), vit.preprocess, vit.channels)
    shown = [seen(vit.preprocess.picture(image), vit.preprocess.size) for image in batch]
    return Drawing(vit, batch, shown, [str(i) for i in chosen])


def _classes(labels: Any, vit: Anatomy) -> Tensor:
    found = resolve_targets(list(labels), len(labels), vit.outcomes, vit.labels)
    assert found is not None
    return found.index[:, 0]


def _as_data(images: Any) -> Data:
    """Paths, pictures or a folder as a data set that knows nothing but its images."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        images = list_images(Path(images))
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    if not isinstance(images, Sequence) or not images:
        raise PatchlightError(f"images are {images!r}; give a folder, paths, PIL images, a tensor or a data set")
    wrong = next((one for one in images if not isinstance(one, str | Path | Image.Image)), None)
    if wrong is not None:
        raise PatchlightError(f"an image was given as {type(wrong).__name__}; give a path or a PIL image")
    named = {f"{i}": one for i, one in enumerate(images)}
    return Data("images", list(named), lambda name: Sample(name, open_image(named[name])))
