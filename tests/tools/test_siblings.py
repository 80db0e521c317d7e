"""The siblings of the bundled model: they start from its weights, train, and open by name through the plugin."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import _registry
from torch import Tensor
from typer.testing import CliRunner

import patchlight as pl
from patchlight.cli import app
from patchlight.core import plugins
from patchlight.core.errors import PatchlightError
from patchlight.zoo import pocket
from tests.helpers import timm_pocket
from tests.tools.test_pocket import few
from tools import train_pocket, train_siblings

PHOTO = pocket.PHOTOS / "cat.jpg"
SHAPES = {
    "pocket_distilled": ((8, 8), 2, "cls+dist", False),
    "pocket_pooled": ((8, 8), 4, "avg", False),
    "pocket_swin": ((8, 8), 0, "avg", True),
}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers with timm is gone afterwards: other tests walk all names."""
    for name in ("_module_to_models", "_model_to_module", "_model_entrypoints", "_model_pretrained_cfgs"):
        monkeypatch.setattr(_registry, name, copy.copy(getattr(_registry, name)))
    monkeypatch.setattr(plugins, "_FILES", set(plugins._FILES))


def pictures(count: int = 8) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_the_distilled_sibling_starts_as_pocket_that_counts_its_class_token_twice() -> None:
    """Its distillation token starts as a second class token, which is log 2 on the attention that goes there."""
    model: Any = train_siblings.build("pocket_distilled", pictures())
    twice = torch.zeros(1, 1, 1, 65)
    twice[..., 0] = math.log(2)
    plain: Any = timm_pocket()
    want = plain.forward_head(plain.forward_features(pictures(), attn_mask=twice))
    assert torch.allclose(model.eval()(pictures()), want, atol=2e-4)
    assert not torch.allclose(plain(pictures()), want, atol=2e-3)
    model.set_distilled_training(True)
    first, second = model.train()(pictures())
    assert torch.allclose(first, second, atol=2e-4)


@torch.no_grad()
def test_wide_blocks_start_as_those_of_pocket() -> None:
    """On tokens of two equal halves, a wide block gives both what pocket's block gives."""
    model: Any = train_siblings.build("pocket_swin", pictures()).eval()
    plain: Any = pocket.build()
    tokens = plain.forward_features(pictures(2))[:, 1:17]
    for wide in model.layers[1].blocks:
        wide.attn.relative_position_bias_table.zero_()
    for at, wide in zip((6, 7, 8), model.layers[1].blocks, strict=True):
        found = wide(torch.cat([tokens, tokens], -1).unflatten(1, (4, 4))).flatten(1, 2)
        assert torch.allclose(found, plain.blocks[at](tokens).repeat(1, 1, 2), atol=1e-4)


@torch.no_grad()
def test_merging_starts_as_means_of_left_and_right_patches() -> None:
    model: Any = train_siblings.build("pocket_swin", pictures())
    merge = model.layers[1].downsample
    merge.norm = torch.nn.Identity()
    x = torch.randn(1, 8, 8, 192)
    left, right = x[:, :, 0::2].unflatten(1, (4, 2)).mean(2), x[:, :, 1::2].unflatten(1, (4, 2)).mean(2)
    assert torch.allclose(merge(x), torch.cat([left, right], -1), atol=1e-6)


@pytest.mark.parametrize("name", train_siblings.NAMES)
def test_a_sibling_is_trained_and_opens_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_pocket, "read_cifar10", few)
    before = train_siblings.build(name, pictures()).state_dict()
    short = ["--epochs", "0.5", "--batch", "10", "--device", "cpu", "--only", name, "--limit", "30"]
    assert train_siblings.main(["--data", "nowhere", "--out", str(tmp_path), *short]) == 0
    about = json.loads((tmp_path / f"{name}.json").read_text())
    assert (about["training"]["steps"], about["test_images"]) == (2, 30)
    vit = pl.load(name, weights=tmp_path / f"{name}.safetensors")
    assert (vit.grid, vit.prefix, vit.pooling, vit.hierarchical) == SHAPES[name]
    assert vit.labels == list(pocket.classes())
    assert vit.preprocess == pl.load("pocket").preprocess
    moved = [key for key, value in vit.model.state_dict().items() if not torch.equal(value, before[key].half().float())]
    assert {key for key, value in before.items() if value.is_floating_point() and value.ndim == 2} <= {*moved}


def test_the_plugin_is_loaded_before_the_model_is_looked_up(tmp_path: Path) -> None:
    words = ["explain", str(PHOTO), "--model", "pocket_pooled", "--no-pretrained", "--method", "gradcam"]
    refused = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "map.png")])
    assert refused.exit_code == 2
    assert "no model is called 'pocket_pooled'" in refused.output
    plugin = ["--plugin", str(train_siblings.PLUGIN)]
    done = CliRunner().invoke(app, [*words, *plugin, "--out", str(tmp_path / "map.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "map.png").is_file()


def test_a_benchmark_takes_a_sibling_for_a_recipes_model(tmp_path: Path) -> None:
    words = ["bench", "run", "tokentm-supplement-cifar10", "--plugin", str(train_siblings.PLUGIN), "--no-pretrained"]
    words += [
        "--model",
        "ViT-B=pocket_distilled",
        "--images",
        str(pocket.PHOTOS),
        "--data",
        "folder",
        "--limit",
        "1",
        "--quick",
    ]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 3, done.output
    assert "'transatt' does not work on pocket_distilled: the relevance rules read one CLS token" in done.output
    assert "6 values failed" in done.output, "all other methods do"
    report = CliRunner().invoke(app, ["bench", "report", str(tmp_path / "run")])
    assert "pocket_distilled" in report.stdout


def test_networks_that_timm_itself_offers_are_still_refused_by_their_kind() -> None:
    with pytest.raises(PatchlightError, match="convolutional network"):
        pl.load("resnet18", pretrained=False)
