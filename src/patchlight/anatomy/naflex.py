"""SigLIP2 of the NaFlex kind, which keeps the aspect of each image: every size has its own grid of patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from patchlight.anatomy.discovery import Convolution, Inputs
from patchlight.anatomy.hf import SIGLIP, HuggingFaceAnatomy, assume_preprocess
from patchlight.core.errors import PatchlightError
from patchlight.core.images import PICTURES, image_list, open_image

_PUBLISHED = replace(SIGLIP, interpolation="bilinear")


class NaFlexAnatomy(HuggingFaceAnatomy):
    """A classifier that takes patches and the shape of their grid, which are made of images here.

    A photograph is resized to the largest grid of at most `most` patches with its aspect, unless the preprocessing is
    given. All images of a call must have the same grid.
    """

    def __init__(self, model: Any, name: str | None = None, processor: Any = None, **facts: Any) -> None:
        config = model.config.vision_config
        self.patch, self.adapts = int(config.patch_size), "preprocess" not in facts
        processor = getattr(processor, "image_processor", processor)
        self.most = int(getattr(processor, "max_num_patches", config.num_patches))
        name = name or getattr(model, "name_or_path", "") or type(model).__name__
        if self.adapts and processor is None:
            facts["preprocess"] = assume_preprocess(_PUBLISHED, self._size_of(1, 1), name)
        elif self.adapts:
            mean, std = (tuple(map(float, values)) for values in (processor.image_mean, processor.image_std))
            facts["preprocess"] = replace(_PUBLISHED, size=self._size_of(1, 1), mean=mean, std=std)
        self._check_size(facts["preprocess"].size, name)
        super().__init__(model, name=name, **facts)

    def inputs(self, config: Any, facts: Mapping[str, Any]) -> Inputs:
        inputs, side = super().inputs(config, facts), (self.patch,) * 2
        rows, columns = (length // self.patch for length in inputs.size)
        return replace(inputs, patches=Convolution("", (rows, columns), side, side, (0, 0)))

    def forward_of(self, net: Any, images: Tensor) -> Any:
        patches = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch)).permute(0, 2, 4, 3, 5, 1)
        shape = images.new_tensor([patches.shape[1:3]], dtype=torch.long).expand(len(images), -1)
        return net(pixel_values=patches.flatten(3).flatten(1, 2), spatial_shapes=shape)

    def fit(self, images: Any) -> tuple[Self, Any]:
        self.renew()
        images = image_list(images)
        if isinstance(images, Tensor) and images.ndim in (3, 4):
            return self.sized((images.shape[-2], images.shape[-1])), images
        if not self.adapts or not isinstance(images, list | tuple) or not all(isinstance(i, PICTURES) for i in images):
            return self, images
        pictures = [open_image(picture) for picture in images]
        sizes = list(dict.fromkeys(self._size_of(*picture.size) for picture in pictures))
        if len(sizes) > 1:
            grids = " and ".join("{} x {}".format(*(side // self.patch for side in size)) for size in sizes[:2])
            raise PatchlightError(f"the images have grids of {grids} patches; give images of one size at a time")
        return (self.sized(sizes[0]) if sizes else self), images

    def batch(self, images: Any) -> Tensor:
        vit, images = self.fit(images)
        return super(NaFlexAnatomy, vit).batch(images)

    def sized(self, size: tuple[int, int]) -> Self:
        """The same model for images of this height and width."""
        if size == self.preprocess.size:
            return self
        self._check_size(size, self.name)
        views = self.running.views
        if size not in views:
            grid = size[0] // self.patch, size[1] // self.patch
            resized = self.resized(grid, size, None if self.bare is None else self.bare.sized(size))
            views[size] = resized.copy_with()  # with a twin of its own, whose blocks are called otherwise
        return cast(Self, views[size])

    def _check_size(self, size: tuple[int, int], name: str) -> None:
        if any(side % self.patch for side in size):
            raise PatchlightError(
                f"{name} cuts images into patches of {self.patch} pixels, and {size[0]} x {size[1]} pixels are not a "
                "whole number of them; give images whose sides are multiples of it"
            )

    def _size_of(self, width: int, height: int) -> tuple[int, int]:
        """Height and width to which transformers resizes a photograph: the largest grid, its sides rounded up."""
        from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

        rows, columns = get_image_size_for_max_num_patches(height, width, self.patch, self.most)
        return rows, columns
