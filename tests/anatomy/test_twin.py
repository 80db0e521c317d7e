"""The twin of a model: what it does in place of the model's own modules has the same value."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

import patchlight as pl
from patchlight.anatomy.twin import PatchProduct, multiply_patches
from tests.callbacks.pieces import images, model


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


def test_an_autocast_that_accelerate_puts_around_a_model_stays_outside_its_twin() -> None:
    """As `Accelerator.prepare_model` does it in mixed precision, before or after the model is wrapped."""
    net = model("vit").eval()
    x = images()
    with torch.no_grad():
        plain = net(x)
    before = pl.wrap(net)
    net._original_forward = net.forward
    net.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(net.forward.__func__), net)
    with torch.no_grad():
        around = net(x).float()
    assert (around - plain).abs().max() > 1e-3
    for vit in (before, pl.wrap(net)):
        torch.testing.assert_close(vit.logits(x), plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(net(x).float(), around)
