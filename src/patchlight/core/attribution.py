"""Results of explaining: the maps of one method (`Attribution`) and of several (`Attributions`)."""

from __future__ import annotations

import math
import operator
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from patchlight import __version__
from patchlight.core.errors import PatchlightError
from patchlight.core.frames import make_frame, stack_frames
from patchlight.core.images import Picture, Preprocess
from patchlight.core.layout import IMAGE_AXES, Geometry
from patchlight.core.photos import MOST, as_picture
from patchlight.core.resize import Upsampling, at_size, to_cells
from patchlight.core.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame
    from PIL.Image import Image

    from patchlight.core.drawing.shown import ShownFigure


@cache
def _library_versions() -> dict[str, str]:
    installed = {}
    for package in ("torch", "timm", "transformers", "torchvision"):
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def versions() -> dict[str, str]:
    """The versions of Python, Patchlight and the installed libraries that its numbers depend on."""
    return {"python": platform.python_version(), "patchlight": __version__, **_library_versions()}


class _NoSuchImage(PatchlightError, IndexError):
    """An index out of range; an IndexError, so that a loop over an attribution ends."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """Maps of one method: a raw, signed score for each image region, and how they were made.

    `pl.explain` returns one. Upsampling, masking and colouring are separate steps.

    Args:
        scores: CPU float32 [B,h,w] at the method's own resolution; [B,T,h,w] for several classes per image. Maps of
            videos, volumes and sounds have the axes in `axes` instead of rows and columns.
        target: The explained classes [B] or [B,T].
        method: The name of the method.
        model: The name of the model.
        image_size: Height and width of the model's input, or its length along each axis.
        level: Whether scores belong to patches ("token") or pixels ("pixel").
        score: What was explained: "logit", "probability", "cosine" or the name of a function.
        settings: The settings of the method.
        against: The classes that `target` was contrasted with, or None.
        labels: The names of the classes in `target`.
        against_labels: The names of the classes in `against`.
        head: The question, if it was not the model's own classifier: the head's kind and content.
        seed: The random seed.
        precision: "full", "tf32", "bf16" or "fp16"; two joined by "+" if float16 overflowed for some images;
            empty if unknown.
        versions: Versions of Python and of the libraries.
        preprocess: How images were prepared, which determines where the map lies on an image.
        extent: The pixels (rows, columns) that the scores cover, from the top left, if not the whole image.
        weights: A hash of the model's weights; empty if unknown.
        images: A hash of each preprocessed image; empty if unknown.
        error: The standard error of each score, for sampling methods; NaN where unknown.
        samples: The number of masks, coalitions or noises sampled for each image; empty for other methods.
        facts: Further numbers of the method, by name, one per image: "masks" of ViT-CX after clustering.
        ignores_class: Whether the method gives every class the same map; False if a file does not have it.
        axes: The name of each axis of a map: ("row", "column") for images.
        geometry: The part of the input that each score covers; None for images.
        photos: Small pictures of the first images (at most 16) as uint8 [3,h,w], for display; not saved.
        question: The head, if it is a question about the model's output (`pl.heads.Box`, …); not saved.
        words: For `pl.heads.Answer`, the words of each image's answer, with probability, tokens and gain over the
            answer without the image; not saved.

    Example:
        >>> att = pl.explain(vit, "cat.jpg", target="cat")                                      # doctest: +SKIP
        >>> att.show()                                                                          # doctest: +SKIP
        >>> heat = att.numpy()[0]                                                               # doctest: +SKIP
    """

    scores: Tensor
    target: Tensor
    method: str
    model: str
    image_size: tuple[int, ...]
    level: Literal["token", "pixel"] = "token"
    score: str = "logit"
    settings: dict[str, Any] = field(default_factory=dict)
    against: Tensor | None = None
    labels: tuple[str, ...] = ()
    against_labels: tuple[str, ...] = ()
    head: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    precision: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    extent: tuple[int, ...] | None = None
    weights: str = ""
    images: tuple[str, ...] = ()
    error: Tensor | None = None
    samples: tuple[int, ...] = ()
    facts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    ignores_class: bool = False
    axes: tuple[str, ...] = IMAGE_AXES
    geometry: Geometry | None = None
    photos: tuple[Tensor, ...] = ()
    question: Any = None
    words: tuple[tuple[Any, ...], ...] = ()

    @property
    def covers(self) -> tuple[float, ...]:
        """The share of the image's height and width that the scores cover; above 1 if the image was padded."""
        sides = zip(self.extent or self.image_size, self.image_size, strict=True)
        return tuple(covered / side for covered, side in sides)

    @property
    def grid(self) -> tuple[int, ...]:
        """Rows and columns of `scores`; its length along each of `axes`."""
        return tuple(self.scores.shape[-len(self.axes) :])

    @property
    def several(self) -> bool:
        """Whether there are several maps per image, one for each class: `scores` [B,T,...]."""
        return self.scores.ndim == len(self.axes) + 2

    @property
    def pictures(self) -> bool:
        """Whether the maps are those of images."""
        return self.axes == IMAGE_AXES

    @property
    def target_names(self) -> tuple[str, ...]:
        """The name of the explained class, for each map."""
        return self.labels or tuple(f"class {int(i)}" for i in self.target.flatten())

    @property
    def against_names(self) -> tuple[str, ...]:
        """The name of the class that each map is contrasted with; empty without a contrast."""
        if self.against is None:
            return ()
        return self.against_labels or tuple(f"class {int(i)}" for i in self.against.flatten())

    @property
    def captions(self) -> tuple[str, ...]:
        """What each map explains: "cat", or "cat against dog"."""
        if not self.against_names:
            return self.target_names
        return tuple(f"{a} against {b}" for a, b in zip(self.target_names, self.against_names, strict=True))

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, images: int | slice) -> Attribution:
        """The attribution of one image (still with a batch axis) or of a slice of images."""
        if not isinstance(images, slice):
            place = self._place(operator.index(images))
            images = slice(place, place + 1)
        rows = range(len(self))[images]
        per_image = max(len(self.labels) // max(len(self), 1), 1)
        pick = images if rows.step > 0 else list(rows)  # torch has no slices with a negative step
        return self._select(
            pick,
            labels=tuple(name for i in rows for name in self.labels[i * per_image : (i + 1) * per_image]),
            against_labels=self.against_labels[images],
            images=self.images[images],
            words=self.words[images],
            samples=self.samples[images],
            facts={name: values[images] for name, values in self.facts.items()},
            photos=tuple(self.photos[i] for i in takewhile(lambda i: i < len(self.photos), rows)),
        )

    def only(self, name: str) -> Attribution:
        """The maps of one of several explained classes, by its name: one word of an answer, one of several boxes.

        Args:
            name: The name of the class, one of `target_names`.
        """
        count = self.scores.shape[1] if self.several else 1
        rows = [self.target_names[i * count : (i + 1) * count] for i in range(len(self))]
        if any(name not in row for row in rows):
            names = ", ".join(dict.fromkeys(self.target_names))
            raise PatchlightError(f"there is no map for '{name}'; the maps are for {names}")
        if not self.several:
            return self
        places = torch.arange(len(self)), torch.tensor([row.index(name) for row in rows])
        return self._select(places, labels=(name,) * len(self))

    def _select(self, maps: Any, **changes: Any) -> Attribution:
        """The maps at these indices of `scores`, with their classes and errors; `changes` are other fields."""
        tensors = {key: getattr(self, key) for key in ("scores", "target", "against", "error")}
        return replace(self, **{key: rows[maps] for key, rows in tensors.items() if rows is not None}, **changes)

    def _place(self, index: int) -> int:
        """The position of an image, counted from the end if negative."""
        if not -len(self) <= index < len(self):
            raise _NoSuchImage(f"there is no image {index}; this attribution has {len(self)}")
        return index % len(self)

    @staticmethod
    def concat(parts: Sequence[Attribution]) -> Attribution:
        """Join attributions of several batches of images into one.

        Args:
            parts: Attributions of the same method, model and resolution.
        """
        if len({(p.method, p.model, p.weights, p.axes, p.scores.shape[1:], p.against is None) for p in parts}) != 1:
            raise PatchlightError(
                "only attributions of one method, model, resolution and kind of target can be joined; given: "
                + (", ".join(map(repr, parts)) or "none")
            )
        against = [part.against for part in parts if part.against is not None]
        error = [part.error for part in parts if part.error is not None]
        return replace(
            parts[0],
            scores=torch.cat([part.scores for part in parts]),
            target=torch.cat([part.target for part in parts]),
            against=torch.cat(against) if against else None,
            labels=tuple(label for part in parts for label in part.labels),
            against_labels=tuple(label for part in parts for label in part.against_labels),
            images=tuple(image for part in parts for image in part.images),
            words=tuple(words for part in parts for words in part.words),
            error=torch.cat(error) if len(error) == len(parts) else None,
            samples=tuple(c for part in parts for c in part.samples) if all(p.samples for p in parts) else (),
            facts={
                name: tuple(value for part in parts for value in part.facts[name])
                for name in parts[0].facts
                if all(name in part.facts for part in parts)
            },
            photos=_leading_photos(parts),
        )

    def numpy(self) -> NDArray[np.float32]:
        """A copy of the scores as an array [B,h,w], or [B,T,h,w] for several classes per image.

        Example:
            >>> heat = att.numpy()[0]                                                           # doctest: +SKIP
        """
        return self.scores.numpy().copy()

    def upsample(self, size: int | Sequence[int] | None = None, upsampling: Upsampling = "bilinear") -> Tensor:
        """Scores at another resolution [..., H, W], along each of `axes`.

        Where cells overlap, a place gets the mean of its cells.

        Args:
            size: Height and width, or one number for both; by default the model's input size.
            upsampling: "bilinear" (trilinear for three axes), "bicubic" or "nearest".
        """
        size = self.image_size if size is None else (size,) * len(self.axes) if isinstance(size, int) else size
        if self.geometry is not None and self.geometry.overlaps:
            return self.geometry.overlapping(self.scores, size)
        return at_size(self.scores, size, self.covers, upsampling)

    def inside(self, region: Tensor) -> Tensor:
        """The share [B] of the positive scores that lies inside a region; NaN where no score is positive.

        Args:
            region: The pixels [H,W] of the model's input, 1 inside and 0 outside.
        """
        scores = self.scores.double().clamp(min=0)
        part = scores * to_cells(region.to(scores), self.grid, self.extent)
        return part.flatten(-2).sum(-1) / scores.flatten(-2).sum(-1)

    def over(self, *axes: str) -> Tensor:
        """Sums of the scores over some axes: `att.over("row", "column")` is one number per time step of a video.

        Args:
            axes: Names of the axes that are summed over.
        """
        wrong = [name for name in axes if name not in self.axes]
        if wrong or not axes:
            what = f"there is no axis '{wrong[0]}'" if wrong else "no axis was named"
            raise PatchlightError(f"{what}; the axes of this map are {', '.join(self.axes)}")
        return self.scores.sum([self.axes.index(name) - len(self.axes) for name in dict.fromkeys(axes)])

    def top_patches(self, k: int = 10) -> Tensor:
        """The highest-scoring cells as (row, column), best first [..., k, 2]; ties keep reading order.

        A cell has one number for each of `axes`.

        Args:
            k: The number of cells.
        """
        return torch.stack(torch.unravel_index(self._top_cells(k), self.grid), -1)

    def _top_cells(self, k: int) -> Tensor:
        """Indices [...,k] of the highest-scoring cells in C order, best first."""
        cells = math.prod(self.grid)
        if not 1 <= k <= cells:
            raise PatchlightError(f"k is {k}, but a map has {cells} cells; give 1 to {cells}")
        flat = self.scores.flatten(-len(self.axes))
        return flat.sort(stable=True, dim=-1, descending=True).indices[..., :k]

    def mask(self, fraction: float = 0.2) -> Tensor:
        """A mask that is True on the highest-scoring cells.

        Args:
            fraction: The share of the cells (rounded, at least one cell).
        """
        if not 0 < fraction <= 1:
            raise PatchlightError(f"fraction is {fraction}; give a number above 0, at most 1")
        best = self._top_cells(max(1, round(fraction * math.prod(self.grid))))
        flat = torch.zeros(self.scores.shape, dtype=torch.bool).flatten(-len(self.axes))
        return flat.scatter(-1, best, True).view(self.scores.shape)

    def overlay(self, image: Picture | Tensor | None = None, index: int = 0, **options: Any) -> Image:
        """One map as heat over its photograph, as a PIL image. For several classes, the first is shown.

        Args:
            image: The photograph: a PIL image, a path or a preprocessed [C,H,W] tensor. It is cropped as for the
                model. By default the small copy that `explain` keeps of the first 16 images.
            index: Which image of the batch.
            options: See `patchlight.core.drawing.overlay`.

        Example:
            >>> att.overlay().save("heat.png")                                                  # doctest: +SKIP
        """
        from patchlight.core.drawing import overlay

        if not self.pictures:
            raise PatchlightError(
                f"only maps of images have overlays; this map has {' and '.join(self.axes)}: use figure()"
            )
        place = self._place(index)
        if image is None and place >= len(self.photos):
            raise PatchlightError(f"there is no photograph of image {index}; give it as `image`")
        if isinstance(image, Tensor) and (self.preprocess is None or image.ndim != 3):
            raise PatchlightError("give `image` as a picture, or as one preprocessed [C,H,W] tensor of this model")
        scores = self.scores[place]
        options = {"covers": self.covers, **options}
        if image is None:
            photo = self.photos[place]
            image = as_picture(photo, max(photo.shape))
        elif isinstance(image, Tensor):
            image = self.preprocess.picture(image)  # type: ignore[union-attr]
        else:
            options = {"preprocess": self.preprocess, **options}  # pictures and tensors are cropped already
        return overlay(scores if scores.ndim == 2 else scores[0], image, self.image_size, **options)

    def plot(
        self,
        ax: Axes | None = None,
        index: int = 0,
        image: Picture | Tensor | None = None,
        coordinates: Any = None,
    ) -> Axes:
        """Draw one map into matplotlib axes, over its photograph if there is one.

        A bag of tiles is drawn at its coordinates, or as a bar chart of the 16 highest and the 16 lowest tiles.

        Args:
            ax: The axes; by default those of a new figure of pyplot.
            index: Which image of the batch; for several classes, the first is drawn.
            image: As in `overlay`.
            coordinates: For a bag, the place [n,2] of each tile: x and y, from the top left.

        Returns:
            The axes.

        Example:
            >>> figure, axes = plt.subplots(1, 2)                                               # doctest: +SKIP
            >>> att.plot(axes[0]), other.plot(axes[1])                                          # doctest: +SKIP
        """
        from patchlight.core.drawing import heat_picture
        from patchlight.core.drawing.tiles import draw_tiles

        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.subplots()[1]
        place = self._place(index) * (self.target.numel() // len(self))
        ax.set_title(f"{self.method}: {self.captions[place]}", parse_math=False)
        if self.pictures and self.grid[1] == 1:
            draw_tiles(ax, self.scores.reshape(-1, self.grid[0])[place], coordinates)
            return ax
        ax.imshow(heat_picture(self, place) if image is None else self.overlay(image, index))
        ax.set_axis_off()
        return ax

    def figure(self, path: str | Path | None = None) -> ShownFigure:
        """Draw the maps over the stored photographs: see `Attributions.figure`.

        Videos are drawn as a contact sheet of frames and the sum of each time step, volumes as three slices through
        the highest cell, and sounds as heat over time and frequency.

        Args:
            path: A file to write the figure to as well; its suffix is the format.
        """
        return Attributions({self.method: self}).figure(path)

    def show(self) -> None:
        """Show the maps below the cell of a notebook, or else in the image viewer.

        Without a screen, a PNG file is written to the temporary folder and its path is printed.

        Example:
            >>> pl.explain(vit, "cat.jpg").show()                                               # doctest: +SKIP
        """
        from patchlight.core.display import show
        from patchlight.core.drawing.shown import ShownFigure

        drawn = self.photos or not self.pictures
        show(self, lambda: self.figure() if drawn else self.plot(ShownFigure().subplots()).figure)

    def to_frame(self) -> DataFrame:
        """A pandas table with a row per cell: image, method, target, label, against, row, column, score and error.

        Maps of other inputs have a column for each of `axes`.
        """
        maps, cells = self.target.numel(), math.prod(self.grid)
        places = zip(self.axes, np.indices(self.grid), strict=True)
        image = np.repeat(np.arange(len(self)), maps // max(len(self), 1))
        against = self.against_names
        return make_frame(
            {
                "image": np.repeat(image, cells),
                "method": self.method,
                "target": np.repeat(self.target.flatten().numpy(), cells),
                "label": np.repeat(np.array(self.target_names, dtype=object), cells),
                **({"against": np.repeat(np.array(against, dtype=object), cells)} if against else {}),
                **{name: np.tile(place.ravel(), maps) for name, place in places},
                "score": self.scores.flatten().numpy(),
                **({} if self.error is None else {"error": self.error.flatten().numpy()}),
            }
        )

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write scores (safetensors) and metadata (JSON) to a new folder, completely or not at all.

        Args:
            folder: A folder that does not exist yet.
            force: Replace the attribution in the folder.

        Returns:
            The folder.

        Example:
            >>> pl.Attribution.load(att.save("maps/cat"))                                       # doctest: +SKIP
        """
        from patchlight.core.attribution_files import write_attribution

        return write_attribution(self, Path(folder), force)

    @staticmethod
    def load(folder: str | Path) -> Attribution:
        """Read an attribution that `save` wrote.

        Args:
            folder: The folder that was given to `save`.

        Raises:
            PatchlightError: If the folder holds no attribution, or a damaged one.
        """
        from patchlight.core.attribution_files import read_attribution

        return read_attribution(Path(folder))

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.grid))
        first = self[:4].captions  # only of the first images, because there may be many
        names = ", ".join(dict.fromkeys(first[:3])) + ("…" if len(first) > 3 else "")
        images = plural(len(self), "image")
        return f"<Attribution by {self.method} of {self.model} for {names}: {images}, {grid} {self.level}s>"

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import heat_html

        return heat_html(self)


class Attributions(dict[str, Attribution]):
    """Maps of several methods for the same images: a dict by method, shown as a table in notebooks.

    `pl.explain` with a list of methods returns one.

    Example:
        >>> maps = pl.explain(vit, "cat.jpg", ["genatt", "tis"])                                # doctest: +SKIP
        >>> maps["tis"].top_patches(5)                                                          # doctest: +SKIP
    """

    def to_frame(self) -> DataFrame:
        """The pandas tables of all methods in one; `method` is the key in this dict."""
        return stack_frames(att.to_frame().assign(method=label) for label, att in self.items())

    def figure(self, path: str | Path | None = None) -> ShownFigure:
        """Draw the maps over the stored small photographs of the first images.

        `pl.figure` takes the images themselves.

        Args:
            path: A file to write the figure to as well; its suffix is the format.
        """
        from patchlight.core.drawing import photo_figure

        return photo_figure(self, path)

    def show(self) -> None:
        """Show the maps side by side: see `Attribution.show`."""
        from patchlight.core.display import show

        show(self, self.figure)

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write each attribution to its own folder below `folder`.

        Args:
            folder: A folder that does not exist yet.
            force: Replace all attributions in the folder; other files stay.

        Returns:
            The folder.

        Example:
            >>> pl.Attributions.load(maps.save("maps/"))                                        # doctest: +SKIP
        """
        from patchlight.core.attribution_files import write_attributions

        return write_attributions(self, Path(folder), force)

    @staticmethod
    def load(folder: str | Path) -> Attributions:
        """Read the attributions that `save` wrote, in alphabetical order.

        Args:
            folder: The folder that was given to `save`.
        """
        from patchlight.core.attribution_files import read_attributions

        return Attributions(read_attributions(Path(folder)))

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import maps_html

        return maps_html(self)


def _leading_photos(parts: Sequence[Attribution]) -> tuple[Tensor, ...]:
    """The photographs of several attributions, up to the first image that has none."""
    photos: list[Tensor] = []
    for part in parts:
        photos.extend(part.photos)
        if len(part.photos) < len(part):
            break
    return tuple(photos[:MOST])
