"""Numbers that may differ by rounding: how they are compared, and the margin that each comparison leaves.

Where PATCHLIGHT_MARGINS names a file, every comparison that holds adds a line to it: its test, its place, the error and
the limit. `close`, `near`, `ranked` and `within` do so themselves; those of torch, numpy and pytest do so once `watch`
was called. `tests/cpus.py` runs the tests on many kinds of processor and reads the file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._comparison import default_tolerances

import patchlight.testing
from patchlight.testing import spearman

HERE = Path(__file__).parent


def close(ours: Any, theirs: Any, limit: float, what: str = "") -> None:
    """max |ours - theirs| <= limit * max |theirs|: equal, as a share of the whole map's size."""
    ours, theirs = _pair(ours, theirs)
    within(_size(ours - theirs) / max(_size(theirs), sys.float_info.min), limit, what)


def close_on_average(ours: Any, theirs: Any, limit: float, what: str = "") -> None:
    """sum |ours - theirs| <= limit * sum |theirs|: for many values of which rounding moves a few."""
    ours, theirs = _pair(ours, theirs)
    within(float((ours - theirs).abs().sum() / theirs.abs().sum()), limit, what)


def near(ours: Any, theirs: Any, limit: float, what: str = "") -> None:
    """max |ours - theirs| <= limit."""
    ours, theirs = _pair(ours, theirs)
    within(_size(ours - theirs), limit, what)


def ranked(ours: Any, theirs: Any, limit: float, what: str = "") -> None:
    """Spearman's rank correlation >= limit."""
    within(1 - spearman(*_pair(ours, theirs)), 1 - limit, what)


def within(error: float, limit: float, what: str = "") -> None:
    """error <= limit."""
    assert error <= limit, f"{what + ': ' if what else ''}{error:.3e} is over the limit of {limit:.0e}"
    record(error, limit, what)


def record(error: float, limit: float, what: str = "") -> None:
    """Add a comparison that held to the file of margins, where one is kept."""
    file = os.environ.get("PATCHLIGHT_MARGINS")
    if file:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
        row = {"test": test, "place": f"{_place()} {what}".strip(), "error": float(error), "limit": float(limit)}
        with open(file, "a") as out:
            out.write(json.dumps(row) + "\n")


def watch() -> None:
    """Record what assert_close, assert_allclose, allclose, pytest.approx and `check_method` find, too."""
    assert_close, allclose, assert_allclose = torch.testing.assert_close, torch.allclose, np.testing.assert_allclose
    scalar = type(pytest.approx(0.0))
    equal = scalar.__eq__

    def watched_assert_close(actual: Any, expected: Any, *args: Any, **options: Any) -> None:
        assert_close(actual, expected, *args, **options)
        _elements(actual, expected, options.get("rtol"), options.get("atol"))

    def watched_allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, **options: Any) -> bool:
        held = allclose(input, other, rtol, atol, **options)
        if held:
            _elements(input, other, rtol, atol)
        return held

    def watched_assert_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0, **options: Any) -> None:
        assert_allclose(actual, desired, rtol, atol, **options)
        _elements(actual, desired, rtol, atol)

    def watched_equal(self: Any, actual: Any) -> bool:
        held = equal(self, actual)
        if held and isinstance(self.expected, int | float):
            record(abs(float(actual) - self.expected), self.tolerance)
        return held

    torch.testing.assert_close, torch.allclose = watched_assert_close, watched_allclose
    np.testing.assert_allclose = watched_assert_allclose
    scalar.__eq__ = watched_equal
    patchlight.testing.compared = lambda what, error, limit: record(error, limit, what)


def _elements(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
    """Record the element that is nearest to its limit, rtol |expected| + atol; None for what torch takes by type."""
    if isinstance(actual, Mapping):
        actual, expected = list(actual.values()), [expected[key] for key in actual]
    if isinstance(actual, Sequence):
        for one, other in zip(actual, expected, strict=True):
            _elements(one, other, rtol, atol)
        return
    a, b = torch.broadcast_tensors(_tensor(actual), _tensor(expected))
    if rtol is None or atol is None:
        rtol, atol = default_tolerances(a, b)
    a, b = a.double(), b.double()
    error, limit = (a - b).abs(), rtol * b.abs() + atol
    error = torch.where(torch.isfinite(error), error, 0)
    if error.numel() and bool(error.any()):
        worst = int((error / limit).argmax())
        record(float(error.flatten()[worst]), float(limit.flatten()[worst]))


def _pair(ours: Any, theirs: Any) -> tuple[Tensor, Tensor]:
    ours, theirs = _tensor(ours).double(), _tensor(theirs).double()
    return ours.reshape(theirs.shape), theirs


def _tensor(values: Any) -> Tensor:
    return values.detach() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def _size(values: Tensor) -> float:
    return float(values.abs().max())


def _place() -> str:
    """The line of the test that compares."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or not frame.f_code.co_filename.startswith(str(HERE))):
        frame = frame.f_back
    return f"line {frame.f_lineno}"
