"""Scoring variants on a CPU in bfloat16, with and without instructions for it."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import patchlight as pl
from benchmarks.common import medians, record
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.precision import Precision
from patchlight.testing import spearman
from patchlight.zoo import pocket

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def main(variants: int = 128) -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name in ("vit_tiny_patch16_224", "vit_base_patch16_224"):
        seconds = medians({precision: _scoring(name, variants, precision) for precision in ("full", "bf16")}, 3)
        ratio = f"{seconds['full'] / seconds['bf16']:.2f}"
        rows.append([f"{name}: {variants} variants of 98 tokens, full / bf16", ratio])
    vit = pl.load("pocket")
    batch = vit.batch(sorted(str(photo) for photo in pocket.PHOTOS.glob("*.jpg")))
    for name, settings in (("tis", {"samples": 256}), ("rise", {"samples": 256}), ("occlusion", {})):
        full, half = (pl.explain(vit, batch, name, precision=p, **settings).scores for p in ("full", "bf16"))
        lowest = min(spearman(a, b) for a, b in zip(full, half, strict=True))
        rows.append([f"pocket, {len(batch)} photographs: {name}, lowest Spearman of bf16 with full", f"{lowest:.4f}"])
    title = f"Scoring variants on a CPU with {_present()}"
    record("half", title, ["what", "times as fast, or Spearman"], rows, cpu=True)


def _scoring(name: str, variants: int, precision: Precision) -> Callable[[], object]:
    torch.manual_seed(0)
    vit = pl.load(name, pretrained=False)
    keep = torch.stack([torch.randperm(196)[:98] for _ in range(variants)])
    subsets = TokenSubsets(torch.zeros(variants, dtype=torch.long), keep)
    ablation = Ablation(vit, torch.randn(1, 3, 224, 224), precision=precision)
    return lambda: ablation.logits(subsets)


def _present() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].splitlines()[0].split()
    except (OSError, IndexError):
        return platform.processor()
    return ", ".join(name for name in _INSTRUCTIONS if name in flags)


if __name__ == "__main__":
    main()
