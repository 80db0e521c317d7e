"""Statistics over images and maps."""

from __future__ import annotations

import torch

from patchlight.core.statistics import constant


def test_a_map_is_constant_within_rounding() -> None:
    one = torch.full((1, 16), 0.3)
    nearly, other = one.clone(), one.clone()
    nearly[0, 3] = torch.nextafter(nearly[0, 3], torch.tensor(1.0))
    other[0, 3] += 1e-3
    assert constant(torch.cat([one, nearly, other, torch.zeros(1, 16)])).tolist() == [True, True, False, True]
