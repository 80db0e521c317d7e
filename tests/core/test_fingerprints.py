"""Hashes of weights change when the weights do."""

from __future__ import annotations

import torch
from torch import nn

from patchlight.core.fingerprints import fingerprint


def test_weights_written_past_torch_are_seen() -> None:
    """All weights are written through `.data`, as by a moving average, or only the head."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    seen = [fingerprint(model)]
    for p in model.parameters():
        p.data.mul_(0.99)
    seen.append(fingerprint(model))
    model[-1].weight.data.mul_(2)
    seen.append(fingerprint(model))
    assert len(set(seen)) == 3


def test_a_weight_that_begins_anywhere_has_the_hash_of_its_numbers() -> None:
    flat = torch.randn(65).bfloat16()
    inside, own = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    inside.weight = nn.Parameter(flat[1:].view(8, 8))
    own.weight = nn.Parameter(flat[1:].clone().view(8, 8))
    assert fingerprint(inside) == fingerprint(own)
