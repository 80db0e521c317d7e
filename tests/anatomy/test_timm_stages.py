"""Networks of stages, cut by their own forward: the two halves are the model, and the map is timm's own feature map."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.feature_maps import read_feature_map
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.timm_stages import TimmMapAnatomy, stages_of
from patchlight.core.images import Preprocess
from patchlight.testing import check_method, contract_names
from tests.families import STAGED, images, randomise, shared

QUICK = ("gradcam", "smoothgrad", "kernel-shap", "occlusion", "genatt")


def opened(family: str, stage: int, dtype: torch.dtype = torch.float64) -> Any:
    return pl.wrap(randomise(STAGED[family]()).to(dtype), name=family, stage=stage)


@pytest.mark.parametrize("family", STAGED)
def test_every_stage_gives_the_model(family: str) -> None:
    for stage in range(len(stages_of(STAGED[family]()))):
        vit = opened(family, stage)
        batch = images(vit)
        with torch.no_grad():
            logits, tokens = vit.model(batch), vit.embed(batch)
            assert (logits[0] - logits[1]).abs().max() > 0.1, "the test model does not look at its input"
            torch.testing.assert_close(vit.readout(tokens), logits, atol=1e-9, rtol=1e-9)
        assert tokens.shape == (3, vit.tokens, vit.width)
        assert (vit.depth, vit.hierarchical, vit.stage) == (0, True, stage)
        _is_timms_map(vit, batch, tokens)


def _is_timms_map(vit: Any, batch: Tensor, tokens: Tensor) -> None:
    """The tokens in reading order, where timm gives the map of a stage by itself."""
    if not hasattr(vit.model, "forward_intermediates"):
        return
    with torch.no_grad():
        (theirs,) = vit.model.forward_intermediates(batch, indices=[vit.stage], norm=False, intermediates_only=True)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    found = vit.layout.of_cells(tokens).mT.unflatten(2, vit.grid)
    torch.testing.assert_close(found, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("family", STAGED)
def test_tokens_stand_in_reading_order(family: str) -> None:
    """With the right edge of the image changed, the first stage changes most in the grid's right columns."""
    vit = opened(family, 0)
    batch = images(vit, 1)
    changed = batch.clone()
    changed[..., -4:] += 2
    with torch.no_grad():
        moved = vit.patches((vit.embed(changed) - vit.embed(batch)).norm(dim=-1))[0].mean(0)
    assert int(moved.argmax()) >= vit.grid[1] - 2


def test_prefix_tokens_travel_beside_the_map() -> None:
    found = {family: (shared(family).prefix, shared(family).pooling) for family in STAGED}
    assert found["pit"] == found["mvitv2-cls"] == found["coat"] == (1, "cls")
    assert found["pit-distilled"] == (2, "cls")
    assert found["hiera"] == found["levit"] == found["nest"] == found["edgenext"] == (0, "avg")


def test_what_comes_before_the_cut_is_not_run() -> None:
    vit = opened("edgenext", 2)
    with torch.no_grad():
        tokens = vit.embed(images(vit, 2))
        before = vit.readout(tokens)
        for name, p in vit.model.named_parameters():
            if name.startswith(("stem", "stages.0", "stages.1", "stages.2")):
                p.fill_(torch.nan)
        assert torch.equal(vit.readout(tokens), before)
        assert vit.embed(images(vit, 2)).isnan().any()


class Skipping(nn.Module):
    """A network whose head also reads its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 2, 2)
        self.head = nn.Linear(16, 5)
        self.feature_info = [
            {"module": "first", "reduction": 4, "num_chs": 8},
            {"module": "second", "reduction": 8, "num_chs": 8},
        ]

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(a)
        return self.head(torch.cat([a.mean((2, 3)), b.mean((2, 3))], 1))


def _skipping(stage: int) -> Anatomy:
    torch.manual_seed(0)
    about = {"name": "skipping", "classes": 5, "channels": 3, "preprocess": Preprocess((32, 32))}
    model = Skipping()
    vit = read_feature_map(model, stage, TimmMapAnatomy, about, stages_of(model))
    vit.check()
    return vit


def test_a_cut_that_something_passes_by_is_refused() -> None:
    assert _skipping(0).grid == (8, 8)
    with pytest.raises(pl.PatchlightError, match=r"other logits than .* put together .*its head also reads the image"):
        _skipping(1)


def test_another_type_and_a_changed_model_are_followed() -> None:
    vit = opened("edgenext", 2, torch.float32)
    batch = images(vit, 2)
    half = vit.view(torch.bfloat16)
    with half.steady():
        logits = half.readout(half.embed(half.place(batch)))
    assert logits.dtype == torch.bfloat16
    before = vit.logits(batch)
    vit.model.stages[3] = nn.Identity()
    with pytest.raises(pl.PatchlightError):
        vit.logits(batch)
    assert before.isfinite().all()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("resnet18", "it is a convolutional network \\(timm's resnet\\)"),
        ("mixer_s16_224", "it mixes patches by MLPs"),
        ("crossvit_tiny_240", "two grids of patches of different sizes"),
        ("tnt_s_patch16_224", "over the pixels in each"),
        ("qwen3_vit_88m_enc", "not logits; 'qwen3_vit_88m' has a classifier"),
    ],
)
def test_what_is_not_opened_says_what_it_is(name: str, told: str) -> None:
    with pytest.raises(pl.PatchlightError, match=f"'{name}' is not a supported Vision Transformer: .*{told}"):
        pl.load(name, pretrained=False)
    assert name not in pl.list_models()
    if name == "resnet18":
        with pytest.raises(pl.PatchlightError, match=f"resnet18 \\(ResNet\\) is not .*{told}.*pl.list_models"):
            pl.wrap(timm.create_model(name))


def test_no_such_stage() -> None:
    with pytest.raises(pl.PatchlightError, match="stage 3 does not exist; pit has stages 0 to 2"):
        opened("pit", 3)


NORMED = ("hiera", "edgenext", "mvitv2-cls")
SILENT = {(family, "hirescam"): "a norm follows its map, so that x g sums to zero in every cell" for family in NORMED}
SILENT |= {
    ("levit", name): "it has too few cells for a map that is not constant" for name in ("pami", "vit-cx", "posterior")
}


@pytest.mark.parametrize("family", NORMED)
def test_a_norm_behind_the_map_silences_hirescam(family: str) -> None:
    vit = shared(family, torch.float64)
    silent, other = (pl.explain(vit, images(vit, 1), name).scores.abs().max() for name in ("hirescam", "gradcam"))
    assert silent < 1e-5 * other


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=() if name in QUICK else pytest.mark.slow)
        for family in STAGED
        for name in contract_names()
    ],
)
def test_contract(family: str, name: str) -> None:
    if (family, name) in SILENT:
        pytest.skip(SILENT[family, name])
    double = shared(family, torch.float64)
    vit = double if family == "levit" else shared(family)  # its hard swish has kinks, where rounding decides
    check_method(name, vit, images(vit, 2), double=double)
