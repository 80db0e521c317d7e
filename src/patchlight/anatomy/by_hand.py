"""A model described by hand: its blocks, and functions for what comes before and after them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import parts_of_timm
from patchlight.core.fingerprints import modules_of


class DescribedAnatomy(Anatomy):
    """A model described by hand: its blocks, and functions for what comes before and after them."""

    library = "described"

    def __init__(
        self,
        model: nn.Module,
        *,
        embed: Callable[[Tensor], Tensor],
        blocks: Sequence[nn.Module],
        readout: Callable[[Tensor], Tensor],
        **facts: Any,
    ) -> None:
        self._given = embed, list(blocks), readout
        super().__init__(model, **facts)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [self.twin.moved(block) for block in self._given[1]]

    @property
    def functions(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """`embed` and `readout` as they were given."""
        return self._given[0], self._given[2]

    def embed(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.twin.moved(self._given[0])(images))

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        from patchlight.anatomy.hf import required_after_first

        block = self.blocks[index]
        out: Any = block(tokens, **dict.fromkeys(required_after_first(type(block))))
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def features(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.twin.moved(self._given[2])(tokens))

    def model_output(self, images: Tensor) -> Any:
        """The output of the model itself, if that is logits; its forward may take or return anything."""
        own_logits = self.classified(self.run(self.embed(images)))
        try:
            out: Any = self.net(images)
        except Exception:
            return own_logits
        out = getattr(out, "logits", out)
        return out if isinstance(out, Tensor) and out.shape == own_logits.shape else own_logits

    @property
    def castable(self) -> bool:
        return not any(self.twin.moved(f) is f for f in map(_inner, self.functions))

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Keep the twin up to date; run functions that are not methods of the model in evaluation mode.

        Such functions run the user's own modules. If one is in training mode, it is switched to evaluation mode under a
        lock, because other threads can see it.
        """
        with super().steady(), contextlib.nullcontext() if self.castable else _evaluating(self.model):
            yield

    def parts(self, index: int) -> Parts:
        return parts_of_timm(self.blocks[index])


def _inner(function: Any) -> Any:
    return _inner(function.func) if isinstance(function, partial) else function


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    with _LOCKS.setdefault(model, threading.RLock()):
        training = [m for m in modules_of(model) if m.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
