"""Table of docs/results/segmentation.md: ``python -m tools.segmentation_page --scenes 24 --out FILE``.

The class of the first object is explained for the bundled `pocket-segmenter` on held-out scenes. The table shows for
each method whether the highest patch is on the object, the share of the map there, deletion of the class probability
in the region, and the same without removing the patches of the object. Brackets are 95 % bootstrap intervals over
scenes. Each scene is a line of ``FILE.jsonl``, from which an interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import patchlight as pl
from tools.detections_page import scenes
from tools.scene_tables import Line, interval, make_table

METHODS: dict[str, dict[str, Any]] = {
    "random": {},
    "rawatt": {},
    "genatt": {},
    "attcat": {},
    "grad-eclip": {},
    "grad": {},
    "ixg": {},
    "ixg.libra": {},
    "fullgrad-plus.libra": {},
    "gradcam": {},
    "occlusion": {"unit": "patch", "level": "token"},
    "rise": {"samples": 256, "level": "token"},
}
"""Methods with their settings."""
REMOVAL: dict[str, Any] = {"unit": "patch", "steps": 12, "progress": False}


def measure(vit: Any, scene: tuple[Tensor, Tensor, Tensor, str]) -> Line:
    """For each method: highest patch on the object, share there, deletion, and deletion of the context.

    Empty if less than half of the object has the right class.
    """
    image, mask, _, label = scene
    best = vit.scores_of(vit.plain(image))[0].argmax(0)
    step = len(mask) // len(best)
    if float((best == vit.class_of(label))[mask[::step, ::step]].float().mean()) < 0.5:
        return {}
    head = pl.heads.Region(mask, label=label)
    on_object = torch.nn.functional.max_pool2d(mask[None, None].float(), 8)[0, 0] > 0
    rows, ends = {}, [0.0, 0.0]
    for name, settings in METHODS.items():
        att = pl.explain(vit, image, name, head=head, progress=False, **settings)
        curves = [
            pl.evaluate(vit, image, att.scores, "deletion", head=head, protect=protect, **REMOVAL)
            for protect in (False, True)
        ]
        positive = att.scores[0].clamp(min=0)
        row, column = att.top_patches(1)[0, 0].tolist()
        share = float(positive[on_object].sum() / positive.sum().clamp_min(1e-12))
        rows[name] = [float(on_object[row, column]), share, *(float(curve.values[0]) for curve in curves)]
        ends = [float(each.curve[0, -1]) for each in curves]
    return {"patches": float(on_object.float().mean()), "ends": ends, "methods": rows}


def table(lines: Sequence[Line]) -> str:
    """The table in Markdown."""
    found = [line for line in lines if line]
    values = {
        key: torch.tensor([line["methods"][key] for line in found], dtype=torch.float64) for key in found[0]["methods"]
    }
    covered = sum(line["patches"] for line in found) / len(found)
    nothing, alone = torch.tensor([line["ends"] for line in found]).mean(0).tolist()
    rows = [
        f"In {len(found)} of {len(lines)} scenes at least half of the first object has the right class; these were "
        f"measured. It covers {covered:.0%} of the patches. With all patches removed the probability is {nothing:.3f}; "
        f"with only the patches of the object it is {alone:.3f}.",
        "",
        "| method | highest patch on the object | share of the map there | deletion ↓ | random minus method | "
        "context only: deletion ↓ | random minus method |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in sorted(values, key=lambda key: float(values[key][:, 2].mean())):
        on, share, *removed = values[key].unbind(1)
        cells = [interval(on, ".0%"), interval(share, ".0%")]
        for i, each in enumerate(removed):
            gap = interval(values["random"][:, 2 + i] - each, ".3f") if key != "random" else "–"
            cells += [interval(each, ".3f"), gap]
        rows.append(f"| `{key}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    def measure_on(device: str) -> Callable[[Any], Line]:
        return partial(measure, pl.load("pocket-segmenter", device=device))

    make_table(__doc__, scenes, measure_on, table)


if __name__ == "__main__":
    main()
