"""The faithfulness test of one image: its numbers are those of `ins-del`, and of a loop over single patches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.load import wrap
from patchlight.core.targets import Targets, UnsplitLabels
from patchlight.evidence.fills import fill_images
from patchlight.study.faithfulness import Hiding, Trial, rank_results, run_trial, sanity_words
from patchlight.zoo import pocket
from tests.families import build, images, shared

CAT = pocket.PHOTOS / "cat.jpg"


@cache
def cat_map(method: str) -> Tensor:
    """The map of the cat's class."""
    return pl.explain(pl.load("pocket"), CAT, method, target=3).scores[0]


def literal(vit: pl.Anatomy, image: Tensor, scores: Tensor, target: int, steps: int, insert: bool) -> list[float]:
    """p(target) as patches go, or come, one step after another; painted with the image's mean."""
    rows, columns = vit.grid
    order = scores.flatten().argsort(descending=True).tolist()
    size = -(-rows * columns // steps)
    height, width = image.shape[2] // rows, image.shape[3] // columns
    curve = []
    for k in range(0, rows * columns + 1, size):
        changed = set(order[:k])
        variant = image.clone()
        for patch in range(rows * columns):
            if (patch in changed) != insert:
                top, left = patch // columns * height, patch % columns * width
                variant[:, :, top : top + height, left : left + width] = image.mean()
        curve.append(float(vit.logits(variant).softmax(1)[0, target]))
    return curve


@pytest.mark.parametrize("against", [None, 0])
def test_curves_are_those_of_a_loop(against: int | None) -> None:
    vit = build("vit")
    image = images(vit)[:1]
    rows, columns = vit.grid
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3), dtype=image.dtype)
    targets = Targets(torch.tensor([[1]]), None if against is None else torch.tensor([[against]]))
    found = Trial(vit, image, targets, steps=4, randoms=3).of(scores)
    for curve, insert in ((found.curves.insertion, True), (found.curves.deletion, False)):
        wanted = torch.tensor(literal(vit, image, scores, 1, 4, insert))
        if against is not None:
            wanted -= torch.tensor(literal(vit, image, scores, against, 4, insert))
        torch.testing.assert_close(curve[0].float(), wanted, atol=1e-5, rtol=0)
    assert found.curves.orders[0].tolist() == scores.flatten().argsort(descending=True).tolist()
    area = torch.trapezoid(found.curves.insertion - found.curves.deletion, dx=1 / (found.curves.deletion.shape[1] - 1))
    assert found.score == pytest.approx(float(area[0]), abs=1e-6)


@pytest.mark.parametrize("unit", ["patch", "token"])
def test_the_score_is_that_of_the_metric(unit: str) -> None:
    vit = pl.load("pocket")
    att = pl.explain(vit, CAT, "genatt", target="cat")
    trial = Trial(vit, vit.batch(CAT), Targets(att.target[:, None]), steps=8, unit=unit, randoms=4, chunk=5)  # type: ignore[arg-type]
    truth = run_trial(trial, {"genatt": att.scores[0]})["genatt"]
    told = pl.evaluate(vit, CAT, att, "ins-del", unit=unit, steps=8, fill="image-mean")
    assert truth.score == pytest.approx(float(told.values[0]), abs=1e-5)
    assert truth.randoms == 4
    assert truth.beaten == int((trial.random.scores < truth.score).sum())
    assert trial.random is trial.random, "random orders are computed once"


def test_words_say_what_the_numbers_say() -> None:
    vit = pl.load("pocket")
    image = vit.batch(CAT)
    cat = Targets(torch.tensor([[3]]))
    trial = Trial(vit, image, cat, steps=8)
    good = cat_map("posterior")
    assert trial.of(good).better
    assert trial.of(good).words.startswith("Better than random here: it beats 20 of 20")
    chance = trial.of(replace(pl.explain(vit, CAT, "random"), scores=good[None]))
    assert not chance.better, "one random map in twenty beats nineteen"
    assert chance.words.startswith("A random map, the baseline here: it beats 20 of 20")
    bad = trial.of(-good)
    assert not bad.better
    assert bad.words.startswith("Worse than random here: it beats 0 of 20")
    flat = fill_images("image-mean", image, vit)
    untold = Trial(vit, flat, cat, steps=2)
    assert untold.of(good).words.startswith("Inconclusive: ")
    lucky = [untold.of(scores) for scores in torch.rand(3, *vit.grid)]
    assert not any(truth.better for truth in lucky), "what cannot be told is not called better"


def test_rank_and_effect_size_say_more_than_better_than_random() -> None:
    vit = pl.load("pocket")
    maps = {m: cat_map(m) for m in ("posterior", "rollout")}
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])), steps=8)
    results = run_trial(trial, {**maps, "negative": -maps["posterior"], "again": maps["posterior"]})
    assert [results[name].rank for name in ("posterior", "again", "rollout", "negative")] == [1, 1, 3, 4]
    best = results["posterior"]
    assert best.effect == pytest.approx((best.score - float(trial.random.scores.mean())) / best.spread)
    assert (best.size, results["negative"].effect < 0) == ("large", True)
    assert f"Effect: large ({best.effect:+.2f}; probability, insertion minus deletion" in best.words
    assert best.words.endswith("Rank 1 of 4 among the methods shown.")
    sizes = {shift: replace(best, random_score=best.score - shift * best.spread).size for shift in (0.05, -0.2, 0.31)}
    assert list(sizes.values()) == ["small", "medium", "large"]


def test_a_contrast_is_a_difference_of_probabilities() -> None:
    vit = pl.load("pocket")
    pair = Targets(torch.tensor([[3]]), torch.tensor([[5]]))
    trial = Trial(vit, vit.batch(CAT), pair, steps=2, randoms=2)
    assert trial.quantity_words == "difference of probabilities"
    assert "difference of probabilities, insertion minus deletion" in trial.of(torch.rand(*vit.grid)).words


BEAGLE = Hiding(2, 20, 0.7, 0.12, 0.66, "beagle", "", "probability")
SENTENCES = {
    "Hiding the 20 strongest patches lowers 'beagle' from 70 % to 12 %; 20 random ones lower it to 66 %.": BEAGLE,
    "Hiding the 20 strongest patches raises 'beagle' from 70 % to over 99 %; 20 random ones raise it to 75 %.": replace(
        BEAGLE, after=0.999, random_after=0.75
    ),
    "Hiding the 20 strongest patches hardly changes 'beagle' (70 %); 20 random ones lower it to under 1 %.": replace(
        BEAGLE, after=0.705, random_after=0.001
    ),
    "Hiding the strongest patch lowers 'beagle' from 70 % to 12 %; a random one hardly changes it.": replace(
        BEAGLE, count=1, random_after=0.7
    ),
    "Hiding the strongest patch raises 'beagle' from 70 % to 80 %; a random one lowers it to 66 %.": replace(
        BEAGLE, count=1, after=0.8
    ),
    "Hiding the 20 strongest patches lowers 'beagle' minus 'pug' (difference of probabilities) from 0.70 to -0.12; "
    "20 random ones hardly change it.": replace(BEAGLE, after=-0.12, random_after=0.7, against="pug"),
    "Hiding the 20 strongest patches lowers the similarity ((1 + cosine) / 2) to 'beagle' from 0.70 to 0.12; "
    "20 random ones lower it to 0.66.": replace(BEAGLE, quantity="similarity"),
    "Hiding the 20 strongest patches lowers 'a' minus 'b' (difference of similarities) from 0.70 to 0.12; "
    "20 random ones lower it to 0.66.": replace(BEAGLE, label="a", against="b", quantity="similarity"),
    "Hiding the 20 strongest patches raises 'output 3' from 0.0123 to 1.23e+04; 20 random ones hardly change it.": (
        replace(BEAGLE, before=0.01234, after=12345.6, random_after=0.012341, label="output 3", quantity="output")
    ),
    "Hiding the 20 strongest patches gives no finite score, so it cannot be compared with hiding 20 random ones.": (
        replace(BEAGLE, after=float("nan"))
    ),
}


@pytest.mark.parametrize("words", SENTENCES)
def test_hiding_in_one_sentence(words: str) -> None:
    assert SENTENCES[words].words == words


@pytest.mark.parametrize(("steps", "count"), [(64, 6), (16, 8), (3, 22)])
def test_hiding_takes_the_step_nearest_to_a_tenth_of_the_patches(steps: int, count: int) -> None:
    vit = pl.load("pocket")
    assert vit.grid == (8, 8)
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])), steps=steps, randoms=3)
    result = trial.of(cat_map("posterior"))
    hiding = trial.hiding(result)
    assert (hiding.count, hiding.label, hiding.against, hiding.quantity) == (count, "cat", "", "probability")
    deletion = dict(zip(trial.removed.tolist(), result.curves.deletion[0].tolist(), strict=True))
    assert (hiding.before, hiding.after) == (deletion[0], deletion[count])
    assert hiding.random_after == pytest.approx(float(trial.random.deletion[:, hiding.step].mean()))
    assert hiding.words.startswith(f"Hiding the {count} strongest patches lowers 'cat' from ")


def test_hiding_shortens_labels_but_not_texts_at_a_comma() -> None:
    vit = wrap(build("vit").model, labels=["tabby, tabby cat", "x" * 50, *"cdefg"])
    pair = Targets(torch.tensor([[0]]), torch.tensor([[1]]))
    trial = Trial(vit, images(vit)[:1], pair, steps=4, randoms=2)
    hiding = trial.hiding(trial.of(torch.rand(*vit.grid)))
    assert (hiding.label, hiding.against) == ("tabby", "x" * 39 + "…")
    vit.labels = UnsplitLabels(vit.labels or [])
    assert trial.hiding(trial.of(torch.rand(*vit.grid))).label == "tabby, tabby cat"


def test_few_random_orders_prove_nothing() -> None:
    """Of two orders a third is the worst of three in every third case: neither better nor worse is said."""
    vit = pl.load("pocket")
    good = cat_map("posterior")
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])), steps=8, randoms=2)
    assert trial.of(good).words.startswith("Not clearly better than random here: it beats 2 of 2")
    assert trial.of(-good).words.startswith("No better than random here: it beats 0 of 2")


def test_outputs_have_no_scale_of_their_own() -> None:
    """A regression in kilometres is told what one in metres is told."""

    def said(scale: float) -> tuple[str, bool]:
        model = build("vit").model
        head: nn.Linear = model.head  # type: ignore[assignment]
        with torch.no_grad():
            head.weight.mul_(scale)
            head.bias.mul_(scale)
        vit = wrap(model, regression=True)
        image = images(vit)[:1]
        scores = torch.rand(*vit.grid, generator=torch.Generator().manual_seed(3))
        truth = Trial(vit, image, Targets(torch.tensor([[1]])), steps=4).of(scores)
        return truth.words.partition("(")[0], truth.better

    assert "random here" in said(1.0)[0]
    assert said(1e-4) == said(1.0) == said(1e4)


def test_the_quantity_of_the_curves_is_named() -> None:
    vit = pl.load("pocket", head=pl.heads.Similar([pocket.PHOTOS / "dog.jpg"]))
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[0]])), steps=2, randoms=2)
    ((_, cosine),) = vit.predict(CAT)[0]
    assert trial.quantity == "similarity"
    assert float(trial.random.deletion[0, 0]) == pytest.approx((1 + cosine) / 2, abs=1e-5)
    assert Trial(pl.load("pocket"), vit.batch(CAT), trial.targets).quantity == "probability"


def test_sanity_is_described_in_words() -> None:
    assert sanity_words(0.1).startswith("Depends on what the model has learnt")
    assert "changes only in part (similarity 0.50)" in sanity_words(0.5)
    assert "hardly changes (similarity 0.90)" in sanity_words(0.9)
    assert "constant" in sanity_words(float("nan"))


def test_a_score_that_is_not_a_number_has_the_last_rank() -> None:
    vit = pl.load("pocket")
    trial = Trial(vit, vit.batch(CAT), Targets(torch.tensor([[3]])), steps=2, randoms=2)
    good = trial.of(torch.rand(vit.grid, generator=torch.Generator().manual_seed(0)))
    areas = torch.full_like(good.curves.insertion_areas, torch.nan)
    lost = replace(good, curves=replace(good.curves, insertion_areas=areas))
    ranked = rank_results({"lost": lost, "good": good, "same": good})
    assert {name: result.rank for name, result in ranked.items()} == {"lost": 3, "good": 1, "same": 1}


def test_effects_have_the_order_of_the_ranks() -> None:
    """Maps are tested with ranges of their own; side by side they share the widest one."""
    vit = shared("vit")
    trial = Trial(vit, images(vit, 1), Targets(torch.tensor([[1]])), steps=4, randoms=5)
    maps = {str(seed): torch.rand(vit.grid, generator=torch.Generator().manual_seed(seed)) for seed in range(6)}
    results = sorted(run_trial(trial, maps).values(), key=lambda result: result.rank)
    assert len({result.spread for result in results}) == 1
    assert [result.effect for result in results] == sorted((result.effect for result in results), reverse=True)
