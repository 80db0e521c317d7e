"""Relevance and decomposition on real weights in float64, against what the authors' own code printed."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from patchlight.core.errors import DegenerateMap
from patchlight.core.targets import Targets
from patchlight.evidence.passes import run_pass
from patchlight.evidence.runner import LayerJob
from patchlight.methods import decomposition
from patchlight.methods.maps import compute
from patchlight.methods.requests import resolve
from tests.close import close, ranked, within
from tests.literal.lrp import Literal
from tests.reference import deit_tiny, inputs, reference

PORT = {"preset": "skipplus"}


def explained(name: str, settings: dict[str, Any], count: int = 4) -> Tensor:
    targets = Targets(torch.from_numpy(reference("transatt_start0_f64")["target"][:count])[:, None])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        return compute(deit_tiny(torch.float64), inputs(count).double(), [resolve(name, settings)], targets, 0)[1][0][
            :, 0
        ]


@pytest.mark.parametrize(
    ("saved", "name", "settings"),
    [
        ("transatt_start0_f64", "transatt", {}),
        ("transatt_start1_f64", "transatt", {"preset": "scripts"}),
        ("partial_lrp_f64", "partial-lrp", {}),
        ("full_lrp_f64", "lrp", {}),
        ("full_lrp_ours_rules_f64", "lrp", {"rules": "ours"}),
    ],
)
def test_relevance(saved: str, name: str, settings: dict[str, Any]) -> None:
    count = 4 if name == "transatt" and not settings else 2
    maps, theirs = explained(name, settings, count), reference(saved)["maps"]
    for i in range(count):
        close(maps[i], theirs[i], 1e-8, f"image {i}")


def test_relevance_rollout() -> None:
    """Saved in float32, where the relevance pass is chaotic: on the steadiest image it agrees in rank, and with the
    slow version in float64 in every number."""
    target = int(reference("transatt_start0_f64")["target"][1])
    ours = explained("transatt", {"gradient": False}, 2)[1]
    slow = Literal(deit_tiny(torch.float64), inputs()[1:2].double(), target, "ours")
    close(ours, slow.transatt(gradient=False).detach(), 1e-8)
    ranked(ours, reference("lrp_rollout_ours_start0")["maps"][1], 0.85)


@pytest.mark.parametrize("composition", ["plus", "skipplus", "rollout"])
def test_globenc(composition: str) -> None:
    maps, theirs = explained(f"globenc.{composition}", PORT), reference(f"lg_globenc_{composition}")["maps"]
    for i in range(4):
        close(maps[i], theirs[i], 1e-4, f"image {i}")


def test_globenc_half_residual() -> None:
    maps, theirs = explained("globenc", {**PORT, "residual": 0.5}), reference("lg_globenc_rollout_str50")["maps"]
    for i in range(4):
        close(maps[i], theirs[i], 1e-4, f"image {i}")


def test_alti_skipplus() -> None:
    """Of rows that float32's rounding of ||y|| moves (see below), the order of the patches and their sum are steady."""
    maps, theirs = explained("alti.skipplus", PORT), reference("lg_alti_skipplus")["maps"]
    for i in range(4):
        ranked(maps[i], theirs[i], 0.9999, f"image {i}")
        close(maps[i].sum(), theirs[i].sum(), 1e-6, f"image {i}")


@cache
def layer_rows(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """CLS rows [B,L,N] of the port's layer matrices, ||y||_1 of the CLS token, and the sum of its row of scores."""

    def seen(b: Any) -> tuple[Tensor, Tensor, Tensor]:
        y = b.y[:, 0].abs().sum(-1)
        if name == "globenc":
            return decomposition.globenc(b, "norm2")[:, 0], y, y
        w = decomposition.head_vectors(b, value_bias=False)
        total = (b.y.abs().sum(-1, keepdim=True) - decomposition.l1_distances(b, w, b.y, "norm2")).clamp(min=0)[:, 0]
        return decomposition.alti(b, "norm2", "block_out")[:, 0], y, total.sum(-1)

    vit = deit_tiny(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)
        job = LayerJob(seen, frozenset({"x", "y", "A", "v", "u"}), tuple(range(vit.depth)))
        values = run_pass(vit, inputs().double(), jobs=[job]).layers()
    rows = [values[layer] for layer in range(vit.depth)]
    return tuple(torch.stack(part, 1) for part in zip(*rows, strict=True))  # type: ignore[return-value]


def test_globenc_layer_rows() -> None:
    rows, _, _ = layer_rows("globenc")
    theirs = reference("lg_globenc_rollout")["layer_cls_rows"]
    for i, k in np.ndindex(4, 12):
        close(rows[i, k], theirs[i, k], 1e-4, f"image {i}, block {k}")


def test_alti_layer_rows() -> None:
    """Rows whose scores are a fair part of ||y|| agree to 1e-4; in the others their float32 rounding of ||y|| is
    divided by a sum near zero, so what agrees is the row times its share of ||y||, over its tokens. Their NaN rows are
    our zero rows."""
    rows, size, total = layer_rows("alti")
    theirs = reference("lg_alti_rollout")["layer_cls_rows"]
    missing = np.isnan(theirs).all(-1)
    assert missing.sum() == 1
    assert torch.equal(torch.from_numpy(missing), (rows == 0).all(-1))
    share = total / size
    difference = (rows - torch.from_numpy(np.nan_to_num(theirs))).abs()
    within(float((difference.mean(-1) * share).max()), 2e-6)
    within(float(difference[share > 0.1].max()), 1e-4)
    assert int((share > 0.1).sum()) >= 30
