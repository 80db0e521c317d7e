"""The training objective of the gates: keep few patches while the output distribution stays the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchlight.trained.optimiser import Lookahead

Penalty = Literal["log-keep", "count"]
Update = Literal["ascent", "descent"]


def penalty(log_keep: Tensor, kind: Penalty = "log-keep", floor: float = 0.0) -> Tensor:
    """The penalty on kept patches [B], from log k = sum_i log P(z_i != 0) [B,P].

    `count` is the paper's L0, the expected number of patches that are not masked: the sum of k over patches. `log-keep`
    is the mean of log(floor + k); the released code has no floor. Without a floor, closed patches get all of the
    gradient and open patches get none.
    """
    if kind == "count":
        return log_keep.exp().sum(-1)
    if floor > 0:
        log_keep = F.softplus(log_keep - math.log(floor)) + math.log(floor)
    return log_keep.mean(-1)


class Multipliers:
    """One Lagrange multiplier lambda_k per last gate k, between `low` and `high` (None: no upper bound).

    `ascent` moves up the Lagrangian with Adam; `descent` moves down, as in the released code.
    """

    def __init__(
        self,
        count: int,
        start: float,
        low: float,
        high: float | None,
        rate: float,
        update: Update,
        device: torch.device,
    ) -> None:
        self.values = [torch.nn.Parameter(torch.tensor(float(start), device=device)) for _ in range(count)]
        self.low, self.high = low, high
        adam = torch.optim.Adam(self.values, rate, maximize=update == "ascent", fused=device.type == "cuda")
        self.optimiser = Lookahead(adam, {f"{i}": v for i, v in enumerate(self.values)})

    def __getitem__(self, k: int) -> Tensor:
        return self.values[k].detach()

    @torch.no_grad()
    def step(self, k: int, kl: Tensor, margin: float) -> None:
        """Update lambda_k after a batch with mean divergence `kl`."""
        value = self.values[k]
        for other in self.values:
            other.grad = None
        value.grad = (kl - margin).detach().to(value)
        self.optimiser.step()
        value.clamp_(self.low, self.high)

    def state(self) -> dict[str, Tensor]:
        return {"values": torch.stack([v.detach() for v in self.values]).cpu(), **self.optimiser.state()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for value, was in zip(self.values, state["values"], strict=True):
            value.data.copy_(was)
        self.optimiser.restore({k: v for k, v in state.items() if k != "values"})
