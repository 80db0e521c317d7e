"""One small, randomly initialised model for each supported family, with nothing left at a degenerate start.

Libraries begin with zero biases, unit norms, tiny layer scales and often a zero head, which would make many tests
empty; `randomise` moves them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

import patchlight as pl
from patchlight.anatomy.opened import Anatomy

CLASSES = 7


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Biases, norms, layer scales, positions and heads drawn afresh; matrices large enough for lively attention."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like) * std

    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(word in name for word in ("gamma", "lambda", "ls1", "ls2", "layer_scale")):
                p.copy_(0.7 + noise(p, 0.2))
            elif p.ndim == 1 and name.endswith("weight"):
                p.copy_(1 + noise(p, 0.15))
            elif p.ndim == 1:
                p.copy_(noise(p, 0.1))
            elif any(word in name for word in ("head", "classifier")) and p.shape[0] in (CLASSES, 1):
                p.copy_(noise(p, 0.3))
            elif p.ndim == 2 and "table" not in name:
                p.copy_(noise(p, 1.3 / p.shape[1] ** 0.5))
            else:
                p.copy_(noise(p, 0.3))
    return model.eval()


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    options = {"img_size": 64, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 4, **options}
    options = {key: value for key, value in options.items() if value is not None}
    return timm.create_model(name, num_classes=options.pop("num_classes", CLASSES), **options)


def _staged(name: str, **options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    options = {"depths": (1, 1, 2, 1), "num_heads": (1, 2, 2, 4), "num_classes": CLASSES, **options}
    return timm.create_model(name, pretrained_cfg_overlay={"input_size": (3, 64, 64)}, **options)


def _hf(kind: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 64,
        "patch_size": 16,
        **options,
    }
    stem = kind.removesuffix("ForImageClassificationWithTeacher").removesuffix("ForImageClassification")
    config_class = getattr(transformers, f"{stem}Config")
    if stem in ("CLIP", "Siglip"):
        config = config_class(vision_config=sizes, num_labels=CLASSES)
    else:
        config = config_class(**sizes, num_labels=CLASSES)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


def _torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(64, 16, 3, 4, 48, 96, num_classes=CLASSES)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: _timm("vit_tiny_patch16_224"),
    "vit-wide": lambda: _timm("vit_tiny_patch16_224", img_size=(48, 80)),
    "vit-binary": lambda: _timm("vit_tiny_patch16_224", num_classes=1),
    "vit-unfused": lambda: _unfused(_timm("vit_tiny_patch16_224")),
    "deit": lambda: _timm("deit_tiny_patch16_224"),
    "deit-distilled": lambda: _timm("deit_tiny_distilled_patch16_224"),
    "deit3": lambda: _timm("deit3_small_patch16_224"),
    "beit": lambda: _timm("beit_base_patch16_224"),
    "beitv2": lambda: _timm("beitv2_base_patch16_224"),
    "eva": lambda: _timm("eva_large_patch14_196"),
    "eva02": lambda: _timm("eva02_tiny_patch14_224"),
    "dinov2-reg": lambda: _timm("vit_small_patch14_reg4_dinov2"),
    "dinov3": lambda: _timm("vit_small_patch16_dinov3"),
    "clip": lambda: _timm("vit_base_patch16_clip_quickgelu_224"),
    "siglip": lambda: _timm("vit_base_patch16_siglip_224"),
    "flexivit": lambda: _timm("flexivit_small"),
    "reg4-gap": lambda: _timm("vit_medium_patch16_reg4_gap_256"),
    "hf-vit": lambda: _hf("ViTForImageClassification"),
    "hf-vit-eager": lambda: _hf("ViTForImageClassification", attn_implementation="eager"),
    "hf-deit": lambda: _hf("DeiTForImageClassificationWithTeacher"),
    "hf-dinov2": lambda: _hf("Dinov2ForImageClassification", mlp_ratio=2),
    "hf-clip": lambda: _hf("CLIPForImageClassification"),
    "hf-siglip": lambda: _hf("SiglipForImageClassification"),
    "torchvision": _torchvision,
    "swin": lambda: _staged("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16),
    "pvtv2": lambda: _staged("pvt_v2_b0", embed_dims=(16, 32, 32, 48)),
}


def _cnn_stem(name: str) -> nn.Module:
    import timm

    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 128, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": CLASSES}
    return timm.create_model(name, **options)


def _sized(name: str, size: int, **options: Any) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        name, num_classes=CLASSES, pretrained_cfg_overlay={"input_size": (3, size, size)}, **options
    )


def _made(kind: str, *given: Any, **options: Any) -> Any:
    """A timm model made by its class, for images of 64 pixels."""
    from timm import models

    torch.manual_seed(0)
    model: Any = getattr(models, kind)(*given, num_classes=CLASSES, **options)
    model.pretrained_cfg = {"input_size": (3, 64, 64)}
    return model


def _mvit(**options: Any) -> nn.Module:
    from timm.models.mvitv2 import MultiScaleVitCfg

    model: nn.Module = _made(
        "MultiScaleVit", MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16, **options), img_size=64
    )
    return model


_PIT = {"img_size": 64, "base_dims": (16, 16, 16), "depth": (1, 1, 1), "heads": (1, 2, 4)}
_SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 4}
RELATIVES: dict[str, Callable[[], nn.Module]] = {
    "relpos": lambda: _timm("vit_relpos_small_patch16_224"),
    "relpos-cls": lambda: _timm("vit_relpos_base_patch16_cls_224", img_size=(48, 80)),
    "srelpos": lambda: _timm("vit_srelpos_small_patch16_224"),
    "hybrid": lambda: _cnn_stem("vit_tiny_r_s16_p8_224"),
    "naflex": lambda: _sized("naflexvit_base_patch16_gap", 64, **_SMALL),
    "naflex-map": lambda: _sized("naflexvit_base_patch16_map", 64, **_SMALL),
    "qwen3": lambda: _timm("qwen3_vit_88m"),
    "qwen3-merge": lambda: _timm("qwen3_vit_88m_merge", out_features=32),
    "gemma4": lambda: _sized("gemma4_vit_167m", 64, **_SMALL, head_dim=12, position_embedding_size=64),
    "cait": lambda: _timm("cait_xxs24_224"),
    "sam": lambda: _timm("samvit_base_patch16_224", window_size=3, global_attn_indexes=(1,)),
    "xcit": lambda: _timm("xcit_nano_12_p16_224"),
    "convit": lambda: _timm("convit_tiny", local_up_to_layer=2, embed_dim=12),
}
"""timm's other plain transformers, each with what only it has."""

STAGED: dict[str, Callable[[], nn.Module]] = {
    "pit": lambda: _made("PoolingVisionTransformer", **_PIT),
    "pit-distilled": lambda: _made("PoolingVisionTransformer", **_PIT, distilled=True),
    "mvitv2-cls": lambda: _mvit(use_cls_token=True),
    "hiera": lambda: _made("Hiera", img_size=(64, 64), embed_dim=16, stages=(1, 1, 2, 1)),
    "levit": lambda: _sized("levit_128s", 64, img_size=64, embed_dim=(16, 24, 32), num_heads=(1, 2, 2), key_dim=8),
    "nest": lambda: _made("Nest", img_size=64, num_levels=2, embed_dims=(16, 24), num_heads=(1, 2), depths=(1, 1)),
    "coat": lambda: _sized("coat_lite_tiny", 64, img_size=64, embed_dims=(16, 16, 32, 32), serial_depths=(1, 1, 1, 1)),
    "edgenext": lambda: _sized("edgenext_xx_small", 64),
}
"""timm's networks of stages, cut where their features say; one of each way in which a map travels."""

HIERARCHICAL = ("swin", "pvtv2")
"""Families of several stages, opened at their second-to-last."""
PLAIN = tuple(family for family in FAMILIES if family not in HIERARCHICAL)

STRUCTURAL = ("vit-wide", "deit-distilled", "eva02", "siglip", "beit", "reg4-gap", "hf-clip", "torchvision", "swin")
"""One family for each way a model can be built differently; the rest run in `make test-all`."""


def _unfused(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
    return model


def build(family: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """A fresh model of a family, wrapped."""
    if family.startswith("hf-"):
        import pytest

        pytest.importorskip("transformers")
    model = randomise({**FAMILIES, **RELATIVES, **STAGED}[family]()).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pl.AssumedPreprocess)
        return pl.wrap(model, name=family)


def roomy(family: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """A fresh timm or torchvision model of a family whose heads are 16 wide, as fused attention wants them."""
    from torchvision.models import VisionTransformer

    if family == "torchvision":
        model: nn.Module = VisionTransformer(64, 16, 3, 4, 64, 96, num_classes=CLASSES)
    else:
        model = _timm(ROOMY[family], embed_dim=64)
    return pl.wrap(randomise(model).to(dtype), name=family)


ROOMY = {
    "vit": "vit_tiny_patch16_224",
    "deit-distilled": "deit_tiny_distilled_patch16_224",
    "reg4-gap": "vit_medium_patch16_reg4_gap_256",
    "eva02": "eva02_tiny_patch14_224",
    "dinov2-reg": "vit_small_patch14_reg4_dinov2",
    "siglip": "vit_base_patch16_siglip_224",
}


@cache
def shared(family: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """The same model for every test of a run; tests that change it must build their own."""
    return build(family, dtype)


def images(vit: Anatomy, count: int = 3, seed: int = 1) -> torch.Tensor:
    """Smooth random images: a coarse pattern and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, vit.channels, 5, 5, generator=generator, dtype=torch.float64)
    fine = torch.randn(count, vit.channels, *vit.preprocess.size, generator=generator, dtype=torch.float64)
    smooth = torch.nn.functional.interpolate(coarse, vit.preprocess.size, mode="bilinear")
    return (smooth * 1.2 + 0.3 * fine).to(vit.dtype)


def _drawn(count: int, width: int, vit: Anatomy) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, width, generator=generator, dtype=torch.float64).to(vit.dtype)


HEADS: dict[str, tuple[str, Callable[[Anatomy], Any]]] = {
    "texts": ("vit-wide", lambda vit: pl.heads.Texts(_drawn(3, 48, vit), ["a dog", "a cat", "a hat"])),
    "similar": ("dinov2-reg", lambda vit: pl.heads.Similar(images(vit, 3, seed=7))),
    "neurons": ("vit", lambda vit: pl.heads.Neurons(2, [3, 17, 5])),
    "max-neurons": ("reg4-gap", lambda vit: pl.heads.Neurons(2, directions=_drawn(3, 48, vit), pool="max")),
    "cls-neurons": ("vit", lambda vit: pl.heads.Neurons(3, [3, 17, 5], pool="cls")),
    "neighbours": ("siglip", lambda vit: pl.heads.Prototypes(_drawn(6, 48, vit), list("abcabc"), neighbours=1)),
}
"""By name, a family and the head it is asked by."""


@cache
def asked(head: str, dtype: torch.dtype = torch.float32) -> Anatomy:
    """The shared model of a family, asked by one of HEADS."""
    family, made = HEADS[head]
    return shared(family, dtype).ask(made(shared(family, dtype)))
