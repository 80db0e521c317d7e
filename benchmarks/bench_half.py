"""Variants scored on a CPU in bfloat16: what is gained where the processor has instructions for it, and lost."""

from __future__ import annotations

import platform
import warnings
from pathlib import Path

import patchlight as pl
from benchmarks.common import medians, record
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
    record(
        "half", f"Scoring variants on a CPU with {_present()}", ["what", "times as fast, or Spearman"], rows, cpu=True
    )


def _present() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].splitlines()[0].split()
    except (OSError, IndexError):
        return platform.processor()
    return ", ".join(name for name in _INSTRUCTIONS if name in flags)


if __name__ == "__main__":
    main()
