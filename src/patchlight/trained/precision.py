"""How precisely a frozen model computes while a network is trained beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from patchlight.anatomy.base import Anatomy

Precision = Literal["full", "bf16"]


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
    """Around a whole training: gradients are on, whatever surrounds the call, and the model is what it is now."""
    rounded = tf32() if precision == "bf16" and vit.device.type == "cuda" else contextlib.nullcontext()
    with vit.steady(), torch.inference_mode(False), torch.enable_grad(), rounded:
        yield


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Inside, float32 products on CUDA may round to TF32; afterwards all is as it was.

    The gradient of a small network's weights, a narrow product, is slow otherwise. Torch has one such flag for a
    process, so while a network is trained in bf16 other threads' float32 products on CUDA may round too.
    """
    products: Any = torch.backends.cuda.matmul
    name, fast = ("fp32_precision", "tf32") if hasattr(products, "fp32_precision") else ("allow_tf32", True)
    before = getattr(products, name)
    setattr(products, name, fast)
    try:
        yield
    finally:
        setattr(products, name, before)
