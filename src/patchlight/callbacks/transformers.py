"""The log as a callback of Hugging Face's Trainer."""

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
    raise missing_extra("the callback of its Trainer needs", "transformers", "hf") from missing


class TransformersCallback(TrainerCallback):
    """A `TrainingLog` for `Trainer(callbacks=[…])`; arguments as there.

    Without a writer it logs to what `TrainingArguments(report_to=…)` names of tensorboard and wandb.
    """

    def __init__(self, model: Anatomy | nn.Module, images: Any, writer: Any = None, **options: Any) -> None:
        self.log = TrainingLog(model, images, writer, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.is_world_process_zero:
            self.log.attach(lambda: _writers(args), about["model"])
            self.log(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.is_world_process_zero:
            self.log(state.global_step)


def _writers(args: Any) -> list[Any]:
    """Writers of what a Trainer reports to; TensorBoard's files lie beside the Trainer's own."""
    found = []
    if "tensorboard" in args.report_to:
        theirs = os.environ.get("TENSORBOARD_LOGGING_DIR") or getattr(args, "logging_dir", None)
        found.append(open_tensorboard(theirs or Path(args.output_dir) / "runs" / "patchlight"))
    if "wandb" in args.report_to:
        found.append(open_wandb())
    if not found:
        raise PatchlightError(
            f"the Trainer reports to {', '.join(args.report_to) or 'nothing'}; give the callback a writer=, or "
            "TrainingArguments(report_to=['tensorboard']), or 'wandb'"
        )
    return found
