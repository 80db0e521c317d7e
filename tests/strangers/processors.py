"""Rows about models that come from elsewhere: their pictures' preparation, weights, labels, keywords, and the hub."""

from __future__ import annotations

import contextlib
import socket
import time
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
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.files import read_labels
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from tests.families import FAMILIES, randomise
from tests.strangers.table import command, refuses, row

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


def unprepared(stem: str, *words: str, **options: Any) -> None:
    for processor in processors(stem, **options):
        refuses(lambda p=processor: pl.wrap(model(FAMILY.get(stem, "hf-vit")), processor=p), *words)  # type: ignore[misc]


@row
def pictures_are_prepared_as_a_vit_processor_does(_: Path) -> None:
    prepared("ViT")


@row
def pictures_are_prepared_as_a_deit_processor_does(_: Path) -> None:
    prepared("DeiT")


@row
def pictures_are_prepared_as_dinov2s_processor_does(_: Path) -> None:
    prepared("Bit")


@row
def pictures_are_prepared_as_a_clip_processor_does(_: Path) -> None:
    prepared("CLIP")


@row
def pictures_are_prepared_as_a_siglip_processor_does(_: Path) -> None:
    prepared("Siglip")


@row
def pictures_are_prepared_as_a_convnext_processor_does(_: Path) -> None:
    """Below 384 pixels crop_pct is cut out of more; from there on the picture is squashed."""
    for ratio in (224 / 256, 0.9, 1.0):
        prepared("ConvNext", "hf-vit", size={"shortest_edge": 64}, crop_pct=ratio)
    (shown, *_rest) = prepared("ConvNext", "hf-dinov2", ("portrait",), size={"shortest_edge": 384}, crop_pct=0.9)
    assert shown.size == (384, 384)
    assert shown.fit == "squash"


@row
def a_processor_that_does_not_normalise(_: Path) -> None:
    for stem in FAMILY:
        for found in prepared(stem, shapes=("landscape",), do_normalize=False):
            assert found.mean == (0, 0, 0)
            assert found.std == (1, 1, 1)


@row
def a_processor_that_scales_otherwise(_: Path) -> None:
    prepared("ViT", shapes=("landscape",), do_rescale=False)
    prepared("CLIP", shapes=("landscape",), rescale_factor=1 / 127.5)
    prepared("DeiT", shapes=("landscape",), do_rescale=False, do_normalize=False)


@row
def every_resampling_of_a_processor(_: Path) -> None:
    for resample, name in enumerate(("nearest", "lanczos", "bilinear", "bicubic")):
        if name == "lanczos" and TORCHVISION < (0, 27):  # before it, transformers takes bicubic in its place
            continue
        assert all(p.interpolation == name for p in prepared("CLIP", shapes=("portrait",), resample=resample))


@row
def sizes_given_in_every_way(_: Path) -> None:
    prepared("ViT", size=64)
    prepared("DeiT", size=80, crop_size=64)
    prepared("CLIP", size=80, crop_size=64)
    prepared("CLIP", size={"shortest_edge": 67}, crop_size=64)
    prepared("CLIP", size={"height": 79, "width": 79}, crop_size=64)
    prepared("Siglip", size={"shortest_edge": 70}, do_center_crop=True, crop_size={"height": 64, "width": 64})
    prepared("CLIP", size={"height": 64, "width": 64}, do_center_crop=False)


@row
def a_cut_that_is_larger_than_the_picture_is_black_around_it(_: Path) -> None:
    for found in prepared("CLIP", size={"shortest_edge": 51}, crop_size=64):
        assert np.asarray(found.crop(picture("square")))[:6].max() == 0


@row
def a_dinov2_is_shown_what_its_processor_cuts_out(_: Path) -> None:
    """Its positions are interpolated, so the size is the processor's, and not the one it was trained with."""
    (found, *_rest) = prepared("Bit", size={"shortest_edge": 100}, crop_size=96)
    vit = pl.wrap(model("hf-dinov2"), processor=next(processors("Bit", size={"shortest_edge": 100}, crop_size=96)))
    assert found.size == (96, 96)
    assert vit.grid == (6, 6)
    batch = vit.batch(picture("landscape"))
    with torch.no_grad():
        torch.testing.assert_close(vit.logits(batch), vit.model(batch).logits, atol=1e-5, rtol=1e-5)


@row
def a_processor_of_another_size_than_the_model(_: Path) -> None:
    unprepared("ViT", "takes pictures of 64 x 64", "gives 96 x 96", size={"height": 96, "width": 96})
    unprepared("CLIP", "takes pictures of 64 x 64", "gives 56 x 56", crop_size=56)


@row
def processors_that_do_what_cannot_be_said(_: Path) -> None:
    how = "pass preprocess=pl.Preprocess("
    unprepared("ViT", "does not resize", how, do_resize=False)
    unprepared("CLIP", "cuts nothing out", how, do_center_crop=False)
    unprepared("ViT", "no fixed size", how, size={"shortest_edge": 64, "longest_edge": 90})
    unprepared("ViT", "no fixed size", how, size={"longest_edge": 90})
    unprepared("ViT", "do not say", how, do_pad=True, pad_size={"height": 80, "width": 80})
    unprepared("CLIP", "do not say", how, size={"height": 70, "width": 90}, crop_size=64)

    class Inverted:
        def __init__(self) -> None:
            self.plain = next(processors("ViT"))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.plain, name)

        def __call__(self, *given: Any, **options: Any) -> Any:
            return {"pixel_values": -self.plain(*given, **options)["pixel_values"]}

    refuses(lambda: pl.wrap(model("hf-vit"), processor=Inverted()), "Inverted", "do not say", how)


@row
def boxes_masks_and_pictures_lie_where_a_processor_puts_them(_: Path) -> None:
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


@row
def a_folder_is_loaded_with_its_processor(folder: Path) -> None:
    model("hf-deit").save_pretrained(folder)  # type: ignore[operator]
    processor = next(processors("DeiT"))
    processor.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pl.AssumedPreprocess)
        vit = pl.load(f"hf:{folder}")
    given = torch.as_tensor(np.asarray(processor(picture("portrait"), return_tensors="pt")["pixel_values"]))
    assert float((vit.batch(picture("portrait")) - given).abs().mean()) < 0.01


@row
def a_folder_with_a_broken_processor(folder: Path) -> None:
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    (folder / "preprocessor_config.json").write_text("{")
    refuses(lambda: pl.load(f"hf:{folder}"), "preprocessor_config.json", "pass preprocess=")
    assert pl.load(f"hf:{folder}", preprocess=Preprocess((64, 64))).preprocess == Preprocess((64, 64))


@row
def models_without_a_processor_are_prepared_as_published(folder: Path) -> None:
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
    model("hf-clip").save_pretrained(folder)  # type: ignore[operator]
    with pytest.warns(pl.AssumedPreprocess, match="came without an image processor"):
        assert pl.load(f"hf:{folder}").preprocess == pl.wrap(model("hf-clip")).preprocess


@row
def a_dinov2_trained_on_518_pixels_is_shown_224(_: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 518, "patch_size": 14}
    with pytest.warns(pl.AssumedPreprocess, match="cover 256 x 256"):
        vit = pl.wrap(transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, num_labels=3)))
    assert vit.preprocess.size == (224, 224)
    assert vit.grid == (16, 16)
    assert vit.preprocess.crop_pct == 0.875


@row
def a_command_says_that_preprocessing_was_assumed(folder: Path) -> None:
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    picture("square").save(folder / "image.png")
    words = ("explain", str(folder / "image.png"), "--model", f"hf:{folder}", "--out", str(folder / "out"))
    command(*words, says=("warning:", "came without an image processor"))


def folder_of(kind: str, folder: Path) -> str:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    stem = kind.removesuffix("Model")
    if stem in ("CLIP", "Siglip"):
        text = {**sizes, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        made = getattr(transformers, f"{stem}Config")(vision_config=vision, text_config=text, projection_dim=16)
    else:
        made = getattr(transformers, f"{stem}Config")(**vision)
    getattr(transformers, kind)(made).save_pretrained(folder / kind)
    return str(folder / kind)


@row
def a_folder_without_a_classifier(folder: Path) -> None:
    for kind in ("ViTModel", "Dinov2Model", "DeiTModel"):
        name = folder_of(kind, folder)
        refuses(lambda n=name: pl.load(f"hf:{n}"), "no classifier", "Similar(images)")  # type: ignore[misc]
    picture("square").save(folder / "image.png")
    command("explain", str(folder / "image.png"), "--model", f"hf:{name}", code=2, says=("no classifier", "Linear"))


@row
def a_folder_of_an_image_text_model(folder: Path) -> None:
    for kind in ("CLIPModel", "SiglipModel"):
        name = folder_of(kind, folder)
        refuses(lambda n=name: pl.load(f"hf:{n}"), "no classifier", "Texts(sentences)")  # type: ignore[misc]
        refuses(lambda n=name: pl.load(f"hf:{n}", texts=["a dog"]), "without a tokenizer", "processor=")  # type: ignore[misc]


@row
def a_checkpoint_with_holes(folder: Path) -> None:
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    state = load_file(folder / "model.safetensors")
    gone = [key for key in state if ".1." in key or "layernorm.bias" in key]
    save_file({k: v for k, v in state.items() if k not in gone}, folder / "model.safetensors", {"format": "pt"})
    refuses(lambda: pl.load(f"hf:{folder}"), "without 'vit.", "more, which would be random")


@row
def another_number_of_classes_than_the_checkpoint_has(folder: Path) -> None:
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    for options in ({"num_labels": 3}, {"num_labels": 3, "ignore_mismatched_sizes": True}):
        refuses(
            lambda o=options: pl.load(f"hf:{folder}", **o),  # type: ignore[misc]
            "'classifier.bias' is [7] in the checkpoint but would be [3]",
        )
    refuses(lambda: pl.load("vit_tiny_patch16_224", num_classes=3), "pretrained for 1000", "num_classes=3", "random")


@row
def a_transformers_model_filled_from_a_file(folder: Path) -> None:
    for family in ("hf-vit", "hf-deit"):
        own = model(family)
        own.config.architectures = [type(own).__name__]  # type: ignore[union-attr]
        own.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
        state = {k: v[:3].clone() if "classifier" in k else v for k, v in own.state_dict().items()}
        save_file(state, folder / "file.safetensors")
        vit = pl.load(f"hf:{folder}", weights=folder / "file.safetensors", preprocess=Preprocess((64, 64)))
        assert vit.classes == 3
        batch = vit.batch(picture("square"))
        with torch.no_grad():
            whole = own(batch).logits
        torch.testing.assert_close(vit.logits(batch), whole[:, : vit.classes], atol=1e-5, rtol=1e-5)


SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2}


@row
def weights_that_are_not_floating_point(folder: Path) -> None:
    state = pl.load("vit_tiny_patch16_224", pretrained=False, num_classes=3, **SMALL).model.state_dict()
    for kind in (torch.int32, torch.int8, torch.complex64, torch.bool):
        odd = {**state, "blocks.0.mlp.fc1.weight": state["blocks.0.mlp.fc1.weight"].to(kind)}
        for file in (folder / "odd.safetensors", folder / "odd.pth"):
            (save_file if file.suffix == ".safetensors" else torch.save)(odd, file)
            told = ("'blocks.0.mlp.fc1.weight' is " + str(kind).removeprefix("torch."), "must be floating point")
            refuses(lambda f=file: pl.load("vit_tiny_patch16_224", weights=f, **SMALL), *told)  # type: ignore[misc]
    torch.save({**state, "norm.weight": torch.ones(24, device="meta")}, folder / "meta.pth")
    refuses(
        lambda: pl.load("vit_tiny_patch16_224", weights=folder / "meta.pth", **SMALL), "'norm.weight'", "without values"
    )
    torch.save({**state, "norm.weight": torch.ones(24).to_sparse()}, folder / "sparse.pth")
    refuses(lambda: pl.load("vit_tiny_patch16_224", weights=folder / "sparse.pth", **SMALL), "'norm.weight'")


@row
def weights_of_another_floating_precision_become_the_models(folder: Path) -> None:
    state = pl.load("vit_tiny_patch16_224", pretrained=False, num_classes=3, **SMALL).model.state_dict()
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        save_file({k: v.to(kind) for k, v in state.items()}, folder / "w.safetensors")
        vit = pl.load("vit_tiny_patch16_224", weights=folder / "w.safetensors", **SMALL)
        assert vit.dtype == torch.float32
        loaded: Tensor = vit.model.state_dict()["head.weight"]
        assert torch.equal(loaded, state["head.weight"].to(kind).float())


@row
def a_transformers_folder_of_whole_numbers(folder: Path) -> None:
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    state = load_file(folder / "model.safetensors")
    for kind, name in ((torch.int32, "I32"), (torch.complex64, "C64")):
        save_file(
            {**state, "classifier.weight": (state["classifier.weight"] * 9).to(kind)},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        refuses(lambda: pl.load(f"hf:{folder}"), f"'classifier.weight' in '{folder}", name, "floating point")


@row
def label_files_that_are_not_in_order(folder: Path) -> None:
    file = folder / "labels.csv"

    def told(text: str, *words: str) -> None:
        file.write_text(text)
        refuses(lambda: read_labels(file), "labels.csv", *words)

    told("index,name\n0,cat\n0,dog\n1,cow\n", "names class 0 more than once")
    told("index,name\n0,cat\n2,dog\n3,cow\n", "none for class 1")
    told("index,name\n1,cat\n2,dog\n", "none for class 0")
    told("index,name\n0,cat\none,dog\n", "index 'one'", "whole numbers")
    told("index,name\n0,cat\n1.5,dog\n", "index '1.5'")
    told("index,name\n0,cat\n-1,dog\n", "index '-1'")
    told("index,name\n0,cat\n,dog\n", "index ''")
    told("index,name\n0,cat\n1\n2,cow\n", "class 1 has no name")
    told("index,name\n", "no line below it")
    told("", "no line below it")
    file.write_text("﻿index,name\n1,dog\n0,cat\n", encoding="utf-8")
    assert read_labels(file) == ["cat", "dog"]


@row
def label_files_that_are_not_text(folder: Path) -> None:
    for name in ("labels.txt", "labels.csv"):
        for content in (b"\x89PNG\r\n\x1a\n\xff\xfe", b"cat\0\ndog\n", "cat\ndog\n".encode("utf-16")):
            (folder / name).write_bytes(content)
            refuses(lambda n=name: read_labels(folder / n), "not a text file in UTF-8")  # type: ignore[misc]
    (folder / "labels.txt").write_bytes(b"\xff\xd8\xff")
    picture("square").save(folder / "image.png")
    words = ("explain", str(folder / "image.png"), "--model", "pocket", "--labels", str(folder / "labels.txt"))
    command(*words, code=2, says=("not a text file",))


@row
def label_files_with_blank_lines(folder: Path) -> None:
    file = folder / "labels.txt"
    for text in ("", "\n\n", " \n"):
        file.write_text(text)
        refuses(lambda: read_labels(file), "holds no labels")
    file.write_text("cat\n\ncow\n")
    refuses(lambda: read_labels(file), "class 1 has no name")
    file.write_bytes("\ufeffcat\r\ndog\x0cfox\r\n\r\n".encode())
    assert read_labels(file) == ["cat", "dog\x0cfox"]


@row
def labels_that_are_no_list(_: Path) -> None:
    assert read_labels({1: "dog", 0: "cat"}) == ["cat", "dog"]
    refuses(lambda: read_labels({0: "cat", 2: "dog"}), "none for class 1")
    for labels in (3, {"cat", "dog"}, b"cat"):
        refuses(lambda given=labels: read_labels(given), f"given as {type(labels).__name__}")  # type: ignore[misc, arg-type]


@row
def labels_of_another_count(folder: Path) -> None:
    (folder / "labels.txt").write_text("cat\ndog\n")
    refuses(lambda: pl.load("pocket", labels=folder / "labels.txt"), "2 labels", "classes")
    vit = pl.load("pocket")
    refuses(lambda: pl.wrap(vit.model, labels=["cat"]), "1 labels", "classes")


@row
def nothing_given_as_a_keyword_of_wrap(_: Path) -> None:
    plain = pl.load("pocket").model
    vit = pl.wrap(plain, labels=None, name=None, preprocess=None, sigmoid=None, stage=None)
    assert vit.labels is None
    assert vit.preprocess == pl.wrap(plain).preprocess
    assert vit.name == pl.wrap(plain).name


@row
def a_misspelt_keyword_of_wrap(_: Path) -> None:
    vit = pl.load("pocket")
    refuses(lambda: pl.wrap(vit.model, lables=["a"]), "wrap takes no 'lables'", "did you mean 'labels'")
    refuses(lambda: pl.wrap(vit.model, embed=vit.embed, block=[]), "wrap takes no 'block'", "'blocks'")
    refuses(lambda: pl.wrap(vit, labels=["a"]), "labels cannot be given", "wrapped already")
    refuses(lambda: pl.wrap(vit.model, preprocess="squash"), "no preprocessing at 'squash'", "JSON or TOML")
    refuses(lambda: pl.wrap(vit.model, processor=object()), "the object of VisionTransformer", "pass preprocess=")


@row
def a_misspelt_keyword_of_load(folder: Path) -> None:
    refuses(lambda: pl.load("vit_tiny_patch16_224", pretrained=False, img_sise=32), "'img_sise'", "'img_size'")
    refuses(lambda: pl.load("swin_tiny_patch4_window7_224", pretrained=False, num_clases=3), "'num_clases'", "'num_cl")
    refuses(lambda: pl.load("torchvision:vit_b_16", pretrained=False, num_clases=3), "'num_clases'", "'num_classes'")
    refuses(lambda: pl.load("pocket", device_="cpu"), "'device_'", "'device'")
    model("hf-vit").save_pretrained(folder)  # type: ignore[operator]
    refuses(lambda: pl.load(f"hf:{folder}", num_lables=3), "'num_lables'", "'num_labels'")
    refuses(lambda: pl.load(nn.Linear(1, 1)), "load takes a name", "wrap takes models")  # type: ignore[arg-type]


def image_text(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return randomise(transformers.CLIPModel.from_pretrained(folder_of("CLIPModel", folder)))


@row
def an_image_text_model_is_told_how_to_be_described(folder: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_model = image_text(folder).vision_model

        def encode_text(self) -> None: ...

    refuses(
        lambda: pl.wrap(Other()),
        "Other compares images with texts",
        "blocks=model.vision_model.encoder.layers",
        "classes=number of texts, labels=texts",
    )


@row
def an_image_text_model_described_as_advised(folder: Path) -> None:
    clip = image_text(folder)
    texts = torch.tensor([[0, 5, 9, 1], [0, 7, 2, 1], [0, 3, 3, 1]])
    side = clip.vision_model

    def normalised(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    with torch.no_grad():
        features = normalised(clip.text_projection(clip.text_model(texts).pooler_output))

    def embed(images: Tensor) -> Tensor:
        return side.pre_layrnorm(side.embeddings(images))  # type: ignore[no-any-return]

    def readout(tokens: Tensor) -> Tensor:
        image = normalised(clip.visual_projection(side.post_layernorm(tokens[:, 0])))
        return clip.logit_scale.exp() * image @ features.T  # type: ignore[no-any-return]

    vit = pl.wrap(
        clip,
        embed=embed,
        blocks=side.encoder.layers,
        readout=readout,
        grid=(2, 2),
        prefix=1,
        pooling="cls",
        heads=2,
        classes=3,
        labels=["a cat", "a dog", "a cow"],
        preprocess=Preprocess((32, 32)),
    )
    batch = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = clip(input_ids=texts, pixel_values=batch).logits_per_image
    torch.testing.assert_close(vit.logits(batch), whole, atol=1e-5, rtol=1e-5)
    maps = pl.explain(vit, batch, ["rollout", "ixg", "genatt"], target="a dog")
    assert all(a.scores.shape == (2, 2, 2) and float(a.scores.abs().max()) > 0 for a in maps.values())


@contextlib.contextmanager
def hub_at(place: str, folder: Path) -> Iterator[None]:
    """Inside, the hub is at another address, and its cache in a folder."""
    from huggingface_hub import constants

    kept = constants.ENDPOINT, constants.HF_HUB_CACHE
    constants.ENDPOINT, constants.HF_HUB_CACHE = place, str(folder)
    try:
        yield
    finally:
        constants.ENDPOINT, constants.HF_HUB_CACHE = kept


NOBODY = "http://127.0.0.1:9"
"""A port where nobody listens."""


@row
def a_hub_out_of_reach_is_told_at_once(folder: Path) -> None:
    from huggingface_hub import constants

    with hub_at(NOBODY, folder):
        for name in ("vit_tiny_patch16_224", "hf:nobody/nothing"):
            begun = time.monotonic()
            told = refuses(lambda n=name: pl.load(n), "not in the local cache", f"{NOBODY} cannot be reached")  # type: ignore[misc]
            assert time.monotonic() - begun < 3, name
            assert told.startswith(f"'{name}' could not be loaded")
        assert not constants.HF_HUB_OFFLINE


@row
def a_hub_out_of_reach_does_not_matter_where_the_model_is_cached(folder: Path) -> None:
    import timm

    def snapshot(repository: str) -> Path:
        home = folder / f"models--{repository.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("a" * 40)
        (home / "snapshots" / ("a" * 40)).mkdir(parents=True)
        return home / "snapshots" / ("a" * 40)

    own, plain = model("hf-vit"), timm.create_model("vit_tiny_patch16_224", pretrained=False)
    own.save_pretrained(snapshot("some/body"))  # type: ignore[operator]
    hub = timm.models.get_pretrained_cfg("vit_tiny_patch16_224").hf_hub_id
    save_file(plain.state_dict(), snapshot(hub) / "model.safetensors")
    with hub_at(NOBODY, folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        for name, given in (("hf:some/body", own), ("vit_tiny_patch16_224", plain)):
            begun = time.monotonic()
            found = pl.load(name).model.state_dict()
            assert time.monotonic() - begun < 5, name
            assert all(torch.equal(found[key], value) for key, value in given.state_dict().items())


@row
def a_hub_that_is_slow_is_not_out_of_reach(folder: Path) -> None:
    """A host that takes connections, and then says nothing for a while."""
    from patchlight.anatomy import hub

    patience, begun = hub.PATIENCE, time.monotonic()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        try:
            hub.PATIENCE = 0.3
            with hub_at(f"http://127.0.0.1:{listening.getsockname()[1]}", folder):
                assert hub.unreachable() == ""
        finally:
            hub.PATIENCE = patience
    assert time.monotonic() - begun < 2


@row
def a_folder_that_is_not_there(_: Path) -> None:
    for name in ("./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", ""):
        refuses(lambda n=name: pl.load(f"hf:{n}"), f"no folder at '{name}'")  # type: ignore[misc]
