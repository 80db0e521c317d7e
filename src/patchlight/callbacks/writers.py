"""The destinations of a log: TensorBoard, Weights & Biases, a function, or several of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import numpy as np
from PIL import Image

from patchlight.core.errors import PatchlightError
from patchlight.core.extras import import_extra

Write = Callable[[int, Mapping[str, float], Mapping[str, Image.Image]], None]
"""Called with a step, its numbers by name, and its pictures by name."""


def is_writer(writer: Any) -> bool:
    """Whether a writer belongs to TensorBoard or Weights & Biases."""
    return _is_tensorboard(writer) or _is_wandb(writer)


def open_writer(writer: Any) -> Write:
    """A function that writes to a SummaryWriter, wandb run, folder (for TensorBoard), function, or a list of these."""
    if isinstance(writer, list | tuple) and writer:
        functions = [open_writer(destination) for destination in writer]

        def write(*content: Any) -> None:
            for function in functions:
                function(*content)

        return write
    if isinstance(writer, str | PathLike):
        writer = open_tensorboard(writer)
    if _is_tensorboard(writer):
        return _to_tensorboard(writer)
    if _is_wandb(writer):
        return _to_wandb(writer)
    if callable(writer):
        return writer  # type: ignore[no-any-return]
    raise PatchlightError(
        f"writer is {writer!r}; give a SummaryWriter of TensorBoard, a run of wandb, a folder for TensorBoard's files, "
        "or a function of (step, numbers, pictures)"
    )


def open_tensorboard(folder: str | PathLike[str]) -> Any:
    """A SummaryWriter for a folder."""
    module = "torch.utils.tensorboard"
    tensorboard = import_extra(module, "logging to TensorBoard needs", "train", package="tensorboard")
    return tensorboard.SummaryWriter(str(folder))


def open_wandb() -> Any:
    """The active wandb run."""
    try:
        import wandb
    except ImportError as error:
        raise PatchlightError("logging to Weights & Biases needs wandb: pip install wandb") from error
    if wandb.run is None:
        raise PatchlightError("there is no active wandb run; call wandb.init() first")
    return wandb.run


def _is_tensorboard(writer: Any) -> bool:
    return hasattr(writer, "add_scalar") and hasattr(writer, "add_image")


def _is_wandb(writer: Any) -> bool:
    return hasattr(writer, "log") and type(writer).__module__.partition(".")[0] == "wandb"


def _to_tensorboard(writer: Any) -> Write:
    def write(step: int, numbers: Mapping[str, float], pictures: Mapping[str, Image.Image]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)
        for name, picture in pictures.items():
            writer.add_image(name, np.asarray(picture), step, dataformats="HWC")
        writer.flush()

    return write


def _to_wandb(run: Any) -> Write:
    """Write to a wandb run with a separate step axis, because wandb counts every logging call as a step."""
    run.define_metric("patchlight/step")
    run.define_metric("patchlight/*", step_metric="patchlight/step")

    def write(step: int, numbers: Mapping[str, float], pictures: Mapping[str, Image.Image]) -> None:
        import wandb

        shown = {name: wandb.Image(picture) for name, picture in pictures.items()}
        run.log({"patchlight/step": step, **numbers, **shown})

    return write
