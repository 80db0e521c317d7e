"""SRG: literal loops, the additive game, what it shares with insertion and deletion, invariants and its preset."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.evidence.ablation import Ablation
from patchlight.evidence.fills import fill_images
from patchlight.metrics.deletion import removed_counts
from tests.families import images, shared
from tests.literal.toys import Linear, linear
from tests.metrics import literal
from tests.metrics.test_deletion import TARGETS, without_ties

PATCHES = {"unit": "patch", "steps": None, "fill": "zero"}


def game(worths: list[float]) -> tuple[Linear, Tensor]:
    """A model whose logit of class 0 is the sum of its four patches' worths, and an image that has them all."""
    weight = torch.zeros(2, 3, 4, 16)
    weight[0] = torch.tensor(worths).repeat_interleave(4) / (3 * 16)
    return Linear(weight), torch.ones(1, 3, 4, 16, dtype=torch.float64)


def test_an_additive_game_by_hand() -> None:
    """a = (4, 2, 1, 1): MIF 8 4 2 1 0, LIF 8 7 6 4 0."""
    vit, image = game([4, 2, 1, 1])
    scores = torch.tensor([[[9.0, 8.0, 7.0, 6.0]]])
    found = pl.evaluate(vit, image, scores, "srg", 0, score="logit", **PATCHES)
    assert found.parts["mif-curve"][0].tolist() == pytest.approx([8, 4, 2, 1, 0])
    assert found.parts["lif-curve"][0].tolist() == pytest.approx([8, 7, 6, 4, 0])
    assert [float(found.parts[key][0]) for key in ("mif", "lif")] == pytest.approx([2.75, 5.25])
    assert float(found.values[0]) == pytest.approx(2.5)
    assert found.curve is not None
    assert float(found.values[0]) == pytest.approx(float(found.curve[0, 1:].mean())), "mean of after-step differences"
    orders = [torch.tensor([[list(order)]]).float() for order in permutations((1, 2, 3, 4))]
    values = [float(pl.evaluate(vit, image, one, "srg", 0, score="logit", **PATCHES).values[0]) for one in orders]
    assert max(values) == pytest.approx(2.5), "no order is better than that of worth"
    assert sum(values) == pytest.approx(0), "a random order has 0"


@pytest.mark.parametrize("fill", ["black", "blur-tis"])
@pytest.mark.parametrize("spacing", ["linear", "log"])
def test_curves_are_the_literal_ones(fill: Any, spacing: Any) -> None:
    vit = shared("vit-wide", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit)
    filled = fill_images(fill, batch, vit)
    asked = {"unit": "pixel", "steps": 5, "spacing": spacing}
    found = pl.evaluate(vit, batch, maps, "srg", TARGETS, fill=fill, **asked)
    counts = removed_counts(maps[0].numel(), 5, spacing).tolist()
    for i, target in enumerate(TARGETS):
        falls = literal.falling(maps[i])
        mif = [literal.probabilities(vit, literal.masked(batch[i], filled[i], falls[:k]))[target] for k in counts]
        lif = [literal.probabilities(vit, literal.masked(batch[i], filled[i], falls[::-1][:k]))[target] for k in counts]
        np.testing.assert_allclose(found.parts["mif-curve"][i], mif, atol=1e-10)
        np.testing.assert_allclose(found.parts["lif-curve"][i], lif, atol=1e-10)
        x = [k / maps[0].numel() for k in counts]
        areas = [literal.trapezoids(x, curve) for curve in (mif, lif)]
        assert float(found.parts["mif"][i]) == pytest.approx(areas[0], abs=1e-10)
        assert float(found.values[i]) == pytest.approx(areas[1] - areas[0], abs=1e-10)


@pytest.mark.parametrize("unit", ["pixel", "patch", "token"])
def test_it_is_insertion_less_deletion_and_its_variants_are_theirs(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the steps divide the cells and the map has no ties."""
    vit = shared("deit-distilled", torch.float64)
    batch = images(vit, 2)
    maps = without_ties(vit, size=None if unit == "pixel" else vit.grid)
    same = {"steps": 8, "unit": unit, "fill": "channel-mean"}
    forwards: list[int] = []
    whole = Ablation.logits

    def counted(self: Ablation, variants: Any) -> Tensor:
        lists = variants if isinstance(variants, list) else [variants]
        forwards.append(sum(len(some.owner) for some in lists))
        return whole(self, variants)

    monkeypatch.setattr(Ablation, "logits", counted)
    asked = {name: {"metric": name, **same} for name in ("ins-del", "srg", "insertion", "deletion")}
    asked["insertion"]["metric"], asked["deletion"]["metric"] = "insertion", "deletion"
    if unit == "token":
        asked = {name: {k: v for k, v in own.items() if k != "fill"} for name, own in asked.items()}
    found = pl.evaluate(vit, batch, maps, asked, TARGETS)
    torch.testing.assert_close(found["srg"].values, found["ins-del"].values, atol=1e-12, rtol=0)
    torch.testing.assert_close(found["srg"].parts["mif"], found["deletion"].values, atol=1e-12, rtol=0)
    torch.testing.assert_close(found["srg"].parts["lif"], found["insertion"].values, atol=1e-12, rtol=0)
    assert sum(forwards) == 2 * 2 * 9, "nine points each way of two images, once for all four metrics"


def test_the_negative_of_a_map_and_rising_transforms() -> None:
    vit = linear()
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    maps = without_ties(vit, size=vit.grid) / 6 - 1
    one, minus, cubed = (pl.evaluate(vit, batch, m, "srg", 0).values for m in (maps, -maps, maps**3))
    torch.testing.assert_close(minus, -one, rtol=0, atol=1e-12)
    assert torch.equal(one, cubed)
    still = pl.evaluate(Linear(torch.zeros(5, 3, 12, 16)), batch, maps, "srg", 3)
    assert still.values.tolist() == pytest.approx([0, 0], abs=1e-15)
    assert still.parts["mif"].tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("unit", ["pixel", "patch", "token"])
@pytest.mark.parametrize("spacing", ["linear", "log"])
@pytest.mark.filterwarnings("ignore::patchlight.core.errors.UndefinedMetric")
def test_the_negative_of_a_map_with_ties(unit: Any, spacing: Any) -> None:
    """Ties count in both orders, so that the least important first of a map is the most important first of -map."""
    vit = shared("vit", torch.float64)
    batch = images(vit, 3)
    maps = without_ties(vit, 3, size=vit.grid)
    maps[:2] = (maps[:2] / 5).floor()
    maps[1] = 2
    one, minus = (pl.evaluate(vit, batch, m, "srg", 0, steps=5, unit=unit, spacing=spacing) for m in (maps, -maps))
    torch.testing.assert_close(minus.values, -one.values, rtol=0, atol=1e-12)
    torch.testing.assert_close(minus.parts["lif-curve"], one.parts["mif-curve"], rtol=0, atol=1e-12)
    assert float(one.values[1]) == pytest.approx(0, abs=1e-12), "a constant map has no order"
    assert one.values[[0, 2]].abs().min() > 1e-4
    if unit != "pixel":  # upsampled, pixels beyond the outermost cell centres are equal
        alone = pl.evaluate(vit, batch[2:], maps[2:], "srg", 0, steps=5, unit=unit, spacing=spacing)
        torch.testing.assert_close(alone.values, one.values[2:], rtol=0, atol=1e-12)


def test_the_papers_grid() -> None:
    counts = removed_counts(196, 15, "log").tolist()
    assert counts == [0, 1, 2, 3, 4, 6, 9, 13, 20, 29, 43, 63, 92, 134, 196]
    vit = shared("vit", torch.float64)
    batch, maps = images(vit, 2), without_ties(vit, size=shared("vit").grid)
    found = pl.evaluate(vit, batch, maps, "srg", TARGETS, preset="bluecher", labels=[3, 2])
    assert found.x is not None
    assert (16 * found.x).round().tolist() == removed_counts(16, 15, "log").tolist()
    of_label = pl.evaluate(vit, batch, maps, "srg", [3, 2], steps=15, spacing="log", score="probability")
    assert torch.equal(found.values, of_label.values)
