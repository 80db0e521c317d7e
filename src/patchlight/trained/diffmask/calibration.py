"""Calibrates the shift beta of the gates before the first step and after the last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.evidence.precision import Precision, casting
from patchlight.trained.diffmask.gates import Gates, aggregate, observe
from patchlight.trained.diffmask.watch import mask_divergence


def calibrate(gates: Gates, h0: Tensor, states: Tensor, share: float) -> float:
    """Set all beta_i to the value at which the mean of prod_i P(z_i != 0) is `share`, and return it."""
    with torch.no_grad():
        u = gates.locations(h0, states) - gates.beta[:, None, None].to(h0)
        low, high = -2 * gates.alpha - 20.0, 2 * gates.alpha + 20.0
        for _ in range(40):
            middle = (low + high) / 2
            if float(aggregate(u + middle, "keep").mean()) < share:
                low = middle
            else:
                high = middle
        gates.beta.fill_(high)
    return high


@dataclass(frozen=True)
class Finish:
    """The last calibration: the shift of all beta_i, and the divergence and kept share after it."""

    shift: float
    kl: float
    error: float
    """The standard error of `kl`."""
    kept: float
    images: int


@torch.no_grad()
def finish(gates: Gates, vit: Anatomy, batches: Iterable[Tensor], margin: float, precision: Precision) -> Finish:
    """Raise all beta_i by the smallest shift at which KL + 2 standard errors <= m if only patches above 0.5 are kept.

    Training enforces the limit on average over sampled masks; this enforces it for the mask that a map shows. Bisection
    takes one clean forward and at most 12 masked forwards per batch.
    """
    observed = []
    for images in batches:
        with casting(vit, precision):
            seen = observe(vit, images)
        u = gates.locations(seen.h0, torch.stack(seen.states))
        observed.append((images, replace(seen, states=[]), u))

    def at(shift: float) -> Finish:
        sums = torch.zeros(4, device=vit.device, dtype=torch.float64)
        for images, seen, u in observed:
            kept = aggregate(u + shift) > 0.5
            with casting(vit, precision):
                kl = mask_divergence(gates, vit, images, seen, kept).double()
            sums += torch.stack([torch.ones_like(kl), kl, kl**2, kept.double().mean(1)]).sum(1)
        count, kl_sum, squares, share = sums.tolist()
        mean = kl_sum / count
        return Finish(shift, mean, (max(squares / count - mean**2, 0.0) / count) ** 0.5, share / count, int(count))

    best = at(0.0)
    low, high = 0.0, gates.alpha + 10 - float(gates.beta.min())
    if best.kl + 2 * best.error > margin:
        best = at(high)
        for _ in range(10):
            trial = at((low + high) / 2)
            if trial.kl + 2 * trial.error > margin:
                low = trial.shift
            else:
                high, best = trial.shift, trial
        gates.beta.add_(best.shift)
    return best
