"""The engine against a bare forward and backward: what tapping, rules and many methods at once cost."""

from __future__ import annotations

import resource

import timm
import torch

import patchlight as pl
from benchmarks.common import device, medians, minima, record

SIX = ["rawatt", "rollout", "genatt", "ixg", "gradcam", "random"]


def unfused_gradients(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Forward and backward for the gradient of x_0, attention written out, parameters frozen."""
    with torch.enable_grad():
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(images))).detach().requires_grad_()
        logits = model.forward_head(model.norm(model.blocks(tokens)))
        return torch.autograd.grad(logits.amax(1).sum(), tokens)[0]


def head_over_classifier(vit: pl.Anatomy, images: torch.Tensor, rounds: int = 9) -> tuple[float, float]:
    """Minimum seconds of genatt with the classifier's weights as a head, and with the classifier itself."""
    own = vit.model.head
    asked = vit.ask(pl.heads.Linear(own.weight, own.bias))
    seconds = minima({"head": lambda: pl.explain(asked, images), "own": lambda: pl.explain(vit, images)}, rounds)
    return seconds["head"], seconds["own"]


def main(batch: int = 16) -> None:
    torch.manual_seed(0)
    vit = pl.load("vit_tiny_patch16_224", pretrained=False, device=device())
    plain = timm.create_model("vit_tiny_patch16_224").eval().requires_grad_(False).to(device())
    for block in plain.blocks:
        block.attn.fused_attn = False
    images = torch.randn(batch, 3, 224, 224, device=device())
    tasks = {
        "unfused forward + backward": lambda: unfused_gradients(plain, images),
        "plain rule: x, g, A, G (genatt, ixg)": lambda: pl.explain(vit, images, ["genatt", "ixg"]),
        "libra rule: x, g (ixg.libra)": lambda: pl.explain(vit, images, "ixg.libra"),
        "libra rule: x, g, A, G (genatt.libra, ixg.libra)": lambda: pl.explain(
            vit, images, ["genatt.libra", "ixg.libra"]
        ),
        **{f"{name} alone": lambda name=name: pl.explain(vit, images, name) for name in SIX},
        "all six": lambda: pl.explain(vit, images, SIX),
    }
    seconds = medians(tasks)
    base = seconds["unfused forward + backward"]
    slowest = max(seconds[f"{name} alone"] for name in SIX)
    rows = [[name, f"{s * 1e3:.0f} ms", f"{s / base:.2f}"] for name, s in seconds.items()]
    rows.append(["all six over the slowest of them alone", "", f"{seconds['all six'] / slowest:.2f}"])
    head, own = head_over_classifier(vit, images)
    rows.append(["genatt by a head of the classifier's weights over the classifier (minima)", "", f"{head / own:.2f}"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        pl.explain(vit, images[:4], ["genatt", "ixg.libra"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rows.append(["peak memory growth over 50 more calls", f"{grown:.0f} MB", ""])
    record("engine", f"The engine, vit_tiny, batch {batch}", ["what", "median", "ratio"], rows)


if __name__ == "__main__":
    main()
