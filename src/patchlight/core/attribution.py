"""The result: raw signed scores with their provenance. Upsampling, masking and colouring are steps of the reader."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import Tensor

from patchlight import __version__
from patchlight.core.errors import PatchlightError
from patchlight.core.files import write_whole
from patchlight.core.frames import frame, stacked
from patchlight.core.images import MAX_PIXELS, Preprocess
from patchlight.core.photos import MOST
from patchlight.core.resize import Upsampling, at_size

if TYPE_CHECKING:
    from pandas import DataFrame

    from patchlight.core.drawing.shown import ShownFigure

_FORMAT = 1
_ABOUT, _SCORES = "attribution.json", "scores.safetensors"
_TENSORS, _UNSAVED = ("scores", "target", "against", "error"), ("photos",)
_HEADER = 2**16
"""Bytes that a header of these four tensors never needs."""


@cache
def _installed() -> tuple[tuple[str, str], ...]:
    found = {"python": platform.python_version(), "patchlight": __version__}
    for package in ("torch", "timm", "transformers", "torchvision"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return tuple(found.items())


def versions() -> dict[str, str]:
    """The versions an attribution was made with."""
    return dict(_installed())


@dataclass(frozen=True, eq=False)
class Attribution:
    """Scores of image regions for a class: what a method said, untouched.

    `scores` is CPU float32 [B,h,w] at the method's own resolution (the patch grid, or pixels where `level` is
    "pixel"), raw and signed; [B,T,h,w] when several classes an image were asked for. `target` [B] or [B,T] holds the
    classes, `against` the classes they were contrasted with, `labels` and `against_labels` their names.
    """

    scores: Tensor
    target: Tensor
    method: str
    model: str
    image_size: tuple[int, int]
    level: Literal["token", "pixel"] = "token"
    score: str = "logit"
    settings: dict[str, Any] = field(default_factory=dict)
    against: Tensor | None = None
    labels: tuple[str, ...] = ()
    against_labels: tuple[str, ...] = ()
    head: dict[str, Any] = field(default_factory=dict)
    """What was asked of the model, where that is not its own classifier: the head's kind and what it was made of."""
    seed: int = 0
    precision: str = ""
    """The precision it was computed in: "full", "tf32", "bf16" or "fp16"; two joined by "+" where float16 was too small
    for some images; empty where not known."""
    versions: dict[str, str] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    """How the images were shown to the model, so that the heat can be laid where it belongs."""
    extent: tuple[int, int] | None = None
    """The pixels (rows, columns) that the scores lie on, from the top left, where those are not the whole image."""
    weights: str = ""
    """The hash of the model's weights, and `images` of each image as the model saw it; empty where not known."""
    images: tuple[str, ...] = ()
    error: Tensor | None = None
    """Of a method that draws, the standard error of each of its scores, of the same shape; NaN where not known."""
    samples: tuple[int, ...] = ()
    """How many masks, coalitions or noises were drawn for each image; empty where a method draws none."""
    facts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Other numbers that the method reports, by name one for each image: "masks" of ViT-CX, after clustering."""
    photos: tuple[Tensor, ...] = ()
    """What the model saw of the first images, small, for display alone: uint8 [3,h,w], at most 16; not saved."""

    @property
    def covers(self) -> tuple[float, float]:
        """The share of the image's height and width that the scores lie on; above 1 where it was padded."""
        rows, columns = self.extent or self.image_size
        return rows / self.image_size[0], columns / self.image_size[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of `scores`."""
        return self.scores.shape[-2], self.scores.shape[-1]

    @property
    def explained(self) -> tuple[str, ...]:
        """The names of the classes explained, one per map."""
        return self.labels or tuple(f"class {int(i)}" for i in self.target.flatten())

    @property
    def opposed(self) -> tuple[str, ...]:
        """The names of the classes these are contrasted with; none where there is no contrast."""
        if self.against is None:
            return ()
        return self.against_labels or tuple(f"class {int(i)}" for i in self.against.flatten())

    @property
    def named(self) -> tuple[str, ...]:
        """What each map is about, in words: "a", or "a against b"."""
        if not self.opposed:
            return self.explained
        return tuple(f"{a} against {b}" for a, b in zip(self.explained, self.opposed, strict=True))

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, images: int | slice) -> Attribution:
        """The attribution of one image (still with a batch axis) or of a slice of them."""
        if isinstance(images, int):
            if not -len(self) <= images < len(self):
                raise IndexError(f"image {images} of {len(self)}")
            images = slice(images % len(self), images % len(self) + 1)
        per_image = max(len(self.labels) // max(len(self), 1), 1)
        rows = range(len(self))[images]
        labels = tuple(name for i in rows for name in self.labels[i * per_image : (i + 1) * per_image])
        changed = {"scores": self.scores[images], "target": self.target[images], "labels": labels}
        changed |= {"images": self.images[images], "photos": _leading(self.photos, rows)}
        changed |= {"samples": self.samples[images], "error": None if self.error is None else self.error[images]}
        changed |= {"facts": {name: values[images] for name, values in self.facts.items()}}
        if self.against is not None:
            changed |= {"against": self.against[images], "against_labels": self.against_labels[images]}
        return replace(self, **changed)  # type: ignore[arg-type]

    @staticmethod
    def joined(parts: Sequence[Attribution]) -> Attribution:
        """The attributions of one method and model, for several batches of images, as one."""
        if len({(p.method, p.model, p.weights, p.scores.shape[1:], p.against is None) for p in parts}) != 1:
            told = ", ".join(map(repr, parts)) or "none"
            raise PatchlightError(
                f"attributions of one method, model, resolution and kind of target can be joined; given: {told}"
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
            error=torch.cat(error) if len(error) == len(parts) else None,
            samples=tuple(c for part in parts for c in part.samples) if all(p.samples for p in parts) else (),
            facts={
                name: tuple(value for part in parts for value in part.facts[name])
                for name in parts[0].facts
                if all(name in part.facts for part in parts)
            },
            photos=_joined_photos(parts),
        )

    def upsample(self, size: int | tuple[int, int] | None = None, upsampling: Upsampling = "bilinear") -> Tensor:
        """Scores at another resolution, the model's input size by default: [..., H, W]."""
        size = self.image_size if size is None else (size, size) if isinstance(size, int) else size
        return at_size(self.scores, size, self.covers, upsampling)

    def top_patches(self, k: int = 10) -> Tensor:
        """The k highest-scoring cells as (row, column), best first: [..., k, 2]. Ties keep reading order."""
        cells = self.grid[0] * self.grid[1]
        if not 1 <= k <= cells:
            raise PatchlightError(f"there are {cells} cells; {k} cannot be picked")
        order = self.scores.flatten(-2).sort(stable=True, dim=-1, descending=True).indices[..., :k]
        return torch.stack([order // self.grid[1], order % self.grid[1]], -1)

    def mask(self, fraction: float = 0.2) -> Tensor:
        """True on the highest-scoring `fraction` of the cells (rounded, at least one)."""
        if not 0 < fraction <= 1:
            raise PatchlightError(f"fraction {fraction} is not in (0, 1]")
        best = self.top_patches(max(1, round(fraction * self.grid[0] * self.grid[1])))
        flat = torch.zeros(*self.scores.shape[:-2], self.grid[0] * self.grid[1], dtype=torch.bool)
        return flat.scatter(-1, best[..., 0] * self.grid[1] + best[..., 1], True).view(self.scores.shape)

    def overlay(self, image: Any, index: int = 0, **options: Any) -> Any:
        """A PIL picture of image `index`'s heat over `image` (a PIL image, a path or a [C,H,W] tensor).

        The image is cut as the model saw it. Of several classes the first is shown. Options as in
        `patchlight.core.drawing.overlay`.
        """
        from patchlight.core.drawing import overlay

        if not -len(self) <= index < len(self):
            raise PatchlightError(f"there is no image {index}; this attribution has {len(self)}")
        if isinstance(image, Tensor):
            if self.preprocess is None or image.ndim != 3:
                raise PatchlightError("give the picture itself, or one preprocessed [C,H,W] tensor of this model")
            image = self.preprocess.picture(image)
        scores = self.scores[index]
        options = {"preprocess": self.preprocess, "covers": self.covers, **options}
        return overlay(scores if scores.ndim == 2 else scores[0], image, self.image_size, **options)

    def to_frame(self) -> DataFrame:
        """A pandas table with a row per cell: image, method, target, label, against, row, column, score and error."""
        height, width = self.grid
        maps, cells = self.target.numel(), height * width
        image = np.repeat(np.arange(len(self)), maps // max(len(self), 1))
        contrast = {"against": np.repeat(np.array(self.opposed, dtype=object), cells)} if self.opposed else {}
        return frame(
            {
                "image": np.repeat(image, cells),
                "method": self.method,
                "target": np.repeat(self.target.flatten().numpy(), cells),
                "label": np.repeat(np.array(self.explained, dtype=object), cells),
                **contrast,
                "row": np.tile(np.repeat(np.arange(height), width), maps),
                "column": np.tile(np.arange(width), maps * height),
                "score": self.scores.flatten().numpy(),
                **({} if self.error is None else {"error": self.error.flatten().numpy()}),
            }
        )

    def save(self, folder: str | Path, force: bool = False) -> Path:
        """Write scores (safetensors) and provenance (JSON) as a new folder, whole or not at all.

        An existing folder is refused; `force=True` replaces an attribution in it. The JSON says which file holds the
        scores, so that the old attribution is there until the moment the new one is.
        """
        folder = Path(folder)
        self._check_finite(f"'{folder}'")
        if folder.exists() and not (force and (folder / _ABOUT).is_file()):
            raise PatchlightError(f"'{folder}' exists already; choose another folder, or force=True to replace it")
        replaced = _scores_file(folder) if folder.exists() else None
        try:
            if replaced is None:
                folder.parent.mkdir(parents=True, exist_ok=True)
                part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
                try:
                    self._write(part, _SCORES)
                    part.chmod(0o755)
                    os.rename(part, folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
            else:
                self._write(folder, f"scores-{secrets.token_hex(4)}.safetensors")
                replaced.unlink(missing_ok=True)
        except OSError as error:
            raise PatchlightError(f"'{folder}' cannot be written: {error.strerror or error}") from error
        return folder

    def files(self, scores: str = _SCORES) -> dict[str, bytes]:
        """The contents of the files that `save` writes, by their names: the scores, then the JSON that names them."""
        from safetensors.torch import save

        self._check_finite("this attribution")
        tensors = {name: getattr(self, name) for name in _TENSORS if getattr(self, name) is not None}
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*_TENSORS, *_UNSAVED)}
        about["preprocess"] = None if self.preprocess is None else asdict(self.preprocess)
        text = json.dumps({"format": _FORMAT, "tensors": scores, **about}, indent=1, default=repr)
        return {
            scores: save({name: tensor.contiguous() for name, tensor in tensors.items()}),
            _ABOUT: (text + "\n").encode(),
        }

    def _check_finite(self, what: str) -> None:
        if not bool(self.scores.isfinite().all()) or (self.error is not None and bool(self.error.isinf().any())):
            raise PatchlightError(f"the scores hold NaN or infinity; {what} is not written, since it would not load")

    def _write(self, folder: Path, scores: str) -> None:
        """The scores under that name, then the JSON that names them."""
        try:
            for name, data in self.files(scores).items():
                write_whole(folder / name, data)
        finally:
            if _scores_file(folder) != folder / scores:
                (folder / scores).unlink(missing_ok=True)

    @staticmethod
    def load(folder: str | Path) -> Attribution:
        """Read back what `save` wrote; whatever is not that is refused in one sentence."""
        from safetensors import SafetensorError

        folder = Path(folder)
        try:
            about = _read_about(folder / _ABOUT)
            found = Attribution(**_read_tensors(folder / about.pop("tensors")), **about)
            _check_fit(found)
            return found
        except FileNotFoundError as error:
            raise PatchlightError(
                f"'{folder}' holds no attribution ({Path(error.filename).name} is missing)"
            ) from error
        except OSError as error:
            raise PatchlightError(f"'{folder}' cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, SafetensorError) as error:  # a KeyError is a type of number that torch has not
            raise PatchlightError(f"'{folder}' is damaged: {_told(error)}") from error

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.grid))
        first = self[:4].named  # not of all: there may be many
        named = ", ".join(dict.fromkeys(first[:3])) + ("…" if len(first) > 3 else "")
        return f"<Attribution by {self.method} of {self.model} for {named}: {len(self)} image(s), {grid} {self.level}s>"

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import heat_html

        return heat_html(self)


class Attributions(dict[str, Attribution]):
    """What several methods say of the same images, by their labels: a dict that a notebook shows as a table."""

    def to_frame(self) -> DataFrame:
        """The tables of all, below each other; `method` is the label."""
        return stacked(att.to_frame().assign(method=label) for label, att in self.items())

    def figure(self, path: str | Path | None = None) -> ShownFigure:
        """The maps over the small photographs kept of the first images; `pl.figure` takes the images themselves."""
        from patchlight.core.drawing import photo_figure

        return photo_figure(self, path)

    def _repr_html_(self) -> str:
        from patchlight.core.drawing import maps_html

        return maps_html(self)


def _joined_photos(parts: Sequence[Attribution]) -> tuple[Tensor, ...]:
    """The photographs of the first images of several attributions, as far as there are some without a gap."""
    photos: list[Tensor] = []
    for part in parts:
        photos.extend(part.photos)
        if len(part.photos) < len(part):
            break
    return tuple(photos[:MOST])


def _leading(photos: tuple[Tensor, ...], rows: range) -> tuple[Tensor, ...]:
    """The photographs of the first of these images, as far as there are some without a gap."""
    return tuple(photos[i] for i in takewhile(lambda i: i < len(photos), rows))


@cache
def _schema() -> type[BaseModel]:
    """What attribution.json holds: every field but the tensors, by its own type."""
    hints = get_type_hints(Attribution)
    own: dict[str, Any] = {}
    for f in fields(Attribution):
        if f.name not in (*_TENSORS, *_UNSAVED):
            own[f.name] = (hints[f.name], ... if f.default is MISSING and f.default_factory is MISSING else None)
    named = Annotated[str, Field(pattern=r"^scores(-[0-9a-f]+)?\.safetensors$")]
    return create_model(
        "About",
        __config__=ConfigDict(extra="forbid", strict=True),
        format=(Literal[1], ...),
        tensors=(named, _SCORES),
        **own,
    )


def _read_about(path: Path) -> dict[str, Any]:
    """The checked fields of an attribution.json; those that are not there have the default of the dataclass."""
    _check_bytes(path)
    read = _schema().model_validate_json(path.read_bytes())
    return {"tensors": _SCORES} | {name: getattr(read, name) for name in read.model_fields_set if name != "format"}


def _read_tensors(path: Path) -> dict[str, Any]:
    """The tensors of an attribution, read only after a look at what the file's header declares."""
    from safetensors.torch import load

    _check_bytes(path)
    shape = _declared_shape(path)
    if len(shape) not in (3, 4) or 0 in shape or shape[-2] * shape[-1] > MAX_PIXELS:
        raise ValueError(f"scores have shape {shape}, which is no map of an image")
    tensors: dict[str, Any] = load(path.read_bytes())  # by its bytes, since safetensors opens no path that is not UTF-8
    if not {"scores", "target"} <= set(tensors) <= set(_TENSORS):
        raise ValueError(f"{path.name} holds {', '.join(sorted(tensors))}; it must hold scores and target")
    return tensors


def _declared_shape(path: Path) -> list[int]:
    """The shape of the scores by a safetensors header: its length in 8 bytes, then JSON of names, types and shapes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, _HEADER))
    try:
        return [int(side) for side in json.loads(text)["scores"]["shape"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path.name} has no header that declares scores") from error


def _check_bytes(path: Path) -> None:
    """Refuse a file that would take more memory than the machine has."""
    size = path.stat().st_size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else size
    if size > memory:
        raise ValueError(f"{path.name} has {size >> 30} GiB, and this machine {memory >> 30} GiB of memory")


def _check_fit(att: Attribution) -> None:
    """Refuse values that do not belong together."""
    shape = tuple(att.scores.shape[:-2])
    classes = [("target", att.target), *([("against", att.against)] if att.against is not None else [])]
    for name, index in classes:
        if tuple(index.shape) != shape or index.is_floating_point() or index.is_complex() or bool((index < 0).any()):
            raise ValueError(f"{name} is not one class index for each of the maps {list(att.scores.shape)}")
    for name, labels in (("labels", att.labels), ("against_labels", att.against_labels)):
        if len(labels) not in (0, math.prod(shape)):
            raise ValueError(f"{name} are {len(labels)} names for {math.prod(shape)} maps")
    for name, values in (("scores", att.scores), ("errors", att.scores if att.error is None else att.error)):
        if values.shape != att.scores.shape:
            raise ValueError(f"{name} have shape {list(values.shape)}, and scores {list(att.scores.shape)}")
        known = values if name == "scores" else values.nan_to_num(posinf=torch.inf)  # an error may not be known
        if not values.is_floating_point() or not bool(known.isfinite().all()):
            raise ValueError(f"{name} are not finite numbers")
    if len(att.samples) not in (0, len(att)):
        raise ValueError(f"samples are {len(att.samples)} counts for {len(att)} images")
    for name, numbers in att.facts.items():
        if len(numbers) != len(att) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"facts.{name} is not one finite number for each of {len(att)} images")
    for name, size in (("image_size", att.image_size), ("extent", att.extent or att.image_size)):
        if min(size) < 1 or math.prod(size) > MAX_PIXELS:
            raise ValueError(f"{name} is {list(size)}")
    if att.preprocess is not None and att.preprocess.size != att.image_size:
        raise ValueError(f"image_size is {list(att.image_size)}, but preprocess.size {list(att.preprocess.size)}")


def _scores_file(folder: Path) -> Path:
    """The file that holds the scores of the attribution in a folder, as its JSON says."""
    try:
        return folder / str(_read_about(folder / _ABOUT)["tensors"])
    except (OSError, ValueError):
        return folder / _SCORES


def _told(error: Exception) -> str:
    """What is wrong, and where, in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return " ".join(f"{_ABOUT}: {where}: {first['msg']}".replace(": :", ":").split())
    return " ".join(str(error).split())
