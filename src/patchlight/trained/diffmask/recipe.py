"""A training of DiffMask as a TOML recipe: the model, the data, the settings; and images on disk as a loader."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchlight.anatomy.base import Anatomy
from patchlight.data import Data, open_data
from patchlight.errors import PatchlightError
from patchlight.images import to_batch
from patchlight.trained.diffmask.settings import Settings


class Model(BaseModel):
    """The model that is explained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "pocket"
    weights: Path | None = None
    labels: Path | None = None
    mean: tuple[float, float, float] | None = None
    """Colour statistics, where they are not the model's own."""
    std: tuple[float, float, float] | None = None


class Images(BaseModel):
    """The data set, as `patchlight.data.open_data` takes it; other keys are its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    path: Path | None = None
    kind: str = "auto"
    skip: int = Field(default=0, ge=0)
    """Pass over the first so many images."""
    limit: int | None = Field(default=None, ge=1)
    """Only so many images."""


class Recipe(BaseModel):
    """Everything `patchlight diffmask train` needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Model = Model()
    data: Images = Images()
    held_out: Images | None = None
    """Images the model was not trained on, for the last calibration; in the folder of `data` if none is named."""
    preset: str = "default"
    initial: Path | None = None
    """An explainer whose gates training begins with."""
    settings: dict[str, Any] = {}

    def training(self, **changes: Any) -> Settings:
        """The settings, with these of them changed."""
        return Settings.preset(self.preset, **{**self.settings, **changes})


def read_recipe(path: str | Path) -> Recipe:
    """A recipe from a TOML file, or one sentence about what is wrong with it."""
    try:
        return Recipe(**tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise PatchlightError(f"there is no recipe '{path}'") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PatchlightError(f"recipe '{path}' is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PatchlightError(f"recipe '{path}' has a wrong '{where}': {first['msg']}") from error


def open_images(images: Images, vit: Anatomy) -> Data:
    """The data set of a recipe; `auto` is CIFAR-10 where its files lie there, else a folder of images."""
    if images.path is None:
        raise PatchlightError("no data was given; name a folder of images or of CIFAR-10 with --data")
    options = dict(images.model_extra or {})
    kind = images.kind
    if kind == "auto":
        kind = "cifar10" if _is_cifar10(images.path) else "folder"
    if kind == "cifar10":
        options.setdefault("split", "train")
    data = open_data(kind, images.path, **options)
    known = max(vit.classes, 2)
    if data.labels is not None and len(data.labels) > known:
        raise PatchlightError(f"'{images.path}' has {len(data.labels)} classes, but {vit.name} has {known}")
    if images.skip >= len(data) > 0:
        raise PatchlightError(f"skip={images.skip} leaves nothing of '{images.path}', which has {len(data)} images")
    end = len(data) if images.limit is None else min(images.skip + images.limit, len(data))
    return data if (images.skip, end) == (0, len(data)) else data.select(range(images.skip, end))


def _is_cifar10(path: Path) -> bool:
    marks = ("cifar10.npz", "data_batch_1.bin", "data_batch_1.png")
    return any((path / place / mark).is_file() for place in ("", "cifar-10-batches-bin", "package") for mark in marks)


class _Prepared(Dataset[Any]):
    """Samples as (image, label) pairs; images alone where a sample has no label."""

    def __init__(self, data: Data, vit: Anatomy) -> None:
        self.data, self.preprocess, self.channels = data, vit.preprocess, vit.channels

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        sample = self.data[index]
        image = to_batch(sample.image, self.preprocess, self.channels)[0]
        return image if sample.label is None else (image, sample.label)


def loader_of(data: Data, vit: Anatomy, batch_size: int, workers: int = 0) -> DataLoader[Any]:
    """Shuffled whole batches of a data set, preprocessed for a model."""
    if len(data) < batch_size:
        raise PatchlightError(f"data set '{data.name}' has {len(data)} images, fewer than one batch of {batch_size}")
    return DataLoader(_Prepared(data, vit), batch_size, shuffle=True, drop_last=True, num_workers=workers)
