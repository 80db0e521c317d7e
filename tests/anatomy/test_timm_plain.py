"""timm's other plain transformers: their parts are the model, tokens keep their places, and refusals say why."""

from __future__ import annotations

import pytest
import torch

import patchlight as pl
from patchlight.testing import check_method, contract_names
from tests.completeness import totals
from tests.dropping import assert_dropping_is_masking, shuffled_patches
from tests.families import RELATIVES, images, shared

DROPS = ("relpos", "relpos-cls", "srelpos", "hybrid", "naflex", "naflex-map", "qwen3", "gemma4", "cait")
READABLE = ("relpos", "relpos-cls", "srelpos", "hybrid", "naflex", "naflex-map", "qwen3", "qwen3-merge", "gemma4")
QUICK = ("ixg", "gradcam", "genatt", "kernel-shap", "occlusion")


@pytest.mark.parametrize("family", RELATIVES)
def test_parts_give_the_model(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    with torch.no_grad():
        logits = vit.model(batch)
    assert (logits[0] - logits[1]).abs().max() > 0.1, "the test model does not look at its input"
    torch.testing.assert_close(vit.logits(batch), logits, atol=1e-10, rtol=1e-10)
    assert vit.embed(batch).shape == (3, vit.tokens, vit.width)


@pytest.mark.parametrize("family", RELATIVES)
def test_capabilities_are_those_of_the_model(family: str) -> None:
    vit = shared(family)
    assert (vit.can_drop is None) == (family in DROPS)
    assert (vit.attention is None) == (family in READABLE)
    assert (vit.can_rule is None) == (family in READABLE)


@pytest.mark.parametrize("family", DROPS)
def test_tokens_keep_their_places(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    with torch.no_grad():
        shuffled = vit.readout(vit.run(vit.embed(batch), keep=shuffled_patches(vit, 3)))
    torch.testing.assert_close(shuffled, vit.logits(batch), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", [f for f in DROPS if f in READABLE])
def test_dropping_tokens_is_masking_them(family: str) -> None:
    vit = shared(family, torch.float64)
    dropped = assert_dropping_is_masking(vit, images(vit))
    assert (dropped - vit.logits(images(vit))).abs().max() > 1e-3, "dropping half the tokens changed nothing"


def test_cait_on_some_patches() -> None:
    """x = patches + positions at `keep`; every layer as timm calls it, on those alone."""
    vit = shared("cait", torch.float64)
    batch, keep, net = images(vit, 1), torch.tensor([[9, 2, 5, 14, 0]]), vit.model
    with torch.no_grad():
        x = (net.patch_embed(batch) + net.pos_embed)[:, keep[0]]
        for block in net.blocks:
            x = block(x)
        cls = net.cls_token
        for block in net.blocks_token_only:
            cls = block(x, cls)
        expected = net.head(net.norm(torch.cat([cls, x], 1))[:, 0])
        found = vit.readout(vit.run(vit.embed(batch), keep=keep))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", READABLE)
def test_libra_is_complete_from_every_start(family: str) -> None:
    vit = shared(family, torch.float64)
    torch.testing.assert_close(*totals(vit, images(vit)), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("family", "attention", "rule"),
    [
        ("cait", "changes its attention between the softmax and the values", "mixed over heads"),
        ("sam", "within windows", "depends on the queries"),
        ("xcit", "between channels, not between tokens", "convolutions"),
        ("convit", "a gated sum of two", "divided by its rows"),
    ],
)
def test_refusals(family: str, attention: str, rule: str) -> None:
    vit = shared(family)
    with pytest.raises(pl.Unsupported, match=f"the attention of {family} cannot be read: .*{attention}"):
        pl.explain(vit, images(vit, 1), "genatt")
    with pytest.raises(pl.Unsupported, match=f"rule 'libra' does not hold for {family}: .*{rule}"):
        pl.explain(vit, images(vit, 1), "ixg.libra")
    if vit.can_drop is not None:
        with pytest.raises(pl.Unsupported, match="grid must be complete"):
            vit.run(vit.embed(images(vit, 1)), keep=torch.zeros(1, 2, dtype=torch.long))


def test_a_late_cls_token_is_left_alone_until_it_joins() -> None:
    for family, joins in (("cait", 3), ("xcit", 3), ("convit", 2)):
        vit = shared(family)
        tokens = vit.embed(images(vit, 1))
        for index in range(vit.depth):
            after = vit.block(index, tokens)
            assert torch.equal(after[:, 0], tokens[:, 0]) == (index < joins), (family, index)
            tokens = after


@pytest.mark.parametrize("family", ["cait", "xcit", "sam", "convit"])
def test_the_norm_of_a_block_is_shown_for_all_tokens(family: str) -> None:
    """Grad-CAM at a first norm: w_k = mean over tokens of the gradient, the map sum_k w_k n_ik."""
    vit = shared(family, torch.float64)
    found = pl.explain(vit, images(vit, 2), "gradcam", target=1, layer="blocks[0].norm1").scores
    assert found.shape == (2, *vit.grid)
    assert found.std() > 0


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in QUICK else pytest.mark.slow)
        for family in RELATIVES
        for name in contract_names()
    ],
)
def test_contract(family: str, name: str) -> None:
    if (family, name) == ("gemma4", "hirescam"):
        pytest.skip("a norm follows the place it reads, so that x g sums to zero in every cell")
    vit = shared(family)
    check_method(name, vit, images(vit, 2), double=shared(family, torch.float64))
