"""Training recipes in TOML (model, data, settings), and loaders of images on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.spec import ModelSpec
from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess, to_batch
from patchlight.core.recipes import Spec, parse_as, read_text
from patchlight.data import Data, Sample
from patchlight.data.spec import DataSpec, kind_and_path
from patchlight.trained.settings import Training


class TrainingRecipe(Spec):
    """The recipe of a `train` command; each kind of explainer adds its own keys."""

    command: ClassVar[str] = ""
    """The recipe is for `patchlight COMMAND train`."""
    training_kind: ClassVar[type[Training]] = Training
    model: ModelSpec = ModelSpec(name="pocket")
    data: DataSpec | None = None
    held_out: DataSpec | None = None
    """Images the model was not trained on; without a path, in the folder of `data`."""
    preset: str = "default"
    settings: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, source: str | Path) -> Self:
        """Read the recipe in a TOML file, or the bundled recipe of that name."""
        return parse_as(cls, read_text(source, cls.command), str(source))

    def training(self, preset: str | None = None, **changes: Any) -> Any:
        """The settings; `preset` overrides the recipe's preset and settings, and `changes` overrides both."""
        values = self.training_kind.presets.get(preset or "", {})
        return self.training_kind.preset(preset or self.preset, **{**self.settings, **values, **changes})

    def with_data(self, data: str | None, listed: str | None, held_out: str | None) -> Self:
        """The recipe with the user's images.

        Args:
            data: `DIR` or `KIND:DIR`.
            listed: A file of the images to use.
            held_out: Images the model was not trained on, as `data`.
        """
        images = self.data if data is None else data_at(data, self.data)
        if images is None:
            raise PatchlightError(
                "no images were given; use --images with a folder of images or of CIFAR-10, or --recipe"
            )
        images = images if listed is None else images.with_list(listed)
        test = self.held_out if held_out is None else data_at(held_out, self.held_out)
        if test is not None and not test.path:
            test = test.model_copy(update={"path": images.path})
        return self.model_copy(update={"data": images, "held_out": test})

    def loaders(self, vit: Anatomy, settings: Training, workers: int) -> tuple[Any, Any]:
        """The loaders of the training images and of the held-out images, if there are any."""

        def read(spec: DataSpec) -> DataLoader[Any]:
            return loader_of(open_images(spec, vit, settings.seed), vit, settings.batch_size, workers)

        assert self.data is not None
        return read(self.data), None if self.held_out is None else read(self.held_out)


def data_at(place: str, spec: DataSpec | None = None) -> DataSpec:
    """The data at `DIR` or `KIND:DIR`; all other settings are those of `spec`.

    Without a kind and a `spec`, a folder with files of CIFAR-10 is CIFAR-10, and any other is a folder of images.
    """
    kind, path = kind_and_path(place)
    default = "cifar10" if _is_cifar10(Path(path)) else "folder"
    return DataSpec(kind=kind or default, path=path) if spec is None else spec.at(place)


def open_images(spec: DataSpec, vit: Anatomy, seed: int = 0) -> Data:
    """Open the images of a recipe, for CIFAR-10 the training split; refuse more classes than the model has."""
    split = {"split": spec.options.get("split", "train")} if spec.kind == "cifar10" else {}
    data = spec.open(**split)
    classes = vit.outcomes
    if data.labels is not None and len(data.labels) > classes:
        raise PatchlightError(f"'{spec.path}' has {len(data.labels)} classes, but {vit.name} has {classes}")
    return data.select(spec.select_indices(data.names, seed))


def _is_cifar10(path: Path) -> bool:
    marks = ("cifar10.npz", "data_batch_1.bin", "data_batch_1.png")
    return any((path / place / mark).is_file() for place in ("", "cifar-10-batches-bin", "package") for mark in marks)


def _collate(preprocess: Preprocess, channels: int, samples: list[Sample]) -> Tensor | tuple[Tensor, Tensor]:
    """A batch of samples as (images, labels), or as images if they have no labels."""
    images, labels = to_batch([sample.image for sample in samples], preprocess, channels), [s.label for s in samples]
    return images if labels[0] is None else (images, torch.tensor(labels))


def loader_of(data: Data, vit: Anatomy, batch_size: int, workers: int = 0) -> DataLoader[Any]:
    """Shuffled full batches of a data set, preprocessed for a model."""
    if len(data) < batch_size:
        raise PatchlightError(f"data set '{data.name}' has {len(data)} images, fewer than one batch of {batch_size}")
    collate, images = partial(_collate, vit.preprocess, vit.channels), cast("Dataset[Sample]", data)
    return DataLoader(images, batch_size, shuffle=True, drop_last=True, num_workers=workers, collate_fn=collate)
