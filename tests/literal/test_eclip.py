"""Grad-ECLIP as the paper writes it, patch by patch in float64, and the identities that make it cheap."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, Unsupported
from patchlight.core.targets import Targets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import Course, LayerJob
from patchlight.methods.eclip import grad_eclip, spatial_weights
from patchlight.methods.requests import resolve
from tests.families import PLAIN, build, images, randomise, shared
from tests.literal.opened import Opened
from tests.literal.rows import TARGETS, maps

CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}


def literal(vit: Anatomy, batch: Tensor, layer: int = -1, heads: int | None = None, cosine: str = "raw") -> Tensor:
    """H_j = ReLU(sum_c w_c lambda_j v_jc) at the rows the classifier reads, by one image, row and patch at a time."""
    opened = Opened(vit, batch, vit.heads)
    layer %= vit.depth
    x = opened.x
    for below in range(vit.depth):
        opened.heads = vit.heads if heads is None or below < vit.depth - 1 else heads
        x = opened.block(below, x)
        if below == layer:
            q, k, v = (t.transpose(1, 2).flatten(2).detach() for t in (opened.q, opened.k, opened.v))
            o = opened.o
    if cosine == "projected":
        out = vit.model.blocks[layer].attn.proj  # type: ignore[index,union-attr]
        q, k = out(q).detach(), out(k).detach()
    logits = opened.pooled(x)
    (w,) = torch.autograd.grad(sum(logits[b, TARGETS[b]] for b in range(len(batch))), o)
    rows = range(vit.prefix, vit.tokens) if vit.pooling == "avg" else [0]
    found = torch.zeros(len(batch), vit.tokens, dtype=torch.float64)
    for b in range(len(batch)):
        for i in rows:
            alike = [float(q[b, i] @ k[b, j] / (q[b, i].norm() * k[b, j].norm())) for j in range(vit.tokens)]
            low, high = min(alike[vit.prefix :]), max(alike[vit.prefix :])
            for j in range(vit.prefix, vit.tokens):
                spatial = 1.0 if cosine == "none" else (alike[j] - low) / (high - low)
                found[b, j] += max(0.0, float((w[b, i] * spatial * v[b, j]).sum())) / len(rows)
    return vit.patches(found)


@pytest.mark.parametrize("family", ["vit", "vit-wide", "reg4-gap"])
@pytest.mark.parametrize("cosine", ["raw", "projected", "none"])
@pytest.mark.parametrize("layer", [-1, 1])
def test_literal(family: str, cosine: str, layer: int) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit)
    ours = maps(vit, batch, "grad-eclip", cosine=cosine, layer=layer)
    torch.testing.assert_close(ours, literal(vit, batch, layer, cosine=cosine), **CLOSE)


@pytest.mark.parametrize(("preset", "cosine"), [("code", "raw"), ("evaluation", "projected"), ("wo-ksim", "none")])
def test_the_authors_have_one_head(preset: str, cosine: str) -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    expected = literal(vit, batch, heads=1, cosine=cosine)
    torch.testing.assert_close(maps(vit, batch, "grad-eclip", preset=preset), expected, **CLOSE)
    assert (expected - literal(vit, batch, cosine=cosine)).abs().max() > 0.01


def test_the_class_is_the_models_own_prediction() -> None:
    """The score that is explained is that of one head; what is predicted, and told, is not."""
    vit = shared("vit", torch.float64)
    batch, targets = images(vit), Targets(torch.tensor(TARGETS)[:, None])
    job = LayerJob(grad_eclip, frozenset("qkv") | {"dO"}, (vit.depth - 1,))
    seen = run_pass(vit, batch, targets, jobs=[job], course=Course(one_head=True))
    torch.testing.assert_close(seen.logits, vit.logits(batch), **CLOSE)
    opened = Opened(vit, batch)
    x = opened.x
    for layer in range(vit.depth):
        opened.heads = vit.heads if layer < vit.depth - 1 else 1
        x = opened.block(layer, x)
    rewritten = opened.pooled(x).detach()
    torch.testing.assert_close(seen.scores, rewritten.gather(1, targets.index), **CLOSE)
    assert (seen.logits - rewritten).abs().max() > 0.1


def one_headed() -> Anatomy:
    import timm

    options = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 1, "num_classes": 7}
    return pl.wrap(randomise(timm.create_model("vit_tiny_patch16_224", **options)).double(), name="one head")


def test_a_model_of_one_head() -> None:
    """There `single` changes nothing, and without lambda it is attention's positive gradient; with four it is not."""
    vit = one_headed()
    batch = images(vit)
    torch.testing.assert_close(maps(vit, batch, "grad-eclip", heads="single"), maps(vit, batch, "grad-eclip"), **CLOSE)
    positive = maps(vit, batch, "attngrad", sign="relu")
    torch.testing.assert_close(maps(vit, batch, "grad-eclip", cosine="none"), positive, **CLOSE)
    vit = shared("vit", torch.float64)
    positive = maps(vit, batch, "attngrad", sign="relu") * vit.heads
    assert (maps(vit, batch, "grad-eclip", cosine="none") - positive).abs().max() > 0.1 * positive.max()


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("rule", ["plain", "libra", "attnlrp"])
def test_gradient_of_attention(family: str, rule: str) -> None:
    """sum_c w_c v_jc = sum_h G_h[i,j] on every family and under every rule; lambda and the ReLU commute."""
    vit = shared(family, torch.float64)
    batch, name = images(vit, 2), "" if rule == "plain" else f".{rule}"
    targets = Targets(torch.tensor([[0], [0]]))
    layers = (0, vit.depth - 1)
    ours = LayerJob(
        lambda b: (b.q, b.k, grad_eclip(b, cosine="none"), grad_eclip(b)), frozenset("qkv") | {"dO"}, layers
    )
    whole = LayerJob(lambda b: b.G.sum(1), frozenset({"A", "G"}), layers)
    backward = resolve(f"attngrad{name}").rule
    alone = run_pass(vit, batch, targets, "logit", backward, [ours])
    both = run_pass(vit, batch, targets, "logit", backward, [ours, whole])
    close = {"rtol": 1e-5, "atol": 1e-6} if family == "hf-vit-eager" else {"rtol": 1e-10, "atol": 1e-11}
    for layer in layers:
        G = both.at(layer, 1)
        for seen in (alone, both):
            q, k, bare, weighed = seen.at(layer)
            torch.testing.assert_close(bare, G.relu(), **close)
            flat = (t.transpose(1, 2).flatten(2) for t in (q, k))
            spatial = spatial_weights(*flat, slice(vit.prefix, None))
            patches = (spatial * G).relu()[..., vit.prefix :]  # lambda is negative at a prefix token, if anywhere
            torch.testing.assert_close(weighed[..., vit.prefix :], patches, **close)


@pytest.mark.parametrize("family", PLAIN)
def test_queries_and_keys_make_the_attention(family: str) -> None:
    """A = softmax(scale q k^T + bias): what is left between log A and q k^T is the same for every image."""
    vit = shared(family, torch.float64)
    both = LayerJob(lambda b: (b.q, b.k, b.A), frozenset("qkA"), (1,))
    light = LayerJob(lambda b: (b.q, b.k), frozenset("qk"), (1,))
    batch = images(vit, 2)
    q, k, A = run_pass(vit, batch, jobs=[both]).at(1)
    for one, other in zip((q, k), run_pass(vit, batch, jobs=[light]).at(1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    errors = []
    for scale in (1.0, q.shape[-1] ** -0.5):
        left = A.log() - scale * q @ k.mT
        left = left - left.mean(-1, keepdim=True)  # the log-sum-exp of each row
        errors.append(float((left - left[:1]).abs().max()))
    assert min(errors) < (1e-3 if family == "hf-vit-eager" else 1e-8), errors
    assert max(errors) > 0.1


def test_by_hand() -> None:
    q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[2.0, 1.0], [3.0, -1.0], [5.0, 0.0]]]], dtype=torch.float64)
    w = torch.tensor([[[[1.0, -1.0]]]], dtype=torch.float64)
    x = torch.zeros(1, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(
        spatial_weights(q[:, 0], k[:, 0], slice(None)), torch.tensor([[[1.0, 0.5, 0.0]]]).double()
    )
    found = grad_eclip(Evidence.of(x, q=q, k=k, v=v, dO=w))
    torch.testing.assert_close(found, torch.tensor([[[1.0, 2.0, 0.0]]]).double(), **CLOSE)
    assert not grad_eclip(Evidence.of(x, q=q, k=k, v=v, dO=-w)).any()


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(2, 3, 6, 4, generator=generator, dtype=torch.float64) for n in ("q", "k", "v", "dO")}


def test_what_scales() -> None:
    given, x = drawn(), torch.zeros(2, 6, 12, dtype=torch.float64)
    plain = grad_eclip(Evidence.of(x, prefix=1, **given))
    factor = torch.linspace(0.5, 3, 6, dtype=torch.float64).view(1, 1, -1, 1)
    for name in ("q", "k"):
        same = grad_eclip(Evidence.of(x, prefix=1, **{**given, name: given[name] * factor}))
        torch.testing.assert_close(same, plain, **CLOSE)
    columns = grad_eclip(Evidence.of(x, prefix=1, **{**given, "v": given["v"] * factor}))
    torch.testing.assert_close(columns, plain * factor.view(1, 1, -1), **CLOSE)
    heads = {name: value[:, torch.tensor([2, 0, 1])] for name, value in given.items()}
    torch.testing.assert_close(grad_eclip(Evidence.of(x, prefix=1, **heads)), plain, **CLOSE)


def test_patches_that_change_places() -> None:
    given, x = drawn(), torch.zeros(2, 6, 12, dtype=torch.float64)
    plain = grad_eclip(Evidence.of(x, prefix=1, **given))
    order = torch.tensor([0, 4, 2, 5, 1, 3])
    moved = grad_eclip(Evidence.of(x, prefix=1, **{name: value[:, :, order] for name, value in given.items()}))
    torch.testing.assert_close(moved, plain[:, order][:, :, order], **CLOSE)


def test_lambda_lies_between_zero_and_one_on_the_patches() -> None:
    given = drawn()
    spatial = spatial_weights(given["q"][:, 0], given["k"][:, 0], slice(2, None))[..., 2:]
    assert torch.equal(spatial.amin(-1), torch.zeros(2, 6).double())
    torch.testing.assert_close(spatial.amax(-1), torch.ones(2, 6).double())


def test_keys_that_are_alike_are_reported() -> None:
    vit = build("vit")
    width = vit.width
    with torch.no_grad():
        qkv = vit.model.blocks[-1].attn.qkv  # type: ignore[index,union-attr]
        qkv.weight[width : 2 * width] = 0
        qkv.bias[width : 2 * width] = 0
    batch = images(vit)
    with pytest.warns(DegenerateMap, match="all keys are equally similar"):
        assert not maps(vit, batch, "grad-eclip").any()
    assert maps(vit, batch, "grad-eclip", cosine="none").any()


def test_the_pooler() -> None:
    """Ours: H_j = lambda_j ReLU(sum_h G_pool[h,0,j]), of the pooling's own query, keys and values."""
    vit = shared("siglip", torch.float64)
    batch = images(vit)
    net: Any = vit.model
    pool = net.attn_pool
    tokens = net.norm(vit.run(vit.embed(batch)))
    q = pool.q(pool.latent).expand(len(batch), -1, -1).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)
    k, v = pool.kv(tokens).unflatten(-1, (2, pool.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k = pool.q_norm(q), pool.k_norm(k)
    A = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).detach().requires_grad_()
    o = pool.proj((A @ v).transpose(1, 2).flatten(2))
    logits = net.head(net.fc_norm((o + pool.mlp(pool.norm(o)))[:, 0]))
    (G,) = torch.autograd.grad(sum(logits[b, TARGETS[b]] for b in range(len(batch))), A)
    alike = F.cosine_similarity(q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2), -1)
    low, high = alike.amin(1, keepdim=True), alike.amax(1, keepdim=True)
    expected = vit.patches((alike - low) / (high - low) * G[:, :, 0].sum(1).relu())
    torch.testing.assert_close(maps(vit, batch, "grad-eclip"), expected, **CLOSE)
    block = maps(vit, batch, "grad-eclip", attention="block")
    assert (block - expected).abs().max() > 0.01
    torch.testing.assert_close(block, maps(vit, batch, "grad-eclip", attention="block", layer=vit.depth - 1))


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("vit", {"heads": "single", "layer": 0}, "applies to the last block only"),
        ("reg4-gap", {"heads": "single"}, "CLS pooling, which reg4-gap is not"),
        ("siglip", {"cosine": "projected"}, "no readable output projection"),
        ("vit", {"attention": "pooler"}, "has cls pooling and no pooler"),
        ("siglip", {"attention": "pooler", "layer": 0}, "follows the last block"),
        ("swin", {}, "reads the values of all tokens together"),
    ],
)
def test_refusals(family: str, settings: dict[str, Any], told: str) -> None:
    vit = shared(family)
    with pytest.raises(Unsupported, match=told):
        pl.explain(vit, images(vit, 1), "grad-eclip", **settings)


def test_asked_with_others_each_keeps_its_course() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    asked = {
        "grad-eclip": {},
        "one": {"method": "grad-eclip", "preset": "code"},
        "legrad": {},
        "rawatt": {},
        "genatt": {},
        "cls": {"method": "legrad", "readout": "cls"},
    }
    together = pl.explain(vit, batch, asked, target=TARGETS, progress=False)
    for label, settings in asked.items():
        name = settings.get("method", label)
        own = {key: value for key, value in settings.items() if key != "method"}
        alone = pl.explain(vit, batch, name, target=TARGETS, progress=False, **own)
        torch.testing.assert_close(together[label].scores, alone.scores, rtol=1e-6, atol=1e-8)
