"""The gates of VISION DIFFMASK, one small network per hidden state, and the explainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.opened import Anatomy
from patchlight.trained.diffmask import hard_concrete
from patchlight.trained.explainer import Explainer
from patchlight.zoo import ZOO

GRADES = 31
"""Number of shifts that a graded map averages."""
Map = Literal["expected", "keep", "graded"]


class Gates(nn.Module):
    """L + 2 gates u_i = alpha tanh(W2 tanh(W1 [h_0; h_i] + c1) + c2) + beta_i, and the baseline b.

    h_0 are the projected patches, h_1 .. h_L the inputs of the blocks, and h_{L+1} the output of the last. W1 [2D, D/4]
    and W2 [D/4, 1] are weight-normalised; beta_i is learned or constant. Prefix tokens have no gate and are not masked.
    """

    def __init__(
        self,
        count: int,
        width: int,
        alpha: float = 15.0,
        beta: float = 8.0,
        learn_baseline: bool = True,
        learn_beta: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = max(width // 4, 1)
        self.alpha = alpha

        def uniform(*shape: int, fan_in: int) -> Tensor:
            return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)

        v1, v2 = uniform(count, hidden, 2 * width, fan_in=2 * width), uniform(count, 1, hidden, fan_in=hidden)
        self.v1, self.g1 = nn.Parameter(v1), nn.Parameter(v1.norm(dim=-1, keepdim=True))
        self.v2, self.g2 = nn.Parameter(v2), nn.Parameter(v2.norm(dim=-1, keepdim=True))
        self.c1 = nn.Parameter(uniform(count, 1, hidden, fan_in=2 * width))
        self.c2 = nn.Parameter(uniform(count, 1, 1, fan_in=hidden))
        self.beta = nn.Parameter(torch.full((count,), float(beta)), requires_grad=learn_beta)
        b = torch.randn(width, generator=generator) / math.sqrt(width) if learn_baseline else torch.zeros(width)
        self.baseline = nn.Parameter(b, requires_grad=learn_baseline)

    @property
    def count(self) -> int:
        return len(self.beta)

    @property
    def width(self) -> int:
        return len(self.baseline)

    def locations(self, h0: Tensor, states: Sequence[Tensor] | Tensor, first: int = 0) -> Tensor:
        """u [S,B,P] of the gates from `first`, for their states [S,B,P,D] and the projected patches [B,P,D].

        States in one tensor take one batched product (few launches); states in a list take one product each (no
        copies), and may have prefix tokens, which are skipped.
        """
        if not isinstance(states, Tensor):
            return torch.stack([self.location(h0, x, first + i) for i, x in enumerate(states)])
        gates = slice(first, first + len(states))
        W1, W2 = (_weight(v, g)[gates].to(h0) for v, g in ((self.v1, self.g1), (self.v2, self.g2)))
        left, right = W1[..., : self.width].mT, W1[..., self.width :].mT
        h, x = h0.flatten(0, 1), states.flatten(1, 2)
        inner = torch.baddbmm(torch.baddbmm(self.c1[gates].to(h0), h.expand(len(x), -1, -1), left), x, right)
        out = torch.baddbmm(self.c2[gates].to(h0), inner.tanh(), W2.mT)
        return self._stretch(out.view(states.shape[:3]), gates)

    def location(self, h0: Tensor, x: Tensor, i: int) -> Tensor:
        """u [B,P] of gate i, for the projected patches [B,P,D] and its state x [B,N,D], patches last."""
        W1, W2 = (_weight(v[i : i + 1], g[i : i + 1])[0].to(h0) for v, g in ((self.v1, self.g1), (self.v2, self.g2)))
        inner = F.linear(h0, W1[:, : self.width], self.c1[i, 0].to(h0))
        inner += F.linear(x, W1[:, self.width :])[:, -h0.shape[1] :]
        out = F.linear(inner.tanh_(), W2, self.c2[i, 0].to(h0))
        return self._stretch(out[None, ..., 0], slice(i, i + 1))[0]

    def _stretch(self, out: Tensor, gates: slice) -> Tensor:
        u: Tensor = torch.add(self.beta[gates, None, None].to(out), out.tanh(), alpha=self.alpha)
        return u

    def forward(
        self, h0: Tensor, states: Sequence[Tensor] | Tensor, uniform: Tensor, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The masked patches z h_0 + (1 - z) b with z = prod_i z_i, and sum_i log P(z_i != 0) [B,P].

        `shift` [B] is added to every u_i of an image.
        """
        u = self.locations(h0, states)
        if shift is not None:
            u = u + shift[:, None]
        z = hard_concrete.sample_product(u, uniform)[..., None]
        return torch.lerp(self.baseline.to(h0), h0, z), hard_concrete.log_keep_probability(u).sum(0)


def _weight(v: Tensor, g: Tensor) -> Tensor:
    """Weight normalisation g v / |v| along the last dimension, all gates in one launch."""
    weight: Tensor = torch._weight_norm(v.flatten(0, 1), g.flatten(0, 1), 0)
    return weight.view_as(v)


def aggregate(u: Tensor, kind: Map = "expected", alpha: float = 15.0) -> Tensor:
    """One map [B,P] of locations u [S,B,P].

    `expected` is prod_i E[z_i], as in the paper; `keep` is prod_i P(z_i != 0), as in the released code; `graded` is the
    mean of prod_i E[z_i] over shifts of all u_i from -2 alpha to 2 alpha: the share of prices at which a patch is kept.
    It also orders patches that are 0 or 1 in the other two.
    """
    if kind == "keep":
        return hard_concrete.log_keep_probability(u).sum(0).exp()
    if kind == "graded":
        shifts = torch.linspace(-2 * alpha, 2 * alpha, GRADES).tolist()
        return torch.stack([hard_concrete.expected(u + shift).prod(0) for shift in shifts]).mean(0)
    return hard_concrete.expected(u).prod(0)


@dataclass(frozen=True)
class Seen:
    """The results of a clean forward: projected patches [B,P,D], states 0..L+1 without prefix tokens, and logits."""

    h0: Tensor
    states: list[Tensor]
    logits: Tensor


def observe(vit: Anatomy, images: Tensor) -> Seen:
    """Run one clean forward without gradients: the L + 2 states and the logits, in float32 or wider."""
    projected: list[Tensor] = []
    with torch.no_grad(), vit.projecting(projected.append):
        tokens = vit.embed(images)
        states = [tokens]
        for index in range(vit.depth):
            states.append(vit.block(index, states[-1]))
        logits = vit.readout(states[-1])
    wide = torch.promote_types(vit.dtype, torch.float32)
    h0 = projected[0].to(wide).contiguous()
    return Seen(h0, [h0, *(vit.layout.of_cells(s).to(wide) for s in states)], logits.to(wide))


def masked_logits(vit: Anatomy, images: Tensor, patches: Tensor) -> Tensor:
    """The logits with `patches` [B,P,D] instead of the projected patches."""
    with vit.projecting(lambda clean: patches.to(clean)):
        tokens = vit.embed(images)
    return vit.readout(vit.run(tokens)).to(patches)


def new_gates(vit: Anatomy, seed: int = 0, **options: Any) -> Gates:
    """New gates for a model, initialised from `seed`."""
    return Gates(vit.depth + 2, vit.width, seed=seed, **options).to(vit.device)


class DiffMask(Explainer[Gates]):
    """A trained DiffMask explainer: the gates, the model they were trained for, and how they were trained."""

    kind, weights, title, format = "diffmask", "gates", "DiffMask", 2
    command, need, shipped = "diffmask", ("gates", "them"), ZOO / "pocket-diffmask"

    @property
    def gates(self) -> Gates:
        return self.network

    @staticmethod
    def why_not(vit: Anatomy) -> str | None:
        if vit.depth == 0 or vit.windows > 1 or vit.projection() is None:
            return f"{vit.name} has no plain grid of patch tokens through all its blocks"
        return None

    def options(self) -> dict[str, Any]:
        return {"alpha": self.gates.alpha}

    @staticmethod
    def build(weights: dict[str, Tensor], options: dict[str, Any]) -> Gates:
        gates = Gates(len(weights["beta"]), len(weights["baseline"]), float(options["alpha"]))
        gates.load_state_dict(weights)
        return gates

    def __repr__(self) -> str:
        grid = "x".join(map(str, self.model["patch_grid"]))
        return (
            f"<DiffMask for {self.model['name']}: {self.gates.count} gates of width {self.gates.width}, {grid} patches>"
        )


load = DiffMask.read
