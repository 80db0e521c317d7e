"""Mosaics: the cell of the class and its mask; GridPG and Focus in closed form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchlight as pl
from patchlight.core.errors import PatchlightError
from patchlight.data import load_batch, open_data
from tests.families import shared

CLASSES = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(2 * CLASSES):
        (tmp_path / f"class-{i % CLASSES:02d}").mkdir(exist_ok=True)
        colour = (20 * (i % CLASSES), 100, 200)
        Image.new("RGB", (30, 20), colour).save(tmp_path / f"class-{i % CLASSES:02d}" / f"image-{i:02d}.png")
    return tmp_path


@pytest.mark.parametrize(("side", "same", "chance"), [(2, 1, 1 / 4), (3, 1, 1 / 9), (2, 2, 1 / 2)])
def test_cells_masks_and_scores(folder: Path, side: int, same: int, chance: float) -> None:
    data = open_data("mosaic", folder, of="files", side=side, same=same, size=36)
    for sample in list(data)[:6]:
        assert sample.label is not None
        assert sample.mask is not None
        reds = np.asarray(sample.image)[:: 36 // side, :: 36 // side, 0]
        cells = sample.mask[:: 36 // side, :: 36 // side].numpy()
        assert (reds[cells == 1] == 20 * sample.label).all()
        assert cells.sum() == same
        assert len(set(reds.ravel().tolist())) == side * side - same + 1
    again = open_data("mosaic", folder, of="files", side=side, same=same, size=36)
    assert data[0].image.tobytes() == again[0].image.tobytes()
    vit = shared("vit")
    batch = load_batch(data, range(4), vit)
    assert batch.masks is not None
    mask = torch.stack([m for m in batch.masks if m is not None]).float()
    for maps, value in ((mask, 1.0), (torch.ones_like(mask), chance), (mask - 0.5, 1.0), (-mask, chance)):
        found = pl.evaluate(vit, batch.images, maps, "energy-pointing", preset="gridpg", masks=batch.masks)
        torch.testing.assert_close(found.values, torch.full((4,), value, dtype=torch.double), atol=0.03, rtol=0)


def test_too_few_classes_are_refused(folder: Path) -> None:
    with pytest.raises(PatchlightError, match="cannot make a mosaic of 16 cells"):
        open_data("mosaic", folder, of="files", side=4)[0]
