"""Every figure draws something with the bundled model, files are fit for a paper, and wrong requests are refused."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from importlib.resources.abc import Traversable
from inspect import signature
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner, Result

import patchlight as pl
from patchlight import cli
from patchlight.core.drawing import figure_bytes
from patchlight.core.recipes import bundled_recipes
from patchlight.core.registry import settings_of
from patchlight.report.figures import FIGURES, Drawing, draw, list_figures, register_figure
from patchlight.report.figures.layouts import LAYOUTS
from patchlight.report.figures.sheet import Row, Tile
from patchlight.zoo import pocket
from tests.registries import restored

PHOTOS = [pocket.PHOTOS / f"{name}.jpg" for name in ("cat", "dog", "bird", "horse", "ship", "dog-and-cat", "kitten")]
LABELS = ["cat", "dog", "bird", "horse", "ship", "dog", "deer"]
"""The last is wrong."""


@pytest.fixture(scope="module")
def vit() -> pl.Anatomy:
    return pl.load("pocket")


def given(name: str, vit: pl.Anatomy) -> dict[str, Any]:
    """What a figure needs, made up."""
    boxes = [torch.tensor([[4.0, 4.0, 20.0, 20.0]])] * len(PHOTOS)
    masks = torch.zeros(len(PHOTOS), *vit.preprocess.size, dtype=torch.int8)
    masks[:, 8:20, 8:20] = 1
    explainer = pocket.PHOTOS.parent / "pocket-diffmask"
    there = {"labels": LABELS, "boxes": boxes, "masks": masks, "other": vit, "explainer": explainer}
    return {key: there[key] for key in (need.split(" or ")[0] for need in FIGURES[name].needs)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws(name: str, vit: pl.Anatomy, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    fig = draw(name, vit, PHOTOS, path, progress=False, **{**given(name, vit), **FIGURES[name].quick})
    assert path.stat().st_size > 10_000
    drawn_with = "counting" if name == "diffmask-2" else "pocket"  # that task has a model of its own
    assert any(f"Drawn with {drawn_with}" in text.get_text() for text in fig.texts)
    assert 3.2 <= fig.get_size_inches()[0] <= 7.0
    with Image.open(path) as picture:
        assert picture.info["dpi"][0] == pytest.approx(300, abs=0.1)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_described(name: str) -> None:
    entry = FIGURES[name]
    which = name.partition("-")[2]
    assert re.fullmatch(r"[a-z]+-([0-9]+|[a-z-]+)", name)
    assert entry.paper
    assert not which.isdecimal() or entry.paper.endswith(f"Figure {which}")
    assert entry.shows
    assert not entry.shows.endswith(".")
    assert entry.summary
    assert not re.search(r"^its\b|\bnot\b", entry.stand_in), (
        "the note reads 'the paper: …': a model and images, or none"
    )


def test_figures_are_listed_by_paper_and_number() -> None:
    names = [info.name for info in list_figures()]
    assert sorted(names) == sorted(FIGURES)
    assert names.index("skipplus-2") < names.index("skipplus-10") < names.index("tis-2") < names.index("tis-masks")
    told = {info.name: info.needs for info in list_figures()}
    assert told["tis-3"] == ("an image", "labels or a target")


@pytest.mark.parametrize("file", bundled_recipes("figures").values(), ids=lambda file: file.name)
def test_files_of_figures_fit_their_layouts(file: Traversable) -> None:
    """A word that is misspelt would be passed over in silence."""
    figures = tomllib.loads(file.read_text(encoding="utf-8"))
    assert figures.pop("paper")
    known = {"layout", "place", "shows", "text", "stand_in", "needs", "least", "aliases", "quick"}
    for name, figure in figures.items():
        parameters = signature(LAYOUTS[figure["layout"]]).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert set(figure) <= known | {"options", "settings"}, name
        assert set(figure.get("options", {})) <= options, name
        assert set(figure.get("settings", {})) | set(figure["quick"]) <= set(settings_of(FIGURES[name].function)), name


def small(vit: pl.Anatomy, path: Path | None = None, **options: Any) -> Figure:
    return draw("skipplus-2", vit, PHOTOS[:1], path, starts=[0], progress=False, **options)


def test_files_are_fit_for_a_paper(vit: pl.Anatomy, tmp_path: Path) -> None:
    """A PDF embeds its fonts as TrueType (Type 42), an SVG needs none, a PNG has 300 dots an inch."""
    fig = small(vit, tmp_path / "a.pdf")
    for end in ("svg", "png"):
        (tmp_path / f"a.{end}").write_bytes(figure_bytes(fig, f"a.{end}"))
    text = (tmp_path / "a.pdf").read_bytes()
    assert text.startswith(b"%PDF")
    assert b"/FontFile2" in text
    assert b"/Type3" not in text
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert float(root.attrib["width"].removesuffix("pt")) == pytest.approx(72 * fig.get_size_inches()[0], rel=1e-3)
    assert not [one for one in root.iter() if one.tag.endswith("}text")], "words are outlines"
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width == pytest.approx(300 * fig.get_size_inches()[0], abs=1)


def test_the_note_says_what_it_was_drawn_with(vit: pl.Anatomy) -> None:
    words = noted(draw("skipplus-1", vit, PHOTOS[:1], methods="genatt", progress=False))
    assert "Drawn with pocket and 1 image; the paper: EVA-L/14 and one image, a newt." in words
    fig = small(vit)
    assert "Drawn with pocket and 1 image. The paper does not say what its figure was drawn with." in noted(fig)
    assert "from block 0" in noted(fig)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("skiplus-2", {}, "no figure is called 'skiplus-2'; did you mean 'skipplus-2'"),
        ("skipplus-2", {"shwon": 2}, "'skipplus-2' has no setting 'shwon'; did you mean 'shown'"),
        ("skipplus-2", {"shown": 0}, "shown=0"),
        ("skipplus-2", {"starts": [99]}, "block 99 does not exist"),
        ("skipplus-1", {"methods": "genat"}, "no method is called 'genat'"),
        ("skipplus-1", {"methods": []}, "no method was given"),
        ("skipplus-2", {"path": "fig.docx"}, "'fig.docx' is not a figure file"),
        ("skipplus-2", {"labels": [1, 2]}, "2 labels for 1 images"),
        ("tis-3", {}, "figure 'tis-3' needs the true classes .*, or the class to explain"),
        ("tis-3", {"labels": ["cat"]}, "all 1 images are predicted correctly"),
        ("tis-4", {"step": 9, "steps": 8, "methods": ["genatt"]}, "step 9 is after the last of 8 steps"),
        ("skipplus-5", {"methods": ["genatt"], "composed": ["ixg"]}, "give the same labels"),
    ],
)
def test_wrong_requests_are_refused(vit: pl.Anatomy, name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(pl.PatchlightError, match=words):
        draw(name, vit, PHOTOS[:1], progress=False, **options)


@pytest.mark.parametrize("images", [[], 3, [3], None])
def test_what_are_no_images_is_refused(vit: pl.Anatomy, images: Any) -> None:
    with pytest.raises(pl.PatchlightError, match="give a"):
        draw("skipplus-2", vit, images, progress=False)


def test_a_needs_word_that_is_unknown_is_refused() -> None:
    with pytest.raises(pl.PatchlightError, match="needs \\['gold'\\]"):
        register_figure("toy-1", paper="a toy", shows="nothing", needs={"labels or gold"})(lambda drawing: Figure())


def seen_by_a_toy(vit: pl.Anatomy, images: Any, least: int = 1, **options: Any) -> list[Drawing]:
    """What a figure is given."""
    given: list[Drawing] = []
    with restored():

        @register_figure("toy-1", paper="a toy", shows="nothing", least=least)
        def toy(drawing: Drawing, shown: int | None = None) -> Figure:
            given.append(drawing)
            return drawing.rows([Row([Tile(drawing.pictures[0], "a title")])])

        draw("toy-1", vit, images, progress=False, **options)
    return given


def test_a_figure_is_given_the_images_as_the_model_sees_them(vit: pl.Anatomy) -> None:
    (drawing,) = seen_by_a_toy(vit, PHOTOS[:3], labels=["cat", 5, "bird"])
    assert torch.equal(drawing.images, vit.batch(PHOTOS[:3]))
    assert drawing.labels is not None
    assert drawing.labels.tolist() == drawing.target == [3, 5, 2]
    assert [picture.size for picture in drawing.pictures] == [(224, 224)] * 3
    part = drawing.select([2, 0])
    assert torch.equal(part.images, drawing.images[[2, 0]])
    assert part.target == [2, 3]
    assert torch.equal(part.of(vit).images, part.images), "another model reads the same photographs"


def test_tensors_and_folders_are_images_too(vit: pl.Anatomy) -> None:
    (drawing,) = seen_by_a_toy(vit, vit.batch(PHOTOS[:2]), shown=1)
    assert len(drawing) == 1
    assert drawing.target is None
    (folder,) = seen_by_a_toy(vit, str(pocket.PHOTOS), shown=2)
    assert len(folder) == 2


def test_unreadable_images_are_left_out_and_reported(vit: pl.Anatomy, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="skipped: .*a.jpg"):
        (drawing,) = seen_by_a_toy(vit, [tmp_path / "a.jpg", PHOTOS[0]], labels=["dog", "cat"])
    assert drawing.target == [3]
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(pl.PatchlightError, match="none of the images can be read"),
    ):
        seen_by_a_toy(vit, tmp_path / "a.jpg")
    with pytest.raises(pl.PatchlightError, match="needs 2 images; 1 can be read"):
        seen_by_a_toy(vit, PHOTOS[0], least=2)


def test_methods_that_do_not_work_are_left_out_and_reported(vit: pl.Anatomy) -> None:
    from tests import families

    swin = families.build("swin")
    images = torch.zeros(1, 3, *swin.preprocess.size)
    (drawing,) = seen_by_a_toy(swin, images)
    refused = [name for name in ("tis", "ixg") if name not in drawing.working(["tis", "ixg"])]
    assert refused == ["tis"]
    assert any("tis left out" in words for words in drawing.notes)
    with pytest.raises(pl.PatchlightError, match="none of the methods tis works on"):
        drawing.working(["tis"])


def test_images_are_brought_to_the_model_in_batches(vit: pl.Anatomy, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, no more than a batch lies where the model does."""
    placed: list[int] = []
    place = pl.Anatomy.place

    def counted(self: pl.Anatomy, images: torch.Tensor) -> torch.Tensor:
        placed.append(len(images))
        return place(self, images)

    expected = vit.logits(vit.batch(PHOTOS)).argmax(1)
    monkeypatch.setattr(pl.Anatomy, "place", counted)
    monkeypatch.setattr("patchlight.report.figures.drawing.default_batch_size", lambda vit: 3)
    for images in (PHOTOS, torch.stack([vit.preprocess.tensor(Image.open(photo)) for photo in PHOTOS])):
        (drawing,) = seen_by_a_toy(vit, images)
        assert placed == []
        assert torch.equal(drawing.predictions, expected)
        assert placed == [3, 3, 1]
        placed.clear()


def noted(fig: Figure) -> str:
    """The line below a figure, unbroken."""
    return " ".join(text.get_text() for text in sorted(fig.texts, key=lambda text: -text.get_position()[1]))


def test_masks_of_the_first_models_input_leave_the_other_without_ap(vit: pl.Anatomy) -> None:
    size = vit.preprocess.size
    framed = replace(vit.preprocess, interpolation="nearest")
    other = pl.wrap(pocket.build(trained=False), name="another", preprocess=framed)
    masks = torch.zeros(1, *size, dtype=torch.int8)
    masks[:, 8:20, 8:20] = 1
    asked: dict[str, Any] = {"masks": masks, "other": other, "points": 2, "progress": False}
    for name, more in (
        ("skipplus-9", {"methods": ["ixg"]}),
        ("skipplus-7", {"methods": ["ixg"], "starts": [0]}),
    ):
        fig = draw(name, vit, PHOTOS[:1], **asked, **more)
        assert [axes.get_visible() and axes.axison for axes in fig.axes] == [True] * 9 + [False]
        assert "do not lie on the input of another, so it has no Segmentation AP" in noted(fig)


def test_a_binary_head_has_two_classes_to_show() -> None:
    from tests import families

    binary = families.shared("vit-binary")
    images = families.images(binary, 2)
    fig = draw("skipplus-6", binary, images, methods=["ixg"], progress=False)
    first = (binary.logits(images)[:, 0] > 0).long().tolist()
    rows = [binary.label(index).split(",")[0] for own in first for index in (own, 1 - own)]
    assert [text.get_text() for text in fig.texts if text.get_text() in rows] == rows


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("skipplus-9", {"methods": ["random"], "points": 2}, "Bars"),
        ("skipplus-7", {"methods": ["ixg"], "starts": [0], "points": 2}, "Bands"),
        ("tis-masks", {"samples": [4], "steps": 2}, "Bands"),
    ],
)
def test_intervals_are_reported_where_there_are_some(
    vit: pl.Anatomy, name: str, options: dict[str, Any], what: str
) -> None:
    few = noted(draw(name, vit, PHOTOS[:2], progress=False, **options))
    assert "95 %" not in few
    assert "No intervals for fewer than 6 images" in few
    assert f"{what}: 95 % intervals over images" in noted(draw(name, vit, PHOTOS[:6], progress=False, **options))


def lines(fig: Figure) -> dict[str, Any]:
    """The points of the lines with a label, of the first axes that have some."""
    axes = next(one for one in fig.axes if one.get_legend_handles_labels()[1])
    return {str(one.get_label()): one.get_xydata() for one in axes.lines if not str(one.get_label()).startswith("_")}


@pytest.mark.slow
def test_the_study_of_masks_is_what_evaluate_says(vit: pl.Anatomy) -> None:
    fig = draw("tis-masks", vit, PHOTOS[:3], samples=[24, 8], steps=4, progress=False)
    drawn = lines(fig)
    assert drawn["insertion"][:, 0].tolist() == [8, 24]
    metric = {"preset": "tis", "fill": "image-mean", "steps": 4}
    labels = vit.logits(vit.batch(PHOTOS[:3])).argmax(1)
    for k, samples in enumerate((8, 24)):
        att = pl.explain(vit, PHOTOS[:3], "tis", samples=samples, progress=False)
        for name, word in (("insertion", "insertion"), ("deletion", "deletion"), ("ins-del", "insertion − deletion")):
            expected = pl.evaluate(vit, PHOTOS[:3], att, metric=name, labels=labels, progress=False, **metric).mean
            assert drawn[word][k, 1] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_the_cutoffs_are_what_evaluate_says(vit: pl.Anatomy) -> None:
    fig = draw("skipplus-7", vit, PHOTOS[:2], methods="ixg", starts=[0, 4], points=2, progress=False)
    drawn = lines(fig)["ixg"]
    labels = vit.logits(vit.batch(PHOTOS[:2])).argmax(1)
    for k, start in enumerate((0, 4)):
        att = pl.explain(vit, PHOTOS[:2], "ixg.plus", start=start, progress=False)
        asked: dict[str, Any] = {"preset": "skipplus", "points": 2, "labels": labels, "progress": False}
        expected = pl.evaluate(vit, PHOTOS[:2], att, metric="token-deletion", **asked)
        assert drawn[k].tolist() == pytest.approx([start, expected.mean], rel=1e-5)


def test_a_deleted_image_lacks_its_highest_pixels(vit: pl.Anatomy) -> None:
    """By hand: the fraction of the pixels that the steps stand for, and none that the map ranks lower."""
    from patchlight.report.figures.layouts import without_highest

    images = vit.batch(PHOTOS[:1])
    drawing = Drawing(vit, images, [])
    maps = torch.arange(1024.0).view(1, 32, 32)
    after = without_highest(drawing, maps, torch.full_like(images, 9.0), 100)
    gone = (after[0] == 9).all(0).flatten()
    assert gone.nonzero().flatten().tolist() == list(range(924, 1024))
    assert torch.equal(after[0].flatten(1)[:, :924], images[0].flatten(1)[:, :924])


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_the_command_draws(tmp_path: Path) -> None:
    out = tmp_path / "fig.svg"
    asked = ("figure", "skipplus-1", "--images", str(PHOTOS[0]), "--set", "methods=genatt,ixg", "--out", str(out))
    told = json.loads(run(*asked, "--target", "dog", "--json").stdout)
    assert told["written"] == str(out)
    assert out.stat().st_size > 10_000
    assert "already exists" in run(*asked, code=2).stderr
    run(*asked, "--force")


def test_the_command_writes_numbers(tmp_path: Path) -> None:
    out, table = str(tmp_path / "fig.png"), tmp_path / "numbers.json"
    asked = ("figure", "vitcx-4", "--set", "random_masks=4", "--images", str(PHOTOS[0]), "--images", str(PHOTOS[1]))
    run(*asked, "--out", out, "--numbers", str(table))
    rows = [row for row in json.loads(table.read_text()) if row["quantity"] == "mSim, mean over images"]
    assert {row["series"] for row in rows} == {"pocket", "random masks (RISE)"}
    assert all(0 < row["value"] <= 1 and row["images"] == 2 for row in rows)
    assert "already exists" in run(*asked, "--out", f"{out}2.png", "--numbers", str(table), code=2).stderr
    wrong = run(*asked, "--out", out, "--force", "--numbers", str(tmp_path / "n.txt"), code=2).stderr
    assert "name a .csv or .json file" in wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("figure",), "no figure was named"),
        (("figure", "skiplus-2"), "did you mean 'skipplus-2'"),
        (("figure", "skipplus-2", "--images", "nowhere"), "no image or folder at 'nowhere'"),
        (("figure", "skipplus-2", "--out", "a.doc"), "is not a figure file"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments, code=2)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_lists() -> None:
    table = run("figures").stdout
    assert all(name in table for name in FIGURES)
    assert {row["name"] for row in json.loads(run("figures", "--json").stdout)} == set(FIGURES)
    one = run("figures", "tis-masks").stdout
    assert "samples: int >= 1 or list of int >= 1" in one
