"""Intercept a forward where it calls its blocks: record the calls, skip them, or stop there."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.discovery import Entered as Entered
from patchlight.anatomy.discovery import map_tensors, tensors_in
from patchlight.anatomy.watching import AttentionCall


@dataclass(frozen=True)
class BlockCall:
    """How a forward calls a block.

    `rest` and `named` are the arguments beside the tokens, which are the first or the one called `keyword`. `returned`
    is the output for one blank image, and `fed` the shape of the tokens.
    """

    rest: tuple[Any, ...]
    named: Mapping[str, Any]
    keyword: str | None
    fed: tuple[int, ...]
    returned: Any

    def run(
        self,
        block: nn.Module,
        tokens: Tensor,
        change: Callable[[Any], Any] = lambda value: value,
        more: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The output of the block for other tokens, with its other arguments changed, and `more` of them."""
        rest, named = change(self.rest), change(dict(self.named))
        if more:  # also of arguments that the forward gives without a name
            names = list(inspect.signature(type(block).forward).parameters)[2:]
            rest, named = (), dict(zip(names, rest, strict=False)) | named | dict(more)
        out = block(tokens, *rest, **named) if self.keyword is None else block(**{self.keyword: tokens}, **named)
        return out if isinstance(out, Tensor) else tensors_in(out)[0]

    def answer(self, tokens: Tensor) -> Any:
        """An output of the block that contains these tokens."""
        first = tensors_in(self.returned)[0]
        return map_tensors(self.returned, lambda tensor: tokens if tensor is first else tensor)

    def blank(self, tokens: Tensor) -> Any:
        """An output of the block for as many images as `tokens` has."""
        out = tensors_in(self.returned)[0]
        if out.shape[1:] == tokens.shape[1:]:
            return self.answer(tokens)
        return self.answer(tokens.new_zeros(len(tokens) * len(out) // self.fed[0], *out.shape[1:]))


@dataclass(frozen=True)
class Site:
    """A place where a forward calls a module that can be skipped."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any]
    """Make the call."""

    @property
    def keyword(self) -> str | None:
        """The argument that has the tokens; None for the first."""
        return None if self.args else next(key for key, value in self.kwargs.items() if isinstance(value, Tensor))

    @property
    def tokens(self) -> Tensor:
        keyword = self.keyword
        found: Any = self.args[0] if keyword is None else self.kwargs[keyword]
        return found if isinstance(found, Tensor) else tensors_in(found)[0]

    def capture(self, tokens: Tensor, out: Any) -> None:
        """Run the hooks with which transformers collects hidden states, where the call is skipped."""
        for hook in self.module._forward_hooks.values():
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                hook(self.module, (tokens,), out)

    def recorded(self, returned: Any) -> BlockCall:
        """The call, without its tokens."""
        named = {key: value for key, value in self.kwargs.items() if key != self.keyword}
        return BlockCall(self.args[1:], named, self.keyword, tuple(self.tokens.shape), returned)


def part_blocks(net: nn.Module, paths: Sequence[str]) -> None:
    """Give a twin a block of its own, with the same weights, where a model runs the same one again."""
    visited: set[int] = set()
    for path in paths:
        owner, _, name = path.rpartition(".")
        block = net.get_submodule(path)
        if id(block) in visited:
            block = copy.copy(block)
            setattr(net.get_submodule(owner), name, block)
        visited.add(id(block))


@dataclass
class Sites:
    """The blocks and classifiers of a twin, and how its forward calls the blocks.

    `stems` are the modules that run before the first block, and what each returned for a blank image, in the order of
    their calls; a forward on a blank image returns that again in place of running them.
    """

    net: nn.Module
    blocks: list[nn.Module]
    heads: list[nn.Module]
    calls: dict[Any, list[BlockCall]] = field(default_factory=dict)
    """By what the calls depend on beside the image."""
    stems: dict[Any, list[tuple[nn.Module, Any]]] = field(default_factory=dict)
    blank: Tensor | None = None
    """A blank input."""

    def __post_init__(self) -> None:
        self._numbers = {id(block): number for number, block in enumerate(self.blocks)}

    def index(self, module: nn.Module) -> int | None:
        """The number of a block; None for another module."""
        return self._numbers.get(id(module))

    @contextlib.contextmanager
    def noting_stem(self, key: Any, path: str) -> Iterator[None]:
        """Inside, record the modules beside the `path` of the first block that run before it, and their outputs."""
        taken = {id(module) for module in (*self.blocks, *self.heads)}
        ran: list[tuple[nn.Module, Any]] = []
        owner, hooks, beside = self.net, [], list[nn.Module]()
        for part in path.split("."):
            beside += [child for name, child in owner.named_children() if name != part]
            owner = getattr(owner, part)
        for module in beside:
            if taken.isdisjoint(map(id, module.modules())):
                hooks.append(module.register_forward_hook(lambda module, _, out: ran.append((module, out))))
        stem = self.stems[key] = []
        hooks.append(self.blocks[0].register_forward_pre_hook(lambda *_: stem.extend(ran)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for module, _ in stem:
            make_skippable(module)


class KeptScores(TorchFunctionMode):
    """Inside, a mask or bias of attention over all N tokens is restricted to the kept `places` [B,k]."""

    def __init__(self, places: Tensor, count: int) -> None:
        super().__init__()
        self._places, self._count = places, count

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "scaled_dot_product_attention":
            call = AttentionCall(*args, **(kwargs or {}))
            mask = call.attn_mask
            if mask is not None and mask.shape[-1] == self._count:
                mask = gathered(mask, self._places, self._places, self._count)
            return func(**call.with_mask(mask))
        return func(*args, **(kwargs or {}))


def gathered(value: Tensor, places: Tensor, keep: Tensor, count: int, pairs: bool = True) -> Tensor:
    """An argument of a block, restricted to the kept tokens, one row per image.

    An axis of length `count` belongs to all tokens and is read at `places` [B,p]; one as long as the grid belongs to
    its cells and is read at `keep` [B,k]. A tensor without such an axis is unchanged, and without `pairs` one that has
    two, a mask.

    >>> table = torch.arange(4)[:, None]
    >>> gathered(table, torch.tensor([[0, 3]]), torch.tensor([[2]]), 4).flatten().tolist()
    [0, 3]
    """
    cells = count - places.shape[1] + keep.shape[1]
    size = next((size for size in (count, cells) if size in value.shape), None)
    if size is None:
        return value
    index = places if size == count else keep
    alone = value.ndim == 2
    unchanged, value = value, value[0] if not alone and len(value) == 1 else value
    axes = [axis for axis in range(value.ndim) if value.shape[axis] == size]
    if axes[-2:] == [value.ndim - 2, value.ndim - 1]:
        if not pairs:
            return unchanged
        out = value[..., index[:, :, None], index[:, None, :]].movedim(-3, 0)
    else:
        out = value.movedim(axes[0], 0)[index].movedim(1, axes[0] + 1)
    return out[:, None] if alone else out


_LOCAL = threading.local()
"""What this thread does where a forward calls a block; twins are shared by all threads."""


@contextlib.contextmanager
def crossing(at: Callable[[Site], Any]) -> Iterator[None]:
    before = getattr(_LOCAL, "at", None)
    _LOCAL.at = at
    try:
        yield
    finally:
        _LOCAL.at = before


def make_skippable(module: nn.Module) -> None:
    """Let a module of a twin be intercepted."""
    if not hasattr(type(module), "skippable"):
        kind: Any = type(module)
        module.__class__ = _skippable(kind)


@cache
def _skippable(kind: Any) -> Any:
    """A subclass of this module type that can be skipped together with its hooks."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        at: Callable[[Site], Any] | None = None if torch.compiler.is_compiling() else getattr(_LOCAL, "at", None)
        if at is None:
            return kind.__call__(self, *args, **kwargs)
        return at(Site(self, args, kwargs, lambda: kind.__call__(self, *args, **kwargs)))

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "skippable": True})


class Flowing(TorchFunctionMode):
    """Inside, `no_grad` in a forward (as where only its head is trained) has no effect; `used`: whether it was met."""

    used = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch._C._set_grad_enabled and not _called_by_us(sys._getframe(1)):
            self.used = True
            return None
        return func(*args, **(kwargs or {}))


def _called_by_us(frame: Any) -> bool:
    """Whether the caller is a function of Patchlight, not of the module."""
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "patchlight"
