"""Metrics of random sets: closed forms on an additive model, literal loops, and what is undefined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import UndefinedMetric
from patchlight.metrics.subsets import pearson, random_sets
from tests.families import images, shared
from tests.literal.toys import linear

LOGITS = {"fill": "zero", "score": "logit"}


def additive(count: int = 2) -> tuple[pl.Anatomy, Tensor, Tensor]:
    """A linear model, images, and what each patch adds to the logit of class 0: the exact map over the fill 0."""
    vit = linear(height=12, width=20)
    batch = torch.randn(count, 3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return vit, batch, vit.embed(batch)[..., 0].view(count, *vit.grid)


def value(vit: pl.Anatomy, batch: Tensor, maps: Tensor, metric: str, **settings: Any) -> Tensor:
    return pl.evaluate(vit, batch, maps, metric, 0, **{**LOGITS, **settings}).values.double()


@pytest.mark.parametrize("preset", [{}, {"preset": "ancona"}])
def test_an_additive_model_correlates_with_its_effects(preset: dict[str, str]) -> None:
    vit, batch, exact = additive()
    ones = torch.ones(2, dtype=torch.float64)
    for maps, sign in ((exact, 1), (3 * exact + 5, 1), (-exact, -1)):
        found = value(vit, batch, maps, "faithfulness-correlation", **preset)
        torch.testing.assert_close(found, sign * ones)


def test_infidelity_of_an_additive_model() -> None:
    vit, batch, exact = additive()
    zero = torch.zeros(2, dtype=torch.float64)
    for maps, scaled in ((exact, False), (exact, True), (7 * exact, True)):
        torch.testing.assert_close(value(vit, batch, maps, "infidelity", scaled=scaled), zero, atol=1e-12, rtol=0)
    sets = random_sets(100, 0.3, 15, 0)
    effects = exact.flatten(1)[:, sets].sum(-1)
    torch.testing.assert_close(value(vit, batch, 0 * exact, "infidelity"), (effects**2).mean(1))
    torch.testing.assert_close(value(vit, batch, -exact, "infidelity"), (effects**2).mean(1))
    torch.testing.assert_close(value(vit, batch, 3 * exact, "infidelity", scaled=False), 4 * (effects**2).mean(1))


@pytest.mark.parametrize("unit", ["patch", "token"])
def test_the_correlation_is_written_out(unit: str) -> None:
    vit = shared("vit-wide", torch.float64)
    batch = images(vit, 2)
    maps = torch.rand(2, *vit.grid, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    patches = vit.grid[0] * vit.grid[1]
    found = pl.evaluate(
        vit, batch, maps, "faithfulness-correlation", 1, samples=9, shares=(0.4,), unit=unit, fill="zero"
    ).values
    sets = random_sets(9, 0.4, patches, 0)
    side = (batch.shape[-2] // vit.grid[0], batch.shape[-1] // vit.grid[1])
    for i in range(2):
        clean = float(vit.logits(batch[i : i + 1]).softmax(1)[0, 1])
        sums, effects = [], []
        for hidden in sets.tolist():
            kept = torch.tensor([n for n in range(patches) if n not in hidden])
            with torch.no_grad():
                if unit == "token":
                    tokens = vit.run(vit.embed(batch[i : i + 1]), keep=kept[None])
                else:
                    mask = torch.zeros(patches, dtype=torch.float64)
                    mask[kept] = 1
                    pixels = mask.view(vit.grid).repeat_interleave(side[0], 0).repeat_interleave(side[1], 1)
                    tokens = vit.run(vit.embed(batch[i : i + 1] * pixels))
                effects.append(clean - float(vit.readout(tokens).softmax(1)[0, 1]))
            sums.append(float(maps[i].flatten()[hidden].sum()))
        expected = torch.corrcoef(torch.tensor([sums, effects], dtype=torch.float64))[0, 1]
        assert float(found[i]) == pytest.approx(float(expected), abs=1e-9)


def test_sets_have_one_size_and_depend_on_the_seed() -> None:
    sets = random_sets(50, 0.3, 20, 0)
    assert sets.shape == (50, 6)
    assert all(len(set(row)) == 6 for row in sets.tolist())
    assert not torch.equal(sets, random_sets(50, 0.3, 20, 1))
    assert random_sets(5, 0.001, 20, 0).shape == (5, 1)
    assert random_sets(5, 0.999, 20, 0).shape == (5, 19)
    with pytest.raises(pl.PatchlightError, match="one patch"):
        random_sets(5, 0.5, 1, 0)


def test_constant_rows_have_no_correlation() -> None:
    rows = torch.tensor([[1.0, 2, 3], [1.0, 1, 1]])
    assert pearson(rows, torch.tensor([[2.0, 4, 6], [1.0, 2, 3]])).tolist()[0] == pytest.approx(1)
    assert pearson(rows, rows)[1].isnan()
    vit, batch, exact = additive()
    with pytest.warns(UndefinedMetric, match="constant"):
        assert value(vit, batch, torch.ones_like(exact), "faithfulness-correlation").isnan().all()


def test_a_map_of_the_opposite_class_has_minus_one() -> None:
    """Two classes with opposite weights: the map of one is minus the map of the other."""
    weight = torch.randn(1, 3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vit = type(linear())(torch.cat([weight, -weight]))
    batch = torch.randn(2, 3, 12, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def explain(vit: pl.Anatomy, images: Tensor, targets: Any, seed: int) -> Tensor:
        contributions = vit.embed(images)
        index = targets.index.to(images.device)[:, None].expand(-1, contributions.shape[1], -1)
        return contributions.gather(2, index)[..., 0].view(-1, *vit.grid)

    found = pl.evaluate(vit, batch, explain, "class-similarity", 0).values.double()
    torch.testing.assert_close(found, -torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("other", ["runner-up", "random"])
def test_a_method_that_ignores_the_class_has_one(other: str) -> None:
    vit = shared("vit")
    found = pl.evaluate(vit, images(vit, 2), ["rollout", "genatt"], "class-similarity", 1, other=other)
    torch.testing.assert_close(found["rollout"].values.double(), torch.ones(2, dtype=torch.float64))
    assert bool((found["genatt"].values < 1).all())
