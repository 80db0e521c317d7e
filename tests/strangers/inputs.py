"""Odd targets, scores, images, options and things to draw, handed to the Python interface."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.methods.base import METHODS
from tests.families import CLASSES, build, images, randomise, shared
from tests.strangers.table import refuses, row

LABELS = ["cat, tomcat", "dog", "bird", "fish", "frog", "ship", "tree"]


@cache
def named() -> pl.Anatomy:
    """A small model with labels."""
    vit = build("vit")
    vit.labels = LABELS
    return vit


@cache
def bands(channels: int) -> pl.Anatomy:
    """A small model of images with so many channels."""
    torch.manual_seed(0)
    sizes = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": CLASSES}
    return pl.wrap(randomise(timm.create_model("vit_tiny_patch16_224", in_chans=channels, **sizes)))


def photo(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (70, 90, 3), np.uint8))


# What is explained


@row
def a_contrast_says_against_what_it_is(folder: Path) -> None:
    vit = named()
    att = pl.explain(vit, images(vit, 2), "ixg", target=("cat", "dog"))
    assert "cat, tomcat against dog" in repr(att)
    assert att.named == ("cat, tomcat against dog",) * 2
    assert "cat, tomcat against dog" in att._repr_html_()
    assert "against dog" in repr(att[1])
    kept = pl.Attribution.load(att.save(folder / "pair"))
    assert repr(kept) == repr(att)
    for options in ({}, {"vit": vit}, {"predictions": [("ship", 0.9)] * 2}):
        words = [t.get_text() for t in pl.figure(images(vit, 2), att, **options).texts]
        assert any("cat\nagainst dog" in w for w in words), (options, words)


@row
def a_contrast_made_by_hand_names_its_classes_by_number(folder: Path) -> None:
    pair = pl.Attribution(torch.rand(1, 4, 4), torch.tensor([3]), "mine", "model", (64, 64), against=torch.tensor([5]))
    assert "class 3 against class 5" in repr(pair)
    assert "class 3\nagainst class 5" in [t.get_text() for t in pl.figure(photo(), pair).texts]


@row
def a_tuple_is_a_pair_and_a_list_is_one_per_image(folder: Path) -> None:
    vit = named()
    two = images(vit, 2)
    pair, listed = pl.explain(vit, two, "ixg", target=(0, 1)), pl.explain(vit, two, "ixg", target=[0, 1])
    assert pair.target.tolist() == [0, 0]
    assert pair.against is not None
    assert pair.against.tolist() == [1, 1]
    assert (listed.target.tolist(), listed.against) == ([0, 1], None)
    assert "against" not in repr(listed)
    refuses(lambda: pl.explain(vit, images(vit), target=(0, 1, 2)), "a tuple of 3", "a list is one class per image")
    refuses(lambda: pl.explain(vit, images(vit, 1), target=(0,)), "a tuple of 1", "a list is one class per image")


@row
def targets_of_numpy_and_torch(folder: Path) -> None:
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


@row
def targets_of_numpy_that_are_no_classes(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    for wrong in (np.array([0.0, 1.0, 2.0]), np.array([True, False, True]), torch.tensor([1.0, 2.0, 3.0])):
        refuses(lambda wrong=wrong: pl.explain(vit, batch, target=wrong), "dtype", "integers")
    for odd in (np.float64(1), [1.5, 2, 3], [np.bool_(True)] * 3, {"cat"}, b"cat", [None, 1, 2], object()):
        refuses(lambda odd=odd: pl.explain(vit, batch, target=odd), "give a class index or a label name")


@row
def one_number_an_image_has_no_several_classes(folder: Path) -> None:
    vit = shared("vit")
    for name, entry in METHODS.items():
        if entry.class_specific and name not in ("diffmask", "vit-shapley"):
            refuses(
                lambda name=name, entry=entry: pl.explain(
                    vit, images(vit, 1), name, [[0, 1]], score=lambda y: y[:, 0], **entry.quick
                ),
                "a score callable that gives one value an image [B] has no classes to tell apart",
            )


@row
def a_score_that_is_no_tensor(folder: Path) -> None:
    vit = shared("vit")
    refuses(
        lambda: pl.explain(vit, images(vit), "ixg", score=lambda y: float(y.detach().sum())),
        "gave a float",
        "tensor [B]",
    )


@row
def a_map_that_is_not_finite(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)

    def score(logits: torch.Tensor) -> torch.Tensor:
        return logits * torch.where(torch.arange(len(logits)) == 1, torch.nan, 1.0)[:, None]

    told = refuses(lambda: pl.explain(vit, batch, ["rollout", "ixg"], score=score), "image 1 by ixg is not finite")
    assert "the score made of the model's logits" in told
    refuses(lambda: pl.explain(vit, batch, "ixg", score=score, batch_size=2), "image 1 by ixg")
    kept = pl.explain(vit, batch, "ixg", score=score, finite=False)
    assert kept.scores.isfinite().flatten(1).all(1).tolist() == [True, False, True]


@row
def logits_that_are_not_finite(folder: Path) -> None:
    vit = build("vit")
    with torch.no_grad():
        vit.model.head.bias.fill_(torch.inf)  # type: ignore[union-attr, operator]
    told = refuses(lambda: pl.explain(vit, images(vit), "ixg", score="probability"), "image 0 by ixg is not finite")
    assert "the model's logits are not finite there" in told


# Options


@row
def batch_sizes_that_are_none(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    for ask in (
        lambda **given: pl.explain(vit, batch, **given),
        lambda **given: pl.evaluate(vit, batch, att, "sparseness", **given),
    ):
        for size in (0, -1):
            refuses(lambda ask=ask, size=size: ask(batch_size=size), f"batch_size {size} is not possible; give 1 or")
        for wrong in (2.5, "4", True, np.bool_(True), torch.tensor(2.0), [2]):
            refuses(lambda ask=ask, wrong=wrong: ask(batch_size=wrong), "batch_size", "give an integer")
        ask(batch_size=np.int64(2))
    assert torch.equal(pl.explain(vit, batch, batch_size=torch.tensor(2)).scores.isfinite(), att.scores.isfinite())


@row
def seeds_that_are_none(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    for ask in (
        lambda seed: pl.explain(vit, batch, "random", seed=seed),
        lambda seed: pl.evaluate(vit, batch, att, "sparseness", seed=seed),
    ):
        for wrong in (True, 1.0, "1", None, np.float64(1)):
            refuses(lambda ask=ask, wrong=wrong: ask(wrong), "seed", "give an integer of 0 or more")
        for far in (-1, 2**70):
            refuses(lambda ask=ask, far=far: ask(far), f"seed {far} is not possible")
    one = pl.explain(vit, batch, "random", seed=np.int64(7))
    assert torch.equal(one.scores, pl.explain(vit, batch, "random", seed=7).scores)
    assert type(one.seed) is int


@row
def progress_of_every_kind(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    for ask in (
        lambda progress: pl.explain(vit, batch, batch_size=2, progress=progress),
        lambda progress: pl.evaluate(vit, batch, att, "sparseness", batch_size=2, progress=progress),
    ):
        assert _stderr(lambda ask=ask: (ask(True), ask(False), ask(None))) == "", "it is short"
        told: list[Any] = []
        ask(lambda *done, told=told: told.append(done))
        assert told == [(2, 3), (3, 3)]
        refuses(lambda ask=ask: ask("yes"), "progress 'yes' is a str; give True, False or a function")


def _stderr(action: Any) -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        action()
    return out.getvalue()


@row
def misspelt_keywords(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    refuses(lambda: pl.explain(vit, batch, batchsize=2), "has no setting 'batchsize'; did you mean 'batch_size'")
    refuses(lambda: pl.explain(vit, batch, ["genatt", "rollout"], sed=2), "did you mean 'seed'")
    refuses(lambda: pl.evaluate(vit, batch, att, "sparseness", label=1), "'label'; did you mean 'labels'")
    refuses(lambda: pl.figure(batch, att, title=["a"]), "'figure' has no option 'title'; did you mean 'titles'")
    refuses(lambda: att.overlay(photo(), colour="hot"), "'overlay' has no option 'colour'; ")
    refuses(lambda: att.overlay(photo(), alfa=0.1), "did you mean 'alpha'")


@row
def methods_and_metrics_that_are_no_names(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    for wrong in (None, 3, ["genatt", 3], {"genatt": None}, {"genatt"}):
        refuses(lambda wrong=wrong: pl.explain(vit, batch, wrong), "is no method; give a name, a list of names")
        refuses(lambda wrong=wrong: pl.evaluate(vit, batch, "genatt", wrong), "is no metric; give a name")


# Images


@row
def streams_of_images_are_read_as_they_come(folder: Path) -> None:
    vit = shared("vit")
    pictures = [photo(i) for i in range(5)]
    paths = []
    for i, picture in enumerate(pictures):
        paths.append(folder / f"{i}.png")
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
        yield DataLoader(batch, batch_size=4)  # type: ignore[arg-type]
        yield DataLoader(list(zip(pictures, range(5), strict=True)), batch_size=2, collate_fn=list)  # type: ignore[arg-type]
        yield TensorDataset(batch, labels)
        yield ([paths[0], paths[1]] if i == 0 else paths[i + 1] for i in range(4))

    for i, stream in enumerate(streams()):
        if i == 7:  # a loader that leaves its items as pairs in a list
            refuses(lambda stream=stream: pl.explain(vit, stream), "an image was given as tuple")
            continue
        found = pl.explain(vit, stream, batch_size=2)
        assert torch.equal(found.scores, want.scores), i
        assert torch.equal(found.target, want.target)
    for i, stream in enumerate(streams()):
        if i != 7:
            assert torch.equal(pl.evaluate(vit, stream, "genatt", "sparseness").values, wanted), i


@row
def streams_take_targets_that_fit_any_length(folder: Path) -> None:
    vit = named()
    batch = images(vit)
    for target in (2, "dog", (0, "dog")):
        found, want = pl.explain(vit, iter(batch), "ixg", target), pl.explain(vit, batch, "ixg", target)
        assert torch.equal(found.scores, want.scores)
        assert found.named == want.named
    refuses(
        lambda: pl.explain(vit, iter(batch), target=[0, 1, 2]), "a list of 3, one per image", "not known beforehand"
    )
    refuses(lambda: pl.explain(vit, iter(batch), target="dgo"), "did you mean 'dog'?")
    refuses(lambda: pl.explain(vit, iter([])), "no images")
    told: list[Any] = []
    pl.explain(vit, iter(batch), batch_size=2, progress=lambda *done: told.append(done))
    assert told == [(2, None), (3, None)]


@row
def streams_are_measured_against_maps_of_their_length(folder: Path) -> None:
    vit = shared("vit")
    batch = images(vit)
    att = pl.explain(vit, batch)
    want = pl.evaluate(vit, batch, att, "sparseness").values
    assert torch.equal(pl.evaluate(vit, iter(batch), att, "sparseness", batch_size=2).values, want)
    refuses(lambda: pl.evaluate(vit, iter(batch[:2]), att, "sparseness"), "maps of 3 images, but 2 images came")
    more = torch.cat([batch, batch])
    refuses(lambda: pl.evaluate(vit, iter(more), att, "sparseness", batch_size=2), "but at least 4 images came")
    refuses(lambda: pl.evaluate(vit, iter(batch), "genatt", "sparseness", labels=[0, 1, 2]), "known beforehand")


@row
def a_long_stream_needs_no_more_memory(folder: Path) -> None:
    vit = shared("vit")
    one = images(vit, 1)[0].double().numpy()
    alive: list[int] = []

    def stream(count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            alive.append(tracemalloc.get_traced_memory()[0])
            yield torch.from_numpy(np.array(one))  # numpy's memory is traced, torch's is not

    tracemalloc.start()
    try:
        pl.explain(vit, stream(40), "rollout", batch_size=4)
    finally:
        tracemalloc.stop()
    assert max(alive[20:]) - min(alive[8:20]) < 8 * one.nbytes


@row
def things_that_are_no_images(folder: Path) -> None:
    vit = shared("vit")
    for ask in (lambda given: pl.explain(vit, given), lambda given: pl.evaluate(vit, given, "genatt", "sparseness")):
        for wrong, words in (
            ([], "no images"),
            ((), "no images"),
            (folder, "is a folder; give the image files in it"),
            (str(folder), "is a folder"),
            (np.zeros((64, 64, 3)), "numpy array"),
            ([np.zeros((64, 64, 3))], "given as ndarray"),
            (3, "images are a int; give a tensor"),
            (None, "images are None; give a tensor"),
            ({"a": photo()}, "images are a dict; give a tensor"),
            ({"a.png"}, "images are a set; give a tensor"),
            (iter([3]), "images are a int; give a tensor"),
            (iter([{"pixel_values": 1}]), "images are a dict; give a tensor"),
            ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 32)], "the shapes [3, 64, 64] and [3, 32, 32]"),
            ([torch.zeros(3, 64, 64), photo()], "given as Tensor"),
        ):
            refuses(lambda ask=ask, wrong=wrong: ask(wrong), words)


@row
def a_picture_for_a_model_of_five_bands(folder: Path) -> None:
    vit = bands(5)
    photo().save(folder / "a.png")
    for given in (photo(), [photo()], folder / "a.png"):
        refuses(lambda given=given: pl.explain(vit, given), "takes 5 channels", "[B,5,64,64] tensor")
    refuses(lambda: vit.predict(photo()), "takes 5 channels")
    assert pl.explain(vit, images(vit)).scores.shape == (3, 4, 4)
    grey = bands(1)
    colours = grey.preprocess.tensor(photo())
    assert torch.equal(grey.batch(photo())[0, 0], colours.mean(0))


# Things to draw


@row
def five_bands_are_no_picture(folder: Path) -> None:
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
        refuses(ask, "is no picture, which is [1,H,W] or [3,H,W]; give the picture to show")
    assert att.overlay(photo()).size == (256, 256)
    shown = pl.figure([photo()] * 3, att, vit=vit)
    assert len(shown.axes) == 7


@row
def figures_of_a_list_and_of_one(folder: Path) -> None:
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
        assert words[: len(titles)] == titles
    assert len(pl.figure(list(batch), a, vit=vit.model).axes) == 5
    of_two = [pl.explain(vit, batch, "genatt", target=target) for target in (1, (2, 3), [4, 5])]
    words = [t.get_text() for t in pl.figure(batch, of_two).texts]
    assert {"class 1", "class 2", "against class 3", "various classes"} <= set(words)
    assert not any(word.startswith("for ") for word in words), "the rows must not speak for all columns"
    for wrong in ([a, 3], {"a": a.scores}, 3, None, a.scores):
        refuses(lambda wrong=wrong: pl.figure(batch, wrong), "give an Attribution, a list of them")
    for wrong in (3, None):
        refuses(lambda wrong=wrong: pl.figure(wrong, a), f"images are {wrong}; give the paths, PIL images")
    refuses(lambda: a.overlay(np.zeros((8, 8, 3))), "given as ndarray; give a path or a PIL image")
