"""Anatomy of transformers' image classifiers: ViT, DeiT (with and without teacher), DINOv2, CLIP, SigLIP.

Written for transformers 4.46 to 5.x: the module layout differs between 4.x and 5.x, so parts are found by any of
their names rather than by one path.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.base import Anatomy, Ends, Parts, Pooling, affine, linear, stacked
from patchlight.errors import PatchlightError
from patchlight.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess

_HALF = (0.5, 0.5, 0.5)
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_SHAPES: dict[str, tuple[str, Pooling, int, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    # class: backbone attribute, pooling, prefix tokens, colour statistics
    "ViTForImageClassification": ("vit", "cls", 1, (_HALF, _HALF)),
    "DeiTForImageClassification": ("deit", "cls", 2, (IMAGENET_MEAN, IMAGENET_STD)),
    "DeiTForImageClassificationWithTeacher": ("deit", "cls+dist", 2, (IMAGENET_MEAN, IMAGENET_STD)),
    "Dinov2ForImageClassification": ("dinov2", "cls+avg", 1, (IMAGENET_MEAN, IMAGENET_STD)),
    "Dinov2WithRegistersForImageClassification": ("dinov2_with_registers", "cls+avg", 1, (IMAGENET_MEAN, IMAGENET_STD)),
    "CLIPForImageClassification": ("vision_model", "avg", 1, _CLIP),
    "SiglipForImageClassification": ("vision_model", "avg", 0, (_HALF, _HALF)),
}


class HuggingFaceAnatomy(Anatomy):
    """An image classifier of transformers."""

    library = "transformers"

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        labels: Sequence[str] | None = None,
        processor: Any = None,
        **about: Any,
    ) -> None:
        kind = type(model).__name__
        attribute, pooling, prefix, statistics = _SHAPES[kind]
        self._attribute = attribute
        config = getattr(model.config, "vision_config", model.config)
        height, width = _pair(config.image_size)
        patch_h, patch_w = _pair(config.patch_size)
        classes = int(model.config.num_labels)
        if classes == 0:
            raise PatchlightError(f"{name or kind} has no classifier (num_labels=0); nothing to explain")
        given = labels is not None
        if labels is None and all(not str(v).startswith("LABEL_") for v in model.config.id2label.values()):
            labels = [str(model.config.id2label[i]) for i in range(len(model.config.id2label))]
        if getattr(model.config, "problem_type", None) == "multi_label_classification":
            about.setdefault("sigmoid", True)
        about.setdefault("preprocess", _preprocess(processor, (height, width), *statistics))
        super().__init__(
            model,
            name=name or getattr(model, "name_or_path", "") or kind,
            grid=(height // patch_h, width // patch_w),
            extent=(height // patch_h * patch_h, width // patch_w * patch_w),
            prefix=prefix + int(getattr(config, "num_register_tokens", 0) or 0),
            pooling=pooling,
            heads=int(config.num_attention_heads),
            classes=classes,
            labels=labels,
            channels=int(getattr(config, "num_channels", 3)),
            **about,
        )
        self.assumed_labels = not given
        self._required = _required_after_first(type(self.blocks[0]))

    @property
    def _backbone(self) -> Any:
        backbone = getattr(self.net, self._attribute)
        return backbone if hasattr(backbone, "embeddings") else backbone.vision_model

    @property
    def blocks(self) -> Sequence[nn.Module]:
        holder = getattr(self._backbone, "encoder", self._backbone)
        layers = getattr(holder, "layers", None)
        return cast("Sequence[nn.Module]", holder.layer if layers is None else layers)

    def embed(self, images: Tensor) -> Tensor:
        tokens = self._backbone.embeddings(images)
        before = getattr(self._backbone, "pre_layrnorm", None)
        return cast(Tensor, tokens if before is None else before(tokens))

    def projection(self) -> nn.Module | None:
        return _find(self._backbone.embeddings, "patch_embeddings", "patch_embedding")

    def block(self, index: int, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        out = self.blocks[index](tokens, **dict.fromkeys(self._required))
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def readout(self, tokens: Tensor) -> Tensor:
        model: Any = self.net
        kind = type(model).__name__
        if kind.startswith("CLIP"):
            return cast(Tensor, model.classifier(tokens[:, 1:].mean(1)))
        norm = getattr(self._backbone, "post_layernorm", None) or self._backbone.layernorm
        tokens = norm(tokens)
        if kind.startswith("Siglip"):
            return cast(Tensor, model.classifier(tokens.mean(1)))
        if self.pooling == "cls+avg":
            return cast(Tensor, model.classifier(torch.cat([tokens[:, 0], tokens[:, self.prefix :].mean(1)], 1)))
        if self.pooling == "cls+dist":
            both = model.cls_classifier(tokens[:, 0]) + model.distillation_classifier(tokens[:, 1])
            return cast(Tensor, both / 2)
        return cast(Tensor, model.classifier(tokens[:, 0]))

    def parts(self, index: int) -> Parts:
        block = self.blocks[index]
        three = [
            _find(block, f"attention.{a}_proj", f"attention.attention.{b}", f"self_attn.{a}_proj")
            for a, b in (("q", "query"), ("k", "key"), ("v", "value"))
        ]
        value: Any = three[2]
        scales = [_find(block, f"layer_scale{i}") for i in (1, 2)]
        fc1, fc2 = _find(block, "mlp.fc1", "intermediate.dense"), _find(block, "mlp.fc2", "output.dense")
        activations = (("mlp", "activation_fn"), ("mlp", "activation"), ("intermediate", "intermediate_act_fn"))
        found = [getattr(getattr(block, holder, None), name, None) for holder, name in activations]
        return Parts(
            _find(block, "layernorm_before", "layer_norm1", "norm1"),
            _find(block, "layernorm_after", "layer_norm2", "norm2"),
            _find(block, "attention.o_proj", "attention.output.dense", "self_attn.out_proj", "attention.out_proj"),
            None if affine(value) is None else lambda: linear(value).weight,
            qkv=(lambda: stacked(*three)) if None not in three else None,
            fc1=fc1,
            activation=next((f for f in found if f is not None), None),
            fc2=fc2,
            scale1=None if scales[0] is None else cast(Tensor, scales[0].lambda1),
            scale2=None if scales[1] is None else cast(Tensor, scales[1].lambda1),
            beyond="" if fc1 is not None and fc2 is not None else "its MLP is more than two linear maps",
        )

    def ends(self) -> Ends | None:
        if type(self.model).__name__ not in ("ViTForImageClassification", "DeiTForImageClassification"):
            return None
        stem, model = self._backbone.embeddings, cast(Any, self.net)
        prefix = stem.cls_token if self.prefix == 1 else torch.cat([stem.cls_token, stem.distillation_token], 1)
        projection = stem.patch_embeddings.projection
        return Ends(projection, prefix, stem.position_embeddings, self._backbone.layernorm, model.classifier)


def read_hf(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of a transformers image classifier, or None."""
    return HuggingFaceAnatomy(model, **about) if type(model).__name__ in _SHAPES else None


def supported() -> list[str]:
    """The transformers classes that are read."""
    return sorted(_SHAPES)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) else (int(size), int(size))


def _find(module: nn.Module, *paths: str) -> nn.Module | None:
    for path in paths:
        try:
            return module.get_submodule(path)
        except AttributeError:
            continue
    return None


def _required_after_first(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[2:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in kinds]


def _preprocess(processor: Any, size: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocess:
    """What an image processor would do, as far as a resize, a centre crop and colour statistics say it."""
    if processor is None:
        return Preprocess(size, mean, std, interpolation="bilinear", fit="squash")
    mean = tuple(getattr(processor, "image_mean", None) or mean)
    std = tuple(getattr(processor, "image_std", None) or std)
    names = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
    interpolation = names.get(int(getattr(processor, "resample", None) or 2), "bilinear")
    shortest = (dict(getattr(processor, "size", None) or {})).get("shortest_edge")
    if getattr(processor, "do_center_crop", False) and shortest:
        return Preprocess(size, mean, std, min(size) / shortest, interpolation, "crop")
    return Preprocess(size, mean, std, 1.0, interpolation, "squash")
