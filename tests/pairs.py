"""Small image-text models and backbones without a classifier, randomly initialised, and folders that hold them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from tests.families import randomise

TEXTS = ("a photo of a dog", "a cat", "the red car on a road")
ROOM = 10
"""How many tokens the small text sides read."""
WIDTH = 48
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 64,
    "patch_size": 16,
}
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
    "max_position_embeddings": ROOM,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
OWN_TOWER = {"layers": 3, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 64}
OWN_TEXT = {"context_length": ROOM, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
LAST = {"pool_type": "last", "no_causal_mask": True, "proj_bias": True}


def transformers_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(0)
    stem = kind.removesuffix("WithProjection").removesuffix("Model")
    config_class = getattr(transformers, f"{stem}Config")
    if kind in ("CLIPModel", "SiglipModel"):
        text = {**TEXT, "hidden_size": WIDTH if kind == "SiglipModel" else 32}
        text["projection_size"] = WIDTH
        more = {"projection_dim": 24} if kind == "CLIPModel" else {}
        config = config_class(vision_config=VISION, text_config=text, **more)
    else:
        more = {"num_register_tokens": 4} if "Registers" in kind or "DINOv3" in kind else {}
        more |= {"projection_dim": 24} if "Projection" in kind else {}
        more |= {"mlp_ratio": 2} if "Dinov2" in kind else {}
        config = config_class(**VISION, **more)
    return randomise(getattr(transformers, kind)(config))


def open_clip_model(kind: str) -> nn.Module:
    """A small model of open_clip: towers of its own, or timm's (the name says which, and how it pools and projects)."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    custom = open_clip.model.CustomTextCLIP
    if kind == "quick":
        return randomise(open_clip.model.CLIP(24, OWN_TOWER, OWN_TEXT, quick_gelu=True))
    if kind == "average":
        more = {"pool_type": "avg", "final_ln_after_pool": True, "ls_init_value": 0.1, "no_ln_pre": True}
        return randomise(open_clip.model.CLIP(24, {**OWN_TOWER, **more}, OWN_TEXT))
    if kind == "custom":
        tower = {**OWN_TOWER, "qk_norm": True, "scale_fc": True}
        return randomise(custom(24, tower, OWN_TEXT, init_logit_bias=-10.0))
    name, pool, proj = TRUNKS[kind]
    tower = {"timm_model_name": name, "timm_pool": pool, "timm_proj": proj, "image_size": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_clip.timm_model.timm, "create_model", _small(open_clip.timm_model.timm.create_model))
        return randomise(custom(64, tower, {**OWN_TEXT, **LAST}, init_logit_bias=-10.0))


def _small(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    sizes = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": 3, "num_heads": 4}
    return lambda name, **options: make(name, **{**options, **sizes})


TRUNKS: dict[str, tuple[str, str, str | None]] = {
    "siglip": ("vit_base_patch16_siglip_224", "map", "none"),
    "linear": ("vit_tiny_patch16_224", "avg", "linear"),
    "mlp": ("vit_tiny_patch16_224", "token", "mlp"),
    "eva": ("eva02_base_patch16_clip_224", "token", None),
}
OWN = ("quick", "average", "custom")


def words(kind: str) -> Any:
    """A tokenizer of a few words: CLIP marks beginning and end, SigLIP the end. Neither makes letters small."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    known = sorted({word for text in TEXTS for word in text.split()} | {"is", "this", "good", "of", "it"})
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *known])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    single = "<s> $A </s>" if kind == "CLIPModel" else "$A </s>"
    marks = [("<s>", 0), ("</s>", 1)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=marks)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


def folder(kind: str, path: Path, tokenizer: bool = True) -> Path:
    """A folder as `save_pretrained` leaves it: model, image processor, tokenizer."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers_model(kind)
    model.save_pretrained(path)
    if kind.startswith("CLIP"):
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64})
    elif kind.startswith("Siglip"):
        processor = transformers.SiglipImageProcessor(size={"height": 64, "width": 64})
    else:
        processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    processor.save_pretrained(path)
    if tokenizer:
        words(kind).save_pretrained(path)
    return path


def reads_double(kind: str) -> bool:
    """Whether its text side runs in float64: that of CLIP does not in transformers 4."""
    if kind != "transformers-CLIPModel":
        return True
    return not pytest.importorskip("transformers").__version__.startswith("4.")


@cache
def shared_pair(kind: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """The same model asked about `TEXTS` for every test of a run."""
    library, _, name = kind.partition("-")
    if dtype == torch.float64 and not reads_double(kind):
        pytest.skip("transformers 4 reads no texts in float64")
    if library == "open_clip":
        return pl.wrap(open_clip_model(name).to(dtype), texts=TEXTS, name=kind)
    return quiet(transformers_model(name).to(dtype), texts=TEXTS, tokenizer=words(name), name=kind)


def quiet(model: nn.Module, **about: Any) -> Anatomy:
    """The model wrapped, its preprocessing assumed without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        return pl.wrap(model, **about)


def both_sides(vit: Anatomy, images: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
    """The logits that the whole model gives for images and texts together, by its own library's forward."""
    model: Any = vit.model
    with torch.no_grad():
        if vit.library == "open_clip":
            ids = vit.tokenizer(list(texts), context_length=model.context_length)  # type: ignore[attr-defined]
            return model.get_logits(images, ids)[0]
        siglip = type(model).__name__ == "SiglipModel"
        padding: dict[str, Any] = {"padding": "max_length", "max_length": ROOM} if siglip else {"padding": True}
        ids = vit.tokenizer(list(texts), return_tensors="pt", **padding)  # type: ignore[attr-defined]
        mask = {} if siglip else {"attention_mask": ids["attention_mask"]}
        return model(input_ids=ids["input_ids"], pixel_values=images, **mask).logits_per_image
