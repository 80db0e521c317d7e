"""The log as a callback of Lightning's Trainer, of `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from patchlight.anatomy.opened import Anatomy
from patchlight.callbacks.log import TrainingLog
from patchlight.callbacks.writers import is_writer
from patchlight.core.errors import PatchlightError


def _callback() -> Any:
    """The base class of callbacks: of the package that is in use, else of that which is installed."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise PatchlightError("the callback of its Trainer needs lightning: pip install lightning")


class LightningCallback(_callback()):  # type: ignore[misc]
    """A `TrainingLog` for `Trainer(callbacks=[…])`; arguments as there, `model` is the one inside the LightningModule.

    Without a writer it logs to those of the trainer's loggers that are TensorBoard's or Weights & Biases'.
    """

    def __init__(self, model: Anatomy | nn.Module, images: Any, writer: Any = None, **options: Any) -> None:
        super().__init__()
        self.log_maps = TrainingLog(model, images, writer, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.log_maps.attach(lambda: _writers(trainer), pl_module)
            self.log_maps(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero:
            self.log_maps(trainer.global_step)


def _writers(trainer: Any) -> list[Any]:
    """Writers of the loggers that take pictures."""
    found = [logger.experiment for logger in trainer.loggers if is_writer(logger.experiment)]
    if not found:
        kinds = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
        raise PatchlightError(
            f"the trainer's loggers ({kinds}) take no pictures; give the callback a writer=, or the trainer a "
            "TensorBoardLogger or WandbLogger"
        )
    return found
