"""A ViT small enough to train gates for within a test, and batches for it."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import patchlight as pl
from patchlight.anatomy.base import Anatomy
from tests.families import randomise

SIDE = 16


def toy(classes: int = 5, depth: int = 2, seed: int = 0) -> Anatomy:
    """Two blocks of width 16 on 4 x 4 patches."""
    torch.manual_seed(0)
    model = VisionTransformer(img_size=SIDE, patch_size=4, embed_dim=16, depth=depth, num_heads=2, num_classes=classes)
    return pl.wrap(randomise(model, seed), name="toy", preprocess=pl.Preprocess((SIDE, SIDE)))


def pictures(count: int = 24, seed: int = 3) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def batches(count: int = 24, size: int = 4, classes: int = 5) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches of (images, labels)."""
    return DataLoader(TensorDataset(pictures(count), torch.arange(count) % classes), size, shuffle=True)
