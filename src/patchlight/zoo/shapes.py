"""The bundled models ``pocket-detector`` and ``pocket-segmenter``, which find six kinds of shapes in scenes.

They stand in for a user's own models in examples and tests. ``SHAPES.md`` beside this file is their model card;
``tools/train_detector.py`` and ``tools/train_segmenter.py`` made them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = ("pocket-detector", "pocket-segmenter")
SCENES = HERE / "scenes"
"""Six pictures that they were not trained on; ``scenes.json`` has their objects."""


@cache
def _description_text(name: str) -> str:
    return (HERE / f"{name}.json").read_text(encoding="utf-8")


def description(name: str) -> dict[str, Any]:
    """The contents of a model's JSON file: architecture, preprocessing, classes, measured accuracy, checksum."""
    content: dict[str, Any] = json.loads(_description_text(name))
    return content


def build(name: str, trained: bool = True) -> Any:
    """Build a model, in float32 and evaluation mode.

    Args:
        name: One of `NAMES`.
        trained: Whether to load the trained weights; otherwise they are random.
    """
    import safetensors.torch
    import transformers

    card = description(name)
    kind: Any = getattr(transformers, card["library"].rpartition(".")[2])
    config = kind.config_class(**card["architecture"])
    config.id2label = dict(enumerate(card["classes"]))
    model = kind(config)
    if trained:
        weights = safetensors.torch.load_file(HERE / f"{name}.safetensors")
        floats = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
        model.load_state_dict(floats, strict=True)
    return model.eval()
