"""The table of docs/results/boxes.md: maps of detections of ``pocket-detector`` in new scenes.

    python -m tools.boxes --scenes 60 --out docs/results/boxes.md

The detection with the highest score is explained by every method. A scene counts if that detection is an object of the
scene (right label, IoU at least 0.5).
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import patchlight as pl
from patchlight.anatomy.heads.boxes import iou
from tools.scenes import LABELS, compose

SEED = 3 * 10**6
METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ixg": {},
    "gradcam-elementwise": {"preset": "odam"},
    "genatt": {},
    "rollout": {},
    "grad-eclip": {},
    "tis": {"samples": 128},
    "drise": {"samples": 300, "grid": 8},
    "random": {},
}
METRICS: dict[str, dict[str, Any]] = {
    "pointing-game": {},
    "energy-pointing": {},
    "deletion": {"steps": 16},
    "insertion": {"steps": 16},
}


def usable(vit: Any, images: Tensor, scenes: Any) -> Tensor:
    """The scenes whose highest-scoring detection is one of their objects."""
    kept = []
    for i, image in enumerate(images):
        found = vit.detect(image[None], threshold=0)[0]
        same = scenes.labels[i] == LABELS.index(found.label)
        kept += [i] if bool((same & (iou(scenes.boxes[i], torch.tensor(found.box)) >= 0.5)).any()) else []
    return torch.tensor(kept)


def interval(differences: Tensor) -> tuple[float, float, float]:
    """The mean and its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(differences), (4000, len(differences)), generator=generator)
    low, high = differences[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return float(differences.mean()), low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenes", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    vit: Any = pl.load("pocket-detector")
    scenes = compose(options.scenes, torch.Generator().manual_seed(SEED))
    mean, std = (torch.tensor(each)[:, None, None] for each in (vit.preprocess.mean, vit.preprocess.std))
    images = (scenes.images - mean) / std
    kept = usable(vit, images, scenes)
    images = images[kept]
    values: dict[str, dict[str, Tensor]] = {}
    maps = pl.explain(vit, images, METHODS, progress=False)
    print("explained", flush=True)
    measured = pl.evaluate(vit, images, maps, METRICS, progress=False)
    for name in METHODS:
        values[name] = {metric: measured[name][metric].values.double() for metric in METRICS}
        print(name, {metric: round(float(each.nanmean()), 3) for metric, each in values[name].items()}, flush=True)
    rows = []
    for name, settings in METHODS.items():
        own = values[name]
        shown = [f"{float(own[metric].nanmean()):.2f}" for metric in METRICS]
        gap = "–"
        if name != "random":
            middle, low, high = interval(values["random"]["deletion"] - own["deletion"])
            gap = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        label = " ".join([f"`{name}`", *(f"{key} {value}" for key, value in settings.items())])
        rows.append("| " + " | ".join([label, *shown, gap]) + " |")
    count = f"{len(kept)} of {options.scenes}"
    text = HEADER.format(count=count, auto=pl.explain(vit, images[:1], progress=False).method) + "\n".join(rows) + "\n"
    options.out.write_text(text, encoding="utf-8")


HEADER = """# Maps of detections

`python -m tools.boxes` explains the detection with the highest score in held-out scenes with the bundled
`pocket-detector`. {count} scenes were measured: in the others this detection is not an object of the scene. `auto` is
`{auto}`.
The score is the match of the detection (IoU times probability, the best of all queries), between 0 and 1.

- **on the object**: the highest pixel of the map lies in the box (`pointing-game`, objects below half of the image).
- **energy**: the share of the map in the box (`energy-pointing`).
- **deletion**, **insertion**: area under the curve of the match when pixels are removed, or shown, best first.
- **better than random**: deletion of random maps minus that of the method, with a 95 % bootstrap interval.

| method | on the object | energy | deletion ↓ | insertion ↑ | better than random |
|---|---|---|---|---|---|
"""


if __name__ == "__main__":
    main()
