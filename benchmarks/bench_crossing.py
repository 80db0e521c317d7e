"""Explaining through crossing, beside the same ViT-B whose opening is written by hand, alternately.

Crossing intercepts the model's own forward at its blocks; the other side calls `embed`, blocks and `readout` as
functions. Both are the same network.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import patchlight as pl
from benchmarks.common import _settle, device, record

TASKS: dict[str, dict[str, Any]] = {
    "rollout": {},
    "genatt": {},
    "fullgrad-plus.libra": {},
    "decompx.skipplus": {},
    "tis": {"samples": 64},
}


class Written(VisionTransformer):
    """A ViT with functions for what comes before and after its blocks."""

    def before(self, images: Tensor) -> Tensor:
        return self.norm_pre(self._pos_embed(self.patch_embed(images)))

    def after(self, tokens: Tensor) -> Tensor:
        return self.forward_head(self.norm(tokens))


def opened(small: bool = False) -> tuple[pl.Anatomy, pl.Anatomy]:
    """The same ViT, opened by crossing and by hand."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 4} if small else {}
    model: Any = timm.create_model("vit_base_patch16_224", **sizes).to(device()).eval().requires_grad_(False)
    crossed = pl.wrap(model, name="crossed")
    model.__class__ = Written
    keys = ("grid", "prefix", "pooling", "heads", "classes", "preprocess")
    about = {key: getattr(crossed, key) for key in keys}
    written = pl.wrap(model, embed=model.before, blocks=model.blocks, readout=model.after, name="written", **about)
    return crossed, written


def main(batch: int = 64, rounds: int = 15) -> None:
    warnings.simplefilter("ignore")
    small = device() == "cpu"  # a rehearsal, in CPU time, which other programs disturb little
    clock = time.process_time if small else time.perf_counter
    both = opened(small)
    images = torch.randn(4 if small else batch, 3, *both[0].preprocess.size, device=device())
    rows = []
    for name, settings in TASKS.items():
        ratios, times = [], []
        for round_ in range(rounds + 2):
            pair = {}
            for side in (0, 1) if round_ % 2 else (1, 0):  # whoever is first changes
                _settle()
                begin = clock()
                pl.explain(both[side], images, name, target=1, progress=False, batch_size=len(images), **settings)
                _settle()
                pair[side] = clock() - begin
            if round_ > 1:
                times.append((pair[0], pair[1]))
                ratios.append(pair[0] / pair[1])
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = [f"{1e3 * statistics.median(side):.2f}" for side in zip(*times, strict=True)]
        rows.append([name, *medians, f"{middle:.3f} ({low:.3f} to {high:.3f})"])
    title = f"Crossing beside an opening written by hand, {'a tiny ViT' if small else 'ViT-B/16'}, batch {len(images)}"
    header = ["method", "crossing, ms", "by hand, ms", f"ratio, median (quartiles){'' if small else ', at most 1.03'}"]
    record("crossing", title, header, rows)


if __name__ == "__main__":
    main()
