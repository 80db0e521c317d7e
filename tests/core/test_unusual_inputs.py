"""Unusual targets, scores, options, images and pictures in the Python interface."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.core.errors import warn
from patchlight.methods.base import METHODS
from tests.families import build, images, shared
from tests.helpers import refuses, tiny_timm

TRAINED = ("diffmask", "vit-shapley")
LABELS = ["cat, tomcat", "dog", "bird", "fish", "frog", "ship", "tree"]


@cache
def named() -> pl.Anatomy:
    """A small model with labels."""
    vit = build("vit")
    vit.labels = LABELS
    return vit


@cache
def bands(channels: int) -> pl.Anatomy:
    """A small model of images with this number of channels."""
    return pl.wrap(tiny_timm("vit_tiny_patch16_224", in_chans=channels, depth=2))


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (70, 90, 3), np.uint8))


def test_a_contrast_says_against_what_it_is(tmp_path: Path) -> None:
    vit = named()
    att = pl.explain(vit, images(vit, 2), "ixg", target=("cat", "dog"))
    assert "cat, tomcat against dog" in repr(att)
    assert att.captions == ("cat, tomcat against dog",) * 2
    assert "cat, tomcat against dog" in att._repr_html_()
    assert "against dog" in repr(att[1])
    kept = pl.Attribution.load(att.save(tmp_path / "pair"))
    assert repr(kept) == repr(att)
    for options in ({}, {"vit": vit}, {"predictions": [("ship", 0.9)] * 2}):
        words = [t.get_text() for t in pl.figure(images(vit, 2), att, **options).texts]
        assert any("cat\nagainst dog" in w for w in words), (options, words)


def test_a_contrast_made_by_hand_names_its_classes_by_number() -> None:
    pair = pl.Attribution(torch.rand(1, 4, 4), torch.tensor([3]), "mine", "model", (64, 64), against=torch.tensor([5]))
    assert "class 3 against class 5" in repr(pair)
    assert "class 3\nagainst class 5" in [t.get_text() for t in pl.figure(photo(), pair).texts]


def test_a_tuple_is_a_pair_and_a_list_is_one_per_image() -> None:
    vit = named()
    two = images(vit, 2)
    pair, listed = pl.explain(vit, two, "ixg", target=(0, 1)), pl.explain(vit, two, "ixg", target=[0, 1])
    assert pair.target.tolist() == [0, 0]
    assert pair.against is not None
    assert pair.against.tolist() == [1, 1]
    assert (listed.target.tolist(), listed.against) == ([0, 1], None)
    assert "against" not in repr(listed)


def test_targets_of_numpy_and_torch() -> None:
    vit = shared("vit")
    batch = images(vit)
    want = pl.explain(vit, batch, "ixg", target=[1, 2, 0])
    lists = [np.int64(1), np.int32(2), np.uint8(0)], [torch.tensor(1), torch.tensor(2), torch.tensor(0)]
    for target in (*lists, np.array([1, 2, 0]), np.array([1, 2, 0], np.uint8), torch.tensor([1, 2, 0]).int()):
        found = pl.explain(vit, batch, "ixg", target=target)
        assert found.target.tolist() == [1, 2, 0]
        assert torch.equal(found.scores, want.scores)
    for one in (np.int64(2), np.array(2), torch.tensor(2)):
        assert pl.explain(vit, batch, "ixg", target=one).target.tolist() == [2, 2, 2]
    pair = pl.explain(vit, batch, "ixg", target=(np.int64(1), torch.tensor(4)))
    assert pair.against is not None
    assert (pair.target.tolist(), pair.against.tolist()) == ([1] * 3, [4] * 3)
    for several in ([np.array([0, 1])] * 3, [torch.tensor([0, 1])] * 3, np.array([[0, 1]] * 3)):
        assert pl.explain(vit, batch, "ixg", target=several).target.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.array([0.0, 1.0, 2.0]), ("dtype", "integers")),
        (np.array([True, False, True]), ("dtype", "integers")),
        *[
            (odd, "give a class index or a label name")
            for odd in (np.float64(1), [1.5, 2, 3], [np.bool_(True)] * 3, {"cat"}, b"cat", object())
        ],
        ((0, 1, 2), ("a tuple of 3", "a list with one class per image")),
        ((0,), ("a tuple of 1", "a list with one class per image")),
    ],
)
def test_targets_that_are_no_classes(wrong: Any, words: str | tuple[str, ...]) -> None:
    refuses(words, pl.explain, shared("vit"), images(shared("vit")), target=wrong)


@pytest.mark.parametrize(
    "name",
    [
        method.name
        for method in pl.list_methods(shared("vit"))
        if method.supported and not METHODS[method.name].ignores_class and method.name not in TRAINED
    ],
)
def test_one_number_an_image_has_no_several_classes(name: str) -> None:
    words = "a score function with one value per image [B] cannot explain several classes"
    settings = {"score": lambda logits: logits[:, 0], **METHODS[name].quick}
    refuses(words, pl.explain, shared("vit"), images(shared("vit"), 1), name, [[0, 1]], **settings)


def test_a_score_that_is_no_tensor() -> None:
    vit = shared("vit")
    refuses(
        ("returned a float", "tensor [B]"), pl.explain, vit, images(vit), "ixg", score=lambda y: float(y.detach().sum())
    )


def test_a_map_that_is_not_finite() -> None:
    vit = shared("vit")
    batch = images(vit)

    def score(logits: torch.Tensor) -> torch.Tensor:
        return logits * torch.where(torch.arange(len(logits)) == 1, torch.nan, 1.0)[:, None]

    told = refuses("image 1 by ixg is not finite", pl.explain, vit, batch, ["rollout", "ixg"], score=score)
    assert "the score computed from the model's logits" in told
    refuses("image 1 by ixg", pl.explain, vit, batch, "ixg", score=score, batch_size=2)
    kept = pl.explain(vit, batch, "ixg", score=score, finite=False)
    assert kept.scores.isfinite().flatten(1).all(1).tolist() == [True, False, True]


def test_logits_that_are_not_finite() -> None:
    vit = build("vit")
    with torch.no_grad():
        vit.model.head.bias.fill_(torch.inf)
    told = refuses("image 0 by ixg is not finite", pl.explain, vit, images(vit), "ixg", score="probability")
    assert "the model's logits are not finite" in told


def explaining(**options: Any) -> Any:
    return pl.explain(shared("vit"), images(shared("vit")), "random", **options)


def measuring(**options: Any) -> Any:
    return pl.evaluate(shared("vit"), images(shared("vit")), explaining(), "sparseness", **options)


@pytest.mark.parametrize("ask", [explaining, measuring])
def test_batch_sizes_seeds_and_progress(ask: Callable[..., Any]) -> None:
    for size in (0, -1):
        refuses(f"batch_size {size} is not possible; give at least 1", ask, batch_size=size)
    for wrong in (2.5, "4", True, np.bool_(True), torch.tensor(2.0), [2]):
        refuses(("batch_size", "give an integer"), ask, batch_size=wrong)
    for wrong in (True, 1.0, "1", None, np.float64(1)):
        refuses(("seed", "give an integer of at least 0"), ask, seed=wrong)
    for far in (-1, 2**70):
        refuses(f"seed {far} is not possible", ask, seed=far)
    refuses("progress 'yes' is a str; give True, False or a function", ask, progress="yes")
    ask(batch_size=np.int64(2))
    ask(batch_size=torch.tensor(2))
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        for progress in (True, False, None):
            ask(progress=progress)
    assert shown.getvalue() == "", "short work draws no bar"
    calls: list[Any] = []
    ask(batch_size=2, progress=lambda *done: calls.append(done))
    assert calls == [(2, 3), (3, 3)]


def test_seeds_of_numpy() -> None:
    att = explaining(seed=np.int64(7))
    assert torch.equal(att.scores, explaining(seed=7).scores)
    assert type(att.seed) is int


def test_misspelt_keywords() -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    refuses("has no setting 'batchsize'; did you mean 'batch_size'", pl.explain, vit, batch, batchsize=2)
    refuses("did you mean 'seed'", pl.explain, vit, batch, ["genatt", "rollout"], sed=2)
    refuses("'label'; did you mean 'labels'", pl.evaluate, vit, batch, att, "sparseness", label=1)
    refuses("'figure' has no option 'title'; did you mean 'titles'", pl.figure, batch, att, title=["a"])
    refuses("'overlay' has no option 'colour'; ", att.overlay, photo(), colour="hot")
    refuses("did you mean 'alpha'", att.overlay, photo(), alfa=0.1)


def test_methods_and_metrics_that_are_no_names() -> None:
    vit = shared("vit")
    batch = images(vit)
    for wrong in (None, 3, ["genatt", 3], {"genatt": None}, {"genatt"}):
        refuses("is not a method; give a name, a list of names", pl.explain, vit, batch, wrong)
        refuses("is not a metric; give a name", pl.evaluate, vit, batch, "genatt", wrong)


@pytest.mark.parametrize("given", [{"target": "\x1b[2J\u202eb"}, {"method": "\x1b]0;title\x07\u202e"}])
def test_errors_and_warnings_do_not_steer_a_terminal(given: dict[str, Any]) -> None:
    vit = shared("vit")
    with pytest.raises(pl.PatchlightError) as error:
        pl.explain(vit, images(vit), given.get("method", "genatt"), target=given.get("target"))
    assert not re.search("[\x00-\x1f\x7f\u202a-\u202e]", str(error.value))
    assert r"\u202e" in str(error.value)
    with pytest.warns(pl.DegenerateMap) as warned:
        warn("map of \x1b[2J", pl.DegenerateMap)
    assert str(warned[0].message) == r"map of \x1b[2J"


def test_streams_of_images_are_read_as_they_come(tmp_path: Path) -> None:
    vit = shared("vit")
    pictures = [photo(i) for i in range(5)]
    paths = []
    for i, picture in enumerate(pictures):
        paths.append(tmp_path / f"{i}.png")
        picture.save(paths[-1])
    batch = vit.batch(pictures)
    labels = torch.arange(5)
    want = pl.explain(vit, batch, batch_size=2)
    wanted = pl.evaluate(vit, batch, "genatt", "sparseness").values

    def streams() -> Iterator[Any]:
        yield (path for path in paths)
        yield (picture for picture in pictures)
        yield iter(batch)
        yield (batch[i : i + 2] for i in range(0, 5, 2))
        yield zip(pictures, labels, strict=True)
        yield DataLoader(TensorDataset(batch, labels), batch_size=3)
        yield DataLoader(batch, batch_size=4)
        yield DataLoader(list(zip(pictures, range(5), strict=True)), batch_size=2, collate_fn=list)
        yield TensorDataset(batch, labels)
        yield ([paths[0], paths[1]] if i == 0 else paths[i + 1] for i in range(4))

    for i, stream in enumerate(streams()):
        if i == 7:  # a loader that leaves its items as pairs in a list
            refuses("an image was given as tuple", pl.explain, vit, stream)
            continue
        found = pl.explain(vit, stream, batch_size=2)
        assert torch.equal(found.scores, want.scores), i
        assert torch.equal(found.target, want.target)
    for i, stream in enumerate(streams()):
        if i != 7:
            assert torch.equal(pl.evaluate(vit, stream, "genatt", "sparseness").values, wanted), i


def test_streams_take_targets_that_fit_any_length() -> None:
    vit = named()
    batch = images(vit)
    for target in (2, "dog", (0, "dog")):
        found, want = pl.explain(vit, iter(batch), "ixg", target), pl.explain(vit, batch, "ixg", target)
        assert torch.equal(found.scores, want.scores)
        assert found.captions == want.captions
    refuses(("a list of 3 classes, one per image", "is not known"), pl.explain, vit, iter(batch), target=[0, 1, 2])
    refuses("did you mean 'dog'?", pl.explain, vit, iter(batch), target="dgo")
    refuses("no images", pl.explain, vit, iter([]))
    told: list[Any] = []
    pl.explain(vit, iter(batch), batch_size=2, progress=lambda *done: told.append(done))
    assert told == [(2, None), (3, None)]


def test_streams_are_measured_against_maps_of_their_length() -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    want = pl.evaluate(vit, batch, att, "sparseness").values
    assert torch.equal(pl.evaluate(vit, iter(batch), att, "sparseness", batch_size=2).values, want)
    refuses("maps of 3 images, but 2 images", pl.evaluate, vit, iter(batch[:2]), att, "sparseness")
    more = torch.cat([batch, batch])
    refuses("but at least 4 images", pl.evaluate, vit, iter(more), att, "sparseness", batch_size=2)
    refuses("need a known number of images", pl.evaluate, vit, iter(batch), "genatt", "sparseness", labels=[0, 1, 2])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ((), "no images"),
        (Path("folder"), "is a folder; give the image files in it"),
        ("folder", "is a folder"),
        ([np.zeros((64, 64, 2))], "an image array has shape [64, 64, 2]; give [H,W,C]"),
        (3, "images are a int; give paths"),
        (None, "images are None; give paths"),
        ({"a": photo()}, "images are a dict; give paths"),
        ({"a.png"}, "images are a set; give paths"),
        (iter([3] * 2), "images are a int; give paths"),
        (iter([{"pixel_values": 1}] * 2), "images are a dict; give paths"),
        ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 32)], "the shapes [3, 64, 64] and [3, 32, 32]"),
        ([torch.zeros(3, 64, 64), photo()], "given as Tensor"),
    ],
)
def test_things_that_are_no_images(wrong: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    refuses(words, pl.explain, shared("vit"), wrong)
    refuses(words, pl.evaluate, shared("vit"), wrong, "genatt", "sparseness")


def test_five_bands_are_no_picture() -> None:
    vit = bands(5)
    batch = images(vit)
    att = pl.explain(vit, batch)
    for ask in (
        lambda: pl.figure(batch, att),
        lambda: pl.figure(batch, att, vit=vit),
        lambda: att.overlay(batch[0]),
        lambda: vit.preprocess.picture(batch[0]),
        lambda: replace(vit.preprocess, mean=(0.5,) * 5, std=(0.5,) * 5).picture(batch[0]),
        lambda: vit.preprocess.picture(batch[0, 0]),
    ):
        refuses("is not a picture; give [1,H,W] or [3,H,W]", ask)
    refuses("takes 5 channels", vit.predict, photo())
    assert att.overlay(photo()).size == (256, 256)
    assert len(pl.figure([photo()] * 3, att, vit=vit).axes) == 7
    assert torch.equal(bands(1).batch(photo())[0, 0], bands(1).preprocess.tensor(photo()).mean(0))


def test_figures_of_a_list_and_of_one() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    a, b = pl.explain(vit, batch, "genatt"), pl.explain(vit, batch, "rollout")
    for given, titles in (
        ([a, b], ["genatt", "rollout"]),
        ((b, a), ["rollout", "genatt"]),
        ([a, a], ["genatt (1)", "genatt (2)"]),
        ([a], ["genatt"]),
        (a, ["genatt"]),
    ):
        words = [t.get_text() for t in pl.figure(batch, given).texts]
        assert [word for word in words if word != "ignores the class"][: len(titles)] == titles
    assert len(pl.figure(list(batch), a, vit=vit.model).axes) == 5
    of_two = [pl.explain(vit, batch, "genatt", target=target) for target in (1, (2, 3), [4, 5])]
    words = [t.get_text() for t in pl.figure(batch, of_two).texts]
    assert {"class 1", "class 2", "against class 3", "various classes"} <= set(words)
    assert not any(word.startswith("for ") for word in words), "the rows must not speak for all columns"
    for wrong in ([a, 3], {"a": a.scores}, 3, None, a.scores):
        refuses("give an Attribution, a list of them", pl.figure, batch, wrong)
    for wrong in (3, None):
        refuses(f"images={wrong} cannot be shown; give the images that", pl.figure, wrong, a)
    refuses("an image array has shape [8]; give [H,W,C]", a.overlay, np.zeros(8))
