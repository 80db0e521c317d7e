"""`evaluate` and the registry of metrics: what is taken, what comes back, and what is refused or warned of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import patchlight as pl
from patchlight.core.errors import UndefinedMetric
from patchlight.core.targets import Targets
from patchlight.metrics.base import (
    METRICS,
    Evaluation,
    Measure,
    Measured,
    MetricInfo,
    ranked,
    register_metric,
    resolve_metric,
)
from tests.families import images, shared
from tests.videos import clips, tiny_video

VIT = "vit"


def evaluate(maps: Any, metric: Any = "deletion", count: int = 2, **options: Any) -> Any:
    vit = shared(VIT)
    return pl.evaluate(vit, images(vit, count), maps, metric, **{"steps": 4, **options})


def maps(count: int = 2) -> Tensor:
    return torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def first_pixel() -> Iterator[str]:
    """A metric that says the map's first value, undefined where it is 0, and one that combines sums."""

    @register_metric("first-pixel", paper="an example", higher_is_better=lambda s: s["scale"] > 0, aliases=("fp",))
    def first_pixel(ask: Measure, scale: float = 1.0) -> Measured:
        """The first value."""
        values = ask.maps[:, 0, 0] * scale
        return Measured(values, reasons={int(i): "it is 0" for i in (values == 0).nonzero().flatten()})

    @register_metric("ratio", paper="an example", higher_is_better=True, combine=lambda s: s["a"] / s["b"])
    def ratio(ask: Measure) -> Measured:
        """A ratio of sums."""
        a, b = ask.maps[:, 0, 0], ask.maps[:, 0, 1]
        return Measured(a / b, parts={"a": a, "b": b})

    yield "first-pixel"
    for name in ("first-pixel", "ratio"):
        METRICS.remove(name)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.rand(2, 5, 4), "maps are 5x4"),
        (torch.rand(3, 4, 4), r"maps have shape \[3, 4, 4\]; 2 images take maps of shape \[2, h, w\]"),
        (torch.rand(4, 4), r"shape \[4, 4\]"),
        (torch.rand(2, 3, 4, 4), r"shape \[2, 3, 4, 4\]"),
        (torch.rand(2, 128, 128), "maps are 128x128"),
        (object(), "maps are a object; give an Attribution"),
        ("genat", "did you mean 'genatt'"),
    ],
)
def test_wrong_maps_are_refused(given: Any, words: str) -> None:
    with pytest.raises(pl.PatchlightError, match=words):
        evaluate(given)


def test_maps_of_clips_have_the_axes_of_the_grid() -> None:
    vit, batch = tiny_video(), clips()
    assert pl.evaluate(vit, batch, torch.rand(2, *vit.grid), "gini").values.isfinite().all()
    with pytest.raises(pl.PatchlightError, match=r"maps are \[2, 4, 5\]; give them on the grid \[2, 4, 4\]"):
        pl.evaluate(vit, batch, torch.rand(2, 2, 4, 5), "gini")


@pytest.mark.parametrize(
    ("metric", "options", "words"),
    [
        ("delettion", {}, "no metric is called 'delettion'; did you mean 'deletion'"),
        ("deletion", {"preset": "ris"}, "has no preset 'ris'; did you mean 'rise'"),
        ("auc", {"preset": "rise", "points": 3}, "'auc' has no preset 'rise'; it has none"),
        ("deletion", {"step": 3}, "has no setting 'step'; did you mean 'steps'"),
        ("deletion", {"steps": 0}, "setting steps=0 of 'deletion' is not valid"),
        ("deletion", {"fill": "plaid"}, "setting fill='plaid'"),
        ([], {}, "no metric was named"),
        ("deletion", {"target": 99}, "target 99 is out of range"),
        ("deletion", {"target": [0]}, "target has length 1 but there are 2 images"),
        ("deletion", {"target": [[0, 1], [2, 3]]}, "one class at a time"),
    ],
)
def test_wrong_requests_are_refused(metric: Any, options: dict[str, Any], words: str) -> None:
    vit = shared(VIT)
    with pytest.raises(pl.PatchlightError, match=words):
        pl.evaluate(vit, images(vit, 2), maps(), metric, **options)


def test_each_class_of_an_attribution_is_measured_alone() -> None:
    vit = shared(VIT)
    att = pl.explain(vit, images(vit, 2), "ixg", target=[[0, 1], [0, 1]])
    found = evaluate(att)
    assert list(found) == list(att.target_names[:2])
    for name, one in found.items():
        assert torch.equal(one.values, evaluate(att.only(name)).values)
    assert not torch.equal(*(one.values for one in found.values()))


def test_an_attribution_of_other_classes_per_image_is_refused() -> None:
    vit = shared(VIT)
    att = pl.explain(vit, images(vit, 2), "ixg", target=[[0, 1], [2, 3]])
    with pytest.raises(pl.PatchlightError, match="several classes per image; measure one class at a time"):
        evaluate(att)


def test_a_constant_map_is_a_random_one_with_a_warning() -> None:
    given = maps()
    given[1] = 3
    with pytest.warns(UndefinedMetric, match="the map of image 1 is constant"):
        found = evaluate(given)
    assert found.count == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again, other = evaluate(given, seed=0), evaluate(given, seed=1)
    assert torch.equal(found.values, again.values)
    assert float(found.values[1]) != float(other.values[1])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_map_has_no_value_and_does_not_count(broken: float) -> None:
    given = maps(3)
    given[1, 2, 2] = broken
    with pytest.warns(UndefinedMetric, match=r"no value for 1 of 3 images.*image 1: the map contains NaN or infinite"):
        found = evaluate(given, count=3, batch_size=2)
    assert found.values.isnan().tolist() == [False, True, False]
    assert found.reasons == ("", "the map contains NaN or infinite values", "")
    assert found.mean == pytest.approx(float(found.values[[0, 2]].mean()))
    assert found.curve is not None
    assert found.curve[1].isnan().all()
    whole = evaluate(maps(3), count=3)
    torch.testing.assert_close(found.values[[0, 2]], whole.values[[0, 2]], atol=1e-5, rtol=0)
    assert "1 undefined" in repr(found)
    assert all(math.isnan(side) for side in found.interval()), "two images are too few for an interval"


def test_maps_may_be_an_attribution_an_array_a_name_or_a_callable() -> None:
    vit = shared(VIT)
    batch = images(vit, 3)
    att = pl.explain(vit, batch, "ixg", target=[1, 2, 3])
    expected = evaluate(att, count=3)
    for given in (att.scores, att.scores.numpy(), "ixg", lambda vit, some, targets, seed: att.scores[: len(some)]):
        found = evaluate(given, count=3, target=[1, 2, 3])
        torch.testing.assert_close(found.values, expected.values, atol=1e-5, rtol=0)
    other = evaluate(att, count=3, target=0)
    assert not torch.allclose(other.values, expected.values)


def test_whole_numbers_are_maps_too() -> None:
    ranks = np.arange(32).reshape(2, 4, 4)
    torch.testing.assert_close(evaluate(ranks).values, evaluate(ranks.astype(np.float32)).values)


def test_the_class_is_the_one_asked_the_true_one_or_the_prediction() -> None:
    vit = shared(VIT)
    batch = images(vit, 2)
    ask = Measure(vit, batch, maps(), Targets(torch.tensor([[5], [6]])), torch.tensor([2, 3]))
    assert ask.of("given").index.flatten().tolist() == [5, 6]
    assert ask.of("label").index.flatten().tolist() == [2, 3]
    assert ask.of("prediction").index.flatten().tolist() == vit.logits(batch).argmax(1).tolist()
    ask = Measure(vit, batch, maps(), Targets(torch.tensor([[5], [6]])), None)
    with pytest.warns(UndefinedMetric, match="the true classes are not known"):
        assert ask.of("label").index.flatten().tolist() == [5, 6]


def test_one_metric_under_several_names() -> None:
    found = evaluate(maps(), {"grey": {"metric": "deletion", "fill": "zero"}, "deletion": {"fill": "black"}})
    assert list(found) == ["grey", "deletion"]
    assert found["grey"].settings["fill"] == "zero"
    assert found["grey"].metric == "deletion"
    assert found["grey"].settings["steps"] == 4


def test_own_metrics_need_a_few_lines(first_pixel: str) -> None:
    given = maps(3)
    given[2, 0, 0] = 0
    with pytest.warns(UndefinedMetric, match="image 2: it is 0"):
        found = pl.evaluate(shared(VIT), images(shared(VIT), 3), given, "fp", scale=-2)
    assert found.values[:2].tolist() == pytest.approx((-2 * given[:2, 0, 0]).tolist())
    assert found.curve is None
    assert found.count == 2
    assert found.higher_is_better is False
    row = next(row for row in pl.list_metrics() if row.name == first_pixel)
    assert isinstance(row, MetricInfo)
    assert row.higher_is_better is True
    with pytest.raises(pl.PatchlightError, match="already registered"):
        register_metric("fp", paper="", higher_is_better=True)(lambda ask: Measured(ask.maps[:, 0, 0]))


def test_a_ratio_of_sums_is_resampled_as_one(first_pixel: str) -> None:
    given = maps(8) + 0.1
    found = pl.evaluate(shared(VIT), images(shared(VIT), 8), given, "ratio")
    a, b = given[:, 0, 0], given[:, 0, 1]
    assert found.mean == pytest.approx(float(a.sum() / b.sum()))
    weights = torch.tensor([[2.0, 0, 1, 1, 3, 0, 0, 1]], dtype=torch.float64)
    expected = float((weights[0] @ a.double()) / (weights[0] @ b.double()))
    assert float(found.resampled(weights)) == pytest.approx(expected)
    halves = [
        pl.evaluate(shared(VIT), images(shared(VIT), 8)[part], given[part], "ratio")
        for part in (slice(0, 1), slice(1, 8))
    ]
    joined = Evaluation.concat(halves)
    assert joined.mean == pytest.approx(found.mean)
    assert joined.interval() == pytest.approx(found.interval())
    low, high = found.interval()
    assert low < found.mean < high


def test_joined_evaluations_are_those_of_one_call() -> None:
    vit = shared(VIT)
    batch, given = images(vit, 3), maps(3)
    whole = pl.evaluate(vit, batch, given, "ins-del", 0, steps=4)
    parts = [pl.evaluate(vit, batch[s], given[s], "ins-del", 0, steps=4) for s in (slice(0, 2), slice(2, 3))]
    joined = Evaluation.concat(parts)
    torch.testing.assert_close(joined.values, whole.values, atol=1e-5, rtol=0)
    torch.testing.assert_close(joined.curve, whole.curve, atol=1e-5, rtol=0)
    torch.testing.assert_close(joined.parts["deletion"], whole.parts["deletion"], atol=1e-5, rtol=0)


@hypothesis.given(st.lists(st.integers(-3, 3), min_size=6, max_size=6), st.integers(0, 5))
def test_ranks_are_a_falling_order(values: list[int], seed: int) -> None:
    scores = torch.tensor(values, dtype=torch.float32).view(1, 2, 3)
    ranks = ranked(scores, seed)
    assert sorted(ranks.flatten().tolist()) == list(range(6))
    falling = scores.flatten()[ranks.flatten().argsort()]
    assert (falling.diff() <= 0).all()
    both = ranked(torch.cat([scores, scores]), seed)
    assert torch.equal(both[0], ranks[0])
    assert torch.equal(both[1], ranks[0])


@pytest.mark.parametrize("upsampling", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("unit", ["pixel", "patch"])
@hypothesis.given(st.lists(st.integers(-2, 2), min_size=16, max_size=16), st.floats(0.01, 100), st.integers(0, 3))
@hypothesis.settings(max_examples=30)
def test_a_map_its_multiple_and_its_negative_have_the_same_ties(
    upsampling: Any, unit: Any, cells: list[int], factor: float, seed: int
) -> None:
    vit = shared(VIT)
    maps = torch.tensor(cells, dtype=torch.float64).view(1, *vit.grid)

    def ranks(scores: Tensor, **order: bool) -> Tensor:
        measure = Measure(vit, torch.zeros(1, 3, *vit.preprocess.size), scores, Targets(torch.tensor([[0]])), seed=seed)
        return measure.ranks(unit, upsampling, **order).flatten()

    one = ranks(maps)
    assert torch.equal(ranks(factor * maps), one)
    assert torch.equal(ranks(-maps, lowest_first=True), one)
    assert torch.equal(ranks(-maps, reverse_ties=True), len(one) - 1 - one)


@pytest.mark.parametrize("name", list(METRICS))
def test_every_metric_is_documented_and_its_presets_are_valid(name: str) -> None:
    entry = METRICS[name]
    assert entry.summary.endswith((".", ":")), "the first line of the docstring is one sentence"
    for preset, values in {**entry.presets, "quick": entry.quick}.items():
        for key, value in values.items():
            assert key in entry.settings, f"{preset} sets {key}"
            entry.settings[key].checked(value, name)
        if preset != "quick":
            request = resolve_metric(name, {"preset": preset})
            assert request.settings.items() >= dict(values).items()
            low, high = entry.limits(request.settings)
            assert low < high
            assert entry.rises(request.settings) in (True, False)
    for preset, words in entry.words.items():
        assert preset in entry.presets
        for key, meanings in words.items():
            for meaning in meanings.values():
                entry.settings[key].checked(meaning, name)


def test_one_image_without_a_label_leaves_the_others_theirs() -> None:
    vit = shared(VIT)
    batch, asked = images(vit, 3), [1, 1, 1]
    predicted = vit.logits(batch).argmax(1).tolist()
    options: dict[str, Any] = {"points": 1, "low": 0.0, "high": 0.0, "target_class": "label"}
    with pytest.warns(UndefinedMetric, match="the true classes of some images are not known"):
        found = pl.evaluate(vit, batch, maps(3), "perturbation", asked, labels=[predicted[0], None, 99 % 7], **options)
    expected = [1.0, float(predicted[1] == 1), float(predicted[2] == 99 % 7)]
    assert found.values.tolist() == expected
    boxes = [[[0, 0, 40, 40]]] * 3
    labels = torch.tensor([predicted[0], -1, predicted[2]])
    with pytest.warns(UndefinedMetric, match="image 1: its true class is not known"):
        located = pl.evaluate(vit, batch, maps(3), "top1-loc", labels=labels, boxes=boxes)
    assert located.values.isnan().tolist() == [False, True, False]


def test_a_word_of_a_preset_is_explained_without_it() -> None:
    words = "without a preset give 'blur-rise' (preset 'rise') or 'blur-tis' (preset 'tis')"
    with pytest.raises(pl.PatchlightError) as caught:
        evaluate(maps(), fill="blur")
    assert str(caught.value) == f"setting fill='blur' of 'deletion' belongs to its presets rise, tis; {words}"
    assert resolve_metric("deletion", {"preset": "tis", "fill": "blur"}).settings["fill"] == "blur-tis"
    assert resolve_metric("deletion", {"fill": "black"}).settings["fill"] == "black"


def test_warnings_point_at_the_users_line() -> None:
    given = maps()
    given[0] = 0
    with pytest.warns(UndefinedMetric) as told:
        evaluate(given)
    assert told[0].filename == __file__
    vit = shared(VIT)
    with pytest.warns(pl.DegenerateMap) as told:
        pl.explain(vit, torch.zeros(1, 3, 64, 64), "ig", level="pixel", baseline=0.0, steps=2)
    assert told[0].filename == __file__
