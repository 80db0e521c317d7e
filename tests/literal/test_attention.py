"""Attention methods as the papers write them, slowly and in float64, and the identities between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, PatchlightError
from patchlight.evidence.passes import Trace, run_pass
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import LayerJob
from patchlight.methods.attention import attcam, attixg, genatt
from patchlight.methods.gradients import ixg
from patchlight.methods.requests import resolve
from tests.families import PLAIN, _timm, images, randomise, shared
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
    ("attcat", {}, lambda vit, t, i: _attcat(vit, t, i, "input" if vit.pooling == "avg" else "output")),
    ("attcat", {"preset": "skipplus-code"}, lambda vit, t, i: _attcat(vit, t, i, "output")),
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


@pytest.mark.parametrize("name", ["attcat", "attixg", "attixg.plus"])
@pytest.mark.parametrize(
    ("family", "pair"), [("vit", "output"), ("deit-distilled", "output"), ("reg4-gap", "input"), ("siglip", "input")]
)
def test_the_tokens_that_are_weighted_follow_from_the_pooling(name: str, family: str, pair: str) -> None:
    """The outputs where no patch is read by the classifier, to the bit as before; else the inputs, as in the text."""
    vit = shared(family, torch.float64)
    batch = images(vit)
    assert torch.equal(maps(vit, batch, name), maps(vit, batch, name, pair=pair))
    other = maps(vit, batch, name, pair="input" if pair == "output" else "output")
    assert not torch.allclose(maps(vit, batch, name), other, rtol=1e-3)
    assert torch.equal(maps(vit, batch, name, preset="skipplus-code"), maps(vit, batch, name, pair="output"))
    recorded = pl.explain(vit, batch, name, target=3)
    assert recorded.settings["pair"] == pair


def test_averages_along_a_path_weigh_the_same_tokens() -> None:
    vit = shared("reg4-gap", torch.float64)
    batch = images(vit)
    along = maps(vit, batch, "ig", integrand="attcat", steps=1, quadrature="right")
    torch.testing.assert_close(along, maps(vit, batch, "attcat", pair="input"), **CLOSE)


def _plain_terms(model: nn.Module, image: Tensor, target: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """AttnFrom_l, IxG at the input and IxG at the output of each block of a plain timm model, by hooks. [N] each."""
    entering: list[Tensor] = []
    leaving: list[Tensor] = []

    def see(block: nn.Module, given: tuple[Tensor], result: Tensor) -> None:
        for tokens, seen in ((given[0], entering), (result, leaving)):
            tokens.retain_grad()
            seen.append(tokens)

    handles = [block.register_forward_hook(see) for block in model.blocks]  # type: ignore[union-attr, arg-type]
    model(image.requires_grad_())[0, target].backward()
    terms = []
    for handle, block, x, y in zip(handles, model.blocks, entering, leaving, strict=True):  # type: ignore[arg-type]
        handle.remove()
        attention: Any = block.attn
        q, k, _ = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
        A = torch.einsum("bihd,bjhd->bhij", q, k).mul(attention.scale).softmax(-1)[0]
        assert x.grad is not None
        assert y.grad is not None
        terms.append((A.mean((0, 1)), (x * x.grad).sum(-1)[0], (y * y.grad).sum(-1)[0]))
    return terms


def test_the_text_and_the_code_on_an_average_pooled_model_with_a_cls_token() -> None:
    """EVA Large's make, against the plain model: the text (Section 3.4) has sum_{l<L} AttnFrom_l IxG(f_l)(x_l).

    The code takes the outputs and drops the last block, which is real here: its output has a gradient on patches.
    """
    model = randomise(_timm("eva_large_patch14_196")).double()
    vit = pl.wrap(model, name="small EVA-L")
    assert (vit.pooling, vit.prefix, vit.depth) == ("avg", 1, 3)
    batch = images(vit, 1)
    terms = _plain_terms(model, batch.clone(), TARGETS[0])
    assert terms[-1][2][1:].abs().max() > 1e-3
    text = sum(attention * entering for attention, entering, _ in terms)
    code = sum(attention * leaving for attention, _, leaving in terms[:-1])
    skipped = sum(attention * entering for attention, entering, _ in terms[2:])
    for name, settings, written in (
        ("attcat", {}, text),
        ("attixg.plus", {}, text),
        ("attixg.skipplus", {}, skipped),
        ("attixg", {"start": 1}, terms[1][0] * terms[1][1]),
        ("attcat", {"preset": "skipplus-code"}, code),
        ("attixg", {"start": 1, "preset": "skipplus-code"}, terms[1][0] * terms[1][2]),
    ):
        assert isinstance(written, Tensor)
        torch.testing.assert_close(maps(vit, batch, name, **settings)[0], patches(vit, written), **CLOSE)


def test_the_code_loses_its_last_output_only_where_it_has_no_gradient() -> None:
    """Under CLS pooling the output of the last block has no gradient on patches; under average pooling it has."""
    for family, same in (("vit", True), ("reg4-gap", False)):
        vit = shared(family, torch.float64)
        batch = images(vit)
        code, all_of_it = (maps(vit, batch, "attcat", preset="skipplus-code", last=last) for last in (False, True))
        assert torch.equal(code, all_of_it) == same
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
