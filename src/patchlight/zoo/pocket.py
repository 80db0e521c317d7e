"""The bundled model ``pocket``: a plain ViT of 4.0 million parameters for CIFAR-10's ten classes.

It stands in for a user's own classifier in the demonstration, the tests and the benchmarks, so that these need no
download. ``POCKET.md`` beside this file is its model card; ``tools/train_pocket.py`` made it.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchlight.zoo.vit import PocketViT

HERE = Path(__file__).resolve().parent
DESCRIPTION = HERE / "pocket.json"
WEIGHTS = HERE / "pocket.safetensors"
PHOTOS = HERE / "photos"


@cache
def _description_text() -> str:
    return DESCRIPTION.read_text(encoding="utf-8")


def description() -> dict[str, Any]:
    """The contents of ``pocket.json``: architecture, preprocessing, classes, measured accuracy, checksum."""
    content: dict[str, Any] = json.loads(_description_text())
    return content


def classes() -> tuple[str, ...]:
    """The ten class names, in the order of the model's outputs."""
    return tuple(str(name) for name in description()["classes"])


def check_file() -> bool:
    """Whether the weights file is the one that ``pocket.json`` describes (SHA-256)."""
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == str(description()["sha256"])


def build(trained: bool = True) -> PocketViT:
    """Build the model, in float32 and evaluation mode.

    Args:
        trained: Whether to load the trained weights; otherwise they are random.
    """
    import safetensors.torch

    from patchlight.zoo.vit import PocketViT

    shared = ("qkv_bias", "class_token", "global_pool")  # what every PocketViT has
    model = PocketViT(**{key: value for key, value in description()["architecture"].items() if key not in shared})
    if trained:
        weights = safetensors.torch.load_file(WEIGHTS)
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()
