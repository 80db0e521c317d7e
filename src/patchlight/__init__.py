"""Patchlight shows which patches of an image a Vision Transformer decided on, and measures how far that can be trusted.

Importing it is cheap: every name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

_HOMES = {
    "ADDITIVE": "patchlight.methods.compositions",
    "Anatomy": "patchlight.anatomy.opened",
    "Ask": "patchlight.methods.base",
    "AssumedPreprocess": "patchlight.core.errors",
    "Comparison": "patchlight.study.compare",
    "Attribution": "patchlight.core.attribution",
    "Attributions": "patchlight.core.attribution",
    "Composition": "patchlight.methods.base",
    "DegenerateMap": "patchlight.core.errors",
    "Evaluation": "patchlight.metrics.base",
    "Evaluations": "patchlight.metrics.base",
    "Evidence": "patchlight.evidence.record",
    "FIRST": "patchlight.methods.compositions",
    "LAST": "patchlight.methods.compositions",
    "LayerJob": "patchlight.evidence.runner",
    "LayerMaps": "patchlight.methods.base",
    "Measure": "patchlight.metrics.base",
    "Measured": "patchlight.metrics.base",
    "PLUS": "patchlight.methods.compositions",
    "PatchlightError": "patchlight.core.errors",
    "PixelMasks": "patchlight.evidence.ablation",
    "Preprocess": "patchlight.core.images",
    "ROLLOUT": "patchlight.methods.compositions",
    "Rule": "patchlight.evidence.rules",
    "SKIPPLUS": "patchlight.methods.compositions",
    "SUM": "patchlight.methods.compositions",
    "TokenSubsets": "patchlight.evidence.ablation",
    "UndefinedMetric": "patchlight.core.errors",
    "Unsupported": "patchlight.core.errors",
    "Verdict": "patchlight.study.recommend.verdict",
    "ablates": "patchlight.methods.base",
    "compare": "patchlight.study.compare",
    "evaluate": "patchlight.study.evaluate",
    "explain": "patchlight.engine",
    "figure": "patchlight.core.drawing",
    "layer_map": "patchlight.methods.base",
    "list_methods": "patchlight.methods.requests",
    "list_metrics": "patchlight.metrics.base",
    "list_models": "patchlight.anatomy.load",
    "load": "patchlight.anatomy.load",
    "load_plugin": "patchlight.core.plugins",
    "open_data": "patchlight.data",
    "own_passes": "patchlight.methods.base",
    "recommend": "patchlight.study.recommend.run",
    "register_composition": "patchlight.methods.base",
    "register_data": "patchlight.data",
    "register_family": "patchlight.anatomy.families",
    "register_metric": "patchlight.metrics.base",
    "register_rule": "patchlight.evidence.rules",
    "show": "patchlight.web.show",
    "trace": "patchlight.evidence.passes",
    "wrap": "patchlight.anatomy.load",
}
_ROOMS = {
    "bench": "patchlight.bench",
    "callbacks": "patchlight.callbacks",
    "diffmask": "patchlight.trained.diffmask",
    "heads": "patchlight.anatomy.heads",
    "shapley": "patchlight.trained.shapley",
}
"""Rooms that are used by their own name, as in `pl.diffmask.train`."""
__all__ = sorted([*_HOMES, *_ROOMS])

if TYPE_CHECKING:
    from patchlight import bench as bench
    from patchlight import callbacks as callbacks
    from patchlight.anatomy import heads as heads
    from patchlight.anatomy.families import register_family as register_family
    from patchlight.anatomy.load import list_models as list_models
    from patchlight.anatomy.load import load as load
    from patchlight.anatomy.load import wrap as wrap
    from patchlight.anatomy.opened import Anatomy as Anatomy
    from patchlight.core.attribution import Attribution as Attribution
    from patchlight.core.attribution import Attributions as Attributions
    from patchlight.core.drawing import figure as figure
    from patchlight.core.errors import AssumedPreprocess as AssumedPreprocess
    from patchlight.core.errors import DegenerateMap as DegenerateMap
    from patchlight.core.errors import PatchlightError as PatchlightError
    from patchlight.core.errors import UndefinedMetric as UndefinedMetric
    from patchlight.core.errors import Unsupported as Unsupported
    from patchlight.core.images import Preprocess as Preprocess
    from patchlight.core.plugins import load_plugin as load_plugin
    from patchlight.data import open_data as open_data
    from patchlight.data import register_data as register_data
    from patchlight.engine import explain as explain
    from patchlight.evidence.ablation import PixelMasks as PixelMasks
    from patchlight.evidence.ablation import TokenSubsets as TokenSubsets
    from patchlight.evidence.passes import trace as trace
    from patchlight.evidence.record import Evidence as Evidence
    from patchlight.evidence.rules import Rule as Rule
    from patchlight.evidence.rules import register_rule as register_rule
    from patchlight.evidence.runner import LayerJob as LayerJob
    from patchlight.methods.base import Ask as Ask
    from patchlight.methods.base import Composition as Composition
    from patchlight.methods.base import LayerMaps as LayerMaps
    from patchlight.methods.base import ablates as ablates
    from patchlight.methods.base import layer_map as layer_map
    from patchlight.methods.base import own_passes as own_passes
    from patchlight.methods.base import register_composition as register_composition
    from patchlight.methods.compositions import ADDITIVE as ADDITIVE
    from patchlight.methods.compositions import FIRST as FIRST
    from patchlight.methods.compositions import LAST as LAST
    from patchlight.methods.compositions import PLUS as PLUS
    from patchlight.methods.compositions import ROLLOUT as ROLLOUT
    from patchlight.methods.compositions import SKIPPLUS as SKIPPLUS
    from patchlight.methods.compositions import SUM as SUM
    from patchlight.methods.requests import list_methods as list_methods
    from patchlight.metrics.base import Evaluation as Evaluation
    from patchlight.metrics.base import Evaluations as Evaluations
    from patchlight.metrics.base import Measure as Measure
    from patchlight.metrics.base import Measured as Measured
    from patchlight.metrics.base import list_metrics as list_metrics
    from patchlight.metrics.base import register_metric as register_metric
    from patchlight.study.compare import Comparison as Comparison
    from patchlight.study.compare import compare as compare
    from patchlight.study.evaluate import evaluate as evaluate
    from patchlight.study.recommend.run import recommend as recommend
    from patchlight.study.recommend.verdict import Verdict as Verdict
    from patchlight.trained import diffmask as diffmask
    from patchlight.trained import shapley as shapley
    from patchlight.web.show import show as show


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'patchlight' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
