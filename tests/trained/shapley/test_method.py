"""Method `vit-shapley`: the contract, several classes from one pass, the shipped explainer, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import patchlight as pl
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.testing import check_method
from patchlight.trained.shapley import ViTShapley
from tests.families import FAMILIES, STRUCTURAL, images, shared
from tests.trained.shapley.test_networks import untrained
from tests.trained.toys import pictures, toy


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in STRUCTURAL else pytest.mark.slow) for f in FAMILIES]
)
def test_contract_with_an_explainer(family: str) -> None:
    vit = shared(family)
    if ViTShapley.why_not(vit) is not None:
        check_method("vit-shapley", vit, images(vit, 2))
        return
    check_method("vit-shapley", vit, images(vit, 2), shared(family, torch.float64), {"explainer": untrained(vit)})


def test_all_classes_come_from_one_pass() -> None:
    vit = toy()
    sh = untrained(vit)
    calls: list[int] = []
    handle = vit.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, operator, union-attr]
    x = pictures(4)
    one = pl.explain(vit, x, "vit-shapley", explainer=sh, target=2).scores
    calls.clear()
    alone = untrained(vit, surrogate=False, backbone=False)
    pl.explain(vit, x, "vit-shapley", explainer=alone, target=[[0, 1]] * 4)
    calls.clear()
    pl.explain(vit, x, "vit-shapley", explainer=alone, target=[[0, 1]] * 4)
    assert len(calls) == 1, "where nothing but the last layers was trained"
    calls.clear()
    every = pl.explain(vit, x, "vit-shapley", explainer=sh, target=[[0, 1, 2, 3, 4]] * 4).scores
    assert len(calls) == 2, "the surrogate's whole image, and the explainer's"
    handle.remove()
    assert torch.allclose(every[:, 2], one, atol=1e-6)
    pair = pl.explain(vit, x, "vit-shapley", explainer=sh, target=(2, 0)).scores
    assert torch.allclose(pair, every[:, 2] - every[:, 0], atol=1e-6)


def test_the_bundled_model_brings_its_explainer() -> None:
    vit = pl.load("pocket")
    photo = Path(pl.__file__).parent / "zoo" / "photos" / "dog.jpg"
    phi = pl.explain(vit, photo, "vit-shapley", target=[list(range(10))]).scores[0]
    assert phi.shape == (10, 8, 8)
    sh = pl.shapley.load(ViTShapley.shipped, vit)
    g = sh.surrogate(vit)
    x = vit.batch(photo)
    total = g.probabilities(g.logits(x)) - sh.join(vit).empty
    assert torch.allclose(phi.sum((1, 2)), total[0], atol=1e-5)
    top = vit.logits(x).argmax()
    assert float(phi[top].sum()) > 0.5
    assert sum(file.stat().st_size for file in ViTShapley.shipped.iterdir()) <= 3_000_000
    check_method("vit-shapley", vit, vit.batch([photo, photo.with_name("cat.jpg")]))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "it needs a network trained for toy: train it with `patchlight shapley train`"),
        ({"explainer": ViTShapley.shipped}, "trained for pocket with 9 blocks, not 2"),
    ],
)
def test_refusals(settings: dict[str, object], told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        pl.explain(toy(), pictures(1), "vit-shapley", **settings)


def test_words_that_are_no_explainer_and_scores_that_are_no_probability() -> None:
    vit = toy()
    with pytest.raises(PatchlightError, match="explainer is a int; give a ViTShapley"):
        pl.explain(vit, pictures(1), "vit-shapley", explainer=3)
    with pytest.raises(PatchlightError, match="does not hold a ViT-Shapley"):
        pl.explain(vit, pictures(1), "vit-shapley", explainer="/nowhere")
    with pytest.raises(Unsupported, match="explains probabilities, not 'logit'"):
        pl.explain(vit, pictures(1), "vit-shapley", explainer=untrained(vit), score="logit")
    with pytest.raises(PatchlightError, match="has no layer maps"):
        pl.explain(vit, pictures(1), "vit-shapley.plus")
    with pytest.raises(PatchlightError, match="uses no gradient"):
        pl.explain(vit, pictures(1), "vit-shapley.libra")
