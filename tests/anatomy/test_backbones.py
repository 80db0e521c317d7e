"""Models without a classifier: their features are the library's own, and any head can be asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.passes import run_pass
from tests.completeness import totals
from tests.dropping import assert_dropping_is_masking, shuffled_patches
from tests.families import images, randomise
from tests.pairs import VISION, WIDTH, folder, quiet, transformers_model

BACKBONES = (
    "ViTModel",
    "DeiTModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "ViTMAEModel",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "SiglipVisionModel",
)
TIMM = (
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_224.mae",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_clip_224.openai",
    "eva02_base_patch16_clip_224.merged2b",
)
SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}


def probe(width: int, dtype: torch.dtype = torch.float64) -> pl.heads.Linear:
    weight = torch.randn(3, width, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return pl.heads.Linear(weight, [0.1, -0.2, 0.3], ["a", "b", "c"])


def opened(kind: str) -> Anatomy:
    width = 24 if "Projection" in kind else WIDTH
    return quiet(transformers_model(kind).double(), head=probe(width), name=kind)


def own_features(model: Any, batch: Tensor) -> Tensor:
    """What transformers itself gives for an image."""
    kind = type(model).__name__
    with torch.no_grad():
        if kind == "ViTMAEModel":
            ratio, model.config.mask_ratio = model.config.mask_ratio, 0.0
            order = torch.arange(16.0).expand(len(batch), -1)
            out = model(batch, noise=order).last_hidden_state[:, 0]
            model.config.mask_ratio = ratio
            return out
        out = model(batch)
    if kind == "CLIPVisionModelWithProjection":
        return out.image_embeds
    return out.last_hidden_state[:, 0] if kind in ("ViTModel", "DeiTModel") else out.pooler_output


@pytest.mark.parametrize("kind", BACKBONES)
def test_features_are_those_of_transformers(kind: str) -> None:
    vit = opened(kind)
    batch = images(vit)
    features = own_features(vit.model, batch)
    assert (features[0] - features[1]).abs().max() > 0.05, "the test model does not look at its input"
    torch.testing.assert_close(vit.features_of(batch), features, atol=1e-10, rtol=1e-10)
    head: Any = vit.head
    torch.testing.assert_close(vit.logits(batch), head(features), atol=1e-10, rtol=1e-10)
    assert (vit.classes, vit.labels) == (3, ["a", "b", "c"])


@pytest.mark.parametrize("kind", BACKBONES)
def test_dropping_tokens_of_transformers_is_masking_them(kind: str) -> None:
    vit = opened(kind)
    batch = images(vit, 2)
    dropped = assert_dropping_is_masking(vit, batch)
    with torch.no_grad():
        shuffled = vit.readout(vit.run(vit.embed(batch), keep=shuffled_patches(vit, 2)))
    torch.testing.assert_close(shuffled, vit.logits(batch), atol=1e-10, rtol=1e-10)
    assert (dropped - vit.logits(batch)).abs().max() > 1e-3, "dropping half the tokens changed nothing"


@pytest.mark.parametrize("kind", BACKBONES)
def test_libra_is_complete_on_backbones_of_transformers(kind: str) -> None:
    vit = opened(kind)
    torch.testing.assert_close(*totals(vit, images(vit)), atol=1e-10, rtol=1e-10)


def test_masked_autoencoders_of_transformers_are_left_as_they_are() -> None:
    """Every patch is read, each time alike; the model itself goes on masking."""
    vit = opened("ViTMAEModel")
    model: Any = vit.model
    assert model.config.mask_ratio == model.embeddings.config.mask_ratio == 0.75
    assert vit.embed(images(vit)).shape[1] == 17
    assert model(images(vit)).last_hidden_state.shape[1] == 1 + 4
    torch.testing.assert_close(vit.logits(images(vit)), vit.logits(images(vit)), atol=0, rtol=0)


def test_attention_pooling_of_transformers_by_hand() -> None:
    """a = W_O softmax(q k^T / sqrt d) v + b_O with q of the probe, u = a + MLP(LN(a)); its row is the pooling's."""
    vit = opened("SiglipVisionModel")
    batch = images(vit, 1)
    inner: Any = vit.model
    pooler = inner.head if hasattr(inner, "head") else inner.vision_model.head
    norm = inner.post_layernorm if hasattr(inner, "head") else inner.vision_model.post_layernorm
    heads, size = 4, WIDTH // 4
    weight, bias = pooler.attention.in_proj_weight, pooler.attention.in_proj_bias
    with torch.no_grad():
        tokens = norm(vit.run(vit.embed(batch)))[0]
        q = weight[:WIDTH] @ pooler.probe[0, 0] + bias[:WIDTH]
        mixed, row = torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(len(tokens), dtype=torch.float64)
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            k = torch.stack([weight[WIDTH : 2 * WIDTH][part] @ x + bias[WIDTH : 2 * WIDTH][part] for x in tokens])
            v = torch.stack([weight[2 * WIDTH :][part] @ x + bias[2 * WIDTH :][part] for x in tokens])
            attention = ((k @ q[part]) / size**0.5).softmax(0)
            row += attention / heads
            mixed[part] = attention @ v
        a = pooler.attention.out_proj(mixed)
        u = a + pooler.mlp(pooler.layernorm(a))
    torch.testing.assert_close(vit.features_of(batch)[0], u, atol=1e-10, rtol=1e-10)
    done = run_pass(vit, batch)
    torch.testing.assert_close(vit.pool_row(done.logits, done.pool)[0], row, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["ViTModel", "Dinov2Model", "ViTMAEModel", "CLIPVisionModel"])
def test_a_folder_of_a_transformers_backbone(kind: str, tmp_path: Path) -> None:
    where = folder(kind, tmp_path, tokenizer=False)
    vit = pl.load(f"hf:{where}", head=probe(WIDTH, torch.float32))
    batch = images(vit)
    reference = quiet(transformers_model(kind), head=probe(WIDTH, torch.float32), preprocess=vit.preprocess)
    torch.testing.assert_close(vit.logits(batch), reference.logits(batch), atol=1e-5, rtol=1e-5)
    heads = "Similar.*Prototypes.*Linear.*Neurons.*Texts"
    with pytest.raises(pl.PatchlightError, match=f"no classifier.*{heads}"):
        pl.load(f"hf:{where}")
    with pytest.raises(pl.PatchlightError, match="no text encoder"):
        pl.load(f"hf:{where}", texts=["a dog"])


def test_a_transformers_folder_of_dinov3_at_another_size(tmp_path: Path) -> None:
    """Its processor says the size; rotary positions are those of the grid that it makes."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers_model("DINOv3ViTModel")
    model.save_pretrained(tmp_path)
    transformers.DINOv3ViTImageProcessor(size={"height": 80, "width": 96}).save_pretrained(tmp_path)
    vit = pl.load(f"hf:{tmp_path}", head=probe(WIDTH, torch.float32))
    assert (vit.grid, vit.preprocess.fit, vit.preprocess.interpolation) == ((5, 6), "squash", "bilinear")
    batch = images(vit)
    torch.testing.assert_close(vit.features_of(batch), own_features(model, batch), atol=1e-5, rtol=1e-5)


def test_a_transformers_folder_of_pretraining_gives_the_backbone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(**VISION, decoder_hidden_size=32, decoder_num_hidden_layers=1)
    model = randomise(transformers.ViTMAEForPreTraining(config))
    model.save_pretrained(tmp_path)
    vit = pl.load(f"hf:{tmp_path}", head=probe(WIDTH, torch.float32), preprocess=pl.Preprocess((64, 64)))
    assert type(vit.model).__name__ == "ViTMAEModel"
    direct = quiet(model.vit, head=probe(WIDTH, torch.float32))
    torch.testing.assert_close(vit.logits(images(vit)), direct.logits(images(vit)))


def test_a_pooler_of_transformers_is_left_out(tmp_path: Path) -> None:
    """A ViTModel saved without one loads: what would be random is not read."""
    transformers = pytest.importorskip("transformers")
    model = randomise(transformers.ViTModel(transformers.ViTConfig(**VISION), add_pooling_layer=False))
    model.save_pretrained(tmp_path)
    vit = pl.load(f"hf:{tmp_path}", head=probe(WIDTH, torch.float32), preprocess=pl.Preprocess((64, 64)))
    torch.testing.assert_close(vit.features_of(images(vit)), own_features(model, images(vit)))


def test_weights_with_a_classifier_make_a_classifier_of_a_transformers_backbone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    where = folder("ViTModel", tmp_path / "model", tokenizer=False)
    model = randomise(transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=5)))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    assert pl.load(f"hf:{where}", weights=tmp_path / "weights.safetensors").classes == 5


def test_flexible_transformers_are_refused_with_the_reason() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Siglip2VisionModel"):
        pytest.skip("this transformers has no SigLIP2")
    sizes = {key: value for key, value in VISION.items() if key != "image_size"}
    model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**sizes))
    with pytest.raises(pl.Unsupported, match=r"NaFlex.*no common patch grid.*SiglipModel"):
        pl.wrap(model)


@pytest.mark.parametrize("name", TIMM)
def test_backbones_of_timm(name: str) -> None:
    """Each takes each head; their features are what the model gives, projected where it projects."""
    torch.manual_seed(0)
    width = 512 if "clip" in name else WIDTH
    vit = pl.load(name, pretrained=False, head=probe(width, torch.float32), **SMALL)
    randomise(vit.model)
    batch = images(vit)
    head: Any = vit.head
    with torch.no_grad():
        features = vit.model(batch)
    assert features.shape == (3, width)
    torch.testing.assert_close(vit.logits(batch), head(features), atol=1e-5, rtol=1e-5)
    bare: Any = vit.bare
    for other in (
        pl.heads.Similar(batch[1:]),
        pl.heads.Prototypes(features, [0, 0, 1]),
        pl.heads.Texts(features, ["a", "b", "c"]),
        pl.heads.Neurons(1, channels=[3, 5]),
    ):
        asked = bare.ask(other)
        assert pl.explain(asked, batch[:1], "ixg", target=0).scores.isfinite().all()
    with pytest.raises(pl.PatchlightError, match="no classifier"):
        pl.wrap(vit.model)
    with pytest.raises(pl.PatchlightError, match="no text encoder"):
        pl.wrap(vit.model, texts=["a dog"])


def test_a_projection_of_timm_is_no_classifier() -> None:
    """Only where it is what the weights were published with, and no labels say otherwise."""
    name = "vit_base_patch16_clip_224.openai"
    assert pl.load(name, pretrained=False, num_classes=7, **SMALL).classes == 7
    assert pl.load(name, pretrained=False, labels=[str(i) for i in range(512)], **SMALL).classes == 512
    assert pl.load("vit_base_patch16_clip_224.openai_ft_in1k", pretrained=False, **SMALL).classes == 1000
    with pytest.raises(pl.PatchlightError, match=r"rows of width 48.*512 wide"):
        pl.load(name, pretrained=False, head=pl.heads.Texts(torch.randn(2, 48)), **SMALL)


def test_preprocessing_of_timm_towers_is_their_familys() -> None:
    def read(name: str, **options: Any) -> tuple[float, str]:
        vit = pl.load(name, pretrained=False, head=pl.heads.Neurons(1, channels=[0]), **SMALL, **options)
        return vit.preprocess.crop_pct, vit.preprocess.fit

    assert read("vit_base_patch16_clip_224.openai") == (1.0, "crop")
    assert read("vit_base_patch16_siglip_224.webli") == (1.0, "squash")
    assert read("vit_base_patch16_clip_224.openai_ft_in1k") == (0.9, "crop")
    assert read("vit_base_patch16_siglip_224.webli", num_classes=7) == (0.9, "crop")
    assert read("vit_small_patch14_dinov2") == (1.0, "crop")


def test_torchvision_without_its_heads() -> None:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(64, 16, 2, 4, WIDTH, 96, num_classes=7)
    model.heads = torch.nn.Identity()
    vit = pl.wrap(randomise(model).double(), head=probe(WIDTH))
    head: Any = vit.head
    with torch.no_grad():
        torch.testing.assert_close(vit.logits(images(vit)), head(model(images(vit))), atol=1e-10, rtol=1e-10)
    assert vit.reads_first


def test_labels_belong_to_the_head_of_a_transformers_backbone() -> None:
    with pytest.raises(pl.PatchlightError, match="give labels to the head"):
        quiet(transformers_model("ViTModel"), head=probe(WIDTH), labels=["a", "b", "c"])
    with pytest.raises(pl.PatchlightError, match="no text encoder, so a tokenizer"):
        quiet(transformers_model("ViTModel"), head=probe(WIDTH), tokenizer=str)


@pytest.mark.parametrize("kind", ["ViTModel", "CLIPVisionModel"])
def test_labels_of_a_model_without_classes_are_refused(kind: str) -> None:
    with pytest.raises(pl.PatchlightError, match="has no classes, so labels do not apply; give labels to the head"):
        quiet(transformers_model(kind), labels=["a", "b"])
