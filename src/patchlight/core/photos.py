"""Small pictures of the first images of a call, so that maps can be shown over their photographs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchlight.core.images import Preprocess
from patchlight.core.inputs import ArrayPreprocess
from patchlight.core.resize import to_pixels

MOST, SIDE = 16, 224
"""The largest number of pictures, and the largest length of their longer side."""


@dataclass
class Photos:
    """Collects pictures of the model's view of the first images; for small inputs, a sharper one of the same crop."""

    preprocess: Preprocess
    most: int = MOST
    read: int = 0
    sharp: dict[int, Tensor] = field(default_factory=dict)
    photos: list[Tensor] = field(default_factory=list)

    def add(self, picture: Image.Image | None) -> None:
        """Add the next image that is read: a picture, or None for a tensor."""
        height, width = self.preprocess.size
        scale = SIDE / max(height, width)
        if picture is not None and scale > 1 and self.read < self.most:
            view = replace(self.preprocess, size=(round(height * scale), round(width * scale)))
            self.sharp[self.read] = torch.from_numpy(np.array(view.crop(picture))).permute(2, 0, 1)
        self.read += 1

    def see(self, batch: Tensor) -> None:
        """Store small pictures of the next batch [b,C,H,W] as uint8 [3,h,w] on the CPU; none unless C is 1 or 3.

        Inputs that are not images are stored as [1 or 3,*size].
        """
        begin = len(self.photos)
        if isinstance(self.preprocess, ArrayPreprocess):
            self.photos.extend(self.preprocess.views(batch[: max(0, self.most - begin)]))
            return
        if begin >= self.most or batch.shape[1] not in (1, 3):
            return
        pictures = self.preprocess.pixels(batch[: self.most - begin])
        scale = SIDE / max(pictures.shape[-2:])
        if scale < 1:
            size = [round(side * scale) for side in pictures.shape[-2:]]
            pictures = to_pixels(pictures, size, averaged=True)
        small = (pictures * 255).round().byte().cpu()
        self.photos.extend(self.sharp.get(begin + i, photo) for i, photo in enumerate(small))


def as_picture(photo: Tensor, side: int) -> Image.Image:
    """A photograph [3,h,w] as a picture whose longer side has this length."""
    picture = Image.fromarray(photo.permute(1, 2, 0).contiguous().numpy())
    scale = side / max(picture.size)
    return picture.resize((round(picture.width * scale), round(picture.height * scale))) if scale != 1 else picture
