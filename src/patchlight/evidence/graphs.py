"""Computations captured as CUDA graphs: for repeated shapes, one launch replaces hundreds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from patchlight.core.errors import NotCaptured, warn

Function = Callable[..., Sequence[Tensor]]


class Captured:
    """A function of tensors as one graph: inputs are copied in, the graph is replayed, outputs are copied out."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._lock = threading.Lock()
        self._inputs = [t.clone() for t in inputs]
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            function(*self._inputs)  # what a first call creates is not captured
        here.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = [t.contiguous() for t in function(*self._inputs)]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with self._lock:
            for mine, given in zip(self._inputs, inputs, strict=True):
                mine.copy_(given, non_blocking=True)
            self._graph.replay()
            return [t.clone() for t in self._outputs]


_MOST = 4
"""Graphs kept per model: each keeps the memory of its computation."""
_KEPT: WeakKeyDictionary[nn.Module, dict[Hashable, Captured | None]] = WeakKeyDictionary()
_LOCK = threading.RLock()


def captured(owner: nn.Module, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """The result of the function for these inputs, replayed if a graph was captured for this key and these shapes.

    None if it cannot be captured because something in it waits for the host; a warning says so once. Graphs live as
    long as `owner`, whose weights they read in place.
    """
    key = (key, tuple((tuple(t.shape), t.dtype) for t in inputs))
    with torch.cuda.device(inputs[0].device):
        with _LOCK:
            kept = _KEPT.setdefault(owner, {})
            if key not in kept:
                while len(kept) >= _MOST:
                    kept.pop(next(iter(kept)))
                kept[key] = _tried(function, inputs)
            found = kept[key]
        return None if found is None else found(inputs)


def _tried(function: Function, inputs: Sequence[Tensor]) -> Captured | None:
    try:
        return Captured(function, inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warn(
            f"compile=True: this pass cannot be captured as a CUDA graph, so it runs uncaptured: {reason}", NotCaptured
        )
        return None


def forget(owner: nn.Module) -> None:
    """Free the memory of all graphs of a model."""
    with _LOCK:
        _KEPT.pop(owner, None)
