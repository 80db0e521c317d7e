"""Explaining and measuring inside autocast, another default type, no_grad and inference mode."""

from __future__ import annotations

import pytest
import torch

import patchlight as pl
from patchlight.methods.requests import resolve
from tests.families import images
from tests.helpers import assert_near, quick_map, tiny, working_methods


def test_an_outer_autocast() -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    for name in working_methods(vit):
        expected = quick_map(vit, batch, name, target=1)
        with torch.autocast("cpu", torch.bfloat16):
            found = quick_map(vit, batch, name, target=1)
        assert_near(found, expected, 1e-5)


@pytest.mark.parametrize("name", ["insertion", "deletion", "max-sensitivity"])
def test_metrics_under_an_outer_autocast(name: str) -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    maps = pl.explain(vit, batch, "rollout")
    expected = pl.evaluate(vit, batch, maps, metric=name).values
    with torch.autocast("cpu", torch.bfloat16):
        found = pl.evaluate(vit, batch, maps, metric=name).values
    assert_near(found, expected, 1e-5)


def test_another_default_type() -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    names = working_methods(vit)
    expected = {name: quick_map(vit, batch, name, target=1) for name in names}
    torch.set_default_dtype(torch.float64)
    try:
        for name in names:
            found = quick_map(vit, batch, name, target=1)
            assert found.dtype == torch.float32
            if not resolve(name).method.stochastic:  # those draw other numbers then
                assert float((found - expected[name]).abs().max()) <= 0.05 * float(expected[name].abs().max()), name
    finally:
        torch.set_default_dtype(torch.float32)


def test_inside_no_grad_and_inference_mode() -> None:
    model = tiny()
    batch = images(pl.wrap(model), 2)
    expected = quick_map(model, batch, "genatt", target=1)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            assert_near(quick_map(model, batch, "genatt", target=1), expected, 1e-6)
