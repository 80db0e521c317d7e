"""How precisely a frozen model computes while a network is trained beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from patchlight.anatomy.base import Anatomy
from patchlight.evidence.precision import Precision, tf32


def lowered(vit: Anatomy, precision: Precision) -> Anatomy:
    """The frozen model; in `bf16` a view whose linear maps and convolutions have bfloat16 weights.

    Autocast would cast them at every use, to the same values: a third of all launches of a small model's forward.
    """
    if precision != "bf16" or not vit.castable:
        return vit
    return vit.view(torch.bfloat16, only=(nn.Linear, nn.Conv2d))


def casting(vit: Anatomy, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """Around every forward of the frozen model."""
    return torch.autocast(vit.device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


@contextlib.contextmanager
def training(vit: Anatomy, precision: Precision) -> Iterator[None]:
    """Around a whole training: gradients are on, whatever surrounds the call, and the model is what it is now.

    Products may round to TF32 unless all is full: the gradient of a small network's weights, a narrow one, is slow
    otherwise.
    """
    rounded = tf32() if precision != "full" and vit.device.type == "cuda" else contextlib.nullcontext()
    with vit.steady(), torch.inference_mode(False), torch.enable_grad(), rounded:
        yield
