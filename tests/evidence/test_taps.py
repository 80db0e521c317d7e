"""Taps: what they see of a block, under each rule, whatever it calls; and that nothing of them stays behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import patchlight as pl
from patchlight.anatomy.watching import Activation, current_tap, watch_tokens
from patchlight.evidence.record import Record
from patchlight.evidence.rules import RULES
from patchlight.evidence.taps import Taps
from tests.evidence.test_rules import Block, drawn

CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-13}
TOKENS = drawn(2, 3, 4, seed=30)


def tapped(
    function: Callable[[Tensor], Tensor], needs: str, rule: str = "plain", x: Tensor = TOKENS
) -> tuple[Tensor, dict[str, Tensor], Record, Tensor]:
    """The output, what was seen of the forward and then of a backward of a random g, the record, and the gradient."""
    leaf = x.clone().requires_grad_()
    record = Record(0, leaf.detach())
    with Taps(RULES[rule], frozenset(needs.split()), record, in_block=True):
        out = function(leaf)
    before = dict(record.seen)
    (gradient,) = torch.autograd.grad(out, leaf, drawn(*out.shape, seed=31), allow_unused=True)
    return out.detach(), before, record, torch.zeros_like(x) if gradient is None else gradient


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B,2,N,2] of tokens, each another multiple of them."""
    q, k, v = (torch.stack([x[..., :2] * a, x[..., 2:] * b], 1) for a, b in ((1.5, -0.7), (0.4, 2.0), (1.1, -0.3)))
    return q, k, v


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fused": lambda x: F.scaled_dot_product_attention(*heads(x)),
    "softmax": lambda x: (heads(x)[0] @ heads(x)[1].mT / 2**0.5).softmax(-1) @ heads(x)[2],
    "functional": lambda x: torch.matmul(F.softmax(heads(x)[0] @ heads(x)[1].mT / 2**0.5, dim=3), heads(x)[2]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_its_values_and_its_gradient_are_seen(form: str, rule: str) -> None:
    """A = softmax(q k / sqrt d), o = A v: G_ij = <do_i, v_j>, the whole of it, though `uniform` passes half on."""
    out, before, record, _ = tapped(FORMS[form], "A G v", rule)
    q, k, v = heads(TOKENS)
    attention = (q @ k.mT / 2**0.5).softmax(-1)
    torch.testing.assert_close(before["A"], attention, **CLOSE)
    torch.testing.assert_close(before["v"], v, **CLOSE)
    torch.testing.assert_close(out, attention @ v, **CLOSE)
    torch.testing.assert_close(record.seen["G"], drawn(*out.shape, seed=31) @ v.mT, **CLOSE)
    assert not any(t.requires_grad for t in record.seen.values()), "the record holds on to the graph"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("needs", ["A", "v", "A v", ""])
def test_only_what_is_asked_for_is_kept(form: str, needs: str) -> None:
    _, _, record, _ = tapped(FORMS[form], needs)
    assert set(record.seen) == {"x", *needs.split()}


@pytest.mark.parametrize("form", FORMS)
def test_without_a_graph_attention_is_seen_all_the_same(form: str) -> None:
    record = Record(0, TOKENS)
    with torch.no_grad(), Taps(RULES["libra"], frozenset({"A", "v"}), record, in_block=True):
        FORMS[form](TOKENS)
    q, k, v = heads(TOKENS)
    torch.testing.assert_close(record.seen["A"], (q @ k.mT / 2**0.5).softmax(-1), **CLOSE)
    torch.testing.assert_close(record.seen["v"], v, **CLOSE)


class Names(TorchFunctionMode):
    """Which torch functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "needs", "fused"),
    [("plain", "", True), ("plain", "bias", True), ("plain", "A", False), ("libra", "", False), ("attnlrp", "", False)],
)
def test_attention_stays_fused_where_nobody_looks(rule: str, needs: str, fused: bool) -> None:
    with Names() as called:
        tapped(FORMS["fused"], needs, rule)
    assert ("scaled_dot_product_attention" in called.seen) == fused
    x = TOKENS.clone()
    with Names() as called, Taps(RULES[rule], frozenset(), Record(0, x), in_block=True):
        FORMS["fused"](x)
    assert "scaled_dot_product_attention" in called.seen, "no rule changes a forward without a graph"


def test_masks_scales_and_shared_keys() -> None:
    q, k, v = heads(TOKENS)
    hidden = torch.tensor([True, False, True])
    bias = drawn(3, 3, seed=32)
    shared = k[:, :1], v[:, :1]
    cases: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (
            lambda x: F.scaled_dot_product_attention(x * q, k, v, hidden.expand(3, 3)),
            (q @ k.mT / 2**0.5).masked_fill(~hidden, -torch.inf).softmax(-1),
        ),
        (lambda x: F.scaled_dot_product_attention(x * q, k, v, bias), (q @ k.mT / 2**0.5 + bias).softmax(-1)),
        (lambda x: F.scaled_dot_product_attention(x * q, k, v, scale=0.3), (q @ k.mT * 0.3).softmax(-1)),
        (
            lambda x: F.scaled_dot_product_attention(x * q, *shared, enable_gqa=True),
            (q @ shared[0].mT / 2**0.5).softmax(-1),
        ),
    ]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    for function, attention in cases:
        out, before, record, _ = tapped(function, "A G v", x=one)
        torch.testing.assert_close(before["A"], attention, **CLOSE)
        torch.testing.assert_close(out, function(one), **CLOSE)
        assert record.seen["v"].shape == (2, 2, 3, 2), "values of every head of queries"


def test_torchs_own_multi_head_attention_is_read() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True).double().eval()
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(drawn(*p.shape, seed=seed))
    _, weights = module(TOKENS, TOKENS, TOKENS, need_weights=True, average_attn_weights=False)

    def call(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    values = F.linear(TOKENS, module.in_proj_weight[8:], module.in_proj_bias[8:]).unflatten(-1, (2, 2)).transpose(1, 2)
    for rule in RULES:
        out, before, record, _ = tapped(call, "A G v", rule)
        torch.testing.assert_close(out, call(TOKENS).detach(), **CLOSE)
        torch.testing.assert_close(before["A"], weights.detach(), **CLOSE)
        torch.testing.assert_close(before["v"], values.detach(), **CLOSE)
        to_heads = (drawn(*out.shape, seed=31) @ module.out_proj.weight).unflatten(-1, (2, 2)).transpose(1, 2)
        torch.testing.assert_close(record.seen["G"], (to_heads @ values.mT).detach(), **CLOSE)


def with_biases_times(block: Block, x: Tensor, e: Tensor) -> Tensor:
    """The block with every bias of every token i multiplied by e_i: ds/de_i = sum_b <b, ds/dz_i> where e = 1."""

    def biased(out: Tensor, bias: Tensor) -> Tensor:
        return out + e[..., None] * bias.detach()

    def norm(part: nn.LayerNorm, x: Tensor) -> Tensor:
        return biased(F.layer_norm(x, part.normalized_shape, part.weight, None, part.eps), part.bias)

    def linear(part: nn.Linear, x: Tensor) -> Tensor:
        return biased(F.linear(x, part.weight), part.bias)

    q, k, v = linear(block.qkv, norm(block.norm1, x)).unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    u = x + linear(block.proj, mixed) * block.scale
    return u + linear(block.fc2, F.gelu(linear(block.fc1, norm(block.norm2, u))))


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.gamma == 0])
def test_biases_of_norms_and_linear_maps_add_up_by_token(rule: str) -> None:
    block = Block(4, 2).double()
    out, _, record, _ = tapped(block, "bias", rule)
    e = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    x = TOKENS.clone().requires_grad_()
    with Taps(RULES[rule], frozenset(), Record(0, TOKENS), in_block=True):
        literal = with_biases_times(block, x, e)
    torch.testing.assert_close(literal.detach(), out, **CLOSE)
    (expected,) = torch.autograd.grad(literal, e, drawn(*out.shape, seed=31))
    torch.testing.assert_close(record.seen["bias"], expected, rtol=1e-10, atol=1e-12)
    assert record.scalar_bias is None


def test_what_an_activation_has_at_zero_and_a_vector_that_is_added_are_biases() -> None:
    g = drawn(2, 3, 4, seed=31)
    constant = drawn(4, seed=33)
    softplus = Activation(nn.Softplus()).double()
    for rule, at_zero in (("libra", torch.log(torch.tensor(2.0))), ("plain", torch.tensor(0.0))):
        _, _, record, _ = tapped(softplus, "bias", rule)
        found = record.seen.get("bias", torch.zeros(2, 3, dtype=torch.float64))
        torch.testing.assert_close(found, (g * at_zero.double()).sum(-1), rtol=1e-6, atol=1e-7)
    for add in (lambda x: x + constant, lambda x: torch.add(x, constant), lambda x: (x * 1).add_(constant)):
        torch.testing.assert_close(tapped(add, "bias")[2].seen["bias"], g @ constant, **CLOSE)
    skip = drawn(2, 3, 4, seed=34)
    assert "bias" not in tapped(lambda x: x + skip, "bias")[2].seen, "a tensor with tokens is no bias"


def test_a_bias_without_tokens_is_one_number_an_image() -> None:
    """A head reads one vector an image; its bias belongs to no token."""
    head = nn.Linear(4, 5).double()
    _, _, record, _ = tapped(lambda x: head(x[:, 0]), "bias")
    assert "bias" not in record.seen
    torch.testing.assert_close(record.scalar_bias, drawn(2, 5, seed=31) @ head.bias.detach(), **CLOSE)


def test_norms_show_what_enters_and_leaves_them() -> None:
    """A watched first norm shows n and its gradient, a second u; a custom norm too, whatever it is made of."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (1 + x.abs())

    for norm in (nn.LayerNorm(4).double(), Own()):
        first, second = norm, nn.LayerNorm(4).double()
        watch_tokens(first, "n")
        watch_tokens(second, "u")
        watch_tokens(None, "n")
        _, before, record, _ = tapped(lambda x, a=first, b=second: b(3 * a(x)), "n gn u")
        torch.testing.assert_close(before["n"], first(TOKENS).detach(), **CLOSE)
        torch.testing.assert_close(before["u"], 3 * first(TOKENS).detach(), **CLOSE)
        n = first(TOKENS).detach().requires_grad_()
        (expected,) = torch.autograd.grad(second(3 * n), n, drawn(2, 3, 4, seed=31))
        torch.testing.assert_close(record.seen["gn"], expected, **CLOSE)
        assert set(tapped(lambda x, a=first, b=second: b(a(x)), "")[2].seen) == {"x"}, "nobody asked"


@pytest.mark.parametrize(
    ("function", "needs", "sentence"),
    [
        (lambda x: FORMS["softmax"](x) + FORMS["softmax"](x), "A", "more than one softmax"),
        (lambda x: FORMS["fused"](x) + FORMS["fused"](x), "G", "more than one softmax"),
        (
            lambda x: (2 * (heads(x)[0] @ heads(x)[1].mT).softmax(-1)) @ drawn(2, 2, 3, 2),
            "A",
            "changes its attention between the softmax and the values",
        ),
        (lambda x: F.scaled_dot_product_attention(*heads(x), is_causal=True), "A", "causal attention"),
        (
            lambda x: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, add_bias_kv=True).double()(x, x, x)[0],
            "",
            "separate projections or key/value biases",
        ),
        (
            lambda x: nn.MultiheadAttention(4, 2, kdim=3, vdim=4).double()(x, x[..., :3], x)[0],
            "",
            "separate projections",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    function: Callable[[Tensor], Tensor], needs: str, sentence: str
) -> None:
    with pytest.raises(pl.Unsupported, match=sentence):
        tapped(function, needs)
    assert current_tap() is None


def test_a_softmax_over_other_axes_is_no_attention() -> None:
    for function in (lambda x: x.softmax(-1), lambda x: heads(x)[0].softmax(1), lambda x: heads(x)[0].softmax(dim=-2)):
        out, _, record, gradient = tapped(function, "A G", "libra")
        assert set(record.seen) == {"x"}
        x = TOKENS.clone().requires_grad_()
        (expected,) = torch.autograd.grad(function(x), x, drawn(*out.shape, seed=31))
        torch.testing.assert_close(gradient, expected, **CLOSE)


def test_a_softmax_may_widen_its_numbers_and_the_record_narrows_them() -> None:
    x = TOKENS.float()
    _, before, record, _ = tapped(
        lambda x: F.softmax(heads(x)[0] @ heads(x)[1].mT, -1, dtype=torch.float64).float() @ heads(x)[2], "A G", x=x
    )
    assert before["A"].dtype == record.seen["G"].dtype == torch.float32


def test_taps_leave_nothing_behind() -> None:
    def functions() -> list[Any]:
        return [F.softmax, F.layer_norm, F.gelu, F.linear, torch.matmul, Tensor.softmax, F.scaled_dot_product_attention]

    block = Block(4, 2).double()
    before, hooks = functions(), [len(m._forward_hooks) for m in block.modules()]
    tapped(block, "A G v bias", "attnlrp")
    assert current_tap() is None
    assert functions() == before
    assert [len(m._forward_hooks) for m in block.modules()] == hooks
    x = TOKENS.clone().requires_grad_()
    (plain,) = torch.autograd.grad(block(x), x, drawn(2, 3, 4, seed=31))
    torch.testing.assert_close(tapped(block, "A G v bias")[3], plain, **CLOSE)


def test_taps_nest() -> None:
    outer, inner = (Taps(RULES["plain"], frozenset({"A"}), Record(i, TOKENS), in_block=True) for i in (0, 1))
    with outer:
        with inner:
            assert current_tap() is inner
            FORMS["fused"](TOKENS)
        assert current_tap() is outer
    assert current_tap() is None
    assert set(inner.record.seen) == {"x", "A"}


def test_an_error_inside_ends_the_tap() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        tapped(lambda x: x.reshape(7), "A")
    assert current_tap() is None
    with Names() as called:
        FORMS["fused"](TOKENS)
    assert "scaled_dot_product_attention" in called.seen


def test_a_tap_belongs_to_its_thread() -> None:
    seen: list[object] = []
    record = Record(0, TOKENS)

    def elsewhere() -> None:
        seen.append(current_tap())
        FORMS["fused"](TOKENS)

    with Taps(RULES["plain"], frozenset({"A"}), record, in_block=True):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == [None]
    assert "A" not in record.seen


def test_an_activation_outside_a_tap_is_its_function() -> None:
    for function in (nn.Mish(), nn.Softplus(), nn.ReLU()):
        assert torch.equal(Activation(function)(TOKENS), function(TOKENS))
    assert not Activation(nn.Mish()).training
