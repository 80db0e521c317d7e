"""SaCo: the paper's pairs by hand, a literal loop, invariants, ties and refusals."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.core.errors import PatchlightError, UndefinedMetric
from patchlight.evidence.fills import fill_images
from patchlight.metrics.groups import faithfulness
from tests.families import images, shared
from tests.literal.toys import Linear, linear
from tests.metrics import literal
from tests.metrics.test_deletion import without_ties


def pair(s: list[float], d: list[float], **options: Any) -> tuple[float, float]:
    found = faithfulness(torch.tensor([s], dtype=torch.float64), torch.tensor([d], dtype=torch.float64), **options)
    return float(found[0]), float(found[1])


def test_three_groups_by_hand() -> None:
    s, d = [6.0, 3.0, 1.0], [0.5, 0.1, 0.2]
    assert pair(s, d) == (pytest.approx(0.6), 0)
    assert pair(s, [0.5, 0.2, 0.1])[0] == 1
    assert pair(s, [0.1, 0.2, 0.5])[0] == -1
    assert pair([-1.0, -3.0, -6.0], d[::-1])[0] == pytest.approx(-0.6)
    assert pair([10 * one + 5 for one in s], d)[0] == pytest.approx(0.6)
    assert pair([one**2 for one in s], d)[0] == pytest.approx(0.7714, abs=1e-4)
    assert pair(s, [0.3] * 3) == (1, 1)
    assert pair(s, [0.3] * 3, ties="neutral") == (0, 1)
    assert pair(s, [0.2, 0.2, 0.1]) == (1, pytest.approx(1 / 3))
    assert pair(s, [0.2, 0.2, 0.1], ties="neutral")[0] == pytest.approx(0.7)


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_effects_are_tied_within_rounding_of_the_largest_or_of_one(size: float) -> None:
    eps = torch.finfo(torch.float64).eps * max(size, 1)
    assert pair([3.0, 1.0], [size - 60 * eps, size]) == (1, 1)
    assert pair([3.0, 1.0], [size - 60 * eps, size], ties="neutral") == (0, 1)
    assert pair([3.0, 1.0], [size - 70 * eps, size]) == (-1, 0)
    if size == 1:
        assert pair([3.0, 1.0], [size - 64 * eps, size]) == (1, 1), "the limit itself is a tie"


@pytest.mark.parametrize(("unit", "fill", "groups"), [("pixel", "image-mean", 10), ("patch", "black", 7)])
def test_it_is_the_literal_one(unit: str, fill: Any, groups: int) -> None:
    """Groups of HW i // K places, the predicted class, the raw map."""
    vit = shared("vit-wide", torch.float64)
    batch = images(vit, 2)
    maps = without_ties(vit, size=None if unit == "pixel" else vit.grid) ** 1.5 - 40
    found = pl.evaluate(vit, batch, maps, "saco", [0, 1], unit=unit, fill=fill, groups=groups)
    filled = fill_images(fill, batch, vit)
    rows, columns = vit.preprocess.size
    for i in range(2):
        clean = literal.probabilities(vit, batch[i])
        top = literal.argmax(clean)
        order, s, d = literal.falling(maps[i]), [], []
        for g in range(groups):
            cells = order[len(order) * g // groups : len(order) * (g + 1) // groups]
            s.append(sum(float(maps[i].flatten()[c]) for c in cells))
            if unit == "patch":
                h, w = rows // vit.grid[0], columns // vit.grid[1]
                corners = [(c // vit.grid[1] * h, c % vit.grid[1] * w) for c in cells]
                cells = [(y + a) * columns + x + b for y, x in corners for a in range(h) for b in range(w)]
            d.append(clean[top] - literal.probabilities(vit, literal.masked(batch[i], filled[i], cells))[top])
        assert float(found.values[i]) == pytest.approx(literal.saco(s, d), abs=1e-10)
        assert found.curve is not None
        np.testing.assert_allclose(found.curve[i], d, atol=1e-10)
    assert found.parts["tied"].tolist() == [0, 0]


def test_factors_and_offsets_change_nothing_but_other_transforms_do() -> None:
    vit = linear(height=12, width=20)
    batch = torch.randn(2, 3, 12, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    maps = torch.rand(2, 12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, scaled, shifted, squared, minus = (
        pl.evaluate(vit, batch, m, "saco", score="logit").values for m in (maps, 7 * maps, maps + 3, maps**2, -maps)
    )
    torch.testing.assert_close(scaled, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(shifted, one, rtol=0, atol=1e-9)
    torch.testing.assert_close(minus, -one, rtol=0, atol=1e-12)
    assert (squared - one).abs().min() > 1e-3


@pytest.mark.parametrize("upsampling", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("factor", [0.1, 1 / 3, 7.0, 1e-20])
@pytest.mark.parametrize("tied", [True, False])
def test_a_factor_changes_nothing_where_interpolation_makes_equal_pixels(
    upsampling: Any, factor: float, tied: bool
) -> None:
    """A small grid, where most pixels lie beyond the outermost cell centres or between equal cells."""
    vit = shared("vit", torch.float64)
    maps = torch.randn(2, *vit.grid, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    maps = maps.round() if tied else maps
    one, scaled = (
        pl.evaluate(vit, images(vit, 2), m, "saco", upsampling=upsampling, score="logit") for m in (maps, factor * maps)
    )
    torch.testing.assert_close(scaled.values, one.values, rtol=0, atol=1e-12)
    assert torch.equal(scaled.curve, one.curve)


def test_a_model_that_ignores_the_image_shows_in_its_ties() -> None:
    vit = Linear(torch.zeros(5, 3, 12, 16))
    batch, maps = torch.randn(2, 3, 12, 16, dtype=torch.float64), without_ties(vit)
    found = pl.evaluate(vit, batch, maps, "saco")
    assert found.values.tolist() == [1, 1]
    assert found.parts["tied"].tolist() == [1, 1]
    assert pl.evaluate(vit, batch, maps, "saco", ties="neutral").values.tolist() == [0, 0]


def test_a_constant_map_has_no_value_and_too_many_groups_are_refused() -> None:
    vit = shared("vit")
    batch, maps = images(vit, 2), without_ties(vit)
    maps[0] = 5
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", UndefinedMetric)
        found = pl.evaluate(vit, batch, maps, "saco")
    assert found.values.isnan().tolist() == [True, False]
    assert "constant" in found.reasons[0]
    with pytest.raises(PatchlightError, match="groups=17 cannot be made of 16 cells"):
        pl.evaluate(vit, batch, without_ties(vit), "saco", unit="patch", groups=17)
    with pytest.raises(PatchlightError, match="groups"):
        pl.evaluate(vit, batch, without_ties(vit), "saco", groups=1)
