"""`posterior` against Gaussian conditioning written out, and what the formula promises in games with a known answer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.posterior import RATIOS, condition, fields
from patchlight.methods.requests import resolve
from patchlight.testing import spearman
from tests.families import build, images, shared
from tests.literal.test_tis import asked
from tests.literal.toys import linear

CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def game(masks: int = 40, patches: int = 9, classes: int = 2, noise: float = 0.1, seed: int = 0) -> tuple[Tensor, ...]:
    """Masks [2,V,N], scores [2,V,T] and the effects [2,T,N] they were made of."""
    generator = torch.Generator().manual_seed(seed)
    shown = (torch.rand(2, masks, patches, generator=generator) < 0.5).double()
    effects = torch.randn(2, classes, patches, generator=generator, dtype=torch.float64)
    scores = 0.3 + shown @ effects.mT
    return shown, scores + noise * torch.randn(scores.shape, generator=generator, dtype=torch.float64), effects


def conditioned(masks: Tensor, scores: Tensor, mean: Tensor, noise: float, ridge: float) -> tuple[Tensor, Tensor]:
    """The textbook: beta ~ N(mean, tau^2 I) and w = M beta + e jointly Gaussian, so beta given w is Gaussian too."""
    m, w = masks - masks.mean(0), scores - scores.mean(0)
    tau = noise / ridge
    joint = tau * m @ m.T + noise * torch.eye(len(m), dtype=m.dtype)
    gain = tau * m.T @ torch.linalg.inv(joint)
    return mean + gain @ (w - m @ mean), (tau * torch.eye(m.shape[1], dtype=m.dtype) - gain @ m * tau).diagonal()


@pytest.mark.parametrize("masks", [6, 40])
def test_the_posterior_is_gaussian_conditioning(masks: int) -> None:
    shown, scores, effects = game(masks)
    prior = effects + 0.5
    found = condition(shown, scores, prior, ridge=2.0)
    for i in range(2):
        centred = shown[i] - shown[i].mean(0)
        unit = float((centred.T @ centred).trace()) / 9
        for t in range(2):
            w = scores[i, :, t] - scores[i, :, t].mean()
            f = centred @ prior[i, t]
            mean = max(0.0, float(f @ w / (f @ f))) * prior[i, t]
            noise = float(found.noise[i, 0, t])
            expected, variance = conditioned(shown[i], scores[i, :, t], mean, noise, 2.0 * unit)
            torch.testing.assert_close(found.mean[i, t], expected, **CLOSE)
            torch.testing.assert_close(found.variance()[i, t], variance, **CLOSE)


def test_lambda_is_weighed_by_the_marginal_likelihood() -> None:
    """log N(w; 0, sigma^2 (I + M M^T / lambda)) of centred scores, at the sigma^2 that makes it largest."""
    shown, scores, _ = game(12)
    found = condition(shown, scores, None, "likelihood")
    m, w = shown[0] - shown[0].mean(0), scores[0, :, 1] - scores[0, :, 1].mean()
    basis = torch.linalg.qr(torch.cat([torch.ones(12, 1), torch.eye(12)[:, :11]], 1).double()).Q[:, 1:]  # centred space
    m, w = basis.T @ m, basis.T @ w
    told = []
    for ratio in RATIOS:
        ridge = float(ratio) * float((m.T @ m).trace()) / 9
        shape = torch.eye(11, dtype=torch.float64) + m @ m.T / ridge
        sigma = float(w @ torch.linalg.solve(shape, w)) / 11
        told.append(-0.5 * (11 * math.log(sigma) + float(torch.logdet(shape))))
    expected = torch.tensor(told, dtype=torch.float64).softmax(0)
    torch.testing.assert_close(found.weights[0, :, 1], expected, atol=1e-9, rtol=1e-9)
    mixed = (expected[:, None] * found.means[0, :, 1]).sum(0)
    torch.testing.assert_close(found.mean[0, 1], mixed, **CLOSE)
    between = (expected[:, None] * (found.means[0, :, 1] - mixed) ** 2).sum(0)
    assert bool((found.variance()[0, 1] >= between - 1e-12).all())


def test_a_game_without_noise_is_recovered() -> None:
    shown, scores, effects = game(noise=0.0)
    found = condition(shown, scores, None, ridge=1e-12)
    torch.testing.assert_close(found.mean, effects, atol=1e-8, rtol=0)


def test_no_weight_on_the_masks_leaves_the_prior_and_no_prior_their_covariance() -> None:
    shown, scores, effects = game()
    prior = effects.abs()
    found = condition(shown, scores, prior, ridge=1e9)
    for i in range(2):
        for t in range(2):
            scale = found.mean[i, t] / prior[i, t]
            torch.testing.assert_close(scale, scale[0].expand(9), atol=1e-6, rtol=1e-6)
    alone = condition(shown, scores, None, ridge=1e9).mean
    m, w = shown - shown.mean(1, keepdim=True), scores - scores.mean(1, keepdim=True)
    told = w.mT @ m
    for i in range(2):
        torch.testing.assert_close(alone[i] / alone[i].norm(), told[i] / told[i].norm(), atol=1e-6, rtol=1e-6)


def test_the_size_of_a_prior_does_not_matter_and_its_opposite_is_none() -> None:
    shown, scores, effects = game()
    one, other = (condition(shown, scores, scale * effects).mean for scale in (1.0, 123.0))
    torch.testing.assert_close(one, other, **CLOSE)
    none = condition(shown, scores, None).mean
    for useless in (torch.zeros_like(effects), -effects):
        torch.testing.assert_close(condition(shown, scores, useless).mean, none, **CLOSE)


def test_masks_that_say_nothing_leave_the_prior_and_no_error() -> None:
    shown, scores, effects = game()
    same = condition(torch.ones_like(shown), scores, effects)
    torch.testing.assert_close(same.mean, effects, **CLOSE)
    assert bool(same.variance().isnan().all())
    flat = condition(shown, scores, torch.full_like(effects, 3.0))
    halves = (torch.rand(2, 40, 9, generator=torch.Generator().manual_seed(1)).argsort(-1) < 4).double()
    even, none = condition(halves, scores, torch.full_like(effects, 3.0)), condition(halves, scores, None)
    torch.testing.assert_close(even.mean, none.mean, atol=1e-8, rtol=1e-8)  # masks of one size: the prior says nothing
    assert bool(flat.mean.isfinite().all())


def test_classes_and_images_do_not_change_each_other() -> None:
    shown, scores, effects = game()
    both = condition(shown, scores, effects)
    one = condition(shown[1:], scores[1:, :, :1], effects[1:, :1])
    torch.testing.assert_close(both.mean[1:, :1], one.mean, **CLOSE)
    torch.testing.assert_close(both.variance()[1:, :1], one.variance(), **CLOSE)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Effects from the prior and Gaussian noise: 95 % intervals of 1,000 games hold 93 to 97 % of the effects."""
    generator = torch.Generator().manual_seed(0)
    games, masks, patches, tau, sigma = 1000, 48, 9, 1.0, 2.0
    shown = (torch.rand(games, masks, patches, generator=generator) < 0.5).double()
    effects = tau * torch.randn(games, 1, patches, generator=generator, dtype=torch.float64)
    noise = sigma * torch.randn(games, masks, 1, generator=generator, dtype=torch.float64)
    scores = shown @ effects.mT + noise
    centred = shown - shown.mean(1, keepdim=True)
    unit = float((centred**2).sum((1, 2)).mean()) / patches
    found = condition(shown, scores, None, (sigma / tau) ** 2 / unit)
    held = ((effects - found.mean).abs() <= 1.96 * found.variance().sqrt()).double().mean()
    assert 0.93 <= float(held) <= 0.97


def test_without_masks_it_is_the_prior() -> None:
    vit = shared("vit")
    batch, targets = images(vit, 2), Targets(torch.tensor([[1], [2]]))
    prior, alone = (
        compute(vit, batch, [resolve(name, given)], targets, 0)[1][0]
        for name, given in (("fullgrad-plus.libra", {}), ("posterior", {"samples": 0}))
    )
    torch.testing.assert_close(alone, prior)
    with pytest.raises(pl.PatchlightError, match="give samples or a prior"):
        pl.explain(vit, batch, "posterior", samples=0, prior="none")


@pytest.mark.parametrize("unit", ["token", "patch"])
@pytest.mark.parametrize("masks", ["grids", "coalitions"])
def test_a_linear_model_is_recovered(unit: str, masks: str) -> None:
    """Each patch adds its share to the logit, so the effects are these shares (over grey), up to a constant for all."""
    vit = linear()
    batch = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets = Targets(torch.tensor([[0], [3]]))
    given = {"samples": 200, "masks": masks, "unit": unit, "fill": "zero", "prior": "none", "ridge": 1e-9}
    found = compute(vit, batch, [resolve("posterior", given, "logit")], targets, 0)[1][0].flatten(2)
    share = vit.embed(batch).mT
    expected = torch.stack([share[0, :1], share[1, 3:4]])
    expected = expected - expected.mean(-1, keepdim=True)  # masks of one size say nothing about the mean
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_ignores_the_image_has_no_effects() -> None:
    vit = linear()
    with torch.no_grad():
        vit.model.weight.zero_()
    batch = torch.randn(1, 3, 12, 16, dtype=torch.float64)
    with pytest.warns(pl.DegenerateMap):
        att = pl.explain(vit, batch, "posterior", samples=64, prior="none")
    assert att.error is not None
    assert bool((att.scores.abs() <= att.error + 1e-12).all())


def test_masks_show_the_highest_places_of_their_source() -> None:
    vit = shared("vit")
    ask = asked(vit, images(vit, 2), [1, 2])
    for source in ("activations", "grids", "coalitions"):
        found = fields(ask, source, 20)  # type: ignore[arg-type]
        assert found.shape == (2, 20, 16)
        assert bool((found[0] != found[0, :1]).any())
    assert torch.equal(fields(ask, "grids", 20)[0], fields(ask, "grids", 20)[1])


def test_evidence_mends_a_bad_prior() -> None:
    """On a linear model the map of a random prior comes near to the true effects."""
    vit = linear(seed=2)
    batch = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    truth = vit.embed(batch).mT[0, 0].detach()
    found = {
        n: pl.explain(vit, batch, "posterior", target=0, score="logit", prior="random", samples=n, ridge=0.01)
        for n in (8, 400)
    }
    near = {n: spearman(att.scores[0].flatten(), truth) for n, att in found.items()}
    assert near[400] > 0.95
    assert found[8].error is not None
    assert found[400].error is not None
    assert float(found[400].error.mean()) < float(found[8].error.mean())


def test_what_cannot_be_a_prior_is_reported() -> None:
    vit = shared("vit")
    batch = images(vit, 1)
    for prior, told in (
        ("posterior", "its own prior"),
        ("gradcm", "gradcam"),
        ("genatt.ruls", "no composition or rule"),
    ):
        with pytest.raises(pl.PatchlightError, match=told):
            pl.explain(vit, batch, "posterior", prior=prior)


def test_where_the_usual_prior_does_not_work_another_is_taken() -> None:
    vit = build("swin")
    att = pl.explain(vit, images(vit, 1), "posterior", samples=32)
    assert att.scores.shape[-2:] == vit.grid
    assert att.error is not None
