"""`dave` on models whose answer is known, and against what its authors' code gave for deit_tiny."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import patchlight as pl
from patchlight.core.targets import Targets
from patchlight.evidence.rules import RULES
from patchlight.methods.base import Ask
from patchlight.methods.dave import NoisyCopy, contributions, random_samples, robust_mean, smoothed
from tests.families import build, images, shared
from tests.reference import deit_tiny, inputs, reference


def asked(vit: pl.Anatomy, batch: Tensor, target: int = 1) -> Ask:
    return Ask(vit, batch, Targets(torch.full((len(batch), 1), target)), "logit", 0, RULES["plain"])


def test_one_plain_sample_is_the_operator() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    operator = pl.explain(vit, batch, {"dave": {"preset": "operator"}}, target=1)["dave"].scores
    ixg = pl.explain(vit, batch, {"ixg.libra": {"level": "pixel"}}, target=1)["ixg.libra"].scores
    torch.testing.assert_close(operator, ixg)
    for robust in (True, False):
        several = {"samples": 4, "warp": False, "noise_level": 0.0, "robust": robust}
        torch.testing.assert_close(pl.explain(vit, batch, {"dave": several}, target=1)["dave"].scores, ixg)


def test_a_sample_is_written_out() -> None:
    """One warped and noisy copy in float64: x times the gradient of the score of the copy, by autograd."""
    vit = build("vit", dtype=torch.float64)
    batch = images(vit, 1).double()
    (_, sample) = random_samples(2, batch.shape[1:], True, 0.4, 3)
    leaf = batch.clone().requires_grad_()
    grid = F.affine_grid(sample.theta[None].double(), list(batch.shape), align_corners=False)  # type: ignore[index]
    warped = F.grid_sample(leaf, grid, align_corners=False)
    noisy = 0.6 * warped + (1 - 0.6**2) ** 0.5 * sample.noise.double()  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(vit.model(noisy)[0, 1], leaf)
    (found,) = contributions(asked(vit, batch), [sample], "plain")
    torch.testing.assert_close(found[0], (batch * gradient)[0])


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_gradients_are_pulled_back_by_the_adjoint(size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(1, 3, *size, generator=generator, dtype=torch.float64) for _ in range(2))
    for sample in random_samples(5, x.shape[1:], True, 0.0, 0):
        torch.testing.assert_close((sample.warp(x) * y).sum(), (x * sample.pull_back(y)).sum())


def test_warps_are_rigid_in_pixels() -> None:
    """On an image that is not square, too: lengths along every direction change by one factor, at most 10 %."""
    height, width = 24, 40
    for sample in random_samples(20, torch.Size((3, height, width)), True, 0.0, 0):
        assert sample.theta is not None
        pixels = torch.diag(torch.tensor([width / 2, height / 2]))
        linear = pixels @ sample.theta[:, :2] @ pixels.inverse()
        lengths = torch.linalg.svdvals(linear)
        torch.testing.assert_close(lengths[0], lengths[1])
        assert 1 / 1.1 - 1e-5 <= float(lengths[0]) <= 1 / 0.9 + 1e-5


@pytest.mark.parametrize(
    ("values", "mean"), [([1.0, 1, 1, 2, 100], 1.0), ([0.0, 1, 2, 3, 100], 1.5), ([5.0], 5.0), ([1.0, 3.0], 1.0)]
)
def test_the_mean_without_outliers(values: list[float], mean: float) -> None:
    """The median of an even number of samples is the lower of both in the middle, as in the authors' code."""
    assert float(robust_mean(torch.tensor(values))) == mean


def test_the_score_scales_the_map() -> None:
    vit = shared("vit")
    batch = images(vit, 1)

    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda logits: factor * logits[:, 1]

    one, three = (pl.explain(vit, batch, {"dave": {"samples": 3}}, score=scaled(f))["dave"].scores for f in (1.0, 3.0))
    torch.testing.assert_close(three, 3 * one)


def test_a_map_without_positive_values_stays_empty() -> None:
    assert not bool(smoothed(-torch.rand(1, 16, 16)).any())


def test_the_operator_is_the_authors() -> None:
    ref = reference("dave")
    found = pl.explain(deit_tiny(), inputs(), {"dave": {"preset": "operator"}}, target=ref["target"].tolist())["dave"]
    expected = torch.from_numpy(ref["operator_only"])
    assert float((found.scores - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    filtered = smoothed(torch.from_numpy(ref["maps"]).double())
    torch.testing.assert_close(filtered.float(), torch.from_numpy(ref["post"]), atol=2e-6, rtol=0)


def authors_sample(matrix: Tensor, index: int, step: int, strength: float) -> NoisyCopy:
    """Step `step` of image `index`: kornia places pixels by their corners and samples at their centres."""
    side = 224
    corners = torch.tensor([[2 / (side - 1), 0, -1], [0, 2 / (side - 1), -1], [0, 0, 1]], dtype=torch.float64)
    mirror = torch.tensor([[-1, 0, side - 1], [0, 1, 0], [0, 0, 1]], dtype=torch.float64)
    flipped = float(torch.linalg.det(matrix[:2, :2])) < 0
    affine = matrix @ mirror.inverse() if flipped else matrix
    theta = (corners @ affine.inverse() @ corners.inverse())[:2]
    theta[0] *= -1 if flipped else 1
    noise = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(100000 + 1000 * index + step))[0]
    return NoisyCopy(theta.float(), noise, strength)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_maps_are_the_authors(index: int) -> None:
    """Pixels whose samples lie at the border of what counts as an outlier differ by one sample: compared on average."""
    ref = reference("dave")
    matrices = torch.from_numpy(ref["matrices"][index]).double()
    samples = [authors_sample(matrices[s], index, s, float(t)) for s, t in enumerate(ref["schedule"])]
    ask = asked(deit_tiny(), inputs()[index : index + 1], int(ref["target"][index]))
    variants = {
        "maps": samples,
        "affine_only": [NoisyCopy(s.theta, None, s.strength) for s in samples],
        "noise_only": [NoisyCopy(None, s.noise, s.strength) for s in samples],
    }
    for name, some in variants.items():
        (found,) = contributions(ask, some, "libra")
        expected = torch.from_numpy(ref[name][index])
        difference = (robust_mean(found).sum(0) - expected).abs()
        assert float(difference.mean()) < 1e-3 * float(expected.abs().mean()), name


def test_an_operator_that_does_not_hold_is_refused() -> None:
    vit = shared("cait")
    with pytest.raises(pl.Unsupported, match=r"backward rule 'libra' does not hold .* mixed over heads"):
        pl.explain(vit, images(vit), "dave", samples=1)
    with pytest.raises(pl.Unsupported, match="no backward rule is called 'libre'; did you mean 'libra'"):
        pl.explain(shared("vit"), images(shared("vit")), "dave", samples=1, operator="libre")
    plain = pl.explain(vit, images(vit, 1), "dave", target=1, preset="operator", operator="plain").scores
    torch.testing.assert_close(plain, pl.explain(vit, images(vit, 1), "ixg", target=1, level="pixel").scores)
