"""Every backward rule at every operation, against the papers' formulas written out (`literal.py`), in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.watching import Activation
from patchlight.evidence.record import Record
from patchlight.evidence.rules import RULES
from patchlight.evidence.taps import Taps
from tests.evidence import literal

CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inside(rule: str, in_block: bool = True) -> Taps:
    """A tap that applies a rule and records nothing."""
    return Taps(RULES[rule], frozenset(), Record(0, torch.zeros(1, 1, 1)), in_block)


def gradients(
    rule: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor, fused: bool = False
) -> list[Tensor]:
    """What a rule passes to each input where g arrives.

    The value must be the plain one, bit for bit; fused attention is written out, so that its last bit may differ.
    """
    leaves = [x.clone().requires_grad_() for x in inputs]
    with inside(rule):
        out = function(*leaves)
    torch.testing.assert_close(out, function(*inputs), rtol=0, atol=1e-13 if fused else 0, msg="another forward")
    found = torch.autograd.grad(out, leaves, g, allow_unused=True)
    return [torch.zeros_like(x) if f is None else f for f, x in zip(found, inputs, strict=True)]


def each(shape: tuple[int, ...], one: Callable[[tuple[int, ...]], literal.Gradients]) -> list[Tensor]:
    """The literal gradients of every token (or head), put together."""
    places = [
        tuple(place) for place in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    ]
    rows = [one(place) for place in places]
    return [torch.stack(column).reshape(*shape, *column[0].shape) for column in zip(*rows, strict=True)]


QUERY, KEY, VALUE = drawn(2, 2, 3, 4, seed=1), drawn(2, 2, 5, 4, seed=2), drawn(2, 2, 5, 4, seed=3)
BIAS = drawn(2, 1, 3, 5, seed=4)
ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, BIAS),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q * 3, k, v, attn_mask=BIAS, scale=1 / 6),
    "softmax": lambda q, k, v: ((q / 2) @ k.transpose(-2, -1) + BIAS).softmax(dim=-1) @ v,
    "functional": lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q / 2, k.mT) + BIAS, -1), v),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ATTENTIONS)
def test_attention(form: str, rule: str) -> None:
    g = drawn(2, 2, 3, 4, seed=5)
    found = gradients(rule, ATTENTIONS[form], (QUERY, KEY, VALUE), g, fused=form in ("fused", "scale"))
    expected = each(
        (2, 2), lambda p: literal.attention(rule, QUERY[p], KEY[p], VALUE[p], BIAS.expand(-1, 2, -1, -1)[p], g[p])
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_masked_attention_sees_the_shown_keys_alone(rule: str) -> None:
    shown = torch.tensor([True, False, True, True, False])
    inputs = QUERY, KEY, VALUE
    g = drawn(2, 2, 3, 4, seed=5)
    masked = gradients(rule, lambda q, k, v: _eager(q, k, v, shown), inputs, g)
    some = (QUERY, KEY[:, :, shown], VALUE[:, :, shown])
    expected = each((2, 2), lambda p: literal.attention(rule, *(t[p] for t in some), torch.zeros(3, 3), g[p]))
    torch.testing.assert_close(masked[0], expected[0], **CLOSE)
    for found, wanted in zip(masked[1:], expected[1:], strict=True):
        torch.testing.assert_close(found[:, :, shown], wanted, **CLOSE)
        assert not found[:, :, ~shown].any()


def _eager(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    return (q @ k.mT / 2).masked_fill(~shown, -math.inf).softmax(-1) @ v


@dataclass(frozen=True)
class Case:
    """An operation as a model calls it, its inputs, and the literal gradients of those, given a rule and g."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    literal: Callable[[str, Tensor], list[Tensor]]


X, WEIGHT, SHIFT = drawn(2, 3, 6, seed=6) + 0.3, 1 + drawn(6, seed=7) / 3, drawn(6, seed=8)
MATRIX, CONSTANT = drawn(4, 6, seed=9), drawn(4, seed=10)
OTHER = drawn(2, 3, 6, seed=11)
EPS = 1e-3


def written_norm(x: Tensor) -> Tensor:
    """A layer norm of primitives, as some models have it."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS) * WEIGHT + SHIFT


def written_rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * WEIGHT


def norm_case(function: Callable[[Tensor], Tensor], formula: Callable[..., literal.Gradients]) -> Case:
    return Case(function, (X,), lambda rule, g: each((2, 3), lambda p: formula(rule, X[p], WEIGHT, EPS, g[p])))


def activation_case(kind: str, function: Callable[[Tensor], Tensor]) -> Case:
    return Case(function, (X,), lambda rule, g: list(literal.activation(rule, kind, X, g)))


CASES: dict[str, Case] = {
    "layer norm": norm_case(lambda x: F.layer_norm(x, (6,), WEIGHT, SHIFT, EPS), literal.layer_norm),
    "layer norm, written": norm_case(written_norm, literal.layer_norm),
    "layer norm, bare": Case(
        lambda x: F.layer_norm(x, (6,), None, None, EPS),
        (X,),
        lambda rule, g: each((2, 3), lambda p: literal.layer_norm(rule, X[p], torch.ones(6), EPS, g[p])),
    ),
    "rms norm": norm_case(lambda x: F.rms_norm(x, (6,), WEIGHT, EPS), literal.rms_norm),
    "rms norm, written": norm_case(written_rms, literal.rms_norm),
    "gelu": activation_case("gelu", F.gelu),
    "gelu, written": activation_case("gelu", lambda h: h * (0.5 * (1 + torch.erf(h / math.sqrt(2))))),
    "tanh gelu": activation_case("tanh-gelu", lambda h: F.gelu(h, approximate="tanh")),
    "quick gelu": activation_case("quick-gelu", lambda h: h * torch.sigmoid(1.702 * h)),
    "silu": activation_case("silu", F.silu),
    "silu in place": activation_case("silu", lambda h: F.silu(h * 1, inplace=True)),
    **{
        f"{kind}, whole": activation_case(kind, Activation(module).eval())
        for kind, module in {
            "gelu": nn.GELU(),
            "silu": nn.SiLU(),
            "relu": nn.ReLU(),
            "elu": nn.ELU(),
            "tanh": nn.Tanh(),
            "softplus": nn.Softplus(),
        }.items()
    },
    "gate": Case(lambda a, b: a * b, (X, OTHER), lambda rule, g: list(literal.gate(rule, X, OTHER, g))),
    "gate by torch.mul": Case(torch.mul, (X, OTHER), lambda rule, g: list(literal.gate(rule, X, OTHER, g))),
    "linear": Case(
        lambda x: F.linear(x, MATRIX, CONSTANT),
        (X,),
        lambda rule, g: each((2, 3), lambda p: literal.linear(rule, X[p], MATRIX, CONSTANT, g[p])),
    ),
    "scale": Case(lambda x: x * WEIGHT, (X,), lambda rule, g: [g * WEIGHT]),
    "number": Case(lambda x: x * 0.25, (X,), lambda rule, g: [g * 0.25]),
    "skip": Case(lambda x, y: x + y, (X, OTHER), lambda rule, g: [g, g]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_operation(name: str, rule: str) -> None:
    case = CASES[name]
    g = drawn(*case.function(*case.inputs).shape, seed=12)
    found = gradients(rule, case.function, case.inputs, g)
    for one, other in zip(found, case.literal(rule, g), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.silu(x @ up) * (x @ down)


@pytest.mark.parametrize("rule", RULES)
def test_a_gated_activation_is_both_rules(rule: str) -> None:
    """SwiGLU, silu(x U) * (x D): the product's rule first, then the activation's."""
    up, down, g = drawn(6, 4, seed=13), drawn(6, 4, seed=14), drawn(2, 3, 4, seed=15)
    (found,) = gradients(rule, lambda x: swiglu(x, up, down), (X,), g)
    left, right = X @ up, X @ down
    to_left, to_right = literal.gate(rule, F.silu(left), right, g)
    (to_left,) = literal.activation(rule, "silu", left, to_left)
    torch.testing.assert_close(found, to_left @ up.T + to_right @ down.T, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_what_is_exactly_zero(rule: str) -> None:
    """A ratio f(h) / h has a value at 0, where the formula has none; a norm divides a zero like any other number."""
    zero, one = torch.zeros(1, 1, 3, dtype=torch.float64), torch.ones(1, 1, 3, dtype=torch.float64)
    for name, slope in (
        ("gelu", 0.5),
        ("tanh gelu", 0.5),
        ("silu", 0.5),
        ("tanh, whole", 1.0),
        ("softplus, whole", 0.5),
    ):
        (found,) = gradients(rule, CASES[name].function, (zero,), one)
        torch.testing.assert_close(found, slope * one, rtol=0, atol=2e-6, msg=f"{name} at 0")
    x, g = X.clone(), drawn(2, 3, 6, seed=16)
    x[0, 1, 2] = 0
    expected = each((2, 3), lambda p: literal.rms_norm("libra" if rule != "plain" else rule, x[p], WEIGHT, EPS, g[p]))
    (found,) = gradients(rule, lambda t: F.rms_norm(t, (6,), WEIGHT, EPS), (x,), g)
    torch.testing.assert_close(found, expected[0], **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_the_sentences_of_the_papers(rule: str) -> None:
    """What the rules are for: under which of them the relevance of an operation's inputs is that of its output."""
    g = drawn(2, 3, 6, seed=12)

    def kept(name: str, constant: Tensor | float = 0.0) -> bool:
        case = CASES[name]
        out = case.function(*case.inputs)
        found = gradients(rule, case.function, case.inputs, g)
        total = sum((f * x).sum() for f, x in zip(found, case.inputs, strict=True))
        return bool(torch.isclose(total, ((out - constant) * g).sum(), rtol=1e-10))

    assert kept("layer norm", SHIFT) == (rule != "plain")
    assert kept("rms norm") == (rule != "plain")
    assert kept("gelu") == (rule not in ("plain", "conservative"))
    assert kept("softplus, whole", math.log(2)) == (rule not in ("plain", "conservative"))
    assert kept("gate") == (rule not in ("plain", "conservative"))
    assert kept("skip")


def test_outside_a_block_a_squashing_function_is_no_activation() -> None:
    """A head's tanh (BEiT's and DeiT's pre-logits have one) keeps its derivative under every rule."""
    x = X.clone().requires_grad_()
    with inside("libra", in_block=False):
        out = torch.tanh(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, 1 - torch.tanh(X) ** 2, **CLOSE)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_graph_nothing_changes(rule: str) -> None:
    for case in CASES.values():
        with torch.no_grad(), inside(rule):
            out = case.function(*case.inputs)
        assert torch.equal(out, case.function(*case.inputs))


class Block(nn.Module):
    """A pre-norm block with layer scale, called as timm calls it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, EPS), nn.LayerNorm(width, EPS)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.zeros(width))
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(drawn(*p.shape, seed=100 + seed) * 0.6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        u = x + self.proj(mixed) * self.scale
        return u + self.fc2(F.gelu(self.fc1(self.norm2(u))))


def tokenwise(formula: Callable[[Tensor, Tensor], literal.Gradients], x: Tensor, g: Tensor) -> Tensor:
    return torch.stack([formula(one, other)[0] for one, other in zip(x, g, strict=True)])


def literal_block(rule: str, block: Block, x: Tensor, g: Tensor) -> Tensor:
    """The backward of one image's tokens [N,D] through the block, one operation after another."""

    def linear(part: nn.Linear) -> Callable[[Tensor, Tensor], literal.Gradients]:
        return lambda one, other: literal.linear(rule, one, part.weight.detach(), part.bias.detach(), other)

    def norm(part: nn.LayerNorm) -> Callable[[Tensor, Tensor], literal.Gradients]:
        return lambda one, other: literal.layer_norm(rule, one, part.weight.detach(), EPS, other)

    with torch.no_grad():
        n = block.norm1(x)
        q, k, v = block.qkv(n).unflatten(-1, (3, block.heads, -1)).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        u = x + block.proj(mixed) * block.scale
        m = block.norm2(u)
        h = block.fc1(m)
        active = F.gelu(h)
        scale = block.scale.clone()
    to_active = tokenwise(linear(block.fc2), active, g)
    (to_h,) = literal.activation(rule, "gelu", h, to_active)
    g_u = g + tokenwise(norm(block.norm2), u, tokenwise(linear(block.fc1), m, to_h))
    to_mixed = tokenwise(linear(block.proj), mixed, g_u * scale).unflatten(-1, (block.heads, -1))
    none = torch.zeros(len(x), len(x), dtype=x.dtype)
    heads = [literal.attention(rule, q[i], k[i], v[i], none, to_mixed[:, i]) for i in range(block.heads)]
    to_qkv = torch.cat([torch.cat([head[part] for head in heads], -1) for part in range(3)], -1)
    return g_u + tokenwise(norm(block.norm1), x, tokenwise(linear(block.qkv), n, to_qkv))


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.gamma == 0])
def test_a_whole_block(rule: str) -> None:
    block = Block(4, 2).double()
    x, g = drawn(2, 3, 4, seed=20), drawn(2, 3, 4, seed=21)
    (found,) = gradients(rule, block, (x,), g, fused=True)
    expected = torch.stack([literal_block(rule, block, x[b], g[b]) for b in range(2)])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
