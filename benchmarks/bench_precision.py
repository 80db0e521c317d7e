"""How well maps in each precision agree with full precision, on real weights; what `auto` means on CUDA follows.

Lowest Spearman rank correlation over 16 images and two models. Needs `../shared/data` (or PATCHLIGHT_SHARED).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import patchlight as pl
from benchmarks.common import device, record
from patchlight.methods.base import Ablates
from patchlight.methods.requests import refusal, resolve
from patchlight.testing import contract_names, spearman
from patchlight.zoo import pocket

SHARED = Path(os.environ.get("PATCHLIGHT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
ENOUGH = 0.998
MORE = {
    "ig": ({"level": "token"}, {"level": "pixel"}),
    "smoothgrad": ({"level": "token"}, {"level": "pixel"}),
    "attcam": ({"relu": True}, {"relu": False}),
    "ixg.plus.libra": ({},),
    "decompx.skipplus": ({},),
}


def main(images: int = 16) -> None:
    if not (SHARED / "data" / "weights").is_dir():
        print("the precision benchmark needs real weights and images in ../shared/data, or PATCHLIGHT_SHARED")
        return
    warnings.simplefilter("ignore")
    files = sorted((SHARED / "data" / "imagenet-val-1000" / "images").iterdir())
    files = files[:: max(1, len(files) // images)][:images]
    names = [n for n in contract_names() if not isinstance(resolve(n).method, Ablates) and n != "random"]
    asked = {f"{n} {_words(s)}".strip(): {"method": n, **s} for n in [*names, *MORE] for s in MORE.get(n, ({},))}
    precisions = ("tf32", "bf16", "fp16") if device() == "cuda" else ("bf16", "fp16")
    lowest: dict[str, dict[str, float]] = {label: dict.fromkeys(precisions, 1.0) for label in asked}
    for model in MODELS:
        weights = SHARED / "data" / "weights" / f"{model}_imagenet1k.safetensors"
        vit = pl.load(model, weights=weights, device=device())
        batch = vit.batch([str(f) for f in files])
        target = vit.logits(batch).argmax(1).tolist()
        for label, settings in asked.items():
            if refusal(resolve(label, settings), vit) is not None:
                lowest.pop(label, None)
                continue
            full, *others = (
                pl.explain(vit, batch, {label: {**settings, "precision": p}}, target=target)[label].scores
                for p in ("full", *precisions)
            )
            for precision, scores in zip(precisions, others, strict=True):
                worst = min(spearman(a, b) for a, b in zip(full, scores, strict=True))
                lowest[label][precision] = min(lowest[label][precision], worst)
    lowest["diffmask"], asked["diffmask"] = _gates(precisions), {}
    rows = [
        [label, *(f"{values[p]:.5f}" for p in precisions), resolve(label, asked[label]).method.precision]
        for label, values in sorted(lowest.items(), key=lambda item: item[1][precisions[-1]])
    ]
    title = f"Agreement of precisions with full: lowest Spearman of {len(files)} images, {' and '.join(MODELS)}"
    record("precision", title, ["method", *precisions, "auto on CUDA"], rows)


def _gates(precisions: Sequence[str]) -> dict[str, float]:
    """DiffMask with the gates of the bundled model, on its photographs; the graded map orders all patches."""
    vit = pl.load("pocket", device=device())
    batch = vit.batch(sorted(str(photo) for photo in pocket.PHOTOS.glob("*.jpg")))
    full, *others = (
        pl.explain(vit, batch, "diffmask", map="graded", precision=p).scores for p in ("full", *precisions)
    )
    return {
        p: min(spearman(a, b) for a, b in zip(full, scores, strict=True))
        for p, scores in zip(precisions, others, strict=True)
    }


def _words(settings: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


if __name__ == "__main__":
    main()
