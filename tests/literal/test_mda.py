"""`mda` against its steps written out in float64, its projection against a general solver, and the authors' arrays."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

import patchlight as pl
from patchlight.methods import mda
from tests.close import close, near
from tests.families import images, shared
from tests.reference import deit_tiny, inputs, reference

TIES = 249958734
"""What `close_ties` finds where numpy sorts ties as it did for the reference arrays."""


def convex_fall(curve: np.ndarray) -> np.ndarray:
    """The curve whose falls `mda` uses."""
    return curve[0] - np.append(0.0, np.cumsum(mda.convex_falls(curve)))


@pytest.mark.parametrize("seed", range(4))
def test_the_projection_is_the_closest_convex_fall(seed: int) -> None:
    curve = np.append(1.0, np.minimum.accumulate(np.random.default_rng(seed).random(8)))
    curve = (curve - curve[-1]) / (1 - curve[-1])
    found = convex_fall(curve)
    convex = {"type": "ineq", "fun": lambda c: np.diff(c, 2)}
    ends = {"type": "eq", "fun": lambda c: [c[0] - curve[0], c[-1] - curve[-1]]}
    start = np.linspace(1, 0, 9)
    solved = minimize(
        lambda c: ((c - curve) ** 2).sum(),
        start,
        jac=lambda c: 2 * (c - curve),
        bounds=[(0, 1)] * 9,
        constraints=[convex, ends],
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 500},
    )
    near(found, solved.x, 1e-6)
    assert ((found - curve) ** 2).sum() <= solved.fun + 1e-12
    near(convex_fall(found), found, 1e-12)
    assert (np.diff(found, 2) >= -1e-12).all()


def test_a_convex_fall_stays_and_a_rise_is_flat() -> None:
    curve = np.array([1.0, 0.4, 0.1, 0.0])
    near(convex_fall(curve), curve, 1e-12)
    assert not convex_fall(np.array([0.0, 1.0, 0.0])).any()


def test_values_fall_along_the_order() -> None:
    falls = mda.convex_falls(np.array([1.0, 0.2, 0.6, 0.1, 0.0]))
    assert falls.sum() == pytest.approx(1)
    for values in ("sparse", "mixed", "dense", "rank"):
        found = mda.region_values(falls, np.full(4, 256.0), values)
        assert (np.diff(found) < 0).all(), values
    dense = mda.region_values(falls, np.full(4, 256.0), "dense")
    near(dense[:3], mda.region_values(falls, np.full(4, 256.0), "sparse").max() * np.array([1, 2 / 3, 1 / 3]), 1e-12)


def written_out(vit: pl.Anatomy, image: Tensor, prior: Tensor, target: int, candidates: int, cutoff: float) -> Tensor:
    """The card's steps, one image and one square of patches at a time: the map [H,W]."""
    side, count = image.shape[-1] // 4, 16
    place = torch.arange(16).view(4, 4).repeat_interleave(side, 0).repeat_interleave(side, 1)

    def p(picture: Tensor) -> float:
        with torch.no_grad():
            return float(vit.model(picture[None]).softmax(1)[0, target])

    for size in range(31, 102, 2):
        blurry = mda.blurred(image[None], size)[0]
        if p(blurry) <= 0.01:
            break
    grey, first, rest = torch.zeros_like(image), list[int](), prior.argsort(descending=True).tolist()

    def paint(regions: list[int], under: Tensor) -> Tensor:
        return torch.where(torch.isin(place, torch.tensor(regions, dtype=torch.long)), image, under)

    low, high = p(blurry), p(image)
    while len(rest) > 1:
        best = max(rest[:candidates], key=lambda r: p(paint([*first, r], blurry)))
        first.append(best)
        rest.remove(best)
        if (p(paint(first, blurry)) - low) / abs(high - low) >= cutoff:
            break
    else:
        first, rest = [*first, *rest], []
    last, rest = list[int](), rest[::-1]
    while rest:
        worst = min(rest[:candidates], key=lambda r: p(paint([*last, r], grey)))
        last.append(worst)
        rest.remove(worst)
    order = [*first, *last[::-1]]
    pixels = sorted(range(place.numel()), key=lambda i: order.index(int(place.flatten()[i])))

    def course(start: Tensor, end: Tensor) -> np.ndarray:
        points, now = [p(start)], start.flatten(1).clone()
        for row in range(image.shape[-2]):
            some = pixels[row * image.shape[-1] : (row + 1) * image.shape[-1]]
            now[:, some] = end.flatten(1)[:, some]
            points.append(p(now.view_as(image)))
        return np.array(points)

    inserted, deleted = course(blurry, image), course(image, grey)
    rising = np.linspace(0, 1, len(inserted)) if high <= low else (inserted - low) / (high - low)
    black = deleted[-1]
    falling = np.linspace(0, 1, len(deleted)) if high <= black else (high - deleted) / (high - black)
    mean = (np.maximum.accumulate(rising.clip(0, 1)) + np.maximum.accumulate(falling.clip(0, 1))) / 2
    resampled = np.interp(np.linspace(0, 1, count + 1), np.linspace(0, 1, len(mean)), 1 - mean)
    falls = mda.convex_falls(resampled)
    found = torch.zeros(16, dtype=torch.float64)
    for k, region in enumerate(order, 1):
        found[region] = falls[k - 1] / side**2 + falls[k - 1] * (count - k) / count
    return found.view(4, 4)


def test_the_method_is_its_steps_written_out() -> None:
    vit = shared("vit")
    wide = pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess)
    batch, target = images(vit, 2).double(), [[0, 3], [1, 2]]
    settings = {"prior": "genatt", "candidates": 3, "cutoff": 0.5}
    found = pl.explain(wide, batch, {"mda": settings}, target=target)["mda"].scores
    prior = pl.explain(wide, batch, "genatt", target=target).scores.flatten(2)
    for i, t in ((0, 1), (1, 0)):
        close(found[i, t], written_out(wide, batch[i], prior[i, t], target[i][t], 3, 0.5), 1e-6)


def test_the_blur_is_that_of_rise_with_a_wider_kernel() -> None:
    from patchlight.evidence.fills import _blurred

    batch = images(shared("vit"), 1).double()
    torch.testing.assert_close(mda.blurred(batch, 31), _blurred(batch, "blur-rise", 31, 31.0))


@pytest.mark.parametrize("image", [3, *(pytest.param(i, marks=pytest.mark.slow) for i in range(3))])
def test_orders_and_values_are_the_authors(image: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """49 SLIC regions, guided by genatt.

    The authors' curves change pixels in the order of numpy's unstable sort of a map with many ties, which depends on
    the processor. Where no whole regions are tied (image 3), that sort of the places gives their values, if numpy sorts
    here as it did there; elsewhere only orders can be compared.
    """
    saved, orders, rows = reference("mda49"), list[Tensor](), list[float]()
    search, score = mda._Game.order, mda._Game.score_shown

    def kept(game: mda._Game, *options: object) -> Tensor:
        orders.append(search(game, *options))  # type: ignore[arg-type]
        return orders[-1]

    def scored(game: mda._Game, sets: Tensor, fill: Tensor) -> Tensor:
        found = score(game, sets, fill)
        if fill is game.blurry:
            rows.append(float(found.max()))
        return found

    def sorted_by_numpy(places: Tensor) -> Tensor:
        values = (49 - places.flatten()).float().numpy()
        return torch.from_numpy(np.argsort(values)[::-1].copy()).argsort().view_as(places)

    monkeypatch.setattr(mda._Game, "order", kept)
    monkeypatch.setattr(mda._Game, "score_shown", scored)
    monkeypatch.setattr(mda, "pixel_ranks", sorted_by_numpy)
    settings = {"preset": "authors", "prior": "genatt", "side": 2}
    one, target = inputs()[image : image + 1], int(saved["target"][image])
    found = pl.explain(deit_tiny(), one, {"mda": settings}, target=target)["mda"].scores[0]
    assert orders[0].tolist() == saved["order"][image].tolist()
    end = int(saved["end_index"][image])
    assert len(rows) == end + 2, "one call for both ends, and one for each region of the prefix"
    near(np.array(rows[1 : end + 1]), saved["insertion_response"][image][:end], 1e-5)
    if image == 3 and not close_ties():
        pytest.skip("numpy sorts ties in another way on this processor")
    if image == 3:
        close(found, saved["maps"][image], 1e-5)


def close_ties() -> bool:
    """Whether numpy orders ties as on the machine of the reference arrays."""
    return int((np.argsort((np.arange(50176) // 1024).astype(np.float32)) * np.arange(50176) % 9973).sum()) == TIES
