"""Pictures are right without tuning: the scale is robust, the heat lies where the score is, nothing is cut off."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.attribution import Attribution
from patchlight.core.drawing import overlay, percent, robust_scale
from patchlight.core.drawing.heat import is_signed
from patchlight.core.images import Preprocess
from patchlight.report.pictures import figure
from tests import families
from tests.report.pages import check_apart


def attribution(scores: torch.Tensor, **about: object) -> Attribution:
    count = len(scores)
    known = {
        "scores": scores,
        "target": torch.zeros(count, dtype=torch.long),
        "method": "genatt",
        "model": "toy",
        "image_size": (32, 32),
        "labels": ("cat",) * count,
        "preprocess": Preprocess((32, 32)),
    }
    return Attribution(**known | about)  # type: ignore[arg-type]


def test_one_outlier_does_not_set_the_scale() -> None:
    for cells in (16, 64, 196):
        scores = torch.linspace(0, 1, cells)
        scores[3] = 1000.0
        assert robust_scale(scores).high <= 1
        signed = torch.linspace(-1, 1, cells)
        signed[3] = -1000.0
        scale = robust_scale(signed)
        assert scale.signed
        assert scale.high <= 1
        assert float(scale(signed).abs().max()) == 1


def test_scales_of_sparse_constant_and_distant_maps() -> None:
    sparse = torch.zeros(14, 14)
    sparse[4, 4] = 2.0
    assert robust_scale(sparse).high == 2
    assert robust_scale(torch.full((14, 14), 3.0))(torch.full((2, 2), 3.0)).tolist() == [[0, 0], [0, 0]]
    values = robust_scale(10 + torch.rand(14, 14))(10 + torch.rand(14, 14))
    assert float(values.min()) < 0.1
    assert float(values.max()) > 0.9
    with pytest.raises(pl.PatchlightError, match="NaN"):
        robust_scale(torch.tensor([1.0, float("nan")]))
    assert not is_signed(torch.tensor([-1e-6, 0.5, 1.0])), "rounding below zero is not a sign"
    assert is_signed(torch.tensor([-0.1, 0.5, 1.0]))


def test_signed_heat_is_red_for_blue_against_and_grey_at_zero() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0, 0.0, -1.0, -1.0]]).repeat(6, 1)
    picture = np.asarray(
        overlay(scores, Image.new("RGB", (224, 224), "grey"), (224, 224), upsampling="nearest")
    ).astype(int)
    left, middle, right = picture[112, 10], picture[112, 112], picture[112, -10]
    assert left[0] > left[2] + 80
    assert right[2] > right[0] + 80
    assert middle.max() == middle.min()
    below = np.asarray(overlay(torch.zeros(4, 4), Image.new("RGB", (64, 64), "red"), (32, 32), signed=True))
    assert (below.max(-1) == below.min(-1)).all(), "the photograph is grey"


def test_heat_lies_where_the_score_is_and_brightens_with_it() -> None:
    scores = torch.zeros(8, 8)
    scores[1:3, 5:7] = 1.0
    lightness = np.asarray(overlay(scores, Image.new("RGB", (500, 300), "grey"), (32, 32)).convert("L"))
    assert lightness.shape == (224, 224)
    row, column = np.unravel_index(lightness.argmax(), lightness.shape)
    assert 1 * 28 <= row < 3 * 28
    assert 5 * 28 <= column < 7 * 28
    ramp = torch.linspace(0, 1, 64)[None].repeat(64, 1)
    grey = overlay(ramp, Image.new("RGB", (224, 224), "grey"), (224, 224)).convert("L")
    assert (np.diff(np.asarray(grey)[112].astype(int)[8::8]) > 0).all()


def test_overlay_cuts_the_image_as_the_model_did() -> None:
    vit = families.build("vit")
    vit.preprocess = replace(vit.preprocess, crop_pct=0.5)
    image = Image.new("RGB", (300, 100), "black")
    image.paste("white", (125, 25, 175, 75))
    att = pl.explain(vit, image)
    assert att.preprocess == vit.preprocess
    shown = np.asarray(att.overlay(image, alpha=0.0))
    assert shown[8:-8, 8:-8].min() > 180, "only the white centre was seen"
    assert np.asarray(replace(att, preprocess=None).overlay(image, alpha=0.0)).min() < 40


def test_heat_lies_on_the_extent_of_the_grid() -> None:
    scores = torch.zeros(1, 2, 2)
    scores[0, 0, 0] = 1.0
    image = Image.new("RGB", (320, 320), "grey")
    for extent, edge in ((16, 8), (64, 32), (None, 16)):
        att = attribution(scores, extent=None if extent is None else (extent, extent))
        hot = np.asarray(att.overlay(image, upsampling="nearest").convert("L"))[0] > 128
        assert hot.sum() == edge / 32 * len(hot)
        assert int(att.upsample(upsampling="nearest")[0, 0].sum()) == edge


def test_overlay_refuses_in_one_sentence() -> None:
    image = Image.new("RGB", (8, 8))
    with pytest.raises(pl.PatchlightError, match=r"\[h,w\]"):
        overlay(torch.rand(2, 4, 4), image, (32, 32))
    with pytest.raises(pl.PatchlightError, match="did you mean 'viridis'"):
        overlay(torch.rand(4, 4), image, (32, 32), cmap="virids")
    with pytest.raises(pl.PatchlightError, match="alpha"):
        overlay(torch.rand(4, 4), image, (32, 32), alpha=2)
    with pytest.raises(pl.PatchlightError, match="no image 5"):
        attribution(torch.rand(1, 4, 4)).overlay(image, index=5)


def test_pixel_maps_and_wide_models() -> None:
    wide = overlay(torch.rand(48, 80), Image.new("RGB", (200, 100)), (48, 80))
    assert wide.size == (240, 144)
    assert overlay(torch.rand(500, 500), Image.new("RGB", (9, 9)), (224, 224)).size == (224, 224)


def test_figure_has_a_cell_for_every_image_and_method(tmp_path: Path) -> None:
    images = [Image.new("RGB", (40, 40), c) for c in ("red", "green", "blue")]
    maps = {name: attribution(torch.rand(3, 8, 8) - shift) for name, shift in (("genatt", 0), ("ixg.libra", 0.5))}
    drawn = figure(
        images, maps, predictions=[("cat, tomcat", 0.874), ("dog", 0.5), ("cat", 0.9999)], path=tmp_path / "f.png"
    )
    pictures = [a.get_position() for a in drawn.axes if a.get_position().height * drawn.get_figheight() > 1]
    assert len(pictures) == 9
    assert len({round(p.x0, 6) for p in pictures}) == 3
    assert len({round(p.y0, 6) for p in pictures}) == 3
    words = [t.get_text() for t in drawn.texts]
    assert words[:2] == ["genatt", "ixg.libra"]
    assert "cat\n87 %" in words
    assert "dog\n50 %\nfor cat" in words, "the explained class is named where it is not the predicted one"
    assert any("99th percentile" in w for w in words)
    assert (tmp_path / "f.png").stat().st_size < 1_000_000


def test_many_columns_are_set_in_bands() -> None:
    maps = {f"method {i}": attribution(torch.rand(2, 8, 8)) for i in range(23)}
    drawn = figure([Image.new("RGB", (9, 9))] * 2, maps)
    pictures = [a.get_position() for a in drawn.axes if a.get_position().height * drawn.get_figheight() > 1]
    assert len(pictures) == 2 * (23 + 3), "each of the three bands repeats the photographs"
    assert len({(round(p.x0, 6), round(p.y0, 6)) for p in pictures}) == len(pictures), "no two lie on each other"


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (9, 2)])
def test_no_word_is_cut_off_or_runs_into_another(rows: int, columns: int) -> None:
    names = ["genatt", "ixg.plus.libra", "decompx.skipplus.conservative", "rollout", "gradcam", "random", "a" * 40]
    maps = {n: attribution(torch.rand(rows, 8, 8) - i % 2 / 2) for i, n in enumerate(names[:columns])}
    long = ("West Highland white terrier, Westie", 0.5)
    drawn = figure([Image.new("RGB", (9, 9))] * rows, maps, predictions=[long] * rows)
    check_apart(drawn, 1.0)


def test_figure_of_several_classes_pairs_and_tensors() -> None:
    vit = families.shared("vit")
    batch = families.images(vit)
    several = pl.explain(vit, batch, "genatt", target=[[0, 1]] * 3)
    words = [t.get_text() for t in figure(batch, several, vit=vit).texts]
    assert words[:4] == ["class 0", "genatt", "class 1", "genatt"]
    pair = pl.explain(vit, batch[:1], "ixg", target=(0, 1))
    assert any("for class 0\nagainst class" in t.get_text() for t in figure(batch[:1], pair, vit=vit).texts)


def test_figure_of_paths_names_the_models_own_prediction(tmp_path: Path) -> None:
    vit = families.shared("vit")
    Image.effect_noise((90, 60), 80).convert("RGB").save(tmp_path / "a.png")
    att = pl.explain(vit, tmp_path / "a.png")
    label, probability = vit.predict(tmp_path / "a.png", k=1)[0][0]
    words = [t.get_text().replace("\n", " ") for t in figure(tmp_path / "a.png", att, vit=vit).texts]
    assert f"{label} {percent(probability)}" in words


def test_figure_names_the_choice_of_auto_and_methods_that_ignore_the_class() -> None:
    vit = families.shared("vit")
    batch = families.images(vit, 1)
    maps = pl.explain(vit, batch, ["auto", "rollout", "random"], target=1)
    words = [t.get_text() for t in figure(batch, maps).texts]
    assert words[:5] == ["(auto)", maps["auto"].method, "ignores the class", "rollout", "random"]


def test_figure_refuses_in_one_sentence(tmp_path: Path) -> None:
    image, att = Image.new("RGB", (9, 9)), attribution(torch.rand(1, 4, 4))
    for arguments, message in (
        (([image] * 2, att), "explains 1 images, but 2"),
        ((image, {}), "at least one map"),
    ):
        with pytest.raises(pl.PatchlightError, match=message):
            figure(*arguments)
    with pytest.raises(pl.PatchlightError, match=r"must end in \.png"):
        figure(image, att, path=tmp_path / "f.gif")
    with pytest.raises(pl.PatchlightError, match="one per image"):
        figure(image, att, predictions=["a", "b"])
    (tmp_path / "file").write_text("")
    with pytest.raises(pl.PatchlightError, match="cannot be written"):
        figure(image, att, path=tmp_path / "file" / "f.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "pdf", "svg"])
def test_same_figure_same_bytes_and_nothing_left_behind(tmp_path: Path, suffix: str) -> None:
    image, att = Image.new("RGB", (9, 9)), attribution(torch.rand(1, 4, 4))
    pyplot = sys.modules.get("matplotlib.pyplot")
    before = [] if pyplot is None else pyplot.get_fignums()
    for name in ("a", "b"):
        figure(image, att, path=tmp_path / f"{name}.{suffix}")
    a, b = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert a == b
    assert len(list(tmp_path.iterdir())) == 2
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == before, "drawing leaves pyplot alone"


def test_rows_with_classes_of_their_own_say_so() -> None:
    att = pl.Attribution(torch.rand(2, 2, 8, 8), torch.zeros(2, 2), "m", "model", (8, 8), labels=("a", "b", "b", "c"))
    words = [t.get_text().replace("\n", " ") for t in figure([Image.new("RGB", (9, 9))] * 2, att).texts]
    assert words[:4] == ["(1)", "m", "(2)", "m"]
    assert "(1) a, (2) b" in words
    assert "(1) b, (2) c" in words
