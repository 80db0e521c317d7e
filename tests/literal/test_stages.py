"""Hierarchical models, looked into: rows through windows, shifts, pooled keys and merging against dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.windows import Grid, Merging, Windows
from patchlight.core.targets import Targets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.runner import FEATURES, LayerJob
from tests.completeness import totals
from tests.families import CLASSES, images, randomise
from tests.literal.plain import maps
from tests.literal.stages import Written, children

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
TARGETS = [3, 5]
_TWO = {"depths": (2, 2), "num_heads": (2, 4), "num_classes": CLASSES}


def _swin(name: str = "swin_tiny_patch4_window7_224", **about: Any) -> nn.Module:
    return timm.create_model(name, **{"img_size": 32, "window_size": 4, "embed_dim": 16, **_TWO, **about})


def _pooling(name: str, **about: Any) -> nn.Module:
    about = {"embed_dims": (16, 24), "sr_ratios": (2, 1), "mlp_ratios": (2, 2), **_TWO, **about}
    return timm.create_model(name, pretrained_cfg_overlay={"input_size": (3, 32, 32)}, **about)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swin": lambda: _swin(window_size=2),
    "swin-padded": lambda: _swin(img_size=(40, 24)),
    "swin-always": lambda: _swin(img_size=24, always_partition=True),
    "swin-fused": lambda: _fused(_swin()),
    "swinv2": lambda: _swin("swinv2_tiny_window8_256", window_size=2),
    "pvtv2": lambda: _pooling("pvt_v2_b0"),
    "pvtv2-linear": lambda: _pooling("pvt_v2_b2_li"),
    "twins": lambda: _pooling("twins_svt_small", img_size=32, wss=(3, 2)),
    "twins-pcpvt": lambda: _pooling("twins_pcpvt_small", img_size=32),
}


def _fused(model: Any) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return model


@cache
def opened(name: str, stage: int = 0) -> Anatomy:
    torch.manual_seed(0)
    return pl.wrap(randomise(MODELS[name]()).double(), name=name, stage=stage)


@cache
def written(name: str, stage: int = 0) -> tuple[Written, ...]:
    vit = opened(name, stage)
    return tuple(Written(vit.model, image, c, stage) for image, c in zip(images(vit, 2), TARGETS, strict=True))


def compared(name: str, stage: int, method: str, literal: Callable[[Written], Tensor], **settings: Any) -> None:
    vit = opened(name, stage)
    found = maps(vit, images(vit, 2), method, TARGETS, **settings)
    expected = torch.stack([literal(w).detach().view(vit.grid) for w in written(name, stage)])
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, **CLOSE)


EVERY = [(name, stage) for name in MODELS for stage in (0, 1)]
each = pytest.mark.parametrize(("name", "stage"), EVERY)


@each
def test_the_written_model_is_the_model(name: str, stage: int) -> None:
    vit = opened(name, stage)
    logits = vit.logits(images(vit, 2))
    for b, seen in enumerate(written(name, stage)):
        torch.testing.assert_close(seen.logits, logits[b], **CLOSE)
        assert len(seen.blocks) == vit.depth
    assert any(any(m.shift_size) for m in vit.model.modules() if hasattr(m, "shift_size")) == name.startswith("swin")


@each
def test_evidence_is_what_dense_matrices_are(name: str, stage: int) -> None:
    """A, G where A is not zero, and the gradients of tokens entering and leaving every block."""
    vit = opened(name, stage)
    job = LayerJob(lambda b: (b.A, b.AG, b.g, b.gy), frozenset({"A", "G", "g", "gy"}), tuple(range(vit.depth)))
    seen = run_pass(vit, images(vit, 2), Targets(torch.tensor(TARGETS)[:, None]), jobs=[job])
    for b, w in enumerate(written(name, stage)):
        for layer, block in enumerate(w.blocks):
            A, AG, g, gy = (part[b] for part in seen.at(layer))
            torch.testing.assert_close(A, block.A.detach() @ block.P, **CLOSE)
            torch.testing.assert_close(AG, (block.A.detach() * block.G) @ block.P, **CLOSE)
            torch.testing.assert_close(g, block.x.grad, **CLOSE)
            torch.testing.assert_close(gy, block.y.grad, **CLOSE)


@each
def test_rawatt(name: str, stage: int) -> None:
    for layer in (-1, 0):
        index = layer % len(written(name, stage)[0].blocks)
        compared(
            name,
            stage,
            "rawatt",
            lambda w, i=index: w.lifted(w.row_at(i) @ w.blocks[i].mean, i),
            layer=layer,
        )


@each
def test_rollout(name: str, stage: int) -> None:
    def literal(w: Written) -> Tensor:
        matrices = [b.mean + torch.eye(len(b.x), dtype=torch.float64) for b in w.blocks]
        return w.product([m / m.sum(1, keepdim=True) for m in matrices])

    compared(name, stage, "rollout", literal)


@pytest.mark.parametrize("name", MODELS)
def test_rollout_keeps_the_mass_of_its_row(name: str) -> None:
    vit = opened(name)
    total = maps(vit, images(vit, 2), "rollout").sum((1, 2))
    torch.testing.assert_close(total, torch.ones_like(total), **CLOSE)


@each
def test_genatt(name: str, stage: int) -> None:
    def literal(w: Written) -> Tensor:
        return w.product([torch.eye(len(b.x), dtype=torch.float64) + b.positive for b in w.blocks])

    compared(name, stage, "genatt", literal)


@each
def test_sums_over_blocks(name: str, stage: int) -> None:
    def gradsam(w: Written) -> Tensor:
        return sum(w.lifted(w.row_at(i) @ b.positive, i) for i, b in enumerate(w.blocks))  # type: ignore[return-value]

    def attcat(w: Written) -> Tensor:
        terms = [b.mean.mean(0) * (b.x * b.x.grad).sum(1) for b in w.blocks]
        return sum(w.lifted(term, i) for i, term in enumerate(terms))  # type: ignore[return-value]

    def attcat_code(w: Written) -> Tensor:
        terms = [b.mean.mean(0) * (b.y * b.y.grad).sum(1) for b in w.blocks[:-1]]
        return sum(w.lifted(term, i) for i, term in enumerate(terms))  # type: ignore[return-value]

    def cat(w: Written) -> Tensor:
        return sum(w.lifted((b.x * b.x.grad).sum(1), i) for i, b in enumerate(w.blocks))  # type: ignore[return-value]

    compared(name, stage, "genatt.plus", gradsam)
    compared(name, stage, "gradsam", gradsam)
    compared(name, stage, "attcat", attcat)
    compared(name, stage, "attcat", attcat_code, preset="skipplus-code")
    compared(name, stage, "ixg.plus", cat)
    half = -(-len(written(name, stage)[0].blocks) // 2)
    compared(
        name,
        stage,
        "ixg.skipplus",
        lambda w: sum(w.lifted((b.x * b.x.grad).sum(1), i) for i, b in list(enumerate(w.blocks))[half:]),
    )
    compared(name, stage, "ixg", lambda w: (w.blocks[0].x * w.blocks[0].x.grad).sum(1))


@each
def test_other_matrices(name: str, stage: int) -> None:
    """Signed and absolute gradients of attention, heads fused by their largest, and heads weighted by theirs."""

    def attcam(w: Written) -> Tensor:
        last = w.blocks[-1]
        seen = (last.A.detach() > 0).double()
        pooled = (last.P > 0).double()  # a gradient is that of every token a key is made of
        total = (last.G * seen) @ pooled
        weights = total.sum(-1) / (seen @ pooled).sum(-1)
        return w.lifted(w.row @ ((weights[..., None] * last.A.detach()).mean(0) @ last.P), len(w.blocks) - 1)

    def attngrad(w: Written) -> Tensor:
        last = w.blocks[-1]
        G = (last.G * (last.A.detach() > 0)).abs() @ (last.P > 0).double()
        return w.lifted(w.row @ G.mean(0), len(w.blocks) - 1)

    def largest(w: Written) -> Tensor:
        matrices = [(b.A.detach() @ b.P).amax(0) + torch.eye(len(b.x), dtype=torch.float64) for b in w.blocks]
        return w.product([m / m.sum(1, keepdim=True) for m in matrices])

    compared(name, stage, "attcam", attcam, preset="skipplus")
    compared(name, stage, "attngrad", attngrad, sign="abs")
    compared(name, stage, "rollout", largest, fusion="max")


def _weight(before: Tensor, after: Tensor) -> Tensor:
    """w [N] of TokenTM."""
    cosine = torch.stack([a @ b / (a.norm() * b.norm()) for a, b in zip(before, after, strict=True)])
    length = torch.stack([b.norm() / a.norm() for a, b in zip(before, after, strict=True)])
    return length * cosine.exp() / cosine.exp().sum()


@pytest.mark.parametrize(
    ("name", "stage"), [pair for pair in EVERY if pair[0].startswith("swin-") or pair[0] == "swin"]
)
def test_tokentm(name: str, stage: int) -> None:
    def literal(w: Written) -> Tensor:
        matrices = []
        for b in w.blocks:
            x, y = b.x.detach(), b.y.detach()
            count, eye = b.module.attn.num_heads, torch.eye(len(b.x), dtype=torch.float64)
            width = x.shape[1] // count
            update = torch.zeros_like(eye)
            for h in range(count):
                cut = slice(h * width, (h + 1) * width)
                value = b.module.attn.qkv.weight.detach()[2 * x.shape[1] :][cut]
                image = x @ value.T @ b.module.attn.proj.weight.detach()[:, cut].T
                head = b.G[h].clamp(min=0) * b.A.detach()[h]
                update += head @ b.P @ torch.diag(_weight(x, image)) / count
            ffn = eye + torch.diag(_weight(b.u, y - b.u))
            matrices.append(ffn @ (eye + update))
        return w.product(matrices) * w.blocks[0].x.detach().norm(dim=1)

    compared(name, stage, "tokentm", literal)


@pytest.mark.parametrize("rule", ["libra", "conservative", "attnlrp"])
def test_rules_change_the_gradients_alone(rule: str) -> None:
    """Row methods under a rule are those of its G, which `trace` shows."""
    vit = opened("swin")
    batch = images(vit, 2)
    with pl.trace(vit, batch, target=TARGETS, rule=rule) as t:
        row = torch.full((2, 16), 1 / 16, dtype=torch.float64)
        for layer in reversed(range(4)):
            if layer == 1:
                row = row @ children((8, 8), (4, 4), 2, 2, 0)
            matrix = (t.attention[layer] * t.attention_gradients[layer]).relu().mean(1)
            row = row + (row[:, None] @ matrix)[:, 0]
    torch.testing.assert_close(maps(vit, batch, f"genatt.{rule}", TARGETS), row.view(2, 8, 8), **CLOSE)
    assert (maps(vit, batch, "genatt", TARGETS) - row.view(2, 8, 8)).abs().max() > 1e-4


@each
def test_libra_is_complete_from_every_block(name: str, stage: int) -> None:
    vit = opened(name, stage)
    batch = images(vit, 2)
    found, scores = totals(vit, batch, targets=Targets(torch.tensor(TARGETS)[:, None]))
    assert found.shape == (vit.depth, 2)
    torch.testing.assert_close(found, scores, rtol=1e-11, atol=1e-11)
    plain, _ = totals(vit, batch, "plain", Targets(torch.tensor(TARGETS)[:, None]))
    assert (plain - scores).abs().max() > 1e-2, "the rule makes no difference"


@pytest.mark.parametrize("name", MODELS)
def test_the_map_and_its_biases_are_the_logit(name: str) -> None:
    """FullGrad's map under libra sums to the logit, up to what the head adds behind the pooling."""
    vit = opened(name)
    batch = images(vit, 2)
    head: Any = getattr(vit.model.head, "fc", vit.model.head)
    whole = maps(vit, batch, "fullgrad.libra", TARGETS).sum((1, 2)) + head.bias.detach()[TARGETS]
    torch.testing.assert_close(whole, vit.logits(batch)[torch.arange(2), TARGETS], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
def test_the_feature_map_is_that_behind_the_stage(name: str) -> None:
    """With evidence of blocks before and behind it, and by itself."""
    vit = opened(name)
    batch = images(vit, 2)
    targets = Targets(torch.tensor(TARGETS)[:, None])
    tokens = vit.run(vit.embed(batch), stop=2).detach().requires_grad_()
    logits = vit.readout(vit.run(tokens, start=2))
    (expected,) = torch.autograd.grad(logits.gather(1, targets.index).sum(), tokens)
    features = LayerJob(lambda b: (b.x, b.g), frozenset({"x", "g"}), (FEATURES,))
    for others in ((), (0,), (2,), (1, 3)):
        block = LayerJob(lambda b: b.g, frozenset({"g"}), others)
        seen = run_pass(vit, batch, targets, jobs=[features, block] if others else [features])
        x, g = seen.at(FEATURES)
        torch.testing.assert_close(x, tokens.detach(), **CLOSE)
        torch.testing.assert_close(g, expected, **CLOSE)
        for layer in others:
            for b, w in enumerate(written(name)):
                torch.testing.assert_close(seen.at(layer, 1)[b], w.blocks[layer].x.grad, **CLOSE)


def test_several_classes_and_rules_at_once() -> None:
    vit = opened("swin")
    batch = images(vit, 2)
    both = pl.explain(vit, batch, ["genatt", "ixg.libra", "gradcam", "fullgrad-plus"], target=[[3, 5], [3, 5]])
    for name, found in both.items():
        for t, c in enumerate((3, 5)):
            alone = pl.explain(vit, batch, name, target=c).scores
            torch.testing.assert_close(found.scores[:, t], alone, rtol=1e-5, atol=1e-7)


def test_merging_splits_alike_and_keeps_the_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    for fine, coarse, *shape in (((6, 4), (3, 2), 2, 2, 0), ((5, 7), (3, 4), 2, 2, 0), ((5, 8), (3, 4), 3, 2, 1)):
        row = torch.randn(2, coarse[0] * coarse[1], generator=generator, dtype=torch.float64)
        found = Merging(fine, coarse, *shape).pull(row)
        torch.testing.assert_close(found, row @ children(fine, coarse, *shape), **CLOSE)
        torch.testing.assert_close(found.sum(1), row.sum(1), **CLOSE)
    floored = Merging((7, 5), (3, 2), 2, 2).pull(torch.ones(1, 6)).view(7, 5)
    assert bool((floored[6] == 0).all() and (floored[:, 4] == 0).all() and (floored[:6, :4] == 0.25).all())


def _tiled(grid: Grid, window: Grid, shift: Grid) -> Windows:
    """Windows that tile a grid rolled by `shift` to the top left, padded at the bottom and on the right."""
    slots = torch.arange(grid[0] * grid[1]).view(grid).roll((-shift[0], -shift[1]), (0, 1))
    slots = torch.nn.functional.pad(slots, (0, -grid[1] % window[1], 0, -grid[0] % window[0]), value=-1)
    return Windows(slots.unfold(0, window[0], window[0]).unfold(1, window[1], window[1]).flatten(2).flatten(0, 1))


def test_values_in_windows_find_their_tokens() -> None:
    for grid, window, shift in (((4, 6), (2, 3), (1, 1)), ((5, 7), (4, 4), (2, 0))):
        windows = _tiled(grid, window, shift)
        values = torch.randn(3, windows.tokens)
        torch.testing.assert_close(windows.pull(windows.queries(values)), values)
        padded = torch.rand(3 * windows.shape[0], windows.shape[1])
        torch.testing.assert_close(windows.per_token(padded, 3).sum(1), padded.view(3, -1).sum(1))
