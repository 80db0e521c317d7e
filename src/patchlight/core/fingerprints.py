"""Short hashes that identify the weights and images of a map, computed on the device of the tensors."""

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
"""Number of words in one sum."""
SAMPLED = 16
"""Number of tensors whose first values are part of a stamp."""
Stamp = tuple[list[tuple[int, int]], bytes]
_HASHES: WeakKeyDictionary[nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def json_digest(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a value's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint(model: nn.Module) -> str:
    """The hash of all names, shapes and bits of a model's state; computed again only when `stamp` has changed."""
    current = stamp(model)
    cached = _HASHES.get(model)
    if cached is not None and cached[0] == current:
        return cached[1]
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    shapes = repr([(name, str(value.dtype), tuple(value.shape)) for name, value in state.items()])
    sums = [_sums(value.detach().reshape(1, -1)).flatten().cpu() for value in state.values()]
    digest = _digest(shapes.encode(), torch.cat(sums) if sums else torch.empty(0, dtype=torch.int32))
    _HASHES[model] = current, digest
    return digest


def identity(vit: Anatomy) -> str:
    """The hash of a model's weights, of its head, and of moved register neurons."""
    weights = fingerprint(vit.model)
    if vit.head is None and not vit.reading and not vit.moved:
        return weights
    head = vit.reading if vit.head is None else json.dumps(vit.head.about(), sort_keys=True, default=repr)
    moved = f" {sorted(vit.moved.items())}" if vit.moved else ""
    return hashlib.sha256(f"{weights} {head}{moved}".encode()).hexdigest()[:16]


def hash_tensor(values: Tensor) -> str:
    """The hash of one tensor."""
    return hash_images(values[None])[0]


def stamp(model: nn.Module) -> Stamp:
    """A cheap stamp that changes with the weights: the address and version of each tensor, and some of their numbers.

    A change that torch does not count (through `.data` or a NumPy view) is noticed if it affects the first values of
    one of about 16 tensors, as with a moving average of all weights.
    """
    tables = (table for m in modules_of(model) for table in (m._parameters, m._buffers))
    tensors = [t for table in tables for t in table.values() if t is not None]
    sample = tensors[:: max(1, len(tensors) // SAMPLED)] + tensors[-2:]
    with torch.no_grad():
        begin = [t.detach().flatten()[:4].float() for t in sample if t.is_floating_point() and t.numel()]
        numbers = torch.cat(begin).cpu().numpy().tobytes() if begin else b""
    return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors], numbers


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and every module in it once; faster than `nn.Module.modules`, which also builds their names."""
    modules = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in modules:
                modules[id(child)] = child
                waiting.append(child)
    return list(modules.values())


def hash_images(images: Tensor) -> tuple[str, ...]:
    """The hash of each preprocessed image of a batch [B,C,H,W]."""
    shape = repr((str(images.dtype), tuple(images.shape[1:]))).encode()
    return tuple(_digest(shape, row) for row in _sums(images.detach().flatten(1)).cpu())


def _digest(shape: bytes, sums: Tensor) -> str:
    return hashlib.sha256(shape + b"\0" + sums.numpy().tobytes()).hexdigest()[:16]


def _sums(rows: Tensor) -> Tensor:
    """Sums of the bits of each row [n,m] over pieces, weighted by position: [n,pieces] int32, modulo 2^32.

    The weights are odd, hence invertible, so any single change of a piece changes its sum.
    """
    rows = rows.resolve_conj().resolve_neg().contiguous()
    rows = rows.clone() if rows.storage_offset() * rows.element_size() % 4 else rows  # a view may not be aligned
    wide = rows.shape[1] * rows.element_size() % 4 == 0
    words = rows.view(torch.uint8).view(torch.int32) if wide else rows.view(torch.uint8).to(torch.int32)
    weights = _weights(words.device)
    end = words.shape[1] // ROW * ROW
    body = words[:, :end].unflatten(1, (-1, ROW)) if end else words.new_empty(len(words), 0, ROW)
    rest = words[:, end:]
    tail = (rest * weights[: rest.shape[1]]).sum(1, dtype=torch.int32)
    return torch.cat([(body * weights).sum(2, dtype=torch.int32), tail[:, None]], 1)


@cache
def _weights(device: torch.device) -> Tensor:
    odd = (torch.arange(ROW, dtype=torch.int64) * 2654435761 + 40503) % 2**32 | 1
    return torch.where(odd < 2**31, odd, odd - 2**32).to(device, torch.int32)
