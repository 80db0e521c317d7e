"""The contract over every registered method and model family: structural families in CI, every pair in test-all."""

from __future__ import annotations

import pytest
import torch

from patchlight.testing import check_method, contract_names
from tests.families import FAMILIES, HEADS, STRUCTURAL, asked, images, shared


@pytest.mark.parametrize("name", contract_names())
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in STRUCTURAL else pytest.mark.slow) for f in FAMILIES]
)
def test_contract(name: str, family: str) -> None:
    vit = shared(family)
    check_method(name, vit, images(vit, 2), double=shared(family, torch.float64))


IN_CI = (
    "genatt",
    "rollout",
    "ixg.libra",
    "gradcam",
    "tokentm",
    "decompx",
    "lrp",
    "tis",
    "occlusion",
    "ig",
    "rawatt.plus",
)
"""Methods of each kind; all others on heads run in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.slow) for n in contract_names()]
)
@pytest.mark.parametrize(
    "head", [pytest.param(h, marks=() if i < 3 else pytest.mark.slow) for i, h in enumerate(HEADS)]
)
def test_contract_on_heads(name: str, head: str) -> None:
    vit = asked(head)
    check_method(name, vit, images(vit, 2), double=asked(head, torch.float64))
