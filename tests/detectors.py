"""Tiny random detectors, whose heads are drawn: transformers starts some of them at zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import patchlight as pl

QUERIES, CLASSES = 5, 5
SIZE = (64, 96)
_ENCODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_DECODER = {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
LABELS = ["cat", "dog", "bird", "ship", "tree"]


def drawn(model: nn.Module) -> Any:
    """The model with 0.1 of noise on all its weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def _convolutional() -> dict[str, Any]:
    """A convolutional backbone of 32 channels, and queries and classes."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}
    backbone = transformers.ResNetConfig(**sizes, layer_type="basic", out_features=["stage4"])
    where = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    return {"backbone_config": backbone, **where, "num_queries": QUERIES, "num_labels": CLASSES, **_ENCODER, **_DECODER}


def yolos() -> Any:
    config = transformers.YolosConfig(
        **_SMALL,
        num_hidden_layers=3,
        image_size=list(SIZE),
        patch_size=16,
        num_detection_tokens=QUERIES,
        num_labels=CLASSES,
    )
    return drawn(transformers.YolosForObjectDetection(config))


def detr() -> Any:
    return drawn(transformers.DetrForObjectDetection(transformers.DetrConfig(**_convolutional())))


def conditional() -> Any:
    return drawn(transformers.ConditionalDetrForObjectDetection(transformers.ConditionalDetrConfig(**_convolutional())))


def owl(second: bool = False) -> Any:
    name = "Owlv2" if second else "OwlViT"
    text = {**_SMALL, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 8, "eos_token_id": 99}
    image = {**_SMALL, "num_hidden_layers": 2, "image_size": 64, "patch_size": 16}
    made = getattr(transformers, f"{name}Config")(text_config=text, vision_config=image, projection_dim=32)
    return drawn(getattr(transformers, f"{name}ForObjectDetection")(made))


def letters(texts: Sequence[str], max_length: int, **_: Any) -> dict[str, Tensor]:
    """A tokenizer of single letters; 99 ends a text."""
    rows = [[ord(letter) % 90 + 1 for letter in text] + [99] for text in texts]
    length = max(max_length, *map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


MODELS: dict[str, Callable[[], Any]] = {
    "yolos": yolos,
    "detr": detr,
    "conditional": conditional,
    "owl": owl,
    "owlv2": lambda: owl(second=True),
}


@cache
def opened(name: str) -> pl.Anatomy:
    """A tiny detector, opened."""
    torch.manual_seed(0)
    if name.startswith("owl"):
        preprocess = pl.Preprocess((64, 64), fit="squash")
        return pl.wrap(MODELS[name](), texts=["dog", "cat"], tokenizer=letters, preprocess=preprocess, name=name)
    return pl.wrap(MODELS[name](), labels=LABELS, preprocess=pl.Preprocess(SIZE, fit="squash"), name=name)


def images(name: str, count: int = 1) -> Tensor:
    return torch.randn(count, *opened(name).input_shape, generator=torch.Generator().manual_seed(1))
