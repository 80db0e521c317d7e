"""A callback for Lightning's Trainer, of `lightning` or `pytorch_lightning`."""

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
    """The base class of callbacks, from the package that is imported, or else from an installed one."""
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise PatchlightError("LightningCallback needs lightning: pip install lightning")


class LightningCallback(_callback()):  # type: ignore[misc]
    """A `TrainingLog` for Lightning's `Trainer(callbacks=[…])`.

    Args:
        model: The model inside the LightningModule.
        writer: As in `TrainingLog`; by default the trainer's loggers for TensorBoard and Weights & Biases.
        images, **options: As in `TrainingLog`.
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
    """The writers of the loggers that support images."""
    writers = [logger.experiment for logger in trainer.loggers if is_writer(logger.experiment)]
    if not writers:
        kinds = ", ".join(type(logger).__name__ for logger in trainer.loggers) or "none"
        raise PatchlightError(
            f"the trainer's loggers ({kinds}) do not support images; give the callback a writer=, or the trainer a "
            "TensorBoardLogger or WandbLogger"
        )
    return writers
