"""Train the siblings of ``pocket`` (``tools/siblings.py``) on CIFAR-10, with ``pocket`` as their start and teacher.

    python -m tools.train_siblings --data CIFAR_DIR --out DIR

Every sibling starts from ``pocket``'s weights and learns from its output on the same augmented images, so that a pass
or two over the training images are enough; the defaults are for an accelerator. A check on a CPU:
``--limit 512 --epochs 1 --batch 64``. Written to ``--out`` for each sibling: ``NAME.safetensors`` (float16; every 50
steps, so an interrupted run leaves something) and ``NAME.json`` with the test accuracy and how it was trained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchlight.core.plugins import load_plugin
from patchlight.zoo import pocket
from tools.train_pocket import (
    accuracy,
    augment,
    batches,
    distillation_loss,
    environment,
    load_tensors,
    log,
    mix,
    normalise,
    save_weights,
)

PLUGIN = Path(__file__).with_name("siblings.py")
NAMES = ("pocket_distilled", "pocket_pooled", "pocket_swin")
SAVE_EVERY = 50
MATRICES = ("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight")


def build(name: str, images: Tensor) -> nn.Module:
    """An untrained sibling that starts from ``pocket``'s weights; normalised ``images`` show the size of its tokens."""
    load_plugin(PLUGIN)
    model: nn.Module = timm.create_model(name)
    teacher: Any = pocket.build()
    state = teacher.state_dict()
    cls, patches = state["pos_embed"].split((1, 64), dim=1)
    if name == "pocket_distilled":
        state |= {"dist_token": state["cls_token"], "pos_embed": torch.cat([cls, cls, patches], dim=1)}
        state |= {f"head_dist.{part}": state[f"head.{part}"] for part in ("weight", "bias")}
    elif name == "pocket_pooled":
        registers = (state.pop("cls_token") + cls).expand(1, 4, -1)
        state |= {"reg_token": registers + 0.02 * torch.randn_like(registers), "pos_embed": patches}
        state |= {f"fc_norm.{part}": state.pop(f"norm.{part}") for part in ("weight", "bias")}
    else:
        state = {**model.state_dict(), **swin_state(teacher, images)}
    model.load_state_dict(state)
    return model


@torch.no_grad()
def swin_state(teacher: Any, images: Tensor) -> dict[str, Tensor]:
    """``pocket``'s weights for ``pocket_swin``: blocks 0 to 5 as they are, 6 to 8 for tokens of twice the width.

    A merged token holds the means of its left and its right two patches, side by side. The wide blocks read the
    mean of both halves and add the same to each. Norms that ``pocket`` lacks keep the size of its tokens.
    """
    state = teacher.state_dict()
    tokens = teacher.patch_embed(images) + state["pos_embed"][:, 1:]
    middle = teacher.blocks[:6](teacher.embed(images))[:, 1:]
    width = tokens.shape[-1]
    found = {f"patch_embed.proj.{part}": state[f"patch_embed.proj.{part}"] for part in ("weight", "bias")}
    found |= {"patch_embed.norm.weight": tokens.std(-1).mean().expand(width)}
    found |= {"patch_embed.norm.bias": state["pos_embed"][0, 1:].mean(0)}
    half, none = torch.eye(width) / 2, torch.zeros(width, width)
    left, right = torch.cat([half, half, none, none], 1), torch.cat([none, none, half, half], 1)
    found |= {"layers.1.downsample.norm.weight": middle.std(-1).mean().expand(4 * width)}
    found |= {"layers.1.downsample.norm.bias": torch.zeros(4 * width)}
    found |= {"layers.1.downsample.reduction.weight": torch.cat([left, right])}
    for key, value in state.items():
        part, _, rest = key.partition(".")
        if part == "blocks":
            index, _, rest = rest.partition(".")
            at = int(index)
            place = f"layers.0.blocks.{at}.{rest}" if at < 6 else f"layers.1.blocks.{at - 6}.{rest}"
            found[place] = value if at < 6 else widened(rest, value)
        elif part in ("norm", "head"):
            found[key.replace("head.", "head.fc.")] = widened(key, value)
    return found


def widened(name: str, value: Tensor) -> Tensor:
    """A weight for tokens of two halves: it reads their mean, or writes to both."""
    if name.endswith(("qkv.weight", "fc1.weight", "head.weight")):
        return torch.cat([value, value], dim=1) / 2
    return value if name.endswith(("qkv.bias", "fc1.bias", "head.bias")) else torch.cat([value, value])


def sibling_loss(logits: Tensor | tuple[Tensor, Tensor], answer: Tensor, target: Tensor) -> Tensor:
    """Soft distillation; for two heads DeiT's hard one: the class token's learns labels, the other the teacher's."""
    if isinstance(logits, Tensor):
        return distillation_loss(logits, answer, target, temperature=2.0, hard=0.1)
    labels, taught = (F.cross_entropy(one, goal) for one, goal in zip(logits, (target, answer.argmax(1)), strict=True))
    return (labels + taught) / 2


def one_loss(model: nn.Module, teacher: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The loss on augmented images, forwards in bfloat16."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        with torch.no_grad():
            answer = teacher(x).float()
        logits = model(x)
    single = isinstance(logits, Tensor)
    return sibling_loss(logits.float() if single else (logits[0].float(), logits[1].float()), answer, target)


def optimisers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices inside the blocks, AdamW for the rest."""
    inside = [p for key, p in model.named_parameters() if key.endswith(MATRICES)]
    rest = [p for key, p in model.named_parameters() if not key.endswith(MATRICES)]
    return (
        torch.optim.Muon(inside, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, weight_decay=0.0),
    )


def train(name: str, data: tuple[Tensor, Tensor, Tensor, Tensor], args: argparse.Namespace, out: Path) -> int:
    """Train one sibling into its file, and return the number of steps."""
    images, labels = data[:2]
    model, teacher = build(name, normalise(images[:256].cpu())).to(images.device), pocket.build().to(images.device)
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)  # type: ignore[operator]
    optimisers = optimisers_of(model)
    steps: int = max(1, round(args.epochs * len(images) / args.batch))
    began = time.perf_counter()
    stream = (batch for _ in itertools.count() for batch in batches(images, labels, args.batch))
    for step, (x, target) in enumerate(itertools.islice(stream, steps), 1):
        loss = one_loss(model.train(), teacher, *mix(augment(x, args.strength), target, mixup=0.1, cutmix=0.2))
        loss.backward()
        nn.utils.clip_grad_norm_(optimisers[1].param_groups[0]["params"], 1.0)
        for optimiser in optimisers:
            warm, fall = step / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
            optimiser.param_groups[0]["lr"] = args.lr * min(1.0, warm) * fall
            optimiser.step()
            optimiser.zero_grad()
        if step % SAVE_EVERY == 0 or step == steps:
            right = accuracy(model, data[2][:1000], data[3][:1000], mixed_precision=True).float().mean().item()
            log(f"{name} step {step} of {steps} loss {loss:.4f} test {right:.3f} {time.perf_counter() - began:.0f} s")
            save_weights(model, out / f"{name}.safetensors", torch.float16)
    return steps


def record(name: str, data: tuple[Tensor, Tensor, Tensor, Tensor], out: Path, training: dict[str, Any]) -> None:
    """Measure the stored file in float32 on all test images, and write what is known of it."""
    tensors = safetensors.torch.load_file(out / f"{name}.safetensors")
    model: nn.Module = timm.create_model(name)
    model.load_state_dict({key: value.float() for key, value in tensors.items()})
    right = accuracy(model.to(data[2].device), data[2], data[3], mixed_precision=False, size=500)
    about = {
        "name": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": round(right.float().mean().item(), 4),
        "test_images": len(right),
        "training": {**training, "environment": environment(data[2].device)},
    }
    (out / f"{name}.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    log(f"{name}: test accuracy {about['accuracy']:.4f} of {len(right)} images, {about['parameters']:,} parameters")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train siblings of the bundled model 'pocket' on CIFAR-10.")
    parser.add_argument("--data", required=True, help="folder with CIFAR-10 (see patchlight.data.cifar)")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--only", choices=NAMES, action="append", help="train this sibling; repeatable")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=100, help="passes over the training images")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--strength", type=float, default=0.3, help="of the augmentation")
    parser.add_argument("--limit", type=int, help="use so many training and test images only")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = load_tensors(args.data, args.limit, torch.device(args.device))
    if len(data[0]) < args.batch:
        sys.exit(f"{len(data[0])} training images are fewer than one batch of {args.batch}; give --batch")
    for name in args.only or NAMES:
        torch.manual_seed(args.seed)
        began = time.perf_counter()
        steps = train(name, data, args, out)
        settings = {key: getattr(args, key) for key in ("seed", "epochs", "batch", "lr", "strength")}
        record(name, data, out, {**settings, "steps": steps, "seconds": round(time.perf_counter() - began)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
