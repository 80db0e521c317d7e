"""Every figure draws something with the bundled model; what cannot be drawn is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patchlight as pl
from patchlight.figures import FIGURES, draw
from patchlight.zoo import pocket

PHOTOS = [pocket.PHOTOS / f"{name}.jpg" for name in ("cat", "dog", "bird", "horse", "ship", "dog-and-cat", "kitten")]
LABELS = ["cat", "dog", "bird", "horse", "ship", "dog", "deer"]
"""The last is wrong."""


@pytest.fixture(scope="module")
def vit() -> pl.Anatomy:
    return pl.load("pocket")


def given(name: str, vit: pl.Anatomy) -> dict[str, Any]:
    """What a figure needs, made up."""
    boxes = [torch.tensor([[4.0, 4.0, 20.0, 20.0]])] * len(PHOTOS)
    masks = torch.zeros(len(PHOTOS), *vit.preprocess.size, dtype=torch.int8)
    masks[:, 8:20, 8:20] = 1
    there = {
        "labels": LABELS,
        "boxes": boxes,
        "masks": masks,
        "other": vit,
        "explainer": pocket.PHOTOS.parent / "pocket-diffmask",
    }
    return {key: there[key] for key in (need.split(" or ")[0] for need in FIGURES[name].needs)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws(name: str, vit: pl.Anatomy, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    fig = draw(name, vit, PHOTOS, path, progress=False, **{**given(name, vit), **FIGURES[name].quick})
    assert path.stat().st_size > 10_000
    assert any("Drawn with pocket" in text.get_text() for text in fig.texts)
    assert 3.2 <= fig.get_size_inches()[0] <= 7.0
