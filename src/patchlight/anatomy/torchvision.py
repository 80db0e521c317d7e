"""Anatomy of torchvision's VisionTransformer, SwinTransformer and MaxVit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from patchlight.anatomy.contract import Ends, Parts
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import Inputs, find_blocks, run_plainly
from patchlight.anatomy.families import LoadRequest, register_family
from patchlight.anatomy.feature_maps import FeatureMapAnatomy, read_feature_map
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import find, named_parts
from patchlight.anatomy.timm import imagenet_labels
from patchlight.core.errors import PatchlightError, nearest
from patchlight.core.images import Preprocess


class TorchvisionAnatomy(CrossedAnatomy):
    """torchvision's ViT, whose attention is torch's MultiheadAttention, or Swin."""

    library = "torchvision"

    def __init__(
        self, model: Any, name: str | None = None, labels: Sequence[str] | None = None, stage: int = -2, **facts: Any
    ) -> None:
        name = name or type(model).__name__
        facts = _model_facts(model, name, labels, facts)
        located = find_blocks(model, run_plainly, Inputs((3, *facts["preprocess"].size)), name).located(stage)
        self.head_paths = [path for path in ("heads", "head") if hasattr(model, path)]
        super().__init__(model, **{**located, **facts})

    def projection(self) -> nn.Module | None:
        return cast("nn.Module | None", getattr(self.net, "conv_proj", None))

    def parts(self, index: int) -> Parts:
        found = named_parts(self.blocks[index])
        return found if _is_plain(self.net) else Parts(found.norm1, beyond=self.beyond)

    def own_ends(self) -> Ends | None:
        net = self.net
        if not _is_plain(net):
            return None
        heads = list(net.heads) if isinstance(net.heads, nn.Sequential) else [net.heads]
        known = len(heads) == 1 and isinstance(heads[0], nn.Linear | nn.Identity)
        if not isinstance(net.conv_proj, nn.Conv2d) or not known:
            return None
        return Ends(net.conv_proj, net.class_token, net.encoder.pos_embedding, net.encoder.ln, heads[0])


def create_torchvision(request: LoadRequest) -> nn.Module:
    """Build one of torchvision's Vision Transformers by its name."""
    from torchvision import models

    names = [n for n in models.list_models() if n.startswith(("vit_", "swin_", "maxvit_"))]
    if request.name not in names:
        hint = nearest(request.name, names)
        raise PatchlightError(f"torchvision has no Vision Transformer called '{request.name}'; {hint}")
    options = request.with_classes("num_classes", "heads.head.weight", "head.weight", "classifier.5.weight")
    model: nn.Module = models.get_model(request.name, weights="DEFAULT" if request.pretrained else None, **options)
    return model


@register_family("torchvision", package="torchvision", prefix="torchvision", create=create_torchvision)
def read_torchvision(model: nn.Module, stage: int = -2, **overrides: Any) -> Anatomy | None:
    """The anatomy of a torchvision VisionTransformer, Swin or MaxVit, or None."""
    from torchvision.models import MaxVit, SwinTransformer, VisionTransformer

    if isinstance(model, VisionTransformer | SwinTransformer):
        return TorchvisionAnatomy(model, stage=stage, **overrides)
    if not isinstance(model, MaxVit):
        return None
    name = overrides.pop("name", None) or type(model).__name__
    overrides = _model_facts(model, name, overrides.pop("labels", None), {**overrides, "library": "torchvision"})
    return read_feature_map(model, stage, FeatureMapAnatomy, overrides)


def _is_plain(model: Any) -> bool:
    """Whether a model of torchvision is its VisionTransformer."""
    return hasattr(model, "conv_proj")


def _model_facts(model: Any, name: str, labels: Sequence[str] | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Name, classes and labels, preprocessing."""
    classifier = find(model, "heads", "head", "classifier")
    classes = next((m.out_features for m in reversed(list(classifier.modules())) if isinstance(m, nn.Linear)), 0)
    side = int(getattr(model, "image_size", 224))
    return {
        "name": name,
        "classes": classes,
        "labels": labels if labels is not None else imagenet_labels(classes),
        "channels": 3,
        "preprocess": Preprocess((side, side), crop_pct=0.875, interpolation="bilinear"),
        **facts,
    }
