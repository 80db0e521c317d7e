"""Short hashes of weights and images, computed where the tensors live: they say which model and picture a map is of."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from patchlight.anatomy.opened import Anatomy

ROW = 2**14
SAMPLED = 16
Stamp = tuple[list[tuple[int, int]], bytes]
_KNOWN: WeakKeyDictionary[nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def json_digest(value: Any) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a value's JSON, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


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


def identity(vit: Anatomy) -> str:
    """The hash of a model's weights and of the head it is asked by: maps are of both."""
    weights = fingerprint(vit.model)
    if vit.head is None and not vit.reading:
        return weights
    told = vit.reading if vit.head is None else json.dumps(vit.head.about(), sort_keys=True, default=repr)
    return hashlib.sha256(f"{weights} {told}".encode()).hexdigest()[:16]


def hash_tensor(values: Tensor) -> str:
    """The hash of one tensor."""
    return hash_images(values[None])[0]


def stamp(model: nn.Module) -> Stamp:
    """Where every weight and buffer lies and how often torch has written to it, and some of their numbers.

    It changes when they do, and is cheap. What is written past torch (through `.data`, or a NumPy view) is seen where
    it reaches the beginning of one of 16 tensors from first to last: a moving average of all weights, or another head.
    """
    tables = (table for m in modules_of(model) for table in (m._parameters, m._buffers))
    held = [t for table in tables for t in table.values() if t is not None]
    some = [t for t in held[:: max(1, len(held) // SAMPLED)] + held[-2:] if t.is_floating_point() and t.numel()]
    with torch.no_grad():
        begin = [t.detach().flatten()[:4].float() for t in some]
        numbers = torch.cat(begin).cpu().numpy().tobytes() if begin else b""
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in held], numbers


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and every module in it once, without the names that `nn.Module.modules` puts together on the way."""
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def hash_images(images: Tensor) -> tuple[str, ...]:
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
    rows = rows.clone() if rows.storage_offset() * rows.element_size() % 4 else rows  # a view that begins anywhere
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
