"""Images, boxes and masks are cropped alike: a rectangle in an image is inside its box."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as T

from patchlight.core.errors import PatchlightError
from patchlight.core.images import Preprocess

SIZES = [(64, 64), (333, 500), (500, 333), (225, 224), (61, 47), (900, 40), (40, 1300)]
PREPROCESS = [
    Preprocess((224, 224), crop_pct=0.9),
    Preprocess((224, 224), crop_pct=0.875, interpolation="bilinear"),
    Preprocess((224, 224), crop_pct=1.0, fit="squash"),
    Preprocess((96, 96), crop_pct=0.875, fit="squash"),
    Preprocess((48, 80), crop_pct=0.95, interpolation="nearest"),
]


def drawn(size: tuple[int, int], box: tuple[int, int, int, int]) -> tuple[Image.Image, torch.Tensor]:
    image = Image.new("RGB", size)
    image.paste("white", box)
    return image, torch.from_numpy((np.asarray(image)[..., 0] > 0).astype(np.int8))


def extent(seen: np.ndarray) -> list[int]:
    """The tight box around the pixels that are True."""
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


@pytest.mark.parametrize("preprocess", PREPROCESS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_drawn_box_stays_on_its_rectangle(preprocess: Preprocess, size: tuple[int, int]) -> None:
    width, height = size
    generator = np.random.default_rng(width)
    for _ in range(6):
        x, y = np.sort(generator.integers(0, width + 1, 2)), np.sort(generator.integers(0, height + 1, 2))
        box = (int(x[0]), int(y[0]), max(int(x[1]), int(x[0]) + 1), max(int(y[1]), int(y[0]) + 1))
        image, mask = drawn(size, box)
        moved = preprocess.boxes(torch.tensor([box], dtype=torch.float32), size)
        shown = np.asarray(preprocess.crop(image))[..., 0] > 127
        cut = preprocess.mask(mask).numpy()
        assert cut.shape == preprocess.size
        assert cut.dtype == np.int8
        wide = len(moved) and float((moved[0, 2:] - moved[0, :2]).min()) > 2
        if not len(moved):
            assert not cut.any()
        if wide:
            np.testing.assert_allclose(extent(cut == 1), moved[0].numpy(), atol=1.0)
            np.testing.assert_allclose(extent(shown), moved[0].numpy(), atol=1.0)


def test_a_box_that_leaves_the_crop_is_dropped_and_others_are_clipped() -> None:
    preprocess = Preprocess((100, 100))
    boxes = torch.tensor([[0.0, 0.0, 90.0, 100.0], [0.0, 10.0, 150.0, 60.0], [180.0, 20.0, 220.0, 40.0]])
    moved = preprocess.boxes(boxes, (400, 100))  # the model sees x in 150..250
    torch.testing.assert_close(moved, torch.tensor([[30.0, 20.0, 70.0, 40.0]]))
    assert preprocess.boxes(boxes[:1], (400, 100)).shape == (0, 4)
    clipped = preprocess.boxes(torch.tensor([[100.0, 0.0, 175.0, 50.0]]), (400, 100))
    torch.testing.assert_close(clipped, torch.tensor([[0.0, 0.0, 25.0, 50.0]]))


def test_masks_keep_their_values() -> None:
    mask = torch.from_numpy(np.random.default_rng(0).integers(-1, 1000, (37, 53)).astype(np.int16))
    cut = Preprocess((64, 64), crop_pct=0.9).mask(mask)
    assert set(cut.unique().tolist()) <= set(mask.unique().tolist())
    assert cut.dtype == torch.int16
    same = Preprocess((37, 53)).mask(mask)
    assert torch.equal(same, mask)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (300, 300)], ids=str)
def test_the_papers_transforms(size: tuple[int, int]) -> None:
    model = Preprocess((224, 224), crop_pct=0.9)
    array = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(array)
    chefer = replace(model, fit="squash", crop_pct=1.0, interpolation="bilinear")
    tis = replace(model, fit="squash", crop_pct=0.875, interpolation="bilinear")
    for ours, theirs in {
        chefer: T.Resize((224, 224)),
        tis: T.Compose([T.Resize((256, 256)), T.CenterCrop(224)]),
    }.items():
        np.testing.assert_array_equal(np.asarray(ours.crop(image)), np.asarray(theirs(image)))
    labels = torch.from_numpy(array[..., 0].astype(np.int16))
    theirs = T.Resize((224, 224), T.InterpolationMode.NEAREST)(Image.fromarray(array[..., 0]))
    np.testing.assert_array_equal(chefer.mask(labels).numpy(), np.asarray(theirs))


def test_what_is_no_box_or_mask_is_refused() -> None:
    preprocess = Preprocess((64, 64))
    with pytest.raises(PatchlightError, match=r"boxes have shape \[4\]; give \[n,4\]"):
        preprocess.boxes(torch.zeros(4), (10, 10))
    with pytest.raises(PatchlightError, match=r"a mask has shape \[3, 3\] and dtype torch.float32"):
        preprocess.mask(torch.zeros(3, 3))
