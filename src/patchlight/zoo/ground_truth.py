"""The bundled models ``ground-truth:TASK``: one small ViT for each task whose cause is known by construction.

``ground-truth.json`` in their folder says how they were trained and what was checked; ``tools/train_ground_truth.py``
made them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchlight.zoo.vit import PocketViT

FOLDER = Path(__file__).resolve().parent / "ground-truth"


@cache
def description() -> dict[str, Any]:
    """The contents of ``ground-truth.json``: architecture, preprocessing, and per task classes and measured shares."""
    content: dict[str, Any] = json.loads((FOLDER / "ground-truth.json").read_text(encoding="utf-8"))
    return content


def tasks() -> tuple[str, ...]:
    """The names of the tasks."""
    return tuple(description()["tasks"])


def build(task: str, trained: bool = True) -> PocketViT:
    """Build the model of a task, in float32 and evaluation mode.

    Args:
        task: The name of the task.
        trained: Whether to load the trained weights; otherwise they are random.
    """
    import safetensors.torch

    from patchlight.zoo.vit import PocketViT

    about = description()
    model = PocketViT(num_classes=len(about["tasks"][task]["classes"]), **about["architecture"])
    if trained:
        weights = safetensors.torch.load_file(FOLDER / f"{task}.safetensors")
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()
