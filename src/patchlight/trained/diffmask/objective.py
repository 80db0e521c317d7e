"""What the gates are trained for: keep few patches, subject to an output distribution that stays the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Penalty = Literal["keep", "log-keep"]
Update = Literal["ascent", "code"]


def penalty(log_keep: Tensor, kind: Penalty = "log-keep", floor: float = 0.0) -> Tensor:
    """How much is kept [B], from sum_i log P(z_i != 0) [B,P].

    `keep` is the expected share of patches, the mean of k = prod_i P(z_i != 0), whatever the floor. `log-keep` is the
    mean of log(floor + k); the released code has no floor. Without one, patches that are long shut draw all of the
    gradient and those that are wide open get none.
    """
    if kind == "keep":
        return log_keep.exp().mean(-1)
    if floor > 0:
        log_keep = F.softplus(log_keep - math.log(floor)) + math.log(floor)
    return log_keep.mean(-1)


class Multipliers:
    """One Lagrange multiplier lambda_k per last gate k, between bounds.

    `ascent`: Adam's step up the Lagrangian. `code`: Adam's step down it, what the released code does.
    """

    def __init__(
        self, count: int, start: float, low: float, high: float, rate: float, update: Update, device: torch.device
    ) -> None:
        self.values = [torch.nn.Parameter(torch.tensor(float(start), device=device)) for _ in range(count)]
        self.low, self.high = low, high
        adam = torch.optim.Adam(self.values, rate, maximize=update == "ascent", fused=device.type == "cuda")
        self.optimiser = Lookahead(adam, {f"{i}": v for i, v in enumerate(self.values)})

    def __getitem__(self, k: int) -> Tensor:
        return self.values[k].detach()

    @torch.no_grad()
    def step(self, k: int, kl: Tensor, margin: float) -> None:
        """Move lambda_k after a batch whose mean divergence was `kl`."""
        value = self.values[k]
        for other in self.values:
            other.grad = None
        value.grad = (kl - margin).detach().to(value)
        self.optimiser.step()
        value.clamp_(self.low, self.high)

    def state(self) -> dict[str, Tensor]:
        return {"values": torch.stack([v.detach() for v in self.values]).cpu(), **self.optimiser.state()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for value, was in zip(self.values, state["values"], strict=True):
            value.data.copy_(was)
        self.optimiser.restore({k: v for k, v in state.items() if k != "values"})


class Lookahead:
    """Adam with slow weights: every `every` steps slow += rate (fast - slow), and the fast ones start again from there.

    The slow copy of a weight is made at the first such step; a weight without a gradient is passed over.
    """

    def __init__(
        self, adam: torch.optim.Adam, names: dict[str, torch.nn.Parameter], every: int = 6, rate: float = 0.5
    ) -> None:
        self.adam, self.names, self.every, self.rate = adam, names, every, rate
        self.slow: dict[str, Tensor] = {}
        self.taken = 0

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        self.taken += 1
        if self.taken % self.every:
            return
        moved = {name: fast for name, fast in self.names.items() if fast.grad is not None}
        if any(name in self.slow for name in moved):
            names = [name for name in moved if name in self.slow]
            fast, slow = [moved[name].data for name in names], [self.slow[name] for name in names]
            torch._foreach_lerp_(slow, fast, self.rate)
            torch._foreach_copy_(fast, slow)
        self.slow |= {name: fast.detach().clone() for name, fast in moved.items() if name not in self.slow}

    def set_rates(self, factor: float) -> None:
        """Scale every group's own rate: warm-up."""
        for group in self.adam.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def state(self) -> dict[str, Tensor]:
        """Everything that a later `restore` needs, as plain tensors by name."""
        found = {"taken": torch.tensor(self.taken), **{f"slow.{k}": v.clone() for k, v in self.slow.items()}}
        for name, key, value in self._moments():
            found[f"adam.{name}.{key}"] = torch.as_tensor(value).clone()
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        self.taken = int(state["taken"])
        for key, value in state.items():
            kind, _, rest = key.partition(".")
            if kind == "slow":
                self.slow[rest] = value.to(self.names[rest]).clone()
            elif kind == "adam":
                name, _, moment = rest.rpartition(".")
                parameter = self.names[name]
                fused = self.adam.defaults["fused"]
                kept = value.to(parameter.device if fused or moment != "step" else "cpu").clone()
                self.adam.state[parameter][moment] = kept

    def _moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.names.items():
            for key, value in self.adam.state.get(parameter, {}).items():
                yield name, key, value
