"""The contract over every registered method and model family: structural families in CI, every pair in test-all."""

from __future__ import annotations

import pytest
import torch

from patchlight.testing import check_method, contract_names
from tests.families import FAMILIES, STRUCTURAL, images, shared


@pytest.mark.parametrize("name", contract_names())
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in STRUCTURAL else pytest.mark.slow) for f in FAMILIES]
)
def test_contract(name: str, family: str) -> None:
    vit = shared(family)
    check_method(name, vit, images(vit, 2), double=shared(family, torch.float64))
