"""The counting-patches task end to end: a ViT that counts red patches, DiffMask on it, and a verdict for every method.

Only the red patches matter to the count, or only the others: a faithful mask is one of these two sets, on every grid.
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
from patchlight.core.errors import DegenerateMap, PatchlightError
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
"""The share of grids on which DiffMask must be exact."""


@dataclass(frozen=True)
class CountingSize:
    """A size of the task: the ViT, how it is trained, and how many steps our default takes on it."""

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
"""The published schedule of this task: 100 epochs of 600 grids, as the text and as the released checkpoint have it."""


def gate_settings(size: CountingSize, preset: str = "default", **changes: Any) -> DiffMaskSettings:
    """How the gates of a preset are trained on this task."""
    return DiffMaskSettings.preset(preset, **{**SCHEDULES.get(preset, {"steps": size.steps}), **changes})


@dataclass(frozen=True)
class Exactness:
    """On what share of the grids a binarised map is the red set, or its complement; the better of the two counts."""

    method: str
    red: float
    complement: float
    threshold: float
    normalised: bool
    """Whether the threshold is on maps stretched to [0, 1] grid by grid."""

    @property
    def exact(self) -> float:
        return max(self.red, self.complement)


def train_counter(
    size: CountingSize,
    seed: int = 0,
    device: str = "cpu",
    distractors: int = 5,
    tell: Callable[[int, float], None] | None = None,
) -> Anatomy:
    """A ViT trained until it counts every validation grid right, with a margin; refused if it never does."""
    grids = counting_grids(6000, seed, "train", distractors)
    held = counting_grids(500, seed, "validation", distractors)
    images, labels = grids.images.to(device), grids.labels.to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained_counter(size)
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), size.rate, weight_decay=1e-2)
    generator = torch.Generator().manual_seed(seed)
    accuracy = 0.0
    for step in range(1, size.vit_steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = size.rate * min(1.0, step / 100)
        chosen = torch.randint(len(grids), (size.batch,), generator=generator).to(device)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0:
            vit = counter(model)
            logits = vit.logits(held.images)
            accuracy = float((logits.argmax(1).cpu() == held.labels).float().mean())
            sure = float(F.cross_entropy(logits, held.labels.to(device)))
            if tell is not None:
                tell(step, accuracy)
            if accuracy == 1 and sure < 0.02:
                model.eval().requires_grad_(False)
                return vit
    raise PatchlightError(f"the ViT counts only {accuracy:.1%} right after {size.vit_steps} steps; take another seed")


def untrained_counter(size: CountingSize) -> nn.Module:
    """A ViT of this size for the task, with random weights."""
    from timm.models.vision_transformer import VisionTransformer

    shape: dict[str, Any] = {"embed_dim": size.width, "depth": size.depth, "num_heads": size.heads}
    model: nn.Module = VisionTransformer(img_size=SIDE * PATCH, patch_size=PATCH, num_classes=SIDE * SIDE + 1, **shape)
    return model


def read_task(folder: str | Path, size: CountingSize = SIZES["small"]) -> tuple[Anatomy, DiffMask]:
    """The ViT and the explainer that `run` has left in a folder."""
    from safetensors.torch import load_file

    weights = Path(folder) / "vit.safetensors"
    if not weights.is_file():
        raise PatchlightError(f"'{folder}' holds no counting task; make one with `patchlight diffmask counting --out`")
    model = untrained_counter(size)
    model.load_state_dict(load_file(weights))
    vit = counter(model.eval().requires_grad_(False))
    return vit, load(Path(folder) / "diffmask", vit)


def counter(model: nn.Module) -> Anatomy:
    """A counting ViT, wrapped."""
    half = (0.5, 0.5, 0.5)
    side = SIDE * PATCH
    return wrap(
        model, name="counting", labels=[str(n) for n in range(10)], preprocess=Preprocess((side, side), half, half)
    )


def loader_of(grids: CountingGrids, batch: int, device: str = "cpu") -> DataLoader[Any]:
    data = TensorDataset(grids.images.to(device), grids.labels.to(device))
    return DataLoader(data, batch, shuffle=True, drop_last=True)


def best_threshold(scores: Tensor, inside: Tensor) -> tuple[float, float]:
    """The share of rows [n,P] with {scores > t} = `inside`, and t, for the t at which it is largest.

    A row is exact for t in [max outside, min inside), so t is the point that most of these intervals hold.
    """
    low = scores.masked_fill(inside, -torch.inf).amax(1).double()
    high = scores.masked_fill(~inside, torch.inf).amin(1).double()
    holding = (low[:, None] <= low[None]) & (low[None] < high[:, None])
    share, which = holding.double().mean(0).max(0)
    return float(share), float(low[which])


def judge(name: str, maps: Tensor, red: Tensor, threshold: float | None = None) -> Exactness:
    """How exact maps [n,3,3] are: at `threshold`, or at the best one, of raw or of stretched maps."""
    scores, inside = maps.flatten(1), red.flatten(1)
    if threshold is not None:
        mask = scores > threshold
        shares = [float((mask == want).all(1).double().mean()) for want in (inside, ~inside)]
        return Exactness(name, shares[0], shares[1], threshold, False)
    span = (scores.amax(1, keepdim=True) - scores.amin(1, keepdim=True)).clamp_min(1e-12)
    found = []
    for normalised, values in ((False, scores), (True, (scores - scores.amin(1, keepdim=True)) / span)):
        (a, at_a), (b, at_b) = best_threshold(values, inside), best_threshold(values, ~inside)
        found.append(Exactness(name, a, b, at_a if a >= b else at_b, normalised))
    return max(found, key=lambda v: v.exact)


def judge_methods(
    vit: Anatomy, explainer: DiffMask, grids: CountingGrids, seed: int, tell: Callable[[str], None]
) -> list[Exactness]:
    """DiffMask at its own threshold 0.5, and each other method at its best."""

    def maps(name: str, **settings: Any) -> Tensor:
        with warnings.catch_warnings():  # a grid of red patches alone, or of none, has a constant map
            warnings.simplefilter("ignore", DegenerateMap)
            found: Tensor = explain(vit, grids.images, name, seed=seed, **settings).scores
        return found

    rows = [judge("diffmask", maps("diffmask", explainer=explainer), grids.red, 0.5)]
    for name in METHODS:
        tell(name)
        rows.append(judge(name, F.adaptive_avg_pool2d(maps(name), SIDE), grids.red))
    return rows


@dataclass(frozen=True)
class CountingTask:
    """Which ViT is trained, by which preset its gates are, and on how many held-out grids all methods are judged."""

    size: str = "small"
    """`small`, or `base` for the paper's ViT-Base."""
    preset: str = "default"
    """The preset of `DiffMaskSettings`."""
    seed: int = 0
    """Seed of the grids, the ViT and the gates."""
    device: str = "cpu"
    distractors: int = 5
    """Colours besides red."""
    grids: int = 100
    """Held-out grids to judge on."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the gates that differ from the preset."""


@dataclass(frozen=True)
class CountingResult:
    """How exact each method is, DiffMask first, and the explainer."""

    rows: list[Exactness]
    explainer: DiffMask


def run(
    out: str | Path,
    task: CountingTask | None = None,
    tell: Callable[[str], None] = lambda words: None,
    callback: Callback | None = None,
) -> CountingResult:
    """Train the ViT and DiffMask and judge all methods on held-out grids.

    Args:
        out: Folder for the ViT, the explainer and the table.
        task: What is trained and judged; `CountingTask()` by default.
        tell: Called with a line about each stage.
        callback: Called with the `DiffMaskProgress` of the gates.
    """
    from safetensors.torch import save

    task, out = task or CountingTask(), Path(out)
    if task.size not in SIZES:
        raise PatchlightError(f"no size of the counting task is called '{task.size}'; give {' or '.join(SIZES)}")
    size, seed = SIZES[task.size], task.seed
    settings = gate_settings(size, task.preset, **{"seed": seed, **task.changes})
    tell("training the ViT")
    vit = train_counter(
        size, seed, task.device, task.distractors, lambda step, right: tell(f"ViT step {step}: {right:.1%} right")
    )
    weights = {name: value.cpu().contiguous() for name, value in vit.model.state_dict().items()}
    write_atomic(out / "vit.safetensors", save(weights))
    tell("training DiffMask")
    loader = loader_of(counting_grids(6000, seed, "train", task.distractors), settings.batch_size, task.device)
    explainer = train(vit, loader, settings, callback, out / "diffmask", resume=False)
    held = counting_grids(task.grids, seed, "test", task.distractors)
    rows = judge_methods(vit, explainer, held, seed, lambda name: tell(f"judging {name}"))
    write_atomic(out / "verdicts.json", json.dumps([asdict(r) for r in rows], indent=1).encode() + b"\n")
    write_atomic(out / "verdicts.md", table(rows).encode())
    return CountingResult(rows, explainer)


def table(rows: list[Exactness]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | exact | red set | complement | threshold |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        at = f"{r.threshold:.3g}" + (" of [0, 1]" if r.normalised else "")
        lines.append(f"| {r.method} | {r.exact:.1%} | {r.red:.1%} | {r.complement:.1%} | {at} |")
    return "\n".join(lines) + "\n"
