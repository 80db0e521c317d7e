"""Precision: the one vocabulary for the arithmetic of methods, metrics and training."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch

Precision = Literal["auto", "full", "tf32", "bf16"]
"""`full`: the model's own type, the reference. `tf32`: float32 whose matrix products on CUDA round to TF32. `bf16`:
blocks and head in bfloat16 (a model that cannot be cast multiplies in it). `auto`: bf16 on CUDA, full elsewhere."""


def chosen(precision: Precision, device: torch.device, dtype: torch.dtype) -> Literal["full", "tf32", "bf16"]:
    """What a precision comes to for a model of this type there.

    >>> chosen("auto", torch.device("cpu"), torch.float32)
    'full'
    """
    on_cuda = device.type == "cuda" and dtype == torch.float32
    if precision == "auto":
        return "bf16" if on_cuda else "full"
    return "full" if precision == "tf32" and not on_cuda else precision


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Inside, float32 products on CUDA may round to TF32; afterwards all is as it was.

    Torch has one such flag for a process, so meanwhile other threads' float32 products on CUDA may round too. The first
    of several threads sets it, and the last sets it back.
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
