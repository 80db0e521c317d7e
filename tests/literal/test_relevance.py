"""LRP, partial LRP and TransAtt against the slow versions, and the identities the rules promise."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.core.targets import Targets
from patchlight.evidence.rules import RULES
from patchlight.methods.base import METHODS, Ask
from patchlight.methods.relevance import Relevance, add_rule, linear_rule, product_rule
from patchlight.methods.requests import resolve
from tests.close import close, near, within
from tests.families import images, shared
from tests.literal.lrp import Literal
from tests.literal.plain import maps

TARGET = [2, 5, 0]
PLAIN = ("vit", "vit-wide", "deit3", "dinov2-reg", "flexivit", "hf-vit", "torchvision")


def ask(family: str, target: list[int] = TARGET, **about: Any) -> Ask:
    vit = shared(family, torch.float64)
    layers = tuple(range(vit.depth))
    return Ask(vit, images(vit), Targets(torch.tensor(target)[:, None]), "logit", 0, RULES["plain"], layers, **about)


@cache
def literal(family: str, rules: str) -> list[Literal]:
    vit = shared(family, torch.float64)
    return [Literal(vit, image[None], c, rules) for image, c in zip(images(vit), TARGET, strict=True)]


def agree(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    scale = theirs.flatten(1).abs().amax(1).clamp_min(1e-300)
    within(float(((ours - theirs).flatten(1).abs().amax(1) / scale).max()), tolerance)


@pytest.mark.parametrize("family", ["vit", "vit-wide", "deit"])
@pytest.mark.parametrize("rules", ["ours", "orig"])
def test_every_method_is_its_literal_version(family: str, rules: str) -> None:
    vit, slow = shared(family, torch.float64), literal(family, rules)
    batch = images(vit)
    for start in (0, 1):
        theirs = torch.stack([s.transatt(start) for s in slow])
        agree(maps(vit, batch, "transatt", TARGET, rules=rules, start=start), theirs)
    agree(
        maps(vit, batch, "transatt", TARGET, rules=rules, gradient=False),
        torch.stack([s.transatt(gradient=False) for s in slow]),
    )
    for layer in range(vit.depth):
        theirs = torch.stack([s.partial(layer) for s in slow])
        agree(maps(vit, batch, "partial-lrp", TARGET, rules=rules, layer=layer), theirs)
    agree(maps(vit, batch, "lrp", TARGET, rules=rules), torch.stack([s.pixels() for s in slow]))
    tokens = torch.stack([s.R[0][0, vit.prefix :].sum(-1).reshape(vit.grid) for s in slow])
    agree(maps(vit, batch, "lrp", TARGET, rules=rules, level="token"), tokens)


def test_compositions_sum_the_layer_maps() -> None:
    vit, slow = shared("vit", torch.float64), literal("vit", "ours")
    terms = [
        torch.stack([(s.G[k] * s.RA[k]).clamp(min=0).mean(0)[0, vit.prefix :].reshape(vit.grid) for s in slow])
        for k in range(vit.depth)
    ]
    agree(maps(vit, images(vit), "transatt.plus", TARGET), sum(terms, torch.zeros(())))
    agree(maps(vit, images(vit), "chefer1.skipplus", TARGET), terms[-1])
    agree(maps(vit, images(vit), "cgw1", TARGET, preset="scripts"), torch.stack([s.transatt(1) for s in slow]))


@pytest.mark.parametrize("family", PLAIN)
def test_relevance_is_conserved_by_ours_in_every_family(family: str) -> None:
    """sum R at every block's input is 1; `orig` gives about twice what it gets at each linear map."""
    sums = {}
    for rules in ("ours", "orig"):
        seen = Relevance(ask(family), rules)  # type: ignore[arg-type]
        _, _, R, _ = seen.start()
        sums[rules] = torch.stack([step.R.sum((1, 2)) for step in seen.steps(R, None, 0)])
    near(sums["ours"], torch.ones_like(sums["ours"]), 1e-6)
    assert (sums["orig"] - 1).abs().min() > 1e-3


@pytest.mark.parametrize("family", PLAIN)
def test_the_pass_computes_what_the_model_computes(family: str) -> None:
    given = ask(family)
    seen = Relevance(given, "ours")
    logits, scores, _, g = seen.start()
    expected = given.vit.logits(given.images)
    close(logits, expected, 1e-10)
    assert torch.equal(scores[:, 0], logits[torch.arange(3), torch.tensor(TARGET)])
    assert g[:, 1:].abs().max() == 0


def test_gradients_of_attention_are_the_trace_s() -> None:
    import patchlight as pl

    given = ask("deit3")
    seen = Relevance(given, "ours")
    _, _, R, g = seen.start()
    with pl.trace(given.vit, given.images, target=TARGET) as t:
        for step in seen.steps(R, g, 0):
            assert step.G is not None
            assert torch.allclose(step.G, t.attention_gradients[step.layer], rtol=1e-10, atol=1e-13)


def test_add_rule_conserves_and_is_the_z_rule_where_both_shares_are_positive() -> None:
    torch.manual_seed(0)
    a, b, R = (torch.rand(3, 5, 4, dtype=torch.float64) + 0.1 for _ in range(3))
    for left, right in zip(add_rule(a, b, R, "ours"), add_rule(a, b, R, "orig"), strict=True):
        assert torch.allclose(left, right, rtol=1e-7)
    a, b, R = (torch.randn(3, 5, 4, dtype=torch.float64) for _ in range(3))
    ra, rb = add_rule(a, b, R, "ours")
    total = R.sum((1, 2))
    assert torch.allclose(ra.sum((1, 2)) + rb.sum((1, 2)), total, rtol=1e-6)
    alone = add_rule(a[1:2], b[1:2], R[1:2], "ours")
    assert torch.equal(ra[1:2], alone[0])


def test_linear_and_product_rules() -> None:
    """All-positive inputs and weights: the z-rule. The halves of a product sum to R."""
    torch.manual_seed(1)
    x, W, R = (torch.rand(*s, dtype=torch.float64) + 0.1 for s in ((2, 3, 4), (6, 4), (2, 3, 6)))
    assert torch.allclose(linear_rule(x, W, R, "ours"), x * ((R / (x @ W.T)) @ W), rtol=1e-7)
    x, W = torch.randn(2, 3, 64, dtype=torch.float64), torch.randn(6, 64, dtype=torch.float64)
    assert torch.allclose(linear_rule(x, W, R, "ours").sum(-1), R.sum(-1), rtol=1e-6)
    assert torch.allclose(linear_rule(x, W, R, "orig").sum(-1), 2 * R.sum(-1), rtol=1e-6)
    X, Y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    R = torch.randn(2, 3, 5, dtype=torch.float64)
    RX, RY = product_rule(X, Y, X @ Y, R)
    assert torch.allclose(RX.sum((1, 2)) + RY.sum((1, 2)), R.sum((1, 2)), rtol=1e-6)


def test_float32_models_get_a_float64_pass() -> None:
    """The pass is float64 whatever the model's dtype: with the same weights only the output is rounded."""
    single, double = shared("vit"), shared("vit", torch.float64)
    batch = images(single)
    exact = maps(double, batch.double(), "transatt", TARGET)
    close(maps(single, batch, "transatt", TARGET), exact, 1e-6)
    rough = torch.stack(
        [Literal(single, image[None], c, "ours").transatt() for image, c in zip(batch, TARGET, strict=True)]
    )
    assert (rough - exact).abs().max() > 1e-6 * exact.abs().max()


def test_binary_heads_and_pairs_start_from_their_own_row() -> None:
    """Label 0 of a one-output head is the class with -w; a pair is the class with w_a - w_b: both start with R = 1."""
    vit = shared("vit-binary", torch.float64)
    no, yes = (maps(vit, images(vit), "transatt", [c] * 3) for c in (0, 1))
    assert (no - yes).abs().max() > 1e-3 * yes.abs().max()
    given = ask("vit")
    pair = Targets(torch.tensor([[2]] * 3), torch.tensor([[4]] * 3))
    seen = Relevance(Ask(given.vit, given.images, pair, "logit", 0, RULES["plain"], given.layers), "ours")
    logits, scores, R, _ = seen.start()
    assert torch.allclose(scores[:, 0], logits[:, 2] - logits[:, 4])
    assert torch.allclose(R.sum((1, 2)), torch.ones(3, dtype=torch.float64), rtol=1e-6)


def test_rule_wrappers_are_refused() -> None:
    for name in ("lrp", "partial-lrp", "transatt"):
        with pytest.raises(PatchlightError, match="its own relevance rules"):
            resolve(f"{name}.libra")
    assert METHODS["transatt"].aliases == ("chefer1", "cgw1")
