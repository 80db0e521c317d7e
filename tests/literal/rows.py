"""How each kind of classifier reads a (to, from) matrix, written out; and maps in float64 from the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import Targets
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve

TARGETS = [3, 1, 5]


def maps(vit: Anatomy, images: Tensor, name: str, **settings: Any) -> Tensor:
    """The maps [B,h,w] of a method for the first classes of TARGETS."""
    targets = Targets(torch.tensor(TARGETS[: len(images)])[:, None])
    _, (scores,) = compute(vit, images, [resolve(name, settings)], targets, 0)
    return scores[:, 0]


def read_rows(vit: Anatomy, matrix: Tensor) -> Tensor:
    """The patches [h,w] of the rows the classifier reads, of one image's matrix [N,N]."""
    rows = {"cls": [0], "cls+dist": [0, 1], "avg": range(vit.prefix, vit.tokens)}[vit.pooling]
    row = torch.stack([matrix[i] for i in rows]).mean(0)
    return row[vit.prefix :].reshape(vit.grid)


def patches(vit: Anatomy, tokens: Tensor) -> Tensor:
    return tokens[vit.prefix :].reshape(vit.grid)
