"""What notebooks show: HTML that is whole, escaped, small and without colours of its own; figures as pictures."""

from __future__ import annotations

import base64
import io
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.attribution import Attribution, Attributions
from patchlight.core.drawing.notebook import Html, table_html
from patchlight.core.images import Preprocess
from patchlight.core.photos import MOST, SIDE, Photos, as_picture
from patchlight.metrics.base import Evaluations
from tests.families import build, images, shared
from tests.report.pages import Page


def read(html: str) -> Page:
    """Well-formed HTML, whose colours are the page's: only lines are grey, half transparent."""
    page = Page(html)
    style = " ".join(map("".join, re.findall(r'style="([^"]*)"|<style>(.*?)</style>', html)))
    assert not re.search(r"color|background|#", style)
    assert set(re.findall(r"rgba?\([^)]*\)", style)) <= {"rgba(128,128,128,.35)"}
    return page


def pictures(html: str) -> list[Image.Image]:
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in re.findall(r"base64,([^\"]+)", html)]


def attribution(count: int, **about: Any) -> Attribution:
    return Attribution(torch.rand(count, 8, 8), torch.zeros(count).long(), "genatt", "toy", (32, 32), **about)


def test_a_map_lies_over_its_photograph(tmp_path: Path) -> None:
    vit = shared("vit")
    for colour in ("white", "black"):
        Image.new("RGB", (300, 200), colour).save(tmp_path / f"{colour}.png")
    att = pl.explain(vit, [tmp_path / "white.png", tmp_path / "black.png"], "random")
    white, black = pictures(att._repr_html_())
    assert white.size == (SIDE, SIDE)
    difference = np.asarray(white, float) - np.asarray(black, float)
    assert difference.mean() > 50
    bare = pictures(replace(att, photos=())._repr_html_())
    assert [picture.format for picture in bare] == ["PNG", "PNG"], "colours alone, where there is no photograph"
    assert read(att._repr_html_()).tags.count("img") == 2
    many = attribution(10)._repr_html_()
    assert len(pictures(many)) == 8
    assert "and 2 more" in many


def test_photographs_are_few_small_and_not_saved(tmp_path: Path) -> None:
    vit = shared("vit")
    batch = images(vit, 20)
    maps = pl.explain(vit, iter(batch), ["genatt", "rollout"], batch_size=3)
    att = maps["genatt"]
    assert len(att.photos) == MOST
    assert all(photo.dtype == torch.uint8 and photo.shape == (3, 64, 64) for photo in att.photos)
    assert maps["rollout"].photos is att.photos or maps["rollout"].photos[0] is att.photos[0]
    for i in (0, 15):
        want = np.asarray(vit.preprocess.picture(batch[i]), int)
        assert np.abs(np.asarray(as_picture(att.photos[i], 64), int) - want).max() <= 1
    assert torch.equal(att[3].photos[0], att.photos[3])
    assert [len(part.photos) for part in (att[14:18], att[::2], att[17])] == [2, 8, 0]
    joined = Attribution.concat([att[0], att[1:3], att[17], att[4]])
    assert len(joined.photos) == 3, "up to the first image without one"
    saved = att.save(tmp_path / "with")
    without = replace(att, photos=()).save(tmp_path / "without")
    assert {p.name: p.stat().st_size for p in saved.iterdir()} == {p.name: p.stat().st_size for p in without.iterdir()}
    assert Attribution.load(saved).photos == ()


def test_a_coarse_view_is_shown_as_sharp_as_the_picture_was(tmp_path: Path) -> None:
    vit = build("vit")
    vit.preprocess = replace(vit.preprocess, crop_pct=0.5)
    image = Image.effect_noise((900, 600), 90).convert("RGB")
    (photo,) = pl.explain(vit, image).photos
    assert photo.shape == (3, SIDE, SIDE)
    want = replace(vit.preprocess, size=(SIDE, SIDE)).crop(image)
    assert np.array_equal(np.asarray(as_picture(photo, SIDE)), np.asarray(want)), "cut as the model cut it"
    (seen,) = pl.explain(vit, vit.batch(image)).photos
    assert seen.shape == (3, 64, 64), "of a tensor there is no sharper view"


@pytest.mark.parametrize(("size", "shape"), [((448, 448), (224, 224)), ((200, 400), (112, 224)), ((32, 64), (32, 64))])
def test_large_views_are_made_small(size: tuple[int, int], shape: tuple[int, int]) -> None:
    photos = Photos(Preprocess(size))
    photos.see(torch.randn(2, 3, *size))
    assert [tuple(photo.shape[1:]) for photo in photos.photos] == [shape, shape]
    grey = Photos(Preprocess(size))
    grey.see(torch.zeros(1, 1, *size))
    assert grey.photos[0].shape[0] == 3
    many = Photos(Preprocess(size))
    many.see(torch.zeros(1, 5, *size))
    assert many.photos == [], "other channels are no picture"


def test_streams_of_pictures_and_tensors_keep_their_order() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    white = Image.new("RGB", (80, 80), "white")
    att = pl.explain(vit, iter([batch[0], white, batch[1]]), batch_size=2)
    assert [photo.shape[-1] for photo in att.photos] == [64, SIDE, 64]
    assert int(att.photos[1].min()) == 255


def test_several_attributions_are_a_table_and_still_a_dict() -> None:
    vit = shared("vit")
    maps = pl.explain(vit, images(vit, 6), ["genatt", "ixg", "random"])
    assert isinstance(maps, dict)
    assert list(maps) == ["genatt", "ixg", "random"]
    table = read(maps._repr_html_())
    assert table.tags.count("tr") == 1 + 4
    assert len(pictures(maps._repr_html_())) == 4 * (1 + 3)
    assert {"genatt", "ixg", "random", "vit"} <= set(table.words)
    assert "2 more maps of each" in " ".join(table.words)
    several = pl.explain(vit, images(vit, 1), ["genatt"], target=[[0, 1]])
    assert len(pictures(several._repr_html_())) == 2 * 2, "a row per class, over the same photograph"
    many = pl.explain(vit, images(vit, 4), {f"m{i}": {"method": "random"} for i in range(14)})
    assert "4 more methods" in many._repr_html_()
    assert len(many._repr_html_()) < 500_000
    many["else"] = "what?"  # type: ignore[assignment]
    assert read(many._repr_html_()).tags[0] == "pre"
    assert pickle.loads(pickle.dumps(maps)).keys() == maps.keys()


def test_names_are_escaped() -> None:
    evil = "<script>alert(1)</script>"
    att = attribution(2, labels=(evil, evil))
    for html in (
        att._repr_html_(),
        Attributions({evil: att})._repr_html_(),
        Evaluations({evil: pl.Evaluation(evil, torch.ones(8).double(), True, (0, 1))})._repr_html_(),
        pl.Comparison(
            evil, {evil: {evil: pl.Evaluation(evil, torch.ones(8).double(), True, (0, 1))}}, Attributions()
        )._repr_html_(),
        table_html([evil], [[evil]], evil, evil),
    ):
        assert "script" not in read(html).tags
        assert "&lt;script&gt;" in html
    assert "<b>1</b>" in table_html(["a"], [[Html("<b>1</b>")]])


def test_an_evaluation_is_a_table() -> None:
    vit = shared("vit")
    batch = images(vit, 6)
    one = pl.evaluate(vit, batch, "genatt", "sparseness")
    words = read(one._repr_html_()).words
    assert {"sparseness", "higher", one.summary, "6 of 6"} <= set(words)
    both = pl.evaluate(vit, batch, "genatt", {"sparseness": {}, "short": {"metric": "deletion", "steps": 2}})
    assert {"sparseness", "short", "lower"} <= set(read(both._repr_html_()).words)
    methods = pl.evaluate(vit, batch, {"a": "genatt", "b": "rollout"}, ["sparseness"])
    assert {"method", "sparseness ↑", "a", "b"} <= set(read(methods._repr_html_()).words)


def test_a_comparison_is_a_table_and_a_figure() -> None:
    vit = shared("vit")
    found = pl.compare(vit, images(vit, 7), ["genatt", "random"], ["sparseness"])
    page = read(found._repr_html_())
    assert page.tags.count("img") == 1
    assert page.tags.count("tr") == 3
    (figure,) = pictures(found._repr_html_())
    assert figure.size[0] > 400
    assert len(found._repr_html_()) < 600_000
    best = [method for (method, _), mark in found.marks.items() if mark == "best"]
    assert page.tags.count("b") == len(best) + 1, "the title and the best"


def test_lists_of_methods_and_metrics_are_tables_and_still_lists() -> None:
    for listed in (pl.list_methods(), pl.list_metrics(), pl.list_methods(shared("siglip"))):
        assert isinstance(listed, list)
        page = read(listed._repr_html_())
        assert page.tags.count("tr") == len(listed) + 1
        assert {row.name for row in listed} <= set(page.words)
    assert any(words.startswith("no: ") for words in page.words)
    assert read(type(listed)()._repr_html_()).tags


def test_a_figure_shows_itself_at_its_own_size() -> None:
    drawn = pl.figure(Image.new("RGB", (9, 9)), attribution(1))
    data, about = drawn._repr_png_()
    picture = Image.open(io.BytesIO(data))
    assert picture.format == "PNG"
    width, height = drawn.get_size_inches()
    assert about == {"width": round(96 * width), "height": round(96 * height)}
    assert picture.width > about["width"], "drawn finer than it is shown"
    assert pickle.loads(pickle.dumps(drawn))._repr_png_()[1] == about


def test_a_figure_of_kept_photographs(tmp_path: Path) -> None:
    vit = shared("vit")
    maps = pl.explain(vit, images(vit, 18), ["genatt"])
    drawn = maps.figure(tmp_path / "f.png")
    assert len([a for a in drawn.axes if a.get_position().height * drawn.get_figheight() > 1]) == 2 * MOST
    assert Image.open(tmp_path / "f.png").size[0] > 200
    with pytest.raises(pl.PatchlightError, match="these maps have no photographs; give the images"):
        Attributions(a=replace(maps["genatt"], photos=())).figure()


def test_tables_for_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    maps = pl.explain(vit, batch, ["genatt", "ixg"])
    frame = maps.to_frame()
    assert list(frame.columns) == ["image", "method", "target", "label", "row", "column", "score"]
    assert len(frame) == 2 * 2 * 16
    one = frame[(frame.method == "ixg") & (frame.image == 1) & (frame.row == 2) & (frame.column == 3)]
    assert one.score.item() == pytest.approx(maps["ixg"].scores[1, 2, 3].item())
    several = pl.explain(vit, batch, "genatt", target=[[0, 1], [2, 3]]).to_frame()
    assert several.groupby("image").target.unique().map(list).tolist() == [[0, 1], [2, 3]]
    cell = several[(several.image == 1) & (several.target == 3) & (several.row == 1) & (several.column == 0)]
    assert cell.score.item() == pl.explain(vit, batch, "genatt", target=[[0, 1], [2, 3]]).scores[1, 1, 1, 0].item()
    assert set(pl.explain(vit, batch, "ixg", target=(0, 1)).to_frame().against) == {"class 1"}
    broken = maps["genatt"].scores.clone()
    broken[0] = torch.nan
    with pytest.warns(pl.UndefinedMetric):
        values = pl.evaluate(vit, batch, broken, "sparseness").to_frame()
    assert values.reason.tolist() == ["the map contains NaN or infinite values", ""]
    assert values.value.isna().tolist() == [True, False]
    table = pl.evaluate(vit, batch, maps, ["sparseness"]).to_frame()
    assert list(table.columns) == ["image", "method", "metric", "value", "reason"]
    assert table.method.tolist() == ["genatt", "genatt", "ixg", "ixg"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pl.PatchlightError, match=r"pip install 'patchlight\[pandas\]'"):
        maps.to_frame()
