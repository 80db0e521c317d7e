"""Anatomy of transformers' classifiers of images, videos and spectrograms, and the preprocessing of its processors.

Models without a classifier are in hf_backbones.py. Names of modules differ between transformers 4.46 and 5.x, so blocks
are found by running the model, and their parts by any of their names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from patchlight.anatomy.contract import Ends, Parts
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import Discovery, Inputs, find_blocks
from patchlight.anatomy.families import register_family
from patchlight.anatomy.feature_maps import FeatureMapAnatomy, read_feature_map
from patchlight.anatomy.hub import cached
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import find, named_parts
from patchlight.core.errors import AssumedPreprocess, PatchlightError, Unsupported, first_line, warn
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess

_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# The preprocessing of each family's published checkpoints.
VIT = Preprocess((224, 224), _HALF, _HALF, 1.0, "bilinear", "squash", "down")
DEIT = Preprocess((224, 224), IMAGENET_MEAN, IMAGENET_STD, 0.875, "bicubic", "squash", "down")
DINO = Preprocess((224, 224), IMAGENET_MEAN, IMAGENET_STD, 0.875, "bicubic", "crop", "down")
CLIP = Preprocess((224, 224), _CLIP_MEAN, _CLIP_STD, 1.0, "bicubic", "crop", "down")
SIGLIP = Preprocess((224, 224), _HALF, _HALF, 1.0, "bicubic", "squash", "down")
DINO3 = Preprocess((224, 224), IMAGENET_MEAN, IMAGENET_STD, 1.0, "bilinear", "squash", "down")


class PublishedFor(NamedTuple):
    """The preprocessing of a family's published models, and whether images may have another size."""

    preprocess: Preprocess
    any_size: bool = False


_PUBLISHED: dict[str, PublishedFor] = {
    "ViTForImageClassification": PublishedFor(VIT),
    "DeiTForImageClassification": PublishedFor(DEIT),
    "DeiTForImageClassificationWithTeacher": PublishedFor(DEIT),
    "Dinov2ForImageClassification": PublishedFor(DINO, True),
    "Dinov2WithRegistersForImageClassification": PublishedFor(DINO, True),
    "CLIPForImageClassification": PublishedFor(CLIP),
    "SiglipForImageClassification": PublishedFor(SIGLIP),
}
_OTHERS = PublishedFor(Preprocess((224, 224), IMAGENET_MEAN, IMAGENET_STD, 1.0, "bicubic", "squash", "down"), True)
_REFUSED = {
    **dict.fromkeys(
        ("Siglip2Model", "Siglip2VisionModel"),
        "it is a SigLIP2 of the NaFlex kind, which cuts every image into its own grid, so there is no common "
        "patch grid; Siglip2ForImageClassification and SigLIP2 of a fixed size (SiglipModel) work",
    ),
    "ImageGPT": "its input is the colour cluster of each pixel, not an image",
    **dict.fromkeys(
        ("Bit", "ConvNext", "EfficientNet", "HGNetV2", "MobileNet", "RegNet", "ResNet", "TextNet", "PPLCNet"),
        "it is a convolutional network, and has no attention",
    ),
}
"""Why models whose class begins like this cannot be opened."""
_MAPS = ("Dinat", "FocalNet", "Levit", "MobileViT", "Perceiver", "PoolFormer", "SwiftFormer")
"""Networks that are opened as a feature map: hybrids, and those without attention between all tokens."""
_CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")
_CORNERS: tuple[Literal["down", "inward", "nearest"], ...] = ("down", "inward", "nearest")
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def model_facts(
    model: Any, known: PublishedFor, classifies: bool, name: str | None, labels: Any, processor: Any, **facts: Any
) -> dict[str, Any]:
    """What every transformers model records about itself: name, classes and labels, channels, preprocessing."""
    config = getattr(model.config, "vision_config", model.config)
    classes = int(model.config.num_labels) if classifies else 0
    names = getattr(model.config, "id2label", None) or {}
    if classes and labels is None and names and all(not str(v).startswith("LABEL_") for v in names.values()):
        labels = [str(names[i]) for i in range(len(names))]
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        facts.setdefault("sigmoid", True)
    if getattr(model.config, "problem_type", None) == "regression":
        facts.setdefault("regression", True)
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    channels, (published, any_size) = int(getattr(config, "num_channels", 3)), known
    native = _pair(getattr(config, "image_size", None) or getattr(config, "crop_size", None) or published.size)
    processor = getattr(processor, "image_processor", processor)  # an image-text configuration
    if "preprocess" not in facts:
        facts["preprocess"] = (
            assume_preprocess(published, native, name) if processor is None else as_processed(processor, channels, name)
        )
    size = facts["preprocess"].size
    if not any_size and size != native:
        raise PatchlightError(
            f"{name} takes images of {_times(native)} pixels, but its preprocessing gives {_times(size)}; pass "
            f"preprocess=pl.Preprocess({native}, …)"
        )
    return {"name": name, "classes": classes, "labels": labels, "channels": channels, **facts}


class HuggingFaceAnatomy(CrossedAnatomy):
    """An image classifier of transformers; its forward is crossed at the blocks that are found in it."""

    library = "transformers"
    known: ClassVar[Mapping[str, PublishedFor]] = _PUBLISHED
    """The preprocessing of published models, by the name of the class."""
    published: PublishedFor = _OTHERS
    """The preprocessing of other classes."""
    classifies: ClassVar[bool] = True
    """Whether they have a classifier."""

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        labels: Sequence[str] | None = None,
        processor: Any = None,
        stage: int = -2,
        **facts: Any,
    ) -> None:
        known = self.known.get(type(model).__name__, self.published)
        facts = model_facts(model, known, self.classifies, name=name, labels=labels, processor=processor, **facts)
        inputs = self.inputs(model.config, facts)
        discovery = find_blocks(model, self.forward_of, inputs, facts["name"], self.prepare)
        self.head_paths = [path for path in _CLASSIFIERS if find(model, path) is not None] if self.classifies else []
        facts |= self.seen_blocks(discovery, model).located(stage)
        super().__init__(model, **facts)

    def inputs(self, config: Any, facts: Mapping[str, Any]) -> Inputs:
        """What the model takes."""
        return Inputs((facts["channels"], *facts["preprocess"].size))

    def seen_blocks(self, discovery: Discovery, model: Any) -> Discovery:
        """The blocks at which the model is opened, of those that its forward shows."""
        return discovery

    def prepare(self, net: Any) -> None:
        """Change a copy of the model before it is run."""

    def forward_of(self, net: Any, images: Tensor) -> Any:
        """Run a copy of the model."""
        return net(images)

    def call(self, images: Tensor) -> Any:
        return self.forward_of(self.net, images)

    def watch(self) -> None:
        self.prepare(self.net)
        super().watch()

    def projection(self) -> nn.Module | None:
        names = ("patch_embeddings", "patch_embedding")
        return next((m for key, m in self.net.named_modules() if key.rpartition(".")[2] in names), None)

    def parts(self, index: int) -> Parts:
        if self.windows > 1:
            return Parts(beyond="they process windows of the image separately")
        block = self.blocks[index]
        if type(block).__name__.startswith("Swinv2"):
            return Parts(beyond=f"{self.beyond}, and its norms follow attention and MLP")
        parts = named_parts(block)
        if hasattr(block, "attn") or parts.out is None:  # Hiera pools its queries
            parts = replace(parts, out=None, value=None, qkv=None)
        mlp = "its MLP has more than two linear maps" if parts.fc1 is None or parts.fc2 is None else ""
        return replace(parts, beyond=mlp or self.beyond)

    def own_ends(self) -> Ends | None:
        kinds = ("ViTForImageClassification", "DeiTForImageClassification", "ViTModel", "DeiTModel")
        if type(self.model).__name__ not in kinds:
            return None
        backbone: Any = getattr(self.net, "vit", getattr(self.net, "deit", self.net))
        stem, head = backbone.embeddings, getattr(self.net, "classifier", nn.Identity())
        prefix = stem.cls_token if self.prefix == 1 else torch.cat([stem.cls_token, stem.distillation_token], 1)
        projection = stem.patch_embeddings.projection
        return Ends(projection, prefix, stem.position_embeddings, backbone.layernorm, head)


class PerceiverAnatomy(FeatureMapAnatomy):
    """Perceiver, whose blocks read its inputs again and again: it has no blocks here, and its inputs can be dropped."""

    can_drop = None


class VideoAnatomy(HuggingFaceAnatomy):
    """A video classifier of transformers: inputs [B,frames,C,H,W], on a grid of time, rows and columns."""

    def inputs(self, config: Any, facts: Mapping[str, Any]) -> Inputs:
        frames = int(getattr(config, "num_frames", 0) or config.frames_per_clip)
        shape = (frames, facts["channels"], *facts["preprocess"].size)
        return Inputs(shape, (0, 2, 3), ("time", "row", "column"))

    def dropping(self, positions: Tensor) -> dict[str, Tensor]:
        """V-JEPA numbers its positions by the cells that it is given."""
        return {"position_mask": positions} if type(self.model).__name__.startswith("VJEPA2") else {}


class TurnsAnatomy(VideoAnatomy):
    """TimeSformer, whose blocks attend over time and space in turns."""

    can_drop = (
        "it attends over time and space in turns and needs every cell of its grid; pixels can be filled (unit='frame', "
        "'tube' or 'patch')"
    )


class SoundAnatomy(HuggingFaceAnatomy):
    """A spectrogram transformer: inputs [B,time,frequency] on a grid of frequency and time, whose cells overlap."""

    def inputs(self, config: Any, facts: Mapping[str, Any]) -> Inputs:
        return Inputs((int(config.max_length), int(config.num_mel_bins)), (1, 0), ("frequency", "time"))


@register_family("transformers", package="transformers")
def read_hf(model: nn.Module, stage: int = -2, **overrides: Any) -> Anatomy | None:
    """The anatomy of a transformers classifier of images, videos or spectrograms, or None."""
    kind = type(model).__name__
    if kind == "Siglip2ForImageClassification":
        from patchlight.anatomy.naflex import NaFlexAnatomy

        return NaFlexAnatomy(model, stage=stage, **overrides)
    if "ForImageClassification" in kind:
        check_kind(kind, overrides.get("name") or kind)
        if kind.startswith("TimmWrapper") and "preprocess" not in overrides:  # its processor has timm's transforms
            from patchlight.anatomy.timm import model_facts as timm_facts

            timm_model = cast(Any, model).timm_model
            overrides |= {"preprocess": timm_facts(timm_model, None, None, {})["preprocess"], "processor": None}
        if not kind.startswith(_MAPS):
            return HuggingFaceAnatomy(model, stage=stage, **overrides)
        facts = {"name": None, "labels": None, "processor": None, "library": "transformers"} | overrides
        facts = model_facts(model, _OTHERS, True, **facts)
        if kind.startswith("Perceiver"):
            return read_feature_map(model, 0, PerceiverAnatomy, facts, ["perceiver.input_preprocessor"])
        return read_feature_map(model, stage, FeatureMapAnatomy, facts)
    if "ForVideoClassification" in kind:
        return (TurnsAnatomy if kind.startswith("Timesformer") else VideoAnatomy)(model, stage=stage, **overrides)
    if kind == "ASTForAudioClassification":
        config: Any = model.config
        size = int(config.max_length), int(config.num_mel_bins)
        facts = {"preprocess": Preprocess(size, (0.0,), (1.0,)), **overrides, "processor": None}
        return SoundAnatomy(model, stage=stage, **facts)
    return None


def check_kind(kind: str, name: str) -> None:
    """Refuse a class of models that cannot be opened, with the reason."""
    reason = next((reason for start, reason in _REFUSED.items() if kind.startswith(start)), None)
    if reason is not None:
        raise Unsupported(f"{name} cannot be opened: {reason}")


def check_complete(info: Mapping[str, Any], kind: str, name: str) -> None:
    """Refuse a model with weights missing from its checkpoint, according to transformers' loading report."""
    other = sorted(info.get("mismatched_keys", ()), key=str)
    if other:
        key, found, wanted = other[0]
        raise PatchlightError(
            f"'hf:{name}' does not fit the options given: '{key}' is {list(found)} in the checkpoint but would be "
            f"{list(wanted)}, and random; leave out options that change its shape, or load one trained like that"
        )
    missing = sorted(info.get("missing_keys", ()))
    if not missing:
        return
    shown = ", ".join(f"'{key}'" for key in missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    raise PatchlightError(
        f"'hf:{name}' is a {kind or 'checkpoint'} without {shown}, which would be random; load a complete "
        "checkpoint, or give weights=FILE that has them"
    )


def check_floating(folder: Path) -> None:
    """Refuse a folder whose weights or biases are not floating point; loading would cast them."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                kinds = {key: str(tensors.get_slice(key).get_dtype()) for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise PatchlightError(f"'{file}' cannot be read as weights: {error}") from error
        odd = next(
            (k for k in kinds if k.endswith((".weight", ".bias")) and not kinds[k].startswith(("F", "BF"))), None
        )
        if odd is not None:
            raise PatchlightError(f"'{odd}' in '{file}' is of type {kinds[odd]} but must be floating point")


def read_processor(name: str, where: Mapping[str, Any]) -> Any:
    """The image processor of a folder or a hub name, or None if there is none; a broken one is refused."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(name, **where)
    except Exception as error:
        file = "preprocessor_config.json"
        there = (Path(name) / file).is_file() if Path(name).is_dir() else cached(name, file) is not None
        if not there:
            return None
        reason = first_line(error)
        raise PatchlightError(
            f"the image processor of 'hf:{name}' ({file}) cannot be read: {reason}; correct it, or pass "
            "preprocess=pl.Preprocess(…)"
        ) from error


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, Sequence) else (int(size), int(size))


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def assume_preprocess(published: Preprocess, size: tuple[int, int], name: str) -> Preprocess:
    """The preprocessing of a family's published models, for a model without a processor; warns once.

    DINOv2 was trained on 518 pixels, but its classifiers are published for images of 224.
    """
    assumed = published if published is DINO and size == (518, 518) else replace(published, size=size)
    longer = _times((math.floor(assumed.size[0] / assumed.crop_pct), math.floor(assumed.size[1] / assumed.crop_pct)))
    resized = f"resized to {longer}" if assumed.fit == "squash" else f"with the shorter side resized to cover {longer}"
    warn(
        f"{name} came without an image processor, so the preprocessing of its family's published models is assumed: "
        f"{resized} ({assumed.interpolation}), the centre {_times(assumed.size)} cropped, mean {list(assumed.mean)}, "
        f"std {list(assumed.std)}; give preprocess=pl.Preprocess(…) if it was trained with another",
        AssumedPreprocess,
    )
    return assumed


def as_processed(processor: Any, channels: int, name: str) -> Preprocess:
    """The preprocessing of an image processor, compared with the processor on images; refused if it does more.

    Where a crop begins when half a pixel is left over differs between versions, so it is found by trying.
    """
    kind = type(processor).__name__
    otherwise = "pass preprocess=pl.Preprocess(…) to define its preprocessing"
    base = read_options(processor, f"the {kind} of {name}", otherwise)
    if channels not in (1, 3):
        return base
    try:
        pictures = _trials(base, channels)
        expected = [torch.as_tensor(processor(p, return_tensors="pt")["pixel_values"][0]).double() for p in pictures]
    except Exception as error:
        reason = first_line(error)
        raise PatchlightError(f"the {kind} of {name} does not work on a plain image ({reason}); {otherwise}") from error
    for corner in _CORNERS:
        preprocess = replace(base, corner=corner)
        difference = max(_difference(preprocess, p, g) for p, g in zip(pictures, expected, strict=True))
        if difference < 1:
            return preprocess
    raise PatchlightError(f"the {kind} of {name} does more than resize, crop the centre and normalise; {otherwise}")


def read_options(processor: Any, what: str, otherwise: str) -> Preprocess:
    """The preprocessing that the options of a processor describe, which computes (f x - mean) / std for bytes x.

    Our x / 255 needs mean and std divided by 255 f.
    """

    def option(key: str) -> Any:
        return getattr(processor, key, None)

    if not option("do_resize"):
        raise PatchlightError(f"{what} does not resize images (do_resize=False); {otherwise}")
    size = _sides(option("size"), bool(option("default_to_square")))
    cut = _sides(option("crop_size"), True) if option("do_center_crop") else {}
    out = (cut["height"], cut["width"]) if set(cut) == {"height", "width"} else None
    short = size.get("shortest_edge", 0)
    if set(size) == {"height", "width"}:
        resized, fit = (size["height"], size["width"]), "squash"
    elif set(size) == {"shortest_edge"} and option("crop_pct") is None:
        resized, fit = (short, short), "crop"
        if out is None:
            raise PatchlightError(f"{what} resizes the shorter side without a crop (size={size}); {otherwise}")
    elif set(size) == {"shortest_edge"}:  # ConvNext crops below 384 pixels, and squashes from there on
        more = int(short / option("crop_pct"))
        resized, fit = ((short, short), "squash") if short >= 384 else ((more, more), "crop")
        out = out or (short, short)
    else:
        raise PatchlightError(f"{what} resizes images to {size}, which is not a fixed size; {otherwise}")
    resample = option("resample")
    try:
        interpolation = _RESAMPLE[2 if resample is None else int(resample)]
    except (KeyError, TypeError, ValueError) as error:
        raise PatchlightError(f"{what} resizes with resample={resample!r}, which is not known; {otherwise}") from error
    scale = 255 * float(option("rescale_factor") or 1 / 255) if option("do_rescale") else 255.0
    mean, std = (option("image_mean"), option("image_std")) if option("do_normalize") else (0.0, 1.0)
    out = out or resized
    return Preprocess(
        size=out,
        mean=_statistics(mean, scale),
        std=_statistics(std, scale),
        crop_pct=_ratio(min(out), min(resized)),
        interpolation=interpolation,
        fit=cast(Any, fit),
    )


def _sides(size: Any, square: bool) -> dict[str, int]:
    """The size of a processor as a dictionary; it may be a dictionary, a similar object, a pair or one number."""
    if isinstance(size, int):
        return {"height": size, "width": size} if square else {"shortest_edge": size}
    if isinstance(size, Sequence) and len(size) == 2:
        return {"height": int(size[0]), "width": int(size[1])}
    found = dict(size) if isinstance(size, Mapping) or hasattr(size, "__iter__") else {}
    return {key: int(value) for key, value in found.items() if value is not None}


def _statistics(values: Any, scale: float) -> tuple[float, ...]:
    values = [values] * 3 if isinstance(values, int | float) else values
    return tuple(float(v) / scale for v in values)


def _ratio(cut: int, resized: int) -> float:
    """The crop_pct for which crop / crop_pct, rounded down, is `resized`."""
    ratio = cut / resized
    return ratio if math.floor(cut / ratio) == resized else cut / (resized + 1e-6)


def _trials(read: Preprocess, channels: int) -> list[Image.Image]:
    """Noise images in portrait and landscape, larger and smaller than a size, some with distinct corners.

    Sides are odd, because libraries differ where nearest pixels tie (64 to 224).
    """
    noise, side = np.random.default_rng(0), max(read.size) | 1
    half = (side // 2 + 4) | 1
    upright = [(half, half + more) for more in range(16, 48, 2)]
    telling = [s for s in upright if len({replace(read, corner=c).framing(*s) for c in _CORNERS}) > 1]
    shapes = [upright[0], *telling[:3], (half + 20, half), (side + 8, 2 * side + 31)]
    arrays = [noise.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in shapes]
    return [Image.fromarray(a if channels == 3 else a[..., 0]) for a in arrays]


def _difference(preprocess: Preprocess, picture: Image.Image, given: Tensor) -> float:
    """Mean difference between our tensor of an image and another one, in 256ths of white."""
    ours = preprocess.tensor(picture.convert("RGB"))[: len(given)].double()
    if ours.shape != given.shape:
        return math.inf
    std = torch.tensor(preprocess.std, dtype=torch.float64)[:, None, None]
    return float(((ours - given) * std).abs().mean()) * 256
