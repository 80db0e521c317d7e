"""What `tolerance` saves and costs: masks used, how the order differs from that of all masks, insertion less deletion.

`python -m tools.stopping --model pocket --data cifar10:DIR --images 32` prints a Markdown table.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import Tensor

import patchlight as pl
from patchlight.core.statistics import spearman
from patchlight.data import batches
from patchlight.data.spec import DataSpec, kind_and_path

SETTINGS: dict[str, dict[str, Any]] = {
    "posterior": {"samples": 1024},
    "tis": {},
    "rise": {"samples": 4096},
    "kernel-shap": {"samples": 4096},
    "lime": {"samples": 4096},
    "hsic": {"samples": 2048},
    "smoothgrad": {"samples": 64},
    "vit-cx": {"samples": 16},
}
TOLERANCES = (0.2, 0.1, 0.05, 0.02)


def ordered(att: pl.Attribution, other: pl.Attribution) -> Tensor:
    """The rank correlation of two maps of each image."""
    return spearman(att.scores.flatten(1), other.scores.flatten(1))


def rows(
    vit: pl.Anatomy, images: Tensor, method: str, tolerances: tuple[float, ...] = TOLERANCES, **given: Any
) -> list[str]:
    """A row for all masks, with the correlation between two seeds, and one for each tolerance."""
    settings = {**SETTINGS[method], **given}
    whole, again = (pl.explain(vit, images, method, seed=seed, progress=False, **settings) for seed in (0, 1))
    found: dict[float | None, pl.Attribution] = {None: whole}
    for t in tolerances:
        found[t] = pl.explain(vit, images, method, tolerance=t, progress=False, **settings)
    told = []
    for tolerance, att in found.items():
        worth = pl.evaluate(vit, images, att, metric="ins-del", steps=16, progress=False)
        counts = torch.tensor(att.samples, dtype=torch.float64)
        near = ordered(att, again if tolerance is None else whole)
        name = "–" if tolerance is None else f"{tolerance}"
        used = f"{counts.mean():.0f} ({int(counts.min())} to {int(counts.max())})"
        told.append(f"| `{method}` | {name} | {used} | {near.mean():.3f} | {worth.mean:.3f} |")
    return told


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--weights")
    parser.add_argument("--data", required=True, help="KIND:DIR")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--methods", default=",".join(SETTINGS))
    parser.add_argument("--samples", type=int)
    asked = parser.parse_args(arguments)
    vit = pl.load(asked.model, weights=asked.weights) if asked.weights else pl.load(asked.model)
    kind, path = kind_and_path(asked.data)
    spec = DataSpec(kind=kind or "folder", path=path, images=asked.images)
    data = spec.open()
    images = torch.cat([batch.images for batch in batches(data.select(spec.select_indices(data.names)), vit)])
    print(f"{vit.name}, {len(images)} images of {kind or 'folder'}\n")
    print("| method | tolerance | masks, mean (range) | rank correlation | ins-del |\n| --- | --- | --- | --- | --- |")
    given = {} if asked.samples is None else {"samples": asked.samples}
    for method in asked.methods.split(","):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pl.DegenerateMap)
            print("\n".join(rows(vit, images, method, **given)), flush=True)


if __name__ == "__main__":
    main()
