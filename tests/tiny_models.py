"""Tiny random models of transformers, torchvision and monai: image classifiers, video, sound and volumes.

Each is a row of a table: how it is made, what it takes, and what is expected of it when it is opened. The weights are
sampled again (`families.randomise`), so that no head, bias or layer scale is zero.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy
from tests.families import CLASSES, randomise

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
}
CLIP = (4, 3, 64, 64)
"""The shape of a video: frames, channels, rows, columns."""


@dataclass(frozen=True)
class TinyModel:
    """A model and what is expected of it.

    Args:
        make: Builds it.
        structure: The kind of structure: plain, bias, naflex, staged, map, video, sound, volume or none.
        shape: The shape of one input.
        grid: The grid of its tokens; None if it has stages.
        prefix: Number of tokens before the grid.
        drops: Whether tokens can be dropped.
        refused: Words of the sentence that refuses it; empty if it opens.
        quick: Whether the quick tests cover it, as one of its structure.
    """

    make: Callable[[], nn.Module]
    structure: str
    shape: tuple[int, ...] = (3, 64, 64)
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    drops: bool = False
    refused: str = ""
    quick: bool = False

    @property
    def library(self) -> str:
        """The library that it is of."""
        return _LIBRARIES[self.make.__qualname__.partition(".")[0]]


_LIBRARIES = {
    "_hf": "transformers",
    "_torchvision": "torchvision",
    "_max_vit": "torchvision",
    "_monai": "monai",
    "_timm_swin": "timm",
}


def _hf(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers model."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        stem = re.split("For(?=Image|Video|Audio)", kind)[0]
        model: nn.Module = getattr(transformers, kind)(
            getattr(transformers, f"{stem}Config")(num_labels=CLASSES, **options)
        )
        return model

    return make


def _vision(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers classifier whose sizes are in a configuration of its image encoder."""
    return _hf(kind, vision_config={**BASE, **options})


def _torchvision(kind: str, *sizes: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision import models

        model: nn.Module = getattr(models, kind)(*sizes, num_classes=CLASSES, **options)
        return model

    return make


def _max_vit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    model: nn.Module = MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return model


def _monai(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        nets = pytest.importorskip("monai.networks.nets")
        model: nn.Module = getattr(nets, kind)(**options)
        return model

    return make


def _timm_swin() -> nn.Module:
    import timm

    return timm.create_model("swin_tiny_patch4_window7_224", img_size=64, num_classes=CLASSES, **SWIN_OF_TIMM)


_LISTS: dict[str, Any] = {
    "depths": [1] * 4,
    "hidden_sizes": [16, 16, 32, 32],
    "num_attention_heads": [1, 2, 4, 4],
    "image_size": 64,
}
_SWIN: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1, 2, 1],
    "num_heads": [2, 2, 4, 4],
    "window_size": 2,
}
SWIN_OF_TIMM: dict[str, Any] = {
    "embed_dim": 16,
    "depths": (1, 1, 2, 1),
    "num_heads": (2, 2, 4, 4),
    "window_size": 2,
    "always_partition": True,
}
_LEVIT: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [16, 32, 32],
    "num_attention_heads": [1, 2, 2],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
}
_TV_SWIN: tuple[Any, ...] = ([4, 4], 16, [1, 1, 2, 1], [2, 2, 4, 4], [2, 2])
_SHARED = {
    "use_shared_relative_position_bias": True,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": False,
}
_PERCEIVER: dict[str, Any] = {
    "num_latents": 8,
    "d_latents": 32,
    "d_model": 32,
    "num_blocks": 1,
    "num_self_attends_per_block": 2,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1,
    "image_size": 64,
}
_DINO = {**BASE, "mlp_ratio": 2}
_DEIT = {"grid": (4, 4), "prefix": 2, "drops": True}
_PLAIN: dict[str, Any] = {"grid": (4, 4), "prefix": 1, "drops": True}
_NAFLEX = {"image_size": None, "num_patches": 16}
_VIDEO: dict[str, Any] = {**BASE, "num_frames": 4}
_JEPA: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_ratio": 2, "crop_size": 64},
    **{"image_size": 64, "patch_size": 16, "frames_per_clip": 4, "tubelet_size": 2, "num_pooler_layers": 1},
    **{"pred_hidden_size": 48, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1},
}
_AST: dict[str, Any] = {"frequency_stride": 10, "time_stride": 10, "max_length": 64, "num_mel_bins": 32}
_VOLUME: dict[str, Any] = {
    **{"in_channels": 1, "img_size": (32, 32, 48), "patch_size": (16, 16, 16), "hidden_size": 48, "mlp_dim": 64},
    **{"num_layers": 3, "num_heads": 4, "proj_type": "conv", "classification": True, "num_classes": CLASSES},
}
_CONVOLUTIONAL: dict[str, dict[str, Any]] = {
    "BitForImageClassification": {"embedding_size": 32, "hidden_sizes": [32] * 4, "depths": [1] * 4, "num_groups": 8},
    "ConvNextForImageClassification": {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "ConvNextV2ForImageClassification": {"hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "EfficientNetForImageClassification": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128},
    "HGNetV2ForImageClassification": {},
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
    "RegNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "ResNetForImageClassification": {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1] * 4},
    "TextNetForImageClassification": {},
    "PPLCNetForImageClassification": {},
}

CLASSIFIERS: dict[str, TinyModel] = {
    "ViT": TinyModel(_hf("ViTForImageClassification", **BASE), "plain", **_PLAIN),
    "DeiT": TinyModel(_hf("DeiTForImageClassification", **BASE), "plain", **_DEIT),
    "DeiT-teacher": TinyModel(_hf("DeiTForImageClassificationWithTeacher", **BASE), "plain", **_DEIT),
    "DINOv2": TinyModel(_hf("Dinov2ForImageClassification", **_DINO), "plain", **_PLAIN),
    "DINOv2-registers": TinyModel(
        _hf("Dinov2WithRegistersForImageClassification", **_DINO, num_register_tokens=4),
        "plain",
        **{**_PLAIN, "prefix": 5},
    ),
    "CLIP": TinyModel(_vision("CLIPForImageClassification"), "plain", **_PLAIN),
    "SigLIP": TinyModel(_vision("SiglipForImageClassification"), "plain", **{**_PLAIN, "prefix": 0}),
    "TimmWrapper": TinyModel(
        _hf(
            "TimmWrapperForImageClassification",
            architecture="vit_tiny_patch16_224",
            model_args={"depth": 3, "img_size": 64, "embed_dim": 48, "num_heads": 4},
        ),
        "plain",
        **_PLAIN,
    ),
    "I-JEPA": TinyModel(_hf("IJepaForImageClassification", **BASE), "plain", **{**_PLAIN, "prefix": 0}, quick=True),
    "ViTMSN": TinyModel(_hf("ViTMSNForImageClassification", **BASE), "plain", **_PLAIN, quick=True),
    "MetaCLIP2": TinyModel(_vision("MetaClip2ForImageClassification"), "plain", **_PLAIN),
    "BEiT": TinyModel(
        _hf("BeitForImageClassification", **BASE, use_relative_position_bias=True), "bias", **_PLAIN, quick=True
    ),
    "BEiT-shared": TinyModel(_hf("BeitForImageClassification", **BASE, **_SHARED), "bias", **_PLAIN),
    "Data2Vec": TinyModel(
        _hf("Data2VecVisionForImageClassification", **BASE, use_relative_position_bias=True), "bias", **_PLAIN
    ),
    "Data2Vec-shared": TinyModel(_hf("Data2VecVisionForImageClassification", **BASE, **_SHARED), "bias", **_PLAIN),
    "SigLIP2": TinyModel(
        _vision("Siglip2ForImageClassification", **_NAFLEX), "naflex", **{**_PLAIN, "prefix": 0}, quick=True
    ),
    "Swin": TinyModel(_hf("SwinForImageClassification", **_SWIN), "staged", quick=True),
    "DonutSwin": TinyModel(_hf("DonutSwinForImageClassification", **_SWIN), "staged"),
    "SwinV2": TinyModel(_hf("Swinv2ForImageClassification", **_SWIN), "staged"),
    "Hiera": TinyModel(
        _hf(
            "HieraForImageClassification",
            image_size=[64, 64],
            embed_dim=16,
            depths=[1, 1, 2, 1],
            num_heads=[1, 2, 4, 8],
        ),
        "staged",
        quick=True,
    ),
    "PVT": TinyModel(_hf("PvtForImageClassification", **_LISTS), "staged", quick=True),
    "PVTv2": TinyModel(_hf("PvtV2ForImageClassification", **_LISTS), "staged"),
    "Segformer": TinyModel(_hf("SegformerForImageClassification", **_LISTS), "staged"),
    "CvT": TinyModel(
        _hf("CvtForImageClassification", embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3]), "staged"
    ),
    "LeViT": TinyModel(_hf("LevitForImageClassification", **_LEVIT), "map"),
    "LeViT-teacher": TinyModel(_hf("LevitForImageClassificationWithTeacher", **_LEVIT), "map"),
    "FocalNet": TinyModel(
        _hf(
            "FocalNetForImageClassification",
            image_size=64,
            embed_dim=16,
            depths=[1] * 4,
            hidden_sizes=[16, 32, 64, 128],
        ),
        "map",
    ),
    "PoolFormer": TinyModel(
        _hf("PoolFormerForImageClassification", depths=[1] * 4, hidden_sizes=[16] * 4), "map", quick=True
    ),
    "SwiftFormer": TinyModel(
        _hf("SwiftFormerForImageClassification", image_size=64, depths=[1] * 4, embed_dims=[16, 16, 32, 32]), "map"
    ),
    "MobileViT": TinyModel(
        _hf(
            "MobileViTForImageClassification",
            image_size=64,
            hidden_sizes=[16, 16, 16],
            neck_hidden_sizes=[8, 8, 8, 8, 16, 16, 32],
            num_attention_heads=2,
        ),
        "map",
    ),
    "MobileViTv2": TinyModel(_hf("MobileViTV2ForImageClassification", image_size=64, width_multiplier=0.5), "map"),
    "ImageGPT": TinyModel(
        _hf("ImageGPTForImageClassification", vocab_size=17, n_positions=64, n_embd=32, n_layer=2, n_head=4),
        "none",
        (64,),
        refused="colour",
    ),
    "Perceiver-learned": TinyModel(
        _hf("PerceiverForImageClassificationLearned", **{**_PERCEIVER, "image_size": 32}),
        "map",
        (3, 32, 32),
        (32, 32),
        drops=True,
        quick=True,
    ),
    "Perceiver-Fourier": TinyModel(
        _hf("PerceiverForImageClassificationFourier", **{**_PERCEIVER, "d_model": 261}),
        "map",
        (3, 224, 224),
        drops=True,
    ),
    "Perceiver-convolutions": TinyModel(
        _hf("PerceiverForImageClassificationConvProcessing", **{**_PERCEIVER, "d_model": 322}),
        "map",
        (3, 224, 224),
        drops=True,
    ),
    **{
        kind.removesuffix("ForImageClassification"): TinyModel(
            _hf(kind, **options), "none", refused="convolution", quick=kind.startswith("ResNet")
        )
        for kind, options in _CONVOLUTIONAL.items()
    },
    "torchvision-ViT": TinyModel(_torchvision("VisionTransformer", 64, 16, 3, 4, 48, 96), "plain", **_PLAIN),
    "torchvision-Swin": TinyModel(_torchvision("SwinTransformer", *_TV_SWIN), "staged", quick=True),
    "torchvision-MaxViT": TinyModel(_max_vit, "map"),
    "timm-Swin": TinyModel(_timm_swin, "staged"),
}
"""Image classifiers of transformers and torchvision, and a Swin of timm to compare with."""

GRIDS: dict[str, TinyModel] = {
    "VideoMAE": TinyModel(
        _hf("VideoMAEForVideoClassification", **_VIDEO, tubelet_size=2), "video", CLIP, (2, 4, 4), 0, True, quick=True
    ),
    "ViViT": TinyModel(
        _hf("VivitForVideoClassification", **_VIDEO, tubelet_size=[2, 16, 16]), "video", CLIP, (2, 4, 4), 1, True
    ),
    "V-JEPA2": TinyModel(_hf("VJEPA2ForVideoClassification", **_JEPA), "video", CLIP, (2, 4, 4), 0, True, quick=True),
    "TimeSformer": TinyModel(
        _hf("TimesformerForVideoClassification", **_VIDEO), "video", CLIP, (4, 4, 4), 1, False, quick=True
    ),
    "AST": TinyModel(
        _hf("ASTForAudioClassification", **{**BASE, **_AST}), "sound", (64, 32), (2, 5), 2, True, quick=True
    ),
    "monai-ViT": TinyModel(
        _monai("ViT", **_VOLUME, post_activation="none"), "volume", (1, 32, 32, 48), (2, 2, 3), 1, True, quick=True
    ),
    "monai-ViT-Tanh": TinyModel(_monai("ViT", **_VOLUME), "volume", (1, 32, 32, 48), refused="ends in a Tanh"),
}
"""Grids of several dimensions: videos, spectrograms, volumes."""
MODELS = {**CLASSIFIERS, **GRIDS}
UNBUILT = {
    "DinatForImageClassification": "its attention needs the package natten",
    "ShieldGemma2ForImageClassification": "it is a language model that answers yes or no",
}
"""Image classifiers of transformers without a small model here, and why."""


def image_classifiers() -> list[str]:
    """Every class of transformers' mapping of image classifiers."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    found = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    return [name for names in found for name in ((names,) if isinstance(names, str) else names)]


@cache
def tiny(name: str) -> nn.Module:
    """The model of a row, the same for every test of a run; tests that change it must copy it."""
    torch.manual_seed(0)
    return randomise(MODELS[name].make())


@cache
def opened(name: str) -> Anatomy:
    """The model of a row, wrapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        volume = MODELS[name].shape if MODELS[name].structure == "volume" else None
        return pl.wrap(tiny(name), name=name, preprocess=preprocess(name), input_shape=volume)


def preprocess(name: str) -> pl.Preprocess | None:
    """The size of a model's images, which not all of them know; None if it takes something else."""
    shape = MODELS[name].shape
    return pl.Preprocess(shape[1:]) if len(shape) == 3 else None


def inputs(name: str, count: int = 2, seed: int = 1) -> Tensor:
    """Random inputs of a model: a coarse pattern and a little noise."""
    shape = MODELS[name].shape
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count * shape[0], 1, *[5] * len(shape[1:]), generator=generator)
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape[1:])]
    smooth = nn.functional.interpolate(coarse, shape[1:], mode=mode).reshape(count, *shape)
    return smooth * 1.2 + 0.3 * torch.randn(count, *shape, generator=generator)


def packed(model: nn.Module, batch: Tensor, padding: int = 0) -> Any:
    """The output of a NaFlex model for images as transformers' processor gives them, with random padding."""
    module = pytest.importorskip("transformers.models.siglip2.image_processing_siglip2")
    patches = torch.stack([module.convert_image_to_patches(image, 16) for image in batch])
    noise = torch.randn(len(batch), padding, patches.shape[2], generator=torch.Generator().manual_seed(0))
    mask = torch.ones(len(batch), patches.shape[1] + padding)
    mask[:, patches.shape[1] :] = 0
    shapes = torch.tensor([[side // 16 for side in batch.shape[2:]]] * len(batch))
    return model(pixel_values=torch.cat([patches, noise], 1), pixel_attention_mask=mask, spatial_shapes=shapes)


def logits(name: str, batch: Tensor) -> Tensor:
    """The logits of the user's own model."""
    out: Any = packed(tiny(name), batch) if MODELS[name].structure == "naflex" else tiny(name)(batch)
    out = getattr(out, "logits", out)
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found
