"""Hierarchical models, opened at any stage: the parts are the model, its feature map and its blocks are explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.load import list_models
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import Unsupported
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.rules import RULES
from patchlight.evidence.runner import LayerJob
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from tests import tiny_models
from tests.completeness import totals
from tests.families import CLASSES, FAMILIES, HIERARCHICAL, images, randomise, shared

SMALL = {"depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4), "num_classes": CLASSES}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{family: FAMILIES[family] for family in HIERARCHICAL},
    "swin-wide": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=(64, 96), window_size=4, embed_dim=16, **SMALL
    ),
    "swin-odd": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=(72, 56), window_size=4, embed_dim=16, **SMALL
    ),
    "swinv2": lambda: timm.create_model("swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=16, **SMALL),
    "twins": lambda: timm.create_model("twins_svt_small", img_size=64, embed_dims=(16, 32, 32, 48), **SMALL),
    "twins-pcpvt": lambda: timm.create_model("twins_pcpvt_small", img_size=64, embed_dims=(16, 32, 32, 48), **SMALL),
}


def opened(name: str, dtype: torch.dtype = torch.float32, **about: object) -> Anatomy:
    torch.manual_seed(0)
    return pl.wrap(randomise(MODELS[name]()).to(dtype), name=name, **about)


@pytest.mark.parametrize("name", MODELS)
def test_every_stage_gives_the_model(name: str) -> None:
    for stage in range(4):
        vit = opened(name, torch.float64, stage=stage)
        batch = images(vit, 2)
        tokens = vit.embed(batch)
        with torch.no_grad():
            logits = vit.model(batch)
        assert (logits[0] - logits[1]).abs().max() > 0.1, "the test model does not look at its input"
        torch.testing.assert_close(vit.readout(vit.run(tokens)), logits, atol=1e-10, rtol=1e-10)
        step = 4 * 2**stage
        assert vit.grid == tuple(-(-side // step) for side in vit.preprocess.size)
        assert tokens.shape[:2] == (2, vit.tokens)
        assert (vit.prefix, vit.hierarchical, vit.attention) == (0, True, None)
        assert vit.depth == sum(SMALL["depths"][stage:])
        assert vit.stage_end == SMALL["depths"][stage]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_stand_in_reading_order(name: str) -> None:
    """With the right column of the image changed, the tokens change most in the grid's right column."""
    vit = opened(name, stage=0)
    batch = images(vit, 1)
    changed = batch.clone()
    changed[..., -4:] += 2
    moved = vit.patches((vit.embed(changed) - vit.embed(batch)).norm(dim=-1))[0].mean(0)
    assert int(moved.argmax()) == vit.grid[1] - 1
    assert moved[-1] > 3 * moved[0]


def test_the_stage_is_chosen_by_name_or_count() -> None:
    default, last = opened("swin"), opened("swin", stage=-1)
    assert (default.grid, last.grid) == ((4, 4), (2, 2))
    loaded = pl.load("pvt_v2_b0", pretrained=False, num_classes=CLASSES, stage=1)
    assert (loaded.grid, loaded.preprocess.size, loaded.name) == ((28, 28), (224, 224), "pvt_v2_b0")
    assert {"swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "pvt_v2_b0", "twins_svt_small"} <= {
        *list_models()
    }
    with pytest.raises(pl.PatchlightError, match="stage 4 does not exist; swin has stages 0 to 3"):
        opened("swin", stage=4)
    for family in ("vit", "torchvision"):
        with pytest.raises(pl.PatchlightError, match="has no stages, so stage=2 does not apply"):
            pl.wrap(FAMILIES[family](), stage=2)
    with pytest.raises(pl.PatchlightError, match="no classifier"):
        pl.wrap(timm.create_model("pvt_v2_b0", num_classes=0))


@pytest.mark.parametrize("family", HIERARCHICAL)
def test_what_works_and_what_is_refused(family: str) -> None:
    vit = shared(family)
    batch = images(vit, 2)
    works = {m.name: m for m in pl.list_methods(vit)}
    assert all(works[name].supported for name in ("random", "smoothgrad", "kernel-shap", "hsic"))
    for name in ("rawatt", "rollout", "genatt", "gradsam", "attcat", "ixg", "cat", "decompx", "fullgrad", "gradcam"):
        assert works[name].supported, works[name].reason
    refused = {
        "lrp": "cover plain ViT blocks, and those of",
        "transatt": "cover plain ViT blocks, and those of",
        "tis": "merges patches.*unit='patch' works",
        "atman": "between all tokens",
        "tam": "over one grid of tokens",
        "bt-h": "over one grid of tokens",
        "bt-t": "values of all tokens together",
        "globenc": "values of all tokens together",
        "alti": "values of all tokens together",
    }
    for name, why in refused.items():
        assert works[name].supported is False, name
        with pytest.raises(Unsupported, match=rf"'{name}' does not work.*{why}.*methods that work: .*kernel-shap"):
            pl.explain(vit, batch, name)
    with pytest.raises(Unsupported, match="discard ranks the entries of one matrix"):
        pl.explain(vit, batch, "rollout", discard=0.9)
    with pytest.raises(Unsupported, match="has no CLS token"):
        pl.explain(vit, batch, "genatt", readout="cls")
    for name in ("ixg", "grad", "ixg.libra"):
        assert pl.explain(vit, batch, name, level="pixel").grid == (64, 64)
    assert pl.explain(vit, batch, "tis", unit="patch", samples=12).grid == vit.grid
    assert pl.explain(vit, batch, "posterior", masks="activations", samples=12).grid == vit.grid
    with pytest.raises(Unsupported, match="cannot drop tokens: each of its stages merges"):
        vit.run(vit.embed(batch), keep=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(Unsupported, match="cannot drop tokens"):
        Ablation(vit, batch).logits(TokenSubsets(torch.arange(2), torch.zeros(2, 3, dtype=torch.long)))
    with pytest.raises(Unsupported, match="unit='patch' works"):
        pl.explain(vit, batch, "kernel-shap", unit="token")


@pytest.mark.parametrize("family", HIERARCHICAL)
def test_grad_cam_of_the_feature_map(family: str) -> None:
    """w_k = mean_i g_ik, map_i = sum_k w_k a_ik, at the stage the model is opened behind."""
    vit = shared(family, torch.float64)
    batch = images(vit, 2)
    with torch.no_grad():
        a = vit.run(vit.embed(batch), stop=vit.stage_end)
    logits = vit.readout(vit.run(a.requires_grad_(), vit.stage_end))
    (g,) = torch.autograd.grad(logits[:, 3].sum(), a)
    request = resolve("gradcam")
    _, (found,) = compute(vit, batch, [request], Targets(torch.full((2, 1), 3)), 0)
    expected = (a * g.mean(1, keepdim=True)).sum(-1).view(2, *vit.grid)
    torch.testing.assert_close(found[:, 0], expected.detach(), rtol=1e-10, atol=1e-12)
    for name in ("hirescam", "layercam", "eigencam", "gradcam-aug"):
        assert pl.explain(vit, batch, name).grid == vit.grid
    with pytest.raises(Unsupported, match="no blocks to sum over; 'gradcam' works"):
        pl.explain(vit, batch, "gradcam.plus")
    with pytest.raises(Unsupported, match="no blocks to name"):
        pl.explain(vit, batch, "gradcam", layer=0)


def test_pixel_gradients_are_those_of_the_model() -> None:
    vit = shared("swin", torch.float64)
    batch = images(vit, 2).requires_grad_()
    logits = vit.model(batch)
    (gradient,) = torch.autograd.grad(logits.amax(1).sum(), batch)
    expected = (gradient * batch).sum(1).detach()
    found = pl.explain(vit, batch.detach(), "ixg", level="pixel").scores
    torch.testing.assert_close(found, expected.float(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_rule_at_the_feature_map(name: str) -> None:
    """HiResCAM behind the last stage under libra, with the biases behind it, is the logit."""
    vit = opened(name, torch.float64, stage=-1)
    batch, target = images(vit, 2), Targets(torch.tensor([[3], [5]]))
    _, (cam,) = compute(vit, batch, [resolve("hirescam.libra")], target, 0)
    biases = LayerJob(lambda b: b.bias, frozenset({"bias"}), (0,))
    seen = run_pass(vit, batch, target, rule=RULES["libra"], jobs=[biases])
    rest = sum(t.reshape(2, -1).sum(1) for t in (seen.end().bias, seen.end().scalar_bias) if t is not None)
    torch.testing.assert_close(cam.sum((1, 2, 3)) + rest, seen.scores[:, 0], rtol=1e-10, atol=1e-10)


def test_what_swin_v2_and_the_pooling_ones_do_not_show() -> None:
    for name, why in (("swinv2", "norms follow"), ("pvtv2", "pooled tokens"), ("twins", "pooled tokens")):
        vit = opened(name)
        with pytest.raises(Unsupported, match=f"tokens between attention and MLP are not available in {name}.*{why}"):
            pl.explain(vit, images(vit, 1), "tokentm")
    assert pl.explain(opened("swin"), images(opened("swin"), 1), "tokentm").grid == (4, 4)


@pytest.mark.parametrize("name", ["swin", "pvtv2", "twins"])
def test_a_neuron_of_any_stage(name: str) -> None:
    """Neurons behind every block, of its own width, are explained on the grid of the stage; libra stays complete."""
    vit = opened(name, torch.float64, stage=1)
    batch = images(vit, 2)
    for block in range(1, vit.depth + 1):
        width = vit.run(vit.embed(batch), stop=block).shape[-1]
        asked = vit.ask(pl.heads.Neurons(block=block, channels=[3, width - 1], pool="max"))
        torch.testing.assert_close(*totals(asked, batch), rtol=1e-10, atol=1e-10)
        for method in ("genatt", "rollout", "ixg.plus", "gradcam"):
            assert pl.explain(asked, batch, method, target=1).grid == vit.grid
        with pytest.raises(pl.PatchlightError, match=f"have 0 to {width - 1}"):
            vit.ask(pl.heads.Neurons(block=block, channels=[width]))


def test_a_token_that_joins_the_patches_later_has_no_place_in_the_map() -> None:
    """PVT's last block has a CLS token and four patches, each merged from 2 x 2 of the first block's."""
    vit, batch = tiny_models.opened("PVT"), tiny_models.inputs("PVT")
    with vit.settled(), vit.steady():
        first = vit.embed(batch).detach().requires_grad_()
        last = vit.merge(1, vit.block(0, first))
        logit = vit.readout(vit.block(1, last))[:, 3].sum()
        values = [(x * g).sum(2) for x, g in zip((first, last), torch.autograd.grad(logit, (first, last)), strict=True)]
    shares = values[1][:, 1:].view(2, 2, 2) / 4
    expected = values[0].view(2, 4, 4) + shares.repeat_interleave(2, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(pl.explain(vit, batch, "cat", target=3).scores, expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["PVT", "CvT"])
def test_the_default_method_works_where_a_token_joins_later(name: str) -> None:
    vit = tiny_models.opened(name)
    assert pl.explain(vit, tiny_models.inputs(name)).scores.shape == (2, *vit.grid)


def effect_of_replacing(model: Any, hidden: Tensor, hides: bool) -> float:
    """How far the logits move if the `hidden` cells [h,w] of a Swin's stage show another image.

    `hides` sets the keys of these cells to minus infinity in every window; of a coarser stage, those of cells that are
    hidden as a whole.
    """

    def hide(block: Any) -> Callable[..., Any]:
        here = block.input_resolution
        finer = here[0] >= len(hidden)
        cells = (
            F.interpolate(hidden[None, None].float(), here)
            if finer
            else 1 - F.max_pool2d(1 - hidden[None].float(), 2)[None]
        )
        keys = window_partition(cells.view(1, *here, 1), block.window_size).flatten(1).bool()
        mask = torch.zeros(*keys.shape, keys.shape[1]).masked_fill(keys[:, None], -1e9)  # some windows are hidden whole
        return lambda _, args, named: (args, {"mask": mask})

    shown, other = images(shared("swin"), 2).split(1)
    pixels = F.interpolate(hidden[None, None].float(), shown.shape[2:])
    blocks = [block for stage in model.layers for block in stage.blocks] if hides else []
    hooks = [block.attn.register_forward_pre_hook(hide(block), with_kwargs=True) for block in blocks]
    with torch.no_grad():
        before, after = model(torch.cat([shown, torch.where(pixels > 0, other, shown)]))
    for hook in hooks:
        hook.remove()
    return float((after - before).norm())


def test_patches_whose_keys_are_hidden_in_every_window_still_reach_the_output() -> None:
    """Why tokens of a Swin are not removed: merging and the mean at the end read hidden patches, too."""
    model, shares = FAMILIES["swin"]().eval(), []
    for seed in range(20):
        hidden = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
        shares.append(effect_of_replacing(model, hidden, True) / effect_of_replacing(model, hidden, False))
    assert min(shares) > 0.3
