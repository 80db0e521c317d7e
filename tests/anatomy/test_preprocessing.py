"""How images are prepared, as a user says it: fields, files, folders of processors; and the sentences for the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.anatomy.preprocessing import as_spec, read_preprocess
from tests.families import FAMILIES, randomise

SMALL: dict[str, Any] = {
    "pretrained": False,
    "img_size": 64,
    "embed_dim": 48,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 7,
}


def test_some_fields_replace_the_models_own(tmp_path: Path) -> None:
    own = pl.load("vit_tiny_patch16_224", **SMALL).preprocess
    fields = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.4], "crop_pct": 0.8}
    (tmp_path / "own.json").write_text(json.dumps(fields))
    (tmp_path / "own.toml").write_text("mean = [0.1, 0.2, 0.3]\nstd = [0.5, 0.5, 0.4]\ncrop_pct = 0.8\n")
    expected = replace(own, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.4), crop_pct=0.8)
    for given in (fields, tmp_path / "own.json", str(tmp_path / "own.toml"), expected):
        assert pl.load("vit_tiny_patch16_224", preprocess=given, **SMALL).preprocess == expected
        assert pl.wrap(randomise(FAMILIES["vit"]()), preprocess=given).preprocess == expected
    assert pl.load("pocket", preprocess={"crop_pct": 0.5}).preprocess == replace(
        pl.load("pocket").preprocess, crop_pct=0.5
    )


def test_a_size_is_two_numbers_or_one() -> None:
    free = {**SMALL, "dynamic_img_size": True}
    assert pl.load("vit_tiny_patch16_224", preprocess={"size": 96}, **free).grid == (6, 6)
    assert pl.load("vit_tiny_patch16_224", preprocess={"size": [96, 32]}, **free).grid == (6, 2)


def test_the_folder_of_a_processor_says_all(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 80}, crop_size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path)
    picture = Image.effect_noise((120, 90), 80).convert("RGB")
    given = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"])
    for place in (tmp_path, tmp_path / "preprocessor_config.json", processor):
        vit = pl.load("vit_tiny_patch16_224", preprocess=place, **SMALL)
        assert (vit.batch(picture) - given).abs().mean() < 0.02
    assert pl.wrap(vit.model, processor=processor).preprocess == vit.preprocess
    assert replace(vit.preprocess, **as_spec(tmp_path).model_dump()) == vit.preprocess


def test_of_a_transformers_folder_the_rest_is_its_processors(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = randomise(FAMILIES["hf-vit"]())
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    transformers.ViTImageProcessor(size={"height": 64, "width": 64}, image_mean=[0.3] * 3).save_pretrained(tmp_path)
    whole = pl.load(f"hf:{tmp_path}").preprocess
    some = pl.load(f"hf:{tmp_path}", preprocess={"std": [0.2] * 3}).preprocess
    assert some == replace(whole, std=(0.2, 0.2, 0.2))
    assert whole.mean == pytest.approx((0.3, 0.3, 0.3))


def test_nothing_is_assumed_where_all_that_matters_is_given(recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("transformers")
    fields = {"size": 64, "mean": [0.5] * 3, "std": [0.5] * 3}
    pl.wrap(randomise(FAMILIES["hf-vit"]()), preprocess=fields)
    assert not [w for w in recwarn if issubclass(w.category, pl.AssumedPreprocess)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"crop": 0.9}, r"has no field 'crop'; did you mean 'crop_pct'"),
        ({"size": "large"}, r"'size': .*not 'large'"),
        ({"size": [64]}, r"'size.1': Field required"),
        ({"mean": ["a", 0.1, 0.2]}, r"'mean.0': .*not 'a'"),
        ({"std": [0.0, 0.1, 0.2]}, r"'std.0': .*greater than 0"),
        (
            {"mean": [0.5], "std": [0.5, 0.5]},
            r"mean \(0.5,\) and std \(0.5, 0.5\) need one finite mean and std per channel",
        ),
        ({"mean": [], "std": []}, r"'mean': "),
        ({"mean": [0.5] * 5, "std": [0.5] * 5}, r"have 5 numbers, but vit_tiny_patch16_224 takes images of 3 channel"),
        ({"crop_pct": 1.5}, r"'crop_pct': .*not 1.5"),
        ({"interpolation": "sharp"}, r"'interpolation': .*not 'sharp'"),
    ],
)
def test_fields_that_are_none(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps(content))
    for given in (content, file):
        with pytest.raises(pl.PatchlightError, match=message):
            pl.load("vit_tiny_patch16_224", preprocess=given, **SMALL)


def test_files_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.toml").write_text("size = 64\ncolour = 3\n")
    (tmp_path / "own.txt").write_text("")
    sentences = {
        tmp_path / "none.json": r"no preprocessing at '.*none.json'; give a JSON or TOML file",
        tmp_path: r"no preprocessor_config.json in",
        tmp_path / "list.json": r"contains a list; give an object",
        tmp_path / "bad.json": r"bad.json' is not JSON",
        tmp_path / "bad.toml": r"bad.toml', line 2: there is no key 'colour'",
        tmp_path / "own.txt": r"cannot be read as a preprocessing; give a .json or .toml",
    }
    for path, sentence in sentences.items():
        with pytest.raises(pl.PatchlightError, match=sentence):
            read_preprocess(path)
    with pytest.raises(pl.PatchlightError, match=r"preprocess is int; give a pl\.Preprocess"):
        pl.load("vit_tiny_patch16_224", preprocess=224, **SMALL)  # type: ignore[arg-type]


def test_sigmoids_instead_of_a_softmax() -> None:
    vit = pl.load("vit_tiny_patch16_224", sigmoid=True, **SMALL)
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 0.0, 3.0]])
    torch.testing.assert_close(vit.probabilities(logits), logits.sigmoid())
