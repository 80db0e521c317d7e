"""The bundled model ``pocket-detector``: a YOLOS of 1.1 million parameters that finds six kinds of shapes in scenes.

It stands in for a user's own detector in examples and tests. ``DETECTOR.md`` beside this file is its model card;
``tools/train_detector.py`` made it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAME = "pocket-detector"
WEIGHTS = HERE / f"{NAME}.safetensors"
SCENES = HERE / "scenes"
"""Six pictures that it was not trained on; ``scenes.json`` has their objects."""


@cache
def _description_text() -> str:
    return (HERE / f"{NAME}.json").read_text(encoding="utf-8")


def description() -> dict[str, Any]:
    """The contents of ``pocket-detector.json``: architecture, preprocessing, classes, measured accuracy, checksum."""
    content: dict[str, Any] = json.loads(_description_text())
    return content


def build(trained: bool = True) -> Any:
    """Build the model, in float32 and evaluation mode.

    Args:
        trained: Whether to load the trained weights; otherwise they are random.
    """
    import safetensors.torch
    import transformers

    card = description()
    config: Any = transformers.YolosConfig(**card["architecture"])
    config.id2label = dict(enumerate(card["classes"]))
    model = transformers.YolosForObjectDetection(config)
    if trained:
        weights = safetensors.torch.load_file(WEIGHTS)
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    return model.eval()
