"""The report for other people: what it shows is what was computed, it opens by itself, and words stay words."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from patchlight.report.explanations import Explained, describe_run, removal_words, report_html, section_of
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


def about(vit: pl.Anatomy, target: int, methods: Sequence[str] = ("genatt", "rollout")) -> Explained:
    picture = noise(70, 90)
    maps = pl.explain(vit, picture, list(methods), target=target)
    trial = Trial(vit, vit.batch(picture), Targets(torch.tensor([[target]])), steps=4, randoms=3)
    tested = run_trial(trial, {name: att.scores[0] for name, att in maps.items()})
    shown = seen(picture, vit.preprocess.size, vit.preprocess)
    return Explained("a <i>.jpg", shown, vit.predict(picture, 3)[0], maps, trial, tested)


def told(image: Explained) -> list[str]:
    section = section_of(image)
    return [*section.caveats, *section.notes]


def page_of(*images: Explained) -> str:
    command = "patchlight explain '/home/jane/my photos/a <i>.jpg' --report=/tmp/out/r.html"
    warned = ["one & all", "cannot read /home/jane/b.jpg"]
    made = describe_run(images[0].maps, images[0].trial, command, warned, ["'/home/jane/c d.jpg' is not an image"])
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
        curves |= {name: getattr(truth.curves, which)[0] for name, truth in explained.results.items()}
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
    for one in section.maps:
        truth = explained.results[one.title]
        numbers = (truth.curves.deletion_areas[0], truth.curves.insertion_areas[0], truth.score)
        cells = [str(truth.rank), *(f"{float(number):.3f}" for number in numbers)]
        cells += [f"{truth.effect:+.2f}, {truth.size}", f"{truth.beaten} of {truth.randoms}"]
        row = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        assert f'<th scope="row">{one.title}</th>{row}</tr>' in page
        assert truth.words in page
        assert f"{one.hiding} {truth.words}" in unescape(page)
        assert one.hiding == explained.trial.hiding(truth).words
        assert truth.score == pytest.approx(float(numbers[1] - numbers[0]), abs=2e-3)
    assert f'<td class="n">{float(explained.trial.random.scores.mean()):.3f}</td>' in page


def test_page_one_has_one_large_map_a_plain_paragraph_and_three_caveats(vit: pl.Anatomy, explained: Explained) -> None:
    sharp = replace(explained, picture=explained.picture.resize((560, 560)))
    section, page = section_of(sharp), unescape(page_of(sharp))
    front = page[: page.index("Methods side by side")]
    assert front.count("<img") == 3, "the map, the photograph and the colour scale"
    assert 'width="560" height="560"' in front
    first = explained.results["genatt"]
    lead = re.search(r'<p class="lead">(.*?)</p>', front)
    assert lead is not None
    removal = "hidden patches are painted with the image's mean brightness (fill 'image-mean')"
    words = f"{section.maps[0].hiding} {first.words} In the test, {removal}."
    assert lead[1].replace("\u00a0", " ") == words
    assert f"Rank {first.rank} of 2" in words
    assert len(section.caveats) == 3
    sentences = re.findall(r"[.?!](?= |$)", " ".join(section.caveats))
    assert len(sentences) == 3


def test_methods_that_ignore_the_class_and_choices_of_auto_are_named(vit: pl.Anatomy) -> None:
    explained = about(vit, 1, ["rollout", "auto"])
    section, page = section_of(explained), page_of(explained)
    chosen = explained.maps["auto"].method
    assert [one.title for one in section.maps] == ["rollout", f"{chosen} (auto)"]
    assert ("ignores the class", False) in section.maps[0].tags
    assert "ignores the class" not in dict(section.maps[1].tags)
    assert "rollout ignores the class: its map is the same for every class." in section.caveats
    assert page.count(">ignores the class</span>") == 2, "below the large map, and below the small one"
    assert page.count(f"<title>{chosen} (auto)</title>") == 2, "in both charts"


def test_a_contrast_says_that_it_is_a_difference_of_probabilities(vit: pl.Anatomy) -> None:
    picture, pair = noise(70, 90), Targets(torch.tensor([[1]]), torch.tensor([[2]]))
    maps = pl.explain(vit, picture, "genatt", target=(1, 2))
    trial = Trial(vit, vit.batch(picture), pair, steps=4, randoms=3)
    tested = run_trial(trial, {"genatt": maps.scores[0]})
    image = Explained("a.jpg", noise(64, 64), vit.predict(picture, 3)[0], {"genatt": maps}, trial, tested)
    assert all(">difference of probabilities</text>" in chart.svg for chart in section_of(image).charts)
    assert "Vertical axis: difference of probabilities of dog &lt;b&gt; against bird." in page_of(image)


def test_no_absolute_path_is_in_the_page(explained: Explained) -> None:
    page = unescape(page_of(replace(explained, name="/home/jane/a.jpg", failures={"tis": "no '/home/jane/x y.pt'"})))
    words = re.sub(r"data:image/[^\"]*", "", page)
    assert "/home" not in words
    assert "jane" not in words
    assert "/tmp" not in words
    for shown in (
        "patchlight explain 'a <i>.jpg' --report=r.html",
        "cannot read b.jpg",
        "'c d.jpg' is not",
        "no 'x y.pt'",
    ):
        assert shown in words


def test_what_a_reader_should_know(vit: pl.Anatomy, explained: Explained) -> None:
    top = explained.predictions[0][0]
    other = LABELS.index(next(label for label in LABELS if label != top))
    notes = " ".join(told(about(vit, other)))
    assert f"but the model predicts {top}: they show what speaks for" in notes
    assert "The model is not sure: its first class" in notes, "the weights are random"

    sure = replace(explained, predictions=[(LABELS[1], 0.9), ("cat", 0.1)])
    assert not [note for note in told(sure) if "not sure" in note or "but the model" in note]
    torn = replace(explained, predictions=[(LABELS[1], 0.52), ("cat", 0.48)])
    assert "The model is undecided: dog <b> has 52 % and cat 48 %." in told(torn)

    flat = replace(explained.maps["genatt"], scores=torch.full_like(explained.maps["genatt"].scores, 0.3))
    dead = replace(explained, maps={**explained.maps, "genatt": flat})
    assert "The map of genatt is constant: it shows nothing" in section_of(dead).caveats[0]
    none = {name: replace(truth, beaten=0) for name, truth in explained.results.items()}
    assert any("No method is better than random" in n for n in told(replace(explained, results=none)))
    some = {name: replace(truth, beaten=20, randoms=20, conclusive=True) for name, truth in explained.results.items()}
    assert not any("No method is better" in n for n in told(replace(explained, results=some)))
    open_ended = {name: replace(truth, conclusive=False) for name, truth in some.items()}
    tags = [entry.tags[0] for entry in section_of(replace(explained, results=open_ended)).maps]
    assert set(tags) == {("inconclusive", False)}
    chance = replace(explained, results={name: replace(truth, baseline=True) for name, truth in some.items()})
    assert {entry.tags[0] for entry in section_of(chance).maps} == {("baseline", False)}


def test_several_images_are_summed_up(vit: pl.Anatomy, explained: Explained) -> None:
    second = about(vit, 2)
    page = page_of(explained, second)
    assert ">Summary<" in page
    assert ">Summary<" not in page_of(explained)
    for method in ("genatt", "rollout"):
        both = [image.results[method] for image in (explained, second)]
        cell = r'<td class="n">(.*?)</td>'
        row = re.search(rf'<tr><th scope="row">{method}</th><td class="n">(\d of 2)</td>{cell}{cell}', page)
        assert row is not None
        assert row[1] == f"{sum(truth.better for truth in both)} of 2"
        assert float(row[2]) == pytest.approx(sum(truth.score for truth in both) / 2, abs=6e-4)
        assert float(row[3]) == pytest.approx(sum(truth.effect for truth in both) / 2, abs=6e-4)
    assert page.count('id="image-') == 2


def test_how_it_was_made_is_there(explained: Explained) -> None:
    page = page_of(explained)
    att = explained.maps["rollout"]
    assert att.weights in page
    assert att.images[0] in page
    assert f"torch {att.versions['torch']}" in page
    assert "discard=0.0" in page
    assert datetime.now(UTC).strftime(" %Y-%m-%d.</p>") in page
    assert "What the model sees: 64×64 pixels" in page
    assert f"4 steps; {removal_words('patch', 'image-mean')}; 3 random orders, seed 0" in unescape(page)
    assert "patchlight explain &#39;a &lt;i&gt;.jpg&#39;" in page
    assert removal_words("token", "zero") == "the tokens of hidden patches are removed from the model's input"


def test_refusals(explained: Explained) -> None:
    twice = replace(explained.maps["genatt"], scores=explained.maps["genatt"].scores.repeat(2, 1, 1))
    with pytest.raises(PatchlightError, match="one map per image and method; 'genatt'"):
        section_of(replace(explained, maps={"genatt": twice}))
    with pytest.raises(PatchlightError, match=r"needs at least one map; no method gave one \(tis: too slow\)"):
        section_of(replace(explained, maps={}, failures={"tis": "too slow"}))
    made = describe_run(explained.maps, explained.trial, "")
    with pytest.raises(PatchlightError, match="needs at least one image"):
        report_html([], made)
