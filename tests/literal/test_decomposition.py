"""AttIN, GlobEnc and ALTI against decompositions written out source by source, and what their matrices must satisfy."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.passes import run_pass
from patchlight.evidence.record import Evidence
from patchlight.methods import decomposition
from patchlight.methods.maps import job
from patchlight.methods.requests import resolve
from tests.close import close
from tests.families import build, images, shared
from tests.literal.plain import maps

FFNS = ("skip", "norm2")


class Sources:
    """One timm block on one image [N,D]: V[i,j], u and y, with one product at a time."""

    def __init__(self, vit: Anatomy, layer: int, x: Tensor) -> None:
        self.block: Any = vit.model.blocks[layer]
        self.x, self.N, self.H = x, len(x), vit.heads
        attn = self.block.attn
        n = self.block.norm1(x)
        q, k, self.v = attn.qkv(n).reshape(self.N, 3, self.H, -1).permute(1, 2, 0, 3)
        self.A = torch.stack([(q[h] @ k[h].T / q.shape[-1] ** 0.5).softmax(-1) for h in range(self.H)])
        mixed = torch.cat([self.A[h] @ self.v[h] for h in range(self.H)], -1)
        self.u = x + self.block.ls1(attn.proj(mixed))
        self.y = self.u + self.block.ls2(self.block.mlp(self.block.norm2(self.u)))

    def values(self, bias: bool) -> Tensor:
        """v_j^h [H,N,d] with its bias, or W_V (gamma (x_j - mean) / std) alone."""
        if bias:
            return self.v
        norm, D = self.block.norm1, self.x.shape[1]
        centred = self.x - self.x.mean(1, keepdim=True)
        n = norm.weight * centred / torch.sqrt((centred**2).mean(1, keepdim=True) + norm.eps)
        return (n @ self.block.attn.qkv.weight[2 * D :].T).reshape(self.N, self.H, -1).transpose(0, 1)

    @cache  # noqa: B019
    def vectors(self, bias: bool, skip: bool) -> Tensor:
        """V [N,N,D] (to, from)."""
        v, d, scale = self.values(bias), self.v.shape[-1], self.block.ls1
        V = torch.zeros(self.N, self.N, self.x.shape[1], dtype=self.x.dtype)
        for j in range(self.N):
            for h in range(self.H):
                moved = self.block.attn.proj.weight[:, h * d : (h + 1) * d] @ v[h, j]
                for i in range(self.N):
                    V[i, j] += scale(self.A[h, i, j] * moved)
        for i in range(self.N):
            V[i, i] += self.x[i] if skip else 0
        return V

    def second_norm(self, V: Tensor) -> Tensor:
        norm = self.block.norm2
        std = torch.sqrt(self.u.var(1, unbiased=False) + norm.eps)
        return norm.weight * (V - V.mean(-1, keepdim=True)) / std[:, None, None]


def sources(vit: Anatomy, batch: Tensor) -> list[list[Sources]]:
    """By block and image."""
    with torch.no_grad():
        x = vit.embed(batch)
        rows = []
        for layer in range(vit.depth):
            rows.append([Sources(vit, layer, image) for image in x])
            x = vit.block(layer, x)
            assert torch.allclose(torch.stack([s.y for s in rows[-1]]), x, rtol=1e-12, atol=1e-12)
    return rows


def matrices(vit: Anatomy, batch: Tensor, name: str, **settings: Any) -> list[Tensor]:
    request = resolve(name, settings)
    values = run_pass(vit, batch, jobs=[job(request, vit)]).layers()
    return [values[layer] for layer in sorted(values)]


def through(s: Sources, V: Tensor, ffn: str) -> Tensor:
    return V if ffn == "skip" else V + s.second_norm(V)


def slow_globenc(s: Sources, ffn: str, bias: bool = False) -> Tensor:
    return through(s, s.vectors(bias, skip=True), ffn).norm(dim=-1)


def slow_alti(s: Sources, ffn: str, reference: str, bias: bool = False) -> Tensor:
    V = through(s, s.vectors(bias, skip=True), ffn)
    y = s.u if reference == "attn_out" else s.y
    c = torch.stack([F.relu(y[i].abs().sum() - (y[i] - V[i]).abs().sum(-1)) for i in range(s.N)])
    return torch.stack([row / row.sum() if row.sum() > 0 else row for row in c])


@pytest.fixture(scope="module", params=["vit", "deit3"])
def model(request: pytest.FixtureRequest) -> tuple[Anatomy, Tensor, list[list[Sources]]]:
    vit = shared(request.param, torch.float64)
    batch = images(vit, 2)
    return vit, batch, sources(vit, batch)


@torch.no_grad()
def test_every_matrix_is_its_literal_version(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vit, batch, rows = model
    monkeypatch.setattr(decomposition, "_CHUNK", 2 * vit.tokens * rows[0][0].x.shape[1] * 5)

    def check(name: str, slow: Any, **settings: Any) -> None:
        everything = {"start": 0} if name != "attin" else {}
        ours = matrices(vit, batch, f"{name}.plus", **settings, **everything)
        assert len(ours) == vit.depth
        for layer, found in enumerate(ours):
            expected = torch.stack([slow(s) for s in rows[layer]])
            close(found, expected, 1e-10, f"{name} {settings}, block {layer}")

    check("attin", lambda s: s.vectors(True, False).norm(dim=-1))
    check("attin", lambda s: s.vectors(True, True).norm(dim=-1), vectors="residual")
    check("attin", lambda s: s.second_norm(s.vectors(True, True)).norm(dim=-1), vectors="norm")
    for ffn in FFNS:
        check("globenc", lambda s, f=ffn: slow_globenc(s, f), ffn=ffn)
        for reference in ("attn_out", "block_out"):
            check("alti", lambda s, f=ffn, r=reference: slow_alti(s, f, r), ffn=ffn, reference=reference)
    check("globenc", lambda s: slow_globenc(s, "skip", True), value_bias=True)


@torch.no_grad()
def test_products_have_no_identity_and_no_normalisation(model: Any) -> None:
    vit, batch, rows = model
    slow_versions: dict[str, Any] = {
        "globenc": lambda s: slow_globenc(s, "skip"),
        "alti": lambda s: slow_alti(s, "skip", "attn_out"),
    }
    for name, slow in slow_versions.items():
        whole = []
        for image in range(len(batch)):
            product = torch.eye(vit.tokens, dtype=torch.float64)
            for layer in range(vit.depth):
                product = slow(rows[layer][image]) @ product
            whole.append(product[0, vit.prefix :].reshape(vit.grid))
        expected = torch.stack(whole)
        for asked in (name, f"{name}.rollout"):
            found = maps(vit, batch, asked)
            close(found, expected, 1e-10, asked)


@torch.no_grad()
def test_the_sources_and_biases_make_up_the_token(model: Any) -> None:
    """sum_j V[i,j] + bias = u: what the vectors leave out is the same for all tokens."""
    for s in model[2][1]:
        left = s.u - s.vectors(False, True).sum(1)
        assert torch.allclose(left, left[:1].expand_as(left), atol=1e-10)
        kept = s.u - s.vectors(True, True).sum(1)
        assert torch.allclose(kept, s.block.ls1(s.block.attn.proj.bias).expand_as(kept), atol=1e-10)


def evidence(A: Tensor, x: Tensor, u: Tensor, out: float) -> Evidence:
    """A block of one head and identity projections, scaled."""
    width = x.shape[-1]
    linear = torch.nn.Linear(width, width, bias=False, dtype=torch.float64)
    linear.weight.data = out * torch.eye(width, dtype=torch.float64)
    parts = pl.anatomy.contract.Parts(norm1=torch.nn.LayerNorm(width), out=linear)
    return Evidence.of(x, y=u, A=A, v=x[:, None], u=u, parts=parts)


def test_alti_closed_forms() -> None:
    """V_ij = delta_ij y_i gives the identity; rows are distributions; each score is at most ||V_ij||_1."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    A = torch.rand(2, 1, 5, 5, dtype=torch.float64).softmax(-1)
    identity = decomposition.alti(evidence(A, x, x, out=0.0), value_bias=True)
    assert torch.allclose(identity, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))
    u = x + A[:, 0] @ x
    b = evidence(A, x, u, out=1.0)
    c = decomposition.alti(b, value_bias=True)
    assert torch.allclose(c.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    assert bool((c >= 0).all())
    w = decomposition.head_vectors(b, value_bias=True)
    scores = u.abs().sum(-1, keepdim=True) - decomposition.l1_distances(b, w, u, "skip")
    V = A[:, 0, :, :, None] * x[:, None] + torch.diag_embed(x.movedim(-1, 1)).movedim(1, -1)
    assert bool((scores <= V.abs().sum(-1) + 1e-12).all())


def test_zero_rows_stay_zero_and_are_warned_about() -> None:
    """A token that went nowhere near its sources has a row of zeros, not of NaN."""
    torch.manual_seed(0)
    x = torch.rand(1, 4, 6, dtype=torch.float64) + 0.5
    A = torch.full((1, 1, 4, 4), 0.25, dtype=torch.float64)
    u = x + A[:, 0] @ x
    u[:, 2] = -u[:, 2]
    with pytest.warns(pl.DegenerateMap, match="1 of 4 tokens of block 0"):
        c = decomposition.alti(evidence(A, x, u, out=1.0), value_bias=True)
    assert torch.equal(c[0, 2], torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(c[0, [0, 1, 3]].sum(-1), torch.ones(3, dtype=torch.float64))


@torch.no_grad()
def test_attention_that_stays_home_moves_nothing() -> None:
    """With a zero output projection GlobEnc's matrix is diag ||x_i||, ALTI's the identity."""
    vit = build("vit", torch.float64)
    for block in vit.model.blocks:  # type: ignore[union-attr]
        block.attn.proj.weight.zero_()  # type: ignore[union-attr]
        block.attn.proj.bias.zero_()  # type: ignore[union-attr]
    batch = images(vit, 2)
    x = vit.embed(batch)
    first = matrices(vit, batch, "globenc.plus")[0]
    assert torch.allclose(first, torch.diag_embed(x.norm(dim=-1)))
    for matrix in matrices(vit, batch, "alti.plus"):
        assert torch.allclose(matrix, torch.eye(vit.tokens, dtype=torch.float64).expand_as(matrix))


def test_preset_is_the_port_and_sets_its_halves() -> None:
    assert resolve("alti.skipplus", {"preset": "skipplus"}).settings == {
        "ffn": "norm2", "reference": "block_out", "value_bias": False, "start": None, "rounding": "floor",
        "terms": "layer", "readout": "pooling", "precision": "auto", "compile": False,
    }  # fmt: skip
    assert resolve("globenc").settings["ffn"] == "skip"
    assert resolve("alti").settings["reference"] == "attn_out"
