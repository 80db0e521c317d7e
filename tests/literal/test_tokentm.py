"""TokenTM and all its readings as written: N x N matrices, one D-wide image per head, in float64."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.evidence.passes import Trace
from patchlight.methods.base import METHODS
from patchlight.methods.requests import refusal, resolve
from patchlight.methods.tokentm import transformation_weight
from tests.close import close
from tests.families import build, images, shared
from tests.literal.rows import TARGETS, maps, read_rows
from tests.reference import deit_tiny, inputs, reference

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GENATT = {"use_necc": False, "use_length": False, "init": "identity", "include_ffn": False}


def _weight(before: Tensor, after: Tensor, s: dict[str, Any]) -> Tensor:
    """diag(w) [N,N] of tokens before and after [N,D]."""
    n = len(before)
    length = torch.stack([after[i].norm() / before[i].norm() for i in range(n)])
    cosine = torch.stack([before[i] @ after[i] / (before[i].norm() * after[i].norm()) for i in range(n)])
    correlation = cosine.exp() / cosine.exp().sum()
    scale = n if s.get("necc_scale") == "N" else s.get("necc_scale", 1)
    w = torch.ones(n, dtype=torch.float64)
    w = w * length if s.get("use_length", True) else w
    return torch.diag(w * correlation * scale if s.get("use_necc", True) else w)


def _literal(vit: Anatomy, t: Trace, i: int, s: dict[str, Any]) -> Tensor:
    eye = torch.eye(vit.tokens, dtype=torch.float64)
    c = eye if s.get("init") == "identity" else torch.diag(t.tokens[0][i].norm(dim=-1))
    for layer, block in enumerate(vit.blocks):
        block: Any
        x, y = t.tokens[layer][i], t.tokens[layer + 1][i]
        A, G = t.attention[layer][i], t.attention_gradients[layer][i]
        G = (
            {"relu": G.clamp(min=0), "signed": G}[s.get("sign", "relu")]
            if s.get("gradient", True)
            else torch.ones_like(G)
        )
        u = (x + block.ls1(block.attn(block.norm1(x[None])))[0]).detach()
        width = x.shape[1] // vit.heads
        w_v = block.attn.qkv.weight.detach()[2 * x.shape[1] :]
        w_o = block.attn.proj.weight.detach()
        weights = []
        for h in range(vit.heads):
            cut = slice(h * width, (h + 1) * width)
            source = block.norm1(x).detach() if s.get("ov_input") == "ln1" else x
            image = source @ w_v[cut].T @ w_o[:, cut].T
            weights.append(_weight(x, u if s.get("where") == "residual" else image, s))
        if s.get("head_fusion") == "mean_first":
            update = eye + G.mean(0) * (A.mean(0) @ torch.stack(weights).mean(0))
        else:
            update = eye + torch.stack([G[h] * (A[h] @ weights[h]) for h in range(vit.heads)]).mean(0)
        c = update @ c
        if s.get("include_ffn", True):
            branch = block.ls2(block.mlp(block.norm2(u))).detach()
            torch.testing.assert_close(u + branch, y, **CLOSE)
            c = (eye + _weight(u, y if s.get("ffn_where") == "residual" else branch, s)) @ c
    return read_rows(vit, c)


READINGS: dict[str, dict[str, Any]] = {
    "third-party": {"where": "ov", "ov_input": "x", "ffn_where": "branch", "head_fusion": "per_head", "necc_scale": 1},
    "ov-ln1": {"where": "ov", "ov_input": "ln1", "ffn_where": "branch", "head_fusion": "per_head", "necc_scale": 1},
    "attention-residual": {"where": "residual", "ffn_where": "branch", "head_fusion": "per_head", "necc_scale": 1},
    "ffn-residual": {"where": "ov", "ffn_where": "residual", "head_fusion": "per_head", "necc_scale": 1},
    "mean-heads": {"where": "ov", "ffn_where": "branch", "head_fusion": "mean_first", "necc_scale": 1},
    "necc-n": {"where": "ov", "ffn_where": "branch", "head_fusion": "per_head", "necc_scale": "N"},
    "ov-ln1-necc-n": {"where": "ov", "ov_input": "ln1", "head_fusion": "per_head", "necc_scale": "N"},
    "libragrad": {"where": "residual", "ffn_where": "residual", "head_fusion": "mean_first", "necc_scale": 1},
}
"""What each preset is, written out once more for the literal version."""
FAMILIES = ["vit", "deit3", "reg4-gap"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"ffn_where": "residual", "necc_scale": "N"},
    {"necc_scale": 3.0, "use_length": False},
    {"use_necc": False, "sign": "signed"},
    {"gradient": False},
    {"head_fusion": "mean_first", "sign": "signed"},
    {"include_ffn": False, "init": "identity"},
]


def _compare(family: str, asked: dict[str, Any], literal: dict[str, Any]) -> None:
    """The maps of `tokentm` with some settings are those of the literal version with some others."""
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    ours = maps(vit, batch, "tokentm", **asked)
    with pl.trace(vit, batch, target=TARGETS[:2]) as t:
        for i in range(2):
            torch.testing.assert_close(ours[i], _literal(vit, t, i, literal), **CLOSE)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_literal(family: str, settings: dict[str, Any]) -> None:
    _compare(family, settings, settings)


@pytest.mark.parametrize("preset", METHODS["tokentm"].presets)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_preset_is_its_reading(family: str, preset: str) -> None:
    _compare(family, {"preset": preset}, READINGS[preset])


def test_readings_are_all_there_and_all_differ() -> None:
    assert set(METHODS["tokentm"].presets) == set(READINGS)
    vit = shared("vit", torch.float64)
    batch = images(vit)
    drawn = {preset: maps(vit, batch, "tokentm", preset=preset) for preset in READINGS}
    for first, other in combinations(drawn, 2):
        assert not torch.allclose(drawn[first], drawn[other], rtol=1e-3), f"{first} and {other} are the same"
    torch.testing.assert_close(maps(vit, batch, "tokentm"), drawn["third-party"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("preset", "theirs"), [("third-party", "tokentm_literal_card_ov"), ("libragrad", "lg_plain_tokentm")]
)
def test_the_literal_version_is_the_reference(preset: str, theirs: str) -> None:
    """The two readings that exist as code, on deit_tiny: the literal version has the outputs of that code."""
    known = reference(theirs)
    vit = deit_tiny(torch.float64)
    with pl.trace(vit, inputs(1).double(), target=[int(known["target"][0])]) as t:
        close(_literal(vit, t, 0, READINGS[preset]), known["maps"][0], 1e-4)


@pytest.mark.parametrize("family", ["vit", "siglip", "beit", "hf-clip", "torchvision"])
@pytest.mark.parametrize("where", ["ov", "residual"])
def test_without_weights_it_is_genatt(family: str, where: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    reduced = maps(vit, batch, "tokentm", where=where, **GENATT)
    torch.testing.assert_close(reduced, maps(vit, batch, "genatt"), rtol=1e-12, atol=1e-12)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_weights() -> None:
    """NECC sums to one; tokens only scaled by a weigh a/N; a rotation of both sides changes nothing."""

    def weight(before: Tensor, after: Tensor, use_length: bool = True) -> Tensor:
        lengths = before.norm(dim=-1), after.norm(dim=-1)
        return transformation_weight(*lengths, (before * after).sum(-1), use_length, True, 1.0)

    before, after = _random(2, 9, 6), _random(2, 9, 6).roll(1, 1)
    necc = weight(before, after, use_length=False)
    torch.testing.assert_close(necc.sum(-1), torch.ones(2, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(weight(before, 3 * before), torch.full((2, 9), 3 / 9, dtype=torch.float64), **CLOSE)
    rotation = torch.linalg.qr(_random(6, 6)).Q
    torch.testing.assert_close(weight(before @ rotation, after @ rotation), weight(before, after), **CLOSE)
    assert weight(torch.zeros(1, 9, 6), after[:1].float()).isfinite().all()


def test_the_start_scales_columns() -> None:
    """With lengths at the start, each column of the map is the identity-started one times the length of its token."""
    vit = shared("vit", torch.float64)
    batch = images(vit)
    lengths = vit.patches(vit.embed(batch).norm(dim=-1))
    ours, bare = maps(vit, batch, "tokentm"), maps(vit, batch, "tokentm", init="identity")
    torch.testing.assert_close(ours, bare * lengths, **CLOSE)
    assert (ours >= 0).all()


def test_refusals() -> None:
    with pytest.raises(PatchlightError, match=r"'tokentm' cannot be followed by '\.plus': each block is a matrix"):
        resolve("tokentm.plus")
    vit = build("vit", torch.float64)
    for block in vit.blocks:
        block.attn.norm = torch.nn.LayerNorm(48, dtype=torch.float64)  # type: ignore[union-attr]
    for name in ("tokentm", "bt-t"):
        with pytest.raises(Unsupported, match="no value and output projection"):
            pl.explain(vit, images(vit), name)
    assert refusal(resolve("tokentm", {"preset": "libragrad"}), vit) is None
