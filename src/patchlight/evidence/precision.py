"""Precision of methods, metrics and training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from patchlight.anatomy.opened import Anatomy

Decided = Literal["full", "tf32", "bf16", "fp16"]
Precision = Literal["auto", "full", "tf32", "bf16"]
"""`full`: the type of the model, the reference. `tf32`: float32 whose matrix products on CUDA round to TF32. `bf16`:
products in bfloat16. `auto`: on CUDA the fastest one that keeps the order of the patches, `full` elsewhere."""
PassPrecision = Literal["auto", "full", "tf32", "bf16", "fp16"]
"""Passes with a backward also have `fp16`: products in float16, with gradients scaled to its range. It is as fast as
bf16 and rounds eight times less. In both, the tokens between blocks and the readout are in float32."""
PRECISION = "Arithmetic: 'full' is the model's type; 'auto' is the fastest on CUDA that keeps the order of the patches."
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def chosen(precision: PassPrecision, device: torch.device, dtype: torch.dtype, auto: Decided = "bf16") -> Decided:
    """Resolve a precision for a device and type; `auto` is the meaning of "auto" on CUDA.

    >>> chosen("auto", torch.device("cpu"), torch.float32)
    'full'
    """
    on_cuda = device.type == "cuda" and dtype == torch.float32
    if precision == "auto":
        return auto if on_cuda else "full"
    return "full" if precision == "tf32" and not on_cuda else precision


def lowered(vit: Anatomy, precision: PassPrecision, products: bool = False) -> Anatomy:
    """The model, or in `bf16` and `fp16` a view with linear maps and convolutions in that type.

    Autocast would cast them to the same values at every use, a third of all launches of a small model's forward.
    """
    dtype = next(p.dtype for p in vit.model.parameters() if p.is_floating_point())
    if precision not in HALF or not vit.castable or dtype != vit.dtype:  # a model of half precision, widened
        return vit
    return vit.view(HALF[precision], products, only=(nn.Linear, nn.Conv2d))


def casting(vit: Anatomy, precision: PassPrecision, trains: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Context for every forward of a lowered model.

    With `trains`, some of the weights are trained, so autocast must not cache its first cast of them.
    """
    if precision not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(vit.device.type, HALF[precision], cache_enabled=not trains)


def rounding(vit: Anatomy, precision: PassPrecision) -> contextlib.AbstractContextManager[Any]:
    """Context in which float32 products may round to TF32, unless the precision is full."""
    return tf32() if precision != "full" and vit.device.type == "cuda" else contextlib.nullcontext()


def free_memory(device: torch.device) -> int:
    """Bytes available on a CUDA device, including those cached by torch."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Context in which float32 products on CUDA may round to TF32.

    Torch has one flag per process, so products of other threads may round too. The first of several threads sets the
    flag, and the last one restores it.
    """
    global _inside, _before
    products: Any = torch.backends.cuda.matmul
    name, fast = ("fp32_precision", "tf32") if hasattr(products, "fp32_precision") else ("allow_tf32", True)
    with _LOCK:
        if _inside == 0:
            _before = getattr(products, name)
            setattr(products, name, fast)
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                setattr(products, name, _before)


_LOCK, _inside = threading.Lock(), 0
_before: Any = None
