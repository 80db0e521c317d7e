"""Table of docs/results/detection.md: ``python -m tools.detections_page --scenes 60 --out FILE``.

The first detection of the bundled `pocket-detector` is explained on held-out scenes. The table shows for each method
whether the highest patch is on the object, whether most of the positive scores are, and deletion of the match. Brackets
are 95 % bootstrap intervals over scenes. Each scene is a line of ``FILE.jsonl``, from which an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

import patchlight as pl
from tools.scene_tables import Line, interval, make_table
from tools.scenes import LABELS, compose
from tools.train_detector import normalise

METHODS: dict[str, dict[str, Any]] = {
    "random": {},
    "rawatt": {},
    "rollout": {},
    "genatt": {},
    "legrad": {},
    "attcat": {},
    "grad": {},
    "ixg": {},
    "ixg.libra": {},
    "fullgrad-plus.libra": {},
    "gradcam": {},
    "gradcam-elementwise": {"preset": "odam"},
    "alti": {},
    "decompx": {},
    "occlusion": {"unit": "token", "level": "token"},
    "tis": {},
    "drise": {"samples": 300, "level": "token"},
    "posterior": {"samples": 256},
}
"""Methods with their settings."""


def scenes(count: int) -> list[tuple[Tensor, Tensor, Tensor, str]]:
    """New scenes and their first object: image [1,3,H,W], mask [H,W], box [4] and label."""
    made = compose(count, torch.Generator().manual_seed(3 * 10**6))
    images = normalise(made.images)
    return [
        (images[i : i + 1], made.masks[i, 0], made.boxes[i, 0], LABELS[int(made.labels[i, 0])]) for i in range(count)
    ]


def measure(vit: Any, scene: tuple[Tensor, Tensor, Tensor, str]) -> Line:
    """For each method: highest patch on the object, share on the object, and deletion; empty if it was not found."""
    image, mask, box, label = scene
    found = [
        d for d in vit.detect(image) if d.label == label and float(box_iou(torch.tensor([d.box]), box[None])) > 0.5
    ]
    if not found:
        return {}
    head = pl.heads.Box(query=found[0].query)
    on_object = torch.nn.functional.max_pool2d(mask[None, None].float(), 8)[0, 0] > 0
    rows, end = {}, 0.0
    for name, settings in METHODS.items():
        att = pl.explain(vit, image, name, head=head, progress=False, **settings)
        value = pl.evaluate(vit, image, att.scores, "deletion", unit="token", steps=16, head=head, progress=False)
        positive = att.scores[0].clamp(min=0)
        row, column = att.top_patches(1)[0, 0].tolist()
        share = float(positive[on_object].sum() / positive.sum().clamp_min(1e-12))
        rows[name] = [float(on_object[row, column]), share, float(value.values[0])]
        end = float(value.curve[0, -1])
    return {"patches": float(on_object.float().mean()), "end": end, "methods": rows}


def table(lines: Sequence[Line]) -> str:
    """The table in Markdown."""
    found = [line for line in lines if line]
    values = {
        key: torch.tensor([line["methods"][key] for line in found], dtype=torch.float64) for key in found[0]["methods"]
    }
    covered, end = (sum(line[key] for line in found) / len(found) for key in ("patches", "end"))
    rows = [
        f"The first object is detected in {len(found)} of {len(lines)} scenes; these were measured. It covers "
        f"{covered:.0%} of the patches. With all patches removed, the match is {end:.3f}.",
        "",
        "| method | highest patch on the object | most of the map on the object | deletion ↓ | random minus method |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in sorted(values, key=lambda key: float(values[key][:, 2].mean())):
        on, share, deletion = values[key].unbind(1)
        gap = interval(values["random"][:, 2] - deletion, ".3f") if key != "random" else "–"
        half = interval(share > 0.5, ".0%")
        rows.append(f"| `{key}` | {interval(on, '.0%')} | {half} | {interval(deletion, '.3f')} | {gap} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    def measure_on(device: str) -> Callable[[Any], Line]:
        return partial(measure, pl.load("pocket-detector", device=device))

    make_table(__doc__, scenes, measure_on, table)


if __name__ == "__main__":
    main()
