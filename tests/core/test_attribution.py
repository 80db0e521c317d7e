"""Attributions: selection, conversion, display, and files that are written completely or not at all."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

import patchlight as pl
from patchlight.core import display
from patchlight.core.attribution import versions
from tests.families import images, shared


def attribution(scores: torch.Tensor, **about: object) -> pl.Attribution:
    target = torch.zeros(scores.shape[:-2], dtype=torch.long)
    return pl.Attribution(scores, target, "test", "model", (8, 8), **about)  # type: ignore[arg-type]


def test_top_patches_and_masks() -> None:
    scores = torch.tensor([[[0.1, 0.9, 0.3], [0.9, -1.0, 0.2]]])
    att = attribution(scores)
    assert att.top_patches(3).tolist() == [[[0, 1], [1, 0], [0, 2]]]
    assert att.mask(0.5).tolist() == [[[False, True, True], [True, False, False]]]
    assert att.mask(0.001).sum() == 1
    with pytest.raises(pl.PatchlightError, match="k is 7, but a map has 6 cells"):
        att.top_patches(7)
    with pytest.raises(pl.PatchlightError, match="fraction is 0"):
        att.mask(0)


@given(st.integers(2, 6), st.integers(2, 6), st.floats(0.01, 1))
def test_a_mask_has_its_fraction(h: int, w: int, fraction: float) -> None:
    att = attribution(torch.rand(2, 3, h, w, generator=torch.Generator().manual_seed(h * w)))
    assert (att.mask(fraction).sum((-1, -2)) == max(1, round(fraction * h * w))).all()


def test_upsampling_keeps_what_it_should() -> None:
    att = attribution(torch.arange(8.0).reshape(1, 2, 2, 2))
    near = att.upsample(upsampling="nearest")
    assert near.shape == (1, 2, 8, 8)
    assert torch.equal(near[..., ::4, ::4], att.scores)
    assert att.upsample(5).shape == (1, 2, 5, 5)
    flat = attribution(torch.full((1, 3, 3), 2.5))
    torch.testing.assert_close(flat.upsample((7, 9)), torch.full((1, 7, 9), 2.5))
    with pytest.raises(pl.PatchlightError, match="'area'"):
        att.upsample(4, upsampling="area")  # type: ignore[arg-type]


def test_joined_attributions_are_those_of_one_call() -> None:
    vit = shared("vit")
    batch = images(vit)
    for target in (None, [[0, 1], [2, 3], [4, 5]], [(0, 1), (2, 3), (4, 5)]):
        whole = pl.explain(vit, batch, "genatt", target=target)
        joined = pl.Attribution.concat([whole[:1], whole[1:]])
        for key in ("scores", "target", "against"):
            ours, theirs = getattr(joined, key), getattr(whole, key)
            assert ours is theirs is None or torch.equal(ours, theirs), key
        assert (joined.captions, joined.images) == (whole.captions, whole.images)
    one, other = attribution(torch.zeros(1, 2, 2)), attribution(torch.zeros(1, 3, 3))
    with pytest.raises(pl.PatchlightError, match=r"of one method, model, resolution.*2x2.*3x3"):
        pl.Attribution.concat([one, other])
    with pytest.raises(pl.PatchlightError, match="of one method"):
        pl.Attribution.concat([whole, pl.explain(vit, batch, "rawatt")])
    with pytest.raises(pl.PatchlightError, match="given: none"):
        pl.Attribution.concat([])


def test_save_and_load_give_equal_arrays(tmp_path: Path) -> None:
    vit = shared("vit")
    att = pl.explain(vit, images(vit), "rollout", target=[[0, 1]] * 3, start=1, seed=5)
    folder = att.save(tmp_path / "a" / "out")
    back = pl.Attribution.load(folder)
    assert torch.equal(back.scores, att.scores)
    assert torch.equal(back.target, att.target)
    for key in ("method", "model", "settings", "level", "score", "seed", "versions", "labels", "image_size"):
        assert getattr(back, key) == getattr(att, key), key
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["out"], "a temporary folder was left"


def test_save_refuses_to_overwrite(tmp_path: Path) -> None:
    att = attribution(torch.rand(1, 2, 2))
    att.save(tmp_path / "out")
    with pytest.raises(pl.PatchlightError, match="already exists"):
        att.save(tmp_path / "out")
    other = attribution(torch.zeros(1, 2, 2))
    other.save(tmp_path / "out", force=True)
    assert torch.equal(pl.Attribution.load(tmp_path / "out").scores, other.scores)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(pl.PatchlightError, match="already exists"):
        att.save(tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "dumps", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("disk full")))
    with pytest.raises(RuntimeError, match="disk full"):
        attribution(torch.rand(1, 2, 2)).save(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(pl.PatchlightError, match=r"holds no attribution \(attribution.json is missing\)"):
        pl.Attribution.load(tmp_path)
    folder = attribution(torch.rand(1, 2, 2)).save(tmp_path / "out")
    (folder / "scores.safetensors").write_bytes(b"broken")
    with pytest.raises(pl.PatchlightError, match="is damaged"):
        pl.Attribution.load(folder)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(pl.PatchlightError, match="cannot be written"):
        attribution(torch.rand(1, 2, 2)).save(blocked / "out")


def test_it_shows_itself() -> None:
    vit = shared("vit")
    att = pl.explain(vit, images(vit), target=1)
    assert "fullgrad-plus.libra" in repr(att)
    assert "4x4" in repr(att)
    page = att._repr_html_()
    assert "data:image/jpeg;base64," in page, "over the photographs"
    assert "fullgrad-plus.libra" in page


def test_repr_names_only_the_first_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    named = pl.Attribution.captions.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(pl.Attribution, "captions", property(lambda self: asked.append(len(self)) or named(self)))
    many = pl.Attribution(torch.zeros(1000, 2, 2), torch.arange(1000), "genatt", "a model", (32, 32))
    told = repr(many)
    assert told == "<Attribution by genatt of a model for class 0, class 1, class 2…: 1000 images, 2x2 tokens>"
    assert max(asked) <= 4


def test_slices_of_any_step() -> None:
    att = attribution(torch.rand(5, 2, 2), labels=tuple("abcde"), samples=(1, 2, 3, 4, 5))
    back = att[::-2]
    assert (back.labels, back.samples) == (("e", "c", "a"), (5, 3, 1))
    assert torch.equal(back.scores, att.scores[[4, 2, 0]])
    assert att[np.int64(-1)].labels == ("e",)
    assert [one.labels[0] for one in att] == list("abcde")


def test_labels_follow_their_images() -> None:
    """Several labels per image, one image, and no images."""
    att = attribution(torch.rand(2, 3, 2, 2), labels=tuple("abcdef"))
    parts = [att[1], att[1][0], att[::-1], att[:0], att[:0][:]]
    assert [part.labels for part in parts] == [tuple("def"), tuple("def"), tuple("defabc"), (), ()]
    assert [len(part.captions) for part in parts] == [part.target.numel() for part in parts]


def test_scores_as_an_array_of_their_own() -> None:
    att = attribution(torch.rand(2, 3, 3))
    heat = att.numpy()
    assert np.array_equal(heat, att.scores)
    heat[:] = 0
    assert float(att.scores.sum()) > 0


def test_an_overlay_over_the_kept_photograph() -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch, "genatt")
    assert np.array_equal(att.overlay(index=-1), att.overlay(batch[2], 2)), "the same photograph"
    with pytest.raises(pl.PatchlightError, match="there is no photograph of image 0; give it as `image`"):
        attribution(torch.rand(1, 2, 2)).overlay()
    with pytest.raises(pl.PatchlightError, match="there is no image 3; this attribution has 3"):
        att.overlay(index=3)


def test_plots_go_into_the_axes_that_are_given() -> None:
    vit = shared("vit")
    att = pl.explain(vit, images(vit), "genatt", target=[[0, 1]] * 3)
    axes = Figure().subplots(1, 2)
    assert att.plot(axes[0], index=1) is axes[0]
    assert axes[0].get_title() == "genatt: class 0"
    assert not axes[1].images
    bare = attribution(torch.rand(1, 2, 2))
    assert len(bare.plot(axes[1]).images) == 1, "colours alone, without a photograph"
    assert att.plot().figure is not axes[0].figure
    pyplot.close("all")


def test_show_without_a_screen_writes_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit = shared("vit")
    maps = pl.explain(vit, images(vit), ["genatt", "rollout"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(display, "has_screen", lambda: False)
    for result in (maps, maps["genatt"], attribution(torch.rand(1, 2, 2))):
        result.show()
        path = Path(capsys.readouterr().out.strip().rpartition(" ")[2])
        assert path.parent == tmp_path
        assert min(Image.open(path).size) > 50
    opened: list[Image.Image] = []
    monkeypatch.setattr(display, "has_screen", lambda: True)
    monkeypatch.setattr(Image.Image, "show", lambda self: opened.append(self))
    maps.show()
    assert len(opened) == 1
    shown: list[object] = []
    notebook = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=None), display=SimpleNamespace(display=shown.append)
    )
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    maps.show()
    assert shown == [maps]


def test_several_attributions_are_saved_together(tmp_path: Path) -> None:
    maps = pl.Attributions({label: attribution(torch.rand(1, 2, 2)) for label in ("../up", ".hidden", "a/b", "tis")})
    folder = maps.save(tmp_path / "maps")
    assert [path.name for path in tmp_path.iterdir()] == ["maps"]
    back = pl.Attributions.load(folder)
    assert list(back) == sorted(maps)
    assert all(torch.equal(back[label].scores, maps[label].scores) for label in maps)
    with pytest.raises(pl.PatchlightError, match="already exists"):
        maps.save(folder)
    (folder / "tis" / "notes.txt").write_text("of the user")
    pl.Attributions({"genatt": maps["tis"], "a/b": maps["a/b"]}).save(folder, force=True)
    assert list(pl.Attributions.load(folder)) == ["a/b", "genatt"], "methods of an earlier save are gone"
    assert sorted(path.name for path in folder.iterdir()) == ["a%2Fb", "genatt", "tis"]
    assert [path.name for path in (folder / "tis").iterdir()] == ["notes.txt"]
    with pytest.raises(pl.PatchlightError, match="holds no attributions"):
        pl.Attributions.load(tmp_path)


def full(count: int = 3, classes: int = 2) -> pl.Attribution:
    """An attribution with different values in every field that belongs to an image or a class."""
    names = tuple(f"{chr(97 + i)}{t}" for i in range(count) for t in range(classes))
    return pl.Attribution(
        torch.arange(count * classes * 6.0).view(count, classes, 2, 3),
        torch.arange(count * classes).view(count, classes),
        "test",
        "model",
        (8, 12),
        error=torch.arange(count * classes * 6.0).view(count, classes, 2, 3) / 10,
        labels=names,
        images=tuple(f"hash {i}" for i in range(count)),
        words=tuple((f"word {i}",) for i in range(count)),
        samples=tuple(range(10, 10 + count)),
        facts={"masks": tuple(float(i) for i in range(count))},
        photos=tuple(torch.full((3, 4, 4), i, dtype=torch.uint8) for i in range(count)),
    )


def test_every_field_follows_its_image() -> None:
    att = full()
    for part, rows in ((att[1], [1]), (att[-1], [2]), (att[1:], [1, 2]), (att[::-1], [2, 1, 0])):
        assert torch.equal(part.scores, att.scores[rows])
        assert torch.equal(part.target, att.target[rows])
        assert part.error is not None
        assert torch.equal(part.error * 10, part.scores)
        assert part.labels == tuple(name for i in rows for name in att.labels[2 * i : 2 * i + 2])
        assert part.images == tuple(f"hash {i}" for i in rows)
        assert part.words == tuple((f"word {i}",) for i in rows)
        assert part.samples == tuple(10 + i for i in rows)
        assert part.facts == {"masks": tuple(float(i) for i in rows)}
        assert [int(photo[0, 0, 0]) for photo in part.photos] == rows
    fewer = replace(att, photos=att.photos[:2])
    assert [len(part.photos) for part in (fewer[2], fewer[1:], fewer[::-1])] == [0, 1, 0], "up to the first without one"
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"there is no image {index}; this attribution has 3"):
            att[index]


def test_the_maps_of_one_class() -> None:
    att = full()
    swapped = replace(att, labels=("cat", "dog", "dog", "cat", "cat", "dog"))
    cats = swapped.only("cat")
    assert torch.equal(cats.scores, att.scores[[0, 1, 2], [0, 1, 0]])
    assert cats.target.tolist() == [0, 3, 4]
    assert cats.error is not None
    assert torch.equal(cats.error * 10, cats.scores)
    assert (cats.labels, cats.several) == (("cat",) * 3, False)
    assert cats.only("cat") is cats
    with pytest.raises(pl.PatchlightError, match="no map for 'cow'; the maps are for cat, dog"):
        swapped.only("cow")
    with pytest.raises(pl.PatchlightError, match="no map for 'a0'"):
        att.only("a0")


def test_what_is_joined_and_what_is_dropped() -> None:
    att = full()
    joined = pl.Attribution.concat([att[:1], att[1:]])
    for key in ("labels", "images", "words", "samples", "facts"):
        assert getattr(joined, key) == getattr(att, key), key
    assert joined.error is not None
    assert torch.equal(joined.error, att.error)
    assert [int(photo[0, 0, 0]) for photo in joined.photos] == [0, 1, 2]
    partial = [replace(att[:2], photos=att.photos[:1]), replace(att[2:], error=None, samples=(), facts={})]
    mixed = pl.Attribution.concat(partial)
    assert (mixed.error, mixed.samples, mixed.facts, len(mixed.photos)) == (None, (), {}, 1)
    assert len(pl.Attribution.concat([full(12), full(12)]).photos) == 16


def test_names_of_a_contrast() -> None:
    att = attribution(torch.rand(2, 2, 2), against=torch.tensor([3, 4]), labels=("cat", "dog"))
    assert (att.captions, att.against_names) == (("cat against class 3", "dog against class 4"), ("class 3", "class 4"))
    assert replace(att, against=None).against_names == ()
    assert att[1].captions == ("dog against class 4",)
    named = replace(att, against_labels=("cow", "hen"))
    assert named[1].captions == ("dog against hen",)
    joined = pl.Attribution.concat([named[:1], named[1:]])
    assert (joined.captions, joined.against.tolist()) == (named.captions, [3, 4])  # type: ignore[union-attr]


def test_the_share_of_scores_inside_a_region() -> None:
    scores = torch.tensor([[[1.0, 3.0], [-5.0, 0.0]], [[-1.0, -1.0], [-1.0, 0.0]]])
    region = torch.zeros(8, 8)
    region[:4, 4:] = 1
    assert attribution(scores).inside(region).tolist() == [0.75, pytest.approx(float("nan"), nan_ok=True)]
    region = torch.zeros(8, 8)
    region[:3, 3:6] = 1
    assert attribution(scores, extent=(6, 6)).inside(region).tolist()[0] == 0.75, "the scores cover 6 of 8 pixels"


def test_maps_that_cover_a_part_of_the_image() -> None:
    att = attribution(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), extent=(4, 8))
    assert att.covers == (0.5, 1.0)
    near = att.upsample(upsampling="nearest")[0]
    assert near[:, 0].tolist() == [1, 1, 3, 3, 3, 3, 3, 3], "the last row is repeated"
    assert near[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]


def test_sums_over_axes() -> None:
    att = attribution(torch.arange(6.0).view(1, 2, 3))
    assert att.over("row").tolist() == [[3, 5, 7]]
    assert att.over("column", "column").tolist() == [[3, 12]]
    assert att.over("row", "column").tolist() == [15]
    with pytest.raises(pl.PatchlightError, match="no axis 'time'; the axes of this map are row, column"):
        att.over("time", "row")
    with pytest.raises(pl.PatchlightError, match="no axis was named"):
        att.over()


def test_a_table_has_a_row_per_cell() -> None:
    frame = full().to_frame()
    assert list(frame.columns) == ["image", "method", "target", "label", "row", "column", "score", "error"]
    assert frame.score.tolist() == list(range(36))
    row = frame.iloc[22]  # image 1, class 1, cell (1, 1)
    assert (row.image, row.target, row.label, row.row, row.column) == (1, 3, "b1", 1, 1)
    assert row.error == pytest.approx(2.2)
    against = attribution(torch.rand(2, 2, 2), against=torch.tensor([3, 4])).to_frame()
    assert (against.against.tolist(), "error" in against) == (["class 3"] * 4 + ["class 4"] * 4, False)
    both = pl.Attributions({"x": full(), "y": full()}).to_frame()
    assert (both.method.tolist(), both.index.tolist()) == (["x"] * 36 + ["y"] * 36, list(range(72)))


def test_an_overlay_has_the_place_and_the_crop_of_the_map() -> None:
    scores = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]])
    photo = Image.new("RGB", (16, 8), "white")
    photo.paste("black", (0, 0, 4, 8))
    att = attribution(scores, preprocess=pl.Preprocess((8, 8), fit="squash"))
    squashed = photo.resize((224, 224), Image.Resampling.BICUBIC)
    assert np.array_equal(att.overlay(photo), att.overlay(squashed))
    first = replace(att, scores=scores[:, 0], target=att.target[:, 0])
    assert np.array_equal(att.overlay(photo), first.overlay(photo)), "the first class"
    half = replace(att, extent=(4, 4))
    assert not np.array_equal(half.overlay(photo), att.overlay(photo))
    tensor = att.preprocess.tensor(photo)  # type: ignore[union-attr]
    assert np.array_equal(att.overlay(tensor), att.overlay(photo.resize((8, 8), Image.Resampling.BICUBIC)))
    with pytest.raises(pl.PatchlightError, match="as one preprocessed"):
        att.overlay(tensor[None])
    with pytest.raises(pl.PatchlightError, match="as one preprocessed"):
        replace(att, preprocess=None).overlay(tensor)
    sound = replace(att, axes=("frequency", "time"))
    with pytest.raises(pl.PatchlightError, match="only maps of images have overlays; this map has frequency and time"):
        sound.overlay(photo)


def test_a_plot_is_of_one_map_of_one_image() -> None:
    axes = Figure().subplots()
    full().plot(axes, index=-1)
    assert axes.get_title() == "test: c0"
    tall = Figure().subplots()
    attribution(torch.rand(1, 30, 1)).plot(tall)
    assert (tall.get_xlabel(), len(tall.patches)) == ("tile", 30)


def test_a_mask_may_have_every_cell_and_k_too() -> None:
    att = attribution(torch.rand(1, 2, 3))
    assert bool(att.mask(1).all())
    assert att.top_patches(6).shape == (1, 6, 2)
    assert att.top_patches(1).shape == (1, 1, 2)
    for fraction in (-0.1, 1.01):
        with pytest.raises(pl.PatchlightError, match="give a number above 0, at most 1"):
            att.mask(fraction)
    with pytest.raises(pl.PatchlightError, match="k is 0"):
        att.top_patches(0)


def test_versions_of_what_is_installed() -> None:
    installed = versions()
    assert {"python", "patchlight", "torch", "timm", "transformers", "torchvision"} >= set(installed)
    assert {name: installed[name] for name in ("patchlight", "torch")} == {
        "patchlight": pl.__version__,
        "torch": metadata.version("torch"),
    }
    installed["torch"] = "another"
    assert versions()["torch"] != "another"
