"""A callback for Hugging Face's Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from patchlight.anatomy.opened import Anatomy
from patchlight.callbacks.log import TrainingLog
from patchlight.callbacks.writers import open_tensorboard, open_wandb
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra

try:
    from transformers import TrainerCallback
except ImportError as missing:
    raise missing_extra("TransformersCallback needs", "transformers", "hf") from missing


class TransformersCallback(TrainerCallback):
    """A `TrainingLog` for the `Trainer(callbacks=[…])` of transformers.

    Args:
        writer: As in `TrainingLog`; by default tensorboard and wandb, if `TrainingArguments(report_to=…)` names them.
        model, images, **options: As in `TrainingLog`.
    """

    def __init__(self, model: Anatomy | nn.Module, images: Any, writer: Any = None, **options: Any) -> None:
        self.log = TrainingLog(model, images, writer, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        if state.is_world_process_zero:
            self.log.attach(lambda: _writers(args), arguments["model"])
            self.log(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **arguments: Any) -> None:
        if state.is_world_process_zero:
            self.log(state.global_step)


def _writers(args: Any) -> list[Any]:
    """The writers that a Trainer reports to; TensorBoard's files are next to the Trainer's own."""
    writers = []
    if "tensorboard" in args.report_to:
        folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
        writers.append(open_tensorboard(folder or Path(args.output_dir) / "runs" / "patchlight"))
    if "wandb" in args.report_to:
        writers.append(open_wandb())
    if not writers:
        raise PatchlightError(
            f"the Trainer reports to {', '.join(args.report_to) or 'nothing'}; give the callback a writer=, or "
            "TrainingArguments(report_to=['tensorboard']), or 'wandb'"
        )
    return writers
