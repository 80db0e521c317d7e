"""Models that are almost, but not quite, what they look like: explained correctly or refused in one sentence."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import RmsNorm
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.passes import run_pass
from patchlight.methods.requests import resolve
from patchlight.testing import spearman
from tests.completeness import totals
from tests.dropping import assert_dropping_is_masking
from tests.families import CLASSES, build, images, shared
from tests.helpers import assert_near, quick_map, refuses, tiny, tiny_timm, working_methods

DESCRIPTION: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "cls", "heads": 4, "classes": CLASSES}
DESCRIPTION["preprocess"] = pl.Preprocess((64, 64))


class Scaled(VisionTransformer):
    """Normalises in its forward."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return super().forward((x - 0.5) / 0.25)


class Prompted(VisionTransformer):
    """Prompt tuning: two learned tokens join before the blocks."""

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tokens = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        prompts = torch.full((len(x), 2, tokens.shape[2]), 0.5)
        return self.norm(self.blocks(torch.cat([tokens, prompts], 1)))


def test_a_subclass_with_another_forward() -> None:
    """What it does before its blocks is part of the model; tokens that join the patches there are not located."""
    model = tiny(Scaled)
    vit, batch = pl.wrap(model), images(pl.wrap(tiny()), 2)
    with torch.no_grad():
        assert_near(vit.readout(vit.run(vit.embed(batch))), model(batch), 1e-6)
    refuses(("cannot be located",), pl.wrap, tiny(Prompted))


def test_a_hook_that_changes_the_output() -> None:
    """A hook is part of the model, also one that is registered later."""
    model = tiny()
    vit, batch = pl.wrap(model), images(pl.wrap(tiny()), 2)
    before = quick_map(vit, batch, "ixg", target=1)
    model.register_forward_hook(lambda module, given, out: out * 2 + 1)
    with torch.no_grad(), vit.steady():
        assert_near(vit.readout(vit.run(vit.embed(batch))), model(batch), 1e-6)
    assert_near(quick_map(vit, batch, "ixg", target=1), 2 * before, 1e-6)


def test_a_described_model_that_is_described_wrongly() -> None:
    model = tiny()
    parts = {"embed": lambda x: model._pos_embed(model.patch_embed(x)), "blocks": model.blocks}
    parts["readout"] = lambda tokens: model.head(model.norm(tokens).mean(1))
    refuses("differ by", pl.wrap, model, **parts, **DESCRIPTION)


def grad_cam_by_hand(model: Any, batch: Tensor, place: nn.Module, target: int) -> Tensor:
    """Grad-CAM of the output of a module: ReLU-less sum_k mean_i(g_ik) a_ik over the patches."""
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, given: Any, out: Tensor) -> None:
        kept["a"] = out
        out.retain_grad()

    handle = place.register_forward_hook(keep)
    model.zero_grad()
    for p in model.parameters():
        p.requires_grad_(True)
    model(batch)[:, target].sum().backward()
    handle.remove()
    a, g = kept["a"].detach(), kept["a"].grad
    assert g is not None
    prefix = a.shape[1] - 16
    weights = g[:, prefix:].mean(1, keepdim=True)
    return (a[:, prefix:] * weights).sum(-1).view(-1, 4, 4)


@pytest.mark.parametrize("norm", [RmsNorm, partial(nn.LayerNorm, elementwise_affine=False)])
def test_cams_read_unusual_norms(norm: Callable[..., nn.Module]) -> None:
    model = tiny(norm_layer=norm)
    vit = pl.wrap(copy.deepcopy(model))
    batch = images(vit, 2)
    by_hand = grad_cam_by_hand(model, batch, model.blocks[-1].norm1, 3)
    assert_near(quick_map(vit, batch, "gradcam", target=3, prefix="exclude"), by_hand)
    for name in ("alti", "score-cam", "tokentm", "vit-cx"):
        assert quick_map(vit, batch, name).isfinite().all()


def test_differential_attention() -> None:
    names = [n for n in timm.list_models("vit_d*") if n.startswith(("vit_dwee", "vit_dlittle"))]
    assert names
    for name in names[:2]:
        model = tiny_timm(name, depth=2)
        vit = pl.wrap(model)
        batch = images(vit, 2)
        refuses("more than one softmax", pl.explain, vit, batch, "rollout")
        assert "genatt" not in [m.name for m in pl.list_methods(vit) if m.supported]
        assert quick_map(vit, batch, "ixg").isfinite().all()


def test_attention_pooling_with_a_cls_query() -> None:
    vit = pl.wrap(tiny(global_pool="prr"))
    batch = images(vit, 2)
    seen = run_pass(vit, batch)
    with torch.no_grad():
        x = vit.net.norm(vit.run(vit.embed(batch)))
        heads = x.unflatten(-1, (4, 12)).transpose(1, 2)
        attention = (heads @ heads.mT / 12**0.5).softmax(-1)
    assert_near(vit.pool_row(seen.logits, seen.pool), attention[:, :, 0].mean(1))


def test_half_precision_models() -> None:
    whole = tiny()
    for dtype in (torch.float16, torch.bfloat16):
        half = copy.deepcopy(whole).to(dtype)
        vit, wide = pl.wrap(half), pl.wrap(copy.deepcopy(half).float())
        batch = images(wide, 2).to(dtype)
        for name in working_methods(vit):
            target = [1, 2]
            found = quick_map(vit, batch, name, target=target)
            assert found.isfinite().all(), f"{name} in {dtype}"
            if "precision" in resolve(name).settings:
                continue  # scored by the model as it is, in its own precision
            expected = quick_map(wide, batch.float(), name, target=target)
            ranks = [spearman(a, b) for a, b in zip(found, expected, strict=True)]
            assert min(ranks) > 0.999, f"{name} in {dtype}: rank correlation {min(ranks):.3f}"
        assert all(p.dtype == dtype for p in half.parameters())


@pytest.mark.parametrize(
    ("options", "grid", "extent"),
    [
        ({}, (4, 4), (64, 64)),  # the size is not a multiple of the patch
        ({"dynamic_img_size": True, "dynamic_img_pad": True}, (5, 5), (80, 80)),  # padded to whole patches
    ],
)
def test_the_grid_lies_where_the_pixels_are(
    options: dict[str, Any], grid: tuple[int, int], extent: tuple[int, int]
) -> None:
    """A changed pixel moves the token of its own cell most."""
    vit = pl.wrap(tiny(img_size=70, **options))
    assert (vit.grid, vit.extent) == (grid, extent)
    batch = images(vit, 1)
    rows, columns = extent[0] / grid[0], extent[1] / grid[1]
    with torch.no_grad():
        before = vit.embed(batch)
        for y, x in ((0, 0), (grid[0] - 1, grid[1] - 1)):
            changed = batch.clone()
            top, left = int(y * rows), int(x * columns)
            changed[..., top : top + 3, left : left + 3] += 3
            moved = vit.patches((vit.embed(changed) - before).norm(dim=-1))[0]
            assert divmod(int(moved.argmax()), grid[1]) == (y, x)
    att = pl.explain(vit, batch, "rollout")
    up = att.upsample(upsampling="nearest")
    assert up.shape[-2:] == vit.preprocess.size
    bottom, right = min(extent[0], 70), min(extent[1], 70)
    assert torch.equal(up[0, bottom - 1, right - 1], att.scores[0, -1, -1])
    assert torch.equal(up[0, int(rows) - 1, int(columns) - 1], att.scores[0, 0, 0])
    assert not torch.equal(up[0, int(rows), 0], att.scores[0, 0, 0])


def test_occlusion_hides_whole_patches_where_they_lie() -> None:
    vit = pl.wrap(tiny(img_size=70))
    batch = images(vit, 1)
    found = pl.explain(vit, batch, "occlusion", target=2, score="logit", level="pixel", window=16, stride=16, fill=0.0)
    with torch.no_grad():
        base = vit.model(batch)[0, 2]
        hidden = batch.clone()
        hidden[..., 16:32, 32:48] = 0
        drop = base - vit.model(hidden)[0, 2]
    up = found.upsample(upsampling="nearest")[0]
    assert_near(up[20, 40], drop, 1e-3)


def test_vitamin() -> None:
    vit = pl.wrap(timm.create_model("vitamin_small_224", img_size=64, num_classes=CLASSES).eval())
    assert vit.embed(torch.zeros(1, 3, 64, 64)).shape[1] == vit.tokens == vit.grid[0] * vit.grid[1] + vit.prefix


def _libra_rest(vit: Anatomy) -> float:
    """How much of the logit libra's terms miss."""
    sums, score = totals(vit, images(vit, 2))
    return float((sums - score).abs().max())


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class Laplace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (1.0 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5)))


ACTIVATIONS = [nn.Mish, nn.Hardswish, nn.ELU, nn.Softplus, nn.Sigmoid, nn.Tanh, Squared, Laplace]
ACTIVATIONS += [nn.GELU, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.CELU, nn.Hardsigmoid, nn.PReLU]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_libra_is_complete_with_every_activation(kind: Callable[[], nn.Module]) -> None:
    assert _libra_rest(pl.wrap(tiny(act_layer=kind).double())) < 1e-10


def test_lora_around_qkv_and_mlp() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny()
    adapted = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=4, lora_alpha=32, target_modules=["qkv", "attn.proj", "fc1", "fc2"])
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    adapted = adapted.eval().double()
    merged = pl.wrap(copy.deepcopy(adapted).merge_and_unload().eval().double())
    vit, plain = pl.wrap(adapted), pl.wrap(base.double())
    batch = images(vit, 2)
    for name in ("lrp", "partial-lrp", "transatt", "alti", "globenc", "attin", "tokentm", "bt-t", "genatt"):
        found = quick_map(vit, batch, name, target=1)
        assert_near(found, quick_map(merged, batch, name, target=1), 1e-5)
        other = quick_map(plain, batch, name, target=1)
        assert float((found - other).abs().max() / other.abs().max()) > 0.01, f"{name} does not see the adapter"


def test_another_head_put_on() -> None:
    model = tiny()
    model.head = nn.Linear(48, 8)
    vit = pl.wrap(model)
    assert vit.classes == 8
    assert vit.labels is None
    pl.explain(vit, images(vit, 1), "rollout", target=7)
    refuses("classes 0 to 7", pl.explain, vit, images(vit, 1), "rollout", target=8)
    bare = tiny(num_classes=0)
    bare.head = nn.Linear(48, 5)
    assert pl.wrap(bare).classes == 5
    refuses("no classifier", pl.wrap, tiny(num_classes=0))


def test_a_head_put_on_after_wrapping() -> None:
    model = tiny()
    vit = pl.wrap(model)
    model.head = nn.Linear(48, 3)
    found = pl.explain(vit, images(vit, 2), "ixg")
    assert vit.classes == 3
    assert torch.equal(found.target, pl.wrap(model).logits(images(vit, 2)).argmax(1))
    model.head = nn.Linear(48, 9)
    assert pl.explain(vit, images(vit, 2), "ixg", target=8).labels == ("class 8", "class 8")


def test_one_output_exchanged_for_several() -> None:
    model = tiny(num_classes=1)
    vit = pl.wrap(model)
    assert vit.sigmoid
    model.head = nn.Linear(48, 5)
    pl.explain(vit, images(vit, 1), "ixg")
    assert not vit.sigmoid
    assert_near(vit.probabilities(vit.logits(images(vit, 1))).sum(1), torch.ones(1))


@pytest.mark.parametrize(("name", "settings"), [("ixg", {}), ("occlusion", {"precision": "bf16", "unit": "token"})])
def test_weights_changed_in_any_way_are_noticed(name: str, settings: dict[str, Any]) -> None:
    model = tiny()
    vit = pl.wrap(model)
    batch = images(vit, 2)
    proj = model.blocks[1].attn.proj.weight
    for i, change in enumerate(
        (
            lambda: model.head.weight.data.mul_(-1),
            lambda: setattr(proj, "data", proj.data.flip(0)),
            lambda: setattr(model.blocks[0].mlp, "act", nn.Tanh()),
            lambda: setattr(model.norm, "weight", nn.Parameter(model.norm.weight.detach().flip(0))),
            lambda: setattr(model.blocks[2].norm1, "eps", 0.5),
            lambda: model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True),
        )
    ):
        before = quick_map(vit, batch, name, target=1, **settings)
        change()
        after = quick_map(vit, batch, name, target=1, **settings)
        assert not torch.equal(before, after), f"change {i} is not noticed"
        assert torch.equal(after, quick_map(pl.wrap(model), batch, name, target=1, **settings))


@pytest.mark.parametrize("block", [ParallelScalingBlock, ParallelThingsBlock])
def test_parallel_blocks(block: type[nn.Module]) -> None:
    model = tiny(block_fn=block).double()
    vit = pl.wrap(model)
    batch = images(vit, 2)
    with torch.no_grad():
        assert_near(vit.logits(batch), model(batch), 1e-10)
    assert _libra_rest(vit) < 1e-10
    assert quick_map(vit, batch, "ixg.plus.libra").isfinite().all()
    if block is ParallelThingsBlock:
        refuses("more than one softmax", pl.explain, vit, batch, "genatt")


def test_beit_with_a_shared_bias_drops_tokens() -> None:
    for unfused in (False, True):
        model = tiny_timm("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True).double()
        for block in model.blocks:
            block.attn.fused_attn = not unfused
        vit = pl.wrap(model)
        assert_dropping_is_masking(vit, images(vit, 2))


def _right_or_refused(vit: Anatomy, batch: Tensor, name: str) -> None:
    try:
        found = quick_map(vit, batch, name)
    except pl.PatchlightError:
        return
    assert found.isfinite().all(), name


def test_a_model_of_one_patch() -> None:
    vit = pl.wrap(tiny(img_size=16))
    batch = images(vit, 2)
    for name in working_methods(vit):
        _right_or_refused(vit, batch, name)


class Grouped(nn.Module):
    """Attention whose four heads of queries share two of keys and values."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.kv, self.proj = nn.Linear(48, 48), nn.Linear(48, 48), attention.proj

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 12)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 12)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.proj(out.transpose(1, 2).flatten(2))


def test_grouped_query_attention() -> None:
    torch.manual_seed(0)
    model = tiny()
    for block in model.blocks:
        block.attn = Grouped(block.attn)
    vit = pl.wrap(model.double())
    batch = images(vit, 2)
    with pl.trace(vit.model, batch, target=1) as seen:
        assert seen.attention[0].shape == (2, 4, 17, 17)
        assert_near(seen.attention[0].sum(-1), torch.ones(2, 4, 17).double(), 1e-10)
    assert quick_map(vit, batch, "genatt").isfinite().all()
    assert _libra_rest(vit) < 1e-10


def test_quantised_linear_maps() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear}, dtype=torch.qint8)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    for name in working_methods(vit):
        _right_or_refused(vit, batch, name)
    refuses(("no gradient flows", "quantised"), pl.explain, vit, batch, "genatt")
    assert quick_map(vit, batch, "rise").isfinite().all()


def test_a_model_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny()
    plain = tiny()
    batch = images(pl.wrap(plain), 2)
    for name in ("genatt", "ixg", "transatt", "tis", "occlusion"):
        assert_near(quick_map(model, batch, name, target=1), quick_map(plain, batch, name, target=1), 1e-5)


def test_anatomies_can_be_pickled() -> None:
    for family in ("swin", "pvtv2", "vit"):
        vit = build(family)
        batch = images(vit, 2)
        back = pickle.loads(pickle.dumps(vit))
        assert torch.equal(back.logits(batch), vit.logits(batch))
        again = copy.deepcopy(vit)
        assert again.model is not vit.model
        assert torch.equal(again.logits(batch), vit.logits(batch))


def test_several_modules_that_share_a_weight() -> None:
    model = tiny()
    model.blocks[1] = model.blocks[0]
    vit = pl.wrap(model)
    batch = images(vit, 2)
    with torch.no_grad():
        assert_near(vit.logits(batch), model(batch), 1e-5)
    assert quick_map(vit, batch, "gradcam", layer="blocks[1].norm1").isfinite().all()


def test_weight_norm_and_parametrised_layers() -> None:
    model = tiny()
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model.blocks[1].mlp.fc1)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    assert_near(quick_map(vit, batch, "transatt", target=1), quick_map(tiny(), batch, "transatt", target=1), 1e-4)


def test_a_model_or_its_blocks_compiled() -> None:
    """What `torch.compile` left behind runs the original; the twin must not."""
    plain, whole, blocks = tiny(), tiny(drop_rate=0.5), tiny(drop_rate=0.5)
    batch = images(pl.wrap(plain), 2)
    whole.compile(backend="eager")
    for i, block in enumerate(blocks.blocks):
        blocks.blocks[i] = torch.compile(block, backend="eager")
    for model in (whole, blocks, torch.compile(whole, backend="eager")):
        model.train()
        for name in ("gradcam", "genatt", "occlusion"):
            assert_near(quick_map(model, batch, name, target=1), quick_map(plain, batch, name, target=1), 1e-5)
        assert all(m.training for m in model.modules())


def test_a_view_follows_the_anatomy() -> None:
    """What is set on an anatomy after it was used in half precision holds there too."""
    vit = pl.wrap(tiny().half())
    batch = images(vit, 1)
    quick_map(vit, batch, "ixg")
    vit.preprocess = pl.Preprocess((64, 64), mean=(0.1, 0.2, 0.3))
    assert vit.wide().preprocess.mean == (0.1, 0.2, 0.3)


def test_functions_wrapped_in_a_partial() -> None:
    """They run the user's own modules all the same."""
    model = tiny(drop_rate=0.5)

    def embed(x: Tensor, scale: float) -> Tensor:
        return model.norm_pre(model._pos_embed(model.patch_embed(x * scale)))

    parts = {"embed": partial(embed, scale=1.0), "blocks": model.blocks}
    vit = pl.wrap(model, **parts, readout=lambda tokens: model.forward_head(model.norm(tokens)), **DESCRIPTION)
    batch = images(vit, 2)
    model.train()
    assert_near(quick_map(vit, batch, "ixg", target=1), quick_map(tiny(), batch, "ixg", target=1), 1e-5)
    assert quick_map(vit, batch, "rise", target=1, precision="bf16").isfinite().all()


def test_a_part_in_torchscript() -> None:
    model = tiny()
    model.blocks[0].mlp.act = torch.jit.script(nn.GELU())
    refuses("TorchScript", pl.wrap, model)


def test_a_model_that_is_let_go() -> None:
    """Nothing of ours keeps a model, or a copy of its weights, until the garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        for name in ("vit_tiny_patch16_224", "beit_base_patch16_224"):
            model = tiny_timm(name)
            quick_map(model, torch.zeros(1, 3, 64, 64), "occlusion", unit="token", precision="bf16")
            gone = weakref.ref(model)
            del model
            assert gone() is None, f"{name} is still there"
    finally:
        gc.enable()


def test_half_of_a_model_shared_with_another() -> None:
    """Two models around the same blocks, explained in turn, stay what they are."""
    first, second = tiny(), tiny()
    second.blocks = first.blocks
    second.head = nn.Linear(48, 3)
    batch = images(shared("vit"), 2)
    before = quick_map(first, batch, "genatt", target=1)
    quick_map(second, batch, "genatt", target=1)
    assert torch.equal(quick_map(first, batch, "genatt", target=1), before)
