"""The bundled models ``ground-truth:TASK``: one small ViT for each task whose cause is known by construction.

``ground-truth.json`` in their folder says how they were trained and what was checked; ``tools/train_ground_truth.py``
made them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from patchlight.zoo import ZOO, load_weights, read_card

if TYPE_CHECKING:
    from patchlight.zoo.vit import PocketViT

FOLDER = ZOO / "ground-truth"


@cache
def description() -> dict[str, Any]:
    """The contents of ``ground-truth.json``: architecture, preprocessing, and per task classes and measured shares."""
    return read_card("ground-truth/ground-truth.json")


def tasks() -> tuple[str, ...]:
    """The names of the tasks."""
    return tuple(description()["tasks"])


def build(task: str, trained: bool = True) -> PocketViT:
    """Build the model of a task, in float32 and evaluation mode; without `trained`, its weights are random."""
    from patchlight.zoo.vit import PocketViT

    card = description()
    model = PocketViT(num_classes=len(card["tasks"][task]["classes"]), **card["architecture"])
    return (load_weights(model, FOLDER / f"{task}.safetensors") if trained else model).eval()
