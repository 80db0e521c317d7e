"""Anatomy of transformers' models that give every pixel a class, a depth or a mask.

SegFormer, DPT, Depth Anything, BEiT, EoMT, UperNet over Swin, MaskFormer, Mask2Former, SAM and SAM2. Each is opened at
the blocks of its encoder; the decoder, which often reads the tokens of several blocks, is the readout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from patchlight.anatomy.detectors import names_of, prepared_by
from patchlight.anatomy.discovery import Discovery
from patchlight.anatomy.families import register_family
from patchlight.anatomy.heads.regions import Mask, Region
from patchlight.anatomy.hf import HuggingFaceAnatomy, PublishedFor
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.tasks import TaskAnatomy
from patchlight.core.errors import Unsupported
from patchlight.core.images import IMAGENET_MEAN, IMAGENET_STD, Preprocess

_READ = ("logits", "predicted_depth", "class_queries_logits", "masks_queries_logits", "pred_masks", "iou_scores")
"""The parts of an output that questions read."""


class SegmenterAnatomy(HuggingFaceAnatomy, TaskAnatomy):
    """A model whose output has classes or a number for every pixel; `class_names` are the names of its classes.

    Its blocks are looked for in the part `backbone`, and a network of stages is opened at its first.
    """

    task = "segmentation"
    classifies = False
    can_drop = "its decoder reads a whole grid, so no patch can be taken out; pixels can be filled (unit='patch')"
    published = PublishedFor(
        Preprocess((512, 512), IMAGENET_MEAN, IMAGENET_STD, 1.0, "bilinear", "squash", "down"), True
    )

    def __init__(
        self, model: Any, backbone: str, labels: Sequence[str] | None = None, processor: Any = None, **overrides: Any
    ) -> None:
        self.backbone = backbone
        self.class_names = names_of(model, labels)
        overrides = prepared_by(model, processor, overrides)
        super().__init__(model, **{"stage": 0, **overrides})

    def watch(self) -> None:
        self.net.patchlight_opened = True
        super().watch()

    def forward_of(self, net: Any, images: Tensor) -> Any:
        if getattr(net, "patchlight_opened", False):
            return net(pixel_values=images)
        return net.get_submodule(self.backbone)(images)  # while its blocks are looked for

    def logits_of(self, out: Any, rows: int) -> Tensor:
        """All numbers that questions read [rows,K]."""
        return torch.cat([out[name].flatten(1) for name in _READ if name in out], 1)

    def scores_of(self, output: Any) -> Tensor:
        """The scores [B,C,h,w] of every class at every pixel: logits, or the mix of the masks of all queries.

        The mix is sum_q p_q(c) sigmoid(M_q), from 0 to the number of queries.
        """
        if "logits" in output:
            return output.logits  # type: ignore[no-any-return]
        chances = output.class_queries_logits.softmax(2)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", chances, output.masks_queries_logits.sigmoid())

    def default_question(self) -> Any:
        return Region()


class EomtAnatomy(SegmenterAnatomy):
    """EoMT, opened at its last blocks, where queries stand before the other tokens; earlier ones are its stem."""

    def __init__(self, model: Any, backbone: str, **overrides: Any) -> None:
        if bool((model.attn_mask_probs > 0).any()):
            raise Unsupported(
                "EoMT still masks attention by its own predictions (attn_mask_probs is above 0); set it to 0, as in "
                "fully trained checkpoints"
            )
        super().__init__(model, backbone, **overrides)

    def seen_blocks(self, found: Discovery, model: Any) -> Discovery:
        first = len(found.blocks) - model.config.num_blocks
        parts = {name: getattr(found, name)[first:] for name in ("blocks", "attentions", "shapes", "ends")}
        return replace(found, **parts, constant=(found.constant[0] + model.config.num_queries, 0))


class DepthAnatomy(SegmenterAnatomy):
    """A model whose output is the depth of every pixel; relative models define it up to scale and shift."""

    task = "depth"

    def scores_of(self, output: Any) -> Tensor:
        """The depth [B,1,h,w]."""
        return output.predicted_depth[:, None]  # type: ignore[no-any-return]


class PromptedAnatomy(SegmenterAnatomy):
    """SAM and SAM2, which give masks of what is at given points."""

    task = "masks"

    def forward_of(self, net: Any, images: Tensor) -> Any:
        if not getattr(net, "patchlight_opened", False):
            return super().forward_of(net, images)
        height, width = self.preprocess.size
        return self.at_points(net, images, images.new_tensor([[width / 2, height / 2]]))

    def at_points(self, net: Any, images: Tensor, points: Tensor) -> Any:
        """The output for points [n,2], x and y in pixels of the model's input."""
        return net(pixel_values=images, input_points=points[None, None].expand(len(images), -1, -1, -1))

    def default_question(self) -> Any:
        return Mask()


_KINDS: Mapping[str, tuple[type[SegmenterAnatomy], str]] = {
    "SegformerForSemanticSegmentation": (SegmenterAnatomy, "segformer"),
    "DPTForSemanticSegmentation": (SegmenterAnatomy, "dpt"),
    "BeitForSemanticSegmentation": (SegmenterAnatomy, "beit"),
    "UperNetForSemanticSegmentation": (SegmenterAnatomy, "backbone"),
    "Mask2FormerForUniversalSegmentation": (SegmenterAnatomy, "model.pixel_level_module.encoder"),
    "MaskFormerForInstanceSegmentation": (SegmenterAnatomy, "model.pixel_level_module.encoder"),
    "EomtForUniversalSegmentation": (EomtAnatomy, ""),
    "DPTForDepthEstimation": (DepthAnatomy, "dpt"),
    "DepthAnythingForDepthEstimation": (DepthAnatomy, "backbone"),
    "SamModel": (PromptedAnatomy, "vision_encoder"),
    "Sam2Model": (PromptedAnatomy, "vision_encoder"),
}
"""The anatomy of each class of models, and the part that has its blocks."""
_REFUSED = {
    "DepthProForDepthEstimation": "it runs its encoder on several scales of the image, and only one run can be opened",
}
"""Why models of these classes cannot be opened."""
_ENDINGS = ("ForSemanticSegmentation", "ForUniversalSegmentation", "ForInstanceSegmentation", "ForDepthEstimation")


def segments(kind: str) -> bool:
    """Whether models of this class give every pixel something."""
    return kind in _KINDS or kind.endswith(_ENDINGS)


@register_family("transformers segmenters", package="transformers")
def read_segmenter(model: nn.Module, **overrides: Any) -> Anatomy | None:
    """The anatomy of a transformers model for segmentation, depth or masks, or None."""
    kind = type(model).__name__
    if kind not in _KINDS:
        if not segments(kind):
            return None
        reason = _REFUSED.get(kind, f"supported dense models: {', '.join(_KINDS)}")
        raise Unsupported(f"{kind} cannot be opened: {reason}")
    anatomy, backbone = _KINDS[kind]
    if kind.startswith("DPT") and getattr(model, "dpt", None) is None:
        backbone = "backbone"
    return anatomy(model, backbone, **overrides)
