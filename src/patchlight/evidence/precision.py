"""Precision: the settings for the arithmetic of methods, metrics and training."""

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
"""`full`: the model's own type, the reference. `tf32`: float32 whose matrix products on CUDA round to TF32. `bf16`:
products in bfloat16. `auto`: on CUDA the fastest that keeps the order of the patches, full elsewhere."""
PassPrecision = Literal["auto", "full", "tf32", "bf16", "fp16"]
"""For forwards with a backward there is `fp16` too: products in float16, the gradient scaled into its range. It is as
fast as bf16 and rounds eight times less. In both, the tokens between blocks and the readout stay in float32."""
PRECISION = "Arithmetic: 'full' is the model's type; 'auto' is the fastest on CUDA that keeps the order of the patches."
HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def chosen(precision: PassPrecision, device: torch.device, dtype: torch.dtype, auto: Decided = "bf16") -> Decided:
    """What a precision comes to for a model of this type there; `auto` is what it means on CUDA.

    >>> chosen("auto", torch.device("cpu"), torch.float32)
    'full'
    """
    on_cuda = device.type == "cuda" and dtype == torch.float32
    if precision == "auto":
        return auto if on_cuda else "full"
    return "full" if precision == "tf32" and not on_cuda else precision


def lowered(vit: Anatomy, precision: PassPrecision, products: bool = False) -> Anatomy:
    """The model; in `bf16` and `fp16` a view with linear maps and convolutions in that type, and patches as products.

    Autocast would cast them at every use, to the same values: a third of all launches of a small model's forward.
    """
    own = next(p.dtype for p in vit.model.parameters() if p.is_floating_point())
    if precision not in HALF or not vit.castable or own != vit.dtype:  # a model of half precision, widened
        return vit
    return vit.view(HALF[precision], products, only=(nn.Linear, nn.Conv2d))


def casting(vit: Anatomy, precision: PassPrecision, trains: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Context for every forward of a lowered model.

    `trains`: trained weights are among those cast. Autocast would cache its first cast of them as long as any autocast
    is active, including `Anatomy.steady`, and all later steps would use stale weights.
    """
    if precision not in HALF:
        return contextlib.nullcontext()
    return torch.autocast(vit.device.type, HALF[precision], cache_enabled=not trains)


def rounding(vit: Anatomy, precision: PassPrecision) -> contextlib.AbstractContextManager[Any]:
    """Context for float32 products, which may round to TF32 unless the precision is full."""
    return tf32() if precision != "full" and vit.device.type == "cuda" else contextlib.nullcontext()


def free_memory(device: torch.device) -> int:
    """Bytes available to tensors on a CUDA device: the free ones, and those that torch caches."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Inside, float32 products on CUDA may round to TF32.

    Torch has one such flag per process, so products of other threads may round too. The first of several threads sets
    it, and the last restores it.
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
