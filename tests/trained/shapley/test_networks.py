"""Changes to copies of a model, the efficiency of the values, and the explainer on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.trained.shapley.networks import (
    Change,
    Copy,
    Networks,
    Surrogate,
    Values,
    ViTShapley,
    normalise,
    read_logits,
    read_tokens,
)
from patchlight.trained.shapley.train import fit
from tests.families import images, shared
from tests.trained.toys import pictures, toy


def drawn(change: Change, seed: int = 0, size: float = 0.2) -> Change:
    """A module with random weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in change.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return change


def untrained(
    vit: Anatomy, rank: int | None = 2, surrogate: bool = True, seed: int = 0, backbone: bool = True
) -> ViTShapley:
    """An explainer with random weights in all its parts."""
    copy = Copy(vit.wide())
    x = images(vit, 1).to(copy.vit.dtype)
    changes = [
        drawn(Change.new(copy.used_weights(x, read), copy.block_weights(), rank, seed), seed + i, 0.05)
        for i, read in enumerate((read_logits, read_tokens))
    ]
    changes = [
        change if kept else Change({}, {}, {}) for change, kept in zip(changes, (surrogate, backbone), strict=True)
    ]
    torch.manual_seed(seed)
    values = Values(changes[1], vit.width, vit.heads, 24, vit.outcomes)
    with torch.no_grad():
        values.mlp[-1].weight.normal_()  # type: ignore[operator, union-attr]
    return ViTShapley.of(Networks(Surrogate(changes[0]), values), vit)


def test_no_change_is_the_model() -> None:
    vit = toy()
    copy = Copy(vit)
    x = pictures(2)
    change = Change.new(copy.used_weights(x, read_logits), copy.block_weights(), 2, 0)
    with torch.no_grad():
        assert torch.equal(read_logits(copy.with_change(change), x), vit.logits(x))


@pytest.mark.parametrize("rank", [2, None])
def test_a_change_is_added_to_the_weights(rank: int | None) -> None:
    """Compared with a separate model: each matrix of a block plus l r, other weights plus a full tensor."""
    vit, other = toy(), toy()
    copy = Copy(vit)
    x = pictures(2)
    change = drawn(Change.new(copy.used_weights(x, read_logits), copy.block_weights(), rank, 0))
    low = set(change.left)
    matrices = {f"blocks/{i}/{name}/weight" for i in (0, 1) for name in ("attn/qkv", "attn/proj", "mlp/fc1", "mlp/fc2")}
    assert low == (matrices if rank else set())
    state = other.model.state_dict()
    assert len(change.whole) + len(low) == len(state)
    for name, value in state.items():
        key = name.replace(".", "/")
        value += change.left[key].detach() @ change.right[key].detach() if key in low else change.whole[key].detach()
    with torch.no_grad():
        moved = read_logits(copy.with_change(change), x)
    assert torch.allclose(moved, other.logits(x), atol=1e-6)
    settled = Copy(vit).apply(change)
    assert torch.allclose(settled.logits(x), moved, atol=1e-6)
    assert torch.allclose(settled.model(x), moved, atol=1e-6)
    assert torch.equal(vit.logits(x), toy().logits(x)), "the model itself is as it was"


def test_gradients_reach_every_part_of_a_change_that_is_used() -> None:
    vit = toy()
    copy = Copy(vit)
    x = pictures(2)
    change = drawn(Change.new(copy.used_weights(x, read_tokens), copy.block_weights(), 2, 0))
    assert not any(name.startswith(("head", "norm")) for name in change.whole), "tokens do not depend on the head"
    read_tokens(copy.with_change(change), x).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in change.parameters())
    assert all(p.grad is None for p in vit.model.parameters())


@pytest.mark.parametrize(("surrogate", "backbone"), [(True, True), (False, True), (True, False), (False, False)])
def test_the_values_share_out_the_whole_exactly(surrogate: bool, backbone: bool) -> None:
    vit = toy().copied(torch.float64)
    joined = untrained(vit, surrogate=surrogate, backbone=backbone).join(vit)
    x = pictures(3).double()
    with torch.no_grad():
        phi = joined(x)
        g = joined.surrogate
        tokens = g.embed(x)[:, :1]
        none = g.probabilities(g.readout(g.run(tokens)))
        total = g.probabilities(g.logits(x)) - none
    assert phi.shape == (3, 16, 5)
    assert torch.allclose(phi.sum(1), total, atol=1e-12)
    assert torch.allclose(none, joined.empty.expand(3, -1), atol=1e-12)


def test_an_additive_game_is_fitted_without_loss() -> None:
    """v(S) = v(empty) + sum over S of a: the loss is 0 at phi = a and positive elsewhere."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 9, 3, generator=generator, dtype=torch.float64)
    z = torch.rand(2, 12, 9, generator=generator) < 0.5
    gain = torch.stack([torch.stack([a[b][z[b, m]].sum(0) for m in range(12)]) for b in range(2)])
    assert float(fit(a, z, gain)) < 1e-25
    assert torch.allclose(normalise(a, a.sum(1)), a)
    shift = torch.zeros_like(a)
    shift[0, 4, 1] = 0.5
    by_hand = 9 * sum(0.25 for m in range(12) if z[0, m, 4]) / (2 * 12 * 3)
    assert float(fit(a + shift, z, gain)) == pytest.approx(by_hand)


def test_normalisation_adds_the_same_to_every_patch() -> None:
    phi, total = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    found = normalise(phi, total)
    assert torch.allclose(found.sum(1), total)
    assert torch.allclose((found - phi).std(1), torch.zeros(2, 3, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("surrogate", [True, False])
def test_saved_and_read_again_it_gives_the_same(surrogate: bool, tmp_path: Path) -> None:
    vit = toy()
    sh = untrained(vit, surrogate=surrogate)
    sh.save(tmp_path)
    back = pl.shapley.load(tmp_path, vit)
    x = pictures(3)
    assert torch.equal(back.join(vit)(x), sh.join(vit)(x))
    assert {v.dtype for v in tensors(tmp_path).values()} == {torch.float16, torch.float32}, "the signature is whole"
    assert "4x4 patches" in repr(back)
    same = torch.equal(sh.surrogate(vit).logits(x), vit.logits(x))
    assert same != surrogate


def tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "values.safetensors")


def test_it_follows_the_model() -> None:
    """The changes are added to the current weights, even if these have changed slightly."""
    vit = toy()
    sh = untrained(vit)
    x = pictures(1)
    before = sh.join(vit)(x)
    assert sh.join(vit) is sh.join(vit)
    with torch.no_grad():
        vit.model.pos_embed += 0.1  # type: ignore[operator]
    assert not torch.allclose(sh.join(vit)(x), before)


@pytest.mark.parametrize("family", ["deit-distilled", "torchvision"])
def test_surrogates_are_models_like_any_other(family: str) -> None:
    vit = shared(family)
    sh = untrained(vit)
    g = sh.surrogate(vit)
    x = images(vit, 2)
    maps = pl.explain(g, x, "genatt").scores
    assert maps.shape == (2, *vit.grid)
    assert not torch.allclose(maps, pl.explain(vit, x, "genatt").scores)
    value = pl.evaluate(g, x, maps, "insertion", preset="vit-shapley").mean
    assert 0 <= value <= 1
