"""LeGrad as the paper writes it: one backward for every block's own score, attention written out, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, PatchlightError, Unsupported
from patchlight.core.targets import Targets
from patchlight.evidence import rules
from patchlight.evidence.passes import run_pass
from patchlight.evidence.record import Evidence, Record
from patchlight.evidence.rules import RULES, Rule
from patchlight.evidence.runner import Course, LayerJob
from patchlight.evidence.taps import Taps
from patchlight.methods.legrad import legrad
from patchlight.methods.requests import resolve
from patchlight.testing import spearman
from tests.families import PLAIN, build, images, shared
from tests.literal.opened import Opened
from tests.literal.rows import TARGETS, maps, patches

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def by_separate_backwards(vit: Anatomy, batch: Tensor, readout: str, start: int) -> Tensor:
    """1/|S| sum_l 1/(HN) sum_hi ReLU(ds_l/dA_l[h,i,j]) on the grid, one forward and one backward for each block."""
    total = torch.zeros(len(batch), vit.tokens, dtype=torch.float64)
    layers = range(start, vit.depth)
    for layer in layers:
        opened = Opened(vit, batch)
        x = opened.x
        for below in range(layer):
            x = opened.block(below, x).detach()
        y = opened.block(layer, x)
        read = {"tokens": y.mean(1), "patches": y[:, vit.prefix :].mean(1), "cls": y[:, 0]}
        logits = opened.pooled(y) if readout == "pooling" else opened.head(read[readout])
        score = sum(logits[b, TARGETS[b]] for b in range(len(batch)))
        (G,) = torch.autograd.grad(score, opened.attention)
        for b in range(len(batch)):
            for h in range(vit.heads):
                for i in range(vit.tokens):
                    total[b] += G[b, h, i].clamp(min=0) / (vit.heads * vit.tokens * len(layers))
    return torch.stack([patches(vit, one) for one in total])


@pytest.mark.parametrize("family", ["vit", "dinov2-reg", "reg4-gap"])
@pytest.mark.parametrize(("readout", "start"), [("tokens", 0), ("pooling", 0), ("patches", 1), ("cls", 0)])
def test_literal(family: str, readout: str, start: int) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    given = {"readout": readout, "start": start}
    torch.testing.assert_close(maps(vit, batch, "legrad", **given), by_separate_backwards(vit, batch, **given), **CLOSE)


def seen_gradient(vit: Anatomy, x: Tensor, layer: int, readout: str, rule: Rule) -> tuple[Tensor, Tensor]:
    """A block's output, and G of its own score, with attention written out and differentiated down to its input."""
    record = Record(layer, x)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        with Taps(rule, frozenset({"A", "G"}), record, in_block=True):
            y = vit.block(layer, x)
        tokens = y if readout == "pooling" else y.mean(1, keepdim=True).expand_as(y)
        with Taps(rule, frozenset(), Record(layer, x), in_block=False):
            logits = vit.readout(tokens)
        torch.autograd.grad(sum(logits[b, TARGETS[b]] for b in range(len(x))), x)
    return y.detach(), record.seen["G"]


@pytest.mark.parametrize("family", [family for family in PLAIN if family != "vit-binary"])
@pytest.mark.parametrize(("readout", "rule"), [("tokens", "plain"), ("pooling", "plain"), ("tokens", "libra")])
def test_every_family(family: str, readout: str, rule: str) -> None:
    """mean_hi ReLU(dO v^T) from a graph that begins behind attention is that of G from the whole block."""
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    x, total = vit.embed(batch), torch.zeros(2, vit.tokens, dtype=torch.float64)
    for layer in range(vit.depth):
        x, G = seen_gradient(vit, x, layer, readout, RULES[rule])
        total += G.clamp(min=0).mean((1, 2)) / vit.depth
    name = "legrad" if rule == "plain" else f"legrad.{rule}"
    ours = maps(vit, batch, name, readout=readout, attention="block")
    rounded = {"rtol": 1e-5, "atol": 1e-7} if family == "hf-vit-eager" else CLOSE  # its softmax is in float32
    torch.testing.assert_close(ours, vit.patches(total), **rounded)


def test_scores_of_later_blocks_leak_in_where_nothing_is_detached() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    opened = Opened(vit, batch)
    x, kept, score = opened.x, [], torch.zeros((), dtype=torch.float64)
    for layer in range(vit.depth):
        x = opened.block(layer, x)
        kept.append(opened.attention)
        score = score + sum(opened.head(x.mean(1))[b, TARGETS[b]] for b in range(len(batch)))
    leaking = [G.relu().mean((1, 2)) for G in torch.autograd.grad(score, kept)]
    seen = run_pass(
        vit,
        batch,
        Targets(torch.tensor(TARGETS)[:, None]),
        jobs=[LayerJob(lambda b: b.positive_gradient, frozenset({"v", "dO"}), tuple(range(vit.depth)))],
        course=Course("tokens"),
    )
    for layer in range(vit.depth - 1):
        assert (leaking[layer] - seen.at(layer)).abs().max() > 0.1 * seen.at(layer).max()
    torch.testing.assert_close(leaking[-1], seen.at(vit.depth - 1), **CLOSE)


def test_by_hand() -> None:
    """s = w . mean_i o_i with w = (3, -6): E = (0.5, 1, 2) whatever the attention is."""
    w = torch.tensor([3.0, -6.0], dtype=torch.float64)
    v = torch.tensor([[1.0, 1.0], [2.0, 1.0], [-1.0, -2.0]], dtype=torch.float64).T[None, :, :, None]
    for seed in (0, 1):
        drawn = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A = drawn.softmax(-1).requires_grad_()
        o = A @ v
        o.retain_grad()
        (o[..., 0].mean(-1) * w).sum().backward()
        found = legrad(Evidence.of(torch.zeros(1, 3, 2, dtype=torch.float64), v=v, dO=o.grad, prefix=1))
        expected = torch.tensor([[0.5, 1.0, 2.0]], dtype=torch.float64)
        torch.testing.assert_close(found, expected, **CLOSE)
        assert A.grad is not None
        torch.testing.assert_close(A.grad.relu().mean((1, 2)), expected, **CLOSE)


def test_heads_have_no_order_and_scores_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    v, dO = (torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    x, order = torch.zeros(2, 5, 12, dtype=torch.float64), torch.tensor([2, 0, 3, 1])
    one = legrad(Evidence.of(x, v=v, dO=dO))
    torch.testing.assert_close(one, legrad(Evidence.of(x, v=v[:, order], dO=dO[:, order])), **CLOSE)
    torch.testing.assert_close(one, (dO @ v.mT).relu().mean((1, 2)), **CLOSE)
    vit = shared("vit", torch.float64)
    batch = images(vit)
    plain = maps(vit, batch, "legrad")
    assert (plain >= 0).all()
    torch.testing.assert_close(maps(vit, batch, "legrad", score=lambda z: 3 * z), 3 * plain, **CLOSE)
    negated = maps(vit, batch, "legrad", score=lambda z: -z)
    assert (negated - plain).abs().max() > 0.1 * plain.max()  # |G| would have no sign


def test_the_last_block_read_as_the_model_pools_is_attngrad() -> None:
    """Of a CLS model only one of N rows has a gradient there."""
    vit = shared("vit", torch.float64)
    batch = images(vit)
    ours = maps(vit, batch, "legrad", readout="pooling", start=-1)
    torch.testing.assert_close(ours, maps(vit, batch, "attngrad", sign="relu") / vit.tokens, **CLOSE)


@pytest.mark.parametrize("family", ["vit", "reg4-gap", "eva", "hf-siglip", "torchvision", "siglip"])
@pytest.mark.parametrize("attention", ["block", "auto"])
def test_the_last_score_is_the_logit_where_it_is_read_as_the_model_pools(family: str, attention: str) -> None:
    """Norms before and behind the pooling; of another readout it is another."""
    vit = shared(family, torch.float64)
    batch = images(vit)
    seen: list[Tensor] = []

    def score(logits: Tensor) -> Tensor:
        seen.append(logits.detach())
        return logits

    maps(vit, batch, "legrad", readout="pooling", attention=attention, score=score)
    assert len(seen) == vit.depth + 1  # one for each block, and the model's own
    torch.testing.assert_close(seen[vit.depth - 1], vit.logits(batch), **CLOSE)
    assert (seen[0] - vit.logits(batch)).abs().max() > 0.01
    seen.clear()
    maps(vit, batch, "legrad", readout="tokens", attention="block", score=score)
    assert (seen[vit.depth - 1] - vit.logits(batch)).abs().max() > 0.01


def test_a_mean_has_one_gradient_for_all_tokens() -> None:
    vit = shared("vit", torch.float64)
    y = vit.run(vit.embed(images(vit)), stop=2).detach().requires_grad_()
    (g,) = torch.autograd.grad(vit.readout(y.mean(1, keepdim=True).expand_as(y))[:, 3].sum(), y)
    torch.testing.assert_close(g, g[:, :1].expand_as(g), **CLOSE)


def test_the_pooler() -> None:
    """1/H sum_h ReLU(ds_l/dA_pool[h,0,j]), the pool fed with each block's output."""
    vit = shared("siglip", torch.float64)
    batch = images(vit)
    net: Any = vit.model
    pool, x = net.attn_pool, vit.embed(batch)
    total = torch.zeros(len(batch), vit.tokens, dtype=torch.float64)
    for layer in range(vit.depth):
        x = vit.block(layer, x).detach()
        tokens = F.layer_norm(x, x.shape[-1:], net.norm.weight, net.norm.bias, net.norm.eps)
        q = pool.q(pool.latent).expand(len(batch), -1, -1).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)
        k, v = pool.kv(tokens).unflatten(-1, (2, pool.num_heads, -1)).permute(2, 0, 3, 1, 4)
        A = (pool.q_norm(q) @ pool.k_norm(k).mT / math.sqrt(q.shape[-1])).softmax(-1).detach().requires_grad_()
        o = pool.proj((A @ v).transpose(1, 2).flatten(2))
        logits = net.head(net.fc_norm((o + pool.mlp(pool.norm(o)))[:, 0]))
        (G,) = torch.autograd.grad(sum(logits[b, TARGETS[b]] for b in range(len(batch))), A)
        assert G.shape[2] == 1
        total += torch.stack([G[:, h, 0].clamp(min=0) for h in range(pool.num_heads)]).mean(0) / vit.depth
    torch.testing.assert_close(maps(vit, batch, "legrad"), vit.patches(total), **CLOSE)
    torch.testing.assert_close(maps(vit, batch, "legrad", attention="pooler"), vit.patches(total), **CLOSE)
    assert (maps(vit, batch, "legrad", attention="block") - vit.patches(total)).abs().max() > 0.01


def test_several_classes_share_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit", torch.float64)
    batch, count, run = images(vit, 2), [0], vit.block

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return run(*args)

    monkeypatch.setattr(vit, "block", counted)
    both = pl.explain(vit, batch, "legrad", target=[[3, 1], [1, 4]], progress=False).scores
    assert count[0] == vit.depth
    for t, target in enumerate(([3, 1], [1, 4])):
        alone = pl.explain(vit, batch, "legrad", target=target, progress=False).scores
        torch.testing.assert_close(both[:, t], alone, rtol=1e-6, atol=1e-8)


def test_blocks_and_presets() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    last, before, first = (maps(vit, batch, "legrad", start=-i) * i for i in (1, 2, 3))
    torch.testing.assert_close(maps(vit, batch, "legrad", preset="code"), before / 2, **CLOSE)
    torch.testing.assert_close(maps(vit, batch, "legrad"), first / vit.depth, **CLOSE)
    assert (before - 2 * last).abs().max() > 1e-3
    for composition in ("plus", "skipplus", "rollout"):
        with pytest.raises(PatchlightError, match="already is the mean over the blocks"):
            resolve(f"legrad.{composition}")


def test_a_zero_head_is_reported() -> None:
    vit = build("vit")
    with torch.no_grad():
        vit.model.head.weight.zero_()  # type: ignore[union-attr,operator]
    with pytest.warns(DegenerateMap, match="no gradient is positive"):
        maps(vit, images(vit), "legrad")


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("vit", {"attention": "pooler"}, "has cls pooling and no pooler"),
        ("hf-siglip", {"readout": "cls"}, "has no CLS token"),
        ("swin", {}, "reads the values of all tokens together"),
    ],
)
def test_refusals(family: str, settings: dict[str, Any], told: str) -> None:
    vit = shared(family)
    with pytest.raises(Unsupported, match=told):
        pl.explain(vit, images(vit, 1), "legrad", **settings)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["vit", "siglip"])
def test_half_precision_keeps_the_order(family: str, precision: str) -> None:
    vit = shared(family)
    batch = images(vit)
    full = maps(vit, batch, "legrad", attention="block")
    half = maps(vit, batch, "legrad", attention="block", precision=precision)
    assert not torch.equal(full, half)
    for one, other in zip(full, half, strict=True):
        assert spearman(one, other) > 0.95


def test_a_small_score_survives_float16() -> None:
    """Each block's gradient is scaled into float16's range by itself, and scaled back."""
    vit = shared("vit")
    batch = images(vit)
    full = maps(vit, batch, "legrad", precision="fp16")
    tiny = maps(vit, batch, "legrad", precision="fp16", score=lambda z: 2**-30 * z)
    torch.testing.assert_close(tiny * 2**30, full, rtol=1e-3, atol=float(full.max()) * 1e-3)


@pytest.mark.parametrize("name", ["legrad", "grad-eclip"])
def test_attention_stays_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the matrix, so none is written; a method that reads it has one."""
    vit = shared("vit")
    written: list[int] = []

    def softmax(scores: Tensor, *args: Any) -> Tensor:
        written.append(scores.shape[-1])
        return scores.softmax(-1)

    monkeypatch.setattr(rules, "softmax", softmax)
    maps(vit, images(vit), name)
    assert not written
    maps(vit, images(vit), "rawatt")
    assert written == [vit.tokens]


def test_nothing_holds_the_graph() -> None:
    vit = shared("vit", torch.float64)
    job = LayerJob(lambda b: b.positive_gradient, frozenset({"v", "dO"}), (1,))
    seen = run_pass(vit, images(vit), Targets(torch.tensor([[1]] * 3)), jobs=[job], course=Course("tokens"))
    assert list(seen.layers()) == [1]
    assert not seen.at(1).requires_grad
    assert not seen.logits.requires_grad
