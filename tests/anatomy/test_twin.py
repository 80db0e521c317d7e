"""The twin of a model: what it does in place of the model's own modules has the same value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from patchlight.anatomy.twin import PatchProduct, multiply_patches


@pytest.mark.parametrize(("kernel", "size"), [((4, 4), (16, 12)), ((4, 2), (17, 9))])
def test_side_by_side_patches_convolved_are_their_product(kernel: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 5, kernel, kernel).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    others = nn.Conv2d(3, 5, 4, stride=2), nn.Conv2d(3, 5, 4, stride=4, padding=1)
    expected = convolution(x)
    multiply_patches(nn.ModuleList([convolution, *others]))
    assert isinstance(convolution, PatchProduct)
    assert not any(isinstance(other, PatchProduct) for other in others)
    torch.testing.assert_close(convolution(x), expected)
