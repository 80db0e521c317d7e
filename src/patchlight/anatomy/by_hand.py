"""A model described by hand: its blocks, and functions for what comes before and after them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import parts_of_timm
from patchlight.anatomy.twin import on_copies
from patchlight.core.errors import PatchlightError
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
    def functions(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]:
        """`embed` and `readout` over the modules of the twin, and the class of an object that prevents it, or ""."""
        running, (embed, _, readout) = self.running, self._given
        if running.part[0] is not running.net:
            try:
                over = *(on_copies(function, self.twin.moved) for function in (embed, readout)), ""
            except LookupError as error:
                over = embed, readout, str(error)
            running.part = running.net, over
        functions: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str] = running.part[1]
        return functions

    def embed(self, images: Tensor) -> Tensor:
        return self.functions[0](images)

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        block = self.blocks[index]
        out: Any = block(tokens, **dict.fromkeys(_required_after_first(type(block))))
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def features(self, tokens: Tensor) -> Tensor:
        return self.functions[1](tokens)

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
        return not any(self.twin.moved(f) is f for f in map(_inner, self._given[::2]))

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Also refuse a model in training mode if the functions that describe it would run its own modules."""
        with super().steady():
            hides = self.functions[2]
            if hides and any(module.training for module in modules_of(self.model)):
                raise PatchlightError(
                    f"{self.name} is in training mode, and the functions that describe it use an object of class "
                    f"{hides}, which a copy cannot replace; call model.eval() first, or give methods of the model"
                )
            yield

    def parts(self, index: int) -> Parts:
        return parts_of_timm(self.blocks[index])


def _inner(function: Any) -> Any:
    return _inner(function.func) if isinstance(function, partial) else function


def _required_after_first(cls: type[nn.Module]) -> list[str]:
    """Required parameters of a transformers block after its tokens, such as an attention mask; None is passed."""
    if not any(c.__module__.startswith("transformers.") for c in cls.__mro__):
        return []
    parameters = list(inspect.signature(cls.forward).parameters.values())[2:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in kinds]
