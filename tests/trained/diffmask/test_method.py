"""Method `diffmask`: the contract with untrained gates, its maps by gate, the shipped gates, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patchlight as pl
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.testing import check_method
from patchlight.trained.diffmask import method
from patchlight.trained.diffmask.gates import DiffMask, aggregate, new_gates, observe
from tests.families import FAMILIES, HIERARCHICAL, STRUCTURAL, images, shared
from tests.trained.toys import pictures, toy

GATED = [family for family in FAMILIES if family not in HIERARCHICAL]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in STRUCTURAL else pytest.mark.slow) for f in GATED])
def test_contract_with_gates(family: str) -> None:
    vit = shared(family)
    explainer = DiffMask.of(new_gates(vit), vit)
    check_method("diffmask", vit, images(vit, 2), shared(family, torch.float64), {"explainer": explainer})


def test_maps_are_products_of_the_gates() -> None:
    vit = toy()
    x = pictures(3)
    gates = new_gates(vit, beta=2.0)
    dm = DiffMask.of(gates, vit)
    seen = observe(vit, x)
    u = gates.locations(seen.h0, seen.states)

    def explained(**settings: object) -> torch.Tensor:
        return pl.explain(vit, x, "diffmask", explainer=dm, **settings).scores

    assert torch.allclose(explained().flatten(1), aggregate(u), atol=1e-5)
    assert torch.allclose(explained(map="keep").flatten(1), aggregate(u, "keep"), atol=1e-5)
    assert torch.allclose(explained(map="graded").flatten(1), aggregate(u, "graded"), atol=1e-5)
    for gate in range(gates.count):
        assert torch.allclose(explained(gate=gate).flatten(1), aggregate(u[: gate + 1]), atol=1e-5)
        alone = explained(gate=gate, aggregated=False).flatten(1)
        assert torch.allclose(alone, aggregate(u[gate : gate + 1]), atol=1e-5)


@pytest.mark.parametrize("family", ["vit-wide", "deit-distilled", "eva02", "reg4-gap", "torchvision"])
def test_gates_inside_the_pass_or_all_in_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates on a CPU and on accelerators give the same maps."""
    vit = shared(family)
    dm = DiffMask.of(new_gates(vit, beta=2.0), vit)
    for settings in ({}, {"gate": 1}, {"gate": 1, "aggregated": False}):
        maps = []
        for inside in (True, False):
            monkeypatch.setattr(method, "_in_pass", lambda h0, inside=inside: inside)
            maps.append(pl.explain(vit, images(vit, 2), "diffmask", explainer=dm, **settings).scores)
        assert torch.allclose(*maps, atol=1e-5)


def test_a_graded_map_orders_patches_that_are_kept_or_masked_for_sure() -> None:
    u = torch.tensor([[[-20.0, -15.0, 0.0, 19.0, 23.0]], [[24.0] * 5]])
    plain, graded = aggregate(u), aggregate(u, "graded", alpha=15.0)
    assert float(plain[0, 3:].min()) > 1 - 1e-6
    assert bool((graded.diff() > 0.02).all())
    assert 0 < float(graded.min()) < float(graded.max()) < 1
    alone = aggregate(torch.tensor([[[-3.0, 0.1, 4.0]]]), "graded", alpha=15.0)
    assert alone[0].tolist() == pytest.approx([0.45, 0.5, 0.57], abs=0.02)  # (30 + u) / 60


def test_other_classes_and_their_order_do_not_matter() -> None:
    vit, other = toy(), toy()
    head = other.model.head
    order = torch.tensor([3, 1, 4, 0, 2])
    with torch.no_grad():
        head.weight.copy_(head.weight[order].clone())  # type: ignore[union-attr, index, operator]
        head.bias.copy_(head.bias[order].clone())  # type: ignore[union-attr, index, operator]
    gates = new_gates(vit)
    maps = [pl.explain(v, pictures(2), "diffmask", explainer=DiffMask.of(gates, v)).scores for v in (vit, other)]
    assert torch.equal(maps[0], maps[1])


def test_it_costs_one_forward() -> None:
    vit = toy()
    calls: list[int] = []
    handle = vit.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, operator, union-attr]
    dm = DiffMask.of(new_gates(vit), vit)
    pl.explain(vit, pictures(4), "diffmask", explainer=dm)  # the new hook has the model looked at again
    calls.clear()
    pl.explain(vit, pictures(4), "diffmask", explainer=dm)
    assert len(calls) == 1
    pl.explain(vit, pictures(4), {"rawatt": {}, "diffmask": {"explainer": dm}})
    assert len(calls) == 2
    handle.remove()


def test_the_bundled_model_brings_its_gates() -> None:
    vit = pl.load("pocket")
    photo = Path(pl.__file__).parent / "zoo" / "photos" / "dog.jpg"
    scores = pl.explain(vit, photo, "diffmask").scores
    assert scores.shape == (1, 8, 8)
    assert 0.1 < float((scores > 0.5).float().mean()) < 0.8
    assert sum(file.stat().st_size for file in DiffMask.shipped.iterdir()) <= 2_000_000
    check_method("diffmask", vit, vit.batch([photo, photo.with_name("cat.jpg")]))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "it needs gates trained for toy: train them with `patchlight diffmask train`"),
        ({"explainer": "shipped"}, "trained for pocket with 9 blocks, not 2"),
        ({"explainer": "own", "gate": 9}, "no gate 9; toy has gates 0 to 3"),
        ({"explainer": "own", "aggregated": False}, "choose it with gate"),
    ],
)
def test_refusals(settings: dict[str, object], told: str) -> None:
    vit = toy()
    named = {"shipped": DiffMask.shipped, "own": DiffMask.of(new_gates(vit), vit)}
    settings = {k: named.get(v, v) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(Unsupported, match=told):
        pl.explain(vit, pictures(1), "diffmask", **settings)


def test_words_that_are_no_explainer() -> None:
    with pytest.raises(PatchlightError, match="explainer is a int"):
        pl.explain(toy(), pictures(1), "diffmask", explainer=3)
    with pytest.raises(PatchlightError, match="does not hold a DiffMask"):
        pl.explain(toy(), pictures(1), "diffmask", explainer="/nowhere")
    with pytest.raises(PatchlightError, match="already make one map"):
        pl.explain(toy(), pictures(1), "diffmask.plus")
