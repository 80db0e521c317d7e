"""Targets and scores: all forms of a class, and all errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import patchlight as pl
from patchlight.core.targets import Outputs, Targets, class_index, kl_divergence, resolve_targets, target_scores
from tests.families import images, shared

LABELS = ["tench, Tinca tinca", "tabby, tabby cat", "crane", "crane", "Egyptian cat"]


def test_ways_to_name_a_class() -> None:
    for target in (1, "tabby", "Tabby Cat", [1, 1], torch.tensor([1, 1]), ["tabby", 1]):
        resolved = resolve_targets(target, 2, 5, LABELS)
        assert resolved is not None
        assert resolved.index.tolist() == [[1], [1]]
        assert not resolved.several
    several = resolve_targets([[0, "tabby"], [2, 4]], 2, 5, LABELS)
    assert several is not None
    assert several.several
    assert several.index.tolist() == [[0, 1], [2, 4]]
    pair = resolve_targets((0, "tabby"), 2, 5, LABELS)
    assert pair is not None
    assert pair.against is not None
    assert (pair.index.tolist(), pair.against.tolist()) == ([[0], [0]], [[1], [1]])
    assert resolve_targets(None, 2, 5, LABELS) is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (5, "target 5 is out of range; this model has classes 0 to 4"),
        (-1, "out of range"),
        ("tabbi", "no class is called 'tabbi'; did you mean 'tabby'"),
        ("crane", "names 2 classes .*give the index"),
        ([0, 1, 2], "length 3 but there are 2 images"),
        ([[0, 1], [2]], "the same number"),
        ((0, 1, 2), "a pair"),
        (torch.tensor([0.5, 1.0]), "dtype torch.float32; give class indices"),
        (1.5, "target 1.5 is a float; give a class index"),
        ([None, 1], "NoneType"),
    ],
)
def test_wrong_targets_are_explained(target: object, message: str) -> None:
    with pytest.raises(pl.PatchlightError, match=message):
        resolve_targets(target, 2, 5, LABELS)  # type: ignore[arg-type]


def test_a_name_without_labels() -> None:
    with pytest.raises(pl.PatchlightError, match="no labels"):
        class_index("cat", 5, None)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 1000))
def test_scores_have_their_closed_forms(a: int, b: int, seed: int) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one = Targets(torch.full((3, 1), a))
    assert torch.equal(target_scores(logits, one, "logit", Outputs())[:, 0], logits[:, a])
    torch.testing.assert_close(target_scores(logits, one, "probability", Outputs())[:, 0], logits.softmax(1)[:, a])
    torch.testing.assert_close(
        target_scores(logits, one, "probability", Outputs("sigmoid"))[:, 0], logits[:, a].sigmoid()
    )
    pair = Targets(torch.full((3, 1), a), torch.full((3, 1), b))
    torch.testing.assert_close(target_scores(logits, pair, "logit", Outputs())[:, 0], logits[:, a] - logits[:, b])


def test_a_one_output_head_has_two_labels() -> None:
    vit = shared("vit-binary")
    batch = images(vit)
    up, down = pl.explain(vit, batch, "ixg", target=1), pl.explain(vit, batch, "ixg", target=0)
    torch.testing.assert_close(up.scores, -down.scores)
    logits = vit.logits(batch)
    torch.testing.assert_close(vit.probabilities(logits)[:, 1:], logits.sigmoid())
    assert pl.explain(vit, batch, "ixg").target.tolist() == (logits[:, 0] > 0).long().tolist()


def test_score_as_a_callable() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    logit = pl.explain(vit, batch, "ixg", target=2).scores
    torch.testing.assert_close(pl.explain(vit, batch, "ixg", target=2, score=lambda y: 3 * y).scores, 3 * logit)
    torch.testing.assert_close(pl.explain(vit, batch, "ixg", score=lambda y: y[:, 2]).scores, logit)
    with pytest.raises(pl.PatchlightError, match=r"returned shape \[\] for logits"):
        pl.explain(vit, batch, "ixg", score=lambda y: y.sum())
    with pytest.raises(pl.PatchlightError, match="cannot explain several classes"):
        pl.explain(vit, batch, "ixg", target=(0, 1), score=lambda y: y[:, 2])
    with pytest.raises(pl.PatchlightError, match="unknown score 'logits'"):
        pl.explain(vit, batch, "ixg", score="logits")  # type: ignore[arg-type]


def test_a_pair_is_the_difference_of_logits() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    a, b = (pl.explain(vit, batch, "ixg", target=c).scores for c in (1, 4))
    torch.testing.assert_close(pl.explain(vit, batch, "ixg", target=(1, 4)).scores, a - b)
    assert pl.explain(vit, batch, "ixg", target=(1, 4)).against.tolist() == [4, 4, 4]  # type: ignore[union-attr]


def test_divergence_is_the_kl_of_distributions() -> None:
    a, b = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    want = F.kl_div(b.log_softmax(1), a.softmax(1), reduction="none").sum(1)
    assert torch.allclose(kl_divergence(a, b, Outputs()), want, atol=1e-6)
    assert float(kl_divergence(a, a, Outputs()).abs().max()) < 1e-6
    p, q = torch.distributions.Bernoulli(logits=a), torch.distributions.Bernoulli(logits=b)
    assert torch.allclose(
        kl_divergence(a, b, Outputs("sigmoid")), torch.distributions.kl_divergence(p, q).sum(1), atol=1e-5
    )
