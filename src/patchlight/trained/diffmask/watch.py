"""Detects a failed DiffMask training from probes of its mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.targets import kl_divergence
from patchlight.evidence.precision import Precision, casting
from patchlight.trained.diffmask.gates import Gates, Seen, aggregate, masked_logits, observe

EVERY = 50
"""Number of steps between two probes."""
FIRST = 200
"""Steps before a probe counts, because many trainings first open or close every gate."""
LONGEST = 1000
"""Maximum number of steps for which a failure may last."""
TRIES = 4
"""Number of kept patches per image that a probe masks one at a time."""
SPARE = 0.1
"""Share of images with an unnecessary patch above which too much is kept."""
FALL = 0.05
"""Relative decrease of the kept share, or of a high divergence, that counts as progress."""

FAILURES = {
    "lost": "the mask loses the output: lower gate_rate and baseline_rate (the wider the model, the lower), or raise "
    "beta or calibrate, or lambda_start",
    "nothing": "nothing is masked: lower beta or calibrate, raise margin, or lower lambda_start",
    "stuck": "patches that do not matter stay kept though the divergence is far below the margin: raise floor, or "
    "lower alpha or lambda_start",
}
"""Kinds of failures, and what to change."""


@dataclass(frozen=True)
class Probe:
    """Measurements of the mask of all gates, as means over the images of a batch."""

    kl: float
    error: float
    """The standard error of `kl`."""
    kept: float
    spare: float
    """Share of images on which one of a few random kept patches can be masked within the margin."""

    def failure(self, margin: float) -> str | None:
        """The failure that this mask shows, one of `FAILURES`; None without a failure."""
        if self.kl - 2 * self.error > 10 * margin or (self.kept < 0.01 and self.kl > 2 * margin):
            return "lost"
        if self.kept > 0.99:
            return "nothing"
        return "stuck" if self.kl + 2 * self.error < margin / 2 and self.spare > SPARE else None


def mask_divergence(gates: Gates, vit: Anatomy, images: Tensor, seen: Seen, mask: Tensor) -> Tensor:
    """KL(p_clean || p_masked) [B] if the patches outside `mask` [B,P] are replaced by the baseline."""
    patches = torch.where(mask[..., None], seen.h0, gates.baseline.to(seen.h0))
    return kl_divergence(seen.logits, masked_logits(vit, images, patches), vit.outputs)


@torch.no_grad()
def probe_sums(
    gates: Gates, vit: Anatomy, images: Tensor, margin: float, generator: torch.Generator, precision: Precision
) -> Tensor:
    """Means over a batch of KL, its square, the kept share and images with an unnecessary patch, for `read_probe`.

    It takes one clean forward, and one masked forward for the mask and for each try.
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
    """The probe from the means of `probe_sums` over a number of images."""
    kl, square, kept, spare = means.tolist()
    return Probe(kl, (max(square - kl**2, 0.0) / images) ** 0.5, kept, spare)


class Watch:
    """Follows the probes of one training.

    A failure counts if it lasts for a fifth of the training (200 to 1,000 steps) without progress, which is a fall of
    the divergence for a mask that loses the output, and of the kept share otherwise. A mask that loses the output at
    the last step always counts.
    """

    def __init__(self, margin: float, warmup: int, steps: int) -> None:
        self.margin, self.first, self.steps = margin, max(2 * warmup, FIRST), steps
        self.patience = min(max(FIRST, steps // 5), LONGEST)
        self.state = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
        """Index of the current failure in FAILURES (or -1), its first step, and the number that should fall."""

    def add(self, step: int, probe: Probe) -> str | None:
        """Add the probe of a step, and return a failure that has lasted too long, if there is one."""
        name = probe.failure(self.margin) if step >= self.first else None
        if name == "lost" and step >= self.steps:
            return name
        kind, since, before = self.state.tolist()
        current = -1 if name is None else list(FAILURES).index(name)
        level = probe.kl if name == "lost" else probe.kept
        if current != kind or level < (1 - FALL) * before:
            self.state = torch.tensor([current, step, level], dtype=torch.float64)
            return None
        return name if step - since >= self.patience else None
