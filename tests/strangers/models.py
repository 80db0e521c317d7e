"""Rows: models that are almost, but not quite, what they look like."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import patchlight as pl
from patchlight.anatomy.base import Anatomy
from patchlight.evidence.passes import run_pass
from patchlight.methods.base import METHODS
from patchlight.methods.requests import refusal, resolve
from patchlight.testing import spearman
from tests.completeness import totals
from tests.families import CLASSES, build, images, randomise, shared
from tests.strangers.table import refuses, row

SMALL: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 4}


def tiny(**options: Any) -> Any:
    """A small plain ViT with nothing left at a degenerate start."""
    torch.manual_seed(0)
    return randomise(VisionTransformer(**{**SMALL, "num_classes": CLASSES, **options}))


def by_name(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {**SMALL, "num_classes": CLASSES, **options}
    return randomise(timm.create_model(name, **{k: v for k, v in given.items() if v is not None}))


def quick(name: str) -> dict[str, Any]:
    return dict(resolve(name).method.quick)


def quietly(vit: Any, batch: Tensor, name: str, **options: Any) -> Tensor:
    """The map by a method in its quick settings, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.explain(vit, batch, name, **{**quick(name), **options}).scores


def working(vit: Anatomy) -> list[str]:
    """The methods that a model supports; one that needs a trained explainer is none."""
    return [name for name in sorted(METHODS) if refusal(resolve(name, quick(name)), vit) is None]


def close(a: Tensor, b: Tensor, limit: float = 1e-4) -> None:
    worst = float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
    assert worst <= limit, f"they differ by {worst:.1e} of the maximum"


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


@row
def a_subclass_that_normalises_in_its_forward(folder: Path) -> None:
    torch.manual_seed(0)
    model = randomise(Scaled(**SMALL, num_classes=CLASSES))
    refuses(lambda: pl.wrap(model), "differ by", "describe it by hand")
    refuses(lambda: pl.explain(model, torch.zeros(1, 3, 64, 64), "rollout"), "differ by")


@row
def prompt_tuning(folder: Path) -> None:
    torch.manual_seed(0)
    refuses(lambda: pl.wrap(randomise(Prompted(**SMALL, num_classes=CLASSES))), "differ by")


@row
def a_hook_that_changes_the_output(folder: Path) -> None:
    model = tiny()
    handle = model.register_forward_hook(lambda module, given, out: out * 2 + 1)
    refuses(lambda: pl.wrap(model), "a hook")
    handle.remove()
    vit = pl.wrap(model)
    model.register_forward_hook(lambda module, given, out: out * 2 + 1)
    for _ in range(2):
        refuses(lambda: pl.explain(vit, torch.zeros(1, 3, 64, 64), "rollout"), "a hook")


@row
def a_replaced_forward(folder: Path) -> None:
    model = tiny()
    plain = model.forward
    model.forward = lambda x: plain(x).flip(1)
    refuses(lambda: pl.wrap(model), "differ by")


@row
def a_described_model_that_is_described_wrongly(folder: Path) -> None:
    model = tiny()

    def read(tokens: Tensor) -> Tensor:
        return model.head(model.norm(tokens).mean(1))  # type: ignore[no-any-return]

    about: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "cls", "heads": 4, "classes": CLASSES}
    about["preprocess"] = pl.Preprocess((64, 64))
    refuses(
        lambda: pl.wrap(model, embed=lambda x: model._pos_embed(model.patch_embed(x)), blocks=model.blocks,
                        readout=read, **about),
        "differ by",
    )  # fmt: skip


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


def _cams_read_the_norm(model: Any) -> None:
    vit = pl.wrap(copy.deepcopy(model))
    batch = images(vit, 2)
    by_hand = grad_cam_by_hand(model, batch, model.blocks[-1].norm1, 3)
    found = quietly(vit, batch, "gradcam", target=3, prefix="exclude")
    close(found, by_hand)
    for name in ("alti", "score-cam", "tokentm", "vit-cx"):
        assert quietly(vit, batch, name).isfinite().all()


@row
def a_model_with_rms_norms(folder: Path) -> None:
    from timm.layers import RmsNorm

    _cams_read_the_norm(tiny(norm_layer=RmsNorm))


@row
def a_model_with_norms_without_weights(folder: Path) -> None:
    _cams_read_the_norm(tiny(norm_layer=partial(nn.LayerNorm, elementwise_affine=False)))


@row
def differential_attention(folder: Path) -> None:
    names = [n for n in timm.list_models("vit_d*") if n.startswith(("vit_dwee", "vit_dlittle"))]
    assert names
    for name in names[:2]:
        model = by_name(name, depth=2)
        vit = pl.wrap(model)
        batch = images(vit, 2)
        refuses(lambda vit=vit, batch=batch: pl.explain(vit, batch, "rollout"), "more than one softmax")  # type: ignore[misc]
        assert "genatt" not in [m.name for m in pl.list_methods(vit) if m.supported]
        assert quietly(vit, batch, "ixg").isfinite().all()


@row
def attention_pooling_with_a_cls_query(folder: Path) -> None:
    vit = pl.wrap(tiny(global_pool="prr"))
    batch = images(vit, 2)
    seen = run_pass(vit, batch)
    with torch.no_grad():
        x = vit.net.norm(vit.run(vit.embed(batch)))  # type: ignore[operator]
        heads = x.unflatten(-1, (4, 12)).transpose(1, 2)
        attention = (heads @ heads.mT / 12**0.5).softmax(-1)
    close(vit.pool_row(seen.logits, seen.pool), attention[:, :, 0].mean(1))


@row
def half_precision_models(folder: Path) -> None:
    whole = tiny()
    for dtype in (torch.float16, torch.bfloat16):
        half = copy.deepcopy(whole).to(dtype)
        vit, wide = pl.wrap(half), pl.wrap(copy.deepcopy(half).float())
        batch = images(wide, 2).to(dtype)
        for name in working(vit):
            target = [1, 2]
            found = quietly(vit, batch, name, target=target)
            assert found.isfinite().all(), f"{name} in {dtype}"
            if "precision" in resolve(name).settings:
                continue  # scored by the model as it is, in its own precision
            expected = quietly(wide, batch.float(), name, target=target)
            ranks = [spearman(a, b) for a, b in zip(found, expected, strict=True)]
            assert min(ranks) > 0.999, f"{name} in {dtype}: rank correlation {min(ranks):.3f}"
        assert all(p.dtype == dtype for p in half.parameters())


def _covers(model: Any, grid: tuple[int, int], extent: tuple[int, int]) -> None:
    """What the grid says agrees with what the pixels do: a changed pixel moves the token of its own cell most."""
    vit = pl.wrap(model)
    assert vit.grid == grid, f"grid {vit.grid}"
    assert vit.extent == extent, f"extent {vit.extent}"
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
    size = vit.preprocess.size
    bottom, right = min(extent[0], size[0]), min(extent[1], size[1])
    assert torch.equal(up[0, bottom - 1, right - 1], att.scores[0, -1, -1])
    assert torch.equal(up[0, int(rows) - 1, int(columns) - 1], att.scores[0, 0, 0])
    assert not torch.equal(up[0, int(rows), 0], att.scores[0, 0, 0])


@row
def a_size_that_is_no_multiple_of_the_patch(folder: Path) -> None:
    _covers(tiny(img_size=70), (4, 4), (64, 64))


@row
def images_that_are_padded_to_whole_patches(folder: Path) -> None:
    _covers(tiny(img_size=70, dynamic_img_size=True, dynamic_img_pad=True), (5, 5), (80, 80))


@row
def occlusion_hides_whole_patches_where_they_lie(folder: Path) -> None:
    vit = pl.wrap(tiny(img_size=70))
    batch = images(vit, 1)
    found = pl.explain(vit, batch, "occlusion", target=2, score="logit", level="pixel", window=16, stride=16, fill=0.0)
    with torch.no_grad():
        base = vit.model(batch)[0, 2]
        hidden = batch.clone()
        hidden[..., 16:32, 32:48] = 0
        drop = base - vit.model(hidden)[0, 2]
    up = found.upsample(upsampling="nearest")[0]
    close(up[20, 40], drop, 1e-3)


@row
def hybrids_and_vitamin_through_wrap(folder: Path) -> None:
    for name in ("vit_tiny_r_s16_p8_224", "vitamin_small_224"):
        model = timm.create_model(name, img_size=64, num_classes=CLASSES, depth=2 if "vit_tiny" in name else None)
        vit = pl.wrap(model.eval())
        tokens = vit.embed(torch.zeros(1, 3, 64, 64))
        assert tokens.shape[1] == vit.tokens
        assert vit.grid[0] * vit.grid[1] + vit.prefix == vit.tokens


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


@row
def libra_with_every_activation(folder: Path) -> None:
    kinds: list[Callable[[], nn.Module]] = [nn.Mish, nn.Hardswish, nn.ELU, nn.Softplus, nn.Sigmoid, nn.Tanh, Squared]
    kinds += [Laplace, nn.GELU, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.CELU, nn.Hardsigmoid, nn.PReLU]
    for kind in kinds:
        vit = pl.wrap(tiny(act_layer=kind).double())
        assert _libra_rest(vit) < 1e-10, f"{kind} is incomplete"


@row
def lora_around_qkv_and_mlp(folder: Path) -> None:
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
        found = quietly(vit, batch, name, target=1)
        close(found, quietly(merged, batch, name, target=1), 1e-5)
        other = quietly(plain, batch, name, target=1)
        assert float((found - other).abs().max() / other.abs().max()) > 0.01, f"{name} does not see the adapter"


@row
def another_head_put_on(folder: Path) -> None:
    model = tiny()
    model.head = nn.Linear(48, 8)
    vit = pl.wrap(model)
    assert vit.classes == 8
    assert vit.labels is None
    pl.explain(vit, images(vit, 1), "rollout", target=7)
    refuses(lambda: pl.explain(vit, images(vit, 1), "rollout", target=8), "classes 0 to 7")
    bare = tiny(num_classes=0)
    bare.head = nn.Linear(48, 5)
    assert pl.wrap(bare).classes == 5
    refuses(lambda: pl.wrap(tiny(num_classes=0)), "no classifier")


@row
def a_head_put_on_after_wrapping(folder: Path) -> None:
    model = tiny()
    vit = pl.wrap(model)
    model.head = nn.Linear(48, 3)
    found = pl.explain(vit, images(vit, 2), "ixg")
    assert vit.classes == 3
    assert torch.equal(found.target, pl.wrap(model).logits(images(vit, 2)).argmax(1))
    model.head = nn.Linear(48, 9)
    assert pl.explain(vit, images(vit, 2), "ixg", target=8).labels == ("class 8", "class 8")


def _changes(model: Any) -> list[Callable[[], object]]:
    proj, norm = model.blocks[1].attn.proj.weight, model.blocks[2].norm1
    return [
        lambda: model.head.weight.data.mul_(-1),
        lambda: setattr(proj, "data", proj.data.flip(0)),
        lambda: setattr(model.blocks[0].mlp, "act", nn.Tanh()),
        lambda: setattr(model.norm, "weight", nn.Parameter(model.norm.weight.detach().flip(0))),
        lambda: setattr(norm, "eps", 0.5),
        lambda: model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()}, assign=True),
    ]


@row
def weights_changed_in_any_way_are_seen(folder: Path) -> None:
    choices: list[tuple[str, dict[str, Any]]] = [("ixg", {}), ("occlusion", {"precision": "bf16", "unit": "token"})]
    for name, settings in choices:
        model = tiny()
        vit = pl.wrap(model)
        batch = images(vit, 2)
        for i, change in enumerate(_changes(model)):
            before = quietly(vit, batch, name, target=1, **settings)
            change()
            after = quietly(vit, batch, name, target=1, **settings)
            assert not torch.equal(before, after), f"{name} does not see change {i}"
            assert torch.equal(after, quietly(pl.wrap(model), batch, name, target=1, **settings))


@row
def parallel_blocks(folder: Path) -> None:
    from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock

    for block in (ParallelScalingBlock, ParallelThingsBlock):
        model = tiny(block_fn=block).double()
        vit = pl.wrap(model)
        batch = images(vit, 2)
        with torch.no_grad():
            close(vit.logits(batch), model(batch), 1e-10)
        assert _libra_rest(vit) < 1e-10
        assert quietly(vit, batch, "ixg.plus.libra").isfinite().all()
    refuses(lambda: pl.explain(vit, batch, "genatt"), "more than one softmax")


@row
def beit_with_a_shared_bias_drops_tokens(folder: Path) -> None:
    from tests.anatomy.test_families import MaskKeys

    for unfused in (False, True):
        model = by_name("beit_base_patch16_224", use_rel_pos_bias=False, use_shared_rel_pos_bias=True).double()
        for block in model.blocks:
            block.attn.fused_attn = not unfused
        vit = pl.wrap(model)
        batch = images(vit, 2)
        keep = torch.tensor([[0, 3, 5, 9], [1, 2, 14, 15]])
        with torch.no_grad():
            tokens = vit.embed(batch)
            dropped = vit.readout(vit.run(tokens, keep=keep))
            with MaskKeys(keep, vit):
                full = vit.run(tokens)
            close(dropped, vit.readout(vit.gather(full, keep)), 1e-10)


def _right_or_refused(vit: Anatomy, batch: Tensor, name: str) -> None:
    try:
        found = quietly(vit, batch, name)
    except pl.PatchlightError:
        return
    assert found.isfinite().all(), name


@row
def a_model_of_one_patch(folder: Path) -> None:
    vit = pl.wrap(tiny(img_size=16))
    batch = images(vit, 2)
    for name in working(vit):
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
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@row
def grouped_query_attention(folder: Path) -> None:
    torch.manual_seed(0)
    model = tiny()
    for block in model.blocks:
        block.attn = Grouped(block.attn)
    vit = pl.wrap(model.double())
    batch = images(vit, 2)
    with pl.trace(vit, batch, target=1) as seen:
        assert seen.attention[0].shape == (2, 4, 17, 17)
        close(seen.attention[0].sum(-1), torch.ones(2, 4, 17).double(), 1e-10)
    assert quietly(vit, batch, "genatt").isfinite().all()
    assert _libra_rest(vit) < 1e-10


@row
def quantised_linear_maps(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(tiny(), {nn.Linear}, dtype=torch.qint8)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    for name in working(vit):
        _right_or_refused(vit, batch, name)
    refuses(lambda: pl.explain(vit, batch, "genatt"), "no gradient flows", "quantised")
    assert quietly(vit, batch, "rise").isfinite().all()


@row
def a_model_made_under_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        model = tiny()
    plain = tiny()
    batch = images(pl.wrap(plain), 2)
    for name in ("genatt", "ixg", "transatt", "tis", "occlusion"):
        close(quietly(model, batch, name, target=1), quietly(plain, batch, name, target=1), 1e-5)


@row
def a_trace_of_a_plain_module(folder: Path) -> None:
    model = tiny()
    with pl.trace(model, torch.zeros(1, 3, 64, 64)) as seen:
        assert len(seen.attention) == 3


@row
def anatomies_can_be_pickled(folder: Path) -> None:
    for family in ("swin", "pvtv2", "vit"):
        vit = build(family)
        batch = images(vit, 2)
        back = pickle.loads(pickle.dumps(vit))
        assert torch.equal(back.logits(batch), vit.logits(batch))
        again = copy.deepcopy(vit)
        assert again.model is not vit.model
        assert torch.equal(again.logits(batch), vit.logits(batch))


@row
def several_modules_that_share_a_weight(folder: Path) -> None:
    model = tiny()
    model.blocks[1] = model.blocks[0]
    vit = pl.wrap(model)
    batch = images(vit, 2)
    with torch.no_grad():
        close(vit.logits(batch), model(batch), 1e-5)
    assert quietly(vit, batch, "gradcam", layer="blocks[1].norm1").isfinite().all()


@row
def weight_norm_and_parametrised_layers(folder: Path) -> None:
    model = tiny()
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model.blocks[1].mlp.fc1)
    vit = pl.wrap(model)
    batch = images(vit, 2)
    close(quietly(vit, batch, "transatt", target=1), quietly(tiny(), batch, "transatt", target=1), 1e-4)


@row
def a_model_or_its_blocks_compiled(folder: Path) -> None:
    """What `torch.compile` left behind runs the original; the twin must not."""
    plain, whole, blocks = tiny(), tiny(drop_rate=0.5), tiny(drop_rate=0.5)
    batch = images(pl.wrap(plain), 2)
    whole.compile(backend="eager")
    for i, block in enumerate(blocks.blocks):
        blocks.blocks[i] = torch.compile(block, backend="eager")
    for model in (whole, blocks, torch.compile(whole, backend="eager")):
        model.train()
        for name in ("gradcam", "genatt", "occlusion"):
            close(quietly(model, batch, name, target=1), quietly(plain, batch, name, target=1), 1e-5)
        assert all(m.training for m in model.modules())


@row
def a_view_follows_the_anatomy(folder: Path) -> None:
    """What is set on an anatomy after it was used in half precision holds there too."""
    vit = pl.wrap(tiny().half())
    batch = images(vit, 1)
    quietly(vit, batch, "ixg")
    vit.preprocess = pl.Preprocess((64, 64), mean=(0.1, 0.2, 0.3))
    assert vit.wide().preprocess.mean == (0.1, 0.2, 0.3)


@row
def functions_wrapped_in_a_partial(folder: Path) -> None:
    """They run the user's own modules all the same."""
    model = tiny(drop_rate=0.5)

    def embed(x: Tensor, scale: float) -> Tensor:
        return model.norm_pre(model._pos_embed(model.patch_embed(x * scale)))  # type: ignore[no-any-return]

    about: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "cls", "heads": 4, "classes": CLASSES}
    vit = pl.wrap(
        model,
        embed=partial(embed, scale=1.0),
        blocks=model.blocks,
        readout=lambda tokens: model.forward_head(model.norm(tokens)),
        preprocess=pl.Preprocess((64, 64)),
        **about,
    )
    batch, expected = images(vit, 2), pl.wrap(tiny())
    model.train()
    close(quietly(vit, batch, "ixg", target=1), quietly(expected, batch, "ixg", target=1), 1e-5)
    assert quietly(vit, batch, "rise", target=1, precision="bf16").isfinite().all()


@row
def a_part_in_torchscript(folder: Path) -> None:
    model = tiny()
    model.blocks[0].mlp.act = torch.jit.script(nn.GELU())
    refuses(lambda: pl.wrap(model), "TorchScript")


@row
def one_output_exchanged_for_several(folder: Path) -> None:
    model = tiny(num_classes=1)
    vit = pl.wrap(model)
    assert vit.sigmoid
    model.head = nn.Linear(48, 5)
    pl.explain(vit, images(vit, 1), "ixg")
    assert not vit.sigmoid
    close(vit.probabilities(vit.logits(images(vit, 1))).sum(1), torch.ones(1))


@row
def a_model_that_is_let_go(folder: Path) -> None:
    """Nothing of ours keeps a model, or a copy of its weights, until the garbage is collected."""
    gc.collect()
    gc.disable()
    try:
        for name in ("vit_tiny_patch16_224", "beit_base_patch16_224"):
            model = by_name(name)
            quietly(model, torch.zeros(1, 3, 64, 64), "occlusion", unit="token", precision="bf16")
            gone = weakref.ref(model)
            del model
            assert gone() is None, f"{name} is still there"
    finally:
        gc.enable()


@row
def half_of_a_model_shared_with_another(folder: Path) -> None:
    """Two models around the same blocks, explained in turn, stay what they are."""
    first, second = tiny(), tiny()
    second.blocks = first.blocks
    second.head = nn.Linear(48, 3)
    batch = images(shared("vit"), 2)
    before = quietly(first, batch, "genatt", target=1)
    quietly(second, batch, "genatt", target=1)
    assert torch.equal(quietly(first, batch, "genatt", target=1), before)
