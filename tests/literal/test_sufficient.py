"""`sufficient_sets` in games with a known answer, and what it promises of a real model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.methods.sufficient import disjoint_sets, minimal
from tests.close import close
from tests.families import images, shared


def either(sets: Tensor) -> Tensor:
    """1 with both players 0 and 1, or with all of 3, 4 and 5; .1 less for lack of one, and so on."""

    def lack(members: tuple[int, ...]) -> Tensor:
        return len(members) - torch.stack([(sets == player).any(2) for player in members]).sum(0).double()

    return 1 - 0.1 * torch.minimum(lack((0, 1)), lack((3, 4, 5)))


@pytest.mark.parametrize("prior", [[0.0] * 8, [8.0, 7, 6, 5, 4, 3, 2, 1], [1.0, 2, 3, 4, 5, 6, 7, 8]])
def test_both_reasons_are_found(prior: list[float]) -> None:
    found = disjoint_sets(either, torch.tensor([prior]), 0.95, 8, 5)
    assert sorted(sorted(one.tolist()) for one in found) == [[0, 1], [3, 4, 5]]
    assert len(disjoint_sets(either, torch.tensor([prior]), 0.95, 8, 1)) == 1
    assert disjoint_sets(either, torch.tensor([prior]), 1.5, 8, 5) == []


def test_a_set_is_cut_down_to_what_it_needs() -> None:
    assert sorted(minimal(either, torch.arange(8), 0.95).tolist()) in ([0, 1], [3, 4, 5])
    assert minimal(lambda sets: torch.ones(sets.shape[:2]), torch.arange(4), 0.5).shape == (1,)


@pytest.mark.parametrize("unit", ["token", "patch"])
def test_sets_of_a_model_are_disjoint_enough_and_minimal(unit: str) -> None:
    vit = shared("vit")
    vit = pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess)
    batch = images(vit, 1)
    found = pl.sufficient_sets(vit, batch, 1, unit=unit, prior="genatt", candidates=4, share=0.98, most=3)  # type: ignore[arg-type]

    def p(mask: Tensor) -> float:
        keep = mask.flatten().nonzero()[:, 0]
        with torch.no_grad():
            if unit == "token":
                logits = vit.readout(vit.run(vit.embed(batch), keep=keep[None]))
            else:
                side = batch.shape[-1] // 4
                pixels = mask.repeat_interleave(side, 0).repeat_interleave(side, 1)
                logits = vit.readout(vit.run(vit.embed(batch * pixels)))
        return float(logits.softmax(1)[0, 1])

    everything = torch.ones(4, 4, dtype=torch.bool)
    whole = p(everything)
    assert found.full == pytest.approx(whole)
    assert len(found) > 0
    assert int(found.sets.sum(0).max()) == 1
    close(torch.tensor(found.probabilities), torch.tensor([p(one) for one in found.sets]), 1e-6)
    close(torch.tensor(found.without), torch.tensor([p(~one) for one in found.sets]), 1e-6)
    for one in found.sets:
        assert p(one) >= 0.98 * whole
        for at in one.nonzero() if one.sum() > 1 else []:
            less = one.clone()
            less[tuple(at)] = False
            assert p(less) < 0.98 * whole
    assert str(len(found)) in str(found)


def test_bad_settings_are_refused_and_sets_are_drawn() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    vit = shared("vit")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"share": 0}, "above 0"),
        ({"share": "most"}, "setting share='most' of 'sufficient_sets' is not valid"),
        ({"progress": False}, "'sufficient_sets' has no setting 'progress'"),
    ]
    for settings, words in wrong:
        with pytest.raises(pl.PatchlightError, match=words):
            pl.sufficient_sets(vit, images(vit, 1), **settings)
    with pytest.raises(pl.PatchlightError, match="one image"):
        pl.sufficient_sets(vit, images(vit, 2))
    sets = torch.zeros(1, 2, 2, dtype=torch.bool)
    sets[0, 1, 0] = True
    axes = pl.SufficientSets(sets, (0.9,), (0.3,), 1.0, 0.3, "cat").plot()
    assert (axes.images[0].get_array()[..., 3] > 0).tolist() == [[False, False], [True, False]]
    plt.close("all")
