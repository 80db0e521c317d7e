"""Real weights, photographs and the authors' own outputs, where they lie beside the project; tests skip elsewhere."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.anatomy.opened import Anatomy


def shared_dir() -> Path:
    """The folder with `data/` and `reference/`: ../shared, or PATCHLIGHT_SHARED."""
    root = Path(os.environ.get("PATCHLIGHT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (root / "reference").is_dir():
        pytest.skip(f"no reference data at {root} (set PATCHLIGHT_SHARED)")
    return root


@cache
def reference(name: str) -> dict[str, Any]:
    """The arrays of reference/deit_tiny/NAME.npz."""
    with np.load(shared_dir() / "reference" / "deit_tiny" / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


@cache
def deit_tiny(dtype: torch.dtype = torch.float32) -> Anatomy:
    """deit_tiny with its ImageNet weights; never change it."""
    weights = shared_dir() / "data" / "weights" / "deit_tiny_patch16_224_imagenet1k.safetensors"
    vit = pl.load("deit_tiny_patch16_224", weights=weights)
    return vit if dtype == vit.dtype else pl.wrap(vit.model.to(dtype), name=vit.name)


def inputs(count: int = 4) -> torch.Tensor:
    """The reference images, already preprocessed."""
    return torch.from_numpy(reference("inputs")["x"][:count])
