"""The bundled model ``pocket``: a plain ViT of 4.0 million parameters for CIFAR-10's ten classes.

It stands in for a user's own classifier in the demonstration, the tests and the benchmarks, so that these need no
download. ``POCKET.md`` beside this file is its model card; ``tools/train_pocket.py`` made it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from patchlight.zoo import ZOO, load_weights, read_card

if TYPE_CHECKING:
    from patchlight.zoo.vit import PocketViT

WEIGHTS = ZOO / "pocket.safetensors"
PHOTOS = ZOO / "photos"


def description() -> dict[str, Any]:
    """The contents of ``pocket.json``."""
    return read_card("pocket.json")


def classes() -> tuple[str, ...]:
    """The ten class names, in the order of the model's outputs."""
    return tuple(str(name) for name in description()["classes"])


def check_file() -> bool:
    """Whether the weights file is the one that ``pocket.json`` describes (SHA-256)."""
    return hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == str(description()["sha256"])


def build(trained: bool = True) -> PocketViT:
    """Build the model, in float32 and evaluation mode; without `trained`, its weights are random."""
    from patchlight.zoo.vit import PocketViT

    shared = ("qkv_bias", "class_token", "global_pool")  # what every PocketViT has
    model = PocketViT(**{key: value for key, value in description()["architecture"].items() if key not in shared})
    return (load_weights(model, WEIGHTS) if trained else model).eval()
