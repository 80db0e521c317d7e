"""Which of timm's models can be opened, by the timm module they are in; no model is built to find out."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

PLAIN = (
    *("beit", "cait", "convit", "deepseek_vit", "deit", "eva", "gemma4_vit", "naflexvit", "qwen3_vit"),
    *("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam"),
    *("vitamin", "xcit"),
)
"""Blocks over one grid of patches."""

STAGED = (
    *("byoanet", "coat", "cpubone", "csatv2", "davit", "edgenext", "efficientformer", "efficientformer_v2"),
    *("efficientvit_mit", "efficientvit_msra", "fastvit", "focalnet", "gcvit", "hiera", "hieradet_sam2", "iformer"),
    *("levit", "lowformer", "maxxvit", "metaformer", "mobilenetv5", "mobilevit", "mvitv2", "nest", "nextvit", "pit"),
    *("pvt_v2", "shvit", "swiftformer", "swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr"),
    *("tiny_vit", "twins", "visformer", "volo"),
)
"""Each stage has its own grid; opened after one of them."""

_OTHERS = {
    "convmixer": "it mixes patches by convolutions, and has no attention",
    "crossvit": "it runs over two grids of patches of different sizes at once, so it has no single map",
    "efficientvim": "it is a state-space network, and has no attention",
    "mambaout": "it is a network of gated convolutions, and has no attention",
    "mlp_mixer": "it mixes patches by MLPs, and has no attention",
    "tnt": "it runs over patches and over the pixels in each at once, so it has no single sequence of tokens",
    "sequencer": "it processes rows and columns of patches by LSTMs, and has no attention",
}
_ENCODERS = "*_enc"


def why_not(name: str, module: str) -> str | None:
    """Why a timm model cannot be opened; None when it can."""
    if module and module not in PLAIN + STAGED:
        return _OTHERS.get(module, f"it is a convolutional network (timm's {module})")
    if fnmatch(name, _ENCODERS):
        return f"it returns tokens for a language model, not logits; '{name.removesuffix('_enc')}' has a classifier"
    return None


def module_of(name: str) -> str:
    """The timm module of a registered name; "" for names registered by others."""
    from timm.models import model_entrypoint

    package, _, module = model_entrypoint(name).__module__.rpartition(".")
    return module if package == "timm.models" else ""


def known_as(model: Any) -> tuple[str, str]:
    """Name and timm module of a timm model; by its class if it was not created by name, "" if it is not timm's."""
    kind = next((cls for cls in type(model).__mro__ if cls.__module__.startswith("timm.models.")), None)
    if kind is None:
        return "", ""
    from timm.models import is_model

    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or ""
    module = module_of(name) if is_model(name) else ""
    return (name, module) if module else (kind.__name__, kind.__module__.rpartition(".")[2])
