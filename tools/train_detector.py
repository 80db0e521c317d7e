"""Train ``pocket-detector``, a YOLOS of 1.2 million parameters, on composed scenes (``tools/scenes.py``).

    python -m tools.train_detector --out DIR --minutes 3

It needs torch, transformers, scipy and safetensors, and no data. A check on a CPU: ``--steps 3 --batch 8``. Written to
``--out``: ``pocket-detector.safetensors`` (float16), ``pocket-detector.json`` with the configuration and the measured
accuracy, and ``scenes/`` with six scenes that were not trained on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_iou
from transformers import YolosConfig, YolosForObjectDetection

from tools.scenes import LABELS, SIDE, Scenes, compose

NAME = "pocket-detector"
ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 144,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 288,
    "image_size": [SIDE, SIDE],
    "patch_size": 8,
    "num_detection_tokens": 10,
    "use_mid_position_embeddings": False,
    "initializer_range": 0.05,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
NO_OBJECT = 0.2
"""Weight of the class "no object" in the loss."""


def build() -> Any:
    """The model with random weights."""
    config: Any = YolosConfig(**ARCHITECTURE)
    config.id2label = dict(enumerate(LABELS))
    config.label2id = {name: i for i, name in enumerate(LABELS)}
    model: Any = YolosForObjectDetection(config)
    for parameter in (model.vit.embeddings.position_embeddings, model.vit.embeddings.detection_tokens):
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def normalise(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(each, device=images.device)[:, None, None] for each in (MEAN, STD))
    return (images - mean) / std


def corners(boxes: Tensor) -> Tensor:
    """(centre, size) in 0..1 as (left, top, right, bottom) in 0..1."""
    return torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)


def loss_of(out: Any, scenes: Scenes) -> Tensor:
    """The set loss of DETR: each object is matched to one query; all others are "no object"."""
    logits, boxes = out.logits.float(), out.pred_boxes.float()
    true, there = scenes.boxes / SIDE, scenes.labels >= 0
    with torch.no_grad():
        chance = logits.softmax(2)
        label = scenes.labels.clamp_min(0)
        cost = -chance.gather(2, label[:, None].expand(-1, chance.shape[1], -1))
        size = torch.cat([(true[..., :2] + true[..., 2:]) / 2, true[..., 2:] - true[..., :2]], -1)
        cost = cost + 5 * torch.cdist(boxes, size, p=1)
        cost = cost - 2 * _giou(corners(boxes)[:, :, None], true[:, None])
        table, shown = cost.cpu().numpy(), there.cpu().numpy()
        rows, queries, objects = [], [], []
        for i in range(len(table)):
            columns = shown[i].nonzero()[0]
            query, column = linear_sum_assignment(table[i][:, columns])
            rows += [i] * len(query)
            queries += query.tolist()
            objects += columns[column].tolist()
        at = [torch.tensor(each, device=logits.device) for each in (rows, queries, objects)]
    target = torch.full(logits.shape[:2], len(LABELS), device=logits.device)
    target[at[0], at[1]] = scenes.labels[at[0], at[2]]
    weight = torch.ones(len(LABELS) + 1, device=logits.device)
    weight[-1] = NO_OBJECT
    named = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight)
    near, real = boxes[at[0], at[1]], size[at[0], at[2]]
    overlap = _giou(corners(near), corners(real))
    found: Tensor = named + 5 * (near - real).abs().sum(1).mean() + 2 * (1 - overlap).mean()
    return found


def _giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised IoU of boxes that broadcast."""
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_min(0).prod(-1)
    outer = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp_min(0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
    return inner / union.clamp_min(1e-9) - (outer - union) / outer.clamp_min(1e-9)


@torch.no_grad()
def accuracy(model: Any, count: int, device: str) -> dict[str, float]:
    """Of the objects of new scenes: the share found (right label, IoU and score at least .5), and the mean IoU."""
    generator = torch.Generator(device).manual_seed(10**6)
    right = total = wrong = sure = 0
    overlaps = 0.0
    for _ in range(count // 100):
        scenes = compose(100, generator)
        out = model(normalise(scenes.images))
        chance = out.logits.float().softmax(2)[..., :-1].max(2)
        for i in range(100):
            real = scenes.labels[i] >= 0
            picked = chance.values[i] >= 0.5
            iou = box_iou(scenes.boxes[i][real] / SIDE, corners(out.pred_boxes[i][picked].float()))
            same = scenes.labels[i][real][:, None] == chance.indices[i][picked]
            hit = (iou >= 0.5) & same
            right += int(hit.any(1).sum())
            overlaps += float((iou * hit).amax(1).sum()) if iou.numel() else 0.0
            total += int(real.sum())
            wrong += int((~hit.any(0)).sum())
            sure += int(picked.sum())
    return {
        "recall": right / total,
        "mean_iou_of_found": overlaps / max(right, 1),
        "false_detections": wrong / max(sure, 1),
        "objects": total,
    }


def train(
    model: Any, loss_of: Callable[[Any, Scenes], Tensor], options: argparse.Namespace, device: str
) -> dict[str, Any]:
    """Train for a number of steps, or for a time whose end the learning rate follows; the weights are averages."""
    steps, minutes, batch, rate = options.steps, options.minutes, options.batch, options.rate
    generator = torch.Generator(device).manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    average = {key: value.clone() for key, value in model.state_dict().items() if value.is_floating_point()}
    begin, step = time.perf_counter(), 0
    while True:
        done = step / steps if steps is not None else (time.perf_counter() - begin) / (60 * minutes)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / options.warmup) * 0.5 * (1 + math.cos(math.pi * done)) + 1e-6
        scenes = compose(batch, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            out = model(normalise(scenes.images))
        loss = loss_of(out, scenes)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        keep = min(0.998, (step + 1) / (step + 10))
        state = model.state_dict()
        torch._foreach_lerp_(list(average.values()), [state[key] for key in average], 1 - keep)
        if step % 100 == 0:
            print(f"step {step}, {done:.0%}, loss {loss.item():.3f}", flush=True)
        step += 1
    model.load_state_dict(model.state_dict() | average)
    return {"steps": step, "batch": batch, "rate": rate, "seconds": round(time.perf_counter() - begin, 1)}


def save_scenes(folder: Path, count: int = 6) -> None:
    """Six scenes as pictures, with their boxes and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    scenes, about = compose(count, torch.Generator().manual_seed(2 * 10**6)), []
    for i in range(count):
        pixels = (scenes.images[i].permute(1, 2, 0) * 255).round().byte().numpy()
        file = f"scene-{i + 1}.png"
        Image.fromarray(pixels).save(folder / file)
        real = (scenes.labels[i] >= 0).nonzero().flatten().tolist()
        objects = [{"label": LABELS[int(scenes.labels[i, k])], "box": scenes.boxes[i, k].tolist()} for k in real]
        about.append({"file": file, "objects": objects})
    (folder / "scenes.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def options_of(about: str | None) -> argparse.Namespace:
    """The command line of a training."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=300, help="steps in which the rate rises")
    parser.add_argument("--scenes", type=int, default=2000, help="scenes on which the accuracy is measured")
    return parser.parse_args()


def make(
    name: str,
    model: Any,
    architecture: dict[str, Any],
    loss_of: Callable[[Any, Scenes], Tensor],
    accuracy: Callable[[Any, int, str], dict[str, float]],
    options: argparse.Namespace,
) -> None:
    """Train a model, measure it, and write its weights and its card."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    how = train(model.to(device).train(), loss_of, options, device)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}.safetensors"
    state = {
        key: (value.half() if value.is_floating_point() else value).cpu().contiguous()
        for key, value in model.state_dict().items()
    }
    safetensors.torch.save_file(state, file)
    model.load_state_dict({key: value.to(model.state_dict()[key].dtype) for key, value in state.items()})  # as read
    found = accuracy(model.eval(), options.scenes, device)
    card = {
        "name": name,
        "library": f"transformers.{type(model).__name__}",
        "architecture": architecture,
        "parameters": sum(p.numel() for p in model.parameters()),
        "classes": list(model.config.id2label.values()),
        "mean": MEAN,
        "std": STD,
        **{key: round(value, 4) for key, value in found.items()},
        "training": {
            **how,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
        },
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    (options.out / f"{name}.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(card, indent=2))


def main() -> None:
    options = options_of(__doc__)
    torch.manual_seed(0)
    make(NAME, build(), ARCHITECTURE, loss_of, accuracy, options)
    save_scenes(options.out / "scenes")


if __name__ == "__main__":
    main()
