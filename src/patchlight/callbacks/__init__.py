"""During training: maps of fixed images and a faithfulness number, logged every n steps within a time budget.

`TrainingLog` is called by a loop of one's own; `TransformersCallback` and `LightningCallback` call it, and are loaded,
as their libraries are, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from patchlight.callbacks.log import TrainingLog, log_maps

if TYPE_CHECKING:
    from patchlight.callbacks.lightning import LightningCallback as LightningCallback
    from patchlight.callbacks.transformers import TransformersCallback as TransformersCallback

_LATER = {
    "LightningCallback": "patchlight.callbacks.lightning",
    "TransformersCallback": "patchlight.callbacks.transformers",
}
__all__ = ["LightningCallback", "TrainingLog", "TransformersCallback", "log_maps"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'patchlight.callbacks' has no attribute '{name}'")
    return getattr(importlib.import_module(_LATER[name]), name)
