"""Logs maps of fixed images and their faithfulness during training, every n steps within a time budget.

Call `TrainingLog` in your own training loop, or use `TransformersCallback` or `LightningCallback`; these and their
libraries are imported on first use.
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
