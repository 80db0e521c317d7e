"""Anatomy of the bundled models: `pocket` and `ground-truth:TASK`, and those of scenes, which transformers reads."""

from __future__ import annotations

from typing import Any

from torch import nn

from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.preprocessing import applied
from patchlight.anatomy.timm import TimmAnatomy
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import Preprocess
from patchlight.zoo import ground_truth, pocket, shapes


class PocketAnatomy(TimmAnatomy):
    """`pocket`, whose modules are named as timm's."""

    library = "patchlight"


def create_pocket(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build the bundled model, with its preprocessing and class names."""
    card = pocket.description()
    return pocket.build(request.pretrained), _about("pocket", request, _preprocess(card), card["classes"])


def create_ground_truth(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build the bundled model of a task whose cause is known."""
    if request.name not in ground_truth.tasks():
        raise PatchlightError(
            f"unknown ground-truth task '{request.name}'; {nearest(request.name, ground_truth.tasks())}"
        )
    card = ground_truth.description()
    overrides = _about(request.name, request, _preprocess(card), card["tasks"][request.name]["classes"])
    return ground_truth.build(request.name, request.pretrained), {**overrides, "name": f"ground-truth:{request.name}"}


def _preprocess(card: dict[str, Any]) -> Preprocess:
    side = card["architecture"]["img_size"]
    return Preprocess((side, side), tuple(card["mean"]), tuple(card["std"]))


def create_shapes(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build the bundled detector or segmenter, with its preprocessing and class names."""
    card = shapes.description(request.name)
    size = card["architecture"]["image_size"]
    size = (size, size) if isinstance(size, int) else (size[0], size[1])
    own = Preprocess(size, tuple(card["mean"]), tuple(card["std"]), 1.0, "bilinear", "squash")
    overrides = _about(request.name, request, own, card["classes"])
    return shapes.build(request.name, request.pretrained), overrides


def _about(name: str, request: LoadRequest, own: Preprocess, labels: list[str]) -> dict[str, Any]:
    """Keywords for `wrap`: labels and preprocessing (by default its own) of a bundled model."""
    if request.options:
        raise TypeError(f"{name}() got an unexpected keyword argument '{next(iter(request.options))}'")
    preprocess = applied(request.overrides.get("preprocess", own), lambda: own)
    return {"labels": labels, **request.overrides, "preprocess": preprocess}


@register_family("pocket", package="patchlight", create=create_pocket, names=lambda: ("pocket",))
@register_family("pocket-shapes", package="patchlight", create=create_shapes, names=lambda: shapes.NAMES)
@register_family("ground-truth", package="patchlight", prefix="ground-truth", create=create_ground_truth)
def read_pocket(model: nn.Module, **overrides: Any) -> Anatomy | None:
    """The anatomy of `pocket`, or of a model of its architecture; None for other models, which transformers reads."""
    from patchlight.zoo.vit import PocketViT

    return PocketAnatomy(model, **overrides) if isinstance(model, PocketViT) else None
