"""The report for other people: what it shows is what was computed, it opens by itself, and words stay words."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.core.drawing.heat import seen
from patchlight.core.errors import PatchlightError
from patchlight.core.targets import Targets
from patchlight.report.explanations import (
    Explained,
    made_by,
    removed_words,
    report_html,
    section_of,
)
from patchlight.study.faithfulness import Trial, run_trial
from tests import families
from tests.core.test_images import noise
from tests.report.pages import Page

LABELS = ["cat", "dog <b>", "bird", "fish", "frog", "ship", "5"]


@pytest.fixture(scope="module")
def vit() -> pl.Anatomy:
    vit = families.build("vit")
    vit.labels = LABELS
    return vit


@pytest.fixture(scope="module")
def explained(vit: pl.Anatomy) -> Explained:
    return about(vit, 1)


def about(vit: pl.Anatomy, target: int) -> Explained:
    picture = noise(70, 90)
    maps = pl.explain(vit, picture, ["genatt", "rollout"], target=target)
    trial = Trial(vit, vit.batch(picture), Targets(torch.tensor([[target]])), steps=4, randoms=3)
    tested = run_trial(trial, {name: att.scores[0] for name, att in maps.items()})
    shown = seen(picture, vit.preprocess.size, vit.preprocess)
    return Explained("a <i>.jpg", shown, vit.predict(picture, 3)[0], maps, trial, tested)


def page_of(*images: Explained) -> str:
    made = made_by(images[0].maps, images[0].trial, "patchlight explain 'a <i>.jpg'", ["one & all"])
    return report_html([section_of(image) for image in images], made)


def test_it_holds_everything_and_runs_nothing(explained: Explained) -> None:
    page = page_of(explained)
    elements = Page(page)
    assert not set(elements.tags) & {"script", "link", "iframe", "object", "b>", "i"}
    for tag, attributes in elements.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("data:image/", "#")), f"{tag} asks for {attributes[name]}"
        if tag == "img":
            assert attributes["alt"]
    assert "url(" not in page
    assert "@import" not in page
    assert page == page_of(explained), "the same sections give the same bytes"


def test_words_are_escaped(explained: Explained) -> None:
    page = page_of(explained)
    assert "dog <b>" not in page
    assert "dog &lt;b&gt;" in page
    assert "a <i>" not in page
    assert "one &amp; all" in page


def test_lines_are_the_curves(explained: Explained) -> None:
    """Up to the scale of the axes, which all lines of both charts share."""
    drawn, exact = [], []
    for chart in section_of(explained).charts:
        which = chart.title.lower()
        curves = {"random": getattr(explained.trial.random, which).mean(0)}
        curves |= {name: getattr(truth.curves, which)[0] for name, truth in explained.truths.items()}
        lines = re.findall(r'<title>(.*?)</title>\s*<path d="(.*?)"', chart.svg, flags=re.DOTALL)
        assert [name for name, _ in lines] == list(curves)
        for name, path in lines:
            drawn.append(torch.tensor([float(n) for n in re.findall(r"[\d.]+", path)]).double().view(-1, 2))
            share = explained.trial.removed / explained.trial.removed[-1].double()
            exact.append(torch.stack([share, curves[name]], 1))
    points, values = torch.cat(drawn), torch.cat(exact)
    for axis in (0, 1):
        slope, offset = np.polyfit(values[:, axis].numpy(), points[:, axis].numpy(), 1)
        assert (slope > 100) if axis == 0 else (slope < -100)
        torch.testing.assert_close(points[:, axis], slope * values[:, axis] + offset, atol=1e-3, rtol=0)


def test_numbers_and_verdicts_are_the_truths(explained: Explained) -> None:
    section = section_of(explained)
    page = page_of(explained)
    for one in section.shown:
        truth = explained.truths[one.method]
        numbers = (truth.curves.deletion_areas[0], truth.curves.insertion_areas[0], truth.score)
        cells = "".join(f'<td class="n">{float(number):.3f}</td>' for number in numbers)
        assert f'<th scope="row">{one.method}</th>{cells}<td class="n">{truth.beaten} of {truth.randoms}</td>' in page
        assert truth.words in page
        assert truth.score == pytest.approx(float(numbers[1] - numbers[0]), abs=2e-3)
    assert f'<td class="n">{float(explained.trial.random.scores.mean()):.3f}</td>' in page


def test_what_a_reader_should_know(vit: pl.Anatomy, explained: Explained) -> None:
    top = explained.predictions[0][0]
    other = LABELS.index(next(label for label in LABELS if label != top))
    notes = " ".join(section_of(about(vit, other)).notes)
    assert f"which is not what the model predicts ({top})" in notes
    assert "The model is not sure: its first class" in notes, "the weights are random"

    sure = replace(explained, predictions=[(LABELS[1], 0.9), ("cat", 0.1)])
    assert not [note for note in section_of(sure).notes if "not sure" in note or "not what" in note]
    torn = replace(explained, predictions=[(LABELS[1], 0.52), ("cat", 0.48)])
    assert "hardly decides between dog <b> (52 %) and cat (48 %)" in section_of(torn).notes[0]

    flat = replace(explained.maps["genatt"], scores=torch.full_like(explained.maps["genatt"].scores, 0.3))
    dead = replace(explained, maps={**explained.maps, "genatt": flat})
    assert any("The map of genatt is the same everywhere" in note for note in section_of(dead).notes)
    none = {name: replace(truth, beaten=0) for name, truth in explained.truths.items()}
    assert any("No method is better than random" in n for n in section_of(replace(explained, truths=none)).notes)
    some = {name: replace(truth, beaten=20, randoms=20, conclusive=True) for name, truth in explained.truths.items()}
    assert not any("No method is better" in n for n in section_of(replace(explained, truths=some)).notes)


def test_several_images_are_summed_up(vit: pl.Anatomy, explained: Explained) -> None:
    second = about(vit, 2)
    page = page_of(explained, second)
    assert "In short" in page
    assert "In short" not in page_of(explained)
    for method in ("genatt", "rollout"):
        both = [image.truths[method] for image in (explained, second)]
        row = re.search(rf'<tr><th scope="row">{method}</th><td class="n">(\d of 2)</td><td class="n">(.*?)</td>', page)
        assert row is not None
        assert row[1] == f"{sum(truth.better for truth in both)} of 2"
        assert float(row[2]) == pytest.approx(sum(truth.score for truth in both) / 2, abs=6e-4)
    assert page.count('id="image-') == 2


def test_how_it_was_made_is_there(explained: Explained) -> None:
    page = page_of(explained)
    att = explained.maps["rollout"]
    assert att.weights in page
    assert att.images[0] in page
    assert f"torch {att.versions['torch']}" in page
    assert "discard=0.0" in page
    assert datetime.now(UTC).strftime(">%Y-%m-%d.</span>") in page
    assert "cut as the model sees it, which is given 64×64 pixels" in page
    assert f"4 removals; {removed_words('patch', 'image-mean')}; 3 random orders, seed 0" in unescape(page)
    assert "patchlight explain &#39;a &lt;i&gt;.jpg&#39;" in page
    assert removed_words("token", "zero") == "a removed patch's token is taken out of the model's input"


def test_sanity_is_told_where_it_was_asked(explained: Explained) -> None:
    shown = section_of(replace(explained, sanity={"genatt": 0.9})).shown
    assert "With random weights the map hardly changes" in shown[0].sanity
    assert shown[1].sanity == ""


def test_refusals(explained: Explained) -> None:
    twice = replace(explained.maps["genatt"], scores=explained.maps["genatt"].scores.repeat(2, 1, 1))
    with pytest.raises(PatchlightError, match="one map of an image for each method; 'genatt'"):
        section_of(replace(explained, maps={"genatt": twice}))
    with pytest.raises(PatchlightError, match=r"needs at least one map; none was made \(tis: too slow\)"):
        section_of(replace(explained, maps={}, failures={"tis": "too slow"}))
    made = made_by(explained.maps, explained.trial, "")
    with pytest.raises(PatchlightError, match="needs at least one image"):
        report_html([], made)
