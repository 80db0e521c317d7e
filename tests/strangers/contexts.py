"""Rows: what may surround a call."""

from __future__ import annotations

from pathlib import Path

import torch

import patchlight as pl
from patchlight.methods.requests import resolve
from tests.families import images
from tests.strangers.models import close, quietly, tiny, working
from tests.strangers.table import row


@row
def an_outer_autocast(folder: Path) -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    for name in working(vit):
        expected = quietly(vit, batch, name, target=1)
        with torch.autocast("cpu", torch.bfloat16):
            found = quietly(vit, batch, name, target=1)
        close(found, expected, 1e-5)


@row
def metrics_under_an_outer_autocast(folder: Path) -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    maps = pl.explain(vit, batch, "rollout")
    for name in ("insertion", "deletion", "sensitivity-n", "comprehensiveness"):
        if name not in [m.name for m in pl.list_metrics()]:
            continue
        expected = pl.evaluate(vit, batch, maps, metric=name).values
        with torch.autocast("cpu", torch.bfloat16):
            found = pl.evaluate(vit, batch, maps, metric=name).values
        close(found, expected, 1e-5)


@row
def another_default_type(folder: Path) -> None:
    vit = pl.wrap(tiny())
    batch = images(vit, 2)
    names = working(vit)
    expected = {name: quietly(vit, batch, name, target=1) for name in names}
    torch.set_default_dtype(torch.float64)
    try:
        for name in names:
            found = quietly(vit, batch, name, target=1)
            assert found.dtype == torch.float32
            if not resolve(name).method.stochastic:  # those draw other numbers then
                assert float((found - expected[name]).abs().max()) <= 0.05 * float(expected[name].abs().max()), name
    finally:
        torch.set_default_dtype(torch.float32)


@row
def inside_no_grad_and_inference_mode(folder: Path) -> None:
    model = tiny()
    batch = images(pl.wrap(model), 2)
    expected = quietly(model, batch, "genatt", target=1)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            close(quietly(model, batch, "genatt", target=1), expected, 1e-6)


@row
def a_model_in_training_mode_with_dropout(folder: Path) -> None:
    calm, model = tiny(), tiny(drop_rate=0.5, attn_drop_rate=0.3, drop_path_rate=0.2)
    model.load_state_dict(calm.state_dict())
    model.train()
    batch = images(pl.wrap(calm), 2)
    for name in ("genatt", "transatt", "tis", "rise"):
        close(quietly(model, batch, name, target=1), quietly(calm, batch, name, target=1), 1e-5)
    assert all(m.training for m in model.modules())
