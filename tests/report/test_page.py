"""What pages that open offline share."""

from __future__ import annotations

from patchlight.report.page import round_values


def test_an_axis_has_round_numbers() -> None:
    assert round_values(-0.3, 0.02) == [-0.3, -0.2, -0.1, 0.0]
    assert round_values(0.0, 0.0021) == [0.0, 0.0005, 0.001, 0.0015, 0.002]
    assert round_values(0.0, 0.0) == [0.0]
    assert all(len(round_values(-low / 7, 0.13 * low)) <= 7 for low in (0.01, 0.3, 1.0, 4.4, 70.0))
