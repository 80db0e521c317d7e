"""The look-ahead step, and optimisers that resume from plain tensors."""

from __future__ import annotations

import torch

from patchlight.trained.optimiser import Lookahead


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
