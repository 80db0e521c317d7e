"""KernelSHAP: Shapley values of the patches, estimated from sampled coalitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.anatomy.watching import Unseen
from patchlight.core.layout import SETS, Layout
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import TokenSubsets
from patchlight.evidence.coalitions import draw_coalitions, members_first, no_coalitions, seen_tokens
from patchlight.evidence.fills import Fill, drops
from patchlight.methods.base import Ask, Estimate, ablates
from patchlight.methods.masking import advise_patches, in_sets, owners, removes_tokens, score_patches, shared_in_sets
from patchlight.methods.sampling import Tolerance, in_rounds, jackknife


@dataclass(frozen=True)
class PaddedSubsets(TokenSubsets):
    """Token subsets of different sizes: the first size[v] patches of keep[v] [V,k] are members, others are hidden keys.

    For a classifier that reads only prefix tokens, hiding keys is equivalent to dropping the tokens.
    """

    size: Tensor
    layout: Layout
    device: torch.device

    def around(self, part: slice) -> Unseen:
        return Unseen(seen_tokens(self.layout, self.keep.shape[1], self.size[part]).to(self.device))


def score_coalitions(ask: Ask, z: Tensor, lengths: int = 12) -> Tensor:
    """Scores [B,n,T] of every image with only the patches of each coalition z [n,d].

    Coalitions are grouped by about `lengths` different sequence lengths, so that each group fills a batch. Tokens of a
    sequence that are not in its coalition are hidden from attention.
    """
    count, players = len(ask.images), z.shape[1]
    step = max(1, players // lengths)
    size = z.sum(1)
    length = (-(-size // step) * step).clamp_max(players)
    members = members_first(z)
    lists, places = [], []
    for longest in length.unique().tolist():
        rows = (length == longest).nonzero()[:, 0]
        owner, keep = owners(ask, len(rows)), members[rows, :longest].repeat(count, 1)
        same_size = bool((size[rows] == longest).all())
        padded = PaddedSubsets(owner, keep, size[rows].repeat(count), ask.vit.layout, ask.images.device)
        lists.append(TokenSubsets(owner, keep) if same_size else padded)
        places.append(rows)
    parts = ask.score_variants(lists).split([len(subsets.owner) for subsets in lists])
    scores = torch.cat([part.view(count, len(part) // count, -1) for part in parts], 1)
    return scores[:, torch.cat(places).argsort().to(scores.device)]


def constrained_values(z: Tensor, gain: Tensor, total: Tensor, weight: Tensor | None = None) -> Tensor:
    """The least-squares values phi [d,R] from the gains v(z) - v(empty) [n,R] of coalitions z [n,d], in float64.

    With A = mean z z^T and b = mean z gain: phi = A^-1 b - A^-1 1 (1^T A^-1 b - total) / (1^T A^-1 1), so that sum phi
    = total [R] = v(full) - v(empty). `weight` [n] are weights of the coalitions. With fewer coalitions than players, A
    is singular, and its pseudo-inverse is used.
    """
    z, gain, total = z.double(), gain.double(), total.double()
    share = torch.full_like(z[:, 0], 1 / len(z)) if weight is None else weight.double() / weight.sum()
    inverse = torch.linalg.pinv(z.T @ (share[:, None] * z), hermitian=True)
    free = inverse @ (z.T @ (share[:, None] * gain))
    ones = inverse.sum(1, keepdim=True)
    phi: Tensor = free - ones * (free.sum(0) - total) / ones.sum()
    return phi


def _why_not_drop(vit: Anatomy) -> str | None:
    reason = no_coalitions(vit)
    return None if reason is None else advise_patches(reason)


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if vit.cells == 1:
        return f"{vit.name} has one patch, so there is nothing to share the score among"
    if settings["unit"] in SETS:
        reason = removes_tokens({**settings, "fill": "zero"}, vit)
        return reason or (_why_not_drop(vit) if settings["fill"] == "none" else None)
    return _why_not_drop(vit) if drops(settings["unit"], settings["fill"]) else None


def _advice(settings: Settings, vit: Anatomy) -> str | None:
    players = int(vit.layout.sets(settings["unit"]).max()) + 1
    if settings["samples"] >= players:
        return None
    return f"{settings['samples']} coalitions are too few for {players} patches; use at least samples={10 * players}"


@ablates(
    "kernel-shap",
    paper="Lundberg & Lee, NeurIPS 2017",
    aliases=("kernelshap",),
    stochastic=True,
    cost="samples (2000) + 2 forwards, of half the tokens on average",
    quick={"samples": 200},
    presets={"captum": {"samples": 25, "unit": "patch", "fill": "zero"}, "xplique": {"samples": 800, "unit": "patch"}},
    refuses=_refuses,
    advice=_advice,
)
def kernel_shap(
    ask: Ask,
    samples: Annotated[int, Field(ge=2)] = 2000,
    unit: Literal["auto", "token", "patch", "frame", "tube", "band", "slice", "merge"] = "auto",
    fill: Fill = "zero",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """Shapley values of the patches, estimated from sampled coalitions.

        phi = argmin sum_S (v(S) - v(none) - sum of phi over S)^2   subject to   sum phi = v(all) - v(none)

    v(S) is the score of the image with only the patches of S; the map is signed. Coalition sizes 0 < k < d are sampled
    with probability proportional to 1 / (k (d - k)), in antithetic pairs (S and its complement), the same for all
    images. Presets `captum` and `xplique` are the numbers of samples of those libraries; the first is too small for
    most grids. n + 2 forward passes.

    Args:
        samples: Number n of coalitions; it should be at least 10 d for d patches.
        unit: How patches outside the coalition are hidden. "token" removes them; the empty coalition has only the
            prefix tokens. "patch" paints them with `fill`. "auto" removes them if the model can and its classifier
            reads only prefix tokens. With "frame", "tube", "band", "slice" and "merge", the players are these sets of
            patches, and the value of a set is divided equally among its patches.
    """
    layout = ask.vit.layout
    z = draw_coalitions(samples, int(layout.sets(unit).max()) + 1, ask.generator())
    ends = torch.stack([torch.zeros_like(z[0]), torch.ones_like(z[0])])
    removes = drops(unit, fill) or (unit == "auto" and _why_not_drop(ask.vit) is None)

    def value(ask: Ask, z: Tensor) -> Tensor:
        cells = in_sets(z, layout, unit)
        return score_coalitions(ask, cells.flatten(1)) if removes else score_patches(ask, cells, "patch", fill)

    none, full = value(ask, ends).double().cpu().unbind(1)

    def score(images: Tensor, part: slice) -> Tensor:
        return value(ask.of(images), z[part])

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        gain = (scores.double().cpu() - none[images][:, None]).movedim(1, 0).flatten(1)
        total, shown = (full - none)[images].flatten(), z[: len(gain)]

        def fit(weights: Tensor) -> Tensor:
            phi = constrained_values(shown, gain, total, weights)
            return shared_in_sets(phi.T.reshape(len(images), -1, phi.shape[0]), layout, unit).to(ask.images)

        return jackknife(fit, len(gain), gain, together=2)

    return in_rounds(ask, samples, tolerance, score, estimate)
