"""Precision: bfloat16 views of a frozen model, and TF32, which is allowed only inside a training."""

from __future__ import annotations

from typing import Any

import torch

import patchlight as pl
from patchlight.evidence.precision import lowered, tf32
from patchlight.trained.diffmask import DiffMaskSettings
from tests.trained.toys import batches, pictures, toy

SHORT = DiffMaskSettings(precision="bf16", steps=4, log_every=2)


def test_bfloat16_weights_are_those_autocast_would_make() -> None:
    vit = toy()
    before = {k: v.clone() for k, v in vit.model.state_dict().items()}
    low = lowered(vit, "bf16")
    assert low.net.head.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert vit.model.head.weight.dtype == torch.float32  # type: ignore[union-attr]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, found = (v.readout(v.run(v.embed(pictures(2)))) for v in (vit, low))
    assert torch.equal(found, want)
    pl.diffmask.train(vit, batches(), SHORT)
    assert all(torch.equal(before[k], v) for k, v in vit.model.state_dict().items())


def test_tf32_is_allowed_inside_alone() -> None:
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    with tf32():
        assert products.fp32_precision == "tf32"
    assert products.fp32_precision == before
    told: list[Any] = []
    pl.diffmask.train(toy(), batches(), SHORT, callback=lambda progress: told.append(products.fp32_precision))
    assert told == [before, before], "on a CPU nothing is touched"
