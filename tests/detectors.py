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
SIZE, SQUARE = (64, 96), (64, 64)
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


def _resnet(kind: str = "ResNetConfig", first: int = 4) -> Any:
    """A convolutional backbone of 32 channels that returns the maps from stage `first` on."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}
    stages = [f"stage{number}" for number in range(first, 5)]
    return getattr(transformers, kind)(**sizes, layer_type="basic", out_features=stages)


def _convolutional() -> dict[str, Any]:
    """A convolutional backbone, and queries and classes."""
    where = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    return {
        **{"backbone_config": _resnet(), "num_queries": QUERIES, "num_labels": CLASSES},
        **where,
        **_ENCODER,
        **_DECODER,
    }


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


def windowed(kind: str, **backbone: Any) -> Any:
    """RF-DETR or LW-DETR: four windows of 4 x 4 patches, and some blocks that see all of them."""
    config = getattr(transformers, f"{kind}Config")(
        backbone_config={
            **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "mlp_ratio": 2},
            **{"patch_size": 8, "image_size": SQUARE[0], "out_features": ["stage2", "stage4"]},
            **backbone,
        },
        **{"d_model": 32, "group_detr": 1, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_n_points": 2},
        **{"decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4},
        **{"num_queries": QUERIES, "num_labels": CLASSES},
        **({"projector_scale_factors": [1.0]} if kind == "LwDetr" else {}),
    )
    model = drawn(getattr(transformers, f"{kind}ForObjectDetection")(config))
    model.bbox_embed.layers[-1].bias.data[2:] += 1.5  # larger boxes, which overlap
    return model


def deformable(**options: Any) -> Any:
    given = {**_convolutional(), "backbone_config": _resnet(first=2), "encoder_n_points": 2, "decoder_n_points": 2}
    config = transformers.DeformableDetrConfig(**given, **options)
    return drawn(transformers.DeformableDetrForObjectDetection(config))


def dab() -> Any:
    given = {key: value for key, value in _convolutional().items() if key != "d_model"}
    return drawn(transformers.DabDetrForObjectDetection(transformers.DabDetrConfig(**given, hidden_size=32)))


def real_time(kind: str, backbone: Any = None, points: Any = 2, **options: Any) -> Any:
    """RT-DETR, or a model like it."""
    config = getattr(transformers, f"{kind}Config")(
        **{"backbone_config": backbone or _resnet("RTDetrResNetConfig", 2), "d_model": 32, "encoder_hidden_dim": 32},
        **{"encoder_in_channels": [16, 16, 32], "decoder_in_channels": [32] * 3, "encoder_attention_heads": 4},
        **{"encoder_ffn_dim": 64, "decoder_layers": 2, "num_denoising": 0, "decoder_n_points": points},
        **{"decoder_attention_heads": 4, "decoder_ffn_dim": 64, "num_queries": QUERIES, "num_labels": CLASSES},
        **options,
    )
    return drawn(getattr(transformers, f"{kind}ForObjectDetection")(config))


def dfine() -> Any:
    backbone = transformers.HGNetV2Config(
        **{"stem_channels": [3, 8, 8], "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4},
        **{"stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [8] * 4, "stage_kernel_size": [3] * 4},
        **{"stage_out_channels": [8, 16, 16, 32], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4},
        **{"stage_downsample": [False, True, True, True], "stage_light_block": [False] * 4},
        out_features=["stage2", "stage3", "stage4"],
    )
    return real_time("DFine", backbone, [2, 2, 2], max_num_bins=8)


def grounding() -> Any:
    swin = transformers.SwinConfig(
        **{"embed_dim": 8, "depths": [1] * 4, "num_heads": [2] * 4, "window_size": 2, "image_size": 64},
        out_features=["stage2", "stage3", "stage4"],
    )
    text = transformers.BertConfig(**_SMALL, num_hidden_layers=1, vocab_size=1100)
    config = transformers.GroundingDinoConfig(
        **{"backbone_config": swin, "text_config": text, "max_text_len": 16, "num_queries": QUERIES},
        **{**_ENCODER, **_DECODER, "d_model": 32, "encoder_n_points": 2, "decoder_n_points": 2},
    )
    return drawn(transformers.GroundingDinoForObjectDetection(config))


def letters(texts: Sequence[str], max_length: int = 0, **_: Any) -> dict[str, Tensor]:
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
    "rf": lambda: windowed("RfDetr", model_type="rf_detr_dinov2", num_windows=2),
    "lw": lambda: windowed(
        "LwDetr", model_type="lw_detr_vit", num_windows=4, pretrain_image_size=64, window_block_indices=[0, 2]
    ),
    "rt": lambda: real_time("RTDetr"),
    "rtv2": lambda: real_time("RTDetrV2"),
    "dfine": dfine,
    "deformable": deformable,
    "two-stage": lambda: deformable(two_stage=True, with_box_refine=True, two_stage_num_proposals=QUERIES),
    "dab": dab,
    "grounding": grounding,
}


TEXTS = ("owl", "owlv2", "grounding")
"""Models whose classes are texts."""


@cache
def opened(name: str) -> pl.Anatomy:
    """A tiny detector, opened."""
    torch.manual_seed(0)
    if name in TEXTS:
        preprocess = pl.Preprocess((128, 128) if name == "grounding" else (64, 64), fit="squash")
        return pl.wrap(MODELS[name](), texts=["dog", "cat"], tokenizer=letters, preprocess=preprocess, name=name)
    size = SQUARE if name in ("rf", "lw") else SIZE
    return pl.wrap(MODELS[name](), labels=LABELS, preprocess=pl.Preprocess(size, fit="squash"), name=name)


def images(name: str, count: int = 1) -> Tensor:
    return torch.randn(count, *opened(name).input_shape, generator=torch.Generator().manual_seed(1))
