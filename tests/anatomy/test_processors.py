"""Image processors of transformers: a wrapped model prepares pictures as its processor does, or refuses it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

import patchlight as pl
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from tests.families import FAMILIES, randomise
from tests.helpers import command, refuses

TORCHVISION = tuple(int(part) for part in torchvision.__version__.split(".")[:2])
SHAPES = {"portrait": (90, 131), "landscape": (203, 117), "square": (64, 64), "tiny": (9, 13), "long": (257, 61)}
FAMILY = {"ViT": "hf-vit", "DeiT": "hf-deit", "Bit": "hf-dinov2", "CLIP": "hf-clip", "Siglip": "hf-siglip"}
PUBLISHED: dict[str, dict[str, Any]] = {
    # what the checkpoints of each family say, at the test models' 64 pixels
    "ViT": {"size": {"height": 64, "width": 64}},
    "DeiT": {"size": {"height": 73, "width": 73}, "crop_size": {"height": 64, "width": 64}},
    "Bit": {"size": {"shortest_edge": 73}, "crop_size": {"height": 64, "width": 64}},
    "CLIP": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
    "Siglip": {"size": {"height": 64, "width": 64}},
}


def picture(shape: str) -> Image.Image:
    width, height = SHAPES[shape]
    pixels = np.random.default_rng(len(shape)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@cache
def model(family: str) -> nn.Module:
    pytest.importorskip("transformers")
    return randomise(FAMILIES[family]())


def processors(stem: str, **options: Any) -> Iterator[Any]:
    """The processors of a family with these options: with torchvision, with PIL, fast and slow, as are installed."""
    transformers = pytest.importorskip("transformers")
    found = 0
    for ending in ("", "Pil", "Fast"):
        cls = getattr(transformers, f"{stem}ImageProcessor{ending}", None)
        if cls is not None:
            found += 1
            yield cls(**{**PUBLISHED.get(stem, {}), **options})
    assert found


def prepared(stem: str, family: str | None = None, shapes: Any = SHAPES, **options: Any) -> list[Preprocess]:
    """Assert that a wrapped model prepares pictures as its processor does; how it does.

    At most half a 256th on average: libraries round differently inside a resize, and agree to the bit with PIL's.
    """
    found = []
    for processor in processors(stem, **options):
        vit = pl.wrap(model(family or FAMILY[stem]), processor=processor)
        for shape in shapes:
            given = torch.as_tensor(np.asarray(processor(picture(shape), return_tensors="pt")["pixel_values"]))
            ours = vit.batch(picture(shape))
            assert ours.shape == given.shape, (stem, options, shape)
            std = torch.tensor(vit.preprocess.std)[:, None, None]
            apart = float(((ours - given) * std).abs().mean()) * 255
            limit = 0.01 if type(processor).__name__.endswith("Pil") else 0.8
            assert apart < limit, f"{type(processor).__name__} {options} of a {shape} picture: {apart:.2f} / 255 apart"
        found.append(vit.preprocess)
    return found


ADVICE = "pass preprocess=pl.Preprocess("


def test_pictures_are_prepared_as_a_convnext_processor_does() -> None:
    """Below 384 pixels crop_pct is cut out of more; from there on the picture is squashed."""
    for ratio in (224 / 256, 0.9, 1.0):
        prepared("ConvNext", "hf-vit", size={"shortest_edge": 64}, crop_pct=ratio)
    (shown, *_rest) = prepared("ConvNext", "hf-dinov2", ("portrait",), size={"shortest_edge": 384}, crop_pct=0.9)
    assert shown.size == (384, 384)
    assert shown.fit == "squash"


@pytest.mark.parametrize("stem", FAMILY)
def test_pictures_are_prepared_as_published(stem: str) -> None:
    prepared(stem)
    for found in prepared(stem, shapes=("landscape",), do_normalize=False):
        assert (found.mean, found.std) == ((0, 0, 0), (1, 1, 1))


RESAMPLINGS = ("nearest", "lanczos", "bilinear", "bicubic")


@pytest.mark.parametrize("name", RESAMPLINGS)
def test_every_resampling_of_a_processor(name: str) -> None:
    if name == "lanczos" and TORCHVISION < (0, 27):  # before it, transformers takes bicubic in its place
        pytest.skip("torchvision has no lanczos")
    found = prepared("CLIP", shapes=("portrait",), resample=RESAMPLINGS.index(name))
    assert all(p.interpolation == name for p in found)


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("ViT", {"do_rescale": False}),
        ("CLIP", {"rescale_factor": 1 / 127.5}),
        ("DeiT", {"do_rescale": False, "do_normalize": False}),
        ("ViT", {"size": 64}),
        ("DeiT", {"size": 80, "crop_size": 64}),
        ("CLIP", {"size": 80, "crop_size": 64}),
        ("CLIP", {"size": {"shortest_edge": 67}, "crop_size": 64}),
        ("CLIP", {"size": {"height": 79, "width": 79}, "crop_size": 64}),
        ("Siglip", {"size": {"shortest_edge": 70}, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}}),
        ("CLIP", {"size": {"height": 64, "width": 64}, "do_center_crop": False}),
    ],
)
def test_options_of_processors(stem: str, options: dict[str, Any]) -> None:
    prepared(stem, shapes=SHAPES if "size" in options else ("landscape",), **options)


def test_a_cut_that_is_larger_than_the_picture_is_black_around_it() -> None:
    for found in prepared("CLIP", size={"shortest_edge": 51}, crop_size=64):
        assert np.asarray(found.crop(picture("square")))[:6].max() == 0


def test_a_dinov2_is_shown_what_its_processor_cuts_out() -> None:
    """Its positions are interpolated, so the size is the processor's, and not the one it was trained with."""
    (found, *_rest) = prepared("Bit", size={"shortest_edge": 100}, crop_size=96)
    vit = pl.wrap(model("hf-dinov2"), processor=next(processors("Bit", size={"shortest_edge": 100}, crop_size=96)))
    assert found.size == (96, 96)
    assert vit.grid == (6, 6)
    batch = vit.batch(picture("landscape"))
    with torch.no_grad():
        torch.testing.assert_close(vit.logits(batch), vit.model(batch).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("stem", "words", "options"),
    [
        ("ViT", ("takes images of 64 x 64", "gives 96 x 96"), {"size": {"height": 96, "width": 96}}),
        ("CLIP", ("takes images of 64 x 64", "gives 56 x 56"), {"crop_size": 56}),
        ("ViT", ("does not resize", ADVICE), {"do_resize": False}),
        ("CLIP", ("without a crop", ADVICE), {"do_center_crop": False}),
        ("ViT", ("not a fixed size", ADVICE), {"size": {"shortest_edge": 64, "longest_edge": 90}}),
        ("ViT", ("not a fixed size", ADVICE), {"size": {"longest_edge": 90}}),
        ("ViT", ("does more than resize", ADVICE), {"do_pad": True, "pad_size": {"height": 80, "width": 80}}),
        ("CLIP", ("does more than resize", ADVICE), {"size": {"height": 70, "width": 90}, "crop_size": 64}),
    ],
)
def test_processors_that_are_refused(stem: str, words: tuple[str, ...], options: dict[str, Any]) -> None:
    for processor in processors(stem, **options):
        refuses(words, pl.wrap, model(FAMILY[stem]), processor=processor)


def test_a_processor_that_does_not_do_what_it_says() -> None:
    class Inverted:
        def __init__(self) -> None:
            self.plain = next(processors("ViT"))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plain, name)

        def __call__(self, *given: Any, **options: Any) -> Any:
            return {"pixel_values": -self.plain(*given, **options)["pixel_values"]}

    refuses(("Inverted", "does more than resize", ADVICE), pl.wrap, model("hf-vit"), processor=Inverted())


def test_boxes_masks_and_pictures_lie_where_a_processor_puts_them() -> None:
    for stem, options in (("DeiT", {}), ("Bit", {}), ("CLIP", {"size": {"shortest_edge": 51}, "crop_size": 64})):
        image = Image.new("RGB", (120, 90))
        image.paste((255, 255, 255), (40, 20, 80, 70))
        drawn = torch.from_numpy(np.array(image.convert("L")) // 255).int()
        for processor in processors(stem, **options):
            vit = pl.wrap(model(FAMILY[stem]), processor=processor)
            tensor = torch.as_tensor(np.asarray(processor(image, return_tensors="pt")["pixel_values"]))[0]
            white = np.asarray(vit.preprocess.picture(tensor).convert("L")) > 127
            (left, top, right, bottom) = vit.preprocess.boxes(torch.tensor([[40, 20, 80, 70]]), image.size)[0].tolist()
            assert (white != (vit.preprocess.mask(drawn) == 1).numpy()).mean() < 0.02
            rows, columns = np.flatnonzero(white.any(1)), np.flatnonzero(white.any(0))
            seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            assert np.abs(np.array(seen) - (left, top, right, bottom)).max() <= 1


def test_a_folder_is_loaded_with_its_processor(tmp_path: Path) -> None:
    model("hf-deit").save_pretrained(tmp_path)
    processor = next(processors("DeiT"))
    processor.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pl.AssumedPreprocess)
        vit = pl.load(f"hf:{tmp_path}")
    given = torch.as_tensor(np.asarray(processor(picture("portrait"), return_tensors="pt")["pixel_values"]))
    assert float((vit.batch(picture("portrait")) - given).abs().mean()) < 0.01


def test_a_folder_with_a_broken_processor(tmp_path: Path) -> None:
    model("hf-vit").save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    refuses(("preprocessor_config.json", "pass preprocess="), pl.load, f"hf:{tmp_path}")
    assert pl.load(f"hf:{tmp_path}", preprocess=Preprocess((64, 64))).preprocess == Preprocess((64, 64))


def test_models_without_a_processor_are_prepared_as_published(tmp_path: Path) -> None:
    half, imagenet = ((0.5,) * 3,) * 2, (IMAGENET_MEAN, IMAGENET_STD)
    clip = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    colours = {"ViT": half, "DeiT": imagenet, "Bit": imagenet, "CLIP": clip, "Siglip": half}
    for stem, family in FAMILY.items():
        with pytest.warns(pl.AssumedPreprocess, match="came without an image processor.* give preprocess=") as told:
            assumed = pl.wrap(model(family)).preprocess
        assert len(told) == 1
        assert (assumed.mean, assumed.std) == colours[stem]
        for found in prepared(stem, image_mean=assumed.mean, image_std=assumed.std):
            assert (found.interpolation, found.fit) == (assumed.interpolation, assumed.fit)
            assert all(torch.equal(found.tensor(picture(s)), assumed.tensor(picture(s))) for s in SHAPES)
    model("hf-clip").save_pretrained(tmp_path)
    with pytest.warns(pl.AssumedPreprocess, match="came without an image processor"):
        assert pl.load(f"hf:{tmp_path}").preprocess == pl.wrap(model("hf-clip")).preprocess


def test_a_dinov2_trained_on_518_pixels_is_shown_224() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 518, "patch_size": 14}
    with pytest.warns(pl.AssumedPreprocess, match="cover 256 x 256"):
        vit = pl.wrap(transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, num_labels=3)))
    assert vit.preprocess.size == (224, 224)
    assert vit.grid == (16, 16)
    assert vit.preprocess.crop_pct == 0.875


def test_a_command_says_that_preprocessing_was_assumed(tmp_path: Path) -> None:
    model("hf-vit").save_pretrained(tmp_path)
    picture("square").save(tmp_path / "image.png")
    words = ("explain", str(tmp_path / "image.png"), "--model", f"hf:{tmp_path}", "--out", str(tmp_path / "out"))
    command(*words, says=("warning:", "came without an image processor"))
