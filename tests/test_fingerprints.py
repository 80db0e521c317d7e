"""Hashes of weights and code change when what they stand for does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from patchlight.bench.code import described
from patchlight.fingerprints import fingerprint
from patchlight.statistics import constant


def test_weights_written_past_torch_are_seen() -> None:
    """A moving average writes all weights through `.data`; somebody else only the head."""
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


def test_what_a_decorator_does_is_part_of_a_function() -> None:
    def smoothed(times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any) -> Any:
                return [function(*args) for _ in range(times)]

            return call

        return around

    def method(x: int) -> int:
        return x + 1

    assert described(smoothed(2)(method)) != described(smoothed(3)(method))
    assert described(smoothed(2)(method)) == described(smoothed(2)(method))


def test_a_map_is_constant_within_rounding() -> None:
    one = torch.full((1, 16), 0.3)
    nearly, other = one.clone(), one.clone()
    nearly[0, 3] = torch.nextafter(nearly[0, 3], torch.tensor(1.0))
    other[0, 3] += 1e-3
    assert constant(torch.cat([one, nearly, other, torch.zeros(1, 16)])).tolist() == [True, True, False, True]
