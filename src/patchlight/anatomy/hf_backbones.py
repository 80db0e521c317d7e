"""Anatomy of transformers' models without a classifier.

Backbones (ViT, DeiT, DINOv2, DINOv3, MAE), and CLIP and SigLIP with or without their text encoder.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.hf import (
    CLIP,
    DEIT,
    DINO,
    DINO3,
    SIGLIP,
    VIT,
    HuggingFaceAnatomy,
    PublishedFor,
    check_complete,
    check_floating,
    check_kind,
    read_processor,
)
from patchlight.anatomy.hub import cached, not_cached, unreachable
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.prompts import ANSWERING
from patchlight.anatomy.segmenters import segments
from patchlight.anatomy.texts import NoTokenizer, TextSide, check_length, check_vocabulary, has_text_side
from patchlight.core.errors import PatchlightError, Unsupported, first_line
from patchlight.core.extras import missing_extra
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from patchlight.core.targets import Outputs

_MAE = Preprocess((224, 224), IMAGENET_MEAN, IMAGENET_STD, 1.0, "bilinear", "squash", "down")
PRETRAINED = {
    "ViTMAEForPreTraining": "ViTMAEModel",
    "ViTForMaskedImageModeling": "ViTModel",
    "DeiTForMaskedImageModeling": "DeiTModel",
    "Sam2VideoModel": "Sam2Model",
}
"""The class that is opened, by the name of the class in a published configuration, if they differ."""
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


class BackboneAnatomy(HuggingFaceAnatomy):
    """A transformer whose features are its normalised CLS token; a pooler after it is left out."""

    classifies = False
    known: ClassVar[Mapping[str, PublishedFor]] = {
        "ViTModel": PublishedFor(VIT),
        "DeiTModel": PublishedFor(DEIT),
        "Dinov2Model": PublishedFor(DINO, True),
        "Dinov2WithRegistersModel": PublishedFor(DINO, True),
        "DINOv3ViTModel": PublishedFor(DINO3, True),
    }

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """The normalised CLS token."""
        return cast(Tensor, out.last_hidden_state[:, 0])


class MaskedAnatomy(BackboneAnatomy):
    """MAE, with nothing masked: its twin keeps every patch, in order."""

    known: ClassVar[Mapping[str, PublishedFor]] = {"ViTMAEModel": PublishedFor(_MAE)}

    def prepare(self, net: Any) -> None:
        stem = net.embeddings
        stem.config = copy.copy(stem.config)
        stem.config.mask_ratio = 0.0

    def forward_of(self, net: Any, images: Tensor) -> Any:
        patches = net.embeddings.patch_embeddings.num_patches
        return net(images, noise=torch.arange(patches, device=images.device).expand(len(images), -1))  # in order


class TowerAnatomy(BackboneAnatomy):
    """The image encoder of CLIP (a CLS token, projected if the model does so) or SigLIP (attention pooling)."""

    known: ClassVar[Mapping[str, PublishedFor]] = {
        "CLIPVisionModel": PublishedFor(CLIP),
        "CLIPVisionModelWithProjection": PublishedFor(CLIP),
        "SiglipVisionModel": PublishedFor(SIGLIP),
    }

    def __init__(self, model: Any, **facts: Any) -> None:
        if getattr(model.config, "vision_use_head", True) is False:
            name = facts.get("name") or type(model).__name__
            raise PatchlightError(f"{name} has no pooling (vision_use_head=False), so it has no image features")
        super().__init__(model, **facts)

    def logits_of(self, out: Any, rows: int) -> Tensor:
        projected = getattr(out, "image_embeds", None)
        return cast(Tensor, out.pooler_output if projected is None else projected)


class HuggingFacePair(TowerAnatomy, TextSide):
    """CLIP or SigLIP (also SigLIP2 of a fixed size) with its text encoder, which reads the sentences of a head."""

    known: ClassVar[Mapping[str, PublishedFor]] = {
        "CLIPModel": PublishedFor(CLIP),
        "SiglipModel": PublishedFor(SIGLIP),
    }

    tokenizer_advice = "tokenizer=, or processor= one of transformers that contains it"

    def __init__(self, model: Any, tokenizer: Any = None, processor: Any = None, **facts: Any) -> None:
        self.tokenizer = getattr(processor, "tokenizer", None) if tokenizer is None else tokenizer
        super().__init__(model, processor=processor, **facts)

    @property
    def _sigmoid(self) -> bool:
        return type(self.model).__name__ == "SiglipModel"

    def forward_of(self, net: Any, images: Tensor) -> Any:
        return net.get_image_features(pixel_values=images)

    def logits_of(self, out: Any, rows: int) -> Tensor:
        return _tensor(out)

    def encode_chunk(self, prompts: Sequence[str]) -> Tensor:
        ids = {key: value.to(self.device) for key, value in self._ids(prompts).items()}
        return _tensor(cast(Any, self.net).get_text_features(**ids))

    def _ids(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids, with their mask if the model was trained with one.

        SigLIP reads a text at its last position; it was trained on lower-case texts padded to full length, unmasked.
        """
        sizes = cast(Any, self.model).config.text_config
        room = int(sizes.max_position_embeddings)
        texts = [prompt.lower() for prompt in prompts] if self._sigmoid else list(prompts)
        padding: dict[str, Any] = {"padding": "max_length", "max_length": room} if self._sigmoid else {"padding": True}
        try:
            lengths = [len(ids) for ids in self.tokenizer(texts)["input_ids"]]
            check_length(prompts, lengths, room, self.name)
            tokens = self.tokenizer(texts, return_tensors="pt", **padding)
        except PatchlightError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise PatchlightError(
                f"the {type(self.tokenizer).__name__} of {self.name} cannot read {prompts[0]!r}: {reason}"
            ) from error
        check_vocabulary(tokens["input_ids"], int(sizes.vocab_size), self.name)
        names = ("input_ids",) if self._sigmoid else ("input_ids", "attention_mask")
        return {name: tokens[name] for name in names if name in tokens}

    def text_outputs(self) -> Outputs:
        net: Any = self.net
        with self.steady():
            scale = float(net.logit_scale.exp())
            return Outputs("sigmoid", scale, float(net.logit_bias)) if self._sigmoid else Outputs("softmax", scale)


_KINDS = (BackboneAnatomy, MaskedAnatomy, TowerAnatomy, HuggingFacePair)


def create_hf(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build a transformers model from a local folder or the hub, with its image processor and tokenizer."""
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("'hf:' models need", "transformers", "hf") from error
    name, fetch = request.name, request.pretrained
    local = os.path.isdir(name)
    if not local and (not name or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise PatchlightError(f"no folder at '{name}'; give hf:FOLDER, or hf:OWNER/NAME for a model of the hub")
    if local and fetch:
        check_floating(Path(name))
    reason = "" if local else unreachable()
    where: dict[str, Any] = {"local_files_only": True} if reason else {}
    options = request.with_classes("num_labels", "classifier.weight", "cls_classifier.weight")
    try:
        config, others = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **options, **where)
        config.architectures = config.architectures or []
        saved = next(iter(config.architectures), "")
        kind, extra = _kind_of(saved, name, request.weights)
        cls: Any = getattr(transformers, kind or "AutoModelForImageClassification")
        if fetch:
            how = {**options, **where, **extra, "ignore_mismatched_sizes": True, "output_loading_info": True}
            model, info = cls.from_pretrained(name, **how)
        else:
            make = cls._from_config if kind else cls.from_config
            others = {key: value for key, value in others.items() if key != "local_files_only"}
            model, info = make(config, **others, **extra), {}
    except OSError as error:
        if reason:
            raise not_cached(f"hf:{name}", "it is", reason, "hf:FOLDER of a local model") from error
        raise
    check_complete(info, saved, name)
    overrides: dict[str, Any] = {}
    if not isinstance(request.overrides.get("preprocess"), Preprocess):
        overrides["processor"] = read_processor(name, where)
    if saved in ANSWERING:
        overrides |= read_speech(name, where)
    elif has_text_side(model) and "tokenizer" not in request.overrides:
        overrides["tokenizer"] = read_tokenizer(name, where)
    return model, overrides


def _kind_of(saved: str, name: str, weights: Mapping[str, Tensor] | None) -> tuple[str, dict[str, Any]]:
    """The class that a transformers model is opened as, and its options; "" for a classifier.

    Weights that contain a classifier turn a backbone into a classifier. A pooler after a backbone, often untrained, is
    left out.
    """
    check_kind(saved, f"'hf:{name}'")
    if saved.endswith("ForConditionalGeneration") and saved not in ANSWERING:
        raise Unsupported(f"'hf:{name}' is a {saved}; supported vision-language models: {', '.join(ANSWERING)} work")
    classifies = weights is not None and "classifier.weight" in weights
    others = ("ForVideoClassification", "ForAudioClassification", "ForObjectDetection")
    kind = PRETRAINED.get(saved, saved)
    if saved in ANSWERING or saved in HuggingFaceAnatomy.known or saved.endswith(others) or segments(kind):
        return kind, {}
    if classifies or kind not in supported():
        return "", {}
    return kind, {"add_pooling_layer": False} if kind in ("ViTModel", "DeiTModel") else {}


@register_family("transformers backbones", package="transformers", prefix="hf", create=create_hf)
def read_backbone(model: nn.Module, **overrides: Any) -> Anatomy | None:
    """The anatomy of a transformers model without a classifier, or None."""
    check_kind(type(model).__name__, overrides.get("name") or type(model).__name__)
    anatomy = next((kind for kind in _KINDS if type(model).__name__ in kind.known), None)
    return None if anatomy is None else anatomy(model, **overrides)


def supported() -> list[str]:
    """The transformers classes that are read."""
    return sorted(name for kind in _KINDS for name in kind.known)


def read_tokenizer(name: str, where: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder or a hub name, or a stand-in with the reason why there is none.

    Without a vocabulary, transformers 5 would create a tokenizer of single letters.
    """
    from transformers import AutoTokenizer

    local, missing = Path(name).is_dir(), NoTokenizer(f"none of {', '.join(_VOCABULARIES)} is there")
    if local and not any((Path(name) / file).is_file() for file in _VOCABULARIES):
        return missing
    try:
        found = AutoTokenizer.from_pretrained(name, **where)
    except Exception as error:
        return NoTokenizer(first_line(error))
    return found if local or cached(name, *_VOCABULARIES) else missing


def read_speech(name: str, where: Mapping[str, Any]) -> dict[str, Any]:
    """The processor of a vision-language model, or its tokenizer alone."""
    from transformers import AutoProcessor

    try:
        found = AutoProcessor.from_pretrained(name, **where)
    except Exception:  # reported when a prompt is read
        found = None
    if hasattr(found, "image_processor") and hasattr(found, "tokenizer"):
        return {"processor": found}
    return {"tokenizer": read_tokenizer(name, where)}


def _tensor(out: Any) -> Tensor:
    """Features, which 4.x returns as a tensor and 5.x inside an output."""
    return cast(Tensor, out if isinstance(out, Tensor) else out.pooler_output)
