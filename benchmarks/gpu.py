"""Perturbation methods on an accelerator, seconds an image, beside bare forwards of the same shapes.

    python -m benchmarks.gpu [--model vit_base_patch16_224] [--images 4]

Every section is measured on its own, so that one that fails leaves the others; the table goes to results/gpu.md.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable

import torch

import patchlight as pl
from benchmarks.common import device, machine, record
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Ablation, TokenSubsets
from patchlight.evidence.kmeans import draw_initial, kmeans
from patchlight.evidence.rules import RULES
from patchlight.methods.base import Ask
from patchlight.methods.tis import activation_points
from patchlight.methods.vitcx import clusters, cosine_distances, feature_maps, scale_to_unit
from patchlight.testing import spearman

PLAIN = RULES["plain"]


def seconds(task: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of `repeats` runs after one warm-up, device work included."""
    times = []
    for _ in range(repeats + 1):
        _settle()
        begin = time.perf_counter()
        task()
        _settle()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--masks", type=int, default=1024)
    options = parser.parse_args()
    torch.manual_seed(0)
    vit = pl.load(options.model, pretrained=False, device=device())
    size, width = vit.tokens, vit.embed(torch.zeros(1, 3, *vit.preprocess.size, device=device())).shape[-1]
    images = torch.randn(options.images, 3, *vit.preprocess.size, device=device())
    masks, half = options.masks, (size - vit.prefix) // 2
    rows: list[list[str]] = []
    bare: dict[str, float] = {}

    def add(what: str, task: Callable[[], float], note: Callable[[float], str] = lambda s: "") -> None:
        try:
            value = task()
            rows.append([what, f"{value:.4f}", note(value)])
        except Exception as error:
            traceback.print_exc()
            rows.append([what, "failed", str(error).splitlines()[0][:80]])
        print(rows[-1], flush=True)

    def forwards(tokens: int, count: int, compiled: bool = False) -> float:
        x = torch.randn(count, tokens, width, device=device(), dtype=torch.bfloat16)
        model = pl.wrap(_bf16_copy(vit), name="bf16")
        blocks = torch.compile(model.run, dynamic=False) if compiled else model.run
        with torch.no_grad():
            taken = seconds(lambda: model.readout(blocks(x)))
        bare[f"{tokens} {compiled}"] = taken / count
        return taken

    kept = half + vit.prefix
    for compiled in (False, True):
        name = f"bare forward of {masks} x {kept} tokens, bf16{', compiled' if compiled else ''}"
        add(name, lambda c=compiled: forwards(kept, masks, c), lambda s: f"{masks / s:.0f} forwards/s")
    add(f"bare forward of 512 x {size} tokens, bf16", lambda: forwards(size, 512),
        lambda s: f"{512 / s:.0f} forwards/s")  # fmt: skip

    keep = torch.stack([torch.randperm(size - vit.prefix)[:half] for _ in range(masks)])
    subsets = TokenSubsets(torch.zeros(masks, dtype=torch.long), keep)
    add(
        f"scoring {masks} token subsets",
        lambda: seconds(lambda: Ablation(vit, images[:1]).logits(subsets)),
        lambda s: f"{s / masks / bare[f'{kept} False']:.2f} of the bare forwards",
    )

    def method(name: str, count: int, key: str, **settings: object) -> None:
        add(
            f"{name} {settings or ''}, per image",
            lambda: seconds(lambda: pl.explain(vit, images, name, target=0, **settings), 2) / len(images),
            lambda s: f"{100 * count * bare[key] / s:.0f} % in bare forwards" if key in bare else "",
        )

    pure, whole = f"{kept} False", f"{size} False"
    method("tis", masks, pure, samples=masks)
    limit, clusters_found = _distance(vit, images[:1])
    print(f"vit-cx: {clusters_found} clusters at distance {limit:.3f}", flush=True)
    method("vit-cx", 2 * clusters_found + 1, whole, distance=limit)
    method("rise", 4000, whole, samples=4000)
    method("kernel-shap", 2000, pure, samples=2000)
    method("occlusion", size, whole)
    add("k-means of tis alone, per image", lambda: seconds(lambda: _kmeans(vit, images, masks), 2) / len(images))
    for precision in ("tf32", "bf16"):
        add(
            f"tis, {precision}: rank correlation with full precision",
            lambda p=precision: _agreement(vit, images[:1], p),
        )
    method("tis", masks, f"{kept} True", samples=masks, compile=True)
    print(machine())
    title = f"Perturbation methods, {options.model}, {options.images} images at a time"
    record("gpu", title, ["what", "seconds", "note"], rows, "python -m benchmarks.gpu")


def _kmeans(vit: pl.Anatomy, images: torch.Tensor, masks: int) -> torch.Tensor:
    points = activation_points(
        Ask(vit, images, Targets(torch.zeros(len(images), 1, dtype=torch.long)), "logit", 0, PLAIN)
    )
    return kmeans(points, draw_initial(points.shape[1], masks, 0))


def _distance(vit: pl.Anatomy, images: torch.Tensor, wanted: int = 63) -> tuple[float, int]:
    """The distance at which vit-cx finds about the published number of clusters, and that number."""
    ask = Ask(vit, images, Targets(torch.zeros(1, 1, dtype=torch.long)), "logit", 0, PLAIN)
    size = (images.shape[-2], images.shape[-1])
    distances = cosine_distances(scale_to_unit(feature_maps(ask)[0].double(), size)[0], size)
    tried = {t: int(clusters(distances, t).max()) + 1 for t in (0.5**k for k in torch.linspace(0, 8, 60).tolist())}
    best = min(tried, key=lambda t: abs(tried[t] - wanted))
    return best, tried[best]


def _agreement(vit: pl.Anatomy, images: torch.Tensor, precision: str) -> float:
    full, half = (pl.explain(vit, images, "tis", target=0, samples=256, precision=p) for p in ("full", precision))
    return spearman(full.scores, half.scores)


def _bf16_copy(vit: pl.Anatomy) -> torch.nn.Module:
    import copy

    return copy.deepcopy(vit.model).bfloat16()


if __name__ == "__main__":
    main()
