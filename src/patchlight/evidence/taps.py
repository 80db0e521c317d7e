"""Taps: record attention, norms, activations and linear maps when a model calls them, and apply a backward rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from patchlight.anatomy.watching import AttentionCall, AttentionTap
from patchlight.anatomy.windows import Merging, Reach
from patchlight.evidence import rules
from patchlight.evidence.record import ATTENTION, Record
from patchlight.evidence.rows import FusedAttention, attend
from patchlight.evidence.rules import Rule


class Taps(AttentionTap):
    """Apply a backward rule to a part of a model, and record values.

    Args:
        rule: The backward rule.
        needs: The parts of the evidence to record.
        record: Where they are recorded.
        in_block: Whether the part is a block.
        fused: If given, attention stays fused in this type if possible, and the inputs of its matrices are recorded.
        cut: Whether the graph begins at the output of attention, `record.leaf`.
        place: The arrangement of the tokens: in order (None), in windows, or on a coarser grid.
    """

    handlers: ClassVar[Mapping[str, str]] = {
        **AttentionTap.handlers,
        **{name: name for name in ("layer_norm", "rms_norm", "gelu", "silu", "linear", "conv2d", "rsqrt")},
        **dict.fromkeys(("add", "__add__", "add_", "__iadd__"), "add"),
        **dict.fromkeys(("mul", "__mul__", "multiply"), "gate"),
        **dict.fromkeys(("sigmoid", "tanh", "erf"), "squash"),
    }

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
        super().__init__(place)
        self.rule, self.needs, self.record = rule, needs, record
        self.in_block, self.fused, self.cut = in_block, fused, cut
        self.watches = bool(needs & ATTENTION)
        self._factors: tuple[Tensor, Tensor] | None = None
        self._projected = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.outer:
            self._factors = None

    def _observer(self) -> rules.Observer | None:
        if "G" not in self.needs:
            return None
        record = self.record
        undo = 2.0 if self.rule.attention == "uniform" else 1.0

        def observe(attention: Tensor, gradient: Tensor) -> None:
            """Record A and its full gradient; a uniform rule has halved the gradient."""
            record.see("A", attention)
            record.see("G", gradient if undo == 1.0 else gradient * undo)

        return observe

    def attend(self, scores: Tensor) -> Tensor:
        self.take()
        if isinstance(self.place, Reach):
            self.record.reach = self.place
        attention = rules.softmax(scores, self.rule, self._observer())
        self._attention = attention if self.watches else None
        if "A" in self.needs:
            self.record.see("A", attention)
        return attention

    def attend_composed(self, scores: Tensor) -> Tensor:
        if self._factors is not None:
            self._record_parts(q=self._factors[0], k=self._factors[1].mT)
        return self.attend(scores)

    def scaled_dot_product_attention(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """Compute fused attention if possible; it is written out if its matrix is read, or for a rule on a CPU."""
        call = AttentionCall(*args, **kwargs)
        query, key, value = call[:3]
        graph = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        ruled = graph and self.rule.attention != "plain"
        keeps_fused = not ruled or query.is_cuda
        if not self.watches and keeps_fused:
            self.take()
            return self._fused(func, call, ruled)
        call = call.ungrouped()
        out = self._in_tiles(call) if call.attn_mask is None else None
        if out is not None:
            return out
        self._record_parts(q=call.query, k=call.key, v=call.value)
        if keeps_fused and not self.needs & {"A", "G"}:
            self.take()
            return self._begin(self._fused(func, call, ruled))
        return self._begin(self.write_out(call))

    def _fused(self, func: Callable[..., Any], call: AttentionCall, ruled: bool) -> Tensor:
        query, key, value, mask, dropout, causal, scale, grouped = call
        inputs = rules.attended(query, key, value, self.rule) if ruled else (query, key, value)
        options = {"enable_gqa": True} if grouped else {}
        return func(*inputs, mask, dropout, causal, scale=scale, **options)  # type: ignore[no-any-return]

    def _record_parts(self, **values: Tensor) -> None:
        for name, value in values.items():
            if name in self.needs:
                self.record.see(name, value)

    def _begin(self, out: Tensor) -> Tensor:
        """Record the gradient of the output of attention; if the graph is cut, it begins here."""
        if self.cut and "dO" in self.needs:
            out = self.record.leaf = out.detach().requires_grad_()
        elif out.requires_grad and ("dO" in self.needs or ("G" in self.needs and self.record.fused is not None)):
            out.register_hook(self.record.see_dO)
        return out

    def _in_tiles(self, call: AttentionCall) -> Tensor | None:
        """Fused attention that also returns its log-sum-exp; None if there is no such kernel."""
        query, key, value = call[:3]
        width, alike = query.shape[-1], query.shape == key.shape == value.shape
        if self.fused is None or not self.in_block or not alike or query.ndim != 4 or width % 8 or width > 128:
            return None
        if not query.is_cuda and query[..., 0].numel() * query.shape[2] < WRITTEN:
            return None
        q, k, v = (t.to(self.fused) for t in rules.attended(query, key, value, self.rule))
        result = attend(q, k, v, call.factor)
        if result is None:
            return None
        self.take()
        out, lse = result
        self.record.fused = FusedAttention(q.detach(), k.detach(), v.detach(), lse.detach(), call.factor)
        return self._begin(out)

    def _halved(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a matrix product, with half of their gradients under a uniform rule."""
        uniform = self.rule.attention == "uniform" and a.requires_grad and b.requires_grad
        return (rules.halved(a), rules.halved(b)) if uniform else (a, b)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self._halved(a, b)
        return a @ b

    def matmul(self, func: Callable[..., Any], a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = self.mixes_values(a)
        if values:
            self._record_parts(v=b)
        elif self._attention is None and a.ndim == b.ndim == 4 and self.needs & {"q", "k"}:
            self._factors = a, b
        out: Tensor = func(*self._halved(a, b), *args, **kwargs)
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
        return self._record_bias(rules.layer_norm(input, normalized_shape, weight, bias, eps, self.rule), bias)

    def tokens(self, part: str, value: Tensor) -> None:
        """Record tokens [B,N,D] (or [B,h,w,D], [BN,D]) inside a block under the letter `part`, and their gradient."""
        x, gradient_part = self.record.x, f"g{part}"
        if part in self.needs:
            self.record.seen[part] = value.detach().to(x.dtype).reshape(len(x), -1, value.shape[-1])

        def see_gradient(gradient: Tensor) -> None:
            self.record.seen[gradient_part] = gradient.to(x.dtype).reshape(len(x), -1, gradient.shape[-1])

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
        return self._record_bias(*rules.elementwise(h, function))

    def linear(self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        after = not self.in_block or self._projected  # the first linear map after the attention is its projection
        self._projected = self.taken
        gamma = self.rule.gamma if after or self.rule.linear == "all" else 0.0
        return self._product(func, (input, weight, bias), gamma)

    def conv2d(
        self, func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kw: Any
    ) -> Tensor:
        def product(*factors: Tensor) -> Tensor:
            return func(*factors, *rest, **kw)  # type: ignore[no-any-return]

        return self._product(product, (input, weight, bias), self.rule.conv_gamma, channels=1)

    def _product(
        self,
        product: Callable[..., Tensor],
        factors: tuple[Tensor, Tensor, Tensor | None],
        gamma: float,
        channels: int = -1,
    ) -> Tensor:
        """A linear map or a convolution of factors (input, weight, bias), with the gamma rule if gamma is not 0."""
        if gamma == 0 or not (torch.is_grad_enabled() and factors[0].requires_grad):
            return self._record_bias(product(*factors), factors[2], channels)
        record, place = self.record, self.place

        def observe(relevance: Tensor) -> None:
            record.add_bias(relevance.movedim(channels, -1).sum(-1), place)

        return rules.gamma_product(product, *factors, gamma, observe if "bias" in self.needs else None)

    def _record_bias(self, out: Tensor, bias: Tensor | None, channels: int = -1) -> Tensor:
        """Record the contribution of a bias that was added to `out`, and return `out`."""
        if bias is not None and "bias" in self.needs and out.requires_grad:
            record, constant, place = self.record, bias.detach(), self.place

            def observe(g: Tensor | None) -> None:
                if g is not None:
                    record.add_bias(g.movedim(channels, -1) @ constant.to(g.dtype), place)

            out.register_hook(observe)
        return out

    def add(self, func: Callable[..., Any], a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """A vector that is added to activations is a bias (some EVA and BEiT models add it after the linear map)."""
        out = func(a, b, *args, **kwargs)
        constant = b if isinstance(b, Tensor) and isinstance(a, Tensor) and a.requires_grad else None
        if constant is not None and constant.ndim == 1 and (constant.is_leaf or not constant.requires_grad):
            return self._record_bias(out, constant)
        return out

    def gate(self, func: Callable[..., Any], a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        """A product of two activations is a gate; a product with a parameter or a number is a scale."""
        activations = isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad
        if activations and self.rule.gate == "half" and a.shape == b.shape:
            a, b = rules.halved(a), rules.halved(b)
        return func(a, b, *args, **kwargs)

    def squash(self, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The bounded factor r of an activation f(h) = h r(h) composed of primitives; constant under a ratio rule."""
        constant = self.in_block and self.rule.activation == "ratio"
        return func(x.detach() if constant else x, *args, **kwargs)  # type: ignore[no-any-return]

    def rsqrt(self, func: Callable[..., Any], x: Tensor) -> Tensor:
        """The reciprocal of the deviation in a norm composed of primitives; constant under a frozen rule."""
        return func(x.detach() if self.rule.norm == "frozen" else x)  # type: ignore[no-any-return]


WRITTEN = 2**23
"""Numbers of the attention matrices of a block from which, on a CPU, recomputing tiles is faster than writing them.

Memory of more than 32 MiB is new to the process each time: the C library returns it to the system when it is freed.
"""
