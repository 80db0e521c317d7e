"""Occlusion and Score-CAM beside captum and grad-cam: the same model and settings, and the same maps."""

from __future__ import annotations

from typing import Any

import timm
import torch
from captum.attr import Occlusion
from pytorch_grad_cam import ScoreCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor

import patchlight as pl
from benchmarks.common import device, medians, record

IMAGES, TARGET, BATCH = 2, 207, 64


def main() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224").eval().requires_grad_(False).to(device())
    vit = pl.wrap(model, name="vit_tiny")
    images = torch.randn(IMAGES, 3, 224, 224, device=device())
    raw: list[Any] = []

    def captum() -> Tensor:
        found = Occlusion(model).attribute(
            images, (3, 16, 16), (3, 16, 16), baselines=0, target=TARGET, perturbations_per_eval=BATCH // IMAGES
        )
        return found[:, 0]

    def grad_cam() -> Tensor:
        def grid(tokens: Tensor) -> Tensor:
            return tokens[:, 1:].reshape(len(tokens), 14, 14, -1).permute(0, 3, 1, 2)

        with ScoreCAM(model, [model.blocks[-1].norm1], reshape_transform=grid) as cam:
            cam.batch_size, inner = BATCH, cam.get_cam_image
            cam.get_cam_image = lambda *a, **k: raw.append(inner(*a, **k)) or raw[-1]
            cam(images, [ClassifierOutputTarget(TARGET)] * IMAGES)
        return torch.as_tensor(raw.pop())

    def ours(name: str, **settings: Any) -> Tensor:
        settings |= {"target": TARGET, "precision": "full", "chunk": BATCH, "score": "logit"}
        return pl.explain(vit, images, name, **settings).scores

    pairs = {
        "occlusion 16/16": ("captum", captum, lambda: ours("occlusion", window=16, stride=16, fill="zero")),
        "Score-CAM": ("grad-cam", grad_cam, lambda: ours("score-cam")),
    }
    rows = []
    for name, (peer, theirs, own) in pairs.items():
        a, b = theirs().cpu(), own()
        b = torch.nn.functional.interpolate(b[:, None], a.shape[-2:], mode="nearest")[:, 0]
        seconds = medians({"theirs": theirs, "ours": own}, repeats=2)
        rows.append(
            [
                name,
                peer,
                f"{seconds['theirs'] / IMAGES:.2f} s",
                f"{seconds['ours'] / IMAGES:.2f} s",
                f"{seconds['theirs'] / seconds['ours']:.2f}",
                f"{float((a - b).abs().max() / a.abs().max()):.1e}",
            ]
        )
    header = ["method", "peer", "peer, per image", "patchlight, per image", "times faster", "largest difference"]
    record("peers", f"Peers: captum and grad-cam, vit_tiny, {IMAGES} images, {BATCH} variants at once", header, rows)
