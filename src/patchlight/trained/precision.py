"""How precisely a frozen model computes while a network is trained beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.precision import Precision, rounding


@contextlib.contextmanager
def training(vit: Anatomy, precision: Precision) -> Iterator[None]:
    """Around a whole training: gradients are on, whatever surrounds the call, and the model is what it is now.

    Products may round to TF32 unless all is full: the gradient of a small network's weights, a narrow one, is slow
    otherwise.
    """
    with vit.steady(), torch.inference_mode(False), torch.enable_grad(), rounding(vit, precision):
        yield
