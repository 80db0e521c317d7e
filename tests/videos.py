"""A small ViT over video, written by hand: tubelets of 2 frames and 16 x 16 pixels."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

import patchlight as pl
from patchlight.core.layout import Geometry
from tests.families import randomise

AXES = ("time", "row", "column")


class TinyVideo(nn.Module):
    """Takes [B,T,3,H,W], as models of transformers do; `order` is the order of its tokens."""

    def __init__(self, frames: int = 4, tubelet: int = 2, prefix: int = 1, suffix: int = 0, order: Any = None) -> None:
        super().__init__()
        self.project = nn.Conv3d(3, 24, (tubelet, 16, 16), (tubelet, 16, 16))
        self.cells = frames // tubelet * 16
        self.prefix, self.suffix, self.order = prefix, suffix, order
        self.special = nn.Parameter(torch.zeros(1, prefix + suffix, 24))
        self.positions = nn.Parameter(torch.zeros(1, prefix + self.cells + suffix, 24))
        self.blocks = nn.ModuleList(Block(24, 3, 2.0) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 5)

    def embed(self, clips: Tensor) -> Tensor:
        cells = self.project(clips.transpose(1, 2)).flatten(2).mT
        cells = cells if self.order is None else cells[:, torch.tensor(self.order).argsort()]
        special = self.special.expand(len(cells), -1, -1)
        tokens = torch.cat([special[:, : self.prefix], cells, special[:, self.prefix :]], 1)
        return tokens + self.positions

    def readout(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(tokens)[:, 0] if self.prefix else self.norm(tokens).mean(1))
        return logits

    def forward(self, clips: Tensor) -> Tensor:
        tokens = self.embed(clips)
        for block in self.blocks:
            tokens = block(tokens)
        return self.readout(tokens)


def tiny_video(frames: int = 4, tubelet: int = 2, **options: Any) -> pl.Anatomy:
    """The model, described by hand."""
    torch.manual_seed(0)
    model: Any = randomise(TinyVideo(frames, tubelet, **options))
    grid = (frames // tubelet, 4, 4)
    return pl.wrap(
        model,
        embed=model.embed,
        blocks=model.blocks,
        readout=model.readout,
        name="tiny-video",
        grid=grid,
        axes=AXES,
        order=model.order,
        prefix=model.prefix,
        suffix=model.suffix,
        pooling="cls" if model.prefix else "avg",
        heads=3,
        classes=5,
        preprocess=pl.Preprocess((64, 64)),
        input_shape=(frames, 3, 64, 64),
        geometry=Geometry.even(grid, (frames, 64, 64), unit=("frame", "px", "px"), dims=(0, 2, 3)),
    )


def clips(count: int = 2, frames: int = 4, seed: int = 0) -> Tensor:
    """Random clips."""
    return torch.randn(count, frames, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
