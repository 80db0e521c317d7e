"""Anatomy of open_clip's image-text models (CLIP, SigLIP and related), with its own or timm's towers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.hub import cached, not_cached, unreachable
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import named_parts
from patchlight.anatomy.texts import NoTokenizer, TextSide, check_length, check_vocabulary
from patchlight.anatomy.timm import TimmAnatomy, is_plain
from patchlight.core.errors import PatchlightError, Unsupported, first_line, nearest
from patchlight.core.extras import missing_extra
from patchlight.core.images import Preprocess
from patchlight.core.targets import Outputs

_OWN_VOCABULARY = 49408
"""Vocabulary size of open_clip's bundled tokenizer."""


class OpenClipPair(TextSide, CrossedAnatomy):
    """What all open_clip models share: projected features and a text encoder."""

    library = "open_clip"
    tokenizer_advice = "tokenizer=open_clip.get_tokenizer(NAME)"

    def call(self, images: Tensor) -> Any:
        return self.net.encode_image(images)

    def encode_chunk(self, prompts: Sequence[str]) -> Tensor:
        model: Any = self.model
        room = int(model.context_length)
        count = _counting(self.tokenizer)
        if count is not None:
            check_length(prompts, [count(prompt) for prompt in prompts], room, self.name)
        ids = self.tokenizer(list(prompts), context_length=room)
        check_vocabulary(ids, int(model.vocab_size), self.name)
        return cast(Tensor, self.net.encode_text(ids.to(self.device)))

    def text_outputs(self) -> Outputs:
        with self.steady():
            scale, bias = float(self.net.logit_scale.exp()), self.net.logit_bias
            return Outputs("softmax", scale) if bias is None else Outputs("sigmoid", scale, float(bias))


class OpenClipAnatomy(OpenClipPair):
    """An open_clip tower, whose attention is torch's MultiheadAttention."""

    def __init__(self, model: Any, tokenizer: Any, **facts: Any) -> None:
        visual = model.visual
        if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
            raise Unsupported(
                f"{facts['name']} pools its tokens by an attention that cannot be read; "
                "towers that pool by token or average work"
            )
        self.tokenizer = tokenizer
        (rows, columns), cell, blocks = visual.grid_size, visual.patch_size, visual.transformer.resblocks
        super().__init__(
            model,
            paths=[f"visual.transformer.resblocks.{index}" for index in range(len(blocks))],
            grid=(int(rows), int(columns)),
            extent=(int(rows * cell[0]), int(columns * cell[1])),
            prefix=1,
            pooling="cls" if visual.pool_type == "tok" else "avg",
            heads=int(blocks[0].attn.num_heads),
            classes=0,
            **facts,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the images it takes; in open_clip's half precision some weights stay in float32."""
        return cast(torch.dtype, self.net.visual.conv1.weight.dtype)

    def flat(self, tokens: Tensor) -> Tensor:
        return tokens if getattr(self.net.visual.transformer, "batch_first", True) else tokens.transpose(0, 1)

    def unflat(self, tokens: Tensor, shape: Sequence[int]) -> Tensor:
        return self.flat(tokens)

    def projection(self) -> nn.Module | None:
        return cast(nn.Module, self.net.visual.conv1)

    def parts(self, index: int) -> Parts:
        block: Any = self.blocks[index]
        found, around = named_parts(block), (getattr(block, "ln_attn", None), getattr(block.attn, "ln_inner", None))
        linear = all(m is None or isinstance(m, nn.Identity) for m in around)
        linear = linear and getattr(block.attn, "head_scale", None) is None
        plain = type(block).__name__ == "ResidualAttentionBlock"
        beyond = "" if plain else "it scales or normalises inside"
        return replace(found, value=found.value if linear else None, beyond=beyond)


class OpenClipTimmAnatomy(OpenClipPair, TimmAnatomy):
    """A timm tower followed by open_clip's projection."""

    plain_ends = False

    def __init__(self, model: Any, tokenizer: Any, **facts: Any) -> None:
        self.tokenizer = tokenizer
        super().__init__(model, path="visual.trunk", classes=0, **facts)


def create_open_clip(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build an open_clip model of its list or of a local folder, with its tokenizer.

    Without a tag the weights are OpenAI's if there are any, otherwise the first of its list; weights that were trained
    with QuickGELU get it.
    """
    try:
        import open_clip
    except ImportError as error:
        raise missing_extra("'open_clip:' models need", "open_clip_torch", "open_clip") from error
    name, tag, fetch = request.name, request.tag, request.pretrained
    options: dict[str, Any] = {"pretrained_text": fetch, **request.options}
    local = os.path.isdir(name)
    if local:
        if not (Path(name) / "open_clip_config.json").is_file():
            raise PatchlightError(f"'{name}' has no open_clip_config.json, so it is not an open_clip folder")
        if tag is not None:
            raise PatchlightError(f"'{name}' is a folder that has its own weights; pretrained={tag!r} is for names")
        source = f"local-dir:{name}"
    elif name.startswith("hf-hub:"):
        source = name
    else:
        names = open_clip.list_models()
        if name not in names:
            raise PatchlightError(
                f"open_clip does not have the model '{name}'; {nearest(name, names)}, or give a folder"
            )
        source = name
        options = {**(_weights(name, _tag(name, tag)) if fetch else {}), **options}
    model = open_clip.create_model(source, load_weights=fetch, require_pretrained=fetch, **options)
    return model, {"tokenizer": _tokenizer(source, local), **request.overrides}


@register_family("open_clip", package="open_clip", prefix="open_clip", create=create_open_clip, tagged=True)
def read_open_clip(
    model: nn.Module, name: str | None = None, tokenizer: Any = None, **overrides: Any
) -> Anatomy | None:
    """The anatomy of an open_clip model, or None."""
    kind, visual = type(model).__name__, cast(Any, model).visual if hasattr(model, "visual") else None
    name = name or kind
    if kind == "CoCa":
        raise Unsupported(
            f"{name} cannot be opened: a CoCa pools its tokens by an attention of separate projections, which cannot "
            "be read; open_clip's CLIP and SigLIP models work"
        )
    if kind not in ("CLIP", "CustomTextCLIP"):
        return None
    tokenizer = _own_tokenizer(model) if tokenizer is None else tokenizer
    overrides["name"] = name
    if "preprocess" not in overrides:
        overrides["preprocess"] = _preprocess(visual, name)
    if type(visual).__name__ == "VisionTransformer":
        return OpenClipAnatomy(model, tokenizer, **overrides)
    trunk = getattr(visual, "trunk", None)
    if not is_plain(trunk):
        inside = type(visual if trunk is None else trunk).__name__
        raise Unsupported(f"{name} cannot be opened: its image encoder is a {inside}, not a plain Vision Transformer")
    return OpenClipTimmAnatomy(model, tokenizer, **overrides)


def _weights(name: str, tag: str) -> dict[str, Any]:
    """Options of open_clip's constructor for the weights of a tag; from the local cache without a hub."""
    import open_clip

    config = dict(open_clip.get_pretrained_cfg(name, tag))
    options = {"pretrained": tag, "force_quick_gelu": bool(config.get("quick_gelu", False))}
    repository, _, file = str(config.get("hf_hub", "")).rpartition("/")
    reason = unreachable() if repository else ""
    if not reason:
        return options
    found = cached(repository, *([file] if file else ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]))
    if found is None:
        what, advice = f"its weights '{tag}' are", "weights=FILE, or pretrained=False for random ones"
        raise not_cached(f"open_clip:{name}", what, reason, advice)
    return {**options, "pretrained": str(found), "force_preprocess_cfg": config}


def _tokenizer(source: str, local: bool) -> Any:
    """The tokenizer of a model, or a stand-in with the reason why there is none; from the local cache without a hub."""
    import open_clip

    try:
        settings = dict((open_clip.get_model_config(source) or {}).get("text_cfg", {}))
        away = not local and bool(settings.get("hf_tokenizer_name")) and bool(unreachable())
        return open_clip.get_tokenizer(source, **({"local_files_only": True} if away else {}))
    except Exception as error:
        return NoTokenizer(first_line(error))


def _tag(name: str, tag: str | None) -> str:
    import open_clip

    tags = open_clip.list_pretrained_tags_by_model(name)
    if not tags:
        raise PatchlightError(
            f"open_clip has no weights for '{name}'; give weights=FILE, or pretrained=False for random ones"
        )
    if tag is None:
        return "openai" if "openai" in tags else tags[0]
    if tag not in tags:
        raise PatchlightError(f"open_clip has no weights '{tag}' for '{name}'; {nearest(tag, tags)}")
    return tag


def _preprocess(visual: Any, name: str) -> Preprocess:
    """The preprocessing that open_clip defines for a model."""
    from open_clip.model import get_model_preprocess_cfg
    from open_clip.transform import PreprocessCfg

    config = PreprocessCfg(**get_model_preprocess_cfg(visual))
    if config.resize_mode not in ("shortest", "squash"):
        raise PatchlightError(
            f"the images of {name} are resized to their longer side and padded (resize_mode "
            f"'{config.resize_mode}'); pass preprocess=pl.Preprocess(…) to change this"
        )
    return Preprocess(
        size=cast("tuple[int, int]", tuple(config.input_size[1:])),
        mean=tuple(config.mean),
        std=tuple(config.std),
        interpolation="bilinear" if config.interpolation == "bilinear" else "bicubic",
        fit="squash" if config.resize_mode == "squash" else "crop",
    )


def _own_tokenizer(model: Any) -> Any:
    """open_clip's bundled tokenizer, for a model with its vocabulary; otherwise None."""
    if int(model.vocab_size) != _OWN_VOCABULARY or not isinstance(model.context_length, int):
        return None
    from open_clip import SimpleTokenizer

    return SimpleTokenizer(context_length=model.context_length)


def _counting(tokenizer: Any) -> Callable[[str], int] | None:
    """A function that counts the tokens of a sentence before truncation; None for an unknown tokenizer."""
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "sot_token_id"):
        return lambda text: len(tokenizer.encode(text)) + 2
    inner, clean = getattr(tokenizer, "tokenizer", None), getattr(tokenizer, "clean_fn", str)
    if inner is None:
        return None
    if getattr(tokenizer, "tokenizer_mode", "") == "clips":
        return lambda text: len(inner(clean(text), add_special_tokens=False)["input_ids"]) + 3
    return lambda text: len(inner(clean(text))["input_ids"])
