"""Rows of matrices that are not written: beside the matrices, in closed forms, and in passes with fused attention."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.evidence import runner, taps
from patchlight.evidence.record import ATTENTION
from patchlight.evidence.rows import Entry, FusedAttention, Rows, attend, head_mean, mean_row, row_sums, times, written
from patchlight.methods.requests import refusal, resolve
from patchlight.testing import contract_names
from tests.families import ROOMY, images, roomy

CLOSE: dict[str, Any] = {"atol": 1e-12, "rtol": 1e-9}
SIZES = [(1, 1, 5, 16), (3, 2, 17, 8), (2, 3, 33, 24)]


def attention(batch: int, heads: int, tokens: int, width: int) -> FusedAttention:
    generator = torch.Generator().manual_seed(batch + tokens)
    q, k, v, dO = torch.randn(4, batch, heads, tokens, width, generator=generator, dtype=torch.float64)
    lse = (q @ k.mT / width**0.5).logsumexp(-1)
    unscale = torch.rand(batch, generator=generator, dtype=torch.float64) + 0.5
    return FusedAttention(q, k, v, lse, width**-0.5, dO, unscale)


def literal(seen: FusedAttention, entry: str) -> Tensor:
    """The matrices of an entry, number by number."""
    A = torch.softmax(torch.einsum("bhid,bhjd->bhij", seen.q, seen.k) * seen.scale, -1)
    assert seen.dO is not None
    assert seen.unscale is not None
    G = torch.einsum("bhid,bhjd,b->bhij", seen.dO, seen.v, seen.unscale)
    product = {"A": A, "G": G, "AG": A * G}[entry.removeprefix("relu").removeprefix("abs").strip("()")]
    return torch.where(product > 0, product, 0) if "relu" in entry else product.abs() if "abs" in entry else product


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entry", get_args(Entry))
def test_rows_are_those_of_the_matrix(entry: Entry, size: tuple[int, int, int, int]) -> None:
    seen = attention(*size)
    batch, heads, tokens, _ = size
    row = torch.randn(batch, tokens, dtype=torch.float64)
    columns, scales = torch.rand(2, batch, heads, tokens, dtype=torch.float64)
    for c, r in ((None, None), (columns, None), (None, scales), (columns, scales), (columns[:, :1], None)):
        matrix = literal(seen, entry)
        matrix = matrix if c is None else matrix * c[:, :, None]
        whole = (matrix if r is None else matrix * r[..., None]).mean(1)
        rows = Rows(seen, entry, c, r)
        torch.testing.assert_close(times(row, rows), torch.einsum("bi,bij->bj", row, whole), **CLOSE)
        torch.testing.assert_close(row_sums(rows), whole.sum(-1), **CLOSE)
        torch.testing.assert_close(mean_row(rows), whole.mean(1), **CLOSE)
        torch.testing.assert_close(written(rows), whole, **CLOSE)
        torch.testing.assert_close(head_mean(literal(seen, entry), c, r), whole, **CLOSE)


def test_one_row_is_that_of_the_matrix_and_all_positive_gradients_need_no_rectifier() -> None:
    seen = attention(2, 3, 9, 8)
    cls = torch.zeros(2, 9, dtype=torch.float64)
    cls[:, 0] = 1
    torch.testing.assert_close(times(cls, Rows(seen, "relu(AG)")), literal(seen, "relu(AG)").mean(1)[:, 0], **CLOSE)
    positive = FusedAttention(seen.q, seen.k, seen.v.abs(), seen.lse, seen.scale, seen.q.abs())
    same = [times(cls + 1, Rows(positive, entry)) for entry in ("AG", "relu(AG)", "abs(AG)")]
    torch.testing.assert_close(same[0], same[1], **CLOSE)
    torch.testing.assert_close(same[0], same[2], **CLOSE)


def test_closed_forms() -> None:
    seen = attention(2, 3, 11, 8)
    ones = torch.ones(2, 11, dtype=torch.float64)
    torch.testing.assert_close(row_sums(Rows(seen, "A")), ones, **CLOSE)
    assert seen.dO is not None
    assert seen.unscale is not None
    dO = seen.dO * seen.unscale[:, None, None, None]
    o = seen.A @ seen.v
    torch.testing.assert_close(row_sums(Rows(seen, "AG")), (o * dO).sum(-1).mean(1), **CLOSE)
    torch.testing.assert_close(times(ones, Rows(seen, "G")), (dO.sum(2)[:, :, None] * seen.v).sum(-1).mean(1), **CLOSE)
    torch.testing.assert_close(seen.gradient_mean(slice(2, None)), seen.G[..., 2:].mean(-1), **CLOSE)


def test_a_gradient_that_never_came_is_zero() -> None:
    seen = attention(1, 2, 5, 8)
    seen = FusedAttention(seen.q, seen.k, seen.v, seen.lse, seen.scale)
    for entry in ("G", "relu(AG)"):
        assert not times(torch.ones(1, 5, dtype=torch.float64), Rows(seen, entry)).any()
        assert not written(Rows(seen, entry)).any()
    assert not seen.gradient_mean(slice(1, None)).any()


def test_fused_attention_tells_its_log_sum_exp() -> None:
    q, k, v = torch.randn(3, 2, 3, 19, 8, dtype=torch.float64)
    found = attend(q, k, v, 0.3)
    assert found is not None
    torch.testing.assert_close(found[1], (0.3 * q @ k.mT).logsumexp(-1), **CLOSE)
    torch.testing.assert_close(found[0], (0.3 * q @ k.mT).softmax(-1) @ v, **CLOSE)


@pytest.mark.filterwarnings("ignore::patchlight.DegenerateMap")
@pytest.mark.parametrize("family", [*ROOMY, "torchvision"])
def test_maps_with_fused_attention_are_those_with_matrices(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer map that reads attention, all compositions and rules: only how A and G are read differs."""
    vit = roomy(family, torch.float64)
    batch = images(vit, 2)
    names = [n for n in contract_names() if resolve(n).in_pass and resolve(n).needs & ATTENTION]
    names += ["genatt.plus", "genatt.rollout", "attcam.plus", "genatt.attnlrp", "attngrad.plus.libra", "rawatt.rollout"]
    asked: dict[str, dict[str, Any]] = {name: {} for name in names}
    asked |= {"tails": {"method": "genatt.plus", "terms": "tail"}, "mean": {"method": "genatt", "rectify": "mean"}}
    asked |= {"parts": {"method": "attngrad", "sign": "abs"}, "max": {"method": "rollout", "fusion": "max"}}
    asked |= {"necc": {"method": "tokentm", "preset": "libragrad"}, "all": {"method": "gradsam", "readout": "tokens"}}
    asked |= {"own": {"method": "legrad", "readout": "pooling", "attention": "block"}, "legrad.libra": {}}
    asked |= {"block": {"method": "grad-eclip", "attention": "block"}, "grad-eclip.plus.attnlrp": {}}
    for name in [n for n, s in asked.items() if refusal(resolve(n, s), vit) is not None]:
        del asked[name]
    explicit = pl.explain(vit, batch, asked, target=[[0, 1], [2, 3]])
    fused = watched(monkeypatch)
    tiled = pl.explain(vit, batch, asked, target=[[0, 1], [2, 3]])
    assert len(fused) >= 3 * vit.depth, "three rules, every block"
    for name, attribution in explicit.items():
        scale = float(attribution.scores.abs().max())
        torch.testing.assert_close(tiled[name].scores, attribution.scores, atol=2e-6 * scale, rtol=0, msg=name)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have attention stay fused on a CPU, in float64; the list has the tokens of each that did."""
    monkeypatch.setattr(runner, "fused_type", lambda *_: torch.float64)
    monkeypatch.setattr(taps, "WRITTEN", 0)
    return noted(monkeypatch)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each attention that stays fused."""
    seen: list[int] = []

    def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Any:
        seen.append(q.shape[2])
        return attend(q, k, v, scale)

    monkeypatch.setattr(taps, "attend", attended)
    return seen


def test_large_matrices_of_few_methods_are_not_written_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = roomy("vit", torch.float64)
    batch = images(vit, 2)
    explicit = pl.explain(vit, batch, "genatt", target=1).scores
    seen = noted(monkeypatch)
    pl.explain(vit, batch, "genatt", target=1)
    assert not seen, "small matrices are written"
    monkeypatch.setattr(taps, "WRITTEN", 0)
    tiled = pl.explain(vit, batch, "genatt", target=1).scores
    assert seen == [vit.tokens] * vit.depth
    torch.testing.assert_close(tiled, explicit, atol=2e-6 * float(explicit.abs().max()), rtol=0)
    pl.explain(vit, batch, ["genatt", "attngrad", "rawatt"], target=1)
    pl.explain(vit, batch, "genatt.libra", target=1)
    assert len(seen) == vit.depth, "many readers, and a rule that stops at the softmax, write them"


@pytest.mark.filterwarnings("ignore::patchlight.DegenerateMap")
def test_methods_that_read_a_row_write_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = roomy("vit", torch.float64)
    fused = watched(monkeypatch)
    monkeypatch.setattr(Rows, "_summed", lambda self, weights, over_rows: torch.zeros_like(self.attention.lse))
    for part in ("A", "G", "entries", "tiles"):
        monkeypatch.setattr(FusedAttention, part, property(lambda self: pytest.fail("a matrix was written")))
    for name in (
        "genatt",
        "gradsam",
        "rollout",
        "rawatt",
        "attnfrom",
        "attcat",
        "attngrad",
        "tokentm",
        "genatt.plus",
        "legrad",
    ):
        pl.explain(vit, images(vit, 1), name, target=1)
    assert fused
