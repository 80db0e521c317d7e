"""Coalitions in chunks of like size give what each gives by itself, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.coalitions import coalition_logits, no_coalitions
from tests.families import images, shared


def one_by_one(vit: Anatomy, x: Tensor, z: Tensor) -> Tensor:
    """Logits [B,m,C], each from a forward of its own with all other patches really removed."""
    rows = []
    for image, coalitions in zip(x, z, strict=True):
        for coalition in coalitions:
            tokens = vit.embed(image[None])
            rows.append(vit.readout(vit.run(tokens, keep=coalition.nonzero().T))[0])
    return torch.stack(rows).unflatten(0, z.shape[:2])


@pytest.mark.parametrize("family", ["vit-wide", "deit-distilled", "dinov2-reg", "torchvision"])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_every_coalition_by_itself(family: str, chunk: int) -> None:
    vit = shared(family, torch.float64)
    assert no_coalitions(vit) is None
    x = images(vit, 2)
    players = vit.grid[0] * vit.grid[1]
    z = torch.rand(2, 5, players, generator=torch.Generator().manual_seed(0)) < 0.4
    z[0, 0], z[1, 3] = False, True
    found = coalition_logits(vit, x, z, chunk)
    assert torch.allclose(found, one_by_one(vit, x, z), rtol=0, atol=1e-10)


def test_gradients_flow_to_the_patches_that_are_there() -> None:
    vit = shared("vit-wide", torch.float64)
    x = images(vit, 1).requires_grad_()
    z = torch.zeros(1, 1, vit.grid[0] * vit.grid[1], dtype=torch.bool)
    z[0, 0, 3] = True
    coalition_logits(vit, x, z, 1).sum().backward()
    cells = x.grad.abs().sum((0, 1)).unflatten(0, (vit.grid[0], -1)).unflatten(2, (vit.grid[1], -1)).sum((1, 3))  # type: ignore[union-attr]
    assert cells.flatten().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(("family", "told"), [("reg4-gap", "reads its patches"), ("swin", "")])
def test_models_that_cannot(family: str, told: str) -> None:
    assert told in str(no_coalitions(shared(family)))
