"""ROAD's imputation: a dense solve in float64, closed forms, and what does not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from patchlight.core.errors import PatchlightError
from patchlight.evidence.ablation import Ablation, PixelMasks, RankRanges
from patchlight.evidence.fills import Imputation, fill_images, painted
from patchlight.evidence.imputation import imputed
from tests.evidence import literal
from tests.families import images, shared


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def holes(kind: str, height: int, width: int) -> Tensor:
    """What is missing of two images [2,1,H,W]: scattered pixels, a block at the border, or all but one pixel."""
    missing = drawn(2, 1, height, width, seed=1) > 0
    if kind == "blocks":
        missing = torch.zeros(2, 1, height, width, dtype=torch.bool)
        missing[0, 0, 3:10, 5:17], missing[1, 0, :6, :9] = True, True
    elif kind == "one left":
        missing = torch.ones(2, 1, height, width, dtype=torch.bool)
        missing[0, 0, 4, 2], missing[1, 0, 0, 0] = False, False
    return missing


@pytest.mark.parametrize("kind", ["scattered", "blocks", "one left"])
@pytest.mark.parametrize("size", [(13, 19), (16, 20), (11, 5)])
def test_it_is_the_dense_solution(kind: str, size: tuple[int, int]) -> None:
    x, missing = drawn(2, 3, *size), holes(kind, *size)
    expected = np.stack([literal.imputed(a.numpy(), m[0].numpy()) for a, m in zip(x, missing, strict=True)])
    np.testing.assert_allclose(imputed(x, missing), expected, atol=1e-7)
    rough = imputed(x.float(), missing)
    assert rough.dtype == torch.float32
    np.testing.assert_allclose(rough, expected, atol=5e-3)


def test_ramps_and_constants_are_exact() -> None:
    rows, columns = torch.arange(40.0, dtype=torch.float64)[:, None], torch.arange(36.0, dtype=torch.float64)
    ramp = (0.3 * rows - 0.7 * columns + 2).expand(1, 2, 40, 36)
    missing = torch.zeros(1, 1, 40, 36, dtype=torch.bool)
    missing[..., 9:25, 11:27] = True
    torch.testing.assert_close(imputed(ramp, missing), ramp, rtol=0, atol=1e-6)
    flat = torch.full((2, 3, 13, 19), 0.7)
    for kind in ("scattered", "blocks", "one left"):
        torch.testing.assert_close(imputed(flat, holes(kind, 13, 19)), flat, rtol=0, atol=1e-5)


def test_everything_missing_leaves_the_channels_means() -> None:
    x = drawn(2, 3, 13, 19)
    missing = torch.ones(2, 1, 13, 19, dtype=torch.bool)
    torch.testing.assert_close(imputed(x, missing), x.mean((2, 3), keepdim=True).expand_as(x), rtol=0, atol=1e-12)
    assert torch.equal(imputed(x, ~missing), x)


def test_the_fill_adds_noise_of_the_seed_in_the_space_of_colours() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit, 2)
    fill = fill_images("road", batch, vit, seed=3)
    assert isinstance(fill, Imputation)
    deviation = fill.noise.std((1, 2)) * torch.tensor(vit.preprocess.std)
    assert deviation.tolist() == pytest.approx([0.01] * 3, rel=0.05)
    again, other = (fill_images("road", batch[1:], vit, seed=seed) for seed in (3, 4))
    assert isinstance(again, Imputation)
    assert isinstance(other, Imputation)
    assert torch.equal(again.noise, fill.noise)
    assert not torch.equal(other.noise, fill.noise)
    shown = ~holes("scattered", 64, 64)
    found = painted(batch, fill, torch.tensor([1, 0]), shown)
    expected = torch.where(shown, batch[[1, 0]], imputed(batch[[1, 0]], ~shown) + fill.noise)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(painted(batch, fill, torch.tensor([1, 0]), shown.double()), found), "a mask of numbers"


def test_variants_are_imputed_in_the_chunk_and_soft_masks_are_refused() -> None:
    vit = shared("vit", torch.float64)
    batch = images(vit)
    fill = fill_images("road", batch, vit)
    masks = (drawn(5, 4, 4) > 0).double()
    owner = torch.tensor([0, 2, 1, 1, 0])
    shown = masks.repeat_interleave(16, 1).repeat_interleave(16, 2)[:, None].bool()
    expected = vit.logits(painted(batch, fill, owner, shown))
    found = Ablation(vit, batch, chunk=2).logits(PixelMasks(owner, masks, fill))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    ranks = drawn(3, 64, 64).flatten(1).argsort(1).argsort(1).view(3, 64, 64)
    begin, end = torch.tensor([0, 100, 64, 2000, 7]), torch.tensor([0, 4096, 640, 3000, 8])
    within = (ranks[owner] >= begin[:, None, None]) & (ranks[owner] < end[:, None, None])
    expected = vit.logits(painted(batch, fill, owner, ~within[:, None]))
    found = Ablation(vit, batch, chunk=2).logits(RankRanges(owner, begin, end, ranks, fill))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    with pytest.raises(PatchlightError, match="soft"):
        Ablation(vit, batch).logits(PixelMasks(owner, masks / 2, fill))
