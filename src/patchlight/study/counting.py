"""The counting task: train a ViT that counts red patches, train DiffMask on it, and score all methods.

The red patches alone determine the count, and so do the patches that are not red: a faithful mask is one of these sets.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import DegenerateMap, PatchlightError, first_line, integer
from patchlight.core.files import write_atomic
from patchlight.core.images import Preprocess
from patchlight.data.counting import PATCH, SIDE, CountingGrids, counting_grids
from patchlight.engine import explain
from patchlight.trained.diffmask.gates import DiffMask, load
from patchlight.trained.diffmask.settings import Callback, DiffMaskSettings
from patchlight.trained.diffmask.train import train

SizeName = Literal["small", "base"]
METHODS = ("gradcam", "rollout", "transatt", "genatt", "tis", "vit-cx", "decompx.skipplus", "tokentm", "random")
ENOUGH = 0.95
"""The share of grids on which DiffMask should be exact."""


@dataclass(frozen=True)
class CountingSize:
    """A size of the task: the ViT, its training, and the number of steps of DiffMask."""

    width: int
    depth: int
    heads: int
    rate: float
    batch: int
    vit_steps: int
    steps: int


SIZES: dict[str, CountingSize] = {
    "small": CountingSize(64, 4, 4, 1e-3, 64, 2000, 1200),
    "base": CountingSize(768, 12, 12, 5e-5, 64, 4000, 2000),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "paper": {"steps": 3750},
    "authors": {"steps": 7500, "batch_size": 8, "gates": "weighted"},
}
"""The published schedules of this task: 100 epochs of 600 grids, in the paper and in the released checkpoint."""


def gate_settings(size: CountingSize, preset: str = "default", **changes: Any) -> DiffMaskSettings:
    """The settings of DiffMask on this task."""
    return DiffMaskSettings.preset(preset, **{**SCHEDULES.get(preset, {"steps": size.steps}), **changes})


@dataclass(frozen=True)
class Exactness:
    """The share of grids on which a binarised map is exactly the red set, or its complement."""

    method: str
    red: float
    complement: float
    threshold: float
    normalised: bool
    """Whether the threshold applies to maps that are scaled to [0, 1] per grid."""

    @property
    def exact(self) -> float:
        return max(self.red, self.complement)


def train_counter(
    size: CountingSize,
    seed: int = 0,
    device: str = "cpu",
    distractors: int = 5,
    report: Callable[[int, float], None] | None = None,
) -> Anatomy:
    """Train a ViT until it counts every validation grid correctly with a margin; an error if it never does."""
    grids = counting_grids(6000, seed, "train", distractors)
    validation = counting_grids(500, seed, "validation", distractors)
    images, labels = grids.images.to(device), grids.labels.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_counter(size)
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), size.rate, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(seed)
    accuracy = 0.0
    for step in range(1, size.vit_steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = size.rate * min(1.0, step / 100)
        batch = torch.randint(len(grids), (size.batch,), generator=generator).to(device)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            vit = counter(model)
            logits = vit.logits(validation.images)
            accuracy = float((logits.argmax(1).cpu() == validation.labels).float().mean())
            loss = F.cross_entropy(logits, validation.labels.to(device))
            if report is not None:
                report(step, accuracy)
            if accuracy == 1 and float(loss) < 0.02:
                model.eval().requires_grad_(False)
                return vit
    raise PatchlightError(f"the accuracy of the ViT is {accuracy:.1%} after {size.vit_steps} steps; try another seed")


def build_counter(size: CountingSize) -> nn.Module:
    """Build a ViT of this size with random weights."""
    from timm.models.vision_transformer import VisionTransformer

    shape: dict[str, Any] = {"embed_dim": size.width, "depth": size.depth, "num_heads": size.heads}
    model: nn.Module = VisionTransformer(img_size=SIDE * PATCH, patch_size=PATCH, num_classes=SIDE * SIDE + 1, **shape)
    return model


def read_task(folder: str | Path, size: CountingSize = SIZES["small"]) -> tuple[Anatomy, DiffMask]:
    """The ViT and the explainer that `run` wrote to a folder."""
    from safetensors.torch import load_file

    weights = Path(folder) / "vit.safetensors"
    if not weights.is_file():
        raise PatchlightError(f"'{folder}' has no counting task; create one with `patchlight diffmask counting --out`")
    model = build_counter(size)
    model.load_state_dict(load_file(weights))
    vit = counter(model.eval().requires_grad_(False))
    return vit, load(Path(folder) / "diffmask", vit)


def counter(model: nn.Module) -> Anatomy:
    """The anatomy of a counting ViT."""
    half = (0.5, 0.5, 0.5)
    preprocess = Preprocess((SIDE * PATCH, SIDE * PATCH), half, half)
    return wrap(model, name="counting", labels=[str(n) for n in range(10)], preprocess=preprocess)


def loader_of(grids: CountingGrids, batch: int, device: str = "cpu") -> DataLoader[Any]:
    data = TensorDataset(grids.images.to(device), grids.labels.to(device))
    return DataLoader(data, batch, shuffle=True, drop_last=True)


def best_threshold(scores: Tensor, inside: Tensor) -> tuple[float, float]:
    """The largest share of rows [n,P] with {scores > t} = `inside` over all thresholds t, and its threshold.

    A row is exact for t in [max outside, min inside), so the best t lies in most of these intervals.
    """
    low = scores.masked_fill(inside, -torch.inf).amax(1).double()
    high = scores.masked_fill(~inside, torch.inf).amin(1).double()
    contained = (low[:, None] <= low[None]) & (low[None] < high[:, None])
    share, which = contained.double().mean(0).max(0)
    return float(share), float(low[which])


def judge(name: str, maps: Tensor, red: Tensor, threshold: float | None = None) -> Exactness:
    """The exactness of maps [n,3,3] at a threshold, or at the best one, of raw or scaled maps."""
    scores, inside = maps.flatten(1), red.flatten(1)
    if threshold is not None:
        mask = scores > threshold
        shares = [float((mask == expected).all(1).double().mean()) for expected in (inside, ~inside)]
        return Exactness(name, shares[0], shares[1], threshold, False)
    span = (scores.amax(1, keepdim=True) - scores.amin(1, keepdim=True)).clamp_min(1e-12)
    candidates = []
    for normalised, values in ((False, scores), (True, (scores - scores.amin(1, keepdim=True)) / span)):
        (a, at_a), (b, at_b) = best_threshold(values, inside), best_threshold(values, ~inside)
        candidates.append(Exactness(name, a, b, at_a if a >= b else at_b, normalised))
    return max(candidates, key=lambda v: v.exact)


def judge_methods(
    vit: Anatomy, explainer: DiffMask, grids: CountingGrids, seed: int, report: Callable[[str], None]
) -> list[Exactness]:
    """Score DiffMask at its threshold of 0.5, and each other method at its best threshold."""

    def maps(name: str, **settings: Any) -> Tensor:
        with warnings.catch_warnings():  # a grid with only red patches, or none, has a constant map
            warnings.simplefilter("ignore", DegenerateMap)
            scores: Tensor = explain(vit, grids.images, name, seed=seed, **settings).scores
        return scores

    rows = [judge("diffmask", maps("diffmask", explainer=explainer), grids.red, 0.5)]
    for name in METHODS:
        report(name)
        rows.append(judge(name, F.adaptive_avg_pool2d(maps(name), SIDE), grids.red))
    return rows


@dataclass(frozen=True)
class CountingTask:
    """The settings of a run.

    Attributes:
        size: "small", or "base" for the paper's ViT-Base.
        preset: The preset of `DiffMaskSettings`.
        seed: Random seed of the grids, the ViT and the gates.
        device: The device of the ViT.
        distractors: The number of colours besides red.
        grids: The number of held-out grids that methods are scored on.
        changes: Settings of DiffMask that differ from the preset.
    """

    size: str = "small"
    preset: str = "default"
    seed: int = 0
    device: str = "cpu"
    distractors: int = 5
    grids: int = 100
    changes: Mapping[str, Any] = field(default_factory=dict)


def run(
    out: str | Path,
    task: CountingTask | None = None,
    report: Callable[[str], None] = lambda words: None,
    callback: Callback | None = None,
) -> tuple[list[Exactness], DiffMask]:
    """Train the ViT and DiffMask, score all methods on held-out grids, and write everything to the folder `out`.

    `report` is called with a line about each stage, `callback` with the `DiffMaskProgress` of the gates. Returns the
    exactness of each method, DiffMask first, and the explainer.
    """
    from safetensors.torch import save

    task, out = task or CountingTask(), Path(out)
    if task.size not in SIZES:
        raise PatchlightError(f"unknown size '{task.size}' of the counting task; give {' or '.join(SIZES)}")
    try:
        torch.empty(0, device=task.device)
    except (RuntimeError, AssertionError) as error:
        raise PatchlightError(f"device '{task.device}' cannot be used: {first_line(error)}") from error
    size, seed = SIZES[task.size], integer("seed", task.seed, 0)
    settings = gate_settings(size, task.preset, **{"seed": seed, **task.changes})
    report("training the ViT")
    vit = train_counter(
        size,
        seed,
        task.device,
        task.distractors,
        lambda step, accuracy: report(f"ViT step {step}: accuracy {accuracy:.1%}"),
    )
    weights = {name: value.cpu().contiguous() for name, value in vit.model.state_dict().items()}
    write_atomic(out / "vit.safetensors", save(weights))
    report("training DiffMask")
    loader = loader_of(counting_grids(6000, seed, "train", task.distractors), settings.batch_size, task.device)
    explainer = train(vit, loader, settings, callback, out / "diffmask", resume=False)
    held_out = counting_grids(task.grids, seed, "test", task.distractors)
    rows = judge_methods(vit, explainer, held_out, seed, lambda name: report(f"scoring {name}"))
    write_atomic(out / "verdicts.json", json.dumps([asdict(r) for r in rows], indent=1).encode() + b"\n")
    write_atomic(out / "verdicts.md", table(rows).encode())
    return rows, explainer


def table(rows: list[Exactness]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | exact | red set | complement | threshold |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        at = f"{r.threshold:.3g}" + (" of [0, 1]" if r.normalised else "")
        lines.append(f"| {r.method} | {r.exact:.1%} | {r.red:.1%} | {r.complement:.1%} | {at} |")
    return "\n".join(lines) + "\n"
