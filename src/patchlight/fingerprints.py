"""Short hashes of weights and images, computed where the tensors live: they say which model and picture a map is of."""

from __future__ import annotations

import hashlib
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import modules_of

ROW = 2**14
Stamp = list[tuple[int, int]]
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def fingerprint(model: nn.Module) -> str:
    """The hash of a model's state, by name, shape and every bit; read again only when `stamp` has changed."""
    now = stamp(model)
    known = _KNOWN.get(model)
    if known is not None and known[0] == now:
        return known[1]
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    about = repr([(name, str(value.dtype), tuple(value.shape)) for name, value in state.items()])
    sums = [_sums(value.detach().reshape(1, -1)).flatten().cpu() for value in state.values()]
    found = _hashed(about.encode(), torch.cat(sums) if sums else torch.empty(0, dtype=torch.int32))
    _KNOWN[model] = now, found
    return found


def stamp(model: nn.Module) -> Stamp:
    """Where every weight and buffer lies and how often torch has written to it: changes when they do, and is cheap.

    What is written past torch (through `.data`, or a NumPy view) in the same place is not seen.
    """
    held = (t for m in modules_of(model) for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in held]


def of_images(images: Tensor) -> tuple[str, ...]:
    """The hash of each preprocessed image of a batch [B,C,H,W]."""
    about = repr((str(images.dtype), tuple(images.shape[1:]))).encode()
    return tuple(_hashed(about, row) for row in _sums(images.detach().flatten(1)).cpu())


def _hashed(about: bytes, sums: Tensor) -> str:
    return hashlib.sha256(about + b"\0" + sums.numpy().tobytes()).hexdigest()[:16]


def _sums(rows: Tensor) -> Tensor:
    """Sums of the bits of every row [n,m] over pieces of it, weighted by position [n,pieces] int32, modulo 2^32.

    The weights are odd, hence invertible: no single change of a piece leaves its sum.
    """
    rows = rows.resolve_conj().resolve_neg().contiguous()
    wide = rows.shape[1] * rows.element_size() % 4 == 0
    words = rows.view(torch.uint8).view(torch.int32) if wide else rows.view(torch.uint8).to(torch.int32)
    weights = _weights(words.device)
    whole = words.shape[1] // ROW * ROW
    body = words[:, :whole].unflatten(1, (-1, ROW)) if whole else words.new_empty(len(words), 0, ROW)
    rest = words[:, whole:]
    tail = (rest * weights[: rest.shape[1]]).sum(1, dtype=torch.int32)
    return torch.cat([(body * weights).sum(2, dtype=torch.int32), tail[:, None]], 1)


@cache
def _weights(device: torch.device) -> Tensor:
    drawn = (torch.arange(ROW, dtype=torch.int64) * 2654435761 + 40503) % 2**32 | 1
    return torch.where(drawn < 2**31, drawn, drawn - 2**32).to(device, torch.int32)
