"""Dropping tokens is masking them: attention over all tokens, in which nothing looks at the dropped ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchlight.anatomy.opened import Anatomy


class MaskKeys(TorchFunctionMode):
    """Attention over all tokens, with the dropped ones masked out as keys."""

    def __init__(self, keep: Tensor, vit: Anatomy) -> None:
        super().__init__()
        gone = torch.full((keep.shape[0], vit.tokens), -math.inf, dtype=vit.dtype)
        gone[:, : vit.prefix] = 0
        self.mask = gone.scatter(1, keep + vit.prefix, 0.0)[:, None, None, :]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            mask = kwargs.pop("attn_mask", None) if len(args) == 3 else args[3]
            args = (*args[:3], self.mask if mask is None else self.mask + mask, *args[4:])
        elif name == "softmax" and args[0].ndim == 4:
            args = (args[0] + self.mask, *args[1:])
        elif name == "multi_head_attention_forward":
            heads = args[4]
            batch, tokens = self.mask.shape[0], self.mask.shape[-1]
            full = self.mask.expand(batch, heads, tokens, tokens).reshape(batch * heads, tokens, tokens)
            kwargs["attn_mask"] = full
        return func(*args, **kwargs)


def shuffled_patches(vit: Anatomy, count: int) -> Tensor:
    """All patches of so many images [B,P], each in an order of its own."""
    patches = vit.grid[0] * vit.grid[1]
    return torch.stack([torch.randperm(patches, generator=torch.Generator().manual_seed(i)) for i in range(count)])


def assert_dropping_is_masking(
    vit: Anatomy, batch: Tensor, keep: Tensor | None = None, tolerance: float = 1e-10
) -> Tensor:
    """Assert that the logits of some tokens, by default half of the patches, are those with the other keys masked.

    Returns the logits.
    """
    if keep is None:
        keep = shuffled_patches(vit, len(batch))[:, : vit.grid[0] * vit.grid[1] // 2]
    with torch.no_grad():
        tokens = vit.embed(batch)
        dropped = vit.readout(vit.run(tokens, keep=keep))
        with MaskKeys(keep, vit):
            full = vit.run(tokens)
        masked = vit.readout(vit.gather(full, keep))
    torch.testing.assert_close(dropped, masked, atol=tolerance, rtol=tolerance)
    return dropped
