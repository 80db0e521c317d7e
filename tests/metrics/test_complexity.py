"""Sparseness and completeness against closed forms, quantus and the stored values of a published run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.metrics.complexity import gini
from tests.families import images, shared
from tests.reference import deit_tiny, inputs, reference, shared_dir


def measured(maps: Any, metric: str, family: str = "vit", dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    vit = shared(family, dtype)
    count = 2 if isinstance(maps, str) else len(maps)
    return pl.evaluate(vit, images(vit, count), maps, metric, **{"target": 0, **options}).values


def test_gini_in_closed_form() -> None:
    n = 196
    one_hot = torch.zeros(1, n)
    one_hot[0, 17] = 5
    assert gini(one_hot).item() == pytest.approx(195 / 196)
    assert gini(one_hot.double() + 5e-7).item() == pytest.approx(195 / 196 * 5 / (5 + n * 5e-7), abs=1e-12)
    assert gini(torch.arange(n)[None].float()).item() == pytest.approx((n + 1) / (3 * n))
    assert gini(torch.ones(1, n)).item() == pytest.approx(0, abs=1e-12)


def test_gini_is_the_mean_difference() -> None:
    """G = sum_ij |a_i - a_j| / (2 n sum a), written out."""
    a = torch.rand(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    literal = (a[:, :, None] - a[:, None]).abs().sum((1, 2)) / (2 * 40 * a.sum(1))
    torch.testing.assert_close(gini(a), literal)


def test_sparseness_of_maps() -> None:
    ramp = torch.arange(16.0).view(1, 4, 4)
    assert measured(ramp, "sparseness", level="token").item() == pytest.approx(17 / 48, abs=1e-6)
    assert measured(ramp, "sparseness") != measured(ramp, "sparseness", level="token")
    for scale in (1e-9, 1e6):
        assert measured(ramp * scale, "sparseness").item() == pytest.approx(measured(ramp, "sparseness").item())


def test_shifts() -> None:
    ramp = torch.arange(16.0).view(1, 4, 4)
    raised, sunk = ramp + 10, ramp - 3

    def of(maps: Tensor, shift: str) -> float:
        return measured(maps, "sparseness", level="token", shift=shift).item()

    full = 17 / 48
    assert of(raised, "always") == pytest.approx(full, abs=1e-6)
    assert of(raised, "negative") == of(raised, "none") == pytest.approx(full * 7.5 / 17.5, abs=1e-6)
    assert of(ramp, "none") == of(ramp, "negative") == pytest.approx(full, abs=1e-6), (
        "a lowest score of 0 is not negative"
    )
    assert of(sunk, "negative") == of(sunk, "always") == pytest.approx(full, abs=1e-6)
    with pytest.warns(pl.UndefinedMetric, match="negative scores"):
        assert np.isnan(of(sunk, "none"))


@pytest.mark.filterwarnings("ignore::patchlight.UndefinedMetric")
@pytest.mark.parametrize("eps", [0.0, 1e-7])
def test_a_constant_map_is_not_sparse(eps: float) -> None:
    for value in (0.0, 3.0, -2.0):
        assert measured(torch.full((1, 4, 4), value), "sparseness", eps=eps).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["genatt", "tis"])
def test_the_stored_sparseness(name: str) -> None:
    maps = torch.from_numpy(reference(name)["maps"]).reshape(4, 14, 14)
    with np.load(shared_dir() / "reference" / "metrics" / f"tis_insertion_deletion_sparseness__{name}.npz") as file:
        stored = dict(file)

    def ours(**settings: Any) -> Tensor:
        return pl.evaluate(deit_tiny(), inputs(), maps, "sparseness", target=0, **settings).values

    np.testing.assert_allclose(ours(preset="tis"), stored["sparseness_shift_224"], atol=1e-4)
    np.testing.assert_allclose(ours(preset="tis", level="token"), stored["sparseness_shift_14"], atol=1e-4)
    np.testing.assert_allclose(ours(shift="none"), stored["sparseness_224"], atol=1e-4)
    np.testing.assert_allclose(ours(shift="negative", level="token"), stored["sparseness_14"], atol=1e-4)


def test_it_is_quantus_sparseness() -> None:
    quantus = pytest.importorskip("quantus")
    vit = shared("vit")
    maps = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0))
    theirs = quantus.Sparseness(disable_warnings=True)(
        model=vit.model,
        x_batch=images(vit, 3).numpy(),
        y_batch=np.zeros(3, dtype=int),
        a_batch=maps[:, None].double().numpy(),
    )
    np.testing.assert_allclose(measured(maps, "sparseness", preset="quantus"), theirs, atol=1e-6)


def test_completeness_error_is_what_is_missing() -> None:
    vit = shared("vit", torch.float64)
    x = images(vit, 3)
    logits = vit.logits(x)
    whole = torch.rand(3, 4, 4, dtype=torch.float64)
    whole = whole / whole.sum((1, 2), keepdim=True) * logits[:, 2, None, None]
    missing = torch.tensor([0.0, 0.5, -2.0])
    maps = whole + missing[:, None, None] / 16

    def error(**options: Any) -> list[float]:
        found = pl.evaluate(vit, x, maps, "completeness-error", **{"target": 2, **options})
        return found.values.tolist()

    assert error() == pytest.approx([0, 0.5, 2], abs=1e-9)
    assert error(relative=True) == pytest.approx((missing.abs() / logits[:, 2].abs()).tolist(), abs=1e-9)
    empty = vit.logits(torch.zeros_like(x))[:, 2]
    assert error(baseline="zero") == pytest.approx((missing + empty).abs().tolist(), abs=1e-9)
    assert error(target=(2, 1)) == pytest.approx((missing + logits[:, 1]).abs().tolist(), abs=1e-9)
    probability = vit.probabilities(logits)[:, 2]
    wanted = (maps.sum((1, 2)) - probability).abs().tolist()
    assert error(score="probability") == pytest.approx(wanted, abs=1e-9)


def test_integrated_gradients_are_complete() -> None:
    settings = {"dtype": torch.float64, "target": 1}
    vit = shared("vit", torch.float64)
    maps = pl.explain(vit, images(vit, 2), "ig", target=1, score="logit", level="pixel", steps=200)
    ig = measured(maps.scores, "completeness-error", baseline="zero", **settings)
    ixg = measured("ixg", "completeness-error", baseline="zero", **settings)
    assert ig.max() < 0.05
    assert ixg.min() > 2 * ig.max()
