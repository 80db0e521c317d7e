"""Perturbation, ROAD, AUC, AOPC, LOdds and token removal: literal loops, closed forms, peers, presets, bounds."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import patchlight as pl
from patchlight.core.targets import kl_divergence
from patchlight.evidence.fills import Imputation, fill_images
from patchlight.metrics.base import METRICS, resolve_metric
from patchlight.metrics.perturbation import levels
from tests.evidence.literal import imputed as imputed_densely
from tests.families import build, images, shared
from tests.literal.toys import Linear, linear
from tests.metrics import literal
from tests.metrics.test_deletion import without_ties

TARGETS = [1, 4]
FRACTIONS = [0.1, 0.3, 0.5, 0.7, 0.9]


def removed(vit: pl.Anatomy, i: int, maps: Tensor, fill: Tensor, counts: list[int]) -> list[list[float]]:
    image, order = images(vit, 2)[i], literal.falling(maps[i])
    return [literal.probabilities(vit, literal.masked(image, fill[i], order[:n])) for n in counts]


@pytest.mark.parametrize("direction", ["positive", "negative"])
def test_quantities_are_the_literal_ones(direction: str) -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    black = fill_images("black", batch, vit)
    counts = [int(f * 4096) for f in FRACTIONS]
    asked = {q: {"metric": "perturbation", "quantity": q} for q in ("accuracy", "probability", "kl", "nll")}
    found = pl.evaluate(vit, batch, maps, asked, TARGETS, direction=direction, points=5)
    for i, target in enumerate(TARGETS):
        clean = literal.probabilities(vit, batch[i])
        levels_ = removed(vit, i, maps if direction == "positive" else -maps, black, counts)
        expected = {
            "accuracy": [float(literal.argmax(p) == target) for p in levels_],
            "probability": [p[target] for p in levels_],
            "kl": [sum(a * math.log(a / b) for a, b in zip(clean, p, strict=True)) for p in levels_],
            "nll": [-math.log(p[target]) for p in levels_],
        }
        for quantity, curve in expected.items():
            np.testing.assert_allclose(found[quantity].curve[i], curve, atol=1e-9, err_msg=quantity)
            assert float(found[quantity].values[i]) == pytest.approx(sum(curve) / 5, abs=1e-9)
    falls = direction == "positive"
    assert found["accuracy"].higher_is_better is not falls
    assert found["nll"].higher_is_better is falls
    assert found["nll"].x is not None
    assert found["nll"].x.tolist() == pytest.approx(FRACTIONS)


def test_accuracy_is_against_the_true_label() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    predicted = vit.logits(batch).argmax(1).tolist()
    wrong = [(p + 1) % 7 for p in predicted]
    same: dict[str, Any] = {"points": 2, "low": 0.0, "high": 0.5, "preset": "chefer"}
    right = pl.evaluate(vit, batch, maps, "perturbation", wrong, labels=predicted, **same)
    assert right.curve is not None
    assert right.curve[:, 0].tolist() == [1, 1]
    missed = pl.evaluate(vit, batch, maps, "perturbation", predicted, labels=wrong, **same)
    assert missed.curve is not None
    assert missed.curve[:, 0].tolist() == [0, 0]


def test_levels_count_whole_pixels() -> None:
    x, changed = levels(224 * 224, 9, 0.1, 0.9)
    assert changed.tolist() == [int(0.1 * t * 224 * 224) for t in range(1, 10)]
    assert x.tolist() == pytest.approx([t / 10 for t in range(1, 10)])
    assert levels(224 * 224, 29, 0.0, 1.0)[1].tolist() == [1792 * t for t in range(29)]
    assert levels(100, 9, 0.1, 0.9)[1].tolist() == list(range(10, 100, 10))
    with pytest.raises(pl.PatchlightError, match="low < high"):
        levels(10, 3, 0.5, 0.5)


def test_diffmask_is_trapezoids_of_width_one_over_the_same_noise() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    one = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(123), dtype=torch.float64) * 2 - 1
    counts = [int(t * 4096 / 28) for t in range(29)]
    found = pl.evaluate(vit, batch, maps, "perturbation", TARGETS, preset="diffmask", seed=7)
    predicted = vit.logits(batch).argmax(1).tolist()
    assert found.bounds == (0, 28)
    for i in range(2):
        curve = [p[predicted[i]] for p in removed(vit, i, maps, one.expand(2, -1, -1, -1), counts)]
        np.testing.assert_allclose(found.curve[i], curve, atol=1e-9)
        assert float(found.values[i]) == pytest.approx(np.trapezoid(curve, dx=1), abs=1e-9)


def test_auc_aopc_and_lodds_are_the_literal_ones_and_share_their_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    seen: list[int] = []
    readout = vit.readout
    monkeypatch.setattr(vit, "readout", lambda tokens, keep=None: (seen.append(len(tokens)), readout(tokens, keep))[1])
    found = pl.evaluate(vit, batch, maps, ["auc", "aopc", "lodds"], TARGETS, points=6)
    assert sum(seen) == 2 * (6 + 1)
    black = fill_images("black", batch, vit)
    predicted = vit.logits(batch).argmax(1).tolist()
    for i, y in enumerate(predicted):
        p = [q[y] for q in removed(vit, i, maps, black, [int(k / 5 * 4096) for k in range(6)])]
        hits = [
            float(literal.argmax(q) == y) for q in removed(vit, i, maps, black, [int(k / 5 * 4096) for k in range(6)])
        ]
        assert float(found["auc"].values[i]) == pytest.approx(literal.rise_area(hits), abs=1e-9)
        assert float(found["aopc"].values[i]) == pytest.approx(sum(p[0] - q for q in p) / 6, abs=1e-9)
        assert float(found["lodds"].values[i]) == pytest.approx(-sum(math.log(p[0] / q) for q in p) / 6, abs=1e-9)
        assert hits[0] == 1


def test_a_constant_model_moves_nothing() -> None:
    vit = Linear(torch.zeros(5, 3, 12, 16))
    batch = torch.randn(2, 3, 12, 16, dtype=torch.float64)
    asked: dict[str, dict[str, Any]] = {
        "aopc": {},
        "lodds": {},
        "prob": {"metric": "perturbation", "preset": "diffmask"},
        "kl": {"metric": "perturbation", "quantity": "kl"},
    }
    found = pl.evaluate(vit, batch, without_ties(vit), asked, 3)
    assert found["aopc"].values.tolist() == pytest.approx([0, 0])
    assert found["lodds"].values.tolist() == pytest.approx([0, 0])
    assert found["prob"].values.tolist() == pytest.approx([28 / 5, 28 / 5])
    assert found["kl"].values.tolist() == pytest.approx([0, 0])


@given(st.integers(0, 10_000))
@settings(max_examples=10)
def test_lodds_is_at_most_minus_aopc_where_probability_only_falls(seed: int) -> None:
    """log(p_k / p) <= -(p - p_k) / p <= -(p - p_k)."""
    weight = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 40
    weight[1] = 0
    vit = Linear(weight)
    batch = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    found = pl.evaluate(vit, batch, without_ties(vit, seed=seed), ["aopc", "lodds"], 0, fill="zero")
    assert (found["aopc"].values > 0).all()
    assert (found["lodds"].values <= -found["aopc"].values).all()


@pytest.mark.parametrize("family", ["vit", "siglip"])
def test_tokens_are_really_removed(family: str) -> None:
    vit = shared(family, torch.float64)
    batch, maps = images(vit, 2), without_ties(vit, size=vit.grid)
    metrics = {
        f"{name}-{q}": {"metric": f"token-{name}", "quantity": q}
        for name in ("deletion", "insertion")
        for q in ("accuracy", "aopc")
    }
    found = pl.evaluate(vit, batch, maps, metrics, labels=TARGETS)
    paper = pl.evaluate(vit, batch, maps, metrics, labels=TARGETS, preset="skipplus")
    code = pl.evaluate(vit, batch, maps, metrics, labels=TARGETS, preset="skipplus-code")
    counts = [int(0.1 * t * 16 + 1e-9) for t in range(1, 10)]
    for i, target in enumerate(TARGETS):
        order = literal.falling(maps[i])
        clean = literal.without_patches(vit, batch[i], [])
        gone = [clean, *(literal.without_patches(vit, batch[i], order[:n]) for n in counts)]
        kept = [*(literal.without_patches(vit, batch[i], order[n:]) for n in counts), clean]
        expected = {
            "deletion-accuracy": [float(literal.argmax(p) == target) for p in gone],
            "deletion-aopc": [clean[target] - p[target] for p in gone],
            "insertion-accuracy": [float(literal.argmax(p) == target) for p in kept],
            "insertion-aopc": [clean[target] - p[target] for p in kept],
        }
        for name, curve in expected.items():
            np.testing.assert_allclose(found[name].curve[i], curve, atol=1e-9, err_msg=name)
            area = literal.rise_area(curve)
            flipped = name in ("deletion-accuracy", "insertion-aopc")
            assert float(found[name].values[i]) == pytest.approx(area, abs=1e-9)
            assert float(paper[name].values[i]) == pytest.approx(100 - 100 * area if flipped else 100 * area, abs=1e-7)
            assert float(code[name].values[i]) == pytest.approx(90 * area, abs=1e-7)
            assert paper[name].higher_is_better
            assert found[name].higher_is_better is code[name].higher_is_better is not flipped
    assert found["insertion-accuracy"].x is not None
    assert found["insertion-accuracy"].x.tolist() == pytest.approx([t / 10 for t in range(1, 11)])
    assert code["deletion-accuracy"].bounds == (0, pytest.approx(90))
    assert paper["insertion-aopc"].bounds == (0, 200)


def test_a_model_that_cannot_drop_tokens_is_refused() -> None:
    swin = shared("swin")
    with pytest.raises(pl.Unsupported, match="cannot drop tokens"):
        pl.evaluate(swin, images(swin, 1), torch.rand(1, *swin.grid), "token-deletion")


@pytest.mark.parametrize("family", ["vit-binary", "vit"])
def test_two_labels_and_independent_labels_have_their_own_kl(family: str) -> None:
    vit = shared(family, torch.float64)
    clean, other = torch.tensor([[[0.3]]]).double(), torch.tensor([[[-1.2], [0.3]]]).double()
    p, q = torch.sigmoid(other.flatten().flip(0)).tolist()
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    if family == "vit":
        vit = pl.wrap(vit.model, name="sigmoids", sigmoid=True)
        clean, other = clean.expand(-1, -1, 2), other.expand(-1, -1, 2)
        expected *= 2
    found = kl_divergence(clean, other, vit.outputs)
    assert found[0].tolist() == pytest.approx([expected, 0], abs=1e-12)


def test_a_binary_head_is_measured() -> None:
    vit = shared("vit-binary")
    names = ["perturbation", "auc", "aopc", "lodds", "deletion", "token-deletion"]
    found = pl.evaluate(vit, images(vit, 2), torch.rand(2, *vit.grid), {n: METRICS[n].quick for n in names})
    assert all(one.count == 2 for one in found.values())
    assert found["auc"].curve is not None
    assert found["auc"].curve[:, 0].tolist() == [1, 1]


def test_pairs_have_probabilities_but_no_logarithms() -> None:
    vit = linear()
    batch = torch.randn(1, 3, 12, 16, dtype=torch.float64)
    maps = without_ties(vit, 1)
    given = {"target_class": "given", "points": 3}
    pair = pl.evaluate(vit, batch, maps, "aopc", (0, 1), **given)
    one, two = (pl.evaluate(vit, batch, maps, "aopc", c, **given) for c in (0, 1))
    torch.testing.assert_close(pair.values, one.values - two.values)
    with pytest.raises(pl.PatchlightError, match="pair of classes"):
        pl.evaluate(vit, batch, maps, "lodds", (0, 1), **given)


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_accelerator_gives_the_same_values() -> None:
    """In float64, so that only a wrong device path can differ."""
    cpu = build("vit", torch.float64)
    cuda = pl.wrap(copy.deepcopy(cpu.model).cuda(), name="vit")
    batch, maps = images(cpu, 2), without_ties(cpu)
    names = [name for name, entry in METRICS.items() if entry.ablates and not entry.explains and not entry.needs]
    asked: dict[str, dict[str, Any]] = {name: dict(METRICS[name].quick) for name in names}
    asked["road"]["fill"] = "image-mean"  # its own draws noise, on each device another
    here, there = (pl.evaluate(vit, batch, maps, asked, TARGETS, precision="full") for vit in (cpu, cuda))
    for name in names:
        torch.testing.assert_close(here[name].values, there[name].values, atol=1e-8, rtol=0)


def test_auc_asks_for_the_prediction_unless_for_the_label() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    predicted = vit.logits(batch).argmax(1)
    wrong = (predicted + 1) % 7
    kept = pl.evaluate(vit, batch, maps, "auc", wrong, labels=wrong, points=3)
    assert kept.curve is not None
    assert kept.curve[:, 0].tolist() == [1, 1]
    against = pl.evaluate(vit, batch, maps, "auc", predicted, labels=wrong, points=3, target_class="label")
    assert against.curve is not None
    assert against.curve[:, 0].tolist() == [0, 0]
    same = pl.evaluate(vit, batch, maps, "auc", wrong, labels=predicted, points=3, target_class="label")
    assert torch.equal(same.values, kept.values)


def test_road_is_the_literal_one() -> None:
    """At a share p MoRF removes the int(p HW) highest pixels, LeRF keeps them alone; what is missing is imputed."""
    vit = linear(height=12, width=8)
    batch = 0.1 * torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    maps = without_ties(vit)
    fill = fill_images("road", batch, vit, seed=5)
    assert isinstance(fill, Imputation)
    found = pl.evaluate(vit, batch, maps, "road", TARGETS, shares=(0.15, 0.6), seed=5)
    for i, target in enumerate(TARGETS):
        order, lerf, morf = literal.falling(maps[i]), [], []
        for count in (14, 57):
            for removed_cells, into in ((order[:count], morf), (order[count:], lerf)):
                missing = np.zeros(96, dtype=bool)
                missing[removed_cells] = True
                whole = torch.from_numpy(imputed_densely(batch[i].numpy(), missing.reshape(12, 8)))
                variant = literal.masked(batch[i], whole + fill.noise, removed_cells)
                into.append(literal.probabilities(vit, variant)[target])
        assert float(found.parts["morf"][i]) == pytest.approx(sum(morf) / 2, abs=1e-7)
        assert float(found.parts["lerf"][i]) == pytest.approx(sum(lerf) / 2, abs=1e-7)
        assert float(found.values[i]) == pytest.approx((sum(lerf) - sum(morf)) / 4, abs=1e-7)


def test_road_is_grad_cams_and_half_of_srg_at_its_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise. 400 pixels, so that a percentile and a share count the same."""
    peer = pytest.importorskip("pytorch_grad_cam.metrics.road")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    quiet = type("Quiet", (peer.NoisyLinearImputer,), {"__init__": lambda self: setattr(self, "noise", 0.0)})
    monkeypatch.setattr(peer, "NoisyLinearImputer", quiet)
    monkeypatch.setattr("patchlight.evidence.fills.ROAD_NOISE", 0.0)
    vit = linear(height=20, width=20)
    batch = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    maps = without_ties(vit) / 400
    asked = [targets.ClassifierOutputTarget(target) for target in TARGETS]
    theirs = peer.ROADCombined()(batch.float(), maps.numpy(), asked, lambda x: vit.logits(x.double()))
    found = pl.evaluate(vit, batch, maps, "road", TARGETS, preset="grad-cam")
    np.testing.assert_allclose(found.values, theirs, rtol=1e-4)
    gap = pl.evaluate(vit, batch, maps, "srg", TARGETS, unit="pixel", steps=10, fill="road", score="logit")
    assert gap.curve is not None
    np.testing.assert_allclose(found.values, gap.curve[:, 1:-1].mean(1) / 2, atol=1e-10)


def test_road_by_its_authors_and_what_it_refuses() -> None:
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    predicted = vit.logits(batch).argmax(1)
    found = pl.evaluate(vit, batch, maps, "road", TARGETS, preset="authors", labels=predicted.tolist())
    assert found.x is not None
    assert found.x.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9])
    assert found.curve is not None
    assert set((2 * found.curve).flatten().tolist()) <= {-1, 0, 1}, "a difference of accuracies"
    with pytest.raises(pl.PatchlightError, match="are not increasing"):
        pl.evaluate(vit, batch, maps, "road", shares=(0.5, 0.5))
    with pytest.raises(pl.PatchlightError, match="shares"):
        pl.evaluate(vit, batch, maps, "road", shares=())


@pytest.mark.parametrize("name", sorted(name for name, entry in METRICS.items() if "fill" in entry.settings))
def test_every_metric_with_a_fill_takes_roads(name: str) -> None:
    vit = linear(classes=2)
    batch = 0.1 * torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    quick = METRICS[name].quick
    results = [
        pl.evaluate(vit, batch, without_ties(vit), name, fill=fill, labels=[0, 1], **quick) for fill in ("road", "zero")
    ]
    road, zero = (result.values if result.curve is None else result.curve for result in results)
    assert bool(road.isfinite().all())
    assert name == "auc" or not torch.equal(road, zero)


@pytest.mark.parametrize(("quantity", "limit"), [("probability", 0.5), ("cosine", 1.0), ("logit", math.inf)])
def test_road_is_half_a_difference_of_scores(quantity: str, limit: float) -> None:
    request = resolve_metric("road", {"quantity": quantity})
    bounds = request.metric.bounds
    assert callable(bounds)
    assert bounds(request.settings) == (-limit, limit)
