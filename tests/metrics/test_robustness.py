"""Max-sensitivity against captum, quantus, closed forms and the stored values of a published run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import Targets
from patchlight.methods.requests import resolve
from patchlight.metrics.base import resolve_metric
from patchlight.metrics.robustness import uniform_noise
from patchlight.study.sources import map_function
from tests.families import images, shared
from tests.literal.toys import Linear
from tests.reference import deit_tiny, inputs, reference, shared_dir


def sensitivity(maps: Any, count: int = 3, target: Any = 2, **options: Any) -> Tensor:
    vit = shared("vit")
    return pl.evaluate(vit, images(vit, count), maps, "max-sensitivity", target=target, **options).values


def brightness(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
    """A method with a closed form: the mean colour of each patch."""
    return torch.nn.functional.avg_pool2d(given.mean(1, keepdim=True), 16)[:, 0]


@pytest.mark.parametrize("norm", ["l2", "l1", "linf"])
def test_the_formula(norm: str) -> None:
    vit = shared("vit")
    x = images(vit, 3)
    d = uniform_noise((3, 64, 64), 4, 0.3, seed=5)
    found = sensitivity(brightness, samples=4, radius=0.3, norm=norm, seed=5)
    order = {"l2": 2, "l1": 1, "linf": np.inf}[norm]
    for i in range(3):
        clean = brightness(vit, x[i : i + 1], Targets(torch.zeros(1, 1)), 0).flatten().numpy()
        moved = brightness(vit, x[i] + d, Targets(torch.zeros(4, 1)), 0).flatten(1).numpy()
        wanted = max(np.linalg.norm(clean - m, order) for m in moved) / np.linalg.norm(clean, order)
        assert found[i].item() == pytest.approx(wanted, rel=1e-5)


def test_draws_stay_in_their_ball() -> None:
    d = uniform_noise((3, 32, 32), 6, 0.02, 0)
    assert d.abs().max() <= 0.02
    assert d.abs().max() > 0.0199
    assert abs(d.mean().item()) < 1e-3
    assert not torch.equal(d[0], d[1])


def test_it_is_captums_value() -> None:
    captum = pytest.importorskip("captum.metrics")
    vit = shared("vit")
    x = images(vit, 3)
    genatt = map_function(resolve("genatt"))

    def explain(given: Any) -> tuple[Tensor]:
        given = given[0] if isinstance(given, tuple) else given
        return (genatt(vit, given, Targets(torch.full((len(given), 1), 2)), 0),)

    ours = sensitivity("genatt", samples=5, radius=0.05, seed=11)
    for i in range(3):
        torch.manual_seed(11)
        theirs = captum.sensitivity_max(explain, x[i : i + 1], perturb_radius=0.05, n_perturb_samples=5)
        assert ours[i].item() == pytest.approx(theirs.item(), rel=1e-3)
        torch.manual_seed(11)
        one_by_one = captum.sensitivity_max(
            explain, x[i : i + 1], perturb_radius=0.05, n_perturb_samples=5, max_examples_per_batch=1
        )
        assert ours[i].item() == pytest.approx(one_by_one.item(), rel=1e-3)


def test_it_is_quantus_value_at_the_same_draws() -> None:
    quantus = pytest.importorskip("quantus")
    vit = shared("vit")
    x = images(vit, 2)
    left = list(uniform_noise((3, 64, 64), 3, 0.05, 4).flatten(1).numpy())

    def explain(model: Any, inputs: Any, targets: Any, **_: Any) -> np.ndarray:
        given = torch.as_tensor(inputs, dtype=torch.float32)
        return (
            brightness(vit, given, Targets(torch.zeros(len(given), 1)), 0)[:, None].numpy().repeat(16, 2).repeat(16, 3)
        )

    def perturb(arr: np.ndarray, indices: Any, **_: Any) -> np.ndarray:
        return arr + left.pop(0)

    measure = quantus.MaxSensitivity(nr_samples=3, perturb_func=perturb, disable_warnings=True)
    theirs = measure(
        model=vit.model,
        x_batch=x.numpy(),
        y_batch=np.zeros(2, dtype=int),
        explain_func=explain,
        a_batch=None,
    )
    ours = sensitivity(brightness, 2, samples=3, radius=0.05, seed=4)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_the_stored_values() -> None:
    with np.load(shared_dir() / "reference" / "metrics" / "tis_maxsensitivity__genatt.npz") as file:
        value, seeds = file["value"], file["torch_seed"]
    target = reference("genatt")["target"]
    for i in range(2):
        found = pl.evaluate(
            deit_tiny(),
            inputs()[i : i + 1],
            "genatt",
            "max-sensitivity",
            target=[int(target[i])],
            preset="tis",
            seed=int(seeds[i]),
        )
        assert found.mean == pytest.approx(value[i], abs=1e-4)


def test_a_method_that_never_changes_has_none() -> None:
    fixed = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    assert sensitivity(lambda vit, given, targets, seed: fixed.expand(len(given), 4, 4)).eq(0).all()


def test_scale_does_not_matter() -> None:
    for scale in (1e-4, -300.0):
        larger = sensitivity(lambda *given, scale=scale: brightness(*given) * scale, samples=3)
        torch.testing.assert_close(larger, sensitivity(brightness, samples=3), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore::patchlight.UndefinedMetric")
def test_a_map_of_zeros_is_divided_by_one() -> None:
    vit = shared("vit")
    x = images(vit, 1)

    def explain(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return brightness(vit, given - x, targets, seed)

    noise = brightness(vit, uniform_noise((3, 64, 64), 3, 0.5, 0), Targets(torch.zeros(3, 1)), 0)
    wanted = noise.flatten(1).norm(dim=1).max().item()
    assert sensitivity(explain, 1, samples=3, radius=0.5).item() == pytest.approx(wanted, rel=1e-4)


def test_a_stochastic_method_is_blamed_only_when_asked() -> None:
    def noise(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return torch.rand(vit.grid, generator=torch.Generator().manual_seed(seed)).expand(len(given), -1, -1)

    assert sensitivity(noise, samples=3).eq(0).all()
    assert (sensitivity(noise, samples=3, reseed=True) > 0.1).all()
    vit = shared("vit")
    maps = pl.explain(vit, images(vit, 3), "rise", target=2, seed=5, samples=8)
    assert (sensitivity(maps, samples=3, radius=1e-4) < 0.01).all()
    assert (sensitivity(maps, samples=3, radius=1e-4, reseed=True) > 0.01).all()


def test_chunks_batches_and_targets() -> None:
    together = sensitivity("genatt", samples=3, radius=0.05)
    torch.testing.assert_close(sensitivity("genatt", samples=3, radius=0.05, chunk=2), together, rtol=1e-3, atol=0)
    torch.testing.assert_close(sensitivity("genatt", samples=3, radius=0.05, batch_size=2), together, rtol=1e-3, atol=0)
    reseeded = sensitivity("genatt", samples=3, radius=0.05, chunk=2, reseed=True)
    torch.testing.assert_close(reseeded, together, rtol=1e-3, atol=0)
    vit = shared("vit")
    mixed = sensitivity("ixg", samples=3, radius=0.05, target=[0, 1, 2])
    for i in range(3):
        alone = pl.evaluate(vit, images(vit, 3)[i : i + 1], "ixg", "max-sensitivity", target=i, samples=3, radius=0.05)
        assert alone.mean == pytest.approx(mixed[i].item(), rel=1e-3)
    assert not torch.allclose(sensitivity("ixg", samples=3, radius=0.05, target=(0, 1)), mixed, rtol=1e-2)


def test_chunks_reach_over_draws_but_not_over_seeds() -> None:
    seen: list[tuple[int, int]] = []

    def counted(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        seen.append((len(given), seed))
        return brightness(vit, given, targets, seed)

    sensitivity(counted, samples=3, chunk=4)
    assert seen == [(3, 0), (4, 0), (4, 0), (1, 0)]
    seen.clear()
    sensitivity(counted, samples=2, chunk=2, reseed=True)
    assert seen == [(3, 0), (2, 1), (1, 1), (2, 2), (1, 2)]


def test_maps_alone_cannot_be_explained_again() -> None:
    with pytest.raises(PatchlightError, match="needs a method"):
        sensitivity(torch.randn(3, 4, 4))


def test_a_fresh_attribution_is_not_explained_again() -> None:
    vit = shared("vit")
    x = images(vit, 3)
    maps = pl.explain(vit, x, "genatt", target=2)
    anew = sensitivity(maps, samples=2, radius=0.05)
    torch.testing.assert_close(sensitivity(maps, samples=2, radius=0.05, current=True), anew, rtol=1e-4, atol=0)
    doubled = dataclasses.replace(maps, scores=2 * maps.scores)
    torch.testing.assert_close(sensitivity(doubled, samples=2, radius=0.05), anew, rtol=1e-4, atol=0)
    assert (sensitivity(doubled, samples=2, radius=0.05, current=True) > 0.4).all(), "it takes the caller's word"


def contributions(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
    """What each pixel adds to the logit of a linear model: at the size of the image where it has one channel."""
    return (given * vit.model.weight.detach()[targets.index[:, 0]]).sum(1)


def slopes(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
    return vit.model.weight.detach()[targets.index[:, 0]].sum(1)


def stable(method: Any, **settings: Any) -> pl.Evaluation:
    weight = torch.randn(3, 1, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vit = Linear(weight)
    x = torch.rand(2, 1, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    return pl.evaluate(vit, x, method, "stability", target=0, **{"samples": 5, "radius": 0.01, **settings})


def test_stability_of_a_linear_model() -> None:
    """Contributions w x change by w d: at most max |w| for each step, and by as large a part as the image does."""
    weight = torch.randn(3, 1, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.rand(2, 1, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    d = uniform_noise((1, 4, 8), 5, 0.01, 0).double()
    found = stable(contributions)
    for i in range(2):
        largest = float((x[i] * weight[0]).abs().max())
        wanted = max(float((weight[0] * one).norm() / one.norm()) for one in d) / largest
        assert float(found.values[i]) == pytest.approx(wanted, rel=1e-4)
    assert torch.equal(stable(slopes).values, torch.zeros(2, dtype=torch.float64))
    ones = torch.ones(2, dtype=torch.float64)
    relative = stable(contributions, change="relative", per="relative-input")
    torch.testing.assert_close(relative.values, ones, atol=1e-6, rtol=1e-6)
    brighter = stable(contributions, preset="ris", samples=4, radius=0.02, low=0.02)
    torch.testing.assert_close(brighter.values, ones, atol=1e-6, rtol=1e-6)
    one = uniform_noise((1, 4, 8), 1, 0.01, 0).double()
    by_output = stable(contributions, samples=1, change="relative", per="output").values
    step = ((weight * one).flatten(1).sum(1)).norm()
    for i in range(2):
        assert float(by_output[i]) == pytest.approx(float((one / x[i]).norm() / step), rel=1e-4)
    by_tokens = stable(contributions, samples=1, change="relative", per="tokens").values
    assert (by_tokens > 0).all()


@pytest.mark.filterwarnings("ignore::patchlight.UndefinedMetric")
def test_noise_that_changes_the_prediction_does_not_count() -> None:
    few = stable(contributions, radius=3.0, samples=40)
    assert (few.parts["kept"] > 0).all()
    assert (few.parts["kept"] < 1).all()
    none = stable(contributions, radius=3.0, samples=1, seed=0)
    lost = none.parts["kept"] == 0
    assert torch.equal(lost, none.values.isnan())
    assert all(bool(reason) == bool(gone) for reason, gone in zip(none.reasons, lost, strict=True))


def test_the_defaults_are_those_of_the_paper() -> None:
    settings = resolve_metric("max-sensitivity").settings
    assert (settings["samples"], settings["radius"]) == (10, 0.02)
