"""`posterior`: effects of patches estimated from a white-box map (the prior) and the scores of masked images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.core.resize import at_size, to_cells
from patchlight.evidence.fills import Fill
from patchlight.evidence.kmeans import draw_initial, kmeans
from patchlight.methods.base import Ask, Estimate, Reads, ablates
from patchlight.methods.maps import estimate as estimate_maps
from patchlight.methods.masking import Ratio, advise_patches
from patchlight.methods.requests import refusal, resolve
from patchlight.methods.sampling import Tolerance, in_rounds
from patchlight.methods.tis import activation_points, block_outputs, sampled_scores

Ridge = Annotated[float, Field(gt=0)] | Literal["likelihood"]
MaskSource = Literal["activations", "grids", "coalitions"]
RATIOS = torch.logspace(-1, 2, 25, dtype=torch.float64)
"""The ratios r = lambda / t for ridge="likelihood", with t the mean eigenvalue of Mc^T Mc."""
TINY = 1e-12
"""Masks with smaller differences are equal."""
GRID = 7
"""Cells along each side of a coarse grid."""
PRIORS = ("fullgrad-plus.libra", "fullgrad-plus", "genatt", "grad")
"""The priors of "auto": the first that works on the model is used."""


@dataclass(frozen=True)
class Posterior:
    """The posterior of patch effects beta, given scores w = c + M beta + noise: a mixture over R values of lambda.

    With Mc^T Mc = U diag(d) U^T, component r is Gaussian with mean `means[:, r]` [B,T,N], covariance
    sigma_r^2 U diag(1 / (d + lambda_r)) U^T and weight `weights[:, r]` [B,T].
    """

    means: Tensor
    weights: Tensor
    noise: Tensor
    """sigma^2 [B,R,T]."""
    ridges: Tensor
    """lambda [B,R]."""
    basis: Tensor
    """U [B,N,K]: the eigenvectors; `values` are the eigenvalues d [B,K]."""
    values: Tensor

    @cached_property
    def mean(self) -> Tensor:
        """[B,T,N]."""
        return (self.weights[..., None] * self.means).sum(1)

    def variance(self) -> Tensor:
        """The variance of the effect of each patch [B,T,N]."""
        prior = 1 / self.ridges[..., None]
        reduction = 1 / (self.values[:, None] + self.ridges[..., None]) - prior
        within = (torch.einsum("bnk,brk->brn", self.basis**2, reduction) + prior).clamp_min(0)
        components = self.noise[..., None] * within[:, :, None] + (self.means - self.mean[:, None]) ** 2
        return (self.weights[..., None] * components).sum(1)


def condition(masks: Tensor, scores: Tensor, prior: Tensor | None = None, ridge: Ridge = 10.0) -> Posterior:
    """The posterior for masks M [B,V,N], scores w [B,V,T] and a prior map P [B,T,N] (None: zero), in float64.

    Masks and scores are centred over the masks. The mean of the prior is mu = a P with a = max(0, f.w / f.f), f = Mc P;
    that of the posterior is beta_r = mu + (Mc^T Mc + lambda_r I)^-1 Mc^T (w - Mc mu) with lambda_r = r tr(Mc^T Mc) / N
    and r = `ridge`. For "likelihood", the values of `RATIOS` are weighted by the marginal likelihood of the scores,
    with the best sigma^2 for each.
    """
    device = torch.device("cpu") if scores.device.type == "mps" else scores.device  # MPS has no float64
    masks, scores = masks.to(device).double(), scores.to(device).double()
    m, w = masks - masks.mean(1, keepdim=True), scores - scores.mean(1, keepdim=True)
    mean, free = w.new_zeros(len(w), w.shape[-1], m.shape[-1]), m.shape[1] - 1
    if prior is not None:
        prior = prior.to(device).double()
        mean, free = _prior_factor(m, w, prior)[..., None] * prior, free - 1
    residual = w - m @ mean.mT
    values, basis = _spectrum(m)
    pulled = basis.mT @ (m.mT @ residual)  # [B,K,T]
    unit = (values.sum(-1) / m.shape[-1]).clamp_min(TINY / 2)
    ridges = (RATIOS.to(w) if ridge == "likelihood" else w.new_tensor([ridge])) * unit[:, None]  # [B,R]
    shrunk = values[:, None] + ridges[..., None]  # [B,R,K]
    squares = (residual**2).sum(1)[:, None] - torch.einsum("bkt,brk->brt", pulled**2, 1 / shrunk)
    noise = squares.clamp_min(1e-30) / max(free, 1)
    likelihood = -0.5 * (max(free, 1) * noise.log() + (shrunk / ridges[..., None]).log().sum(-1, keepdim=True))
    gain = torch.einsum("bnk,brkt->brtn", basis, pulled[:, None] / shrunk[..., None])
    unknown = (unit < TINY) | (free < 1)
    noise = noise.masked_fill(unknown[:, None, None], torch.nan)
    return Posterior(mean[:, None] + gain, likelihood.softmax(1), noise, ridges, basis, values)


def _prior_factor(m: Tensor, w: Tensor, prior: Tensor) -> Tensor:
    """a [B,T]: the non-negative factor with which a prior [B,T,N] best fits the scores w [B,V,T].

    It is 0 if all masks have the same value under the prior, and 1 if all masks are equal.
    """
    f = m @ prior.mT
    square, size = (f * f).sum(1), (m * m).sum((1, 2))[:, None]
    informative = square > 1e-20 * size * (prior * prior).sum(-1)
    scale = (f * w).sum(1) / torch.where(informative, square, 1)
    return torch.where(informative, scale.clamp_min(0), (size < TINY).to(w))


def _spectrum(m: Tensor) -> tuple[Tensor, Tensor]:
    """d [B,K] and U [B,N,K] of m^T m for centred masks m [B,V,N], K = min(V, N), from the smaller Gram matrix."""
    if m.shape[1] >= m.shape[2]:
        values, basis = torch.linalg.eigh(m.mT @ m)
        return values.clamp_min(0), basis
    values, left = torch.linalg.eigh(m @ m.mT)
    seen = values > 1e-10 * values[:, -1:]
    scale = torch.where(seen, values, 1).rsqrt() * seen
    return torch.where(seen, values, 0), m.mT @ left * scale[:, None]


def fields(ask: Ask, source: MaskSource, samples: int) -> Tensor:
    """Values [B,V,N]; a mask shows the patches with the largest ones.

    `activations`: centroids of a k-means of the outputs of all blocks, as in `tis`; `grids`: upsampled coarse random
    grids; `coalitions`: a random number for each patch.
    """
    grid = ask.vit.grid
    if source == "activations":
        points = activation_points(ask)
        return kmeans(points, draw_initial(points.shape[1], samples, ask.seed))
    if source == "coalitions":
        values = torch.rand(samples, ask.vit.cells, generator=ask.generator())
    else:
        coarse = torch.rand(samples, 1, *(min(GRID, side) for side in grid), generator=ask.generator())
        values = at_size(coarse, grid, (1.0,) * len(grid), "bilinear").flatten(1)
    return values.to(ask.images.device).expand(len(ask.images), -1, -1)


def prior_map(ask: Ask, prior: str) -> Tensor | None:
    """The map [B,T,N] of another method for the same images and classes, in patches; None for no prior."""
    return None if prior == "none" else prior_estimate(ask, prior).maps


def prior_estimate(ask: Ask, prior: str, **settings: Any) -> Estimate:
    """The map [B,T,N] of another method, with its error unless it is a map of pixels."""
    score = None if ask.score in ("logit", "probability") else ask.score
    request = resolve(prior, settings, score)
    result = estimate_maps(ask.vit, ask.images, [request], ask.targets, ask.seed)[1][0]
    if request.level == "pixel":
        return Estimate(to_cells(result.maps, ask.vit.grid, ask.vit.extent).flatten(2))
    return Estimate(result.maps.flatten(2), None if result.error is None else result.error.flatten(2))


def _chosen_prior(prior: str, vit: Anatomy) -> str:
    """Resolve the setting `prior`: "auto" is the first of `PRIORS` that works on the model."""
    if prior != "auto":
        return prior
    return next((name for name in PRIORS if refusal(resolve(name).suited(vit), vit) is None), "none")


def _source(masks: MaskSource | Literal["auto"], vit: Anatomy) -> MaskSource:
    if masks != "auto":
        return masks
    return "grids" if vit.hierarchical or vit.depth == 0 else "activations"


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if settings["unit"] == "token" and vit.can_drop is not None:
        return advise_patches(vit.can_drop)
    if settings["masks"] == "activations" and vit.depth == 0:
        return f"{vit.name} is opened as a feature map, without blocks to make masks of; masks='grids' works"
    prior = settings["prior"]
    if prior in ("auto", "none"):
        return None
    if prior.split(".")[0] == "posterior":
        return "it cannot be its own prior; name a one-pass method, such as 'genatt'"
    request = resolve(prior).suited(vit)
    reason = refusal(request, vit)
    return None if reason is None else f"its prior '{prior}' does not work here: {reason}"


def _reads(settings: Settings, vit: Anatomy) -> Reads:
    clustered = settings["samples"] > 0 and _source(settings["masks"], vit) == "activations"
    return block_outputs(vit) if clustered else Reads()


def _depends(settings: Settings) -> object:
    """What the map of the prior depends on besides its settings."""
    if settings["prior"] in ("auto", "none"):
        return None
    request = resolve(settings["prior"])
    return None if request.method.depends is None else request.method.depends(request.settings)


@ablates(
    "posterior",
    paper="Patchlight",
    aliases=("best",),
    stochastic=True,
    exact=False,
    cost="the prior's forward and backward, 1 + samples (128) forwards of half the tokens, and a k-means",
    quick={"samples": 48},
    refuses=_refuses,
    depends=_depends,
    reads=_reads,
)
def posterior(
    ask: Ask,
    samples: Annotated[int, Field(ge=0)] = 128,
    prior: str = "auto",
    masks: MaskSource | Literal["auto"] = "auto",
    keep: Ratio = 0.5,
    unit: Literal["auto", "token", "patch"] = "auto",
    fill: Fill = "zero",
    ridge: Ridge = 10.0,
    tolerance: Tolerance | None = None,
) -> Estimate:
    """Effect of each patch on the score: a gradient map, corrected by the scores of masked images.

        w_j = c + M_j.beta + noise,   beta ~ N(mu, tau^2 I),   mu = a P
        beta = mu + (Mc^T Mc + lambda I)^-1 Mc^T (wc - Mc mu),   lambda = sigma^2 / tau^2 = r tr(Mc^T Mc) / N

    The map is the posterior mean of beta, signed. w_j is the score of the image under mask M_j [N], P is the map of the
    prior, and a is the factor with which it fits the scores best. Mc and wc are centred over the masks; r is `ridge`.
    The error is the standard deviation of the posterior; with fewer than three masks it is not known. All classes have
    the same masks. Without masks, or if all masks are equal, the map is that of the prior.

    Args:
        samples: Number of masks.
        prior: The method whose map is the prior, or "none"; "auto" is 'fullgrad-plus.libra' if it works on the model,
            otherwise another one-pass method.
        masks: The patches that a mask shows: those where a cluster of the blocks' "activations" is largest, as in
            `tis`; those where a coarse random grid is largest ("grids"); or random ones ("coalitions"). "auto":
            activations if the model has one grid of tokens, otherwise grids.
        keep: Share of the patches that a mask shows.
        unit: "token" removes the other patches, "patch" paints them; "auto" removes them if the model can.
        ridge: The ratio r; "likelihood" averages over r from 0.1 to 100, weighted by the marginal likelihood for each
            image and class, which shrinks less and is mostly worse.
    """
    prior_maps = prior_map(ask, _chosen_prior(prior, ask.vit))
    wide = torch.promote_types(ask.vit.dtype, torch.float32)
    if samples == 0:
        if prior_maps is None:
            raise PatchlightError("samples=0 with prior='none' leaves no map; give samples or a prior")
        return Estimate(prior_maps.unflatten(2, ask.vit.grid).to(wide))
    source = fields(ask, _source(masks, ask.vit), samples)
    removed: Literal["token", "patch"] = "patch" if unit == "patch" or ask.vit.can_drop is not None else "token"
    shown = torch.zeros_like(source, dtype=torch.bool)

    def score(images: Tensor, part: slice) -> Tensor:
        index = images.to(source.device)
        scores, shown[index, part] = sampled_scores(ask.of(images), source[index, part], [keep], removed, fill)
        return scores

    def estimate(images: Tensor, scores: Tensor) -> Estimate:
        index = images.to(shown.device)
        priors = None if prior_maps is None else prior_maps[index]
        result = condition(shown[index, : scores.shape[1]], scores, priors, ridge)
        mean, error = (values.unflatten(2, ask.vit.grid).to(wide) for values in (result.mean, result.variance().sqrt()))
        return Estimate(mean, error)

    return in_rounds(ask, source.shape[1], tolerance, score, estimate)
