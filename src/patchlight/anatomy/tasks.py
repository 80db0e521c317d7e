"""Models whose output is not a list of classes: detectors, segmenters, models that answer in words."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import tensors_in


class TaskAnatomy(CrossedAnatomy):
    """A model with a `task`, whose output questions read (`patchlight.anatomy.heads.Question`).

    It has no classes of its own. The probe compares all numbers of its output.
    """

    def __init__(self, model: Any, **about: Any) -> None:
        super().__init__(model, **{"classes": 0, "pooling": "gradient", **about})

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """All numbers of the output [rows,K]."""
        numbers = [each for each in tensors_in(out) if each.is_floating_point() and len(each) == rows]
        return torch.cat([each.flatten(1) for each in numbers], 1)
