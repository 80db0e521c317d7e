"""Anatomy of the bundled model `pocket`, which needs no other library."""

from __future__ import annotations

from typing import Any

from torch import nn

from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.preprocessing import applied
from patchlight.anatomy.timm import TimmAnatomy
from patchlight.core.images import Preprocess
from patchlight.zoo import pocket


class PocketAnatomy(TimmAnatomy):
    """`pocket`, whose modules are named as timm's."""

    library = "patchlight"


def create_pocket(request: LoadRequest) -> tuple[nn.Module, dict[str, Any]]:
    """Build the bundled model, with its preprocessing and class names."""
    if request.options:
        raise TypeError(f"pocket() got an unexpected keyword argument '{next(iter(request.options))}'")
    card = pocket.description()
    own = Preprocess((32, 32), tuple(card["mean"]), tuple(card["std"]))
    preprocess = applied(request.about.get("preprocess", own), lambda: own)
    about = {"labels": card["classes"], **request.about, "preprocess": preprocess}
    return pocket.build(request.pretrained), about


@register_family("pocket", package="patchlight", create=create_pocket, names=lambda: ("pocket",))
def read_pocket(model: nn.Module, **about: Any) -> Anatomy | None:
    """The anatomy of the bundled model, or None for another model."""
    from patchlight.zoo.vit import PocketViT

    return PocketAnatomy(model, **about) if isinstance(model, PocketViT) else None
