"""Computations captured as CUDA graphs, which replace hundreds of launches by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from patchlight.core.errors import NotCaptured, warn

Function = Callable[..., Sequence[Tensor]]


class Captured:
    """A function of tensors as a CUDA graph: inputs are copied, the graph is replayed, and outputs are cloned."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self._lock = threading.Lock()
        self._inputs = [t.clone() for t in inputs]
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            function(*self._inputs)  # a warm-up, so that initialisation is not captured
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = [t.contiguous() for t in function(*self._inputs)]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with self._lock:
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value, non_blocking=True)
            self._graph.replay()
            return [t.clone() for t in self._outputs]


_MOST = 4
"""Maximum number of graphs per model; each holds the memory of its computation."""
_GRAPHS: WeakKeyDictionary[nn.Module, dict[Hashable, Captured | None]] = WeakKeyDictionary()
_LOCK = threading.RLock()


def captured(owner: nn.Module, key: Hashable, function: Function, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    """The result of a function, from a CUDA graph for this key and these shapes.

    The result is None, after a warning, if the function cannot be captured because it waits for the host. Graphs exist
    as long as `owner`, whose weights they read in place.
    """
    key = (key, tuple((tuple(t.shape), t.dtype) for t in inputs))
    with torch.cuda.device(inputs[0].device):
        with _LOCK:
            graphs = _GRAPHS.setdefault(owner, {})
            if key not in graphs:
                while len(graphs) >= _MOST:
                    graphs.pop(next(iter(graphs)))
                graphs[key] = _capture(function, inputs)
            graph = graphs[key]
        return None if graph is None else graph(inputs)


def _capture(function: Function, inputs: Sequence[Tensor]) -> Captured | None:
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
        _GRAPHS.pop(owner, None)
