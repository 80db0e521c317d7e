"""Anatomy of timm's networks of stages: with blocks where attention is read, else as a stage's feature map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from patchlight.anatomy.contract import Parts
from patchlight.anatomy.crossing import CrossedAnatomy
from patchlight.anatomy.discovery import Inputs, find_blocks, run_plainly
from patchlight.anatomy.families import register_family
from patchlight.anatomy.feature_maps import FeatureMapAnatomy, read_feature_map
from patchlight.anatomy.names import STAGED, known_as, why_not
from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.parts import named_parts
from patchlight.anatomy.timm import model_facts
from patchlight.core.errors import PatchlightError

_WITH_BLOCKS = ("pvt_v2", "swin_transformer", "swin_transformer_v2", "twins")
"""The timm modules of the networks that are opened with blocks."""


class TimmStagesAnatomy(CrossedAnatomy):
    """Swin, SwinV2, PVTv2 or Twins, opened before the blocks of a stage."""

    library = "timm"

    def __init__(self, model: Any, stage: int, module: str, **facts: Any) -> None:
        inputs = Inputs((facts["channels"], *facts["preprocess"].size))
        located = find_blocks(model, run_plainly, inputs, facts["name"]).located(stage)
        self.head_paths = ["head.fc" if hasattr(model.head, "fc") else "head"] if facts["classes"] else []
        self._module = module
        super().__init__(model, **{**located, **facts})

    def parts(self, index: int) -> Parts:
        if self._module == "swin_transformer_v2":
            return Parts(beyond=f"{self.beyond}, and its norms follow attention and MLP")
        parts = named_parts(self.blocks[index])
        if self._module != "swin_transformer":
            return Parts(parts.norm1, beyond=self.beyond)
        return replace(parts, beyond=self.beyond)


class TimmMapAnatomy(FeatureMapAnatomy):
    """A timm network opened after a stage (0-based, negative from the end; the second-to-last by default)."""

    library = "timm"

    def __init__(self, model: Any, *, path: str, shapes: Sequence[Sequence[int]], **facts: Any) -> None:
        if hasattr(model, "reroll"):  # tokens in the order in which they are pooled
            rows = torch.arange(shapes[0][1]).view(1, -1, 1)
            facts["order"] = model.reroll(rows, int(path.rpartition(".")[2])).flatten().tolist()
        super().__init__(model, path=path, shapes=shapes, last=type(model).__name__ in ("VOLO", "HieraDet"), **facts)


def stages_of(model: Any) -> list[str]:
    """The modules that end the stages of a timm network, from its `feature_info`."""
    kind = type(model).__name__
    if kind == "CoaT":
        alone = (1, 2, 3, 4) if model.parallel_blocks is None else (1, 2)  # the others run in parallel
        return [f"serial_blocks{i}.{len(getattr(model, f'serial_blocks{i}')) - 1}" for i in alone]
    if kind == "Visformer":
        return [f"stage{i}" for i in (1, 2, 3)]
    wrong = {"MultiScaleVit": ("block.", "stages.")}.get(kind, ("", ""))  # there is no module of that name
    return [stage["module"].replace(*wrong) for stage in model.feature_info]


@register_family("timm-staged", package="timm")
def read_staged(
    model: Any, stage: int = -2, name: str | None = None, labels: Sequence[str] | None = None, **overrides: Any
) -> Anatomy | None:
    """The anatomy of a timm network of stages with attention, or None if it is not of timm."""
    known, module = known_as(model)
    if not module:
        return None
    reason = why_not(known, module)
    if reason is not None or module not in STAGED:
        why = reason or "its class is not supported"
        raise PatchlightError(
            f"{name or known} ({type(model).__name__}) is not a supported Vision Transformer: {why}; "
            "pl.list_models() names those of timm that are"
        )
    overrides = model_facts(model, name, labels, overrides)
    if module in _WITH_BLOCKS:
        return TimmStagesAnatomy(model, stage, module, **overrides)
    return read_feature_map(model, stage, TimmMapAnatomy, overrides, stages_of(model))
