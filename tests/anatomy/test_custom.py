"""Modules of one's own around a Vision Transformer: crossed at the blocks, equal to the plain forward, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.testing import check_method
from tests.families import CLASSES, FAMILIES, STAGED, images, randomise

WIDTH = 48


def plain(family: str = "vit", seed: int = 0) -> Any:
    return randomise(FAMILIES[family](), seed)


def headless(**options: Any) -> Any:
    import timm

    sizes = {"img_size": 64, "embed_dim": WIDTH, "depth": 3, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, **{**sizes, **options})


class Own(nn.Module):
    """A backbone and something of one's own; `tail` makes the output of the module and the backbone's tokens."""

    def __init__(self, tail: Callable[[Any, Tensor], Any] | None = None, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = headless() if backbone is None else backbone
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 5))
        self.tail = tail or (lambda own, tokens: own.mlp(tokens[:, 0]))
        randomise(self, 3)

    def forward(self, images: Tensor) -> Any:
        return self.tail(self, self.backbone.forward_features(images))


class Around(nn.Module):
    """A whole model between something done to its images and something done to its logits."""

    def __init__(self, model: nn.Module, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before or (lambda x: x), after or (lambda x: x)

    def forward(self, images: Tensor) -> Any:
        return self.after(self.model(self.before(images)))


@dataclass
class Answer:
    features: Tensor
    logits: Tensor


@pytest.mark.parametrize("method", ["genatt", "tis", "ixg.plus.libra", "rise", "gradcam", "smoothgrad"])
def test_a_module_that_adds_nothing_is_explained_as_its_backbone(method: str) -> None:
    model = plain().double()
    vit, own = pl.wrap(model), pl.wrap(nn.Sequential(nn.Identity(), model))
    assert (own.pooling, own.grid, own.prefix, own.heads, own.extent) == ("cls", (4, 4), 1, 4, vit.extent)
    batch = images(vit)
    torch.testing.assert_close(own.logits(batch), model(batch))
    expected, found = pl.explain(vit, batch, method), pl.explain(own, batch, method)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-9, atol=1e-12)


def test_the_mlp_behind_a_backbone_is_its_head() -> None:
    module = Own().double()
    vit = pl.wrap(module, labels=list("abcde"), name="mine")
    batch = images(vit).requires_grad_()
    plainly = module(batch)
    torch.testing.assert_close(vit.logits(batch), plainly)
    with vit.steady():
        parts = vit.readout(vit.run(vit.embed(batch)))
    weights = torch.randn_like(parts)
    expected = torch.autograd.grad(plainly, batch, weights)[0]
    torch.testing.assert_close(torch.autograd.grad(parts, batch, weights)[0], expected)
    assert pl.explain(vit, batch.detach(), target="c").target.tolist() == [2, 2, 2]
    assert vit.name == "mine"


@pytest.mark.parametrize("method", ["genatt", "tis", "ixg.libra", "attcat", "occlusion", "gradcam"])
def test_methods_keep_their_contract(method: str) -> None:
    module = Own(lambda own, tokens: {"logits": own.mlp(tokens[:, 1:].mean(1)), "tokens": tokens})
    vit, double = pl.wrap(module), pl.wrap(randomise(Own(module.tail), 3).double())
    assert vit.pooling == "avg"
    check_method(method, vit, images(vit), double)


@pytest.mark.parametrize(
    "family",
    [
        "vit-wide",
        "deit-distilled",
        "eva02",
        "dinov3",
        "beit",
        "beitv2",
        "siglip",
        "reg4-gap",
        "torchvision",
        "hf-vit",
        "hf-deit",
        "hf-dinov2",
        "hf-clip",
    ],
)
def test_every_family_can_be_the_backbone(family: str) -> None:
    """With tokens dropped too, which keep their positions."""
    if family.startswith("hf-"):
        pytest.importorskip("transformers")
    head = randomise(nn.Linear(CLASSES, 4), 7).double()
    model = plain(family).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        inner = pl.wrap(model)
        vit = pl.wrap(Around(model, after=lambda out: (head(getattr(out, "logits", out)), out)))
    assert (vit.grid, vit.prefix, vit.can_drop) == (inner.grid, inner.prefix, None)
    batch = images(inner, 2)
    keep = torch.tensor([[0, 3, 5], [2, 7, 1]])
    for kept in (None, keep):
        with torch.no_grad(), vit.steady():
            expected = head(inner.readout(inner.run(inner.embed(batch), keep=kept)))
            torch.testing.assert_close(vit.readout(vit.run(vit.embed(batch), keep=kept)), expected)
    assert pl.explain(vit, batch, "genatt").scores.isfinite().all()
    same = {"hf-clip": "avg", "hf-dinov2": "cls+avg"}
    assert vit.pooling == same.get(family, inner.pooling)


@pytest.mark.parametrize(
    ("tail", "pooling"),
    [
        (lambda own, tokens: own.mlp(tokens[:, 0]), "cls"),
        (lambda own, tokens: own.mlp(tokens[:, 1:].mean(1)), "avg"),
        (lambda own, tokens: own.mlp(tokens.mean(1)), "avg"),
        (lambda own, tokens: own.mlp(tokens[:, 0] + tokens[:, 1:].mean(1)), "cls+avg"),
        (lambda own, tokens: own.mlp(tokens[:, 1:].amax(1)), "avg"),
    ],
)
def test_pooling_is_what_the_logits_depend_on(tail: Any, pooling: str) -> None:
    assert pl.wrap(Own(tail)).pooling == pooling
    assert pl.wrap(Own(tail, randomise(headless(global_pool="")))).pooling == pooling
    assert pl.wrap(Own(tail), pooling="cls+avg").pooling == "cls+avg"


@pytest.mark.parametrize(
    "tail",
    [
        lambda own, tokens: {"logits": own.mlp(tokens[:, 0]), "tokens": tokens},
        lambda own, tokens: {"scores": own.mlp(tokens[:, 0]), "name": "mine"},
        lambda own, tokens: (own.mlp(tokens[:, 0]), tokens),
        lambda own, tokens: [own.mlp(tokens[:, 0])],
        lambda own, tokens: Answer(tokens, own.mlp(tokens[:, 0])),
    ],
)
def test_logits_are_found_among_the_outputs(tail: Any) -> None:
    vit = pl.wrap(Own(tail))
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), Own()(batch))


def test_output_chooses_among_several() -> None:
    module = Own(lambda own, tokens: {"five": own.mlp(tokens[:, 0]), "two": own.mlp(tokens[:, 0])[:, :2]})
    for key, count in (("five", 5), ("two", 2)):
        vit = pl.wrap(module, output=lambda out, key=key: out[key])
        assert vit.classes == count
        batch = images(vit)
        torch.testing.assert_close(vit.logits(batch), module(batch)[key])


def test_output_of_a_known_model_too() -> None:
    model = plain()
    vit = pl.wrap(model, output=lambda out: out[:, 2:5])
    batch = images(vit)
    assert vit.classes == 3
    torch.testing.assert_close(vit.logits(batch), model(batch)[:, 2:5])
    whole = pl.explain(pl.wrap(model), batch, "ixg.libra", target=3)
    torch.testing.assert_close(pl.explain(vit, batch, "ixg.libra", target=1).scores, whole.scores)


def test_one_number_for_each_image_is_one_class() -> None:
    module = Own(lambda own, tokens: own.mlp(tokens[:, 0])[:, 1])
    vit = pl.wrap(module)
    batch = images(vit)
    assert vit.classes == 1
    torch.testing.assert_close(vit.logits(batch), module(batch)[:, None])
    assert pl.explain(vit, batch, "genatt").scores.shape == (3, 4, 4)


def _twice(own: Any, tokens: Tensor) -> Tensor:
    return own.mlp(tokens[:, 0] + own.backbone.forward_features(torch.ones(len(tokens), 3, 64, 64))[:, 0])


class ReadsTheImage(Own):
    def forward(self, images: Tensor) -> Any:
        return super().forward(images) + images.mean((1, 2, 3))[:, None]


class ReadsTwoBlocks(Own):
    def forward(self, images: Tensor) -> Any:
        _, kept = self.backbone.forward_intermediates(images, output_fmt="NLC")
        return self.mlp(kept[0].mean(1) + kept[-1].mean(1))


def test_a_head_on_the_tokens_of_two_blocks_is_crossed() -> None:
    model = randomise(ReadsTwoBlocks(), 3).double()
    vit = pl.wrap(model)
    assert vit.reads == (1, 3)
    batch = images(vit, 2).requires_grad_()
    (expected,) = torch.autograd.grad(model(batch)[:, 1].sum(), batch)
    with vit.steady():
        (gradient,) = torch.autograd.grad(vit.readout(vit.run(vit.embed(batch)))[:, 1].sum(), batch)
    torch.testing.assert_close(gradient, expected)
    assert pl.explain(vit, batch.detach(), "ixg", target=1).scores.isfinite().all()


def test_a_module_around_a_hierarchical_backbone_is_opened_at_a_stage() -> None:
    """As the backbone alone, if the module adds nothing."""
    backbone = plain("swin")
    model = Around(backbone)
    for stage in (-2, 0):
        around, alone = pl.wrap(model, stage=stage), pl.wrap(backbone, stage=stage)
        assert around.grid == alone.grid
        batch = images(alone, 2)
        assert torch.equal(around.logits(batch), alone.logits(batch))
        maps = [pl.explain(vit, batch, "gradcam", target=1).scores for vit in (around, alone)]
        torch.testing.assert_close(maps[0], maps[1])


class ChangesBetween(Own):
    def forward(self, images: Tensor) -> Any:
        tokens = self.backbone._pos_embed(self.backbone.patch_embed(images))
        for block in self.backbone.blocks:
            tokens = 1.1 * block(tokens)
        return self.mlp(tokens[:, 0])


def test_what_happens_between_blocks_is_crossed() -> None:
    """Its gradient reaches the image, and tokens cannot be dropped."""
    model = randomise(ChangesBetween(), 3).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        vit = pl.wrap(model)
    batch = images(vit, 2).requires_grad_()
    assert sorted(vit.breaks) == [1, 2]
    assert vit.can_drop is not None
    (expected,) = torch.autograd.grad(model(batch)[:, 1].sum(), batch)
    (found,) = torch.autograd.grad(vit.readout(vit.run(vit.embed(batch)))[:, 1].sum(), batch)
    torch.testing.assert_close(found, expected)
    tokens = [vit.embed(batch)]
    for index in range(2):
        tokens.append(vit.merge(index + 1, vit.block(index, tokens[-1])))
    gradients = torch.autograd.grad(vit.readout(vit.block(2, tokens[2]))[:, 1].sum(), tokens)
    with pl.trace(vit, batch.detach(), target=1) as seen:
        for got, wanted in zip(seen.gradients, gradients, strict=True):
            torch.testing.assert_close(got, wanted)


class Half(Own):
    def forward(self, images: Tensor) -> Any:
        tokens = self.backbone._pos_embed(self.backbone.patch_embed(images))
        for block in self.backbone.blocks[:2]:
            tokens = block(tokens)
        return self.mlp(tokens[:, 0])


class MixesImages(Own):
    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        return logits - logits.mean(0) * (len(logits) > 1)


class Two(Own):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.teacher, self.both = randomise(headless(), 8), both

    def forward(self, images: Tensor) -> Any:
        return self.mlp(self.backbone(images) + (self.teacher(images) if self.both else 0))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Own(_twice), r"Own runs its backbone 'backbone' 2 times for one image.*runs it once"),
        (lambda: ReadsTheImage(), r"ReadsTheImage gives other logits .*differ by \S+, .*reads the image; describe it"),
        (lambda: Half(), r"calls the blocks of its backbone 'backbone' 2 times for one image, but there are 3"),
        (lambda: MixesImages(), r"gives different logits for an image alone and in a batch"),
        (lambda: Two(True), r"several .*: 'backbone' \(VisionTransformer\) and 'teacher' \(VisionTransformer\)"),
        (lambda: Own(lambda own, t: {"a": t[:, 0], "b": t[:, 0]}), r"a dict with the keys 'a', 'b'; choose .*output="),
        (lambda: Own(lambda own, t: "cat"), r"Own gives a str; choose the logits \[B,C\] with output="),
        (lambda: Own(lambda own, t: None), r"Own gives None; choose"),
        (lambda: Own(lambda own, t: ()), r"Own gives an empty tuple; choose"),
        (lambda: Own(lambda own, t: t), r"Own gives a tensor \[1, 17, 48\] for one image, not logits \[1,C\]"),
        (lambda: Own(lambda own, t: own.mlp(t[:, 0]).argmax(1)), r"a tensor \[1, 1\] of int64 .*not logits"),
        (lambda: Own(lambda own, t: own.mlp(t[:, 0, :9])), r"does not take an image of shape \[1, 3, 64, 64\]: .*mat"),
        (
            lambda: Around(STAGED["pit"]()),
            r"built around 'model', a PoolingVisionTransformer, which has no transformer blocks",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), r"Sequential is not a supported model"),
    ],
)
def test_what_cannot_be_crossed_is_said_in_a_sentence(module: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(pl.PatchlightError, match=message):
        pl.wrap(module())


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"output": lambda out: out.logits}, r"fails on the result of Own, which is a tensor \[1, 5\]: .*'logits'"),
        (
            {"output": lambda out: [out]},
            r"output= returns a list of Tensor for the output of Own, which is a tensor \[1, 5\]",
        ),
        ({"output": "logits"}, r"output is str; give a function"),
        ({"labels": ["a"]}, r"1 labels were given for a model with 5 classes"),
        ({"preprocess": pl.Preprocess((32, 32))}, r"does not take an image of shape \[1, 3, 32, 32\]: .*preprocess="),
        ({"channels": 1}, r"does not take an image of shape \[1, 1, 64, 64\]"),
        ({"prefix": 5}, r"makes tokens \[1, 17, 48\] of one image"),
    ],
)
def test_what_is_said_about_it_must_fit(about: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.PatchlightError, match=message):
        pl.wrap(Own(), **about)


def test_of_several_backbones_the_one_that_runs_is_taken() -> None:
    vit = pl.wrap(Two(False))
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), vit.model(batch))


class Frozen(Own):
    """As one trains a head alone."""

    def __init__(self, stop: Any) -> None:
        super().__init__()
        self.stop = stop

    def forward(self, images: Tensor) -> Any:
        with self.stop():
            tokens = self.backbone.forward_features(images)
        return self.mlp(tokens[:, 0])


def test_gradients_flow_through_a_backbone_that_is_frozen() -> None:
    flows, frozen = pl.wrap(Own()), pl.wrap(Frozen(torch.no_grad))
    batch = images(flows)
    assert not torch.is_grad_enabled() or frozen.gradient is None
    for method in ("genatt", "ixg.libra", "smoothgrad"):
        torch.testing.assert_close(pl.explain(frozen, batch, method).scores, pl.explain(flows, batch, method).scores)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("module", [lambda: Frozen(torch.inference_mode), lambda: Own(_detached)])
def test_where_no_gradient_can_flow_it_is_said(module: Callable[[], nn.Module]) -> None:
    vit = pl.wrap(module())
    batch = images(vit)
    with pytest.raises(pl.Unsupported, match=r"no gradient flows through .*detach"):
        pl.explain(vit, batch, "genatt")
    torch.testing.assert_close(pl.explain(vit, batch, "tis").scores, pl.explain(pl.wrap(Own()), batch, "tis").scores)


def _detached(own: Any, tokens: Tensor) -> Tensor:
    return own.mlp(tokens.detach()[:, 0])


def test_a_tail_of_fixed_size_drops_no_tokens() -> None:
    class Flat(Own):
        def __init__(self) -> None:
            super().__init__()
            self.flat = randomise(nn.Linear(17 * WIDTH, 4), 5)

        def forward(self, images: Tensor) -> Any:
            return self.flat(self.backbone.forward_features(images).flatten(1))

    vit = pl.wrap(Flat())
    assert vit.can_drop is not None
    assert "takes exactly 17 tokens" in vit.can_drop
    batch = images(vit)
    with pytest.raises(pl.Unsupported, match="takes exactly 17 tokens"):
        pl.explain(vit, batch, "tis")
    assert pl.explain(vit, batch, "genatt").scores.shape == (3, 4, 4)


def _projected_rows(vit: Any, tokens: Tensor) -> int:
    """How many images are projected to patches by one readout."""
    rows: list[int] = []
    hook = vit.projection().register_forward_hook(lambda _, given, out: rows.append(len(given[0])))
    with torch.no_grad():
        vit.readout(tokens)
    hook.remove()
    return sum(rows)


def test_a_readout_embeds_no_image() -> None:
    vit = pl.wrap(Own())
    assert _projected_rows(vit, torch.randn(9, 17, WIDTH)) == 0


def test_a_forward_that_asks_images_for_their_number_gets_as_many() -> None:
    class Counts(Own):
        def forward(self, images: Tensor) -> Any:
            tokens = self.backbone.forward_features(images)
            return self.mlp(tokens[:, 0].view(images.shape[0], WIDTH))

    vit, batch = pl.wrap(Counts()), images(pl.wrap(Own()))
    assert _projected_rows(vit, torch.randn(9, 17, WIDTH)) == 9
    torch.testing.assert_close(vit.logits(batch), vit.model(batch))
    torch.testing.assert_close(pl.explain(vit, batch, "tis").scores, pl.explain(pl.wrap(Own()), batch, "tis").scores)


def test_the_module_is_only_read() -> None:
    module = Own()
    kinds = [type(m) for m in module.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    module.train()
    vit = pl.wrap(module)
    pl.explain(vit, images(vit), ["genatt", "tis"])
    assert [type(m) for m in module.modules()] == kinds
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()] == hooks
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


def test_the_anatomy_follows_the_module() -> None:
    module = Own()
    vit = pl.wrap(module)
    batch = images(vit)
    before = vit.logits(batch)
    module.mlp[2] = randomise(nn.Linear(32, 3), 9)
    assert vit.logits(batch).shape == (3, 5 - 2)
    torch.testing.assert_close(vit.logits(batch), module(batch))
    assert vit.classes == 3
    assert before.shape == (3, 5)


def test_hooks_of_the_user_run_once() -> None:
    module = Own()
    for block in module.backbone.blocks:
        block.register_forward_pre_hook(lambda _, given: (1.2 * given[0],))
        block.register_forward_hook(lambda _, given, out: 0.9 * out)
    vit = pl.wrap(module)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), module(batch))


def test_images_that_the_module_changes_are_told() -> None:
    def normalised(x: Tensor) -> Tensor:
        return (x - 0.4) / 0.3

    model = plain()
    with pytest.warns(pl.AssumedPreprocess, match=r"changes images, .*'model', whose preprocessing \(mean"):
        vit = pl.wrap(Around(model, normalised))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = pl.wrap(Around(model, normalised), preprocess=pl.Preprocess((64, 64), (0.0,) * 3, (1.0,) * 3))
    batch = images(vit)
    torch.testing.assert_close(same.logits(batch), model(normalised(batch)))


def test_a_module_that_resizes_and_makes_colours() -> None:
    def colours(x: Tensor) -> Tensor:
        return nn.functional.interpolate(x.expand(-1, 3, -1, -1), (64, 64), mode="bilinear")

    about: dict[str, Any] = {"preprocess": pl.Preprocess((96, 128), (0.5,), (0.5,)), "channels": 1}
    vit = pl.wrap(Around(plain(), colours), **about)
    assert (vit.grid, vit.extent, vit.channels) == ((4, 4), (96, 128), 1)
    batch = images(vit)
    assert batch.shape == (3, 1, 96, 128)
    torch.testing.assert_close(vit.logits(batch), vit.model(batch))
    assert pl.explain(vit, batch, "genatt").upsample().shape == (3, 96, 128)


def _adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv", "fc1"], init_lora_weights=False, r=2))


def _parallel(model: nn.Module) -> Any:
    if torch.cuda.is_available():
        pytest.skip("DataParallel moves its model and input to the accelerator")
    return nn.DataParallel(model)


@pytest.mark.parametrize("wrapper", [torch.compile, _parallel, _adapted])
def test_a_backbone_inside_other_wrappers(wrapper: Any) -> None:
    """Compiled, parallel, with adapters: inside the module, and around it."""

    def module() -> Any:
        return Around(randomise(headless()), after=randomise(nn.Linear(WIDTH, 4)))

    batch = images(pl.wrap(module()))
    inside = module()
    inside.model = wrapper(inside.model)
    expected = (module() if wrapper is torch.compile else inside.eval())(batch)
    vit = pl.wrap(inside)
    torch.testing.assert_close(vit.logits(batch), expected)
    assert pl.explain(vit, batch, "ixg.libra").scores.isfinite().all()
    around = wrapper(module())
    torch.testing.assert_close(pl.wrap(around).logits(batch), expected)


def test_precision_and_views() -> None:
    vit = pl.wrap(Own())
    batch = images(vit)
    assert vit.view(torch.float64).logits(batch).dtype == torch.float64
    torch.testing.assert_close(vit.view(torch.float64).logits(batch).float(), vit.logits(batch))
    low, full = (pl.explain(vit, batch, "tis", precision=p).scores for p in ("bf16", "full"))
    assert torch.corrcoef(torch.stack([low.flatten(), full.flatten()]))[0, 1] > 0.9


def test_layers_are_randomised_from_the_head_on() -> None:
    """The module's own layers are its head, and a copy of the module is what is randomised."""
    from patchlight.metrics.sanity import stages, twin

    module = Own(lambda own, tokens: {"a": own.mlp(tokens[:, 0]), "b": tokens})
    vit = pl.wrap(module, output=lambda out: out["a"])
    order = dict(stages(vit))
    assert order["head"] == ["mlp.0.bias", "mlp.0.weight", "mlp.2.bias", "mlp.2.weight"]
    assert order["norm"] == ["backbone.norm.bias", "backbone.norm.weight"]
    assert len(order["block 2"]) == len(list(module.backbone.blocks[2].parameters()))
    other = twin(vit)
    batch = images(vit)
    torch.testing.assert_close(other.logits(batch), vit.logits(batch))
    with torch.no_grad():
        for value in other.model.parameters():
            value += 1
    assert not torch.allclose(other.logits(batch), vit.logits(batch))
    torch.testing.assert_close(vit.logits(batch), module(batch)["a"])


def test_another_head_reads_the_backbones_features() -> None:
    weight = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    head = pl.heads.Linear(weight, None, list("abcd"))
    module = Own(lambda own, tokens: own.mlp(tokens[:, 1:].mean(1)))
    vit, direct = pl.wrap(module, head=head), pl.wrap(module.backbone, head=head)
    batch = images(vit)
    assert (vit.pooling, vit.labels) == ("cls", list("abcd"))
    torch.testing.assert_close(vit.logits(batch), direct.logits(batch))
    for method in ("genatt", "tis"):
        torch.testing.assert_close(pl.explain(vit, batch, method).scores, pl.explain(direct, batch, method).scores)
    neurons = pl.wrap(module).ask(pl.heads.Neurons(block=1, channels=[3, 5]))
    assert pl.explain(neurons, batch, "genatt").scores.isfinite().all()


def test_numbers_instead_of_classes() -> None:
    vit = pl.wrap(Own(lambda own, tokens: own.mlp(tokens[:, 0])[:, 1]), regression=True)
    assert vit.outputs.kind == "none"
    assert pl.explain(vit, images(vit), "genatt").scores.isfinite().all()
