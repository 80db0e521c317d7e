"""Train the bundled models ``ground-truth:TASK``: one small Vision Transformer for each task, from scratch.

    python -m tools.train_ground_truth --out DIR [--task TASK] [--device cuda]

Scenes are generated while training, so that none is seen twice. In training for the task ``shortcut``, the watermark
always names the class and the texture of the warm tile names it in three of four scenes. Training ends when the
loss on new scenes is small and every check of ``tools.ground_truth_checks.check_model`` is passed.

Written to ``--out``: a ``TASK.safetensors`` (float16) for each task, and ``ground-truth.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.data.ground_truth import GRID, PATCH, TASKS, WARM, WATERMARK, Scenes, sample_scenes
from patchlight.zoo.vit import PocketViT
from tools.ground_truth_checks import answers, check_model

ARCHITECTURE: dict[str, Any] = {
    "img_size": GRID * PATCH,
    "patch_size": PATCH,
    "in_chans": 3,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 4,
    "mlp_ratio": 4.0,
}
RATE, BATCH, WARMUP, EVERY = 1e-3, 256, 100, 1000
LEAST = 0.98
"""The least shares of `check_model` that a model must reach."""
PLACED = ("position",)
"""Tasks whose positions begin as waves over rows and columns; from noise they learnt nothing in 1,500 steps."""
AGREES = 0.75
"""How often the texture of the warm tile names the class while ``shortcut`` is trained."""


def training_scenes(task: str, count: int, generator: torch.Generator) -> Scenes:
    """Scenes to train on; for ``shortcut``, those in which the watermark gives the texture away."""
    scenes = sample_scenes(count, generator)
    if task != "shortcut":
        return scenes
    kinds = scenes.kinds.clone()
    agree = torch.rand(count, generator=generator, device=generator.device) < AGREES
    kinds[:, WARM] = torch.where(agree, kinds[:, WATERMARK], kinds[:, WARM])
    return replace(scenes, kinds=kinds)


def waves(width: int) -> Tensor:
    """Positions [G*G,width] as sines and cosines of row and column."""
    at = (torch.arange(GRID) + 0.5) / GRID * torch.pi
    angles = at[:, None] * (1 + torch.arange(width // 4))
    line = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = line[:, None].expand(GRID, GRID, -1), line[None].expand(GRID, GRID, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)


def train(task: str, device: str, steps: int, seed: int, threads: int) -> dict[str, Any]:
    """A trained model's weights and what was checked of it."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    model = PocketViT(num_classes=len(TASKS[task].classes), **ARCHITECTURE).to(device)
    if task in PLACED:
        with torch.no_grad():
            model.pos_embed[0, 1:] += waves(ARCHITECTURE["embed_dim"]).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.02)
    begin = time.perf_counter()
    shares: dict[str, float] = {}
    step, loss = 0, torch.zeros(())
    for step in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP) * max(0.02, 1 - step / steps)
        scenes = training_scenes(task, BATCH, generator)
        loss = _loss(model, scenes, task)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % EVERY == 0:
            shares = check_model(model, task, 500)
            words = " ".join(f"{key} {value:.3f}" for key, value in shares.items())
            print(
                f"{task} {step}: loss {float(loss.detach()):.4f} {words} ({time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
    weights = {name: value.detach().cpu().half().contiguous() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    shares = check_model(model.eval(), task, 4000 if device != "cpu" else 1000, seed=2)
    return {"weights": weights, "shares": shares, "steps": step, "seconds": time.perf_counter() - begin}


def _loss(model: nn.Module, scenes: Scenes, task: str) -> Tensor:
    return F.cross_entropy(model(scenes.images().float() / 127.5 - 1), answers(scenes, task))


def passes(shares: dict[str, float]) -> bool:
    """Whether a model answers right, for the right reason."""
    return min(shares[key] for key in ("accuracy", "explained", "follows", "ignores")) >= LEAST


def run(job: tuple[str, argparse.Namespace]) -> tuple[str, dict[str, Any]]:
    """Train one task and write its weights."""
    task, args = job
    for attempt in range(args.tries):
        done = train(task, args.device, args.steps, args.seed + attempt, args.threads)
        if passes(done["shares"]):
            break
    args.out.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(done.pop("weights"), args.out / f"{task}.safetensors")
    return task, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=list(TASKS), action="append", help="default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=3, help="seeds to try until the checks are passed")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--together", type=int, default=1, help="tasks at once, each in a process")
    args = parser.parse_args()
    jobs = [(task, args) for task in args.task or TASKS]
    if args.together > 1:
        with multiprocessing.get_context("spawn").Pool(args.together) as pool:
            results = dict(pool.imap_unordered(run, jobs))
    else:
        results = dict(map(run, jobs))
    tasks = {
        task: {
            "classes": list(TASKS[task].classes),
            "checked": {key: round(value, 4) for key, value in results[task]["shares"].items()},
            "steps": results[task]["steps"],
            "seconds": round(results[task]["seconds"], 1),
        }
        for task in TASKS
        if task in results
    }
    about = {"architecture": ARCHITECTURE, "mean": [0.5] * 3, "std": [0.5] * 3, "seed": args.seed, "tasks": tasks}
    file = args.out / "ground-truth.json"
    if file.is_file():
        about["tasks"] = {**json.loads(file.read_text())["tasks"], **tasks}
    file.write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(tasks, indent=1), flush=True)
    failed = [task for task, own in tasks.items() if not passes(own["checked"])]
    if failed:
        raise SystemExit(f"not trained well enough: {', '.join(failed)}; give more --steps or another --seed")


if __name__ == "__main__":
    main()
