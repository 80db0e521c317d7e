"""Sanity checks: whether a map depends on the weights of the model and on the class."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from patchlight.anatomy.load import wrap
from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError, Unsupported
from patchlight.core.resize import to_pixels
from patchlight.core.statistics import constant, spearman
from patchlight.core.targets import Targets
from patchlight.evidence.ablation import Count
from patchlight.metrics.base import Measure, Measured, reasons_where, register_metric
from patchlight.metrics.localisation import unit_range

Similarity = Annotated[
    Literal["spearman", "spearman-abs", "ssim", "hog"],
    Field(
        description="Spearman correlation of the maps or of their absolute values; or SSIM, or Spearman correlation of "
        "HOGs, of the maps scaled to [0, 1] at image size."
    ),
]
Window = Annotated[Literal["gaussian", "uniform"], Field(description="The window of SSIM.")]
Cell = Annotated[int, Field(ge=1, description="Pixels along each side of a cell of HOG.")]
Order = Literal["cascading", "independent", "bottom-up"]
Denoise = Annotated[int, Field(ge=1)]
Stage = tuple[str, list[str]]
"""A name, and the parameters that are randomised together."""


def ssim(a: Tensor, b: Tensor, window: Window = "gaussian") -> Tensor:
    """Structural similarity [B] of maps [B,H,W] in [0, 1], averaged over the windows inside the map.

    The window is an 11 x 11 Gaussian of sigma 1.5, or a uniform 7 x 7; covariances are sample covariances.
    """
    reach = 5 if window == "gaussian" else 3
    side = 2 * reach + 1
    if min(a.shape[-2:]) < side:
        raise PatchlightError(f"SSIM needs maps of at least {side} pixels per side; these have {min(a.shape[-2:])}")
    line = torch.arange(-reach, reach + 1, device=a.device, dtype=torch.float64)
    line = torch.exp(-0.5 * (line / 1.5) ** 2) if window == "gaussian" else torch.ones_like(line)
    kernel = (line[:, None] * line / line.sum() ** 2)[None, None]
    a, b = a.double(), b.double()
    planes = torch.stack([a, b, a * a, b * b, a * b], 1).flatten(0, 1)[:, None]
    mean_a, mean_b, aa, bb, ab = F.conv2d(planes, kernel).unflatten(0, (-1, 5))[:, :, 0].unbind(1)
    sample = side**2 / (side**2 - 1)
    var_a, var_b, cov = sample * (aa - mean_a**2), sample * (bb - mean_b**2), sample * (ab - mean_a * mean_b)
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    local: Tensor = luminance * (2 * cov + c2) / (var_a + var_b + c2)
    return local.mean((1, 2))


def hog(maps: Tensor, cell: int = 16, bins: int = 9, block: int = 3) -> Tensor:
    """Histograms of oriented gradients [B,F] of maps [B,H,W] in float64.

    Central differences; `bins` unsigned orientations per cell of `cell` x `cell` pixels, weighted by magnitude; blocks
    of `block` x `block` cells (fewer if the map has fewer), normalised by L2, clipped at 0.2 and normalised again.
    """
    batch, height, width = maps.shape
    rows, columns = height // cell, width // cell
    if min(rows, columns) < 1:
        raise PatchlightError(
            f"HOG cells of {cell} pixels do not fit into maps of {height}x{width}; give a smaller cell"
        )
    maps = maps.double()
    down, right = torch.zeros_like(maps), torch.zeros_like(maps)
    down[:, 1:-1] = maps[:, 2:] - maps[:, :-2]
    right[:, :, 1:-1] = maps[:, :, 2:] - maps[:, :, :-2]
    angle = torch.rad2deg(torch.atan2(down, right)) % 180
    which = (angle * bins / 180).long().clamp_max(bins - 1)
    votes = maps.new_zeros(batch, bins, height, width).scatter_(1, which[:, None], torch.hypot(down, right)[:, None])
    cells = F.avg_pool2d(votes[:, :, : rows * cell, : columns * cell], cell)
    tall, wide = min(block, rows), min(block, columns)
    blocks = cells.unfold(2, tall, 1).unfold(3, wide, 1).permute(0, 2, 3, 4, 5, 1).flatten(3)
    for limit in (0.2, torch.inf):
        blocks = (blocks / (blocks.square().sum(-1, keepdim=True) + 1e-10).sqrt()).clamp_max(limit)
    return blocks.flatten(1)


def similar(
    ask: Measure, a: Tensor, b: Tensor, similarity: Similarity, window: Window = "gaussian", cell: int = 16
) -> Tensor:
    """The similarity [B] of maps [B,h,w]; for SSIM and HOG they are scaled to [0, 1] at image size."""
    if similarity == "spearman":
        return spearman(a.flatten(1), b.flatten(1))
    if similarity == "spearman-abs":
        return spearman(a.abs().flatten(1), b.abs().flatten(1))
    if ask.vit.layout.inputs != "images":
        takes = f"{ask.vit.name} takes {ask.vit.layout.inputs}"
        raise Unsupported(f"similarity='{similarity}' compares pictures, and {takes}; use 'spearman'")
    a, b = (unit_range(to_pixels(m.double(), ask.size, ask.vit.extent)) for m in (a, b))
    return ssim(a, b, window) if similarity == "ssim" else spearman(hog(a, cell), hog(b, cell))


def stages(vit: Anatomy) -> list[Stage]:
    """The stages of a model, in the order of randomisation, with the names of their parameters.

    Head, final norm, blocks from last to first, embedding. Gradients show which parameters the classifier reads after
    the blocks; all remaining ones (patch projection, prefix tokens, positions) belong to the embedding.
    """
    named = {name.replace(".function.", "."): p for name, p in vit.net.named_parameters() if p.is_floating_point()}
    image = torch.zeros(1, *vit.input_shape, device=vit.device, dtype=vit.dtype)
    with torch.enable_grad():
        vit.net.requires_grad_(True)
        last, between = vit.run(vit.embed(image)), [set[str]() for _ in range(vit.depth)]
        for i in filter(vit.changes, range(vit.depth)):
            between[i] = _with_gradient(named, vit.merge(i, vit.run(vit.embed(image), stop=i).detach()))
        read = _with_gradient(named, vit.readout(last.detach()))
        needed = _with_gradient(named, vit.readout(last))
        vit.net.requires_grad_(False)
    norms = {
        f"{where}.{name}".lstrip(".")
        for where, module in vit.model.named_modules()
        if "norm" in type(module).__name__.casefold()
        for name, _ in module.named_parameters(recurse=False)
    }
    order: list[Stage] = [("head", sorted(read - norms)), ("norm", sorted(read & norms))]
    for i in reversed(range(vit.depth)):
        inside = {id(p) for p in vit.blocks[i].parameters()}
        order.append((f"block {i}", [name for name, p in named.items() if id(p) in inside or name in between[i]]))
    listed = {name for _, names in order for name in names}
    order.append(("embed", [name for name in named if name not in listed and (vit.head is None or name in needed)]))
    return [(name, members) for name, members in order if members]


def _with_gradient(named: Mapping[str, Tensor], output: Tensor) -> set[str]:
    """The names of the parameters that an output depends on."""
    if not output.requires_grad:  # a head without learnt parameters
        return set()
    gradients = torch.autograd.grad(output.sum(), list(named.values()), allow_unused=True)
    return {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}


def twin(vit: Anatomy) -> Anatomy:
    """A copy of the model with its own parameters."""
    if vit.library in ("described", "own", "bag"):
        if not vit.castable:
            raise Unsupported(
                f"{vit.name} was described by functions, which a copy cannot use; describe it by bound methods "
                f"of the model (embed=model.embed, readout=model.readout)"
            )
        other = copy.deepcopy(vit)
        other.model.eval().requires_grad_(False)
        return other
    options: dict[str, Any] = {"stage": getattr(vit, "stage", None)} if vit.hierarchical else {}
    options |= {"sigmoid": vit.sigmoid, "regression": vit.outputs.kind == "none"} if vit.head is None else {}
    options |= {} if vit.labels is None or vit.head is not None else {"labels": vit.labels}
    model = copy.deepcopy(vit.model).eval().requires_grad_(False)
    copied = wrap(model, vit.head, name=vit.name, preprocess=vit.preprocess, **options)
    return copied if vit.head is None else copied.ask(vit.head, bind=False)


def random_parameters(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Random values of all parameters, sampled from the seed on the CPU.

    Modules use their `reset_parameters`; other parameters (class token, positions) are normal with deviation 0.02.
    """
    model = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            parameters = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
            reset = getattr(module, "reset_parameters", None)
            for parameter in parameters:
                nn.init.trunc_normal_(parameter, std=0.02)
            if parameters and callable(reset):
                reset()
    return {name: p.detach() for name, p in model.named_parameters()}


def _random_twin(ask: Measure) -> tuple[Anatomy, list[Stage], dict[str, Tensor]]:
    """A copy of the model, its stages, and random values of its parameters."""
    if "twin" not in ask.kept:
        other = twin(ask.vit)
        ask.kept["twin"] = other, stages(other), random_parameters(ask.vit.model, ask.seed)
    cached: tuple[Anatomy, list[Stage], dict[str, Tensor]] = ask.kept["twin"]
    return cached


def _set_parameters(vit: Anatomy, names: Iterable[str], values: Mapping[str, Tensor]) -> None:
    parameters = dict(vit.model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].copy_(values[name])


def _denoised_maps(ask: Measure, vit: Anatomy, denoise: int) -> Tensor:
    """The mean of the maps of each image and of `denoise` - 1 copies with noise, a tenth of the range of its values."""
    maps = ask.explain(vit, ask.images, ask.targets, ask.seed)
    if denoise == 1:
        return maps
    total, generator = maps.double(), torch.Generator().manual_seed(ask.seed)
    flat = ask.images.flatten(1)
    deviation = (flat.amax(1) - flat.amin(1)).view(-1, *[1] * (ask.images.ndim - 1)) / 10
    for _ in range(denoise - 1):
        noise = torch.randn(ask.images.shape[1:], generator=generator).to(ask.images)
        total += ask.explain(vit, ask.images + deviation * noise, ask.targets, ask.seed)
    return total / denoise


def _randomised_maps(ask: Measure, order: Order, denoise: int) -> tuple[Tensor, list[Tensor]]:
    """The original maps, and those after each stage."""
    other, parts, random = _random_twin(ask)
    original = dict(ask.vit.model.named_parameters())
    first = ask.maps if ask.current and denoise == 1 else _denoised_maps(ask, ask.vit, denoise)
    maps = []
    _set_parameters(other, original, original)
    for _, names in reversed(parts) if order == "bottom-up" else parts:
        _set_parameters(other, names, random)
        maps.append(_denoised_maps(ask, other, denoise))
        if order == "independent":
            _set_parameters(other, names, original)
    return first, maps


@register_metric(
    "randomisation",
    paper="Adebayo et al., NeurIPS 2018",
    aliases=("mprt",),
    higher_is_better=False,
    bounds=(-1.0, 1.0),
    explains=True,
    stochastic=True,
    cost="depth + 3 explanations, times denoise (1)",
    presets={"smprt": {"order": "bottom-up", "denoise": 50}},
    quick={"denoise": 1},
)
def randomisation(
    ask: Measure,
    order: Order = "cascading",
    similarity: Similarity = "spearman",
    ssim_window: Window = "gaussian",
    cell: Cell = 16,
    denoise: Denoise = 1,
) -> Measured:
    """Similarity of the map to the maps of the same model with randomised layers.

    The value is the mean over the stages: head, final norm, blocks from last to first, embedding. A map that does not
    change does not explain the model, so lower is better. Random weights are sampled from the seed and set in a copy of
    the model. Curve [B,S+1]: 1 for the original model, then one value per stage. If the map of a stage is constant, its
    Spearman correlation is 0; if the map itself is constant, there is no value. All similarities share the depth + 3
    explanations. Preset `smprt` (Hedström et al., 2024) begins at the embedding and averages the maps of 50 copies.

    Args:
        order: "cascading" keeps earlier stages random, "bottom-up" does so from the embedding to the head,
            "independent" randomises one stage at a time.
        denoise: Number of copies of each image whose maps are averaged; all but one have noise.
    """
    first, maps = ask.once(("randomised", order, denoise), lambda: _randomised_maps(ask, order, denoise))
    curve = torch.stack([similar(ask, first, other, similarity, ssim_window, cell) for other in (first, *maps)], 1)
    result = _similarity_result(first, curve[:, 1:].mean(1), curve, torch.arange(curve.shape[1]))
    finite = torch.stack([m.flatten(1).isfinite().all(1) for m in maps]).all(0)
    not_finite = reasons_where(~finite, "the map of a randomised model contains NaN or infinite values")
    return replace(result, reasons={**result.reasons, **not_finite})


def value_entropy(maps: Tensor, bins: int = 100) -> Tensor:
    """Entropy [B] in nats of the histogram of each map's values, with bins from its lowest to its highest value."""
    scaled = unit_range(maps).flatten(1)
    place = (scaled.nan_to_num() * bins).long().clamp_max(bins - 1)
    share = torch.zeros(len(scaled), bins, dtype=torch.float64, device=scaled.device)
    share = share.scatter_add_(1, place, torch.ones_like(scaled)) / scaled.shape[1]
    return torch.where(scaled.isfinite().all(1), torch.special.entr(share).sum(1), torch.nan)


@register_metric(
    "random-entropy",
    paper="Hedström et al., 2024",
    aliases=("emprt",),
    higher_is_better=True,
    bounds=(-1.0, float("inf")),
    explains=True,
    stochastic=True,
    cost="2 explanations",
)
def random_entropy(ask: Measure, bins: Annotated[int, Field(ge=2)] = 100) -> Measured:
    """Relative increase of the entropy of the map when all weights of the model are random.

        (H(a_random) - H(a)) / H(a),   H the entropy of the histogram of the map's values

    The positions of the values do not count: a permutation of the values of a map has 0. A constant map has an entropy
    of 0 and no value.

    Args:
        bins: Number of bins of the histogram, from the lowest to the highest value of the map.
    """
    other, parts, random = _random_twin(ask)
    original = dict(ask.vit.model.named_parameters())
    _set_parameters(other, original, original)
    _set_parameters(other, [name for _, names in parts for name in names], random)
    maps = ask.explain(other, ask.images, ask.targets, ask.seed)
    before = value_entropy(ask.maps, bins)
    values = (value_entropy(maps, bins) - before) / before
    reasons = reasons_where(values.isnan(), "the map of the randomised model contains NaN or infinite values")
    reasons |= reasons_where(before == 0, "the map is constant: its entropy is 0")
    return Measured(values, reasons=reasons)


@register_metric(
    "random-floor", paper="Adebayo et al., NeurIPS 2018", higher_is_better=False, bounds=(-1.0, 1.0), stochastic=True
)
def random_floor(
    ask: Measure,
    samples: Count = 10,
    similarity: Similarity = "spearman",
    ssim_window: Window = "gaussian",
    cell: Cell = 16,
) -> Measured:
    """Mean similarity of the map to random maps: a reference value for `randomisation`.

    The random maps are uniform in [0, 1], at the resolution of the map.

    Args:
        samples: Number of random maps.
    """
    shape = ask.maps.shape
    noise = torch.rand(samples, *shape[1:], generator=torch.Generator().manual_seed(ask.seed)).to(ask.maps)
    values = [similar(ask, ask.maps, random.expand(shape), similarity, ssim_window, cell) for random in noise]
    return _similarity_result(ask.maps, torch.stack(values, 1).mean(1))


@register_metric(
    "class-similarity",
    paper="Sixt et al., ICML 2020",
    aliases=("random-logit",),
    higher_is_better=False,
    bounds=(-1.0, 1.0),
    explains=True,
    stochastic=lambda settings: settings["other"] == "random",
    cost="1 forward and 1 explanation",
    presets={"sixt": {"other": "random", "similarity": "ssim"}},
)
def class_similarity(
    ask: Measure,
    other: Literal["runner-up", "random"] = "runner-up",
    similarity: Similarity = "spearman",
    ssim_window: Window = "gaussian",
    cell: Cell = 16,
) -> Measured:
    """Similarity of the map to the map of another class of the same image.

    Lower is better, because a map should depend on the class. A method that ignores the class has 1.

    Args:
        other: The other class: the most probable one besides the class of the map, or a random one.
    """
    count, index = ask.vit.outcomes, ask.targets.index.cpu()
    if count < 2:
        raise Unsupported(f"{ask.vit.name} has one class, so there is no other class to explain")
    if other == "random":
        offset = torch.randint(1, count, (1,), generator=torch.Generator().manual_seed(ask.seed))
        rival = (index + offset) % count
    else:
        logits = ask.logits().cpu()
        binary = logits.shape[1] == 1
        rival = 1 - index if binary else logits.scatter(1, index, -torch.inf).argmax(1, keepdim=True)
    maps = ask.explain(ask.vit, ask.images, Targets(rival), ask.seed)
    return _similarity_result(ask.maps, similar(ask, ask.maps, maps, similarity, ssim_window, cell))


def _similarity_result(maps: Tensor, values: Tensor, curve: Tensor | None = None, x: Tensor | None = None) -> Measured:
    reasons = reasons_where(constant(maps.flatten(1)), "the map is constant, so nothing can be similar to it")
    return Measured(values, curve, x, reasons=reasons)
