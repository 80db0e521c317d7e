"""Logs maps of fixed images and their faithfulness during training, every n steps within a time budget.

Call `TrainingLog` in your own training loop, or use `TransformersCallback` or `LightningCallback`; these and their
libraries are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from patchlight.callbacks.lightning import LightningCallback as LightningCallback
    from patchlight.callbacks.log import TrainingLog as TrainingLog
    from patchlight.callbacks.log import log_maps as log_maps
    from patchlight.callbacks.transformers import TransformersCallback as TransformersCallback

_TRAINERS = {"lightning": ["LightningCallback"], "transformers": ["TransformersCallback"]}
_NAMES = {"log": ["TrainingLog", "log_maps"], **_TRAINERS}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
