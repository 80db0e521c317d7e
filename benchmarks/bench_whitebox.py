"""All one-pass methods at once; DecompX in reverse beside its forward form; SkipPLUS beside half a network; memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings

import timm
import torch

import patchlight as pl
from benchmarks.bench_engine import unfused_gradients
from benchmarks.common import device, medians, record
from patchlight.methods.base import METHODS, LayerMap
from tests.literal.test_decompx import Forward


def one_pass_names() -> list[str]:
    """Every method that is read off one forward and one backward under the plain rule, with no decomposition after."""
    more = ("globenc", "alti", "attin", "eigencam", "diffmask", "legrad")
    entries = METHODS.items()
    return [n for n, e in entries if isinstance(e, LayerMap) and e.rule == "plain" and n not in more]


def half_network(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Lower half forward, upper half forward and backward, attention written out."""
    half = len(model.blocks) // 2
    with torch.no_grad():
        tokens = model.blocks[:half](model._pos_embed(model.patch_embed(images)))
    tokens = tokens.requires_grad_()
    logits = model.forward_head(model.norm(model.blocks[half:](tokens)))
    return torch.autograd.grad(logits.amax(1).sum(), tokens)[0]


def peak_memory() -> str:
    """Peak memory of all one-pass methods on ViT-B/8, batch 4, in a process of its own."""
    code = "from benchmarks.bench_whitebox import memory_probe; memory_probe()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def memory_probe() -> None:
    warnings.simplefilter("ignore")
    vit = pl.load("vit_base_patch8_224", pretrained=False, device=device())
    images = torch.randn(4, 3, 224, 224)
    pl.explain(vit, images, one_pass_names(), batch_size=4)
    if device() == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    else:
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def main(batch: int = 16) -> None:
    warnings.simplefilter("ignore")
    rows = _measured("vit_tiny_patch16_224", batch)
    if device() == "cuda":
        rows += _measured("vit_base_patch16_224", batch)
    rows.append(["peak memory of the same, ViT-B/8 (N = 785), batch 4", peak_memory()])
    record("whitebox", f"White-box methods, batch {batch}", ["what", "ratio"], rows)


def _measured(name: str, batch: int) -> list[list[str]]:
    torch.manual_seed(0)
    vit = pl.load(name, pretrained=False, device=device())
    plain = timm.create_model(name).eval().requires_grad_(False).to(device())
    for block in plain.blocks:
        block.attn.fused_attn = False
    images = torch.randn(batch, 3, 224, 224, device=device())
    names = one_pass_names()
    seconds = medians(
        {
            "plain": lambda: unfused_gradients(plain, images),
            "all": lambda: pl.explain(vit, images, names),
            "half": lambda: half_network(plain, images),
            "skipplus": lambda: pl.explain(vit, images, "decompx.skipplus"),
            "legrad": lambda: pl.explain(vit, images, "legrad"),
            "grad-eclip": lambda: pl.explain(vit, images, "grad-eclip"),
        }
    )
    rows = [
        [f"{name}: {len(names)} one-pass methods / forward + backward", f"{seconds['all'] / seconds['plain']:.2f}"],
        [f"{name}: decompx.skipplus / half a network", f"{seconds['skipplus'] / seconds['half']:.2f}"],
        [f"{name}: legrad / forward + backward", f"{seconds['legrad'] / seconds['plain']:.2f}"],
        [f"{name}: grad-eclip / forward + backward", f"{seconds['grad-eclip'] / seconds['plain']:.2f}"],
    ]
    if device() == "cpu":
        double = pl.load("vit_tiny_patch16_224", pretrained=False)
        double.model.double()
        one = images[:1].double()
        reverse = medians({"reverse": lambda: pl.explain(double, one, "decompx.plus")})["reverse"]
        begin = time.perf_counter()
        for start in range(double.depth):
            Forward(double, one, start)
        forward = time.perf_counter() - begin
        rows.append([f"DecompX forward, all {double.depth} starts / decompx.plus, N = 197", f"{forward / reverse:.0f}"])
    return rows


if __name__ == "__main__":
    main()
