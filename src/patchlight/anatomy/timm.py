"""Anatomy of timm's plain transformers: VisionTransformer (ViT, DeiT, DINOv2, CLIP, SigLIP, FlexiViT), Eva, BEiT."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from patchlight.anatomy.contract import Ends, Parts, Pooling, affine
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.hub import cached, not_cached, unreachable
from patchlight.anatomy.names import PLAIN, STAGED, module_of, why_not
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import named_parts
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess


class TimmAnatomy(CrossedAnatomy):
    """What timm's plain transformers share: `blocks` over one grid, some in an `encoder`.

    `path` leads to a transformer that is part of a larger model.
    """

    library = "timm"
    plain_ends = True
    """Whether embedding and head can be those of a plain ViT."""
    lists: tuple[str, ...] = ("blocks",)
    """The lists of blocks, in order."""

    def __init__(
        self, model: Any, name: str | None = None, labels: Sequence[str] | None = None, path: str = "", **facts: Any
    ) -> None:
        part: Any = model.get_submodule(path)
        self.path, self._body = path, f"{path}{'' if hasattr(part, 'blocks') else '.encoder'}".strip(".")
        body = model.get_submodule(self._body)
        self.projects = labels is None and projects(part)
        facts = model_facts(part, name, labels, facts)
        grid, cell = _grid(part, body, facts["preprocess"].size)
        if not path and not self.projects:
            heads = part.get_classifier()
            heads = {id(getattr(head, "fc", head)) for head in (heads if isinstance(heads, tuple) else (heads,))}
            self.head_paths = [key for key, module in model.named_modules() if id(module) in heads]
        inside = [f"{name}.{index}" for name in self.lists for index in range(len(getattr(body, name)))]
        super().__init__(
            model,
            paths=[f"{self._body}.{each}".strip(".") for each in inside],
            grid=grid,
            extent=(grid[0] * cell[0], grid[1] * cell[1]),
            prefix=int(getattr(part, "num_prefix_tokens", getattr(part, "cls_token", None) is not None)),
            pooling=_pooling(part),
            heads=_heads(body.blocks[0]),
            **facts,
        )
        if getattr(part, "global_pool", "") == "prr" and getattr(part.attn_pool, "pool", "") == "token":
            self.pool_query = "cls"

    @property
    def inner(self) -> Any:
        """The twin's module that contains the blocks."""
        return self.net.get_submodule(self._body) if self._body else self.net

    def projection(self) -> nn.Module | None:
        embeds = getattr(self.inner, "embeds", None)
        return self.inner.patch_embed if embeds is None else cast(nn.Module, embeds.proj)

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        if not _is_pre_norm(block):
            return Parts(beyond=self._beyond(block))
        found = named_parts(block)
        value = found.value if _plain_values(block.attn) else None
        return replace(found, value=value, beyond=self._beyond(block))

    def _beyond(self, block: Any) -> str:
        if not _is_pre_norm(block):
            return "its norms are not directly before attention and MLP"
        attn, mlp = block.attn, getattr(block, "mlp", nn.Identity())
        if _has(attn, "q_norm") or _has(attn, "k_norm"):
            return "its attention normalises queries and keys"
        if getattr(self.inner, "rope", None) is not None:
            return "its attention rotates queries and keys"
        shared = [getattr(self.inner, name, None) for name in ("rel_pos_bias", "shared_rel_pos")]
        biases = [*shared, *(getattr(attn, name, None) for name in ("rel_pos", "relative_position_bias_table"))]
        if any(bias is not None for bias in biases):
            return "its attention adds a relative position bias"
        if type(mlp).__name__ not in ("Mlp", "PocketMlp") or _has(mlp, "norm"):
            return "its MLP has more than two linear maps and an activation"
        return "" if _plain_values(attn) else "its attention changes the input of its output projection"

    def own_ends(self) -> Ends | None:
        if not self.plain_ends:
            return None
        net = self.inner
        projection, positions = getattr(net.patch_embed, "proj", None), net.pos_embed
        more = (getattr(net, "norm_pre", None), getattr(net, "fc_norm", None), getattr(net.patch_embed, "norm", None))
        plain = all(m is None or isinstance(m, nn.Identity) for m in more) and self.pooling == "cls"
        plain = plain and getattr(net.patch_embed, "backbone", None) is None  # a network comes before the patches
        if not (plain and isinstance(projection, nn.Conv2d) and positions is not None and net.cls_token is not None):
            return None
        linear_head = isinstance(net.head, nn.Identity) or affine(net.head) is not None
        if not isinstance(net.norm, nn.LayerNorm) or not linear_head or self.projects:
            return None
        registers = getattr(net, "reg_token", None)
        prefix = net.cls_token if registers is None else torch.cat([net.cls_token, registers], 1)
        if positions.shape[1] == self.cells:
            positions = torch.cat([torch.zeros_like(prefix), positions], 1)
        if prefix.shape[1] != self.prefix or positions.shape[1] != self.tokens:
            return None
        return Ends(projection, prefix, positions, net.norm, net.head)


def model_facts(model: Any, name: str | None, labels: Sequence[str] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What every timm model records about itself: name, classes and labels, channels, preprocessing."""
    config = dict(getattr(model, "pretrained_cfg", None) or {})
    embedding = _embedding(model)
    inputs = config.get("input_size") or (3, 224, 224)
    head = model.get_classifier()
    classes = int(getattr(head, "out_features", model.num_classes) or model.num_classes)
    height, width = getattr(embedding, "img_size", None) or inputs[1:]
    preprocess = Preprocess(
        size=(height, width),
        mean=tuple(config.get("mean") or IMAGENET_MEAN),
        std=tuple(config.get("std") or IMAGENET_STD),
        crop_pct=config.get("crop_pct") or 0.875,
        interpolation=config.get("interpolation") or "bicubic",
        fit="squash" if config.get("crop_mode") == "squash" else "crop",
    )
    if _beside_texts(model) and classes in (0, config.get("num_classes")):
        preprocess = _as_trained(preprocess, config)
    if labels is None and projects(model):
        classes = 0
    return {
        "name": name or config.get("architecture") or type(model).__name__,
        "classes": classes,
        "channels": _channels(model, config),
        "labels": labels if labels is not None else _labels(config, facts.get("classes", classes)),
        "preprocess": preprocess,
        **facts,
    }


def _beside_texts(model: Any) -> bool:
    """Whether its weights are the image encoder of an image-text model that was not fine-tuned as a classifier."""
    config = dict(getattr(model, "pretrained_cfg", None) or {})
    words = f"{config.get('architecture')} {config.get('tag')}"
    return ("clip" in words or "siglip" in words) and "_ft_" not in words


def projects(model: Any) -> bool:
    """Whether timm's "classifier" is the projection to the features that are compared with those of texts."""
    config = dict(getattr(model, "pretrained_cfg", None) or {})
    width = getattr(model.get_classifier(), "out_features", None)
    return _beside_texts(model) and width is not None and width == config.get("num_classes")


def _as_trained(preprocess: Preprocess, config: dict[str, Any]) -> Preprocess:
    """The preprocessing of the model's training; for some models, timm contains only its defaults.

    Only what exceeds a square is cropped; SigLIP squashes, MobileCLIP (mean 0) resizes bilinearly.
    """
    siglip = "siglip" in str(config.get("architecture"))
    return replace(
        preprocess,
        crop_pct=1.0,
        fit="squash" if siglip else preprocess.fit,
        interpolation="bicubic" if any(preprocess.mean) else "bilinear",
    )


def _channels(model: Any, config: dict[str, Any]) -> int:
    """The channels of an image: those of the convolution that timm calls the first, or the model's attribute."""
    first = config.get("first_conv")
    modules = dict(model.named_modules()) if isinstance(first, str) else {}
    convolution = modules.get(first) if isinstance(first, str) else None
    if not isinstance(convolution, nn.Conv2d):
        convolution = getattr(_embedding(model), "proj", None)
    default = getattr(model, "in_chans", (config.get("input_size") or (3,))[0])
    return int(convolution.in_channels if isinstance(convolution, nn.Conv2d) else default)


def _grid(model: Any, body: Any, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid of patches of an image of this size, and the pixels of a patch."""
    stem = getattr(body, "patch_embed", None) or model.embeds
    if hasattr(stem, "dynamic_feat_size"):
        (rows, columns), (height, width) = stem.dynamic_feat_size(size), stem.feat_ratio(as_scalar=False)
        return (int(rows), int(columns)), (int(height), int(width))
    cell = model.get_patch_size() if hasattr(model, "get_patch_size") else (stem.patch_size,) * 2
    return (size[0] // cell[0], size[1] // cell[1]), (cell[0], cell[1])


def _embedding(model: Any) -> Any:
    """The module that turns the image into patches, if a known one exists."""
    inner = getattr(model, "encoder", model)
    first = next(iter(getattr(model, "patch_embeds", ())), None)
    return getattr(inner, "patch_embed", None) or first


def timm_names() -> list[str]:
    """The names of timm's models that can be opened."""
    import timm

    return [n for m in (*PLAIN, *STAGED) for n in timm.list_models(module=m) if why_not(n, m) is None]


def create_timm(request: LoadRequest) -> nn.Module:
    """Build a model by its timm name."""
    import timm

    name = request.name
    if not timm.is_model(name):
        raise PatchlightError(f"no model is called '{name}'; {nearest(name, timm_names())}")
    reason = why_not(name.partition(".")[0], module_of(name))
    if reason is not None:
        raise PatchlightError(
            f"'{name}' is not a supported Vision Transformer: {reason}; {nearest(name, timm_names())}"
        )
    options = request.with_classes("num_classes", "head.weight", "head.fc.weight")
    where = _cached_weights(name, options) if request.pretrained else {}
    model = timm.create_model(name, pretrained=request.pretrained, **{**options, **where})
    _check_options(type(model), options)
    return model


def _cached_weights(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with which timm finds pretrained weights in the local cache if the hub cannot be reached."""
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name)
    if config is None or "pretrained_cfg" in options or "pretrained_cfg_overlay" in options:
        return {}
    classes = options.get("num_classes", config.num_classes)
    if classes not in (0, config.num_classes):
        raise PatchlightError(
            f"'{name}' is pretrained for {config.num_classes} classes, so with num_classes={classes} its "
            "classifier would be random; give weights=FILE of one trained for them, or pretrained=False"
        )
    if not config.hf_hub_id or not (reason := unreachable()):
        return {}
    given = config.hf_hub_filename or "pytorch_model.bin"
    safe = "model.safetensors" if given == "pytorch_model.bin" else str(Path(given).with_suffix(".safetensors"))
    file = cached(config.hf_hub_id, safe, given)
    if file is None:
        raise not_cached(name, "it is", reason, "weights=FILE (--weights), or pretrained=False for random weights")
    return {"pretrained_cfg_overlay": {"file": str(file), "custom_load": file.suffix == ".npz"}}


def _check_options(cls: type, options: dict[str, Any]) -> None:
    """Refuse options that a constructor with `**kwargs` would ignore."""
    from timm import create_model
    from timm.models import build_model_with_cfg

    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()):
        return
    makers = [
        kind for kind in cls.__mro__ if "__init__" in vars(kind)
    ]  # options ignored here may be used by a parent class
    known = {*inspect.signature(create_model).parameters}.union(
        *(inspect.signature(kind).parameters for kind in makers)
    )
    known |= {*inspect.signature(build_model_with_cfg).parameters}
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        raise TypeError(f"{cls.__name__}.__init__() got an unexpected keyword argument '{unknown}'")


@register_family("timm", package="timm", prefix="timm", create=create_timm, names=timm_names)
def read_timm(model: nn.Module, **overrides: Any) -> Anatomy | None:
    """The anatomy of one of timm's plain transformers, or None."""
    return TimmAnatomy(model, **overrides) if is_plain(model) else None


def is_plain(model: Any) -> bool:
    """Whether a model is a ViT, Eva or BEiT of timm."""
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(model, VisionTransformer | Eva | Beit)


def _labels(config: dict[str, Any], classes: int) -> list[str] | None:
    """The class names in a model's configuration, otherwise those of ImageNet if their number fits."""
    names = list(config.get("label_names") or ())
    return names if names and len(names) == classes else imagenet_labels(classes)


def imagenet_labels(classes: int) -> list[str] | None:
    """timm's names of the 1,000 ImageNet classes."""
    if classes != 1000:
        return None
    from timm.data.imagenet_info import ImageNetInfo

    info = ImageNetInfo()
    return [info.index_to_description(i) for i in range(classes)]


def _pooling(model: Any) -> Pooling:
    if getattr(model, "attn_pool", None) is not None:
        return "map"
    if hasattr(model, "head_dist"):
        return "cls+dist"
    kind = model.global_pool if hasattr(model, "global_pool") else model.head.global_pool.pool_type
    if kind == "token":
        return "cls"
    if kind == "avg" and not getattr(model, "pool_include_prefix", False):
        return "avg"
    if kind == "" and isinstance(model.get_classifier(), nn.Identity):  # as a backbone it returns all tokens
        return "cls" if model.num_prefix_tokens else "avg"
    raise PatchlightError(f"pooling '{kind}' of {type(model).__name__} is not supported; 'token', 'avg' and 'map' are")


def _heads(block: Any) -> int:
    """Number of heads of a block's attention; a block may contain several attentions side by side."""
    inner = [m for m in block.modules() if isinstance(getattr(m, "num_heads", None), int)]
    if not inner:
        raise PatchlightError(f"a {type(block).__name__} has no attention with a known number of heads")
    return int(inner[0].num_heads)


_PLAIN_ATTENTIONS = {"Attention", "AttentionRope", "EvaAttention", "RelPosAttention", "PocketAttention"}


def _plain_values(attention: Any) -> bool:
    """Whether only attention is between a linear map to the values and the output projection."""
    between = [getattr(attention, "norm", None), getattr(attention, "gate", None)]
    plain = all(m is None or isinstance(m, nn.Identity) for m in between)
    known = type(attention).__name__ in _PLAIN_ATTENTIONS
    known = known and getattr(attention, "num_kv_heads", attention.num_heads) == attention.num_heads
    return plain and known


def _has(module: nn.Module, name: str) -> bool:
    part = getattr(module, name, None)
    return part is not None and not isinstance(part, nn.Identity)


def _is_pre_norm(block: nn.Module) -> bool:
    return type(block).__name__ in {"Block", "EvaBlock", "RelPosBlock", "DeepseekVitBlock", "PocketBlock"}
