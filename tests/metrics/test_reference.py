"""Insertion, deletion and perturbation against the curves the authors' own code printed, in their order of pixels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.targets import Targets
from patchlight.metrics.base import Measure
from patchlight.metrics.deletion import Removal, removed_logits
from patchlight.metrics.perturbation import levels, log_probability
from tests.close import near
from tests.reference import deit_tiny, inputs, reference, shared_dir

MAPS = ("genatt", "tis")


@cache
def stored(name: str) -> dict[str, Any]:
    with np.load(shared_dir() / "reference" / "metrics" / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def map_of(order: np.ndarray) -> Tensor:
    """A map [B,224,224] whose falling order is `order` [B,HW]: minus the rank of each pixel."""
    index = torch.from_numpy(order.astype(np.int64))
    ranks = torch.empty_like(index).scatter_(1, index, torch.arange(index.shape[1]).expand_as(index))
    return -ranks.view(-1, 224, 224).float()


@pytest.mark.parametrize("fill", ["mean", "blur", "black"])
@pytest.mark.parametrize(
    ("name", "some"), [("genatt", slice(0, 1)), *(pytest.param(n, slice(0, 4), marks=pytest.mark.slow) for n in MAPS)]
)
def test_tis_curves_are_theirs(name: str, some: slice, fill: str) -> None:
    saved = stored(f"tis_insertion_deletion_sparseness__{name}")
    found = pl.evaluate(
        deit_tiny(),
        inputs()[some],
        map_of(saved["order"][some]),
        ["insertion", "deletion"],
        target=saved["target"][some],
        preset="tis",
        steps=28,
        fill=fill,
    )
    for metric, evaluation in found.items():
        near(evaluation.curve, saved[f"{metric}_{fill}"][some], 1e-4, metric)
        np.testing.assert_allclose(evaluation.x, saved["fractions"], atol=1e-12)
        np.testing.assert_allclose(evaluation.values, saved[f"{metric}_{fill}"][some].mean(1), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "some"), [("tis", slice(2, 3)), *(pytest.param(n, slice(0, 4), marks=pytest.mark.slow) for n in MAPS)]
)
def test_rise_curves_and_areas_are_theirs(name: str, some: slice) -> None:
    saved = stored(f"rise_insertion_deletion__{name}")
    found = pl.evaluate(
        deit_tiny(), inputs()[some], map_of(saved["order"][some]), ["insertion", "deletion"], preset="rise", steps=28
    )
    for metric, short in (("insertion", "ins"), ("deletion", "del")):
        near(found[metric].curve, saved[metric][some], 1e-4, metric)
        near(found[metric].values, saved[f"auc_{short}"][some], 1e-4, metric)


def uncut(name: str, direction: str, changed: Tensor) -> Tensor:
    """The levels [P,B] that cut no group of tied pixels; theirs picks another part of such a group at every level."""
    maps = torch.from_numpy(stored("upsampled_maps")[name]).flatten(1)
    falling = (maps if direction == "positive" else -maps).sort(1, descending=True).values
    return (falling[:, changed - 1] != falling[:, changed]).T


@pytest.mark.parametrize("direction", ["positive", "negative"])
@pytest.mark.parametrize(
    ("name", "some"), [("genatt", slice(1, 3)), *(pytest.param(n, slice(0, 4), marks=pytest.mark.slow) for n in MAPS)]
)
def test_chefer_perturbation_is_theirs(name: str, some: slice, direction: str) -> None:
    """Hits, the change of the highest probability and logit, and log(p_target / p_second)."""
    saved = stored(f"chefer_perturbation_{direction[:3]}__{name}")
    maps = map_of(saved["full_topk_order"][some])
    maps = maps if direction == "positive" else -maps
    labels = torch.from_numpy(reference("inputs")["label"])[some]
    found = pl.evaluate(
        deit_tiny(), inputs()[some], maps, "perturbation", labels=labels, preset="chefer", direction=direction
    )
    assert found.curve is not None
    assert torch.equal(found.curve.T, torch.from_numpy(saved["hits"][:, some]))
    torch.testing.assert_close(found.values, found.curve.mean(1), atol=1e-6, rtol=0)
    assert found.higher_is_better == (direction == "negative")

    ask = Measure(deit_tiny(), inputs()[some], maps, Targets(labels[:, None]), labels)
    x, changed = levels(224 * 224, 9, 0.1, 0.9)
    np.testing.assert_allclose(x, saved["fractions"], atol=1e-12)
    logits = removed_logits(ask, changed, False, Removal(lowest_first=direction == "negative")).double()
    clean = ask.logits().double()
    whole = uncut(name, direction, changed)[:, some]
    assert whole.double().mean() > 0.6
    second = logits.log_softmax(-1).topk(2, -1).values[..., 1]
    for key, ours, limit in (
        ("prob_diff", logits.softmax(-1).amax(-1) - clean.softmax(-1).amax(-1, keepdim=True), 1e-4),
        ("logit_diff", logits.amax(-1) - clean.amax(-1, keepdim=True), 1e-3),
        ("dissimilarity", log_probability(logits, ask.of("label"), ask) - second, 1e-3),
    ):
        near(ours.T[whole], saved[key][:, some][whole], limit, key)
