"""Siblings of ``pocket``, registered with timm: a distilled, an average-pooled and a hierarchical CIFAR-10 classifier.

    patchlight explain photo.jpg --plugin tools/siblings.py --model pocket_swin --weights DIR/pocket_swin.safetensors

``tools/train_siblings.py`` makes the weights; none are bundled.
"""

from __future__ import annotations

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from patchlight.zoo import pocket

ABOUT = pocket.description()
CONFIG = {
    "input_size": (3, 32, 32),
    "num_classes": len(ABOUT["classes"]),
    "label_names": tuple(ABOUT["classes"]),
    "mean": tuple(ABOUT["mean"]),
    "std": tuple(ABOUT["std"]),
    "crop_pct": 1.0,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}
NAMES = ("pocket_distilled", "pocket_pooled", "pocket_swin")
default_cfgs = generate_default_cfgs(dict.fromkeys(NAMES, CONFIG))


@register_model
def pocket_distilled(pretrained: bool = False, **options: Any) -> nn.Module:
    """DeiT's architecture: a distillation token and its own head beside the class token's, averaged in use."""
    return _build(VisionTransformerDistilled, "pocket_distilled", pretrained, {**ABOUT["architecture"], **options})


@register_model
def pocket_pooled(pretrained: bool = False, **options: Any) -> nn.Module:
    """No class token, four registers, and a classifier that reads the average of the patch tokens."""
    own = {"class_token": False, "reg_tokens": 4, "no_embed_class": True, "global_pool": "avg"}
    return _build(VisionTransformer, "pocket_pooled", pretrained, {**ABOUT["architecture"], **own, **options})


@register_model
def pocket_swin(pretrained: bool = False, **options: Any) -> nn.Module:
    """Swin: six blocks on 8 x 8 patches in windows of 4 x 4, shifted in turn, then three on the 4 x 4 merged ones."""
    shared = {key: ABOUT["architecture"][key] for key in ("img_size", "patch_size", "num_classes", "embed_dim")}
    stages = {"depths": (6, 3), "num_heads": (6, 6), "head_dim": 32, "mlp_ratio": (4.0, 2.0), "window_size": 4}
    return _build(SwinTransformer, "pocket_swin", pretrained, {**shared, **stages, "drop_path_rate": 0.0, **options})


def _build(kind: type[nn.Module], name: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = build_model_with_cfg(kind, name, pretrained, **options)
    return model
