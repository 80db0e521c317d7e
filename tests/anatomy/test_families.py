"""What is read from every family: its parts put together again give the model, and tokens can really be dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.passes import run_pass
from patchlight.evidence.runner import LayerJob
from tests.completeness import totals
from tests.dropping import assert_dropping_is_masking, shuffled_patches
from tests.families import FAMILIES, PLAIN, build, images, shared


def own_logits(vit: Anatomy, batch: Tensor) -> Tensor:
    with torch.no_grad():
        out = vit.model(batch)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_give_the_model(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    logits = own_logits(vit, batch)
    spread = (logits[0] - logits[1]).abs().max()
    assert spread > 0.1, "the test model does not look at its input"
    torch.testing.assert_close(vit.logits(batch), logits, atol=1e-10, rtol=1e-10)
    tokens = vit.embed(batch)
    assert tokens.shape[1] == vit.tokens == vit.prefix + vit.grid[0] * vit.grid[1]
    assert tokens.shape[2] == vit.width
    middle = min(2, vit.depth)
    halfway = vit.run(vit.run(tokens, 0, middle), middle)
    torch.testing.assert_close(vit.readout(halfway), logits, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", PLAIN)
def test_dropping_tokens_is_masking_them(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    dropped = assert_dropping_is_masking(vit, batch, tolerance=1e-5 if family == "hf-vit-eager" else 1e-10)
    assert (dropped - vit.logits(batch)).abs().max() > 1e-3, "dropping half the tokens changed nothing"


@pytest.mark.parametrize("family", ["vit", "eva02", "dinov3", "beit"])
def test_positions_are_kept(family: str) -> None:
    """All tokens in another order give the same logits: each keeps its own position."""
    vit = shared(family, torch.float64)
    batch = images(vit)
    with torch.no_grad():
        shuffled = vit.readout(vit.run(vit.embed(batch), keep=shuffled_patches(vit, len(batch))))
    torch.testing.assert_close(shuffled, vit.logits(batch), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", PLAIN)
def test_libra_is_complete_from_every_start(family: str) -> None:
    """sum_i <x_l, g_l> + bias terms of the blocks from l on + the end's = the logit, for every l."""
    vit = shared(family, torch.float64)
    tolerance = 1e-5 if family == "hf-vit-eager" else 1e-10
    torch.testing.assert_close(*totals(vit, images(vit)), atol=tolerance, rtol=tolerance)


def test_plain_gradients_are_not_complete() -> None:
    vit = shared("vit", torch.float64)
    job = LayerJob(lambda b: (b.x * b.g).sum((1, 2)), frozenset({"x", "g"}), (0,))
    seen = run_pass(vit, images(vit), jobs=[job])
    assert (seen.at(0) - seen.scores[:, 0]).abs().max() > 0.05


@pytest.mark.parametrize("family", PLAIN)
def test_attention_rows_sum_to_one_and_have_gradients(family: str) -> None:
    """A is a softmax over all tokens, and a gradient arrives at it (its values: tests/literal)."""
    vit = shared(family, torch.float64)
    batch = images(vit, 1)
    job = LayerJob(lambda b: (b.A, b.G), frozenset({"A", "G"}), tuple(range(vit.depth)))
    seen = run_pass(vit, batch, jobs=[job])
    for attention, gradient in seen.layers().values():
        assert attention.shape == (1, vit.heads, vit.tokens, vit.tokens) == gradient.shape
        torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention.sum(-1)), atol=1e-6, rtol=0)
    assert any(g.abs().max() > 1e-6 for _, g in seen.layers().values())


def test_capabilities_are_read() -> None:
    wide = shared("vit-wide")
    assert wide.grid == (3, 5)
    assert (shared("deit-distilled").prefix, shared("deit-distilled").pooling) == (2, "cls+dist")
    assert (shared("dinov2-reg").prefix, shared("reg4-gap").prefix, shared("siglip").prefix) == (5, 4, 0)
    assert (shared("siglip").pooling, shared("reg4-gap").pooling, shared("hf-dinov2").pooling) == (
        "map",
        "avg",
        "cls+avg",
    )
    assert shared("vit-binary").sigmoid
    assert not shared("vit").sigmoid


def test_readout_rows_are_the_poolings() -> None:
    for family in FAMILIES:
        vit = shared(family)
        seen = run_pass(vit, images(vit))
        row = vit.pool_row(seen.logits, seen.pool)
        torch.testing.assert_close(row.sum(1), torch.ones(3), atol=1e-5, rtol=0)
        assert (row[:, : vit.prefix].sum() == 0) == (vit.pooling in ("avg", "map"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_row_of_the_last_block(family: str) -> None:
    """Plain ViTs that classify their first token: the last block may be computed for it alone. All others say no."""
    vit = shared(family, torch.float64)
    one = {"vit", "vit-wide", "vit-binary", "vit-unfused", "deit", "deit3", "dinov2-reg", "flexivit", "torchvision"}
    assert vit.reads_first == (family in one)
    if vit.reads_first:
        with torch.no_grad():
            before = vit.run(vit.embed(images(vit)), stop=vit.depth - 1)[:, :-2]
            row, whole = vit.first_row(before), vit.block(vit.depth - 1, before)
        torch.testing.assert_close(row, whole[:, :1], atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(vit.readout(row), vit.readout(whole), atol=1e-10, rtol=1e-10)


def test_a_hook_on_attention_forbids_the_first_row() -> None:
    vit = build("vit")
    block: Any = vit.model.blocks[-1]  # type: ignore[index]
    assert vit.reads_first
    handle = block.attn.register_forward_hook(lambda module, given, out: 2 * out)
    vit.renew()
    assert not vit.reads_first
    handle.remove()
    vit.renew()
    assert vit.reads_first
