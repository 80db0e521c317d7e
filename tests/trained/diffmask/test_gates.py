"""Gates: the paper-literal version, known starts, open and closed gates, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.targets import kl_divergence
from patchlight.trained.diffmask.gates import DiffMask, Gates, aggregate, load, masked_logits, new_gates, observe
from tests.families import build, images
from tests.trained.toys import pictures, toy


def literal(gates: Gates, h0: Tensor, states: list[Tensor]) -> Tensor:
    """u of every gate, image and patch, one at a time, as in the paper."""
    u = torch.empty(gates.count, *h0.shape[:2], dtype=torch.float64)
    w = {name: value.detach().double() for name, value in gates.named_parameters()}
    for i in range(gates.count):
        W1 = torch.stack([w["g1"][i, r] * w["v1"][i, r] / w["v1"][i, r].norm() for r in range(w["v1"].shape[1])])
        W2 = w["g2"][i, 0] * w["v2"][i, 0] / w["v2"][i, 0].norm()
        for b in range(h0.shape[0]):
            for p in range(h0.shape[1]):
                pair = torch.cat([h0[b, p], states[i][b, p]]).double()
                hidden = torch.tanh(W1 @ pair + w["c1"][i, 0])
                u[i, b, p] = gates.alpha * torch.tanh(W2 @ hidden + w["c2"][i, 0, 0]) + w["beta"][i]
    return u


def test_locations_are_the_papers() -> None:
    vit = toy()
    seen = observe(vit, pictures(2))
    gates = new_gates(vit, 1)
    assert torch.allclose(
        gates.locations(seen.h0, seen.states).double(), literal(gates, seen.h0, seen.states), atol=1e-5
    )
    stacked = gates.locations(seen.h0, torch.stack(seen.states))
    assert torch.allclose(stacked, gates.locations(seen.h0, seen.states), atol=1e-5)
    one = gates.locations(seen.h0, seen.states[2:3], first=2)
    assert torch.allclose(one[0], gates.locations(seen.h0, seen.states)[2], atol=1e-6)


def test_states_are_projection_inputs_and_last_output() -> None:
    vit = toy()
    x = pictures(2)
    seen = observe(vit, x)
    net = vit.model
    h0 = net.patch_embed(x)
    tokens = net.norm_pre(net._pos_embed(h0))
    assert len(seen.states) == vit.depth + 2
    assert torch.allclose(seen.states[0], h0)
    assert torch.allclose(seen.states[1], tokens[:, 1:])
    assert torch.allclose(seen.states[-1], net.blocks(tokens)[:, 1:], atol=1e-5)
    assert torch.allclose(seen.logits, net(x), atol=1e-5)


@pytest.mark.parametrize(("alpha", "beta", "masked"), [(15, 8, 0.27), (10, 5, 0.46), (20, 8, 0.60), (15, 10, 0.07)])
def test_the_start_masks_what_the_paper_says(alpha: float, beta: float, masked: float) -> None:
    noise = torch.randn(14, 4, 49, 192, generator=torch.Generator().manual_seed(0))
    shares = [
        1 - aggregate(Gates(14, 192, alpha, beta, seed=s).locations(noise[0], noise), "keep").mean() for s in range(6)
    ]
    assert float(torch.stack(shares).detach().mean()) == pytest.approx(masked, abs=0.09)


def test_baseline_starts_small_or_is_zero() -> None:
    assert float(Gates(3, 4096).baseline.detach().std()) == pytest.approx(1 / 64, rel=0.1)
    zero = Gates(3, 64, learn_baseline=False)
    assert not zero.baseline.requires_grad
    assert float(zero.baseline.abs().max()) == 0


@pytest.mark.parametrize(
    "family", ["vit-wide", "deit-distilled", "eva02", "siglip", "beit", "reg4-gap", "hf-clip", "torchvision"]
)
def test_open_gates_change_nothing_and_closed_ones_hide_the_image(family: str) -> None:
    vit = build(family)
    x = images(vit, 2)
    seen = observe(vit, x)
    gates = new_gates(vit)
    uniform = torch.full((gates.count, *seen.h0.shape[:2]), 0.5)
    with torch.no_grad():
        gates.beta.fill_(1e4)
        patches, log_keep = gates(seen.h0, seen.states, uniform)
        logits = masked_logits(vit, x, patches)
        assert torch.allclose(logits, seen.logits, atol=1e-4)
        assert float(kl_divergence(seen.logits, logits, vit.outputs).abs().max()) < 1e-5
        assert float(log_keep.abs().max()) == 0
        gates.beta.fill_(-1e4)
        hidden = masked_logits(vit, x, gates(seen.h0, seen.states, uniform)[0])
        assert torch.allclose(hidden[0], hidden[1], atol=1e-5)
        assert not torch.allclose(hidden[0], seen.logits[0], atol=1e-3)


def test_more_gates_never_keep_more() -> None:
    vit = toy()
    seen = observe(vit, pictures(3))
    u = new_gates(vit, beta=2.0).locations(seen.h0, seen.states)
    for kind in ("expected", "keep"):
        shares = torch.stack([aggregate(u[: i + 1], kind) for i in range(len(u))])  # type: ignore[arg-type]
        assert bool((shares.diff(dim=0) <= 1e-6).all())


def test_save_and_load(tmp_path: Path) -> None:
    vit = toy()
    dm = DiffMask.of(new_gates(vit, 4, alpha=9.0), vit, note="kept")
    back = load(dm.save(tmp_path / "dm"), vit)
    x = pictures(2)
    first, second = (pl.explain(vit, x, "diffmask", explainer=e).scores for e in (dm, str(tmp_path / "dm")))
    assert torch.equal(first, second)
    assert back.about == {"note": "kept"}
    assert "toy" in repr(back)
