"""Patchlight shows which patches of an image a Vision Transformer decided on, and measures how far that can be trusted.

Importing it is cheap: every name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Anatomy": "patchlight.anatomy",
    "AssumedPreprocess": "patchlight.errors",
    "Attribution": "patchlight.attribution",
    "DegenerateMap": "patchlight.engine",
    "PatchlightError": "patchlight.errors",
    "Preprocess": "patchlight.images",
    "Unsupported": "patchlight.errors",
    "UndefinedMetric": "patchlight.metrics",
    "Evaluation": "patchlight.metrics",
    "evaluate": "patchlight.metrics",
    "explain": "patchlight.engine",
    "figure": "patchlight.viz",
    "load": "patchlight.anatomy",
    "method": "patchlight.registry",
    "methods": "patchlight.registry",
    "metric": "patchlight.metrics",
    "metrics": "patchlight.metrics",
    "trace": "patchlight.trace",
    "wrap": "patchlight.anatomy",
}
_ROOMS = ("diffmask",)
"""Rooms that are used by their own name, as in `pl.diffmask.train`."""
__all__ = sorted([*_HOMES, *_ROOMS])

if TYPE_CHECKING:
    from patchlight import diffmask as diffmask
    from patchlight.anatomy import Anatomy as Anatomy
    from patchlight.anatomy import load as load
    from patchlight.anatomy import wrap as wrap
    from patchlight.attribution import Attribution as Attribution
    from patchlight.engine import DegenerateMap as DegenerateMap
    from patchlight.engine import explain as explain
    from patchlight.errors import AssumedPreprocess as AssumedPreprocess
    from patchlight.errors import PatchlightError as PatchlightError
    from patchlight.errors import Unsupported as Unsupported
    from patchlight.images import Preprocess as Preprocess
    from patchlight.metrics import Evaluation as Evaluation
    from patchlight.metrics import UndefinedMetric as UndefinedMetric
    from patchlight.metrics import evaluate as evaluate
    from patchlight.metrics import metric as metric
    from patchlight.metrics import metrics as metrics
    from patchlight.registry import method as method
    from patchlight.registry import methods as methods
    from patchlight.trace import trace as trace
    from patchlight.viz import figure as figure


class _Package(ModuleType):
    """`pl.methods`, `pl.metrics` and `pl.trace` are functions, though rooms of the same name exist beside them.

    Such a function shares its room's namespace, so that `import patchlight.metrics.base as base` finds its way too.
    """

    def __getattr__(self, name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"patchlight.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'patchlight' has no attribute '{name}'")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            getattr(self, name).__dict__ = value.__dict__
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES, *_ROOMS})


sys.modules[__name__].__class__ = _Package
