"""Fills: each has its closed form, in the normalised space the model sees, and is the same for any batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import patchlight as pl
from patchlight.evidence.fills import FILLS, Fill, Imputed, Painted, Signal, fill_images
from tests.families import build, images, shared


def test_fills_have_their_closed_forms() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    assert (fill_images("zero", batch, vit) == 0).all()
    assert (fill_images(0.25, batch, vit) == 0.25).all()
    black = vit.preprocess.picture(fill_images("black", batch, vit)[0])
    assert np.asarray(black).max() == 0
    torch.testing.assert_close(fill_images("image-mean", batch, vit)[1, 2, 3, 4], batch[1].mean())
    torch.testing.assert_close(fill_images("channel-mean", batch, vit)[1, :, 3, 4], batch[1].mean((1, 2)))
    noise = fill_images("noise", batch, vit, seed=3, noise=(-1.0, 2.0))
    assert noise.min() >= -1
    assert noise.max() <= 2
    assert torch.equal(noise[0], noise[2]), "each image's generator is seeded by the seed alone"
    assert torch.equal(fill_images("noise", batch[1:2], vit, seed=3, noise=(-1.0, 2.0)), noise[1:2])
    with pytest.raises(pl.PatchlightError, match="no fill is called 'grey'"):
        fill_images("grey", batch, vit)  # type: ignore[arg-type]


def test_one_table_names_every_fill_and_the_docs_show_it() -> None:
    assert set(FILLS) == {*get_args(Painted), *get_args(Imputed), *get_args(Signal)}
    assert len({words for words, _ in FILLS.values()}) == len(FILLS), "no two fills have the same words"
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, (words, exactly) in FILLS.items():
        assert f"| `{name}` | {words} | {exactly} |" in docs


def test_the_two_blurs_are_the_papers() -> None:
    """Kernel values of the metric card: RISE's nearly flat one, and the truncated Gaussian of torchvision."""
    from torchvision.transforms.functional import gaussian_blur

    vit = shared("vit", torch.float64)
    delta = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    delta[..., 32, 32] = 1
    rise, tis = fill_images("blur-rise", delta, vit)[0, 0], fill_images("blur-tis", delta, vit)[0, 0]
    for kernel, values in ((rise, (0.008833, 0.008266, 0.007737)), (tis, (0.011964, 0.007256, 0.004401))):
        found = [float(kernel[32, 32]), float(kernel[32, 27]), float(kernel[27, 27])]
        assert [round(value, 6) for value in found] == list(values), "the card has six digits of them"
        assert float(kernel.sum()) == pytest.approx(1)
    batch = images(vit)
    torch.testing.assert_close(fill_images("blur-tis", batch, vit), gaussian_blur(batch, [11, 11], [5.0, 5.0]))
    ones = torch.ones(1, 3, 64, 64, dtype=torch.float64)
    assert fill_images("blur-rise", ones, vit)[0, 0, 0, 0] < 0.5, "RISE pads with zeros"
    torch.testing.assert_close(fill_images("blur-tis", ones, vit), ones)


def slow_blur(image: torch.Tensor, kernel: torch.Tensor, reflect: bool, row: int, column: int) -> float:
    """One pixel of one channel [H,W], every term of its sum by itself."""
    height, width = image.shape

    def at(y: int, x: int) -> float:
        if reflect:
            y, x = (abs(p) if p < n else 2 * (n - 1) - p for p, n in ((y, height), (x, width)))
        return float(image[y, x]) if 0 <= y < height and 0 <= x < width else 0.0

    return sum(float(kernel[i, j]) * at(row + i - 5, column + j - 5) for i in range(11) for j in range(11))


def test_blurs_at_the_border_are_sums_over_zeros_and_over_a_mirror() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    gaussian = torch.tensor([math.exp(-0.5 * ((i - 5) / 5) ** 2) for i in range(11)], dtype=torch.float64)
    delta = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    delta[..., 32, 32] = 1
    kernels = {"blur-tis": torch.outer(gaussian, gaussian) / gaussian.sum() ** 2}
    kernels["blur-rise"] = fill_images("blur-rise", delta, vit)[0, 0, 27:38, 27:38]  # checked above
    for fill, kernel in kernels.items():
        blurred = fill_images(fill, batch, vit)  # type: ignore[arg-type]
        for row, column in ((0, 0), (2, 63), (61, 30), (40, 40)):
            expected = slow_blur(batch[1, 2], kernel, fill == "blur-tis", row, column)
            assert float(blurred[1, 2, row, column]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("fill", [*get_args(Painted), 0.5, 2])
def test_every_fill_is_of_the_images_own_kind_and_the_same_for_any_batch(fill: Fill) -> None:
    vit = shared("vit")
    batch = images(vit)
    before = batch.clone()
    found = fill_images(fill, batch, vit, seed=4)
    assert found.shape == batch.shape
    assert found.dtype == batch.dtype
    torch.testing.assert_close(fill_images(fill, batch[1:2], vit, seed=4), found[1:2], rtol=0, atol=1e-6)
    assert torch.equal(batch, before)


def test_noise_is_drawn_from_the_seed() -> None:
    vit = shared("vit")
    batch = images(vit)
    one, other = (fill_images("noise", batch, vit, seed=seed) for seed in (0, 1))
    assert torch.equal(one, fill_images("noise", batch, vit, seed=0))
    assert not torch.equal(one, other)
    assert float(one.mean()) == pytest.approx(0.5, abs=0.02), "uniform from 0 to 1"
    assert float(one.std()) == pytest.approx(math.sqrt(1 / 12), abs=0.02)
    state = torch.get_rng_state()
    fill_images("noise", batch, vit, seed=7)
    assert torch.equal(torch.get_rng_state(), state)


def test_black_of_a_model_with_another_number_of_channels() -> None:
    """Where mean and deviation are given for three channels and the model has one, their mean is taken."""
    vit = build("vit")
    grey = torch.zeros(1, 1, 64, 64)
    mean, std = torch.tensor(vit.preprocess.mean), torch.tensor(vit.preprocess.std)
    torch.testing.assert_close(fill_images("black", grey, vit), (-mean / std).mean().expand(1, 1, 64, 64))
