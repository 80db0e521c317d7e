"""Methods that draw: rounds until the order is stable, and errors that say how far a map would move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.targets import Targets
from patchlight.evidence.rules import PLAIN
from patchlight.methods.base import METHODS, Ask, Estimate
from patchlight.methods.sampling import in_rounds, jackknife, jackknife_error, rounds
from tests.families import images, shared
from tests.literal.toys import linear

DRAWN = ("posterior", "tis", "rise", "kernel-shap", "vit-cx", "lime", "hsic", "smoothgrad")


def test_rounds_double() -> None:
    assert [part.stop for part in rounds(1024, 0.1)] == [32, 64, 128, 256, 512, 1024]
    assert [part.stop for part in rounds(1000, 0.1)] == [63, 125, 250, 500, 1000]
    assert [part.stop for part in rounds(63, 0.1)] == [63]
    assert rounds(1024, None) == [slice(0, 1024)]
    assert [part.start for part in rounds(8, 0.1, first=1)] == [0, 1, 2, 4]


def test_the_jackknife_of_a_mean_is_the_textbooks_error() -> None:
    values = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def fit(weights: Tensor) -> Tensor:
        return torch.tensordot(weights, values, 1) / weights.sum()

    found = jackknife(fit, 12, values)
    assert found.error is not None
    torch.testing.assert_close(found.maps, values.mean(0))
    torch.testing.assert_close(found.error, values.std(0) / 12**0.5)
    pairs = jackknife(fit, 12, values, together=2)
    assert pairs.error is not None
    torch.testing.assert_close(pairs.error, values.view(6, 2, 3, 4).mean(1).std(0) / 6**0.5)
    alone = jackknife(fit, 12, values, together=12)
    assert alone.error is not None
    assert bool(alone.error.isnan().all())


def test_two_groups_are_enough_for_an_error_and_one_is_not() -> None:
    whole = torch.tensor([2.0])
    assert float(jackknife_error(whole, [torch.tensor([1.0]), torch.tensor([3.0])], 2)) == pytest.approx(1.0)
    assert jackknife_error(whole, [whole], 1).isnan().all()


def test_rounding_makes_no_error_undefined() -> None:
    """Maps that all move alike have a jackknife error of 0, and its square may be rounded below 0."""
    moved = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    square, total = torch.zeros(1000), torch.zeros(1000)
    for _ in range(16):
        total, square = total + moved, square + moved**2
    assert (square - total**2 / 16).min() < 0, "the case this test is about"
    error = jackknife_error(torch.zeros(1000), [moved] * 16, 16)
    assert bool(error.isfinite().all())
    assert float(error.max()) < 1e-2


def fake(
    order: dict[int, list[float]], noise: float, samples: int, tolerance: float | None
) -> tuple[Estimate, list[Any]]:
    """Images whose masks score a fixed order of cells, and noise that dies out with their number."""
    ask = Ask(
        linear(), torch.zeros(len(order), 3, 12, 16), Targets(torch.zeros(len(order), 1).long()), "logit", 0, PLAIN
    )
    drawn = noise * torch.randn(len(order), samples, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn[0] = 0
    cells = torch.tensor([order[i] for i in sorted(order)], dtype=torch.float64)
    seen: list[Any] = []

    def score(some: Tensor, part: slice) -> Tensor:
        seen.append((some.tolist(), part.stop))
        return cells[some][:, None] + drawn[some, part]

    def estimate(some: Tensor, scores: Tensor) -> Estimate:
        return Estimate(scores.mean(1).view(-1, 1, 2, 3), scores.std(1).view(-1, 1, 2, 3))

    return in_rounds(ask, samples, tolerance, score, estimate), seen


def test_an_image_whose_order_is_stable_leaves_the_rounds() -> None:
    order = {0: [1.0, 2, 3, 4, 5, 6], 1: [3.0, 1, 2, 5, 4, 6]}
    found, seen = fake(order, 30.0, 512, 0.02)
    assert found.samples is not None
    assert found.samples[0] == 64  # the same order in the first and second round
    assert found.samples[1] > 64
    assert seen[0] == ([0, 1], 32)
    assert all(some == [1] for some, end in seen if end > 64)
    torch.testing.assert_close(found.maps[0].flatten(), torch.tensor(order[0], dtype=torch.float64))
    whole, seen = fake(order, 30.0, 512, None)
    assert seen == [([0, 1], 512)]
    assert whole.samples is not None
    assert whole.samples.tolist() == [512, 512]


@pytest.mark.parametrize("name", DRAWN)
def test_methods_that_draw_give_an_error_and_take_a_tolerance(name: str) -> None:
    vit = pl.load("pocket") if name in ("posterior", "tis") else shared("vit")  # which has clusters enough
    batch = images(vit, 2)
    quick = {**METHODS[name].quick, **{"samples": 32 if name in ("vit-cx", "smoothgrad") else 256}}
    whole = pl.explain(vit, batch, name, target=[[0, 1], [2, 1]], **quick)
    assert whole.error is not None
    assert whole.error.shape == whole.scores.shape
    assert bool(whole.error.isfinite().all())
    assert bool((whole.error >= 0).all())
    assert bool((whole.error > 0).any())
    assert len(whole.samples) == 2
    loose = pl.explain(vit, batch, name, target=[[0, 1], [2, 1]], tolerance=0.9, **quick)
    assert max(loose.samples) < min(whole.samples)
    strict = pl.explain(vit, batch, name, target=[[0, 1], [2, 1]], tolerance=1e-9, **quick)
    torch.testing.assert_close(strict.scores, whole.scores, rtol=1e-4, atol=1e-6 * float(whole.scores.abs().max()))
    with pytest.raises(pl.PatchlightError, match="tolerance"):
        pl.explain(vit, batch, name, tolerance=2, **quick)


@pytest.mark.parametrize("name", ["rise", "kernel-shap", "lime", "smoothgrad"])
def test_errors_are_as_large_as_maps_differ_between_seeds(name: str) -> None:
    vit = shared("vit")
    batch = images(vit, 1)
    settings: dict[str, Any] = {"samples": 96, **({"unit": "patch", "level": "token"} if name == "rise" else {})}
    if name == "smoothgrad":
        settings = {"samples": 16, "sigma": 0.5, "level": "token"}
    found = [pl.explain(vit, batch, name, target=1, seed=seed, **settings) for seed in range(16)]
    variance = torch.stack([att.scores for att in found]).double().var(0).mean()
    reported = torch.stack([att.error for att in found if att.error is not None]).double().square().mean()
    assert 0.5 < float((reported / variance).sqrt()) < 2.0


def test_an_error_is_kept_with_the_scores(tmp_path: Path) -> None:
    vit = shared("vit")
    att = pl.explain(vit, images(vit, 3), "posterior", samples=32)
    assert att.error is not None
    back = pl.Attribution.load(att.save(tmp_path / "att"))
    assert back.error is not None
    assert torch.equal(back.error, att.error)
    assert back.samples == att.samples == (32, 32, 32)
    part = att[1:]
    assert part.error is not None
    assert part.samples == (32, 32)
    again = pl.Attribution.concat([att[:1], part])
    assert again.error is not None
    assert torch.equal(again.error, att.error)
    assert "error" in att.to_frame()
    few = pl.explain(vit, images(vit, 1), "posterior", samples=2)  # whose error is not known
    assert few.error is not None
    assert bool(few.error.isnan().all())
    again = pl.Attribution.load(few.save(tmp_path / "few"))
    assert again.error is not None
    assert bool(again.error.isnan().all())
    assert "error" not in pl.explain(vit, images(vit, 1), "genatt").to_frame()
