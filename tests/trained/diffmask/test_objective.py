"""The Lagrangian's parts: penalties, multipliers and the look-ahead optimiser."""

from __future__ import annotations

import math

import pytest
import torch

from patchlight.trained.diffmask.objective import Lookahead, Multipliers, penalty
from patchlight.trained.diffmask.settings import Settings


def test_penalties() -> None:
    log_keep = torch.tensor([[0.5, 0.25]]).log()
    assert float(penalty(log_keep, "keep")) == pytest.approx(0.375)
    assert float(penalty(log_keep, "log-keep")) == pytest.approx(float(log_keep.mean()))
    assert float(penalty(log_keep, "log-keep", 0.1)) == pytest.approx((math.log(0.6) + math.log(0.35)) / 2, abs=1e-6)


def test_with_a_floor_shut_patches_leave_the_gradient_to_open_ones() -> None:
    log_keep = torch.tensor([[-40.0, -0.1]], requires_grad=True)
    penalty(log_keep, floor=1e-3).sum().backward()
    assert log_keep.grad is not None
    shut, held = log_keep.grad[0].tolist()
    assert (shut, held) == (pytest.approx(0, abs=1e-9), pytest.approx(0.5, abs=1e-3))


@pytest.mark.parametrize(("update", "rises"), [("ascent", True), ("code", False)])
def test_multipliers_rise_or_fall_with_the_constraint(update: str, rises: bool) -> None:
    lambdas = Multipliers(3, 20.0, 0.0, 200.0, 0.3, update, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(5):
        lambdas.step(1, torch.tensor(0.5), 0.1)
    assert (float(lambdas[1]) > 20) == rises
    assert float(lambdas[0]) == float(lambdas[2]) == 20
    if update == "code":
        assert float(lambdas[1]) == pytest.approx(18.5, abs=0.05)
    for _ in range(1500):
        lambdas.step(1, torch.tensor(50.0 if rises else 0.0), 0.1)
    assert float(lambdas[1]) == 200


def test_lookahead_steps_back_half_way_every_sixth_step() -> None:
    fast = torch.nn.Parameter(torch.zeros(1))
    plain = torch.nn.Parameter(torch.zeros(1))
    ours = Lookahead(torch.optim.Adam([fast], 0.1), {"x": fast})
    adam = torch.optim.Adam([plain], 0.1)
    slow = None
    for step in range(1, 13):
        for parameter, optimiser in ((fast, ours), (plain, adam)):
            parameter.grad = torch.ones(1)
            optimiser.step()
        if step == 6:
            slow = plain.detach().clone()
        if step < 12:
            assert torch.allclose(fast, plain)
    assert slow is not None
    assert torch.allclose(fast, slow + 0.5 * (plain - slow))


def test_optimiser_state_survives_as_plain_tensors() -> None:
    def made() -> tuple[torch.nn.Parameter, Lookahead]:
        parameter = torch.nn.Parameter(torch.ones(3))
        return parameter, Lookahead(torch.optim.Adam([parameter], 0.05), {"x": parameter})

    def go(parameter: torch.nn.Parameter, optimiser: Lookahead, steps: range) -> None:
        for step in steps:
            parameter.grad = torch.tensor([1.0, -1.0, 0.1]) * (step + 1)
            optimiser.step()

    whole, first = made()
    go(whole, first, range(20))
    half, second = made()
    go(half, second, range(9))
    again, third = made()
    again.data.copy_(half.data)
    third.restore(second.state())
    go(again, third, range(9, 20))
    assert torch.equal(whole, again)


def test_rates_fall_with_the_square_of_the_width_beyond_256() -> None:
    assert Settings().rates(64) == Settings().rates(256) == (5e-4, 1e-2)
    assert Settings().rates(512) == (5e-4 / 4, 1e-2 / 4)
    assert Settings(gate_rate=1e-3).rates(512) == (1e-3, 1e-2 / 4)
    assert Settings.preset("paper").rates(768) == (2e-5, 1e-3)
