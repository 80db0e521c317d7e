"""Attention methods as the papers write them, slowly and in float64, and the identities between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.base import Anatomy
from patchlight.errors import DegenerateMap, PatchlightError
from patchlight.evidence.passes import LayerJob, Trace, run_pass
from patchlight.evidence.record import Evidence
from patchlight.methods.attention import attcam, attixg, genatt
from patchlight.methods.gradients import ixg
from patchlight.methods.requests import resolve
from tests.families import PLAIN, images, shared
from tests.literal.rows import TARGETS, maps, patches, read_rows

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
READOUTS = ("vit", "deit-distilled", "reg4-gap")


def _genatt(vit: Anatomy, t: Trace, i: int) -> Tensor:
    r = torch.eye(vit.tokens, dtype=torch.float64)
    for A, G in zip(t.attention, t.attention_gradients, strict=True):
        e = torch.stack([(A[i, h] * G[i, h]).clamp(min=0) for h in range(vit.heads)]).mean(0)
        r = r + e @ r
    return read_rows(vit, r)


def _genatt_relu_after_mean(vit: Anatomy, t: Trace, i: int) -> Tensor:
    r = torch.eye(vit.tokens, dtype=torch.float64)
    for A, G in zip(t.attention, t.attention_gradients, strict=True):
        r = r + (A[i] * G[i]).mean(0).clamp(min=0) @ r
    return read_rows(vit, r)


def _gradsam(vit: Anatomy, t: Trace, i: int) -> Tensor:
    pairs = zip(t.attention, t.attention_gradients, strict=True)
    return read_rows(vit, sum((A[i] * G[i].clamp(min=0)).mean(0) for A, G in pairs))


def _gradsam_all_rows(vit: Anatomy, t: Trace, i: int) -> Tensor:
    pairs = zip(t.attention, t.attention_gradients, strict=True)
    return patches(vit, sum((A[i] * G[i].clamp(min=0)).mean((0, 1)) for A, G in pairs))


def _attcam_matrix(vit: Anatomy, t: Trace, i: int, layer: int) -> Tensor:
    A, G = t.attention[layer][i], t.attention_gradients[layer][i]
    m = torch.zeros(vit.tokens, vit.tokens, dtype=torch.float64)
    for to in range(vit.tokens):
        for h in range(vit.heads):
            w = G[h, to, vit.prefix :].mean()
            m[to] += w * A[h, to] / vit.heads
    return m


def _attcam(vit: Anatomy, t: Trace, i: int) -> Tensor:
    return read_rows(vit, _attcam_matrix(vit, t, i, -1).clamp(min=0))


def _attcam_plus(vit: Anatomy, t: Trace, i: int) -> Tensor:
    return read_rows(vit, sum(_attcam_matrix(vit, t, i, layer) for layer in range(vit.depth)))


def _attnfrom(vit: Anatomy, t: Trace, i: int, layer: int = -1) -> Tensor:
    A = t.attention[layer][i]
    return torch.stack([sum(A[h, to] for to in range(vit.tokens)) for h in range(vit.heads)]).mean(0) / vit.tokens


def _attcat(vit: Anatomy, t: Trace, i: int, pair: str) -> Tensor:
    total = torch.zeros(vit.tokens, dtype=torch.float64)
    for layer in range(vit.depth if pair == "input" else vit.depth - 1):
        at = layer + (pair == "output")
        total += _attnfrom(vit, t, i, layer) * (t.tokens[at][i] * t.gradients[at][i]).sum(-1)
    return patches(vit, total)


def _cat(vit: Anatomy, t: Trace, i: int) -> Tensor:
    return patches(vit, sum((t.tokens[k][i] * t.gradients[k][i]).sum(-1) for k in range(vit.depth)))


Literal = Callable[[Anatomy, Trace, int], Tensor]
LITERAL: list[tuple[str, dict[str, Any], Literal]] = [
    ("rawatt", {}, lambda vit, t, i: read_rows(vit, t.attention[-1][i].mean(0))),
    ("genatt", {}, _genatt),
    ("genatt", {"rectify": "mean"}, _genatt_relu_after_mean),
    ("gradsam", {}, _gradsam),
    ("gradsam", {"readout": "tokens"}, _gradsam_all_rows),
    ("attcam", {}, _attcam),
    ("attcam", {"preset": "skipplus"}, lambda vit, t, i: read_rows(vit, _attcam_matrix(vit, t, i, -1))),
    ("attcam.plus", {}, _attcam_plus),
    ("attngrad", {}, lambda vit, t, i: read_rows(vit, t.attention_gradients[-1][i].mean(0))),
    ("attngrad", {"sign": "abs"}, lambda vit, t, i: read_rows(vit, t.attention_gradients[-1][i].abs().mean(0))),
    ("attngrad", {"sign": "relu"}, lambda vit, t, i: read_rows(vit, t.attention_gradients[-1][i].relu().mean(0))),
    ("attnfrom", {"layer": 1}, lambda vit, t, i: patches(vit, _attnfrom(vit, t, i, 1))),
    ("attcat", {}, lambda vit, t, i: _attcat(vit, t, i, "output")),
    ("attcat", {"pair": "input"}, lambda vit, t, i: _attcat(vit, t, i, "input")),
    ("cat", {}, _cat),
]


@pytest.mark.filterwarnings("ignore::patchlight.engine.DegenerateMap")
@pytest.mark.parametrize("family", READOUTS)
@pytest.mark.parametrize(("name", "settings", "literal"), LITERAL, ids=[f"{n}-{s}" for n, s, _ in LITERAL])
def test_literal(name: str, settings: dict[str, Any], literal: Literal, family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    ours = maps(vit, batch, name, **settings)
    with pl.trace(vit, batch, target=TARGETS) as t:
        for i in range(len(batch)):
            torch.testing.assert_close(ours[i], literal(vit, t, i), **CLOSE)


@pytest.mark.parametrize("family", [*READOUTS, "siglip", "beit"])
@pytest.mark.parametrize(
    ("sum_name", "composition"),
    [("cat", "ixg.plus"), ("attcat", "attixg.plus"), ("gradsam", "genatt.plus")],
)
def test_sums_are_compositions(sum_name: str, composition: str, family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    torch.testing.assert_close(maps(vit, batch, sum_name), maps(vit, batch, composition), **CLOSE)
    later = maps(vit, batch, composition.replace("plus", "skipplus"), start=1)
    torch.testing.assert_close(maps(vit, batch, sum_name, start=1), later, **CLOSE)


@pytest.mark.parametrize("family", READOUTS)
def test_genatt_is_a_scaled_half_rollout(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    half = maps(vit, batch, "genatt.rollout", normalise="none")
    torch.testing.assert_close(maps(vit, batch, "genatt"), 2**vit.depth * half, **CLOSE)


def test_the_layer_sum_loses_its_last_output_only_where_it_has_no_gradient() -> None:
    """Under CLS pooling the output of the last block has no gradient on patches; under average pooling it has."""
    for family, same in (("vit", True), ("reg4-gap", False)):
        vit = shared(family, torch.float64)
        batch = images(vit)
        assert torch.equal(maps(vit, batch, "attcat"), maps(vit, batch, "attcat", last=True)) == same
    with pytest.warns(DegenerateMap, match="start earlier"):
        maps(shared("vit", torch.float64), batch, "attixg", start=2)


def test_only_the_cls_row_of_the_last_block_has_a_gradient() -> None:
    vit = shared("vit", torch.float64)
    with pl.trace(vit, images(vit), target=TARGETS) as t:
        assert not t.attention_gradients[-1][:, :, 1:].any()
        assert t.attention_gradients[-1][:, :, 0].any()


@pytest.mark.parametrize("family", READOUTS)
def test_attention_sums_to_one(family: str) -> None:
    """RawAtt's row and AttnFrom over all tokens are distributions; AttCAT with uniform attention is CAT / N."""
    vit = shared(family, torch.float64)
    batch = images(vit)
    with pl.trace(vit, batch) as t:
        for A in t.attention:
            torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]), **CLOSE)
            torch.testing.assert_close(A.mean((1, 2)).sum(-1), torch.ones(len(batch), dtype=A.dtype), **CLOSE)


@pytest.mark.parametrize("family", ["vit", "reg4-gap"])
def test_rollout_rows_are_distributions(family: str) -> None:
    """With nothing discarded every row of a rollout sums to one, its part on the prefix tokens included."""
    vit = shared(family, torch.float64)
    batch = images(vit)
    r = torch.eye(vit.tokens, dtype=torch.float64).expand(len(batch), -1, -1)
    with pl.trace(vit, batch) as t:
        for A in t.attention:
            mixed = A.mean(1) + torch.eye(vit.tokens, dtype=torch.float64)
            r = (mixed / mixed.sum(-1, keepdim=True)) @ r
    torch.testing.assert_close(r.sum(-1), torch.ones(len(batch), vit.tokens, dtype=torch.float64), **CLOSE)
    ours = maps(vit, batch, "rollout")
    torch.testing.assert_close(ours, torch.stack([read_rows(vit, one) for one in r]), **CLOSE)


def test_attcat_with_uniform_attention_is_cat_over_n() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    b = Evidence.of(x, A=torch.full((2, 3, 5, 5), 0.2, dtype=torch.float64), g=g, depth=2)
    torch.testing.assert_close(attixg(b, pair="input"), ixg(b) / 5, **CLOSE)


def test_layer_maps_do_not_depend_on_the_order_of_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    A, G = (torch.randn(2, 4, 5, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x, A, order = torch.zeros(2, 5, 4), A.softmax(-1), torch.tensor([2, 0, 3, 1])
    for layer_map in (genatt, attcam):
        one = layer_map(Evidence.of(x, A=A, G=G, prefix=1))
        other = layer_map(Evidence.of(x, A=A[:, order], G=G[:, order], prefix=1))
        torch.testing.assert_close(one, other, **CLOSE)


def test_attcam_says_why_it_is_empty() -> None:
    A = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    b = Evidence.of(torch.zeros(1, 5, 4), A=A, G=-A, prefix=1)
    assert not attcam(b).any()
    assert (attcam(b, relu=False) < 0).all()
    assert "preset='skipplus'" in resolve("attcam").method.constant


@pytest.mark.parametrize(("name", "instead"), [("gradsam", "genatt"), ("cat", "ixg"), ("attcat", "attixg")])
@pytest.mark.parametrize("composition", ["plus", "skipplus"])
def test_sums_refuse_another_sum(name: str, instead: str, composition: str) -> None:
    with pytest.raises(PatchlightError, match=rf"'{name}' cannot be followed by.*'{instead}\.{composition}'"):
        resolve(f"{name}.{composition}")


@pytest.mark.parametrize("family", PLAIN)
def test_value_weights(family: str) -> None:
    """What attention sees as values is W_V times the normed tokens, plus a bias that is the same for every token."""
    vit = shared(family, torch.float64)
    job = LayerJob(lambda b: (b.v, b.n, b.parts.value), frozenset({"A", "v", "n"}), (0, vit.depth - 1))
    for v, n, weight in run_pass(vit, images(vit), jobs=[job]).layers().values():
        mapped = torch.nn.functional.linear(n, weight()).unflatten(-1, (vit.heads, -1)).transpose(1, 2)
        bias = v - mapped
        torch.testing.assert_close(bias, bias[:1, :, :1].expand_as(bias), **CLOSE)
        assert (v - bias).abs().mean() > 0.1
