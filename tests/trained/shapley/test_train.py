"""Training: it learns, resumes after a kill, does not change the model, and refuses bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import Unsupported
from patchlight.methods.shapley import constrained_values
from patchlight.trained.shapley import ShapleyProgress, ShapleySettings, SurrogateProgress
from patchlight.trained.shapley.networks import Change, Copy, read_logits
from tests.families import shared
from tests.trained.test_explainers import SHAPLEY, weights
from tests.trained.toys import batches, pictures, toy

QUICK = SHAPLEY.quick


def test_both_stages_are_reported() -> None:
    told: list[Any] = []
    sh = pl.shapley.train(toy(), batches(), ShapleySettings(**QUICK), told.append, held_out=batches(8))
    kinds = [type(now) for now in told]
    assert kinds == [SurrogateProgress] * 3 + [ShapleyProgress] * 4
    assert told[2].steps == 8
    result = sh.about["result"]
    assert (result["step"], result["surrogate"]["step"]) == (10, 8)
    assert result["held_out"]["images"] == 8
    assert "held_out" not in pl.shapley.train(toy(), batches(), ShapleySettings(**QUICK)).about["result"]


@pytest.mark.parametrize(
    "changes",
    [
        {"surrogate": "model", "backbone": "frozen"},
        {"rank": None, "precision": "bf16"},
        {"coalitions": "code", "ratio": 1.0},
    ],
)
def test_every_setting_trains(changes: dict[str, Any]) -> None:
    vit = toy()
    sh = pl.shapley.train(vit, batches(), ShapleySettings(**{**QUICK, "steps": 3, "surrogate_steps": 2, **changes}))
    assert all(bool(torch.isfinite(value).all()) for value in weights(sh).values())
    if "surrogate" in changes:
        assert not any(name.startswith("surrogate") for name in weights(sh))
        assert torch.equal(sh.surrogate(vit).logits(pictures(2)), vit.logits(pictures(2)))
        assert not any("change" in name for name in weights(sh))
        assert sh.join(vit).surrogate is sh.join(vit).backbone


def test_in_half_precision_every_step_computes_with_the_weights_of_the_last() -> None:
    """Autocast caches cast weights by default."""
    told: dict[str, list[Any]] = {"full": [], "bf16": []}
    for precision, found in told.items():
        settings = ShapleySettings(
            **{**QUICK, "precision": precision, "log_every": 8, "steps": 24, "surrogate_steps": 24}
        )
        pl.shapley.train(toy(), batches(), settings, found.append)
    for one, other in zip(told["full"], told["bf16"], strict=True):
        assert other.loss == pytest.approx(one.loss, rel=0.03)
    moved = [abs(now.loss - (now.even if isinstance(now, ShapleyProgress) else now.untrained)) for now in told["full"]]
    lost = [abs(one.loss - other.loss) for one, other in zip(told["full"], told["bf16"], strict=True)]
    assert lost[2] < 0.2 * moved[2]
    assert lost[5] < 0.2 * moved[5]


def test_the_surrogate_learns_to_do_without_patches() -> None:
    told: list[Any] = []
    settings = ShapleySettings(
        **{**QUICK, "surrogate_steps": 90, "steps": 1, "log_every": 30, "batch_size": 8, "rank": None}
    )
    pl.shapley.train(toy(), batches(size=8), settings, told.append)
    last = [now for now in told if isinstance(now, SurrogateProgress)][-1]
    assert last.loss < 0.8 * last.untrained


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_training_the_surrogate_changes_every_weight_it_should(precision: str) -> None:
    """Matrices of the blocks by a low-rank product, both factors of which change; other weights by a full tensor."""
    vit = toy()
    sh = pl.shapley.train(vit, batches(), ShapleySettings(**{**QUICK, "steps": 1, "precision": precision}))
    copy = Copy(vit)
    start = Change.new(
        copy.used_weights(pictures(1), read_logits), copy.block_weights(), QUICK["rank"], 0
    ).requires_grad_(False)
    change = sh.network.surrogate.change
    assert set(change.left) == set(start.left)
    assert len(change.left) == 8, "four matrices in each of two blocks"
    for name, left in change.left.items():
        assert float(left.abs().max()) > 1e-3, name
        assert float((change.right[name] - start.right[name]).abs().max()) > 1e-3, name
    assert all(float(value.abs().max()) > 1e-3 for value in change.whole.values())
    without = Change.read({k: v for k, v in change.state_dict().items() if k.startswith("whole")})
    x = pictures(4)
    assert not torch.allclose(Copy(vit).apply(without).logits(x), sh.surrogate(vit).logits(x), atol=1e-3)


def test_it_comes_near_the_shapley_values() -> None:
    """For a small model and a few images, compared with all coalitions of its six patches."""
    torch.manual_seed(0)
    from timm.models.vision_transformer import VisionTransformer

    from tests.families import randomise

    model = VisionTransformer(img_size=(8, 12), patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
    vit = pl.wrap(randomise(model, 0), name="six", preprocess=pl.Preprocess((8, 12)))
    x = 2 * torch.randn(8, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    settings = ShapleySettings(steps=150, surrogate="model", batch_size=8, masks=8, rank=None, rate=5e-3, warmup=10)
    sh = pl.shapley.train(vit, [x], settings)
    phi = pl.explain(vit, x, "vit-shapley", explainer=sh, target=[[0, 1, 2]] * 8).scores.flatten(2).double()
    every = torch.tensor([[bool(n >> i & 1) for i in range(6)] for n in range(64)])
    with torch.no_grad():
        worth = torch.stack([_worth(vit, x, z) for z in every])
    size = every.sum(1)
    some = (size > 0) & (size < 6)
    binomials = torch.tensor([1.0, 6.0, 15.0, 20.0, 15.0, 6.0, 1.0])
    kernel = 1 / (binomials[size] * size * (6 - size)).double()
    gain = (worth - worth[0]).double()
    exact = constrained_values(every[some], gain[some].flatten(1), gain[-1].flatten(), kernel[some])
    exact = exact.T.view(8, 3, 6)
    error, spread = (phi - exact).square().mean().sqrt(), (exact - exact.mean(2, keepdim=True)).square().mean().sqrt()
    assert float(error) < 0.35 * float(spread)


def _worth(vit: Any, x: Tensor, z: Tensor) -> Tensor:
    keep = z.nonzero().T.expand(len(x), -1)
    return vit.probabilities(vit.readout(vit.run(vit.embed(x), keep=keep)))  # type: ignore[no-any-return]


def test_a_model_whose_attention_cannot_be_masked_is_refused() -> None:
    with pytest.raises(Unsupported, match="reads its patches"):
        pl.shapley.train(shared("reg4-gap"), [], ShapleySettings())


def test_the_papers_settings() -> None:
    paper = ShapleySettings.preset("paper")
    assert (paper.rank, paper.ratio, paper.rate, paper.surrogate_rate, paper.masks) == (None, 4.0, 1e-4, 1e-5, 32)
    assert (paper.batch_size, paper.epochs, paper.surrogate_epochs, paper.coalitions) == (32, 100, 50, "kernel")
    assert ShapleySettings.preset("code").coalitions == "code"
