"""The Lagrangian's parts: penalties and multipliers."""

from __future__ import annotations

import math

import pytest
import torch

from patchlight.trained.diffmask.objective import Multipliers, penalty
from patchlight.trained.diffmask.settings import DiffMaskSettings


def test_penalties() -> None:
    log_keep = torch.tensor([[0.5, 0.25]]).log()
    assert float(penalty(log_keep, "count")) == pytest.approx(0.75)
    assert float(penalty(log_keep, "log-keep")) == pytest.approx(float(log_keep.mean()))
    assert float(penalty(log_keep, "log-keep", 0.1)) == pytest.approx((math.log(0.6) + math.log(0.35)) / 2, abs=1e-6)


def test_with_a_floor_shut_patches_leave_the_gradient_to_open_ones() -> None:
    log_keep = torch.tensor([[-40.0, -0.1]], requires_grad=True)
    penalty(log_keep, floor=1e-3).sum().backward()
    assert log_keep.grad is not None
    shut, held = log_keep.grad[0].tolist()
    assert (shut, held) == (pytest.approx(0, abs=1e-9), pytest.approx(0.5, abs=1e-3))


@pytest.mark.parametrize(("update", "rises"), [("ascent", True), ("descent", False)])
def test_multipliers_rise_or_fall_with_the_constraint(update: str, rises: bool) -> None:
    lambdas = Multipliers(3, 20.0, 0.0, 200.0, 0.3, update, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(5):
        lambdas.step(1, torch.tensor(0.5), 0.1)
    assert (float(lambdas[1]) > 20) == rises
    assert float(lambdas[0]) == float(lambdas[2]) == 20
    if update == "descent":
        assert float(lambdas[1]) == pytest.approx(18.5, abs=0.05)
    for _ in range(1500):
        lambdas.step(1, torch.tensor(50.0 if rises else 0.0), 0.1)
    assert float(lambdas[1]) == 200
    free = Multipliers(1, 20.0, 0.0, None, 1.0, update, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(600):
        free.step(0, torch.tensor(50.0 if rises else 0.0), 0.1)
    assert float(free[0]) > 300


def test_rates_fall_with_the_square_of_the_width_beyond_256() -> None:
    assert DiffMaskSettings().rates(64) == DiffMaskSettings().rates(256) == (5e-4, 1e-2)
    assert DiffMaskSettings().rates(512) == (5e-4 / 4, 1e-2 / 4)
    assert DiffMaskSettings(gate_rate=1e-3).rates(512) == (1e-3, 1e-2 / 4)
    assert DiffMaskSettings.preset("paper").rates(768) == DiffMaskSettings.preset("authors").rates(768) == (2e-5, 1e-3)


def test_preset_authors_is_the_released_code() -> None:
    s = DiffMaskSettings.preset("authors")
    assert (s.penalty, s.floor, s.gates, s.lambda_update, s.learn_beta) == ("log-keep", 0, "prefix", "descent", True)
    assert (s.batch_size, s.epochs, s.steps, s.warmup, s.lambda_start) == (32, 20, None, 1200, 20)
    assert (s.lambda_low, s.lambda_high, s.prices, s.calibrate, s.finish, s.restarts) == (0, 200, 1, None, 0, 0)
