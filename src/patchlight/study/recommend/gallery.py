"""The images of a race in random order, read when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import hash_images
from patchlight.core.images import GIVE_IMAGES, image_list, in_batches, list_images, to_batch
from patchlight.data import Data

HELD = 256
"""Prepared images in memory; others are read again. A stream is read up to this number."""


class Gallery:
    """Images by their place in a random order, so that a folder sorted by class is not read class by class.

    Attributes:
        failed: Why images cannot be read, by name.
        on_failure: Called with the name and the reason when an image cannot be read.
    """

    def __init__(self, vit: Anatomy, images: Any, seed: int) -> None:
        self.vit = vit
        self.failed: dict[str, str] = {}
        self.on_failure: Callable[[str, str], None] = lambda name, reason: None
        self._names, self._open = _opener(vit, images)
        shuffled = torch.randperm(len(self._names), generator=torch.Generator().manual_seed(seed))
        self._order: list[int] = shuffled.tolist()
        self._prepared = lru_cache(HELD)(self._prepare)
        self._readable: dict[int, bool] = {}

    def __len__(self) -> int:
        """The number of images, without those that could not be read."""
        return self.total - list(self._readable.values()).count(False)

    @property
    def total(self) -> int:
        return len(self._names)

    def name(self, place: int) -> str:
        return self._names[self._order[place]]

    def source(self, place: int) -> Any:
        """The image as it was given."""
        return self._open(self._order[place])

    def first(self, count: int) -> list[int]:
        """The first `count` places that can be read, or fewer; images that were not read before are read."""
        return list(islice(filter(self.readable, range(self.total)), count))

    def first_without_reading(self, count: int) -> list[int]:
        """The same without reading any image, so some of them may not be readable."""
        return list(islice((place for place in range(self.total) if self._readable.get(place, True)), count))

    def readable(self, place: int) -> bool:
        """Whether an image can be read; tried only once."""
        if place not in self._readable:
            try:
                self._prepared(place)
                self._readable[place] = True
            except PatchlightError as error:
                self._readable[place] = False
                self.failed[self.name(place)] = str(error)
                self.on_failure(self.name(place), str(error))
        return self._readable[place]

    def batch(self, places: Sequence[int]) -> Tensor:
        """The prepared images [n,C,H,W] on the model's device."""
        return self.vit.place(torch.stack([self._prepared(place) for place in places]))

    def hash(self, place: int) -> str:
        return hash_images(self.batch([place]))[0]

    def _prepare(self, place: int) -> Tensor:
        return to_batch([self.source(place)], self.vit.preprocess, self.vit.channels)[0]


def _opener(vit: Anatomy, images: Any) -> tuple[list[str], Callable[[int], Any]]:
    """The names of images, and a function that opens an image by index."""
    if isinstance(images, Data):
        data = images
        return list(data.names), lambda i: data[i].image
    if isinstance(images, str | Path) and Path(images).is_dir():
        images = list_images(Path(images))
    images = image_list(images)
    if isinstance(images, Sequence):
        sources = list(images)
    elif isinstance(images, Tensor):
        sources = list(to_batch(images, vit.preprocess, vit.channels))
    else:
        _, batches = in_batches(images, 16, vit.preprocess, vit.channels)
        sources = [image for batch in islice(batches, HELD // 16) for image in batch]
    if not sources:
        raise PatchlightError(f"no images were given; {GIVE_IMAGES}, or a folder")
    names = [str(source) if isinstance(source, str | Path) else f"image {i}" for i, source in enumerate(sources)]
    return names, lambda i: sources[i]
