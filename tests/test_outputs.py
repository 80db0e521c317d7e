"""Classifiers of other kinds: several labels, numbers, ordered levels; and images compared with themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy import heads
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, PatchlightError, Unsupported
from patchlight.core.targets import Outputs
from tests.families import FAMILIES, build, images, randomise, shared

DOUBLE = torch.float64


def made(outputs: int, **about: Any) -> Anatomy:
    """A small ViT with so many outputs, in float64."""
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=outputs, **sizes)
    return pl.wrap(randomise(model).to(DOUBLE), name="small", **about)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_several_labels_of_an_image() -> None:
    vit = made(5, sigmoid=True)
    batch = images(vit, 2)
    logits = vit.logits(batch)
    assert close(vit.probabilities(logits), 1 / (1 + torch.exp(-logits)))
    together = pl.explain(vit, batch, "genatt", target=[[0, 3], [4, 1]])
    assert together.scores.shape[:2] == (2, 2)
    for column, classes in ((0, [0, 4]), (1, [3, 1])):
        assert close(together.scores[:, column], pl.explain(vit, batch, "genatt", target=classes).scores)


def test_a_label_by_itself_does_not_depend_on_the_others() -> None:
    """The gradient of a sigmoid's probability is p (1 - p) times that of its logit, whatever the other classes say."""
    vit = made(5, sigmoid=True)
    batch = images(vit, 2)
    p = vit.logits(batch)[:, 2].sigmoid()
    by_logit = pl.explain(vit, batch, "ixg", target=2).scores.double()
    by_probability = pl.explain(vit, batch, "ixg", target=2, score="probability").scores.double()
    assert close(by_probability, (p * (1 - p))[:, None, None] * by_logit)


def test_a_probe_of_several_labels() -> None:
    vit = shared("vit", DOUBLE)
    asked = vit.ask(heads.Linear(torch.randn(3, 48, dtype=DOUBLE), sigmoid=True))
    assert asked.outputs == Outputs("sigmoid")
    assert (
        pl.evaluate(asked, images(vit, 2), "genatt", "deletion", target=1, steps=2).settings["score"] == "probability"
    )


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression(outputs: int) -> None:
    names = [f"quantity {i}" for i in range(outputs)]
    vit = made(outputs, regression=True, labels=names)
    batch = images(vit, 2)
    logits = vit.logits(batch)
    assert (vit.outputs.kind, vit.outcomes, vit.classes) == ("none", outputs, outputs)
    att = pl.explain(vit, batch, "ixg")
    assert att.target.tolist() == logits.argmax(1).tolist()  # by default the largest output
    assert att.labels[0] in names
    assert att.score == "logit"
    for row, told in zip(logits.tolist(), vit.predict(batch), strict=True):
        assert [value for _, value in told] == pytest.approx(sorted(row, reverse=True), rel=1e-5)
    assert pl.explain(vit, batch, "tis").score == "logit"  # which would explain a probability
    with pytest.raises(Unsupported, match=r"no probabilities.*score='logit'"):
        pl.explain(vit, batch, "ixg", score="probability")


def test_one_output_is_binary_unless_it_is_a_number() -> None:
    assert made(1).outputs.kind == "binary"
    assert made(1, sigmoid=True).outputs.kind == "binary"
    assert made(1).outcomes == 2
    assert made(1, regression=True).outcomes == 1
    with pytest.raises(PatchlightError, match="2 labels"):
        made(1, regression=True, labels=["no", "yes"])


def test_transformers_say_what_their_outputs_are() -> None:
    pytest.importorskip("transformers")
    kinds = {"regression": "none", "multi_label_classification": "sigmoid", "single_label_classification": "softmax"}
    for problem, kind in kinds.items():
        model = randomise(FAMILIES["hf-vit"]())
        model.config.problem_type = problem  # type: ignore[union-attr]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pl.AssumedPreprocess)
            assert pl.wrap(model).outputs.kind == kind


def removed(vit: Anatomy, batch: Tensor, maps: Tensor, steps: int) -> Tensor:
    """Outputs [B,steps+1,C] while the highest patches are set to 0, patch by patch, by hand."""
    side, (rows, columns) = 16, vit.grid
    found = []
    for image, heat in zip(batch, maps, strict=True):
        order = heat.flatten().argsort(descending=True).tolist()
        points = []
        for step in range(steps + 1):
            shown = image.clone()
            for cell in order[: step * rows * columns // steps]:
                top, left = side * (cell // columns), side * (cell % columns)
                shown[:, top : top + side, left : left + side] = 0
            points.append(vit.logits(shown[None])[0])
        found.append(torch.stack(points))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["regression", "neurons", "similar"])
def test_curves_of_a_score_that_is_no_probability(kind: str) -> None:
    vit = made(3, regression=True) if kind == "regression" else shared("vit", DOUBLE)
    vit = vit.ask(heads.Neurons(2, [3, 17, 5], pool="max")) if kind == "neurons" else vit
    vit = vit.ask(heads.Similar(images(vit, 3, seed=7))) if kind == "similar" else vit
    batch = images(vit, 2)
    maps = pl.explain(vit, batch, "ixg", target=1).scores
    curve = removed(vit, batch, maps, 4)[:, :, 1]
    area = (curve[:, :-1] + curve[:, 1:]).sum(1) / 8
    asked = {"steps": 4, "fill": "zero", "unit": "patch", "target": 1}
    score = "cosine" if kind == "similar" else "logit"
    given = {"score": score} if kind == "similar" else {}
    found = pl.evaluate(vit, batch, maps, "deletion", **asked, **given)
    assert close(found.curve, curve)  # type: ignore[arg-type]
    assert close(found.values, area)
    assert found.settings["score"] == score
    assert found.bounds == ((-1.0, 1.0) if kind == "similar" else (-float("inf"), float("inf")))
    fall = curve[:, :1] - curve
    found = pl.evaluate(
        vit, batch, maps, "aopc", target=1, points=5, unit="patch", fill="zero", target_class="given", score=score
    )
    assert close(found.values, fall.mean(1))
    found = pl.evaluate(
        vit, batch, maps, "perturbation", target=1, quantity=score, points=3, low=0.25, high=0.75, unit="patch",
        fill="zero", target_class="given",
    )  # fmt: skip
    assert close(found.values, curve[:, 1:4].mean(1))
    assert not found.higher_is_better


def test_metrics_that_need_probabilities_say_what_to_use() -> None:
    vit = shared("vit").ask(heads.Neurons(2, [3, 17]))
    similar = shared("vit").ask(heads.Similar(images(vit, 1, seed=7)))
    batch = images(vit, 2)
    complaints: list[tuple[Anatomy, str, dict[str, Any], str]] = [
        (vit, "deletion", {"score": "probability"}, r"plain numbers, not probabilities; score='logit' works"),
        (vit, "deletion", {"score": "cosine"}, r"not computed from cosines; score='logit' works"),
        (vit, "perturbation", {}, r"plain numbers, not classes; quantity='logit' works"),
        (vit, "perturbation", {"quantity": "kl"}, r"plain numbers.*quantity='logit' works"),
        (vit, "perturbation", {"quantity": "nll"}, r"plain numbers.*quantity='logit' works"),
        (vit, "perturbation", {"preset": "diffmask"}, r"plain numbers.*quantity='logit' works"),
        (vit, "token-deletion", {}, r"plain numbers, not classes; quantity='aopc' works"),
        (vit, "auc", {}, r"'aopc' works"),
        (vit, "lodds", {}, r"'aopc' works"),
        (vit, "completeness-error", {"score": "probability"}, r"score='logit' works"),
        (similar, "perturbation", {"quantity": "kl"}, r"similarities.*quantity='logit' works"),
        (similar, "auc", {}, r"only one class, which is always predicted; 'aopc' works"),
    ]
    for model, metric, settings, words in complaints:
        with pytest.raises(Unsupported, match=words) as told:
            pl.evaluate(model, batch, "rollout", metric, **settings)
        assert str(told.value).startswith(f"'{metric}' cannot be measured on vit: ")


def test_ordered_levels_are_sigmoids_and_their_sum_a_score() -> None:
    """Cumulative logits, P(level > k) = sigmoid(y_k): the expected level is explained by a callable."""
    vit = made(4, sigmoid=True)
    batch = images(vit, 2)
    p = vit.logits(batch).sigmoid()
    each = [pl.explain(vit, batch, "ixg", target=k).scores.double() for k in range(4)]
    expected = sum((p[:, k] * (1 - p[:, k]))[:, None, None] * each[k] for k in range(4))
    found = pl.explain(vit, batch, "ixg", target=0, score=lambda logits: logits.sigmoid().sum(1)).scores
    assert close(found, torch.as_tensor(expected))


def test_sanity_metrics_keep_the_head() -> None:
    """The randomised copy is asked by the same head; a neuron's later blocks are not randomised at all."""
    vit = build("vit")
    batch = images(vit, 2)
    neuron = vit.ask(heads.Neurons(2, [3, 4]))
    found = pl.evaluate(neuron, batch, "genatt", "randomisation", target=0)
    assert found.x is not None
    assert len(found.x) == 1 + 2 + 1  # itself, two blocks, the embedding
    similar = vit.ask(heads.Similar(images(vit, 2, seed=7)))
    found = pl.evaluate(similar, batch, "genatt", "randomisation", target=0)
    assert len(found.x) == 1 + 1 + 3 + 1  # type: ignore[arg-type]  # the norm, and no classifier
    assert bool((found.curve[:, -1] < 0.9).all())  # type: ignore[index]


def test_an_image_compared_with_itself_is_reported() -> None:
    vit = shared("vit")
    references, batch = images(vit, 2, seed=7), images(vit, 1)
    asked = vit.ask(heads.Similar(references, ["this", "that"]))
    mixed = torch.cat([batch, references[1:]])
    with pytest.warns(DegenerateMap, match="image 1 is the reference itself"):
        pl.explain(asked, mixed, "ixg", target="that")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.explain(asked, mixed, "ixg", target="this")
        pl.explain(asked, batch, "ixg")
