"""Methods based on gradients of tokens or pixels: plain gradients, averages, and bias terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.registry import Settings
from patchlight.evidence.passes import Pass, in_memory, rows_at_once
from patchlight.evidence.record import Evidence
from patchlight.evidence.runner import PIXELS, LayerJob
from patchlight.methods.base import Ask, Composition, Estimate, LayerMaps, Level, layer_map, own_passes
from patchlight.methods.compositions import FIRST, PLUS, block_index
from patchlight.methods.maps import finish, job
from patchlight.methods.requests import resolve
from patchlight.methods.sampling import GROUPS, Tolerance, in_rounds, jackknife

Reduce = Literal["l2", "l1", "l4", "linf", "sum", "relu-sum", "neg-relu-sum", "top25", "top50", "top75"]
Quadrature = Literal["gausslegendre", "right", "linspace"]
Count = Annotated[int, Field(ge=1)]

_ORDER = {"l1": 1, "l2": 2, "l4": 4, "linf": torch.inf}


def reduced(values: Tensor, reduce: Reduce) -> Tensor:
    """Reduce channels [..., D] to one value: a norm, a sum, or the sum of the positive, negative or largest ones."""
    if reduce in _ORDER:
        norm: Tensor = torch.linalg.vector_norm(values, _ORDER[reduce], -1)
        return norm
    if reduce.startswith("top"):
        count = max(1, round(values.shape[-1] * int(reduce.removeprefix("top")) / 100))
        return values.topk(count, -1).values.sum(-1)
    if reduce == "sum":
        return values.sum(-1)
    return (values if reduce == "relu-sum" else -values).relu().sum(-1)


def input_times_gradient(b: Evidence) -> Tensor:
    """x * g for each channel; shared by the methods of a pass."""
    return b.once("xg", lambda: b.x * b.g)


def token_ixg(b: Evidence) -> Tensor:
    """CAT_l = sum over channels of x_l * g_l [B,N]; shared by the methods of a pass."""
    return b.once("ixg", lambda: input_times_gradient(b).sum(-1))


def degenerate_sum(settings: Settings, vit: Anatomy) -> str | None:
    """Why a signed sum over the channels of a token's gradient is zero; None if it is not."""
    signed = settings["reduce"] == "sum" and settings.get("base", "signed") == "signed"
    if signed and settings.get("level") != "pixel":
        return (
            "the channels of a token's gradient sum to zero in a pre-norm transformer (each layer norm subtracts their "
            "mean), so this map is rounding noise; use reduce='l2'"
        )
    return None


def degenerate_ixg(settings: Settings, vit: Anatomy) -> str | None:
    """Why plain IxG is zero at the input of the last block of a model with CLS pooling; None if it is not."""
    if settings.get("level") == "pixel":
        return None
    start = settings.get("start")
    at_last = start is not None and block_index(start, vit.depth) == vit.depth - 1
    if at_last and settings.get("rule") == "plain" and vit.pooling == "cls":
        return (
            "plain input-times-gradient at the input of the last block is zero up to the layer norm's epsilon, since a "
            "layer norm ignores the scale of its input; use '.libra', or start at an earlier block"
        )
    return None


@layer_map(
    "grad",
    paper="Simonyan et al., 2013",
    unsigned=True,
    aliases=("gradient", "vanillagrad", "saliency"),
    needs={"g"},
    combine=FIRST,
    levels=("token", "pixel"),
    advice=degenerate_sum,
)
def grad(b: Evidence, reduce: Reduce = "l2") -> Tensor:
    """Magnitude of the gradient of the score at each patch or pixel.

        R_i = ||g_l[i]||_2   over the channels, at the input of block `start`, or of the image

    Args:
        reduce: How channels are reduced to one value: a norm ("l1", "l2", "l4", "linf"), "sum" (noise at token level),
            "relu-sum" (of ReLU(g)), "neg-relu-sum" (of ReLU(-g)), or "top25", "top50", "top75" (the sum of the largest
            25, 50, 75 % of the channels).
    """
    return reduced(b.g, reduce)


@layer_map(
    "ixg",
    paper="Shrikumar et al., 2016",
    aliases=("inputxgradient", "input-x-gradient"),
    needs={"x", "g"},
    combine=FIRST,
    levels=("token", "pixel"),
    advice=degenerate_ixg,
)
def ixg(b: Evidence) -> Tensor:
    """Input times gradient of the tokens or pixels.

        R_i = sum_d x_l[i,d] g_l[i,d]   at the input of block `start`, or of the image

    The map is signed. At token level, x_0 includes the position embedding.
    """
    return token_ixg(b)


def _varied_input(ask: Ask, level: Level) -> Tensor:
    """The images [B,C,H,W] for level "pixel", or the tokens x_0 [B,N,D]."""
    if level == "pixel":
        return ask.images
    with torch.no_grad(), ask.vit.steady():
        return ask.vit.embed(ask.images)


def _weighted_sum(
    ask: Ask,
    level: Level,
    variants: Callable[[slice], Tensor],
    weights: Sequence[float] | Tensor,
    job: LayerJob,
    read: Callable[[Pass], Tensor],
) -> Tensor:
    """sum_k w_k read(a pass over variant k of all images); `variants` returns [k,B,...] and is called in order.

    Weights [S,n] result in S sums.
    """
    images = len(ask.images)
    at_once = max(1, rows_at_once(ask.vit) // images)
    factors = torch.as_tensor(weights, dtype=ask.images.dtype).to(ask.images.device)
    count, total = factors.shape[-1], torch.zeros(())

    def run_variants(inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, 1)
        result = ask.run([job], rows) if level == "pixel" else ask.run([job], tokens=rows)
        values: Tensor = read(result).unflatten(0, (-1, images))
        return values

    for begin in range(0, count, at_once):
        part = slice(begin, min(begin + at_once, count))
        values = in_memory(run_variants, variants(part))
        weighted = torch.tensordot(factors[..., part].to(values.dtype), values, 1)
        total = weighted if begin == 0 else total + weighted
    return total


def _gradient_map(ask: Ask, level: Level, values: Tensor, reduce: Reduce) -> Tensor:
    scores = reduced(values, reduce)
    return scores if level == "pixel" else ask.vit.patches(scores)


@own_passes(
    "smoothgrad",
    paper="Smilkov et al., 2017",
    unsigned=True,
    levels=("pixel", "token"),
    cost="samples forwards + samples backwards (50)",
    stochastic=True,
    quick={"samples": 4},
    advice=degenerate_sum,
    presets={
        "idiap": {"samples": 100, "sigma": 0.15, "relative": True, "base": "signed", "reduce": "l1", "level": "pixel"},
        "tis": {"samples": 50, "sigma": 1.0, "relative": False, "base": "abs", "reduce": "sum", "level": "pixel"},
        "skipplus": {"samples": 50, "sigma": 1.0, "relative": False, "base": "abs", "reduce": "sum", "level": "token"},
        "bt": {"samples": 20, "sigma": 0.3859, "relative": False, "base": "signed", "reduce": "sum", "level": "pixel"},
    },
)
def smoothgrad(
    ask: Ask,
    samples: Count = 50,
    sigma: Annotated[float, Field(ge=0)] = 0.15,
    relative: bool = True,
    base: Literal["signed", "abs", "ixg"] = "signed",
    reduce: Reduce = "l1",
    level: Level = "pixel",
    tolerance: Tolerance | None = None,
) -> Estimate:
    """SmoothGrad: gradients averaged over noisy copies of the image.

        R = reduce(mean_k grad s(x + e_k)),   e_k ~ N(0, (sigma range)^2)

    The noise depends on `seed` only, so it is the same for every image. Presets: `idiap` (100 samples), `tis` and
    `skipplus` (captum's noise tunnel, sigma 1), `bt`. One forward and one backward pass per sample.

    Args:
        samples: Number of noisy gradients.
        sigma: Standard deviation of the noise.
        relative: Whether sigma is a fraction of the image's range max - min, as in the paper; otherwise it is absolute.
        base: What is averaged: the gradient ("signed"), its absolute value ("abs"), or noisy input times gradient
            ("ixg"; use it with reduce="sum").
        reduce: How channels are reduced to one value, as in `grad`.
        level: "pixel": noise is added to the image. "token": noise is added to the tokens x_0.
    """
    x = _varied_input(ask, level)
    span = x.flatten(1).amax(1) - x.flatten(1).amin(1) if relative else x.new_ones(len(x))
    deviation = sigma * span.reshape(-1, *[1] * (x.ndim - 1))
    generator = torch.Generator(x.device).manual_seed(ask.seed)

    def draw() -> Tensor:
        # always float32 and sample by sample, so that a seed fixes the noise
        return torch.randn(x.shape[1:], generator=generator, device=x.device, dtype=torch.float32)

    bases: dict[str, Callable[[Evidence], Tensor]] = {"signed": lambda e: e.g, "abs": lambda e: e.g.abs()}
    layer = PIXELS if level == "pixel" else 0
    job = LayerJob(bases.get(base, input_times_gradient), frozenset({"x", "g"}), (layer,))
    counts: list[Tensor] = []

    def score(images: Tensor, part: slice) -> Tensor:
        """Sums of the gradients of at most 16 groups of samples [b,groups,...]."""
        index = images.to(x.device)

        def noisy(samples: slice) -> Tensor:
            noise = torch.stack([draw() for _ in range(samples.start, samples.stop)])
            return x[index] + deviation[index] * noise[:, None].to(x.dtype)

        n = part.stop - part.start
        member = (torch.arange(n) % GROUPS == torch.arange(min(GROUPS, n))[:, None]).double()
        counts.append(member.sum(1))
        return _weighted_sum(ask.of(images), level, noisy, member, job, lambda result: result.at(layer)).transpose(0, 1)

    def estimate(images: Tensor, sums: Tensor) -> Estimate:
        sizes = torch.cat(counts).to(sums)

        def fit(weights: Tensor) -> Tensor:
            mean = torch.tensordot(sums.movedim(1, -1), weights, 1) / (weights @ sizes)
            return _gradient_map(ask, level, mean, reduce)[:, None]

        return jackknife(fit, len(sizes), sums)

    result = in_rounds(ask, samples, tolerance, score, estimate, first=8)
    return replace(result, maps=result.maps[:, 0], error=None if result.error is None else result.error[:, 0])


def nodes(steps: int, quadrature: Quadrature) -> tuple[list[float], list[float]]:
    """The points alpha_k in [0, 1] and weights w_k of a quadrature.

    >>> nodes(2, "right")
    ([0.5, 1.0], [0.5, 0.5])
    """
    if quadrature == "gausslegendre":
        x, w = np.polynomial.legendre.leggauss(steps)
        return list((1 + x) / 2), list(w / 2)
    points = [k / steps for k in range(1, steps + 1)] if quadrature == "right" else list(np.linspace(0, 1, steps))
    return points, [1 / steps] * steps


@own_passes(
    "ig",
    paper="Sundararajan et al., ICML 2017",
    aliases=("integrated-gradients",),
    levels=("token", "pixel"),
    cost="steps forwards + steps backwards",
    quick={"steps": 4},
    presets={
        "tis": {"steps": 50, "quadrature": "gausslegendre", "level": "pixel"},
        "skipplus": {"steps": 50, "quadrature": "gausslegendre", "level": "token"},
        "libragrad": {"steps": 50, "quadrature": "right", "integrand": "ixg", "level": "token"},
    },
)
def ig(
    ask: Ask,
    steps: Count = 50,
    quadrature: Quadrature = "gausslegendre",
    baseline: float = 0.0,
    integrand: str | None = None,
    level: Level = "token",
) -> Tensor:
    """Integrated gradients: gradients averaged along the path from a baseline to the input.

        R = (x - x') * integral over [0,1] of grad s(x' + a (x - x')) da,   summed over the channels

    x are the tokens x_0 (including CLS and the position embedding), or the image at level="pixel". Close to tokens of
    0, the epsilon of the first norm makes s change fast, so a complete token map takes hundreds of steps.

    Args:
        steps: Number K of points on the path.
        quadrature: Gauss-Legendre, the right Riemann sum a_k = k/K ("right"), or equally spaced points including both
            ends, with weights 1/K ("linspace").
        baseline: The constant value of x'.
        integrand: A layer map, with its composition and rule, whose maps along the path of tokens are averaged, as in
            LibraGrad (for ixg this has an additional factor a_k); None: the gradient.
        level: "token": x are the tokens x_0. "pixel": x is the image.
    """
    x = _varied_input(ask, level)
    points, weights = nodes(steps, quadrature)
    span = x - baseline
    alphas = torch.tensor(points, dtype=x.dtype, device=x.device).view(-1, *[1] * x.ndim)

    def path(part: slice) -> Tensor:
        return baseline + alphas[part] * span

    if integrand is not None:
        return _averaged_maps(ask, integrand, level, path, weights)
    layer = PIXELS if level == "pixel" else 0
    job = LayerJob(lambda e: e.g, frozenset({"g"}), (layer,))
    mean = _weighted_sum(ask, level, path, weights, job, lambda result: result.at(layer))
    span = ask.vit.channels_first(span).movedim(1, -1) if level == "pixel" else span
    return _gradient_map(ask, level, mean * span, "sum")


def _averaged_maps(
    ask: Ask, integrand: str, level: Level, path: Callable[[slice], Tensor], weights: Sequence[float]
) -> Tensor:
    request = resolve(integrand).suited(ask.vit)
    if not request.in_pass or request.level != "token" or level != "token":
        raise PatchlightError(
            f"integrand='{integrand}' cannot be averaged along a path; give a layer map of tokens, such as 'ixg'"
        )
    if request.rule.name != "plain":
        ask = replace(ask, rule=request.rule)
    layer_job = job(request, ask.vit)
    return _weighted_sum(ask, level, path, weights, layer_job, lambda result: finish(request, ask.vit, result))


def _with_later_biases(maps: LayerMaps, start: int = 0) -> Tensor:
    """CAT of block `start`, plus the bias terms of this block, of all later blocks and after the last block.

    Args:
        start: The first block; negative numbers count from the last.
    """
    layers = range(block_index(start, maps.vit.depth), maps.vit.depth)
    biases = [maps.lifted(maps.values[k][1], k) for k in layers]
    total = torch.stack([maps.lifted(maps.values[layers[0]][0], layers[0]), *biases]).sum(0)
    end = maps.end_bias()
    return total if end is None else total + end


FULL = Composition(_with_later_biases, lambda depth, s: range(block_index(s["start"], depth), depth), staged=True)


@layer_map(
    "fullgrad",
    paper="Srinivas & Fleuret, NeurIPS 2019, on tokens",
    needs={"x", "g", "bias"},
    combine=FULL,
    composed={"terms": "tail"},
)
def fullgrad(b: Evidence) -> tuple[Tensor, Tensor]:
    """Input times gradient of one block, plus the contributions of all later biases.

        R = CAT_l + sum of the bias maps of blocks k >= l and of the final norm,   l = `start`

    A bias b added to z has the map sum_d b_d (ds/dz)[i,d]. The map is signed and not scaled. Biases after the pooling
    belong to no token and are left out. `.plus` and `.skipplus` sum the maps of several starts, so late biases count
    several times.
    """
    return token_ixg(b), b.bias


def _bias_needs(settings: Settings) -> frozenset[str]:
    return frozenset({"x", "g", "bias"} if settings["include_bias"] else {"x", "g"})


@layer_map(
    "fullgrad-plus",
    paper="SkipPLUS, CVPR-W 2024",
    aliases=("fullgrad+",),
    needs=_bias_needs,
    combine=PLUS,
    adds_end=True,
)
def fullgrad_plus(b: Evidence, include_bias: bool = True) -> Tensor:
    """Input times gradient plus bias contributions, summed over the blocks.

        R = sum_l CAT_l + sum of the bias maps of all blocks and of the final norm

    The map is signed. `.skipplus` sums over the upper half of the blocks. Without biases this is `cat`.

    Args:
        include_bias: Whether the maps of the biases are added.
    """
    return token_ixg(b) + b.bias if include_bias else token_ixg(b)
