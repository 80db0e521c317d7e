"""Backward rules: gradients of attention, layer norm, activations and gates that differ from the usual ones.

Each operation below has exactly the value of the usual one, and its own backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.core.registry import Registry
from patchlight.evidence.rows import has_tiles


@dataclass(frozen=True)
class Rule:
    """A backward rule, defined for each type of operation.

    Args:
        name: The suffix for names of methods.
        paper: The source.
        attention: "frozen" treats the attention matrix as constant; "uniform" passes half of the gradient to each
            factor of a product of activations.
        norm: "frozen" treats the standard deviation as constant, but not the mean.
        activation: "ratio" replaces f'(h) by f(h)/h.
        gate: "half" passes half of the gradient to each factor of a product of two activations.
        aliases: Other names.
        gamma: Additional weight of the contributions to a linear map that have the sign of its output; 0: the gradient.
        conv_gamma: `gamma` of the convolution that embeds the patches.
        linear: The linear maps with `gamma`: "mlp", those after attention and its output projection, including the
            classifier; or "all", also the projections of attention.
    """

    name: str
    paper: str
    attention: Literal["plain", "frozen", "uniform"] = "plain"
    norm: Literal["plain", "frozen"] = "plain"
    activation: Literal["plain", "ratio"] = "plain"
    gate: Literal["plain", "half"] = "plain"
    aliases: tuple[str, ...] = ()
    gamma: float = 0.0
    conv_gamma: float = 0.0
    linear: Literal["mlp", "all"] = "mlp"


RULES: Registry[Rule] = Registry("backward rule")
PLAIN = RULES.add(Rule("plain", "the gradient"))
_LIBRA: Final = ("frozen", "frozen", "ratio", "half")
for _rule in (
    Rule("libra", "LibraGrad, CVPR 2025", *_LIBRA),
    Rule("conservative", "Ali et al., ICML 2022", "frozen", "frozen"),
    Rule("attnlrp", "Achtibat et al., ICML 2024 (no gamma rule)", "uniform", "frozen", "ratio", "half"),
    Rule(
        "gamma", "Bakish et al., arXiv 2506.02138: LXT's rules with their gammas", *_LIBRA, gamma=0.05, conv_gamma=100.0
    ),
    Rule("lxt", "Achtibat et al., ICML 2024: their code's rules for ViTs", *_LIBRA, gamma=0.05, conv_gamma=0.25),
):
    RULES.add(_rule)


def register_rule(rule: Rule) -> Rule:
    """Register a backward rule, so that its name can be the suffix of a method's name.

    Args:
        rule: The rule.
    """
    return RULES.add(rule)


Observer = Callable[[Tensor, Tensor], None]
Ratio = Callable[[Tensor, Tensor], Tensor]


class _Softmax(torch.autograd.Function):
    """A = softmax(S); the backward calls an observer with (A, G = ds/dA) and, if frozen, returns no gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, frozen: bool, observer: Observer | None) -> Tensor:
        attention = scores.softmax(-1)
        ctx.save_for_backward(attention)
        ctx.frozen, ctx.observer = frozen, observer
        return attention

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (attention,) = ctx.saved_tensors
        (gradient,) = gradients
        if ctx.observer is not None:
            ctx.observer(attention, gradient)
        if ctx.frozen:
            return None, None, None
        inner: Tensor = torch.ops.aten._softmax_backward_data(gradient, attention, -1, attention.dtype)
        return inner, None, None


def softmax(scores: Tensor, rule: Rule, observer: Observer | None) -> Tensor:
    """Softmax over the last axis under `rule`; the backward calls the observer with attention and its gradient."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return scores.softmax(-1)
    if rule.attention == "frozen" and observer is None:
        return scores.detach().softmax(-1)
    result: Tensor = _Softmax.apply(scores, rule.attention == "frozen", observer)
    return result


def attended(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose fused attention has the backward of `rule`.

    With a frozen matrix, queries and keys are constant. Under a uniform rule, each factor of both products gets half of
    the gradient: half of dv, and a quarter of dq and dk.
    """
    if rule.attention == "frozen":
        return q.detach(), k.detach(), v
    if rule.attention == "uniform" and v.requires_grad:
        return _scaled_gradient(q, 0.25), _scaled_gradient(k, 0.25), _scaled_gradient(v, 0.5)
    return q, k, v


class _FrozenLayerNorm(torch.autograd.Function):
    """(x - mean) / const[std] * weight + bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        out, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(rstd, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        rstd, weight = ctx.saved_tensors
        (gradient,) = gradients
        zeros = torch.zeros_like(gradient)  # an input of zeros has no deviation
        inner, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, zeros, ctx.shape, torch.zeros_like(rstd), rstd, weight, None, [True, False, False]
        )
        return inner, None, None, None, None


def layer_norm(x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float, rule: Rule) -> Tensor:
    """Layer norm under `rule`."""
    if rule.norm == "plain" or not x.requires_grad:
        return F.layer_norm(x, shape, weight, bias, eps)
    result: Tensor = _FrozenLayerNorm.apply(x, list(shape), weight, bias, eps)
    return result


def rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None, rule: Rule) -> Tensor:
    """RMS norm under `rule`: x / const[rms] * weight."""
    plain = F.rms_norm(x, shape, weight, eps)
    if rule.norm == "plain" or not x.requires_grad:
        return plain
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(x.detach().square().mean(axes, keepdim=True) + eps)
    return _same_value(plain, x * (scale if weight is None else scale * weight.detach()))


class _RatioActivation(torch.autograd.Function):
    """f(h) with the derivative f(h)/h; `ratio` multiplies a gradient by this."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, function: Callable[[Tensor], Tensor], ratio: Ratio) -> Tensor:
        ctx.save_for_backward(h)
        ctx.ratio = ratio
        return function(h)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (h,) = ctx.saved_tensors
        return ctx.ratio(gradients[0], h), None, None


def _gelu_ratio(gradient: Tensor, h: Tensor) -> Tensor:
    if h.is_cuda and h.dtype != torch.float64 and has_tiles():
        from patchlight.evidence.kernels import times_ndtr

        return times_ndtr(gradient, h)
    ratio: Tensor = torch.special.ndtr(h)
    return gradient * ratio


def _tanh_gelu_ratio(gradient: Tensor, h: Tensor) -> Tensor:
    return gradient * (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))))


def gelu(h: Tensor, approximate: str, rule: Rule) -> Tensor:
    """GELU under `rule`; the ratio is the normal distribution function, or its tanh approximation."""
    if rule.activation == "plain" or not h.requires_grad:
        return F.gelu(h, approximate=approximate)
    ratio = _gelu_ratio if approximate == "none" else _tanh_gelu_ratio
    result: Tensor = _RatioActivation.apply(h, lambda t: F.gelu(t, approximate=approximate), ratio)
    return result


def silu(h: Tensor, rule: Rule) -> Tensor:
    """SiLU under `rule`; the ratio is the sigmoid."""
    if rule.activation == "plain" or not h.requires_grad:
        return F.silu(h)
    result: Tensor = _RatioActivation.apply(h, F.silu, lambda gradient, h: gradient * torch.sigmoid(h))
    return result


def elementwise(h: Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Any elementwise f(h) with the derivative (f(h) - f(0)) / h, or f'(0) at 0; and f(0) [D] if it is not 0."""
    zero = torch.zeros_like(h[:1, :1])
    with torch.no_grad():
        constant = function(zero.clone())
        slope = (function(zero + 1e-3) - function(zero - 1e-3)) / 2e-3

    def ratio(gradient: Tensor, h: Tensor) -> Tensor:
        return gradient * torch.where(h == 0, slope, (function(h.clone()) - constant) / torch.where(h == 0, 1, h))

    result: Tensor = _RatioActivation.apply(h, lambda t: function(t.clone()), ratio)
    return result, constant.flatten(0, -2)[0] if bool(constant.any()) else None


class _GammaProduct(torch.autograd.Function):
    """A linear map with the gamma rule: contributions x_i W_ji with the sign of the output y_j have weight 1 + gamma.

    With z_j the sum of these weighted contributions and of the bias, R_i = sum_j x_i W_ji (1 + gamma [x_i W_ji y_j >
    0]) / z_j R_j for R_j = g_j y_j; the backward returns R_i / x_i. `observer` is called with the share of the bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Callable[..., Tensor],
        gamma: float,
        observer: Callable[[Tensor], None] | None,
    ) -> Tensor:
        y = product(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, y)
        ctx.product, ctx.gamma, ctx.observer = product, gamma, observer
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x, weight, bias, y = ctx.saved_tensors
        product, gamma = ctx.product, ctx.gamma
        up, down = weight.clamp_min(0), weight.clamp_max(0)

        def pull(signal: Tensor, part: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = torch.zeros_like(x).requires_grad_()
                (pulled,) = torch.autograd.grad(product(leaf, part, None), leaf, signal)
            return pulled

        rise = product(x.clamp_min(0), up, None if bias is None else bias.clamp_min(0))
        rise = rise + product(x.clamp_max(0), down, None)
        same_sign = torch.where(y > 0, rise, y - rise)  # the contributions with the sign of y
        signal = gradients[0] * torch.where(y == 0, 0, y / torch.where(y == 0, 1, y + gamma * same_sign))
        if ctx.observer is not None and bias is not None:
            constant = product(torch.zeros_like(x), weight, bias)
            ctx.observer(signal * torch.where(constant * y > 0, (1 + gamma) * constant, constant))
        positive, negative = signal * (y > 0), signal * (y < 0)
        along = pull(positive, up) + pull(negative, down)  # has the sign of y where x > 0
        against = pull(positive, down) + pull(negative, up)
        return along + against + gamma * torch.where(x >= 0, along, against), None, None, None, None, None


def gamma_product(
    product: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: float,
    observer: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """product(x, weight, bias), a linear map or a convolution, under the gamma rule.

    The backward calls the observer with the relevance of the bias at each output.
    """
    result: Tensor = _GammaProduct.apply(x, weight, bias, product, gamma, observer)
    return result.clone()  # a forward may change it in place


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def halved(x: Tensor) -> Tensor:
    """X with half of its gradient."""
    return _scaled_gradient(x, 0.5)


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    result: Tensor = _ScaleGradient.apply(x, factor)
    return result


def _same_value(value: Tensor, gradient_of: Tensor) -> Tensor:
    return value.detach() + (gradient_of - gradient_of.detach())
