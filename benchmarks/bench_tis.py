"""TIS and ViT-CX: scoring variants against bare forwards of the same shapes, and against a loop over masks."""

from __future__ import annotations

import timm
import torch
from torch import Tensor

import patchlight as pl
from benchmarks.common import device, medians, record
from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.ablation import Ablation, TokenSubsets

MASKS = 256


def bare(model: torch.nn.Module, tokens: Tensor, count: int, chunk: int) -> Tensor:
    """Forwards of `count` copies of tokens [1,N,D] in chunks, nothing else."""
    with torch.no_grad():
        for begin in range(0, count, chunk):
            some = tokens.expand(min(chunk, count - begin), -1, -1).contiguous()
            logits = model.forward_head(model.norm(model.blocks(some)))
    return logits


def nearest_by_one_hot(points: Tensor, initial: Tensor, iterations: int = 100) -> Tensor:
    """Lloyd's iterations with a dense one-hot matrix and a look at the shift in each."""
    centroids = points[initial]
    for _ in range(iterations):
        nearest = torch.cdist(points, centroids).argmin(1)
        member = torch.nn.functional.one_hot(nearest, len(centroids)).to(points)
        moved = member.T @ points / member.sum(0).clamp_min(1)[:, None]
        shift, centroids = float((moved - centroids).square().sum()), moved
        if shift <= 1e-4:
            break
    return centroids


def loop(model: torch.nn.Module, image: Tensor, seed: int = 0) -> Tensor:
    """TIS as one would first write it: one mask, one forward of the model from the image on."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: outputs.append(out)) for block in model.blocks]
    with torch.no_grad():
        target = int(model(image).argmax())
        for hook in hooks:
            hook.remove()
        points = torch.cat(outputs, -1)[0, 1:].T.contiguous()
        initial = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:MASKS]
        total, coverage = torch.zeros(196, device=image.device), torch.zeros(196, device=image.device)
        for centroid in nearest_by_one_hot(points, initial.to(image.device)):
            keep = centroid.topk(98).indices
            tokens = model._pos_embed(model.patch_embed(image))
            tokens = torch.cat([tokens[:, :1], tokens[:, 1 + keep]], 1)
            score = model.forward_head(model.norm(model.blocks(tokens))).softmax(1)[0, target]
            total[keep] += score
            coverage[keep] += 1
    return total / coverage


def subsets(vit: Anatomy, count: int) -> TokenSubsets:
    rows = torch.rand(count, 196, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :98]
    return TokenSubsets(torch.zeros(count, dtype=torch.long), rows)


def main(chunk: int = 64) -> None:
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224").eval().requires_grad_(False).to(device())
    vit = pl.wrap(plain, name="vit_tiny")
    image = torch.randn(1, 3, 224, 224, device=device())
    with torch.no_grad():
        tokens = plain._pos_embed(plain.patch_embed(image))
    ablation = Ablation(vit, image, chunk=chunk, precision="full")
    variants = subsets(vit, MASKS)
    tasks = {
        f"{MASKS} bare forwards of 99 tokens": lambda: bare(plain, tokens[:, :99], MASKS, chunk),
        f"{MASKS} token subsets scored": lambda: ablation.logits(variants),
        f"tis, {MASKS} masks": lambda: pl.explain(vit, image, "tis", samples=MASKS, chunk=chunk, precision="full"),
        f"tis, {MASKS} masks, a loop": lambda: loop(plain, image),
    }
    seconds = medians(tasks, repeats=3)
    base, _, tis, slow = seconds.values()
    rows = [[name, f"{s * 1e3:.0f} ms", f"{s / base:.2f}"] for name, s in seconds.items()]
    rows.append(["the loop over tis", "", f"{slow / tis:.2f}"])
    record("tis", f"TIS, vit_tiny, one image, chunks of {chunk}", ["what", "median", "over bare forwards"], rows)


if __name__ == "__main__":
    main()
