"""Models whose output is not a list of classes: detectors, segmenters, models that answer in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import tensors_in
from patchlight.core.errors import PatchlightError, integer, nearest
from patchlight.core.images import Preprocess


class TaskAnatomy(CrossedAnatomy):
    """A model with a `task`, whose output questions read (`patchlight.anatomy.heads.Question`).

    It has no classes of its own; `class_names` are those of its queries or pixels. The probe compares all numbers of
    its output.
    """

    class_names: Sequence[str] = ()

    def __init__(self, model: Any, **facts: Any) -> None:
        super().__init__(model, **{"classes": 0, "pooling": "gradient", **facts})

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """All numbers of the output [rows,K]."""
        numbers = [each for each in tensors_in(out) if each.is_floating_point() and len(each) == rows]
        return torch.cat([each.flatten(1) for each in numbers], 1)

    def plain(self, images: Tensor) -> Any:
        """The output of the model as its users get it."""
        with torch.no_grad(), self.steady():
            return self.call(images)

    def class_of(self, label: str | int) -> int:
        """The number of a class, given by name or number."""
        if not isinstance(label, str):
            number = integer("label", label, 0)
            if 0 <= number < len(self.class_names):
                return number
            raise PatchlightError(
                f"label {number} does not exist; {self.name} has classes 0 to {len(self.class_names) - 1}"
            )
        if label not in self.class_names:
            raise PatchlightError(f"{self.name} has no label '{label}'; {nearest(label, self.class_names)}")
        return self.class_names.index(label)

    def framed(self, size: tuple[int, int] | None) -> tuple[Preprocess, tuple[int, int]]:
        """How a photograph of this size becomes the input, and its size; None: the input itself."""
        if size is not None:
            return self.preprocess, size
        return Preprocess(self.preprocess.size, fit="squash"), self.preprocess.size[::-1]

    def in_input(self, box: Sequence[float], size: tuple[int, int] | None, what: str = "box") -> Tensor:
        """A box [4] of the photograph in pixels of the model's input.

        Args:
            box: Left, top, right and bottom.
            size: Width and height of the photograph; None: the box is in pixels of the tensor.
            what: What the box is called in an error.

        Raises:
            PatchlightError: The box is empty, or lies outside the image.
        """
        preprocess, photo_size = self.framed(size)
        left, top, right, bottom = (float(side) for side in box)
        named = f"{what} [{', '.join(f'{float(side):g}' for side in (box[:2] if what == 'point' else box))}]"
        if not left < right or not top < bottom:
            raise PatchlightError(f"{named} is empty; give (left, top, right, bottom) with left < right, top < bottom")
        moved = preprocess.boxes(torch.tensor([[left, top, right, bottom]]), photo_size)
        outside = left >= photo_size[0] or top >= photo_size[1] or right <= 0 or bottom <= 0
        if outside or len(moved) == 0:
            raise PatchlightError(
                f"{named} lies outside the image, which is {photo_size[0]} pixels wide and {photo_size[1]} high"
            )
        return moved[0]
