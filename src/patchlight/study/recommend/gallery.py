"""The images of a race: in a seeded order, read when first needed; what cannot be read is told and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.fingerprints import of_images
from patchlight.core.images import in_batches, list_images, to_batch
from patchlight.data import Data

HELD = 256
"""Prepared images that are kept; others are read again. Of a generator or loader, no more are taken."""


class Gallery:
    """Images by their place in a seeded order, so that a folder sorted by class is not read class by class."""

    def __init__(self, vit: Anatomy, images: Any, seed: int) -> None:
        self._vit = vit
        self.failed: dict[str, str] = {}
        self._tell: Callable[[str, str], None] | None = None
        self._names, self._open = _opener(vit, images)
        shuffled = torch.randperm(len(self._names), generator=torch.Generator().manual_seed(seed))
        self._order: list[int] = shuffled.tolist()
        self._held: dict[int, Tensor] = {}
        self._sound: set[int] = set()
        self._broken: set[int] = set()

    def __len__(self) -> int:
        """Images that were not found broken so far."""
        return len(self._names) - len(self._broken)

    @property
    def total(self) -> int:
        return len(self._names)

    def name(self, place: int) -> str:
        return self._names[self._order[place]]

    def source(self, place: int) -> Any:
        """The image as it was given."""
        return self._open(self._order[place])

    def first(self, count: int) -> list[int]:
        """The first `count` places that can be read, or as many as there are; what was never read is read once."""
        return list(islice(filter(self.readable, range(self.total)), count))

    def planned(self, count: int) -> list[int]:
        """The same as far as is known: nothing is read, so some of them may turn out broken."""
        return list(islice((place for place in range(self.total) if place not in self._broken), count))

    def readable(self, place: int) -> bool:
        """Whether an image can be read, which is found out once."""
        if place not in self._sound and place not in self._broken:
            try:
                self._read(place)
                self._sound.add(place)
            except PatchlightError as error:
                self._broken.add(place)
                self._fail(self.name(place), str(error))
        return place in self._sound

    def batch(self, places: Sequence[int]) -> Tensor:
        """The prepared images [n,C,H,W] on the model's device."""
        return self._vit.place(torch.stack([self._read(place) for place in places]))

    def hashes(self, places: Sequence[int]) -> tuple[str, ...]:
        return of_images(self.batch(places))

    def tell(self, fail: Callable[[str, str], None]) -> None:
        """Have a function told of images that cannot be read, with the reason."""
        self._tell = fail
        for name, reason in self.failed.items():
            fail(name, reason)

    def _fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        if self._tell is not None:
            self._tell(name, reason)

    def _read(self, place: int) -> Tensor:
        if place not in self._held:
            while len(self._held) >= HELD:
                del self._held[next(iter(self._held))]
            self._held[place] = to_batch([self.source(place)], self._vit.preprocess, self._vit.channels)[0]
        return self._held[place]


def _opener(vit: Anatomy, images: Any) -> tuple[list[str], Callable[[int], Any]]:
    """The names of images, and what opens the one of a number."""
    if isinstance(images, Data):
        data = images
        return list(data.names), lambda i: data[i].image
    if isinstance(images, str | Path) and Path(images).is_dir():
        images = list_images(Path(images))
    if isinstance(images, str | Path | Image.Image):
        held = [images]
    elif isinstance(images, Sequence):
        held = list(images)
    elif isinstance(images, Tensor):
        held = list(to_batch(images, vit.preprocess, vit.channels))
    else:
        _, batches = in_batches(images, 16, vit.preprocess, vit.channels)
        held = [image for batch in islice(batches, HELD // 16) for image in batch]
    if not held:
        raise PatchlightError("no images were given; give a folder, a tensor, PIL image(s) or path(s)")
    names = [str(one) if isinstance(one, str | Path) else f"image {i}" for i, one in enumerate(held)]
    return names, lambda i: held[i]
