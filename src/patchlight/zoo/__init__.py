"""The bundled models and photographs. Importing this package imports no framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

ZOO = Path(__file__).resolve().parent
Model = TypeVar("Model")


def read_card(file: str) -> dict[str, Any]:
    """The contents of a bundled JSON file: architecture, preprocessing, classes, measured accuracy, checksum."""
    card: dict[str, Any] = json.loads((ZOO / file).read_text(encoding="utf-8"))
    return card


def load_weights(model: Model, path: Path) -> Model:
    """Load bundled weights into a model, in float32."""
    import safetensors.torch

    weights = safetensors.torch.load_file(path)
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    model.load_state_dict(floats, strict=True)  # type: ignore[attr-defined]
    return model
