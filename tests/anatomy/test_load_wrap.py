"""Loading by name, wrapping what the user has, and the sentences for what cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.load import list_models
from patchlight.anatomy.opened import Anatomy
from patchlight.testing import check_method
from tests.families import CLASSES, FAMILIES, build, images, randomise, shared
from tests.helpers import assert_near, refuses, tiny

SMALL = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 4}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_file({k: v.contiguous() for k, v in build("vit").model.state_dict().items()}, path)
    return path


def test_load_reads_the_number_of_classes_from_the_weights(weights: Path) -> None:
    vit = pl.load("vit_tiny_patch16_224", weights=weights, labels=list("abcdefg"), **SMALL)
    assert vit.classes == CLASSES
    assert not any(p.requires_grad for p in vit.model.parameters())
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), shared("vit").logits(batch))
    assert pl.explain(vit, batch, target="c").target.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda state: {f"module.{k}": v for k, v in state.items()},
        lambda state: {f"model.{k}": v for k, v in state.items()},
        lambda state: {f"backbone.{k}": v for k, v in state.items()},
        lambda state: {f"_orig_mod.{k}": v for k, v in state.items()},
        lambda state: {f"module._orig_mod.model.{k}": v for k, v in state.items()},
        lambda state: {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in state.items()}},
        lambda state: {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}, "optimizer": {"a": 1}},
        lambda state: {"model_ema": state, "epoch": 3},
        lambda state: {"model": state, "model_ema": {k: v + 1 for k, v in state.items()}},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {"mine": state, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}},
    ],
)
def test_what_training_puts_around_weights_is_taken_off(wrapped: object, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(wrapped(build("vit").model.state_dict()), path)  # type: ignore[operator]
    vit = pl.load("vit_tiny_patch16_224", weights=path, **SMALL)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), shared("vit").logits(batch))
    assert vit.classes == CLASSES


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda state: {"a": state, "b": state}, "contains tensors under 'a', 'b'; save those of one model only"),
        (lambda state: {"epoch": 3}, "does not contain plain tensors by name"),
        (lambda state: [*state.values()], "does not contain plain tensors by name"),
        (
            lambda state: {**{f"backbone.{k}": v for k, v in state.items()}, "fc.weight": torch.ones(2)},
            r"do not fit vit_tiny_patch16_224: \d+ missing \(cls_token\); \d+ extra \(backbone.cls_token\)",
        ),
        (lambda state: {**state, "more": torch.ones(2)}, r"do not fit .*: 1 extra \(more\)"),
    ],
)
def test_checkpoints_that_are_no_one_models(wrapped: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(wrapped(build("vit").model.state_dict()), path)  # type: ignore[operator]
    with pytest.raises(pl.PatchlightError, match=message):
        pl.load("vit_tiny_patch16_224", weights=path, **SMALL)


def test_positions_are_resampled_for_another_size(weights: Path, tmp_path: Path) -> None:
    """As timm does by itself, where the size of the images is free."""
    small = {**SMALL, "img_size": (96, 80)}
    vit = pl.load("vit_tiny_patch16_224", weights=weights, **small)
    free = pl.load(
        "vit_tiny_patch16_224",
        weights=weights,
        dynamic_img_size=True,
        preprocess=pl.Preprocess((96, 80)),
        **SMALL,
    )
    assert vit.grid == free.grid == (6, 5)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), free.logits(batch), rtol=1e-4, atol=1e-4)
    with pytest.raises(pl.PatchlightError, match=r"'pos_embed' is \[1, 17, 48\] but must be .*give img_size="):
        pl.load("vit_tiny_patch16_224", weights=weights, **{k: v for k, v in SMALL.items() if k != "img_size"})
    wide = tmp_path / "wide.safetensors"
    save_file({k: v.contiguous() for k, v in build("vit-wide").model.state_dict().items()}, wide)
    with pytest.raises(pl.PatchlightError, match=r"'pos_embed' .* is not a square grid of positions after 1 prefix"):
        pl.load("vit_tiny_patch16_224", weights=wide, **SMALL)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("beit", "beit_base_patch16_224", {**SMALL, "img_size": 96}),
        ("swin", "swin_tiny_patch4_window7_224", {"img_size": 128, "window_size": 8, "embed_dim": 16}),
    ],
)
def test_relative_positions_are_resampled(family: str, name: str, options: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    vit = build(family)
    save_file({k: v.contiguous() for k, v in vit.model.state_dict().items()}, path)
    staged = {"depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4)} if family == "swin" else {}
    other = pl.load(name, weights=path, **options, **staged)  # type: ignore[arg-type]
    tables = {k: v for k, v in other.model.state_dict().items() if k.endswith("bias_table")}
    assert tables
    for key, table in tables.items():
        old = vit.model.state_dict()[key]
        assert table.shape != old.shape
        kept = slice(-3, None) if family == "beit" else slice(1)
        torch.testing.assert_close(table[kept], old[kept])
    assert pl.explain(other, images(other), "gradcam" if family == "swin" else "genatt").scores.isfinite().all()


def test_positions_of_transformers_and_torchvision_are_resampled(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "weights.safetensors"
    for family, key in (("hf-vit", "vit.embeddings.position_embeddings"), ("torchvision", "encoder.pos_embedding")):
        vit = build(family)
        state = {k: v.contiguous() for k, v in vit.model.state_dict().items()}
        save_file(state, path)
        if family == "hf-vit":
            vit.model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
            own = {"image_size": 96, "preprocess": pl.Preprocess((96, 96))}
            other = pl.load(f"hf:{tmp_path}", weights=path, **own).model.state_dict()[key]  # type: ignore[arg-type]
        else:
            from patchlight.anatomy.weights import resampled

            larger = type(vit.model)(96, 16, 3, 4, 48, 96, num_classes=CLASSES)  # type: ignore[call-arg]
            other = resampled(state, larger, (6, 6), "it")[key]
        assert other.shape == (1, 37, 48)
        torch.testing.assert_close(other[:, 0], state[key][:, 0])
        torch.testing.assert_close(other[:, 1:].mean(1), state[key][:, 1:].mean(1), rtol=0.2, atol=0.05)


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"],
)
def test_the_size_of_images_is_free_where_the_model_says_so(name: str) -> None:
    from PIL import Image

    size = {**SMALL, "patch_size": 16, "num_classes": CLASSES, "dynamic_img_size": True}
    vit = pl.load(name, pretrained=False, preprocess=pl.Preprocess((48, 80)), **size)
    randomise(vit.model)
    assert vit.grid == (3, 5)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), vit.model(batch))
    assert pl.explain(vit, batch, "genatt").scores.shape == (3, 3, 5)
    check_method("tis", vit, batch)
    sizes = [Image.new("RGB", (90, 40), "red"), Image.new("RGB", (40, 90), "blue")]
    assert pl.explain(vit, sizes, "genatt").scores.shape == (2, 3, 5)
    with pytest.raises(pl.PatchlightError, match=r"images have shape \[1, 3, 64, 64\]; this model takes \[B,3,48,80\]"):
        pl.explain(vit, torch.zeros(1, 3, 64, 64))


def test_sizes_are_not_free_elsewhere() -> None:
    with pytest.raises(pl.PatchlightError, match=r"does not take an image of shape \[1, 3, 48, 80\]"):
        pl.load("vit_tiny_patch16_224", pretrained=False, preprocess=pl.Preprocess((48, 80)), **SMALL)
    with pytest.raises(pl.PatchlightError, match=r"'beit_base_patch16_224' takes no 'dynamic_img_size'"):
        pl.load("beit_base_patch16_224", pretrained=False, dynamic_img_size=True)


@pytest.mark.parametrize("channels", [1, 5])
def test_one_and_five_channels(channels: int) -> None:
    from PIL import Image

    vit = pl.load("vit_tiny_patch16_224", pretrained=False, in_chans=channels, num_classes=CLASSES, **SMALL)
    randomise(vit.model)
    batch = images(vit)
    assert batch.shape == (3, channels, 64, 64)
    for method in ("genatt", "rise", "gradcam", "occlusion"):
        check_method(method, vit, batch)
    photo = Image.new("RGB", (80, 64), "red")
    if channels == 1:
        assert pl.explain(vit, photo, "genatt").scores.shape == (1, 4, 4)
        return
    with pytest.raises(pl.PatchlightError, match=r"takes 5 channels, not pictures; .*\[B,5,64,64\]"):
        pl.explain(vit, photo, "genatt")


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("unpickled",))


def test_nothing_is_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pth"
    torch.save({"model": Evil()}, path)
    with pytest.raises(pl.PatchlightError, match="cannot be read as weights"):
        pl.load("vit_tiny_patch16_224", weights=path)
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "vit_tinny_patch16_224", "pretrained": False},
            "no model is called .*did you mean 'vit_tiny_patch16_224",
        ),
        (
            {"name": "torchvision:vit_b_61", "pretrained": False},
            "no Vision Transformer called 'vit_b_61'; did you mean",
        ),
        ({"name": "vit_tiny_patch16_224", "weights": "nowhere.safetensors"}, "no weights at 'nowhere.safetensors'"),
        ({"name": "vit_tiny_patch16_224", "pretrained": False, "device": "cuda:9"}, "device 'cuda:9' cannot be used"),
        (
            {"name": "vit_tiny_patch16_224", "pretrained": False, "labels": ["a"]},
            "1 labels were given for a model with 1000 classes",
        ),
        ({"name": "resnet18", "pretrained": False}, "'resnet18' is not a supported Vision Transformer"),
    ],
)
def test_load_says_what_is_wrong(options: dict[str, object], message: str) -> None:
    if options.get("device") and torch.cuda.device_count() > 9:
        pytest.skip("such a device exists")
    with pytest.raises(pl.PatchlightError, match=message):
        pl.load(**options)  # type: ignore[arg-type]


def test_nan_in_weights_is_refused() -> None:
    model = FAMILIES["vit"]()
    model.blocks[1].mlp.fc1.weight.data[0, 0] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(pl.PatchlightError, match=r"NaN or infinity in 'blocks.1.mlp.fc1.weight'"):
        pl.wrap(model)


def test_wrap_unwraps_compiled_and_parallel_models() -> None:
    model = randomise(FAMILIES["vit"]())
    reference = pl.wrap(model)
    batch = images(reference)
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        vit = pl.wrap(wrapped)
        assert vit.model is model
        torch.testing.assert_close(pl.explain(vit, batch).scores, pl.explain(reference, batch).scores)


def test_a_model_in_training_is_evaluated_and_continues_training() -> None:
    model = FAMILIES["vit"]()
    randomise(model).train()
    model.blocks[0].attn.proj_drop.p = 0.5  # type: ignore[union-attr]
    model.blocks[1].eval()  # type: ignore[union-attr]
    modes = [m.training for m in model.modules()]
    vit = pl.wrap(model)
    batch = images(vit)
    first, second = pl.explain(vit, batch), pl.explain(vit, batch)
    assert torch.equal(first.scores, second.scores)
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError, match="on purpose"):
        pl.explain(vit, batch, score=_fails)
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(pl.explain(vit, batch).scores, first.scores)


def _fails(logits: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


def test_the_refusal_of_an_unknown_model_says_how_to_describe_it() -> None:
    with pytest.raises(pl.PatchlightError, match=r"Sequential is not a supported model.*wrap\(model, embed="):
        pl.wrap(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(pl.PatchlightError, match="also give embed, readout, grid"):
        pl.wrap(nn.Sequential(nn.Linear(2, 2)), blocks=[])
    with pytest.raises(pl.PatchlightError, match="wrap needs a torch module, not str"):
        pl.wrap("vit")  # type: ignore[arg-type]


class Homemade(nn.Module):
    """A transformer of no library: torch's own encoder layers, average pooling, no CLS."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 16, 16)
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True) for _ in "123"]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 5)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.patch(x).flatten(2).transpose(1, 2)

    def readout(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(tokens.mean(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.readout(x)


def test_a_model_described_by_hand() -> None:
    torch.manual_seed(0)
    model = randomise(Homemade())
    vit = pl.wrap(
        model,
        embed=model.embed,
        blocks=model.layers,
        readout=model.readout,
        grid=(4, 4),
        prefix=0,
        pooling="avg",
        heads=4,
        classes=5,
        preprocess=pl.Preprocess((64, 64)),
    )
    batch = images(vit)
    with torch.no_grad():
        torch.testing.assert_close(vit.logits(batch), model(batch), atol=1e-5, rtol=1e-5)
    maps = pl.explain(vit, batch, ["rawatt", "rollout", "genatt", "ixg", "ixg.libra"])
    assert all(a.scores.shape == (3, 4, 4) and a.scores.abs().max() > 0 for a in maps.values())
    assert all(m.supported for m in pl.list_methods(vit) if m.name in maps)


def test_a_method_refuses_a_model_that_lacks_what_it_needs() -> None:
    vit = build("vit")
    bare = pl.wrap(
        vit.model,
        embed=vit.embed,
        blocks=[nn.Sequential(block) for block in vit.blocks],
        readout=vit.readout,
        **{key: getattr(vit, key) for key in ("name", "grid", "prefix", "pooling", "heads", "classes", "preprocess")},
    )
    batch = images(vit)
    with pytest.raises(
        pl.Unsupported, match=r"'gradcam' does not work here: vit has no first norm.*methods that work: .*genatt"
    ):
        pl.explain(bare, batch, "gradcam")
    unsupported = {m.name: m.reason for m in pl.list_methods(bare) if not m.supported}
    assert "no first norm" in unsupported["gradcam"]
    check_method("gradcam", bare, batch)
    torch.testing.assert_close(pl.explain(bare, batch).scores, pl.explain(vit, batch).scores)


def test_a_local_transformers_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for family in ("hf-vit", "hf-deit", "hf-clip"):
        vit = build(family)
        vit.model.save_pretrained(tmp_path / family)  # type: ignore[operator]
        loaded = pl.load(f"hf:{tmp_path / family}", preprocess=vit.preprocess)
        batch = images(vit)
        torch.testing.assert_close(loaded.logits(batch), vit.logits(batch))
        assert type(loaded.model) is type(vit.model)


def test_labels_from_files(tmp_path: Path) -> None:
    from patchlight.anatomy.weights import read_labels

    table = tmp_path / "classes.csv"
    table.write_text('class_index,synset,names\n1,n2,"goldfish, Carassius"\n0,n1,tench\n')
    assert read_labels(table) == ["tench", "goldfish, Carassius"]
    lines = tmp_path / "classes.txt"
    lines.write_text("a\nb\n")
    assert read_labels(lines) == ["a", "b"]
    (tmp_path / "bad.csv").write_text("x,y\n1,2\n")
    with pytest.raises(pl.PatchlightError, match="no column called names"):
        read_labels(tmp_path / "bad.csv")
    with pytest.raises(pl.PatchlightError, match="no label file"):
        read_labels(tmp_path / "none.csv")


def test_model_names_can_be_searched() -> None:
    assert "deit_tiny_patch16_224" in list_models("deit")
    assert list_models("pocket")[0] == "pocket"
    assert all(name.startswith("pocket") for name in list_models("pocket"))
    assert list_models("nothing-like-it") == []


def _in_4_bits(model: nn.Module) -> nn.Module:
    """The linear layers of a model's blocks by bitsandbytes, in 4 bits."""
    library = pytest.importorskip("bitsandbytes")
    for module in list(model.blocks.modules()):  # type: ignore[union-attr, operator]
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                new = library.nn.Linear4bit(layer.in_features, layer.out_features)
                new.load_state_dict(layer.state_dict())
                setattr(module, name, new.to("cpu"))
    return model


def test_what_is_refused_is_known_by_its_type() -> None:
    """As bitsandbytes and torchao make them."""
    kind = type("Int8Params", (nn.Parameter,), {"__module__": "bitsandbytes.nn.modules"})
    model = randomise(FAMILIES["vit"]())
    model.blocks[0].attn.qkv.weight = kind(model.blocks[0].attn.qkv.weight.detach())  # type: ignore[union-attr]
    with pytest.raises(pl.PatchlightError, match=r"is an Int8Params of bitsandbytes, whose 8-bit layers"):
        pl.wrap(model)


def test_weights_in_4_bits_are_explained() -> None:
    model = _in_4_bits(randomise(FAMILIES["vit"]()))
    vit = pl.wrap(model)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), model(batch))
    assert (vit.logits(batch) - shared("vit").logits(batch)).abs().max() > 0.01
    assert pl.explain(vit, batch, "ixg.libra").scores.abs().min() > 0


@pytest.mark.parametrize("kind", ["LoraConfig", "dora", "saved", "IA3Config", "OFTConfig"])
def test_adapters_are_part_of_the_model(kind: str) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = {
        "LoraConfig": lambda: peft.LoraConfig(target_modules=["qkv", "proj"], init_lora_weights=False, r=2),
        "dora": lambda: peft.LoraConfig(target_modules=["qkv"], init_lora_weights=False, r=2, use_dora=True),
        "saved": lambda: peft.LoraConfig(target_modules=["qkv"], modules_to_save=["head"], r=2),
        "IA3Config": lambda: peft.IA3Config(target_modules=["qkv"], feedforward_modules=[], init_ia3_weights=False),
        "OFTConfig": lambda: peft.OFTConfig(target_modules=["qkv"], init_weights=False, r=0, oft_block_size=12),
    }[kind]()
    adapted = peft.get_peft_model(randomise(FAMILIES["vit"]()), config).eval()
    for name, value in adapted.named_parameters():
        if "modules_to_save" in name:
            value.data += 1
    vit = pl.wrap(adapted)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), adapted(batch))
    assert (vit.logits(batch) - shared("vit").logits(batch)).abs().max() > 1e-3
    assert pl.explain(vit, batch, ["genatt", "tis", "ixg.libra"])["tis"].scores.isfinite().all()


def test_load_takes_a_module_too() -> None:
    model = build("vit").model
    vit = pl.load(model, labels=[f"kind {i}" for i in range(7)])
    assert vit.model is model
    assert vit.label(2) == "kind 2"
    assert pl.load(vit) is vit
    with pytest.raises(pl.PatchlightError, match="belong to a model's name; a module is used as it is"):
        pl.load(model, weights="weights.safetensors")
    with pytest.raises(pl.PatchlightError, match="load needs a name or a module, not int"):
        pl.load(3)  # type: ignore[arg-type]


class Holder:
    """An object that is no module and contains one."""

    def __init__(self, model: Any) -> None:
        self.model = model


def _described(model: Any, embed: Any, readout: Any, classes: int = CLASSES) -> Anatomy:
    names: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "pooling": "cls", "heads": 4, "classes": classes}
    names["preprocess"] = pl.Preprocess((64, 64))
    return pl.wrap(model, embed=embed, blocks=model.blocks, readout=readout, **names)


def test_functions_run_on_copies_wherever_they_refer_to_the_model() -> None:
    """In a closure, a default, a nested function, a dictionary; a module of another model stays itself."""
    model, scale = tiny().train(), nn.Linear(CLASSES, 5)
    parts, seen = {"norm": model.norm, "eps": [0.5, None]}, list[Any]()

    def stem(x: Tensor, own: Any = model) -> Tensor:
        seen.append((own, parts["norm"], scale))
        return own.norm_pre(own._pos_embed(own.patch_embed(x)))  # type: ignore[no-any-return]

    vit = _described(model, lambda x: stem(x), lambda tokens: scale(model.forward_head(parts["norm"](tokens))), 5)
    batch = images(vit)
    with torch.no_grad():
        assert_near(vit.logits(batch), scale(tiny()(batch)), 1e-6)
    own, norm, other = seen[-1]
    assert (own, norm) == (vit.net, vit.net.norm)
    assert other is scale
    assert model.training


def test_a_model_in_training_mode_whose_functions_hide_it_is_refused_in_one_sentence() -> None:
    model = tiny().train()
    holder = Holder(model)
    head = model.forward_head

    def stem(x: Tensor) -> Any:
        return holder.model.norm_pre(holder.model._pos_embed(holder.model.patch_embed(x)))

    refuses("an object of class Holder, which a copy cannot replace", _described, model, stem, head)
    vit = _described(model.eval(), stem, lambda tokens: head(model.norm(tokens)))
    model.train()
    refuses("call model.eval() first", vit.logits, images(vit))
