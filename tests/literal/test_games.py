"""Token games, written slowly in float64: Shapley values by enumeration, AtMan's loop over patches, HSIC's matrices."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.watching import Unseen
from patchlight.core.errors import DegenerateMap
from patchlight.core.layout import Layout
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Ablation
from patchlight.evidence.coalitions import draw_coalitions
from patchlight.evidence.rules import RULES
from patchlight.methods import shapley
from patchlight.methods.atman import Suppress, Suppressed, suppression
from patchlight.methods.base import Ask
from patchlight.methods.hsic import draw_masks, hsic_of
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from patchlight.methods.shapley import constrained_values, score_coalitions
from tests.close import near, within
from tests.families import CLASSES, build, images, randomise, shared

CLOSE = {"atol": 1e-10, "rtol": 1e-10}
PLAYERS = 6


def maps(vit: Anatomy, batch: Tensor, name: str, targets: Targets | None = None, seed: int = 0, **given: Any) -> Tensor:
    return compute(vit, batch, [resolve(name, given)], targets, seed)[1][0]


def all_coalitions() -> tuple[Tensor, Tensor]:
    """Every proper coalition of six players and its Shapley kernel weight (d - 1) / (C(d,k) k (d - k))."""
    rows, weights = [], []
    for k in range(1, PLAYERS):
        for members in combinations(range(PLAYERS), k):
            rows.append([i in members for i in range(PLAYERS)])
            weights.append((PLAYERS - 1) / (math.comb(PLAYERS, k) * k * (PLAYERS - k)))
    return torch.tensor(rows), torch.tensor(weights, dtype=torch.float64)


def bits(number: Tensor) -> Tensor:
    """The coalition [n,d] that each number [n] stands for."""
    return (number[:, None] >> torch.arange(PLAYERS)) % 2 == 1


def key(z: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in z.nonzero()[:, 0])


def random_game(seed: int) -> dict[tuple[int, ...], float]:
    generator = np.random.default_rng(seed)
    subsets = [s for k in range(PLAYERS + 1) for s in combinations(range(PLAYERS), k)]
    return {s: float(generator.normal()) for s in subsets}


def by_permutations(game: dict[tuple[int, ...], float]) -> Tensor:
    """The mean gain of each player over all orders of entry."""
    value = [0.0] * PLAYERS
    for order in permutations(range(PLAYERS)):
        for at, player in enumerate(order):
            before = tuple(sorted(order[:at]))
            value[player] += game[tuple(sorted((*before, player)))] - game[before]
    return torch.tensor(value, dtype=torch.float64) / math.factorial(PLAYERS)


def by_least_squares(game: dict[tuple[int, ...], float]) -> Tensor:
    z, weight = all_coalitions()
    gain = torch.tensor([game[key(row)] - game[()] for row in z], dtype=torch.float64)
    total = torch.tensor([game[tuple(range(PLAYERS))] - game[()]], dtype=torch.float64)
    return constrained_values(z, gain[:, None], total, weight)[:, 0]


def test_all_coalitions_give_the_shapley_values() -> None:
    for seed in range(2):
        game = random_game(seed)
        torch.testing.assert_close(by_least_squares(game), by_permutations(game), atol=1e-13, rtol=0)


def test_the_axioms() -> None:
    one, two = random_game(3), random_game(4)
    mixed = {s: 2 * one[s] - 3 * two[s] for s in one}
    expected = 2 * by_least_squares(one) - 3 * by_least_squares(two)
    torch.testing.assert_close(by_least_squares(mixed), expected, atol=1e-12, rtol=0)
    assert float(by_least_squares(one).sum()) == pytest.approx(one[tuple(range(PLAYERS))] - one[()], abs=1e-12)
    null = {s: one[tuple(i for i in s if i != 2)] for s in one}
    within(abs(float(by_least_squares(null)[2])), 1e-12)
    swap = {0: 1, 1: 0}
    alike = {s: one[s] + one[tuple(sorted(swap.get(i, i) for i in s))] for s in one}
    values = by_least_squares(alike)
    assert float(values[0]) == pytest.approx(float(values[1]), abs=1e-12)


def test_sampled_coalitions_are_the_kernel_and_an_additive_game_is_exact() -> None:
    z = draw_coalitions(1_000_000, PLAYERS, torch.Generator().manual_seed(0))
    assert torch.equal(z[::2], ~z[1::2])
    assert float(z.sum(1).double().mean()) == PLAYERS / 2, "antithetic pairs have d / 2 members on average, exactly"
    found = torch.bincount(z.sum(1), minlength=PLAYERS + 1).double() / len(z)
    size = torch.arange(1, PLAYERS)
    expected = F.normalize(1 / (size * (PLAYERS - size)).double(), 1, 0)
    torch.testing.assert_close(found[1:-1], expected, atol=0.01, rtol=0)
    singles = z[z.sum(1) == 1].double().mean(0)
    torch.testing.assert_close(singles, torch.full_like(singles, 1 / PLAYERS), atol=0.02, rtol=0)
    worth = torch.randn(PLAYERS, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    few = z[:60]
    torch.testing.assert_close(constrained_values(few, few.double() @ worth, worth.sum(0)), worth, atol=1e-12, rtol=0)
    game = random_game(5)
    worths = torch.tensor([game[key(row)] - game[()] for row in bits(torch.arange(2**PLAYERS))], dtype=torch.float64)
    gain = worths[(z * 2 ** torch.arange(PLAYERS)).sum(1), None]
    near(constrained_values(z, gain, worths[-1:])[:, 0], by_permutations(game), 0.05)


def test_fewer_coalitions_than_players_still_share_everything() -> None:
    z = draw_coalitions(8, 16, torch.Generator().manual_seed(0))
    gain = torch.randn(8, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = constrained_values(z, gain, torch.tensor([0.7]))
    assert float(values.sum()) == pytest.approx(0.7, abs=1e-6)
    vit = shared("vit")
    with pytest.warns(DegenerateMap, match="8 coalitions are too few for 16 patches"):
        pl.explain(vit, images(vit, 1), "kernel-shap", samples=8)


def small() -> Anatomy:
    """Six patches: 2 rows of 3."""
    torch.manual_seed(0)
    options = {"img_size": (32, 48), "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": CLASSES}
    return pl.wrap(randomise(timm.create_model("vit_tiny_patch16_224", **options)).double(), name="small")


def drop_value(vit: Anatomy, image: Tensor, members: tuple[int, ...], target: int) -> float:
    with torch.no_grad():
        tokens = vit.run(vit.embed(image[None]), keep=torch.tensor([members], dtype=torch.long))
        return float(vit.readout(tokens).softmax(1)[0, target])


def fill_value(vit: Anatomy, image: Tensor, members: tuple[int, ...], target: int) -> float:
    shown = torch.full_like(image, 0.3)
    for i in members:
        row, column = divmod(i, vit.grid[1])
        at = (slice(None), slice(16 * row, 16 * row + 16), slice(16 * column, 16 * column + 16))
        shown[at] = image[at]
    return float(vit.logits(shown[None]).softmax(1)[0, target])


@pytest.mark.parametrize(("unit", "value"), [("token", drop_value), ("patch", fill_value)])
def test_kernel_shap_is_a_constrained_regression(unit: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same coalitions one by one, and the Lagrangian's linear system; efficiency; given every coalition as often as
    the kernel weighs it, Shapley's values by enumeration."""
    vit = small()
    batch = images(vit, 2)
    targets = Targets(torch.tensor([[0, 3], [5, 1]]), several=True)
    found = maps(vit, batch, "kernel-shap", targets, seed=2, samples=61, unit=unit, fill=0.3).flatten(2)
    rows, weight = all_coalitions()
    each = rows.repeat_interleave((72 * weight).round().long(), 0)
    monkeypatch.setattr(shapley, "draw_coalitions", lambda n, players, generator: each)
    enumerated = maps(vit, batch, "kernel-shap", targets, samples=len(each), unit=unit, fill=0.3).flatten(2)
    z = draw_coalitions(61, 6, torch.Generator().manual_seed(2))
    everyone = [s for k in range(7) for s in combinations(range(6), k)]
    for b in range(2):
        for t in range(2):
            game = {s: value(vit, batch[b], s, int(targets.index[b, t])) for s in everyone}
            total = game[tuple(range(6))] - game[()]
            normal, right = np.zeros((7, 7)), np.zeros(7)
            for row in z.numpy():
                normal[:6, :6] += np.outer(row, row)
                right[:6] += row * (game[tuple(np.flatnonzero(row).tolist())] - game[()])
            normal[:6, 6] = normal[6, :6] = 1
            right[6] = total
            expected = torch.from_numpy(np.linalg.solve(normal, right)[:6])
            torch.testing.assert_close(found[b, t], expected, **CLOSE)
            assert float(found[b, t].sum()) == pytest.approx(total, abs=1e-12)
            torch.testing.assert_close(enumerated[b, t], by_permutations(game), **CLOSE)


def cls_pooled(family: str) -> Anatomy:
    if family not in ("beit", "eva02"):
        return shared(family, torch.float64)
    name = {"beit": "beit_base_patch16_224", "eva02": "eva02_tiny_patch14_224"}[family]
    torch.manual_seed(0)
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": CLASSES}
    return pl.wrap(randomise(timm.create_model(name, global_pool="token", **sizes)).double(), name=family)


@pytest.mark.parametrize(
    "family",
    ["vit", "vit-unfused", "beit", "eva02", "deit-distilled", "hf-vit-eager", "torchvision"],
)
def test_hiding_what_pads_a_coalition_is_dropping_it(family: str) -> None:
    vit = cls_pooled(family)
    batch = images(vit, 2)
    ask = Ask(vit, batch, Targets(torch.tensor([[0, 1], [2, 3]])), "logit", 0, RULES["plain"])
    z = draw_coalitions(31, 16, torch.Generator().manual_seed(0))
    z = torch.cat([z, torch.zeros_like(z[:1]), torch.ones_like(z[:1])])
    dropped = score_coalitions(ask, z, lengths=16)
    tolerance = 1e-5 if "eager" in family else 1e-10
    torch.testing.assert_close(score_coalitions(ask, z, lengths=3), dropped, atol=tolerance, rtol=0)
    torch.testing.assert_close(score_coalitions(ask, z, lengths=1), dropped, atol=tolerance, rtol=0)
    torch.testing.assert_close(dropped[:, -1], vit.logits(batch).gather(1, ask.targets.index), atol=tolerance, rtol=0)
    members = z[4].nonzero()[:, 0].expand(2, -1)
    with torch.no_grad():
        alone = vit.readout(vit.run(vit.embed(batch), keep=members)).gather(1, ask.targets.index)
    torch.testing.assert_close(dropped[:, 4], alone, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float64])
def test_hidden_keys_stay_hidden_beside_a_mask_of_the_model(kind: torch.dtype | None) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = torch.tensor([[True, True, False, True, True], [True, False, True, True, False]])
    own = torch.tensor([True, True, True, True, False]).expand(2, 1, 5, 5)
    mask = (
        None if kind is None else own if kind == torch.bool else torch.zeros(2, 1, 5, 5).double().masked_fill(~own, -9)
    )
    hidden = ~seen[:, None, None]
    with Unseen(seen):
        found = F.scaled_dot_product_attention(q, k, v, mask)
    scores = q @ k.mT / math.sqrt(6)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if kind == torch.bool else scores + mask
    near(found, scores.masked_fill(hidden, -math.inf).softmax(-1) @ v, 1e-12)


def test_the_empty_coalition_is_the_prefix_tokens_or_the_fill() -> None:
    auto = maps(shared("vit"), images(shared("vit")), "kernel-shap", samples=40)
    torch.testing.assert_close(
        auto, maps(shared("vit"), images(shared("vit")), "kernel-shap", samples=40, unit="token")
    )
    for family in ("siglip", "reg4-gap", "hf-dinov2"):
        vit = shared(family)
        auto = maps(vit, images(vit), "kernel-shap", samples=40)
        torch.testing.assert_close(auto, maps(vit, images(vit), "kernel-shap", samples=40, unit="patch"))
        with pytest.raises(pl.Unsupported, match="the empty coalition has no score; unit='patch' works"):
            pl.explain(vit, images(vit), "kernel-shap", unit="token")


def plain_block(vit: Anatomy, index: int, x: Tensor, factors: Tensor, offset: bool) -> Tensor:
    """One block of a plain ViT on one image [N,D], its attention scores scaled by key."""
    block: Any = vit.blocks[index]
    q, k, v = F.linear(block.norm1(x), block.attn.qkv.weight, block.attn.qkv.bias).chunk(3, -1)
    heads = []
    for qh, kh, vh in zip(q.chunk(vit.heads, -1), k.chunk(vit.heads, -1), v.chunk(vit.heads, -1), strict=True):
        H = qh @ kh.T / math.sqrt(qh.shape[-1])
        if offset:
            H = H - H.min(dim=1, keepdim=True).values
        heads.append((H * factors[None, :]).softmax(-1) @ vh)
    x = x + block.attn.proj(torch.cat(heads, -1))
    return x + block.mlp(block.norm2(x))


@pytest.mark.parametrize("offset", ["min", "none"])
@pytest.mark.parametrize("neighbours", [None, 2])
def test_atman_patch_by_patch(offset: str, neighbours: int | None) -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    factor, kappa = 0.2, 0.3
    targets = Targets(torch.tensor([[0, 3], [5, 1]]), several=True)
    given = {"factor": factor, "kappa": kappa, "offset": offset, "neighbours": neighbours, "chunk": 7}
    found = maps(vit, batch, "atman", targets, **given).flatten(2)

    def log_p(x: Tensor, factors: Tensor) -> Tensor:
        for index in range(vit.depth):
            x = plain_block(vit, index, x, factors, offset == "min")
        return vit.readout(x[None]).log_softmax(1)[0]

    several = 0
    with torch.no_grad():
        for b in range(2):
            e = vit.embed(batch[b : b + 1])[0]
            clean = vit.logits(batch[b : b + 1]).log_softmax(1)[0]
            for i in range(16):
                factors = torch.ones(17, dtype=torch.float64)
                others = [(float(F.cosine_similarity(e[1 + i], e[1 + k], dim=0)), k) for k in range(16) if k != i]
                chosen = sorted((o for o in others if o[0] >= kappa), reverse=True)[:neighbours]
                several += len(chosen)
                for c, k in chosen:
                    factors[1 + k] = (1 - factor) * (1 - c) + factor
                factors[1 + i] = factor
                expected = (clean - log_p(e, factors))[targets.index[b]]
                torch.testing.assert_close(found[b, :, i], expected, **CLOSE)
    assert several > 8, "no patch has neighbours, so their factors are not tested"


@pytest.mark.parametrize("family", ["vit", "vit-unfused", "beit", "eva02", "siglip", "hf-siglip", "torchvision"])
def test_a_factor_of_one_suppresses_nothing(family: str) -> None:
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    with pytest.warns(DegenerateMap, match="a factor of 1 suppresses nothing"):
        nothing = maps(vit, batch, "atman", factor=1.0, kappa=0.5)
    within(float(nothing.abs().max()), 1e-12)
    ones = torch.ones(2, vit.tokens, dtype=torch.float64)
    for offset in ("min", "none"):
        found = Ablation(vit, batch).logits(Suppressed(torch.arange(2), ones, offset))
        torch.testing.assert_close(found, vit.logits(batch), **CLOSE)
    assert float(maps(vit, batch, "atman", factor=0.1, kappa=2.0).abs().max()) > 1e-4


@pytest.mark.parametrize("family", ["vit-unfused", "beit", "hf-vit-eager", "torchvision", "eva02"])
def test_every_kind_of_attention_is_suppressed_alike(family: str) -> None:
    """One factor for all keys: the offset cancels in the softmax. At factor 0 attention is even; the block differs."""
    vit = shared(family, torch.float64)
    tokens = vit.embed(images(vit, 1))
    factors = torch.zeros(1, vit.tokens, dtype=torch.float64)
    with torch.no_grad(), Suppress(factors, "min"):
        even = vit.block(0, tokens)
    with torch.no_grad(), Suppress(torch.full_like(factors, 0.5), "min"):
        halved = vit.block(0, tokens)
    with torch.no_grad(), Suppress(torch.full_like(factors, 0.5), "none"):
        unshifted = vit.block(0, tokens)
    torch.testing.assert_close(halved, unshifted, atol=1e-5 if "eager" in family else 1e-10, rtol=0)
    assert (even - vit.block(0, tokens)).abs().max() > 1e-3
    assert (halved - even).abs().max() > 1e-4


def test_neighbours_have_the_cards_factors() -> None:
    e = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 1.0], [-1.0, 0.0]]])
    rows = suppression(e, Layout((e.shape[1] - 1,), 1, axes=("place",)), 0.1, 0.0, None)[0]
    half = 0.9 * (1 - math.sqrt(0.5)) + 0.1
    torch.testing.assert_close(rows[0], torch.tensor([1, 0.1, 0.1, half, 1, 1], dtype=torch.float64))
    only = suppression(e, Layout((e.shape[1] - 1,), 1, axes=("place",)), 0.1, 1.1, None)[0]
    torch.testing.assert_close(only[:, 1:], torch.eye(5, dtype=torch.float64) * -0.9 + 1)
    first = suppression(e, Layout((e.shape[1] - 1,), 1, axes=("place",)), 0.1, 0.0, 1)[0]
    torch.testing.assert_close(first[0], torch.tensor([1, 0.1, 0.1, 1, 1, 1], dtype=torch.float64))


def test_atman_is_not_dropping_and_logits_fall_as_asked() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 1)
    target = Targets(torch.tensor([[2]]))
    logit = maps(vit, batch, "atman", target, kappa=2.0, factor=0.0, score="logit").flatten()
    keep = torch.arange(1, 16)[None]
    with torch.no_grad():
        dropped = vit.logits(batch)[0, 2] - vit.readout(vit.run(vit.embed(batch), keep=keep))[0, 2]
    assert abs(float(logit[0] - dropped)) > 1e-4
    pair = Targets(torch.tensor([[2]]), torch.tensor([[4]]))
    odds = maps(vit, batch, "atman", pair)
    torch.testing.assert_close(odds, maps(vit, batch, "atman", pair, score="logit"), **CLOSE)
    binary = shared("vit-binary", torch.float64)
    one, zero = (maps(binary, batch, "atman", Targets(torch.tensor([[c]]))) for c in (1, 0))
    shared_odds = maps(binary, batch, "atman", Targets(torch.tensor([[1]])), score="logit")
    torch.testing.assert_close(one - zero, shared_odds, **CLOSE)


def literal_hsic(masks: Tensor, y: Tensor, floor: float) -> Tensor:
    n = len(y)
    H = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n
    w = max(abs(float(y.median())), floor)
    L = torch.exp(-((y[:, None] - y[None, :]) ** 2) / (2 * w**2))
    values = []
    for j in range(masks.shape[1]):
        m = masks[:, j].double()
        K = 1 + (0.5 - (m[:, None] - m[None, :]) ** 2)
        values.append(((H @ K @ H) * (H @ L @ H).T).sum() / n)
    return torch.stack(values)


def test_hsic_is_its_matrices_and_its_closed_form() -> None:
    n = 200
    masks = draw_masks(n, 9, "sobol", seed=3)
    y = torch.rand(4, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = hsic_of(masks, y, 1e-3)
    for row, values in zip(y, found, strict=True):
        torch.testing.assert_close(values, literal_hsic(masks, row, 1e-3), **CLOSE)
    delta, c = 0.4, 0.3
    y = (c + delta * masks[:, 4].double())[None]
    w, p = float(y.median()), float(masks[:, 4].double().mean())
    closed = 4 * n * (p * (1 - p)) ** 2 * (1 - math.exp(-(delta**2) / (2 * w**2)))
    values = hsic_of(masks, y, 1e-3)[0]
    assert float(values[4]) == pytest.approx(closed, rel=1e-12)
    assert float(values[[0, 1, 2, 3, 5, 6, 7, 8]].max()) < 0.05 * closed
    assert float(values.min()) > -1e-12
    torch.testing.assert_close(hsic_of(~masks, y, 1e-3)[0], values, **CLOSE)
    twice = hsic_of(masks.repeat(2, 1), y.repeat(1, 2), 1e-3)[0]
    torch.testing.assert_close(twice, 2 * values, **CLOSE)
    tiny = hsic_of(masks, y * 1e-9, 1e-3)[0]
    assert int(tiny.argmax()) == 4, "the floor keeps a class of no probability readable"


def test_masks_are_balanced_and_seeded() -> None:
    for sampler in ("sobol", "lhs"):
        masks = draw_masks(500, 64, sampler, seed=0)  # type: ignore[arg-type]
        assert masks.shape == (500, 64)
        assert float((masks.double().mean(0) - 0.5).abs().max()) < 0.1
        assert torch.equal(masks, draw_masks(500, 64, sampler, seed=0))  # type: ignore[arg-type]
        assert not torch.equal(masks, draw_masks(500, 64, sampler, seed=1))  # type: ignore[arg-type]
    odd = draw_masks(7, 4, "lhs", seed=0)
    assert odd.shape == (7, 4)


@pytest.mark.parametrize("sampler", ["sobol", "lhs"])
def test_hsic_mask_by_mask(sampler: str) -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    targets = Targets(torch.tensor([[0, 3], [5, 1]]), several=True)
    given = {"samples": 40, "grid": 4, "sampler": sampler, "fill": 0.2, "chunk": 9}
    found = maps(vit, batch, "hsic", targets, seed=1, **given)
    token = maps(vit, batch, "hsic", targets, seed=1, level="token", **given)
    masks = draw_masks(40, 16, sampler, 1)  # type: ignore[arg-type]
    for b in range(2):
        scores = []
        for mask in masks.view(40, 4, 4):
            M = mask.repeat_interleave(16, 0).repeat_interleave(16, 1).double()
            scores.append(vit.logits((batch[b] * M + (1 - M) * 0.2)[None]).softmax(1)[0])
        for t in range(2):
            y = torch.stack(scores)[:, targets.index[b, t]]
            cells = literal_hsic(masks, y, 1e-3).view(1, 1, 4, 4)
            expected = F.interpolate(cells, (64, 64), mode="bicubic")[0, 0]
            torch.testing.assert_close(found[b, t], expected, **CLOSE)
            torch.testing.assert_close(token[b, t], expected.view(4, 16, 4, 16).mean((1, 3)), **CLOSE)


@pytest.mark.parametrize("name", ["kernel-shap", "atman", "hsic"])
def test_several_classes_cost_no_further_forwards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vit = build("vit")
    batch = images(vit, 2)
    calls: list[int] = []
    block = vit.block
    monkeypatch.setattr(vit, "block", lambda i, *a: (calls.append(len(a[0])), block(i, *a))[1])
    quick = {} if name == "atman" else {"samples": 40}
    costs = []
    for index in (torch.tensor([[0], [1]]), torch.tensor([[0, 1, 2], [3, 4, 5]])):
        calls.clear()
        maps(vit, batch, name, Targets(index, several=True), **quick)
        costs.append(sum(calls) // vit.depth)
    expected = {"kernel-shap": 42, "atman": 17, "hsic": 40}[name]
    assert costs == [2 * expected, 2 * expected]
