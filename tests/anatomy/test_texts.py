"""Image-text models: logits of images against sentences are those of the whole model, and sentences are read whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import patchlight as pl
from patchlight.testing import check_method, contract_names
from tests.dropping import assert_dropping_is_masking
from tests.families import images
from tests.pairs import (
    OWN,
    OWN_TEXT,
    OWN_TOWER,
    ROOM,
    TEXTS,
    TRUNKS,
    both_sides,
    folder,
    open_clip_model,
    quiet,
    reads_double,
    shared_pair,
    transformers_model,
    words,
)

PAIRS = ("transformers-CLIPModel", "transformers-SiglipModel", *(f"open_clip-{kind}" for kind in (*OWN, *TRUNKS)))
SIGMOID = ("transformers-SiglipModel", "open_clip-custom", *(f"open_clip-{kind}" for kind in TRUNKS))


@pytest.mark.parametrize("kind", PAIRS)
def test_logits_are_those_of_both_sides(kind: str) -> None:
    """The texts' matrix, made once, gives what the model gives for images and texts together."""
    vit = shared_pair(kind, torch.float64)
    batch = images(vit)
    logits = both_sides(vit, batch, TEXTS)
    assert (logits[0] - logits[1]).abs().max() > 0.01, "the test model does not look at its input"
    torch.testing.assert_close(vit.logits(batch), logits, atol=1e-10, rtol=1e-10)
    for i, text in enumerate(TEXTS):
        torch.testing.assert_close(vit.logits(batch)[:, i], both_sides(vit, batch, [text])[:, 0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", PAIRS)
def test_probabilities_are_the_models_own(kind: str) -> None:
    vit = shared_pair(kind, torch.float64)
    logits = both_sides(vit, images(vit), TEXTS)
    expected = logits.sigmoid() if kind in SIGMOID else logits.softmax(-1)
    torch.testing.assert_close(vit.probabilities(vit.logits(images(vit))), expected, atol=1e-10, rtol=1e-10)
    scale = vit.model.logit_scale.exp().item()  # type: ignore[operator,union-attr]
    bias = getattr(vit.model, "logit_bias", None)
    assert vit.outputs.scale == pytest.approx(scale, rel=1e-12)
    assert vit.outputs.bias == pytest.approx(0 if bias is None else bias.item(), rel=1e-12)
    assert vit.labels == list(TEXTS)


@pytest.mark.parametrize("kind", PAIRS)
def test_dropping_tokens_of_a_pair_is_masking_them(kind: str) -> None:
    vit = shared_pair(kind, torch.float64)
    assert_dropping_is_masking(vit, images(vit, 2))


@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel"])
def test_a_transformers_folder_with_sentences(kind: str, tmp_path: Path) -> None:
    """Weights, tokenizer and preprocessing come from the folder."""
    where = folder(kind, tmp_path)
    vit = pl.load(f"hf:{where}", texts=TEXTS)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), both_sides(vit, batch, TEXTS), atol=1e-5, rtol=1e-5)
    fit = "squash" if kind == "SiglipModel" else "crop"
    assert (vit.preprocess.size, vit.preprocess.fit, vit.preprocess.crop_pct) == ((64, 64), fit, 1.0)
    result = pl.explain(vit, batch[:1], "genatt", target="a cat")
    assert result.target.item() == 1
    with pytest.raises(pl.PatchlightError, match=r"no classifier.*Texts"):
        pl.load(f"hf:{where}")


def test_a_transformers_folder_without_a_tokenizer(tmp_path: Path) -> None:
    where = folder("CLIPModel", tmp_path, tokenizer=False)
    with pytest.raises(pl.PatchlightError, match=r"has no tokenizer.*processor="):
        pl.load(f"hf:{where}", texts=TEXTS)
    vit = pl.load(f"hf:{where}", texts=TEXTS, tokenizer=words("CLIPModel"))
    torch.testing.assert_close(vit.logits(images(vit)), both_sides(vit, images(vit), TEXTS), atol=1e-5, rtol=1e-5)


def test_a_processor_of_transformers_brings_the_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer = transformers_model("CLIPModel"), words("CLIPModel")
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})

    class Processor:
        image_processor, tokenizer = pictures, None

    Processor.tokenizer = tokenizer
    vit = pl.wrap(model, texts=TEXTS, processor=Processor())
    torch.testing.assert_close(vit.logits(images(vit)), shared_pair("transformers-CLIPModel").logits(images(vit)))
    with pytest.raises(pl.PatchlightError, match="has no tokenizer"):
        pl.wrap(model, texts=TEXTS, processor=pictures)


def test_transformers_siglip_is_always_filled_up() -> None:
    """It reads a text at its last place: filled up only to the longest sentence, the embedding would be another."""
    vit = shared_pair("transformers-SiglipModel", torch.float64)
    model: Any = vit.model
    batch = images(vit)
    ids = words("SiglipModel")(list(TEXTS), padding=True, return_tensors="pt")["input_ids"]
    assert ids.shape[1] < ROOM
    with torch.no_grad():
        short = model(input_ids=ids, pixel_values=batch).logits_per_image
    assert (vit.logits(batch) - short).abs().max() > 1e-3


def test_transformers_siglip_reads_small_letters() -> None:
    vit = shared_pair("transformers-SiglipModel", torch.float64)
    bare: Any = vit.bare
    torch.testing.assert_close(bare.encode_texts(["A Cat"]), bare.encode_texts(["a cat"]), atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["transformers-CLIPModel", "transformers-SiglipModel", "open_clip-quick"])
def test_templates(kind: str) -> None:
    """Each prompt's embedding is normalised, they are averaged, and normalised again; their order does not matter."""
    vit = shared_pair(kind, torch.float64)
    bare: Any = vit.bare
    batch = images(vit)
    templates = ["a photo of a {}", "this is a good {}", "{}"]
    scale, bias = vit.outputs.scale, vit.outputs.bias
    assert scale is not None
    features = F.normalize(bare.features_of(batch), dim=-1)
    expected = torch.zeros(len(batch), 2, dtype=torch.float64)
    for c, word in enumerate(("dog", "cat")):
        total = torch.zeros(features.shape[1], dtype=torch.float64)
        for template in templates:
            embedding = bare.encode_texts([template.replace("{}", word)])[0]
            total += embedding / embedding.norm()
        expected[:, c] = scale * features @ (total / total.norm()) + bias
    asked = pl.wrap(bare, texts=["dog", "cat"], template=templates)
    torch.testing.assert_close(asked.logits(batch), expected, atol=1e-10, rtol=1e-10)
    other = pl.wrap(bare, texts=["dog", "cat"], template=templates[::-1])
    torch.testing.assert_close(other.logits(batch), expected, atol=1e-10, rtol=1e-10)
    one = pl.wrap(bare, texts=["dog", "cat"], template="a photo of a {}")
    written = pl.wrap(bare, texts=["a photo of a dog", "a photo of a cat"])
    torch.testing.assert_close(one.logits(batch), written.logits(batch), atol=1e-10, rtol=1e-10)
    assert (one.labels, written.labels) == (["dog", "cat"], ["a photo of a dog", "a photo of a cat"])


def test_many_sentences_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    bare: Any = shared_pair("open_clip-quick", torch.float64).bare
    whole = bare.encode_texts(TEXTS)
    monkeypatch.setattr("patchlight.anatomy.texts.CHUNK", 2)
    torch.testing.assert_close(bare.encode_texts(TEXTS), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "marks"), [("transformers-CLIPModel", 2), ("transformers-SiglipModel", 1), ("open_clip-quick", 2)]
)
def test_sentences_that_do_not_fit_are_refused(kind: str, marks: int) -> None:
    """The longest that fits is read; one word more is refused, with how many there are and how many fit."""
    bare: Any = shared_pair(kind).bare
    longest = " ".join(["dog"] * (ROOM - marks))
    assert bare.encode_texts([longest]).isfinite().all()
    with pytest.raises(pl.PatchlightError, match=f"makes {ROOM + 1} tokens.* reads {ROOM} .*shorten it"):
        bare.encode_texts([f"{longest} dog"])
    for texts, words_ in ((["  "], "text 0 is empty"), ([], "no sentences"), (["a", "a"], "two classes are called")):
        with pytest.raises(pl.PatchlightError, match=words_):
            pl.wrap(bare, texts=texts)
    with pytest.raises(pl.PatchlightError, match=r"rows of width 5"):
        pl.wrap(bare, head=pl.heads.Texts(torch.randn(2, 5)))
    with pytest.raises(pl.PatchlightError, match="head or texts, not both"):
        pl.wrap(bare, head=pl.heads.Texts(["a"]), texts=["a"])


def test_a_tokenizer_of_another_transformers_model_is_refused() -> None:
    class Other:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": torch.full((len(texts), 3), 99)}

    with pytest.raises(pl.PatchlightError, match=r"gives token 99.*is 0 to 59"):
        quiet(transformers_model("CLIPModel"), texts=["a dog"], tokenizer=Other())

    class Broken:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            raise KeyError("pad")

    with pytest.raises(pl.PatchlightError, match=r"the Broken of CLIPModel cannot read 'a dog': 'pad'"):
        quiet(transformers_model("CLIPModel"), texts=["a dog"], tokenizer=Broken())


def open_clip_folder(path: Path) -> Path:
    """A folder as open_clip's `push_to_hf_hub` writes it."""
    from safetensors.torch import save_file

    model = open_clip_model("quick")
    config = {"embed_dim": 24, "vision_cfg": OWN_TOWER, "text_cfg": OWN_TEXT, "quick_gelu": True}
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "resize_mode": "squash"}
    path.mkdir(exist_ok=True)
    whole = {"model_cfg": config, "preprocess_cfg": preprocess}
    (path / "open_clip_config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(model.state_dict(), path / "open_clip_model.safetensors")
    return path


def test_an_open_clip_folder(tmp_path: Path) -> None:
    vit = pl.load(f"open_clip:{open_clip_folder(tmp_path)}", texts=TEXTS)
    batch = images(vit)
    torch.testing.assert_close(vit.logits(batch), shared_pair("open_clip-quick").logits(batch), atol=1e-5, rtol=1e-5)
    assert vit.preprocess == pl.Preprocess((64, 64), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), fit="squash")
    random = pl.load(f"open_clip:{tmp_path}", texts=TEXTS, pretrained=False)
    assert (random.logits(batch) - vit.logits(batch)).abs().max() > 1e-3
    filled = pl.load(f"open_clip:{tmp_path}", texts=TEXTS, weights=tmp_path / "open_clip_model.safetensors")
    torch.testing.assert_close(filled.logits(batch), vit.logits(batch))
    with pytest.raises(pl.PatchlightError, match=r"its own weights; pretrained='openai'"):
        pl.load(f"open_clip:{tmp_path}", texts=TEXTS, pretrained="openai")
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(pl.PatchlightError, match=r"could not be loaded.*weights"):
        pl.load(f"open_clip:{tmp_path}", texts=TEXTS)
    (tmp_path / "open_clip_config.json").unlink()
    with pytest.raises(pl.PatchlightError, match=r"no open_clip_config\.json"):
        pl.load(f"open_clip:{tmp_path}", texts=TEXTS)


def test_open_clip_preprocessing_is_its_own() -> None:
    """A picture prepared by ours and by open_clip's own transform."""
    open_clip = pytest.importorskip("open_clip")
    from PIL import Image

    noise = torch.randint(0, 256, (90, 131, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    picture = Image.fromarray(noise.numpy())
    vit = shared_pair("open_clip-quick")
    own = open_clip.transform.image_transform_v2(open_clip.transform.PreprocessCfg(size=(64, 64)), is_train=False)
    torch.testing.assert_close(vit.preprocess.tensor(picture), own(picture), atol=1e-5, rtol=1e-5)


def test_open_clip_names() -> None:
    pytest.importorskip("open_clip")
    with pytest.raises(pl.PatchlightError, match=r"does not have the model 'ViT-B-17'.*'ViT-B-16'"):
        pl.load("open_clip:ViT-B-17", texts=TEXTS)
    with pytest.raises(pl.PatchlightError, match=r"no weights 'opnai' for 'ViT-B-16'.*'openai'"):
        pl.load("open_clip:ViT-B-16", texts=TEXTS, pretrained="opnai")
    with pytest.raises(pl.PatchlightError, match="only open_clip's weights have tags"):
        pl.load("vit_tiny_patch16_224", pretrained="openai")


def test_open_clip_weights_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked for in the local cache, with what their tag says; else refused at once."""
    open_clip = pytest.importorskip("open_clip")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("patchlight.anatomy.open_clip.unreachable", lambda: "no network")
    monkeypatch.setattr("patchlight.anatomy.open_clip.cached", lambda *_: None)
    with pytest.raises(pl.PatchlightError, match=r"'openai' are not in the local cache.*no network"):
        pl.load("open_clip:ViT-B-16", texts=TEXTS)
    seen: dict[str, Any] = {}

    def create(source: str, **given: Any) -> torch.nn.Module:
        seen.update(given, source=source)
        return open_clip_model("quick")

    monkeypatch.setattr("patchlight.anatomy.open_clip.cached", lambda *_: tmp_path / "weights.bin")
    monkeypatch.setattr(open_clip, "create_model", create)
    pl.load("open_clip:ViT-B-16", texts=TEXTS)
    assert (seen["source"], seen["pretrained"]) == ("ViT-B-16", str(tmp_path / "weights.bin"))
    assert seen["force_quick_gelu"] is True
    assert seen["force_preprocess_cfg"]["mean"] == pytest.approx((0.48145466, 0.4578275, 0.40821073))


@pytest.mark.slow
def test_a_listed_open_clip_model() -> None:
    pytest.importorskip("open_clip")
    vit = pl.load("open_clip:ViT-S-32-alt", pretrained=False, texts=TEXTS)
    torch.testing.assert_close(vit.logits(images(vit)), both_sides(vit, images(vit), TEXTS), atol=1e-4, rtol=1e-4)
    assert vit.preprocess.crop_pct == 1.0


def test_open_clip_models_that_cannot_be_opened() -> None:
    open_clip = pytest.importorskip("open_clip")
    tower = {**OWN_TOWER, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
    text = {**OWN_TEXT, "embed_cls": True, "output_tokens": True}
    coca = open_clip.coca_model.CoCa(32, {**OWN_TEXT}, text, tower)
    with pytest.raises(pl.Unsupported, match="CoCa pools its tokens by an attention"):
        pl.wrap(coca, texts=TEXTS)
    pooled = open_clip.model.CLIP(24, {**tower, "output_tokens": False, "attn_pooler_heads": 8}, OWN_TEXT)
    with pytest.raises(pl.Unsupported, match="by token or average work"):
        pl.wrap(pooled, texts=TEXTS)
    convolutions = open_clip.model.CLIP(24, {**OWN_TOWER, "layers": [1, 1, 1, 1]}, OWN_TEXT)
    with pytest.raises(pl.Unsupported, match="its image encoder is a ModifiedResNet"):
        pl.wrap(convolutions, texts=TEXTS)
    other = open_clip.model.CLIP(24, OWN_TOWER, {**OWN_TEXT, "vocab_size": 100})
    with pytest.raises(pl.PatchlightError, match=r"tokenizer=open_clip\.get_tokenizer"):
        pl.wrap(other, texts=TEXTS)
    with pytest.raises(pl.PatchlightError, match="give labels to the head"):
        pl.wrap(other, head=pl.heads.Texts(torch.randn(2, 24)), labels=["a", "b"])


def test_a_pass_leaves_the_text_side_alone() -> None:
    """Explaining runs the image side: no gradient and no call reaches the text side."""
    vit = shared_pair("open_clip-quick")
    calls: list[int] = []
    model: Any = vit.model
    handle = model.token_embedding.register_forward_hook(lambda *_: calls.append(1))
    pl.explain(vit, images(vit, 1), "genatt", target=0)
    handle.remove()
    assert not calls
    assert all(p.grad is None for p in model.parameters())


def in_transformers(visual: Any) -> torch.nn.Module:
    """An open_clip tower's weights in transformers' class."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.CLIPVisionConfig(**sizes, image_size=64, patch_size=16, projection_dim=24)
    model = transformers.CLIPVisionModelWithProjection(config).double().eval()
    names = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    state = {
        "embeddings.class_embedding": visual.class_embedding,
        "embeddings.patch_embedding.weight": visual.conv1.weight,
        "embeddings.position_embedding.weight": visual.positional_embedding,
        "visual_projection.weight": visual.proj.T,
    }
    for ours, theirs in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm")):
        state |= {f"{theirs}.{kind}": getattr(getattr(visual, ours), kind) for kind in ("weight", "bias")}
    for i, block in enumerate(visual.transformer.resblocks):
        at = f"encoder.layers.{i}"
        for kind in ("weight", "bias"):
            for ours, theirs in names.items():
                state[f"{at}.{theirs}.{kind}"] = getattr(block.get_submodule(ours), kind)
            for letter, part in zip("qkv", getattr(block.attn, f"in_proj_{kind}").chunk(3), strict=True):
                state[f"{at}.self_attn.{letter}_proj.{kind}"] = part
            state[f"{at}.self_attn.out_proj.{kind}"] = getattr(block.attn.out_proj, kind)
    state = {key if key.startswith("visual") else f"vision_model.{key}": value for key, value in state.items()}
    missing, extra = model.load_state_dict({key: value.clone() for key, value in state.items()}, strict=False)
    assert not extra
    assert all("position_ids" in key for key in missing)
    return model


def test_the_same_tower_by_another_library() -> None:
    """The same weights give the same logits and the same maps, whoever wrote the modules."""
    vit = shared_pair("open_clip-quick", torch.float64)
    bare: Any = vit.bare
    model = in_transformers(bare.model.visual)
    texts = pl.heads.Texts(bare.encode_texts(TEXTS), TEXTS)
    other = quiet(model, head=texts, preprocess=vit.preprocess)
    batch = images(vit)
    scale = vit.outputs.scale
    assert scale is not None
    torch.testing.assert_close(scale * other.logits(batch), vit.logits(batch), atol=1e-10, rtol=1e-10)
    for method in ("genatt", "rollout", "decompx", "ixg.libra", "attcat", "tokentm"):
        maps = [pl.explain(each, batch, method, target=1, score="cosine").scores for each in (vit, other)]
        assert maps[0].abs().max() > 1e-6
        torch.testing.assert_close(maps[0], maps[1], atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("kind", ["transformers-CLIPModel", "transformers-SiglipModel"])
def test_removal_metrics_measure_sentences(kind: str) -> None:
    """The curves begin at the probability that the model itself gives for the sentence."""
    vit = shared_pair(kind)
    batch = images(vit, 2)
    maps = pl.explain(vit, batch, "genatt", target=1)
    measured = pl.evaluate(vit, batch, maps, "deletion", target=1, progress=False)
    logits = both_sides(vit, batch, TEXTS)
    expected = logits.sigmoid() if kind in SIGMOID else logits.softmax(-1)
    assert measured.curve is not None
    torch.testing.assert_close(measured.curve[:, 0].double(), expected[:, 1].double(), atol=1e-5, rtol=1e-5)


SOME = ("genatt", "tis", "decompx", "rollout", "ixg.libra", "gradcam", "rise", "transatt")
ASKED = ("transformers-CLIPModel", "transformers-SiglipModel", "open_clip-quick", "open_clip-siglip")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in ASKED[:2] else pytest.mark.slow) for k in ASKED])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in SOME else pytest.mark.slow)
        for n in {**dict.fromkeys(SOME), **dict.fromkeys(contract_names())}
    ],
)
def test_contract_of_sentences(name: str, kind: str) -> None:
    vit = shared_pair(kind)
    double = shared_pair(kind, torch.float64) if reads_double(kind) else None
    check_method(name, vit, images(vit, 2), double=double)
