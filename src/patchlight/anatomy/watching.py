"""Observe a running model: its attention, and places in its twin that report to the tap of this thread.

A tap is a context manager: inside it every torch function the model calls passes through here, and nothing is patched
permanently. `AttentionTap` finds the attention of a block; `patchlight.evidence.taps` records more, under backward
rules.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.windows import Merging, Reach
from patchlight.core.errors import Unsupported

_LOCAL = threading.local()


def current_tap() -> AttentionTap | None:
    """The active tap of this thread."""
    return None if torch.compiler.is_compiling() else getattr(_LOCAL, "tap", None)


class TokenWatch:
    """A forward hook that shows the tokens at a module to taps and changes nothing."""

    def __init__(self, part: Literal["n", "o", "u"]) -> None:
        self.part = part

    def __call__(self, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        tap = current_tap()
        if tap is not None:
            tap.tokens(self.part, inputs[0] if self.part == "u" else out)


def watch_tokens(module: nn.Module | None, part: Literal["n", "o", "u"]) -> None:
    """Let taps observe the tokens at a module of a twin: its output, or for "u" (the second norm) its input."""
    if module is not None:
        module.register_forward_hook(TokenWatch(part))


def watch_reach(attention: nn.Module, reach: Reach, until: nn.Module | None = None) -> None:
    """Report to taps which tokens an attention of a twin connects, while it runs (or until its part `until` runs)."""

    def begin(*_: Any) -> None:
        tap = current_tap()
        if tap is not None:
            tap.place = reach

    def end(*_: Any) -> None:
        tap = current_tap()
        if tap is not None:
            tap.place = None

    attention.register_forward_pre_hook(begin)
    if until is None:
        attention.register_forward_hook(end)
    else:
        until.register_forward_pre_hook(end)


class Activation(nn.Module):
    """An elementwise activation of a twin that taps observe as a single operation."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.training = False

    def forward(self, h: Tensor) -> Tensor:
        tap = current_tap()
        out: Tensor = self.function(h) if tap is None else tap.activation(h, self.function)
        return out


class AttentionCall(NamedTuple):
    """The arguments of torch's `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def ungrouped(self) -> AttentionCall:
        """The same with keys and values for every head; causal attention is refused."""
        if self.is_causal:
            raise Unsupported("causal attention is not supported in a Vision Transformer")
        if not self.enable_gqa:
            return self
        count = self.query.shape[-3] // self.key.shape[-3]  # several query heads share a key and value head
        key, value = (t.repeat_interleave(count, -3) for t in (self.key, self.value))
        return self._replace(key=key, value=value, enable_gqa=False)

    def with_mask(self, mask: Tensor | None) -> dict[str, Any]:
        """The arguments by name, with another mask."""
        return {**dict(zip(self._fields, self, strict=True)), "attn_mask": mask}

    def masked(self, scores: Tensor) -> Tensor:
        mask = self.attn_mask
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


class AttentionTap(TorchFunctionMode):
    """Find the attention matrix of a block, `matrix` [B,H,N,N], regardless of how the block computes it.

    `place` is where the running module has its tokens: in order (None), in windows, or on a coarser grid. `reach` is
    that of the attention found.
    """

    handlers: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")},
        **dict.fromkeys(("matmul", "__matmul__", "bmm"), "matmul"),
    }
    """Replacement methods by the name of the torch function."""
    watches = True
    """Whether attention is observed, so that a block must have one."""

    def __init__(self, place: Reach | Merging | None = None) -> None:
        super().__init__()
        self.place = place
        self.matrix: Tensor | None = None
        self.reach: Reach | None = None
        self.outer: list[AttentionTap | None] = []
        self._attention: Tensor | None = None
        self.taken = False

    def __enter__(self) -> Any:
        self.outer.append(getattr(_LOCAL, "tap", None))
        _LOCAL.tap = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _LOCAL.tap = self.outer.pop()
        if not self.outer:
            self._attention, self.taken = None, False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = self.handlers.get(getattr(func, "__name__", ""))
        if handler is None:
            return func(*args, **(kwargs or {}))
        return getattr(self, handler)(func, *args, **(kwargs or {}))

    def attend(self, scores: Tensor) -> Tensor:
        """The attention matrix [B,H,N,N] of its scores; taps that change attention override this.

        In windows it is [B*W,H,n,m] or [B,W,H,n,m].
        """
        self.take()
        if isinstance(self.place, Reach):
            self.reach = self.place
        self.matrix = self._attention = scores.softmax(-1)
        return self.matrix

    def take(self) -> None:
        """Record that attention is computed now; a block that is observed has exactly one."""
        if self.watches and self.taken:
            raise Unsupported("a block has more than one softmax, so it has no single attention matrix")
        self.taken = True

    def softmax(self, func: Callable[..., Any], scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = args[0] if args else kwargs.get("dim")
        dtype = kwargs.get("dtype")
        axes = (4, 5) if isinstance(self.place, Reach) else (4,)
        if scores.ndim not in axes or dim not in (-1, scores.ndim - 1):
            return func(scores, *args, **kwargs)  # type: ignore[no-any-return]
        return self.attend_composed(scores if dtype is None else scores.to(dtype))

    def attend_composed(self, scores: Tensor) -> Tensor:
        """Attention that a model writes out itself."""
        return self.attend(scores)

    def scaled_dot_product_attention(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        return self.write_out(AttentionCall(*args, **kwargs).ungrouped())

    def write_out(self, call: AttentionCall) -> Tensor:
        """Fused attention as its two products and a softmax."""
        scores = call.masked(self.product(call.query * call.factor, call.key.transpose(-2, -1)))
        return self.product(self.attend(scores), call.value)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """A product of two activations."""
        return a @ b

    def multi_head_attention_forward(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """torch's multi-head attention [N,B,D], as linear maps and attention that pass through this tap."""
        arguments = dict(zip(_MULTI_HEAD, args, strict=False)) | kwargs
        separate = arguments.get("use_separate_proj_weight") or arguments["in_proj_weight"] is None
        if separate or arguments.get("bias_k") is not None or arguments.get("add_zero_attn"):
            raise Unsupported("a MultiheadAttention with separate projections or key/value biases cannot be read")
        bias = arguments["in_proj_bias"]
        weights, biases = arguments["in_proj_weight"].chunk(3), (None,) * 3 if bias is None else bias.chunk(3)
        with self:
            heads = [
                F.linear(arguments[name].transpose(0, 1), w, b)
                .unflatten(-1, (arguments["num_heads"], -1))
                .transpose(1, 2)
                for name, w, b in zip(("query", "key", "value"), weights, biases, strict=True)
            ]
            mask = arguments.get("attn_mask")
            if mask is not None and mask.ndim == 3:  # one for each head of each image
                mask = mask.unflatten(0, (-1, arguments["num_heads"]))
            mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask)
            out = F.linear(mixed.transpose(1, 2).flatten(2), arguments["out_proj_weight"], arguments["out_proj_bias"])
        self.tokens("o", out)
        return out.transpose(0, 1), None

    def matmul(self, func: Callable[..., Any], a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.mixes_values(a)
        return func(a, b, *args, **kwargs)  # type: ignore[no-any-return]

    def mixes_values(self, a: Tensor) -> bool:
        """Whether the first factor of a product is the attention matrix, unchanged since its softmax."""
        attention = self._attention
        if attention is None or a.shape != attention.shape:
            return False
        if a.data_ptr() != attention.data_ptr() and a.dtype == attention.dtype:
            raise Unsupported("a block changes its attention between the softmax and the values")
        return True

    def tokens(self, part: str, value: Tensor) -> None:
        """Called when tokens inside a block [B,N,D] (or [B,h,w,D]) were computed, those of the letter `part`."""

    def activation(self, h: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """An elementwise activation."""
        return function(h)


class Unseen(AttentionTap):
    """Attention restricted to the keys `seen` [B,N], fused if the model's is."""

    watches = False

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.seen = seen[:, None, None]

    def scaled_dot_product_attention(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Tensor:
        if attn_mask is None:
            shown = self.seen
        elif attn_mask.dtype == torch.bool:
            shown = attn_mask & self.seen
        else:
            shown = attn_mask.masked_fill(~self.seen, -torch.inf)
        return func(query, key, value, shown, *rest, **kwargs)  # type: ignore[no-any-return]

    def attend(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.seen, -torch.inf).softmax(-1)


_MULTI_HEAD = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k"),
    *("bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias"),
)
"""The first arguments of torch's `multi_head_attention_forward`, in order."""
