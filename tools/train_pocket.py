"""Train the bundled model ``pocket``: a small plain Vision Transformer for CIFAR-10, from scratch.

    python -m tools.train_pocket --data CIFAR_DIR --out DIR

The script has two stages and uses CIFAR-10's 50,000 training images alone.

1. A convolutional *teacher* (a residual network of 7.8 million parameters) is trained from scratch. It is thrown away
   afterwards. With ``--teacher FILE`` an earlier one is used again.
2. The *student*, a timm ``VisionTransformer``, is trained on strongly augmented images to give the teacher's answer on
   the very same augmented image (soft distillation), with a small share of the ordinary label loss. What is stored is
   an exponential moving average of its weights at the last step: no checkpoint is picked by test accuracy, which is
   measured for the curve only.

All images stay on the accelerator and are augmented there. It also runs on a CPU, far too slowly to be of use except
for a check: ``--limit 512 --epochs 1 --teacher-epochs 1 --batch 64``.

Written to ``--out``: ``pocket.safetensors`` (float16), ``pocket.json``, ``pocket-curve.csv``, ``teacher.safetensors``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from patchlight.data.cifar import CIFAR10, read_cifar10

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

ARCHITECTURE: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "in_chans": 3,
    "num_classes": 10,
    "embed_dim": 192,
    "depth": 9,
    "num_heads": 6,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "class_token": True,
    "global_pool": "token",
}


def log(*words: object) -> None:
    print(*words, flush=True)


def uniform(n: int, low: float, high: float, device: torch.device) -> Tensor:
    return torch.rand(n, device=device) * (high - low) + low


def augment(images: Tensor, strength: float) -> Tensor:
    """Random views of uint8 images (N, 3, 32, 32), as normalised float32.

    Every image is flipped half of the time and shifted by up to 4 pixels. With probability ``strength`` each, it is
    also zoomed (showing 0.5 to 1.2 of its width), stretched, rotated and sheared; changed in brightness, contrast,
    saturation and hue; and blurred or sharpened. With probability ``strength / 3`` a rectangle is erased.
    """
    n, device = len(images), images.device
    x = images.float() / 255

    def chosen(probability: float) -> Tensor:
        return (torch.rand(n, device=device) < probability).float()

    # Geometry: output coordinates times the matrix are input coordinates, both in -1..1.
    on = chosen(strength)
    zoom = torch.exp(on * uniform(n, math.log(0.5), math.log(1.2), device))
    stretch = torch.exp(on * uniform(n, -0.2, 0.2, device))
    angle = on * uniform(n, -0.3, 0.3, device)
    shear = on * uniform(n, -0.2, 0.2, device)
    flip = torch.sign(torch.rand(n, device=device) - 0.5)
    room = (1 - zoom).clamp(min=0) + 0.25
    cos, sin = torch.cos(angle), torch.sin(angle)
    wide, high = zoom * stretch, zoom / stretch
    theta = torch.stack(
        [
            torch.stack([flip * wide * cos, high * (shear * cos - sin), room * uniform(n, -1, 1, device)], dim=1),
            torch.stack([flip * wide * sin, high * (shear * sin + cos), room * uniform(n, -1, 1, device)], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta, [n, 3, 32, 32], align_corners=False)
    x = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)

    # Colour: saturation and hue as a 3x3 matrix that keeps the grey axis, contrast about the image's mean.
    on = chosen(strength)
    saturation = 1 + on * uniform(n, -0.5, 0.5, device)
    saturation = saturation * (1 - chosen(0.1 * strength))
    hue = on * uniform(n, -0.2, 0.2, device)
    grey = torch.full((3, 3), 1 / 3, device=device)
    turn = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], device=device) / math.sqrt(3)
    eye = torch.eye(3, device=device)
    rotation = grey + torch.cos(hue)[:, None, None] * (eye - grey) + torch.sin(hue)[:, None, None] * turn
    matrix = grey + saturation[:, None, None] * (rotation - grey)
    x = torch.einsum("nij,njhw->nihw", matrix, x)
    contrast = 1 + on * uniform(n, -0.4, 0.4, device)
    brightness = on * uniform(n, -0.25, 0.25, device)
    centre = x.mean(dim=(1, 2, 3), keepdim=True)
    x = (x - centre) * contrast[:, None, None, None] + centre + brightness[:, None, None, None]

    # Blur (negative amounts) or sharpen.
    amount = chosen(0.3 * strength) * uniform(n, -0.9, 0.9, device)
    soft = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    x = (x + amount[:, None, None, None] * (x - soft)).clamp(0, 1)

    mean = torch.tensor(MEAN, device=device)[:, None, None]
    std = torch.tensor(STD, device=device)[:, None, None]
    x = (x - mean) / std

    inside = boxes(uniform(n, 0.02, 0.25, device), n, device) & (chosen(strength / 3) > 0)[:, None, None, None]
    return torch.where(inside, torch.randn_like(x), x)


def boxes(area: Tensor, n: int, device: torch.device) -> Tensor:
    """A random rectangle for each image that covers about the given share of it, as a mask (N, 1, 32, 32)."""
    ratio = torch.exp(uniform(n, -0.5, 0.5, device))
    width, height = (32 * torch.sqrt(area) * ratio).clamp(max=32), (32 * torch.sqrt(area) / ratio).clamp(max=32)
    left, top = torch.rand(n, device=device) * (32 - width), torch.rand(n, device=device) * (32 - height)
    at = torch.arange(32, device=device) + 0.5
    columns = (at >= left[:, None]) & (at < (left + width)[:, None])
    rows = (at >= top[:, None]) & (at < (top + height)[:, None])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def mix(x: Tensor, target: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Blend each image with another one (mixup), paste a rectangle of it (CutMix), or leave it, and the labels too."""
    n, device = len(x), x.device
    draw = torch.rand(n, device=device)
    other, other_target = x.flip(0), target.flip(0)
    keep = torch.rand(n, device=device)
    pasted = boxes(1 - keep, n, device)
    share = pasted.float().mean(dim=(1, 2, 3))
    weight = torch.where(draw < mixup, 1 - keep, torch.where(draw < mixup + cutmix, share, torch.zeros_like(share)))
    is_cut = ((draw >= mixup) & (draw < mixup + cutmix))[:, None, None, None]
    blend = torch.where(is_cut, pasted.float(), weight[:, None, None, None])
    return torch.lerp(x, other, blend), torch.lerp(target, other_target, weight[:, None])


class ConvUnit(nn.Sequential):
    def __init__(self, inside: int, outside: int, pool: bool = False) -> None:
        layers: list[nn.Module] = [nn.Conv2d(inside, outside, 3, padding=1, bias=False)]
        if pool:
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.BatchNorm2d(outside), nn.ReLU())


class Stage(nn.Module):
    """A convolution that halves the picture, then a residual pair."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.down = ConvUnit(inside, outside, pool=True)
        self.pair = nn.Sequential(ConvUnit(outside, outside), ConvUnit(outside, outside))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        result: Tensor = x + self.pair(x)
        return result


class Teacher(nn.Module):
    """A residual network of 7.8 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvUnit(3, 64), Stage(64, 128), Stage(128, 256), Stage(256, 512))
        self.head = nn.Linear(512, len(CIFAR10))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).amax(dim=(2, 3))) * 0.25
        return logits


def build_student(drop_path: float) -> VisionTransformer:
    """The plain timm model, started from weights that suit small data sets.

    The position embedding (learned) starts as two-dimensional sines and cosines, and the attention weights start so
    that queries match keys of like content and values pass through with the sign turned ("mimetic initialisation",
    Trockman and Kolter 2023). Only the starting point differs from a plain ViT.
    """
    model = VisionTransformer(**ARCHITECTURE, drop_path_rate=drop_path)
    width, heads = int(ARCHITECTURE["embed_dim"]), int(ARCHITECTURE["num_heads"])
    size = width // heads
    with torch.no_grad():
        side = int(ARCHITECTURE["img_size"]) // int(ARCHITECTURE["patch_size"])
        wave = 1.0 / 100.0 ** (torch.arange(width // 4) / (width // 4))
        angles = torch.arange(side)[:, None] * wave
        line = torch.cat([angles.sin(), angles.cos()], dim=1)
        rows = line[:, None, :].expand(side, side, -1)
        columns = line[None, :, :].expand(side, side, -1)
        position = torch.cat([rows, columns], dim=2).reshape(side * side, width)
        assert model.pos_embed is not None
        model.pos_embed[0, 1:] = 0.3 * position
        for qkv, proj in zip(weights(model, "attn.qkv"), weights(model, "attn.proj"), strict=True):
            for head in range(heads):
                at = slice(head * size, (head + 1) * size)
                u, s, vh = torch.linalg.svd(0.7 * torch.randn(width, width) / math.sqrt(width) + 0.7 * torch.eye(width))
                root = s[:size].sqrt()[:, None]
                qkv[:width][at] = root * u[:, :size].T
                qkv[width : 2 * width][at] = root * vh[:size]
            u, s, vh = torch.linalg.svd(0.4 * torch.randn(width, width) / math.sqrt(width) - 0.4 * torch.eye(width))
            qkv[2 * width :] = s.sqrt()[:, None] * vh
            proj.copy_(u * s.sqrt())
    return model


def weights(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The weight of the layer of this name in every block, in order."""
    return [p for full, p in model.named_parameters() if full.endswith(f".{name}.weight")]


def orthogonalise(stack: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each in the stack (N, rows <= columns), by five Newton-Schulz steps."""
    x = stack.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: Tensor = x.float()
    return result


class Muon:
    """Momentum with orthogonalised updates (Jordan 2024) for the matrices inside the transformer's blocks.

    Updates are scaled to the size AdamW's usually have, so that one learning rate serves both. Matrices of one shape
    go through :func:`orthogonalise` together; queries, keys and values count as three matrices.
    """

    def __init__(self, model: VisionTransformer, weight_decay: float, transform: Callable[[Tensor], Tensor]) -> None:
        self.weight_decay = weight_decay
        self.transform = transform
        self.blocks = len(model.blocks)
        self.params: list[Tensor] = [
            p for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2") for p in weights(model, name)
        ]
        self.momentum = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        grads = [p.grad for p in self.params if p.grad is not None]
        torch._foreach_lerp_(self.momentum, grads, 0.05)
        looked_ahead = torch._foreach_lerp(grads, self.momentum, 0.95)
        n, width = self.blocks, self.params[0].shape[1]
        thirds = torch.stack(looked_ahead[:n]).view(3 * n, width, width)
        square = torch.cat([thirds, torch.stack(looked_ahead[n : 2 * n])])
        wide = torch.cat([torch.stack(looked_ahead[2 * n : 3 * n]).mT, torch.stack(looked_ahead[3 * n :])])
        square = self.transform(square) * (0.2 * math.sqrt(width))
        wide = self.transform(wide) * (0.2 * math.sqrt(wide.shape[2]))
        updates = [
            *square[: 3 * n].reshape(n, 3 * width, width).unbind(0),
            *square[3 * n :].unbind(0),
            *wide[:n].mT.unbind(0),
            *wide[n:].unbind(0),
        ]
        torch._foreach_mul_(self.params, 1 - lr * self.weight_decay)
        torch._foreach_add_(self.params, updates, alpha=-lr)


def batches(images: Tensor, labels: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(images), device=images.device)
    for start in range(0, len(order) - size + 1, size):
        index = order[start : start + size]
        yield images[index], F.one_hot(labels[index], len(CIFAR10)).float()


def normalise(images: Tensor) -> Tensor:
    mean = torch.tensor(MEAN, device=images.device)[:, None, None]
    std = torch.tensor(STD, device=images.device)[:, None, None]
    return (images.float() / 255 - mean) / std


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, mixed_precision: bool, size: int = 2000) -> Tensor:
    """Whether each image is classified rightly, plainly (no test-time augmentation)."""
    model.eval()
    right = []
    for start in range(0, len(images), size):
        with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=mixed_precision):
            logits = model(normalise(images[start : start + size]))
        right.append(logits.argmax(1) == labels[start : start + size])
    return torch.cat(right)


def train_teacher(
    data: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int, batch: int, compiled: bool, amp: bool
) -> Teacher:
    """SGD with Nesterov momentum; the learning rate rises over a fifth of the run and then falls to zero."""
    images, labels, test_images, test_labels = data
    device = images.device
    teacher: Teacher = Teacher().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = torch.compile(teacher) if compiled else teacher
    peak = 0.25 * batch / 512
    optimizer = torch.optim.SGD(teacher.parameters(), lr=peak, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps, step, began = epochs * (len(images) // batch), 0, time.perf_counter()
    for epoch in range(1, epochs + 1):
        teacher.train()
        total = torch.zeros((), device=device)
        for x, target in batches(images, labels, batch):
            done = step / steps
            optimizer.param_groups[0]["lr"] = peak * min(done / 0.2, (1 - done) / 0.8)
            x, target = mix(augment(x, 0.4), target, mixup=0.1, cutmix=0.4)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                logits = run(x.contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(logits.float(), target)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
        if epoch % 10 == 0 or epoch == epochs or epoch <= 2:
            right = accuracy(teacher, test_images, test_labels, amp).float().mean().item()
            mean_loss = total.item() / (len(images) // batch)
            log(f"teacher epoch {epoch} loss {mean_loss:.4f} test {right:.4f} {time.perf_counter() - began:.0f} s")
    teacher.eval()
    return teacher


def distillation_loss(logits: Tensor, answer: Tensor, target: Tensor, temperature: float, hard: float) -> Tensor:
    """Divergence from the teacher's answer at a temperature, and a share ``hard`` of the ordinary label loss."""
    student, teacher = (F.log_softmax(scores / temperature, 1) for scores in (logits, answer))
    distance = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return (1 - hard) * temperature * temperature * distance + hard * F.cross_entropy(logits, target)


def train_student(
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    teacher: Teacher,
    args: argparse.Namespace,
    amp: bool,
    after: Callable[[VisionTransformer, list[dict[str, float]]], None],
) -> VisionTransformer:
    """Distil the teacher into a ViT and return the moving average of its weights.

    ``after`` is called with the averaged model and the curve so far at each measurement.
    """
    images, labels, test_images, test_labels = data
    device = images.device
    student = build_student(args.drop_path).to(device)
    average = copy.deepcopy(student).eval().requires_grad_(False)
    run: Callable[[Tensor], Tensor] = torch.compile(student) if args.compile else student
    ask: Callable[[Tensor], Tensor] = torch.compile(teacher) if args.compile else teacher
    transform = torch.compile(orthogonalise, dynamic=False) if args.compile else orthogonalise
    muon = Muon(student, args.weight_decay, transform)
    inside = {id(p) for p in muon.params}
    rest = [p for p in student.parameters() if id(p) not in inside]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1 and p.shape[0] > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in rest if p.ndim <= 1 or p.shape[0] == 1], "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.99),
        fused=device.type == "cuda",
    )
    floats: list[list[Tensor]] = [list(average.parameters()), list(student.parameters())]
    per_epoch = len(images) // args.batch
    steps, warm = args.epochs * per_epoch, min(args.warmup, args.epochs / 5) * per_epoch
    curve: list[dict[str, float]] = []
    step, began = 0, time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        student.train()
        total = torch.zeros((), device=device)
        for x, target in batches(images, labels, args.batch):
            lr = args.lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))
            x, target = mix(augment(x, args.strength), target, mixup=0.25, cutmix=0.4)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                with torch.no_grad():
                    answer = ask(x.contiguous(memory_format=torch.channels_last)).float()
                logits = run(x)
            loss = distillation_loss(logits.float(), answer, target, args.temperature, args.hard)
            student.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(rest, 1.0)
            for group in adam.param_groups:
                group["lr"] = lr
            adam.step()
            muon.step(lr)
            decay = min(args.ema, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(floats[0], floats[1], 1 - decay)
            total += loss.detach()
            step += 1
        if epoch % args.measure_every == 0 or epoch in (1, args.epochs):
            right = accuracy(average, test_images, test_labels, amp).float().mean().item()
            seconds = time.perf_counter() - began
            curve.append({"epoch": epoch, "loss": round(total.item() / per_epoch, 5), "accuracy": round(right, 4)})
            log(f"student epoch {epoch} loss {curve[-1]['loss']:.4f} test {right:.4f} {seconds:.0f} s")
            after(average, curve)
    return average


def save_weights(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in model.state_dict().items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def save_curve(curve: list[dict[str, float]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=["epoch", "loss", "accuracy"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(curve)


def environment(device: torch.device) -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled CIFAR-10 model 'pocket' from scratch.")
    parser.add_argument("--data", required=True, help="folder with CIFAR-10 (see patchlight.data.cifar)")
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=760, help="passes of the student over the training images")
    parser.add_argument("--teacher-epochs", type=int, default=110)
    parser.add_argument("--teacher", help="use this teacher.safetensors instead of training one")
    parser.add_argument("--only-teacher", action="store_true", help="stop after the teacher")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--teacher-batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=5, help="epochs")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--drop-path", type=float, default=0.05)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--strength", type=float, default=0.6, help="of the augmentation")
    parser.add_argument("--temperature", type=float, default=2.0, help="of the distillation")
    parser.add_argument("--hard", type=float, default=0.1, help="share of the ordinary label loss")
    parser.add_argument("--measure-every", type=int, default=10, help="epochs")
    parser.add_argument("--limit", type=int, help="use so many training and test images only")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do without torch.compile")
    return parser.parse_args(argv)


def load_tensors(folder: str, limit: int | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def tensors(split: str) -> tuple[Tensor, Tensor]:
        pixels, labels = (torch.tensor(array[:limit], device=device) for array in read_cifar10(folder, split))
        return pixels.permute(0, 3, 1, 2).contiguous(), labels.long()

    return *tensors("train"), *tensors("test")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.perf_counter()
    device = torch.device(args.device)
    amp = device.type == "cuda"
    args.compile = args.compile and device.type == "cuda"
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    log(json.dumps(environment(device)))
    log(json.dumps(vars(args)))
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    data = load_tensors(args.data, args.limit, device)
    log(f"read {len(data[0])} training and {len(data[2])} test images")

    teacher_began = time.perf_counter()
    if args.teacher:
        teacher = Teacher().to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        teacher.load_state_dict(safetensors.torch.load_file(args.teacher, device=str(device)))
        teacher.eval()
    else:
        teacher = train_teacher(data, args.teacher_epochs, args.teacher_batch, args.compile, amp)
        save_weights(teacher, out / "teacher.safetensors", torch.float32)
    teacher.requires_grad_(False)
    teacher_accuracy = accuracy(teacher, data[2], data[3], amp).float().mean().item()
    teacher_seconds = time.perf_counter() - teacher_began
    log(f"teacher test accuracy {teacher_accuracy:.4f}, {teacher_seconds:.0f} s")
    if args.only_teacher:
        return 0

    weights = out / "pocket.safetensors"

    def after(model: VisionTransformer, curve: list[dict[str, float]]) -> None:
        save_curve(curve, out / "pocket-curve.csv")
        save_weights(model, weights, torch.float16)

    torch.manual_seed(args.seed + 1)
    student_began = time.perf_counter()
    train_student(data, teacher, args, amp, after)
    student_seconds = time.perf_counter() - student_began

    # What counts is the stored file: read it again and measure it in plain float32.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    stored = VisionTransformer(**ARCHITECTURE).to(device)
    tensors = safetensors.torch.load_file(weights, device=str(device))
    stored.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    right = accuracy(stored, data[2], data[3], mixed_precision=False)
    by_class = {name: round(right[data[3] == i].float().mean().item(), 4) for i, name in enumerate(CIFAR10)}
    description = {
        "name": "pocket",
        "library": "timm.models.vision_transformer.VisionTransformer",
        "architecture": ARCHITECTURE,
        "parameters": sum(p.numel() for p in stored.parameters()),
        "dtype": "float16",
        "classes": list(CIFAR10),
        "mean": list(MEAN),
        "std": list(STD),
        "preprocess": "RGB, shorter side resized to 32 with antialiasing (bicubic), centre crop 32x32, scaled to 0..1, "
        "normalised with mean and std",
        "accuracy": round(right.float().mean().item(), 4),
        "accuracy_by_class": by_class,
        "teacher_accuracy": round(teacher_accuracy, 4),
        "training": {
            "arguments": {k: v for k, v in vars(args).items() if k not in ("data", "out", "teacher", "only_teacher")},
            "environment": environment(device),
            "student_seconds": round(student_seconds),
        },
        "file": weights.name,
        "bytes": weights.stat().st_size,
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    (out / "pocket.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    log(f"stored file, float32: test accuracy {description['accuracy']:.4f}; {json.dumps(by_class)}")
    log(f"whole run {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
