"""Taps: see attention, norms, activations and linear maps as a model calls them, with nothing patched or left behind.

A tap is a `with`: inside it every torch function the model calls passes through here, is recorded where asked, and
gets the backward of the rule in force.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from patchlight.core.errors import Unsupported
from patchlight.evidence import rules
from patchlight.evidence.record import ATTENTION, Record
from patchlight.evidence.rows import Attention, attend
from patchlight.evidence.rules import Rule
from patchlight.evidence.stages import Merging, Reach

_LOCAL = threading.local()


def current() -> Taps | None:
    """The tap this thread is inside of."""
    return getattr(_LOCAL, "tap", None)


class TokenWatch:
    """A forward hook that shows the tokens at a module to taps, and changes nothing."""

    def __init__(self, part: Literal["n", "o", "u"]) -> None:
        self.part = part

    def __call__(self, _: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        tap = None if torch.compiler.is_compiling() else current()
        if tap is not None:
            tap.tokens(self.part, given[0] if self.part == "u" else out)


def watch_tokens(module: nn.Module | None, part: Literal["n", "o", "u"]) -> None:
    """Have taps see the tokens at a module of a twin: its output, or for "u" (the second norm) its input."""
    if module is not None:
        module.register_forward_hook(TokenWatch(part))


def watch_reach(attention: nn.Module, reach: Reach, until: nn.Module | None = None) -> None:
    """Have taps know which tokens an attention of a twin joins, while it runs (or before its part `until` does)."""

    def begin(_: nn.Module, given: Any) -> None:
        tap = None if torch.compiler.is_compiling() else current()
        if tap is not None:
            tap.place = reach

    def end(*_: Any) -> None:
        tap = None if torch.compiler.is_compiling() else current()
        if tap is not None:
            tap.place = None

    attention.register_forward_pre_hook(begin)
    if until is None:
        attention.register_forward_hook(end)
    else:
        until.register_forward_pre_hook(end)


class Activation(nn.Module):
    """An elementwise activation of a twin, seen whole by taps whatever functions it is made of."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.training = False

    def forward(self, h: Tensor) -> Tensor:
        tap = None if torch.compiler.is_compiling() else current()
        out: Tensor = self.function(h) if tap is None else tap.activation(h, self.function)
        return out


class Taps(TorchFunctionMode):
    """Apply `rule` to a stretch of a model, and write into `record` what `needs` names of what is seen inside.

    With `fused`, a type, attention stays fused in that type where it can, and the record has what its matrices are
    made of. With `cut`, a graph begins at the attention's output, of which the record has the leaf. `place` says where
    what runs now has its tokens: nowhere else (None), in windows, on a coarser grid.
    """

    def __init__(
        self,
        rule: Rule,
        needs: frozenset[str],
        record: Record,
        in_block: bool,
        fused: torch.dtype | None = None,
        cut: bool = False,
        place: Reach | Merging | None = None,
    ) -> None:
        super().__init__()
        self.rule, self.needs, self.record = rule, needs, record
        self.in_block, self.fused, self.cut, self.place = in_block, fused, cut, place
        self._outer: list[Taps | None] = []
        self._attention: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None
        self._taken = False

    def __enter__(self) -> Taps:
        self._outer.append(current())
        _LOCAL.tap = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _LOCAL.tap = self._outer.pop()
        if not self._outer:
            self._attention = self._factors = None
            self._taken = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        if handler is None:
            return func(*args, **(kwargs or {}))
        return getattr(self, handler)(func, *args, **(kwargs or {}))

    def _observer(self) -> rules.Observer | None:
        if "G" not in self.needs:
            return None
        record = self.record
        undo = 2.0 if self.rule.attention == "uniform" else 1.0

        def seen(attention: Tensor, gradient: Tensor) -> None:
            """G is the whole gradient of the attention matrix; a uniform rule halves only what flows on."""
            record.see("A", attention)
            record.see("G", gradient if undo == 1.0 else gradient * undo)

        return seen

    def attend(self, scores: Tensor) -> Tensor:
        """The attention matrix [B,H,N,N] of its scores; a kind of tap that changes attention changes this.

        In windows it is [B*W,H,n,m] or [B,W,H,n,m].
        """
        watched = self._take()
        if isinstance(self.place, Reach):
            self.record.reach = self.place
        attention = rules.softmax(scores, self.rule, self._observer())
        self._attention = attention if watched else None
        if "A" in self.needs:
            self.record.see("A", attention)
        return attention

    def _take(self) -> bool:
        """Whether somebody looks at the attention that is computed now: of a block, there is one."""
        watched = bool(self.needs & ATTENTION)
        if watched and self._taken:
            raise Unsupported("a block takes more than one softmax, so it has no one attention matrix")
        self._taken = True
        return watched

    def softmax(self, func: Callable[..., Any], scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = args[0] if args else kwargs.get("dim")
        dtype = kwargs.get("dtype")
        axes = (4, 5) if isinstance(self.place, Reach) else (4,)
        if scores.ndim not in axes or dim not in (-1, scores.ndim - 1):
            return func(scores, *args, **kwargs)  # type: ignore[no-any-return]
        if self._factors is not None:
            self._show(q=self._factors[0], k=self._factors[1].mT)
        return self.attend(scores if dtype is None else scores.to(dtype))

    def scaled_dot_product_attention(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The fused attention where it can be; else written out, for someone who looks at its matrix or for a rule.

        A CPU's fused backward takes longer than what is left of it under a rule.
        """
        watched, matrix = self.needs & ATTENTION, self.needs & {"A", "G"}
        graph = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        ruled = graph and self.rule.attention != "plain"
        if not watched and (not ruled or query.is_cuda):
            grouped = {"enable_gqa": True} if enable_gqa else {}
            given = rules.attended(query, key, value, self.rule) if ruled else (query, key, value)
            return func(*given, attn_mask, dropout_p, is_causal, scale=scale, **grouped)  # type: ignore[no-any-return]
        if is_causal:
            raise Unsupported("causal attention is not something a Vision Transformer is read with")
        if enable_gqa:  # several heads of queries share one of keys and values
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if attn_mask is None:
            out = self._in_tiles(query, key, value, factor)
            if out is not None:
                return out
        self._show(q=query, k=key, v=value)
        if not matrix and (not ruled or query.is_cuda):
            self._take()
            given = rules.attended(query, key, value, self.rule) if ruled else (query, key, value)
            return self._begin(func(*given, attn_mask, dropout_p, scale=scale))
        scores = self._product(query * factor, key.transpose(-2, -1))
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._begin(self._product(self.attend(scores), value))

    def _show(self, **seen: Tensor) -> None:
        for name, value in seen.items():
            if name in self.needs:
                self.record.see(name, value)

    def _begin(self, out: Tensor) -> Tensor:
        """What attention gives, its gradient seen; where the graph is cut, it begins here."""
        if self.cut and "dO" in self.needs:
            out = self.record.leaf = out.detach().requires_grad_()
        elif out.requires_grad and ("dO" in self.needs or ("G" in self.needs and self.record.fused is not None)):
            out.register_hook(self.record.see_dO)
        return out

    def _in_tiles(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Fused attention whose matrices the record can give rows of; None where there is no such kernel."""
        width, known = query.shape[-1], query.shape == key.shape == value.shape
        if self.fused is None or not self.in_block or not known or query.ndim != 4 or width % 8 or width > 128:
            return None
        q, k, v = (t.to(self.fused) for t in rules.attended(query, key, value, self.rule))
        found = attend(q, k, v, scale)
        if found is None:
            return None
        self._take()
        out, lse = found
        self.record.fused = Attention(q.detach(), k.detach(), v.detach(), lse.detach(), scale)
        return self._begin(out)

    def multi_head_attention_forward(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        *rest: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """torch's own multi-head attention [N,B,D], as its linear maps and attention, each through this tap."""
        names = ("bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias")
        given = dict(zip(names, rest, strict=False)) | kwargs
        separate = kwargs.get("use_separate_proj_weight") or in_proj_weight is None
        if separate or given.get("bias_k") is not None or given.get("add_zero_attn"):
            raise Unsupported("a MultiheadAttention with separate projections or key/value biases cannot be read")
        weights = in_proj_weight.chunk(3)  # type: ignore[union-attr]
        biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
        with self:
            heads = [
                F.linear(t.transpose(0, 1), w, b).unflatten(-1, (num_heads, -1)).transpose(1, 2)
                for t, w, b in zip((query, key, value), weights, biases, strict=True)
            ]
            mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], kwargs.get("attn_mask"))
            out = F.linear(mixed.transpose(1, 2).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
        self.tokens("o", out)
        return out.transpose(0, 1), None

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.rule.attention == "uniform" and a.requires_grad and b.requires_grad:
            a, b = rules.halved(a), rules.halved(b)
        return a @ b

    def matmul(self, func: Callable[..., Any], a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attention = self._attention
        values = attention is not None and a.shape == attention.shape
        if attention is not None and values:
            if a.data_ptr() != attention.data_ptr() and a.dtype == attention.dtype:
                raise Unsupported("a block changes its attention between the softmax and the values")
            self._show(v=b)
        elif attention is None and a.ndim == b.ndim == 4 and self.needs & {"q", "k"}:
            self._factors = a, b
        if self.rule.attention == "uniform" and a.requires_grad and b.requires_grad:
            a, b = rules.halved(a), rules.halved(b)
        out: Tensor = func(a, b, *args, **kwargs)
        return self._begin(out) if values else out

    def layer_norm(
        self,
        func: Callable[..., Any],
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *rest: Any,
    ) -> Tensor:
        return self._biased(rules.layer_norm(input, normalized_shape, weight, bias, eps, self.rule), bias)

    def tokens(self, part: str, value: Tensor) -> None:
        """Record tokens inside a block [B,N,D] (or [B,h,w,D]) under the letter `part`, and their gradient."""
        dtype, gradient_part = self.record.x.dtype, f"g{part}"
        if part in self.needs:
            self.record.seen[part] = value.detach().to(dtype).flatten(1, -2)

        def see_gradient(gradient: Tensor) -> None:
            self.record.seen[gradient_part] = gradient.to(dtype).flatten(1, -2)

        if gradient_part in self.needs and value.requires_grad:
            value.register_hook(see_gradient)

    def rms_norm(
        self,
        func: Callable[..., Any],
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        return rules.rms_norm(input, normalized_shape, weight, eps, self.rule)

    def gelu(self, func: Callable[..., Any], input: Tensor, approximate: str = "none") -> Tensor:
        return rules.gelu(input, approximate, self.rule)

    def silu(self, func: Callable[..., Any], input: Tensor, inplace: bool = False) -> Tensor:
        return rules.silu(input, self.rule)

    def activation(self, h: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """f(h) = f(0) + h r(h) under a ratio rule, where f(0) is a bias."""
        if self.rule.activation == "plain" or not h.requires_grad:
            return function(h)
        out, at_zero = rules.elementwise(h, function)
        return self._biased(out, at_zero)

    def linear(self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._biased(func(input, weight, bias), bias)

    def conv2d(
        self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        return self._biased(func(input, weight, bias, *rest, **kw), bias, channels=1)

    def _biased(self, out: Tensor, bias: Tensor | None, channels: int = -1) -> Tensor:
        if bias is not None and "bias" in self.needs and out.requires_grad:
            record, constant, place = self.record, bias.detach(), self.place

            def seen(g: Tensor | None) -> None:
                if g is not None:
                    record.add_bias(g.movedim(channels, -1) @ constant.to(g.dtype), place)

            out.register_hook(seen)
        return out

    def add(self, func: Callable[..., Any], a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """A vector added to activations is a bias too (some EVA and BEiT weights keep it outside the linear map)."""
        out = func(a, b, *args, **kwargs)
        constant = b if isinstance(b, Tensor) and isinstance(a, Tensor) and a.requires_grad else None
        if constant is not None and constant.ndim == 1 and (constant.is_leaf or not constant.requires_grad):
            return self._biased(out, constant)
        return out

    def gate(self, func: Callable[..., Any], a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """A product of two activations is a gate; a product with a parameter or a number is a scale."""
        both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad
        if both and self.rule.gate == "half" and a.shape == b.shape:
            a, b = rules.halved(a), rules.halved(b)
        return func(a, b, *args, **kwargs)

    def squash(self, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The bounded factor of an activation composed of primitives (QuickGELU, tanh-GELU, a sigmoid gate).

        Under a ratio rule f(h) = h * r(h) passes r(h), so r is constant.
        """
        constant = self.in_block and self.rule.activation == "ratio"
        return func(x.detach() if constant else x, *args, **kwargs)  # type: ignore[no-any-return]

    def rsqrt(self, func: Callable[..., Any], x: Tensor) -> Tensor:
        """One over the deviation, in a norm composed of primitives."""
        return func(x.detach() if self.rule.norm == "frozen" else x)  # type: ignore[no-any-return]


_HANDLERS = {
    **{name: name for name in ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")},
    **{name: name for name in ("layer_norm", "rms_norm", "gelu", "silu", "linear", "conv2d", "rsqrt")},
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), "matmul"),
    **dict.fromkeys(("add", "__add__", "add_", "__iadd__"), "add"),
    **dict.fromkeys(("mul", "__mul__", "multiply"), "gate"),
    **dict.fromkeys(("sigmoid", "tanh", "erf"), "squash"),
}
"""By the name of a torch function, the method of a tap that is called in its place."""
