"""Optimisers whose state is tensors by weight name: Adam with look-ahead, and AdamW with a cosine schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def moments(optimiser: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state of an optimiser as tensors `<weight>.<moment>`, for `restore_moments`."""
    return {
        f"{name}.{key}": torch.as_tensor(value).clone()
        for name, parameter in names.items()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def restore_moments(
    optimiser: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]
) -> None:
    """Restore the state that `moments` returned."""
    for key, value in state.items():
        name, _, moment = key.rpartition(".")
        parameter = names[name]
        counts = moment == "step" and not optimiser.defaults.get("fused")  # torch keeps these on the CPU
        optimiser.state[parameter][moment] = value.to("cpu" if counts else parameter.device).clone()


class Lookahead:
    """Adam with look-ahead: every `every` steps, slow += rate (fast - slow), and the fast weights are set to slow.

    The slow copy of a weight is made at the first such step. Weights without a gradient are skipped.
    """

    every, rate = 6, 0.5

    def __init__(self, adam: torch.optim.Adam, names: dict[str, nn.Parameter]) -> None:
        self.adam, self.names = adam, names
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
        """Scale the rate of every group, for warm-up."""
        for group in self.adam.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def state(self) -> dict[str, Tensor]:
        """The state for `restore`, as plain tensors by name."""
        slow = {f"slow.{name}": value.clone() for name, value in self.slow.items()}
        adam = {f"adam.{key}": value for key, value in moments(self.adam, self.names).items()}
        return {"taken": torch.tensor(self.taken), **slow, **adam}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.taken = int(state["taken"])
        slow, adam = (
            {k.removeprefix(part): v for k, v in state.items() if k.startswith(part)} for part in ("slow.", "adam.")
        )
        self.slow = {name: value.to(self.names[name]).clone() for name, value in slow.items()}
        restore_moments(self.adam, self.names, adam)


class Annealed:
    """AdamW with warm-up, a cosine schedule to 0, and gradients clipped at norm 1."""

    def __init__(self, network: nn.Module, rate: float, weight_decay: float, warmup: int, steps: int) -> None:
        self.names = dict(network.named_parameters())
        fused = next(iter(self.names.values())).is_cuda
        self.adam = torch.optim.AdamW(self.names.values(), rate, weight_decay=weight_decay, fused=fused)
        self.rate, self.warmup, self.steps = rate, warmup, steps

    def factor(self, index: int) -> float:
        """The factor of the rate at step `index`, from 0."""
        if index < self.warmup:
            return (index + 1) / self.warmup
        left = (index - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, left)))

    def step(self, index: int) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.rate * self.factor(index)
        nn.utils.clip_grad_norm_(self.names.values(), 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The state for `restore`, as plain tensors by name."""
        return moments(self.adam, self.names)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        restore_moments(self.adam, self.names, state)
