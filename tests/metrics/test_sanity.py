"""Parameter randomisation: similarities against scipy and scikit-image, and methods that must pass or fail."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.statistics import average_ranks
from patchlight.core.targets import Targets
from patchlight.methods.requests import resolve
from patchlight.metrics.sanity import hog, random_parameters, spearman, ssim, stages, twin, value_entropy
from patchlight.study.sources import map_function
from tests.close import within
from tests.families import STRUCTURAL, build, images, shared


def measured(maps: Any, count: int = 2, metric: str = "randomisation", **options: Any) -> pl.Evaluation:
    vit = shared("vit")
    return pl.evaluate(vit, images(vit, count), maps, metric, target=2, **options)


def edges(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
    """An edge detector: it looks at the image and never at the model."""
    grey = given.mean(1, keepdim=True)
    kernel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    across, down = (F.conv2d(grey, k[None, None], padding=1) for k in (kernel, kernel.T))
    return torch.hypot(across, down)[:, 0]


@pytest.mark.parametrize("levels", [3, 1000])
def test_spearman_is_scipys(levels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(levels, (4, 60), generator=generator).float() for _ in range(2))
    for i in range(4):
        np.testing.assert_array_equal(average_ranks(a)[i], stats.rankdata(a[i]))
        assert spearman(a, b)[i].item() == pytest.approx(stats.spearmanr(a[i], b[i]).statistic, abs=1e-12)
    torch.testing.assert_close(spearman(a, -a), torch.full((4,), -1.0, dtype=torch.float64))
    assert spearman(a, torch.ones_like(a)).eq(0).all()


@pytest.mark.parametrize("window", ["gaussian", "uniform"])
def test_ssim_is_scikit_images(window: Any) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, 30, 41, generator=generator, dtype=torch.float64)
    b = (a + 0.3 * torch.rand(2, 30, 41, generator=generator, dtype=torch.float64)).clamp(0, 1)
    how = {"gaussian_weights": True} if window == "gaussian" else {}
    for i in range(2):
        wanted = metrics.structural_similarity(a[i].numpy(), b[i].numpy(), data_range=1.0, **how)
        assert ssim(a, b, window)[i].item() == pytest.approx(wanted, abs=1e-10)
    torch.testing.assert_close(ssim(a, a, window), torch.ones(2, dtype=torch.float64))
    with pytest.raises(PatchlightError, match="SSIM needs maps of"):
        ssim(a[:, :6], b[:, :6], window)


@pytest.mark.parametrize(("height", "width", "cell"), [(64, 64, 16), (70, 51, 8), (48, 80, 16)])
def test_hog_is_scikit_images(height: int, width: int, cell: int) -> None:
    feature = pytest.importorskip("skimage.feature")
    maps = torch.rand(2, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for i in range(2):
        wanted = feature.hog(maps[i].numpy(), pixels_per_cell=(cell, cell))
        np.testing.assert_allclose(hog(maps, cell)[i], wanted, atol=1e-6)  # its histograms are float32
    assert hog(maps[:, :32, :32]).shape == (2, 2 * 2 * 9)
    with pytest.raises(PatchlightError, match="do not fit"):
        hog(maps[:, :10, :10])


@pytest.mark.parametrize("family", ["vit", *STRUCTURAL])
def test_stages_share_out_all_parameters_from_head_to_embedding(family: str) -> None:
    vit = shared(family)
    order = stages(twin(vit))
    names = [name for name, _ in order]
    blocks = [f"block {i}" for i in reversed(range(vit.depth))]
    assert [n for n in names if n.startswith("block")] == blocks
    assert names[0] == "head"
    assert names[-1] == "embed"
    members = [name for _, some in order for name in some]
    assert sorted(members) == sorted(name for name, _ in vit.model.named_parameters())
    assert any(p.shape[0] == vit.classes for name, p in vit.model.named_parameters() if name in order[0][1])


@pytest.mark.parametrize("family", ["vit", *STRUCTURAL])
def test_a_twin_is_the_same_model_with_weights_of_its_own(family: str) -> None:
    vit = shared(family)
    x = images(vit, 1)
    before = vit.logits(x)
    other = twin(vit)
    torch.testing.assert_close(other.logits(x), before)
    drawn = random_parameters(vit.model, 0)
    with torch.no_grad():
        for name, p in other.model.named_parameters():
            p.copy_(drawn[name])
    assert torch.equal(vit.logits(x), before)
    assert not torch.allclose(other.logits(x), before, atol=1e-3)
    assert all(torch.equal(drawn[k], v) for k, v in random_parameters(vit.model, 0).items())
    assert any(not torch.equal(drawn[k], v) for k, v in random_parameters(vit.model, 1).items())


def test_an_edge_detector_fails_and_a_method_that_reads_the_model_passes() -> None:
    for similarity in ("spearman", "spearman-abs", "ssim", "hog"):
        assert measured(edges, similarity=similarity).values.min() == pytest.approx(1, abs=1e-9)
    for name in ("genatt", "ixg.plus"):
        found = measured(name)
        assert found.values.max() < 0.7
        assert not found.higher_is_better


def test_the_curve_begins_at_one_and_its_tail_is_the_value() -> None:
    for order in ("cascading", "independent"):
        found = measured("genatt", order=order)
        assert found.curve is not None
        assert found.curve.shape == (2, 1 + 3 + 3)
        within(float(found.curve[:, 0].sub(1).abs().max()), 1e-12)
        torch.testing.assert_close(found.curve[:, 1:].mean(1), found.values)
    similarity = measured("genatt", similarity="ssim")
    within(float(similarity.curve[:, 0].sub(1).abs().max()), 1e-9)


def test_stages_are_those_of_a_literal_cascade() -> None:
    vit = build("vit")
    x = images(vit, 2)
    target = Targets(torch.full((2, 1), 2))
    genatt = map_function(resolve("genatt"))
    drawn, parts, own = random_parameters(vit.model, 3), stages(twin(vit)), copy.deepcopy(vit.model.state_dict())
    found = {order: measured("genatt", order=order, seed=3).curve for order in ("cascading", "independent")}
    clean = genatt(vit, x, target, 3).flatten(1)
    for order, curve in found.items():
        for stage, (_, names) in enumerate(parts, 1):
            with torch.no_grad():
                for name, p in vit.model.named_parameters():
                    changed = {n for _, some in parts[:stage] for n in some} if order == "cascading" else names
                    p.copy_(drawn[name] if name in changed else own[name])
            now = genatt(vit, x, target, 3).flatten(1)
            for i in range(2):
                wanted = stats.spearmanr(clean[i], now[i]).statistic
                assert curve[i, stage].item() == pytest.approx(wanted, abs=1e-6)


def test_the_users_model_is_left_alone() -> None:
    vit = build("vit")
    vit.model.train()
    vit.model.head.weight.requires_grad_(True)
    state = copy.deepcopy(vit.model.state_dict())
    learning = [p.requires_grad for p in vit.model.parameters()]
    pl.evaluate(vit, images(vit, 1), "genatt", "randomisation", target=1)
    assert all(torch.equal(state[k], v) for k, v in vit.model.state_dict().items())
    assert vit.model.training
    assert learning == [p.requires_grad for p in vit.model.parameters()]


def test_batches_seeds_and_shared_explanations() -> None:
    together = measured("genatt", 3)
    apart = measured("genatt", 3, batch_size=2)
    torch.testing.assert_close(apart.values, together.values, atol=1e-6, rtol=0)
    assert not torch.allclose(measured("genatt", 3, seed=1).values, together.values)
    calls = []

    def counted(vit: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        calls.append(len(given))
        return edges(vit, given, targets, seed)

    asked = {"a": {"metric": "randomisation"}, "b": {"metric": "randomisation", "similarity": "hog"}}
    pl.evaluate(shared("vit"), images(shared("vit"), 2), counted, asked, target=0)
    assert calls == [2] * (1 + 3 + 3)


@pytest.mark.filterwarnings("ignore:the map of image")
def test_constant_maps() -> None:
    with pytest.warns(pl.UndefinedMetric, match="constant, so nothing can be similar"):
        found = measured(lambda vit, given, targets, seed: torch.ones(len(given), 4, 4), 1)
    assert found.count == 0
    vit = shared("vit")

    def dies(model: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return edges(model, given, targets, seed) * (model is vit)

    assert measured(dies, 1).values.item() == 0


def test_random_maps_are_the_floor() -> None:
    maps = torch.randn(40, 32, 32, generator=torch.Generator().manual_seed(5))
    floor = measured(maps, 40, "random-floor")
    assert abs(floor.mean) < 4 / (1024 * 10 * 40) ** 0.5 * 10
    assert floor.values.abs().max() < 0.1
    assert -0.2 < measured(maps, 40, "random-floor", similarity="hog", samples=2).mean < 0.2
    low, high = floor.interval()
    assert low < floor.mean < high


def test_a_model_described_by_functions_cannot_be_copied() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(3, 8, 16, 16)
            self.layers = nn.ModuleList([nn.Linear(8, 8)])
            self.head = nn.Linear(8, 5)

        def embed(self, given: Tensor) -> Tensor:
            return self.project(given).flatten(2).mT

        def read(self, tokens: Tensor) -> Tensor:
            return self.head(tokens.mean(1))

    def described(model: Own, **how: Any) -> Anatomy:
        about = {"grid": (4, 4), "prefix": 0, "pooling": "avg", "heads": 1, "classes": 5}
        return pl.wrap(model, blocks=model.layers, preprocess=pl.Preprocess((64, 64)), **about, **how)

    torch.manual_seed(0)
    model = Own()
    vit = described(model, embed=model.embed, readout=model.read)
    x = torch.randn(1, 3, 64, 64)

    def heat(model: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return model.run(model.embed(given)).sum(-1).view(-1, 4, 4)

    assert [name for name, _ in stages(twin(vit))] == ["head", "block 0", "embed"]
    found = pl.evaluate(vit, x, heat, "randomisation", target=0)
    assert found.curve[0, :2].tolist() == pytest.approx([1, 1])
    assert found.curve[0, 2] < 0.99
    loose = described(model, embed=lambda given: model.embed(given), readout=model.read)
    with pytest.raises(pl.Unsupported, match="described by functions"):
        pl.evaluate(loose, x, heat, "randomisation", target=0)


def test_entropy_of_values_by_hand() -> None:
    """Two values, half each: ln 2; values that fill all bins alike: ln of their number; a constant: 0."""
    half = torch.tensor([0.0, 1.0]).repeat(50).view(1, 10, 10)
    ramp = torch.arange(100.0).view(1, 10, 10)
    found = value_entropy(torch.cat([half, ramp, 3 * ramp + 5, torch.ones(1, 10, 10)]))
    expected = torch.tensor([2.0, 100.0, 100.0, 1.0], dtype=torch.float64).log()
    torch.testing.assert_close(found, expected)
    one = torch.zeros(1, 4, 4)
    one[0, 0, 0] = 1
    assert float(value_entropy(one)) == pytest.approx(-(1 / 16) * np.log(1 / 16) - (15 / 16) * np.log(15 / 16))


def test_entropy_of_random_weights() -> None:
    """0 for a method that ignores the model; else that of the model of which every parameter is random."""
    vit = shared("vit")
    x = images(vit, 2)

    def still(model: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        return given[:, 0, ::16, ::16]

    assert torch.equal(pl.evaluate(vit, x, still, "random-entropy", target=1).values, torch.zeros(2).double())
    found = pl.evaluate(vit, x, "ixg", "random-entropy", target=1).values
    other = twin(vit)
    other.model.load_state_dict(random_parameters(vit.model, 0), strict=False)
    before, after = (value_entropy(pl.explain(m, x, "ixg", 1).scores) for m in (vit, other))
    torch.testing.assert_close(found, (after - before) / before)


def test_smoothed_randomisation_averages_noisy_copies() -> None:
    vit = shared("vit")
    x = images(vit, 2)
    seen: list[Tensor] = []

    def method(model: Anatomy, given: Tensor, targets: Targets, seed: int) -> Tensor:
        seen.append(given)
        with torch.no_grad():
            return model.patches(model.run(model.embed(given)).sum(-1))

    plain = pl.evaluate(vit, x, method, "randomisation", target=1, order="bottom-up")
    assert all(torch.equal(given, x) for given in seen)
    depth = plain.curve.shape[1]
    seen.clear()
    smooth = pl.evaluate(vit, x, method, "randomisation", target=1, order="bottom-up", denoise=3)
    assert len(seen) >= 3 * depth
    noise = seen[-1] - x
    deviation = (x.flatten(1).amax(1) - x.flatten(1).amin(1)) / 10
    torch.testing.assert_close(noise.flatten(1).std(1), deviation, rtol=0.05, atol=0)
    assert torch.equal(smooth.curve[:, 0], torch.ones(2).double())
    assert not torch.equal(smooth.curve[:, 1:], plain.curve[:, 1:])
    last = pl.evaluate(vit, x, method, "randomisation", target=1).curve[:, -1]
    torch.testing.assert_close(plain.curve[:, -1], last)  # everything is random in the end, whatever the order
