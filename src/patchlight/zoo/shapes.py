"""The bundled models ``pocket-detector`` and ``pocket-segmenter``, which find six kinds of shapes in scenes.

They stand in for a user's own models in examples and tests. ``SHAPES.md`` beside this file is their model card;
``tools/train_detector.py`` and ``tools/train_segmenter.py`` made them.
"""

from __future__ import annotations

from typing import Any

from patchlight.core.extras import import_extra
from patchlight.zoo import ZOO, load_weights, read_card

NAMES = ("pocket-detector", "pocket-segmenter")
SCENES = ZOO / "scenes"
"""Six pictures that they were not trained on; ``scenes.json`` has their objects."""


def description(name: str) -> dict[str, Any]:
    """The contents of a model's JSON file."""
    return read_card(f"{name}.json")


def build(name: str, trained: bool = True) -> Any:
    """Build one of `NAMES`, in float32 and evaluation mode; without `trained`, its weights are random."""
    transformers = import_extra("transformers", f"'{name}' needs", "hf")
    card = description(name)
    kind: Any = getattr(transformers, card["library"].rpartition(".")[2])
    config = kind.config_class(**card["architecture"])
    config.id2label = dict(enumerate(card["classes"]))
    model = kind(config)
    return (load_weights(model, ZOO / f"{name}.safetensors") if trained else model).eval()
