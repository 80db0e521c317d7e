"""The Hard Concrete: closed forms against known numbers, quadrature and Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import quad

from patchlight.trained.diffmask import hard_concrete as hc

U = torch.tensor([-2.0, 0.0, 2.0, 8.0], dtype=torch.float64)


def test_known_numbers() -> None:
    kept = hc.log_keep_probability(U).exp()
    assert kept.tolist() == pytest.approx([0.157346, 0.579784, 0.910674, 0.999757], abs=1e-6)
    assert hc.expected(U).tolist() == pytest.approx([0.11114, 0.47391, 0.86557, 0.99961], abs=1e-5)
    assert math.isfinite(float(hc.log_keep_probability(torch.tensor(-200.0))))


@pytest.mark.parametrize("u", [-9.0, -3.0, 0.7, 5.0])
def test_the_expected_value_is_the_integral_of_the_survival_function(u: float) -> None:
    def survival(t: float) -> float:
        y = (t + 0.2) / 1.2
        return 1 / (1 + math.exp(-(u - 0.2 * math.log(y / (1 - y)))))

    want = quad(survival, 0, 1, limit=200)[0]
    assert float(hc.expected(torch.tensor(u, dtype=torch.float64))) == pytest.approx(want, rel=1e-5, abs=1e-7)


def test_samples_have_these_probabilities() -> None:
    uniform = torch.rand(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for u in U:
        z = hc.sample(u, uniform)
        assert float((z > 0).double().mean()) == pytest.approx(math.exp(hc.log_keep_probability(u)), abs=2e-3)
        assert float(z.mean()) == pytest.approx(float(hc.expected(u)), abs=2e-3)
        assert bool(((z >= 0) & (z <= 1)).all())
        assert u > 0 or float((z == 1).double().mean()) < 1e-3  # no mass at 1, but for rounding


def test_the_product_of_samples_has_the_gradient_of_autograd() -> None:
    """Also where one or several of the samples are 0."""
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(4, 3, 50, generator=generator, dtype=torch.float64).mul(2).add(1).requires_grad_()
    uniform = torch.rand(u.shape, generator=generator, dtype=torch.float64)
    weights = torch.rand(u.shape[1:], generator=generator, dtype=torch.float64)
    ours, plain = hc.sample_product(u, uniform), hc.sample(u, uniform).prod(0)
    assert torch.equal(ours, plain)
    assert 0.2 < float((ours == 0).double().mean()) < 0.9
    (mine,), (want,) = (torch.autograd.grad((z * weights).sum(), u) for z in (ours, plain))
    assert torch.allclose(mine, want, atol=1e-12)
    assert float(want.abs().max()) > 0.1
