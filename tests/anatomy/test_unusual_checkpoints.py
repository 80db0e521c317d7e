"""Checkpoints, label files and keywords of `load` and `wrap` that are incomplete, odd or misspelt, and the hub."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy import hub
from patchlight.anatomy.weights import read_labels
from patchlight.core.images import Preprocess
from tests.anatomy.test_processors import model, picture
from tests.helpers import refuses
from tests.pairs import transformers_model


def test_a_checkpoint_with_holes(tmp_path: Path) -> None:
    model("hf-vit").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    gone = [key for key in state if ".1." in key or "layernorm.bias" in key]
    save_file({k: v for k, v in state.items() if k not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(("without 'vit.", "more, which would be random"), pl.load, f"hf:{tmp_path}")


def test_another_number_of_classes_than_the_checkpoint_has(tmp_path: Path) -> None:
    model("hf-vit").save_pretrained(tmp_path)
    for options in ({"num_labels": 3}, {"num_labels": 3, "ignore_mismatched_sizes": True}):
        refuses("'classifier.bias' is [7] in the checkpoint but would be [3]", pl.load, f"hf:{tmp_path}", **options)
    refuses(("pretrained for 1000", "num_classes=3", "random"), pl.load, "vit_tiny_patch16_224", num_classes=3)


def test_a_transformers_model_filled_from_a_file(tmp_path: Path) -> None:
    for family in ("hf-vit", "hf-deit"):
        own = model(family)
        own.config.architectures = [type(own).__name__]
        own.config.save_pretrained(tmp_path)
        state = {k: v[:3].clone() if "classifier" in k else v for k, v in own.state_dict().items()}
        save_file(state, tmp_path / "file.safetensors")
        vit = pl.load(f"hf:{tmp_path}", weights=tmp_path / "file.safetensors", preprocess=Preprocess((64, 64)))
        assert vit.classes == 3
        batch = vit.batch(picture("square"))
        with torch.no_grad():
            whole = own(batch).logits
        torch.testing.assert_close(vit.logits(batch), whole[:, : vit.classes], atol=1e-5, rtol=1e-5)


SMALL: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 2}


def test_weights_that_are_not_floating_point(tmp_path: Path) -> None:
    state = pl.load("vit_tiny_patch16_224", pretrained=False, num_classes=3, **SMALL).model.state_dict()
    for kind in (torch.int32, torch.int8, torch.complex64, torch.bool):
        odd = {**state, "blocks.0.mlp.fc1.weight": state["blocks.0.mlp.fc1.weight"].to(kind)}
        for file in (tmp_path / "odd.safetensors", tmp_path / "odd.pth"):
            (save_file if file.suffix == ".safetensors" else torch.save)(odd, file)
            told = ("'blocks.0.mlp.fc1.weight' is " + str(kind).removeprefix("torch."), "must be floating point")
            refuses((*told,), pl.load, "vit_tiny_patch16_224", weights=file, **SMALL)
    torch.save({**state, "norm.weight": torch.ones(24, device="meta")}, tmp_path / "meta.pth")
    refuses(
        ("'norm.weight'", "without values"), pl.load, "vit_tiny_patch16_224", weights=tmp_path / "meta.pth", **SMALL
    )
    torch.save({**state, "norm.weight": torch.ones(24).to_sparse()}, tmp_path / "sparse.pth")
    refuses("'norm.weight'", pl.load, "vit_tiny_patch16_224", weights=tmp_path / "sparse.pth", **SMALL)


def test_weights_of_another_floating_precision_become_the_models(tmp_path: Path) -> None:
    state = pl.load("vit_tiny_patch16_224", pretrained=False, num_classes=3, **SMALL).model.state_dict()
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        save_file({k: v.to(kind) for k, v in state.items()}, tmp_path / "w.safetensors")
        vit = pl.load("vit_tiny_patch16_224", weights=tmp_path / "w.safetensors", **SMALL)
        assert vit.dtype == torch.float32
        loaded: Tensor = vit.model.state_dict()["head.weight"]
        assert torch.equal(loaded, state["head.weight"].to(kind).float())


def test_a_transformers_folder_of_whole_numbers(tmp_path: Path) -> None:
    model("hf-vit").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for kind, name in ((torch.int32, "I32"), (torch.complex64, "C64")):
        odd = {**state, "classifier.weight": (state["classifier.weight"] * 9).to(kind)}
        save_file(odd, tmp_path / "model.safetensors", {"format": "pt"})
        refuses((f"'classifier.weight' in '{tmp_path}", name, "floating point"), pl.load, f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("labels.csv", "index,name\n0,cat\n0,dog\n1,cow\n", "names class 0 more than once"),
        ("labels.csv", "index,name\n0,cat\n2,dog\n3,cow\n", "none for class 1"),
        ("labels.csv", "index,name\n1,cat\n2,dog\n", "none for class 0"),
        ("labels.csv", "index,name\n0,cat\none,dog\n", "index 'one'"),
        ("labels.csv", "index,name\n0,cat\n1.5,dog\n", "index '1.5'"),
        ("labels.csv", "index,name\n0,cat\n-1,dog\n", "index '-1'"),
        ("labels.csv", "index,name\n0,cat\n,dog\n", "index ''"),
        ("labels.csv", "index,name\n0,cat\n1\n2,cow\n", "class 1 has no name"),
        ("labels.csv", "index,name\n", "no line below it"),
        ("labels.csv", "", "no line below it"),
        ("labels.txt", "", "contains no labels"),
        ("labels.txt", "\n\n", "contains no labels"),
        ("labels.txt", " \n", "contains no labels"),
        ("labels.txt", "cat\n\ncow\n", "class 1 has no name"),
        ("labels.txt", b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file in UTF-8"),
        ("labels.csv", b"cat\0\ndog\n", "not a text file in UTF-8"),
        ("labels.txt", "cat\ndog\n".encode("utf-16"), "not a text file in UTF-8"),
    ],
)
def test_label_files_that_are_refused(name: str, content: str | bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses((name, words), read_labels, tmp_path / name)


def test_label_files_with_marks_and_blank_ends(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("\ufeffindex,name\n1,dog\n0,cat\n", encoding="utf-8")
    assert read_labels(tmp_path / "labels.csv") == ["cat", "dog"]
    (tmp_path / "labels.txt").write_bytes("\ufeffcat\r\ndog\x0cfox\r\n\r\n".encode())
    assert read_labels(tmp_path / "labels.txt") == ["cat", "dog\x0cfox"]


def test_labels_that_are_no_list() -> None:
    assert read_labels({1: "dog", 0: "cat"}) == ["cat", "dog"]
    refuses("none for class 1", read_labels, {0: "cat", 2: "dog"})
    for labels in (3, {"cat", "dog"}, b"cat"):
        refuses(f"have type {type(labels).__name__}", read_labels, labels)


def test_nothing_given_as_a_keyword_of_wrap() -> None:
    plain = pl.load("pocket").model
    vit, other = pl.wrap(plain, labels=None, name=None, preprocess=None, sigmoid=None, stage=None), pl.wrap(plain)
    assert (vit.labels, vit.preprocess, vit.name) == (other.labels, other.preprocess, other.name)


def test_a_wrong_keyword_of_wrap() -> None:
    vit = pl.load("pocket")
    refuses(("wrap takes no 'lables'", "did you mean 'labels'"), pl.wrap, vit.model, lables=["a"])
    refuses(("wrap takes no 'block'", "'blocks'"), pl.wrap, vit.model, embed=vit.embed, block=[])
    refuses(("labels cannot be given", "wrapped already"), pl.wrap, vit, labels=["a"])
    refuses(("1 labels", "classes"), pl.wrap, vit.model, labels=["a"])
    refuses(("no preprocessing at 'squash'", "JSON or TOML"), pl.wrap, vit.model, preprocess="squash")
    refuses(("the object of PocketViT", "pass preprocess="), pl.wrap, vit.model, processor=object())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("vit_tiny_patch16_224", {"img_sise": 32}, ("'img_sise'", "'img_size'")),
        ("swin_tiny_patch4_window7_224", {"num_clases": 3}, ("'num_clases'", "'num_classes'")),
        ("torchvision:vit_b_16", {"num_clases": 3}, ("'num_clases'", "'num_classes'")),
        ("hf", {"num_lables": 3}, ("'num_lables'", "'num_labels'")),
        ("pocket", {"device_": "cpu"}, ("'device_'", "'device'")),
    ],
)
def test_a_misspelt_keyword_of_load(name: str, options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    if name == "hf":
        model("hf-vit").save_pretrained(tmp_path)
        name = f"hf:{tmp_path}"
    elif name != "pocket":
        options = {"pretrained": False, **options}
    refuses(words, pl.load, name, **options)


def test_the_refusal_of_an_image_text_model_says_how_to_describe_it() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_model = transformers_model("CLIPModel").vision_model

        def encode_text(self) -> None: ...

    words = ("Other compares images with texts", "blocks=model.vision_model.encoder.layers", "labels=texts")
    refuses(words, pl.wrap, Other())


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that puts the hub at another address, with its cache in a folder."""
    from huggingface_hub import constants

    def put(place: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    return put


NOBODY = "http://127.0.0.1:9"
"""A port where nobody listens."""


def test_a_hub_out_of_reach_is_reported_at_once(hub_at: Callable[[str], None]) -> None:
    from huggingface_hub import constants

    hub_at(NOBODY)
    for name in ("vit_tiny_patch16_224", "hf:nobody/nothing"):
        begun = time.monotonic()
        told = refuses(("not in the local cache", f"{NOBODY} cannot be reached"), pl.load, name)
        assert time.monotonic() - begun < 3, name
        assert told.startswith(f"'{name}' could not be loaded")
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.filterwarnings("ignore::patchlight.AssumedPreprocess")
def test_a_hub_out_of_reach_does_not_matter_where_the_model_is_cached(
    hub_at: Callable[[str], None], tmp_path: Path
) -> None:
    def snapshot(repository: str) -> Path:
        home = tmp_path / f"models--{repository.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("a" * 40)
        (home / "snapshots" / ("a" * 40)).mkdir(parents=True)
        return home / "snapshots" / ("a" * 40)

    hub_at(NOBODY)
    saved, plain = model("hf-vit"), timm.create_model("vit_tiny_patch16_224", pretrained=False)
    saved.save_pretrained(snapshot("some/body"))
    repository = timm.models.get_pretrained_cfg("vit_tiny_patch16_224").hf_hub_id
    save_file(plain.state_dict(), snapshot(repository) / "model.safetensors")
    for name, given in (("hf:some/body", saved), ("vit_tiny_patch16_224", plain)):
        begun = time.monotonic()
        found = pl.load(name).model.state_dict()
        assert time.monotonic() - begun < 5, name
        assert all(torch.equal(found[key], value) for key, value in given.state_dict().items())


def test_a_hub_that_is_slow_is_not_out_of_reach(hub_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes connections, and then says nothing for a while."""
    begun = time.monotonic()
    monkeypatch.setattr(hub, "PATIENCE", 0.3)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        hub_at(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert hub.unreachable() == ""
    assert time.monotonic() - begun < 2


def test_a_folder_that_is_not_there() -> None:
    for name in ("./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", ""):
        refuses(f"no folder at '{name}'", pl.load, f"hf:{name}")
