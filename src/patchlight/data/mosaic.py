"""Mosaics of labelled images, in which the place of each class is known: GridPG and Focus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import Field

from patchlight.core.errors import PatchlightError
from patchlight.data.base import KINDS, Data, Sample, Sources, register_data


@register_data("mosaic")
def open_mosaic(
    path: str | Path,
    of: str = "imagenet",
    side: Annotated[int, Field(ge=2)] = 2,
    same: Annotated[int, Field(ge=1)] = 1,
    size: Annotated[int, Field(ge=2)] = 256,
    seed: Annotated[int, Field(ge=0)] = 0,
) -> Data:
    """A mosaic for each image of a labelled data set: the image among images of other classes.

    The label is the class of the image, and the mask the cells that show this class. With preset `gridpg` of
    `energy-pointing` a mosaic is scored as in GridPG; with `same=2` as in Focus. Images are cut to squares.

    Args:
        of: The kind of the data set.
        side: Cells along each side.
        same: Cells that show the class. The other cells show classes that differ from each other.
        size: Height and width of a mosaic in pixels.
        seed: Random seed.
    """
    inner = KINDS.find(of).function(path)
    labels = [(inner.sources(name) if inner.sources else inner.read(name)).label for name in inner.names]
    index = {name: i for i, name in enumerate(inner.names)}
    cell = size // side

    def composition(name: str) -> tuple[list[int], list[int]]:
        """The images of a mosaic, those of the class first, and the cell of each."""
        rng = np.random.default_rng([seed, index[name]])
        label, images, other_classes = labels[index[name]], [index[name]], dict[int, int]()
        for i in rng.permutation(len(labels)).tolist():
            if labels[i] == label and i != index[name] and len(images) < same:
                images.append(i)
            elif labels[i] not in (None, label):
                other_classes.setdefault(labels[i], i)
        images += list(other_classes.values())[: side * side - same]
        if label is None or len(images) < side * side:
            raise PatchlightError(
                f"'{name}' cannot make a mosaic of {side * side} cells, which needs {same} labelled images of its "
                f"class and {side * side - same} other classes; use a larger data set or a smaller side"
            )
        return images, rng.permutation(side * side).tolist()

    def read(name: str) -> Sample:
        images, places = composition(name)
        picture, mask = Image.new("RGB", (cell * side, cell * side)), torch.zeros(side, side, dtype=torch.int8)
        for k, (i, place) in enumerate(zip(images, places, strict=True)):
            row, column = divmod(place, side)
            tile = ImageOps.fit(inner.read(inner.names[i]).image.convert("RGB"), (cell, cell), Image.Resampling.BICUBIC)
            picture.paste(tile, (column * cell, row * cell))
            mask[row, column] = k < same
        pixels = mask.repeat_interleave(cell, 0).repeat_interleave(cell, 1)
        return Sample(name, picture, labels[index[name]], mask=pixels)

    def sources(name: str) -> Sources:
        images, places = composition(name)
        origins = [inner.sources(inner.names[i]) for i in images] if inner.sources else []
        files = [origin.files[0] for origin in origins if origin.files]
        values = [side, same, size, images, places, [origin.values for origin in origins]]
        return Sources(files, labels[index[name]], values, {"masks"})

    return Data(f"mosaic-{inner.name}", inner.names, read, inner.labels, sources if inner.sources else None)
