"""Whether a training of DiffMask has failed, judged by the mask that its gates give now and then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import kl_divergence
from patchlight.evidence.precision import Precision, casting
from patchlight.trained.diffmask.gates import Gates, Seen, aggregate, masked_logits, observe

EVERY = 50
"""Steps between two probes."""
FIRST = 200
"""Steps before a probe counts: many trainings begin by opening or shutting every gate."""
LONGEST = 1000
"""Steps after which a failure that lasts is one, however long the training is."""
TRIES = 4
"""Kept patches of an image that a probe tries to mask, one at a time."""
SPARE = 0.1
"""The share of images with a spare patch above which too much is kept."""
FALL = 0.05
"""The part by which the kept share, or a divergence that is too high, must fall to count as progress."""

FAILURES = {
    "lost": "the mask loses the output: lower gate_rate and baseline_rate (the wider the model, the lower), or raise "
    "beta or calibrate, or lambda_start",
    "nothing": "nothing is masked: lower beta or calibrate, raise margin, or lower lambda_start",
    "stuck": "patches that do not matter stay kept though the divergence is far below the margin: raise floor, or "
    "lower alpha or lambda_start",
}
"""Why a training has failed, and what to change."""


@dataclass(frozen=True)
class Probe:
    """The mask of all gates on the batch that is probed, means over its images."""

    kl: float
    error: float
    """The standard error of `kl`."""
    kept: float
    spare: float
    """The share of images on which one of a few kept patches, chosen at random, can be masked within the margin."""

    def failure(self, margin: float) -> str | None:
        """Which of `FAILURES` this mask shows."""
        if self.kl - 2 * self.error > 10 * margin or (self.kept < 0.01 and self.kl > 2 * margin):
            return "lost"
        if self.kept > 0.99:
            return "nothing"
        return "stuck" if self.kl + 2 * self.error < margin / 2 and self.spare > SPARE else None


def mask_divergence(gates: Gates, vit: Anatomy, images: Tensor, seen: Seen, mask: Tensor) -> Tensor:
    """KL(p_clean || p_masked) [B] where the patches outside `mask` [B,P] are the baseline."""
    patches = torch.where(mask[..., None], seen.h0, gates.baseline.to(seen.h0))
    return kl_divergence(seen.logits, masked_logits(vit, images, patches), vit.outputs)


@torch.no_grad()
def probe_sums(
    gates: Gates,
    vit: Anatomy,
    images: Tensor,
    margin: float,
    generator: torch.Generator,
    precision: Precision,
) -> Tensor:
    """Means over a batch of KL, its square, the kept share and images with a spare patch, for `read_probe`.

    One clean forward, and one masked forward for the mask and for each try.
    """
    with casting(vit, precision):
        seen = observe(vit, images)
    kept = aggregate(gates.locations(seen.h0, torch.stack(seen.states))) > 0.5
    chance = torch.rand(kept.shape, generator=generator, device=kept.device).masked_fill(~kept, -1.0)
    spare = torch.zeros(len(images), dtype=torch.bool, device=kept.device)
    with casting(vit, precision):
        kl = mask_divergence(gates, vit, images, seen, kept).double()
        for patch in chance.topk(min(TRIES, chance.shape[1])).indices.T[..., None]:
            fewer = kept.scatter(1, patch, False)
            without = mask_divergence(gates, vit, images, seen, fewer)
            spare |= (without <= margin) & (fewer != kept).any(1)
    return torch.stack([kl, kl**2, kept.double().mean(1), spare.double()]).mean(1)


def read_probe(means: Tensor, images: int) -> Probe:
    """The probe whose means `probe_sums` gave for so many images."""
    kl, square, kept, spare = means.tolist()
    return Probe(kl, (max(square - kl**2, 0.0) / images) ** 0.5, kept, spare)


class Watch:
    """Follows the probes of one training.

    A failure counts once it has lasted for a fifth of the training, at least 200 steps and at most 1,000, in which what
    should fall (the divergence of a mask that loses the output, else the kept share) did not. A mask that loses the
    output at the last step is a failure at once.
    """

    def __init__(self, margin: float, warmup: int, steps: int) -> None:
        self.margin, self.first, self.steps = margin, max(2 * warmup, FIRST), steps
        self.patience = min(max(FIRST, steps // 5), LONGEST)
        self.state = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
        """The failure that the last probes show (its place in FAILURES, or -1), since when, and what should fall."""

    def add(self, step: int, probe: Probe) -> str | None:
        """Take in the probe of a step; returns the failure that has lasted too long, if there is one."""
        name = probe.failure(self.margin) if step >= self.first else None
        if name == "lost" and step >= self.steps:
            return name
        kind, since, before = self.state.tolist()
        found = -1 if name is None else list(FAILURES).index(name)
        level = probe.kl if name == "lost" else probe.kept
        if found != kind or level < (1 - FALL) * before:
            self.state = torch.tensor([found, step, level], dtype=torch.float64)
            return None
        return name if step - since >= self.patience else None
