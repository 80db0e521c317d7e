"""Metrics of random sets: closed forms on an additive model, literal loops, and what is undefined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import UndefinedMetric
from patchlight.core.statistics import pearson
from patchlight.metrics.base import resolve_metric
from patchlight.metrics.subsets import random_sets
from tests.families import images, shared
from tests.literal.toys import linear

LOGITS = {"fill": "zero", "score": "logit"}


def additive(count: int = 2) -> tuple[pl.Anatomy, Tensor, Tensor]:
    """A linear model, images, and what each patch adds to the logit of class 0: the exact map over the fill 0."""
    vit = linear(height=12, width=20)
    batch = torch.randn(count, 3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return vit, batch, vit.embed(batch)[..., 0].view(count, *vit.grid)


def value(vit: pl.Anatomy, batch: Tensor, maps: Tensor, metric: str, target: int = 0, **settings: Any) -> Tensor:
    return pl.evaluate(vit, batch, maps, metric, target, **{**LOGITS, **settings}).values.double()


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


def pixel_sets(vit: pl.Anatomy, sets: Tensor) -> Tensor:
    """Where sets of patches [R,k] lie in an image: booleans [R,1,H,W]."""
    hidden = torch.zeros(len(sets), vit.grid[0] * vit.grid[1], dtype=torch.bool).scatter_(1, sets, True)
    return hidden.view(-1, 1, *vit.grid).repeat_interleave(16, 2).repeat_interleave(16, 3)


@pytest.mark.parametrize("scaled", [False, True])
def test_it_is_captums_infidelity(scaled: bool) -> None:
    """For the same sets: each is hidden in all images, and the map is spread over the pixels of its patches.

    The map is one of positive factor b, because captum's can be negative.
    """
    captum = pytest.importorskip("captum.metrics")
    vit = shared("vit-wide", torch.float64)
    batch = images(vit, 2)
    settings = {"unit": "patch", "level": "token", "score": "logit"}
    maps = torch.as_tensor(pl.explain(vit, batch, "occlusion", target=1, **settings).scores).double()
    hidden = pixel_sets(vit, random_sets(12, 0.3, 15, 0)).double()

    def perturb(x: Tensor) -> tuple[Tensor, Tensor]:
        """captum repeats each image for every set, one image after the other."""
        each = hidden.repeat(len(x) // len(hidden), 3, 1, 1)
        return each, x * (1 - each)

    spread = maps[:, None].repeat_interleave(16, 2).repeat_interleave(16, 3).expand_as(batch) / (3 * 16 * 16)
    theirs = captum.infidelity(vit.model, perturb, batch, spread, target=1, n_perturb_samples=12, normalize=scaled)
    torch.testing.assert_close(value(vit, batch, maps, "infidelity", samples=12, target=1, scaled=scaled), theirs)


def test_it_is_quantus_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantus hides random pixels; here it is given the pixels of our sets of patches."""
    quantus = pytest.importorskip("quantus")
    vit = shared("vit-wide")
    batch = images(vit, 2)
    maps = torch.rand(2, *vit.grid, generator=torch.Generator().manual_seed(1))
    hidden = pixel_sets(vit, random_sets(12, 0.4, 15, 0)).expand(-1, 3, -1, -1).flatten(1)
    pixels = iter([row.nonzero()[:, 0].numpy() for row in hidden for _ in batch])
    monkeypatch.setattr(np.random, "choice", lambda *_, **__: next(pixels))
    spread = maps[:, None].repeat_interleave(16, 2).repeat_interleave(16, 3).expand_as(batch)
    theirs = quantus.FaithfulnessCorrelation(
        nr_runs=12, subset_size=6 * 16 * 16, normalise=False, perturb_baseline=0.0, return_aggregate=False
    )(model=vit.model, x_batch=batch.numpy(), y_batch=np.array([1, 1]), a_batch=spread.numpy(), device="cpu")
    found = value(vit, batch, maps, "faithfulness-correlation", samples=12, shares=(0.4,), target=1)
    torch.testing.assert_close(found, torch.tensor(theirs, dtype=torch.float64), atol=1e-4, rtol=0)


def test_an_estimate_takes_patches_one_by_one() -> None:
    """Each patch's own effect: 1 and -1 for an additive model; its size alone ranks a map and its negative alike."""
    vit, batch, exact = additive()
    ones = torch.ones(2, dtype=torch.float64)
    for maps, sign in ((exact, 1), (3 * exact, 1), (-exact, -1)):
        torch.testing.assert_close(value(vit, batch, maps, "faithfulness-estimate"), sign * ones)
        torch.testing.assert_close(value(vit, batch, maps, "faithfulness-estimate", preset="nguyen"), ones)
    other = torch.rand(exact.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = value(vit, batch, other, "faithfulness-estimate")
    expected = [torch.corrcoef(torch.stack([other[i].flatten(), exact[i].flatten()]))[0, 1] for i in range(2)]
    torch.testing.assert_close(found, torch.stack(expected))
    grouped = value(vit, batch, other, "faithfulness-estimate", groups=3)
    for i in range(2):
        order = other[i].flatten().argsort(descending=True)
        sums = [[m.flatten()[order[5 * k : 5 * k + 5]].sum() for k in range(3)] for m in (other[i], exact[i])]
        assert float(grouped[i]) == pytest.approx(float(torch.corrcoef(torch.tensor(sums))[0, 1]), abs=1e-6)


def test_f_fidelity_of_an_additive_model() -> None:
    """The drops are the mean of hidden effects: in expectation the chance times the sum of the highest, or the rest."""
    vit, batch, exact = additive()
    settings = {"metric": "f-fidelity", "samples": 4000, "shares": (0.4, 0.6), **LOGITS}
    found = pl.evaluate(vit, batch, exact, {"F": settings}, 0)["F"]
    ordered = exact.flatten(1).sort(1, descending=True).values
    plus, minus = [], []
    for size in (6, 9):
        plus.append(min(0.5, 1.5 / size) * ordered[:, :size].sum(1))
        minus.append(min(0.5, 1.5 / (15 - size)) * ordered[:, size:].sum(1))
    for name, expected in (("plus", plus), ("minus", minus)):
        wanted = torch.stack(expected).mean(0).float()
        torch.testing.assert_close(found.parts[name].float(), wanted, atol=0.05 * float(exact.abs().max()), rtol=0.05)
    torch.testing.assert_close(found.values, found.parts["plus"] - found.parts["minus"])
    turned = value(vit, batch, -exact, "f-fidelity", samples=4000, shares=(0.4, 0.6))
    torch.testing.assert_close(turned, -found.values, atol=0.1 * float(exact.abs().max()), rtol=0.1)


def test_a_correlation_is_between_minus_one_and_one() -> None:
    assert resolve_metric("faithfulness-correlation").metric.bounds == (-1.0, 1.0)
