"""`search`: patches in an order that shows the class early and hides it early, found step by step from a prior map."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.errors import PatchlightError
from patchlight.core.extras import missing_extra
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import Count, PixelMasks, TokenSubsets, free_chunk
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Estimate, ablates
from patchlight.methods.lime import patch_labels, picture
from patchlight.methods.masking import advise_patches, owners, score_kept
from patchlight.methods.orders import Order, SetFunction, complements, guided_order, phased_order
from patchlight.methods.posterior import prior_estimate
from patchlight.methods.requests import Request, refusal, resolve

Objective = Literal["both", "insertion", "deletion"]
Regions = Literal["square", "slic"]
Schedule = Literal["guided", "lazy", "two-ended", "greedy", "phasewin"]
FRESH = 3
"""Candidates that a step of the lazy schedule values."""
RANKINGS = 200
"""Samples of the prior's map from which the error of a rank is computed."""


def region_members(grid: tuple[int, ...], side: int) -> Tensor:
    """Which patches [n,N] belong to each square (cube) of `side` patches; those at the border may be smaller."""
    of = torch.zeros((), dtype=torch.long)
    for places in (torch.arange(length) // side for length in grid):
        of = of[..., None] * (int(places[-1]) + 1) + places
    of = of.flatten()
    return of == torch.arange(int(of[-1]) + 1)[:, None]


def slic_regions(image: Tensor, vit: Anatomy, count: int, compactness: float = 10.0) -> Tensor:
    """About `count` SLIC segments [H,W] of one normalised image; a large compactness makes them nearly square."""
    try:
        from skimage.segmentation import slic
    except ImportError:
        raise missing_extra("SLIC regions need", "scikit-image", "lime", "use regions='square'") from None
    found = slic(picture(image, vit), n_segments=count, compactness=compactness, start_label=0)
    labels: Tensor = torch.from_numpy(found).long()
    return labels


def segment_members(labels: Tensor, vit: Anatomy) -> Tensor:
    """Which patches [n,N] belong to each segment of labels [H,W]: each patch to the one that covers most of it."""
    patch = patch_labels(vit, tuple(labels.shape)).flatten()
    shared = torch.zeros(int(labels.max()) + 1, vit.cells)
    shared.index_put_((labels.flatten(), patch), torch.ones(len(patch)), accumulate=True)
    members = shared.argmax(0) == torch.arange(len(shared))[:, None]
    return members[members.any(1)]


def ordered_map(order: Tensor, members: Tensor, prior: Tensor) -> Tensor:
    """A map [R,N] whose values fall along an order of regions [R,n]; inside a region the prior [R,N] decides."""
    position = order.argsort(1)  # of each region
    region = members.to(torch.uint8).argmax(0)  # of each patch
    inside = prior.argsort(dim=1, descending=True, stable=True).argsort(1)
    places = (position[:, region] * prior.shape[1] + inside).argsort(1).argsort(1)
    return (prior.shape[1] - places).to(prior)


def rank_error(values: Tensor, error: Tensor, generator: torch.Generator) -> Tensor:
    """The standard deviation of the rank of each of independent normal values [R,U] with these deviations, sampled."""
    noise = torch.randn(RANKINGS, 1, values.shape[1], generator=generator, dtype=values.dtype)
    return (values + error * noise).argsort(2).argsort(2).to(values.dtype).std(0)


def set_function(ask: Ask, members: Tensor, objective: Objective, removes: bool, fill: Fill) -> SetFunction:
    """The values [R,k] of sets of regions [R,k,m], R = B T: the score of each row's own class.

    Regions of one size are removed without waiting for the accelerator.
    """
    ask = replace(ask, ablation_settings={**ask.ablation_settings, "chunk": ask.ablation.chunk or free_chunk(ask.vit)})
    count, classes = len(ask.images), ask.targets.index.shape[1]
    sizes = members.sum(1)
    even = bool((sizes == sizes[0]).all())
    members = members.to(ask.images.device)
    cells = members.nonzero()[:, 1].view(len(members), -1) if even else None  # [n,size]
    filling = None if removes else fill_images(fill, ask.images, ask.vit, ask.seed)

    def kept(sets: Tensor) -> Tensor:
        inside = torch.zeros(*sets.shape[:2], len(members), device=sets.device).scatter_(2, sets, 1)
        return inside @ members.float() > 0  # [R,k,N]

    def score(groups: list[Tensor]) -> Tensor:
        """Scores [G,R,k] of groups of sets."""
        each = groups[0].shape[1]
        owner = owners(ask, classes * each)
        if filling is not None:
            masks = [kept(sets).view(-1, *ask.vit.grid) for sets in groups]
            scores = ask.score_variants([PixelMasks(owner, some, filling) for some in masks])
        elif cells is not None:
            scores = ask.score_variants([TokenSubsets(owner, cells[sets].flatten(2).flatten(0, 1)) for sets in groups])
        else:
            shown = torch.cat([kept(sets).view(count, classes * each, -1) for sets in groups], 1)
            scores = score_kept(ask, shown).view(count, len(groups), -1).transpose(0, 1)
        scores = scores.reshape(len(groups), count, classes, each, classes)
        return scores.diagonal(dim1=2, dim2=4).mT.flatten(1, 2)

    def value(sets: Tensor) -> Tensor:
        if objective == "insertion":
            return score([sets])[0]
        hidden = complements(sets, len(members))
        if objective == "deletion":
            return score([hidden])[0].neg().add(1)
        shown, left = score([sets, hidden]).unbind(0)
        return shown + (1 - left)

    return value


def refuse_prior(settings: Settings, vit: Anatomy) -> str | None:
    """Why the method `prior` cannot guide a search on a model."""
    if settings["prior"].split(".")[0] in ("search", "mda"):
        return "'search' and 'mda' cannot be its prior; give another method, such as 'posterior'"
    reason = refusal(_prior(settings).suited(vit), vit)
    return None if reason is None else f"its prior '{settings['prior']}' does not work here: {reason}"


def _prior(settings: Settings) -> Request:
    return resolve(settings["prior"], prior_settings(settings["prior"], settings.get("samples")))


def prior_settings(prior: str, samples: int | None) -> dict[str, int]:
    """The number of samples of a prior that samples; its default if it is None."""
    return {} if samples is None or "samples" not in resolve(prior).settings else {"samples": samples}


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if settings["unit"] == "token" and vit.can_drop is not None:
        return advise_patches(vit.can_drop)
    if settings["regions"] == "slic" and (len(vit.grid) != 2 or vit.layout.inputs != "images"):
        return f"SLIC segments are made of pictures, and {vit.name} takes {vit.layout.inputs}; regions='square' works"
    return refuse_prior(settings, vit)


def prior_dependence(settings: Settings) -> object:
    """What the prior's map depends on besides its settings."""
    request = _prior(settings)
    return None if request.method.depends is None else request.method.depends(request.settings)


@ablates(
    "search",
    paper="Chen et al., ICLR 2024 and arXiv 2504.00470; guided by a prior map: Patchlight",
    stochastic=True,
    exact=False,
    nonnegative=True,
    cost="the prior (posterior), and 2 candidates (8) forwards for each patch, of half the tokens on average",
    quick={"candidates": 2, "prior": "random", "budget": 24},
    refuses=_refuses,
    depends=prior_dependence,
    presets={"thorough": {"samples": 1024}},
)
def search(
    ask: Ask,
    prior: str = "posterior",
    samples: Annotated[int, Field(ge=0)] = 128,
    candidates: Count = 8,
    schedule: Schedule = "guided",
    regions: Regions = "square",
    side: Count = 1,
    objective: Objective = "both",
    budget: Annotated[int, Field(ge=0)] | None = None,
    unit: Literal["auto", "token", "patch"] = "auto",
    fill: Fill = "zero",
) -> Estimate:
    """Order of the patches from a greedy search, guided by a prior map.

    The search optimises the quantity of insertion and deletion, so evaluate it with other metrics as well.

    .. math:: v_k = \\arg\\max_{v \\in C_k} F(S_{k-1} \\cup v), \\qquad F(S) = p(S) + 1 - p(V \\setminus S)

    C_k are the remaining patches that the prior ranks highest, and p is the score of the class with only those patches.
    The map contains ranks: the patch that is shown first has the value N, the last one 1. Patches beyond the budget
    keep the order of the prior. If the prior has standard errors, these patches have the error of their rank, for
    independent errors of the prior. Preset: `thorough` (1,024 masks of `posterior`).

    Args:
        prior: The method whose map chooses the candidates.
        samples: Number of samples of a prior that samples: masks of `posterior`.
        candidates: Number of patches compared in each step.
        schedule: "guided" is the formula. "lazy" scores only 3 candidates in each step, new ones and those that were
            best when last valued. "two-ended" also fills the order from its end, in half as many steps (LiMA). "greedy"
            compares all patches (SMDL-Attribution). "phasewin" accepts several patches at once (PhaseWin, our reading);
            the prior only breaks its ties.
        regions: The units of the order: "square" of patches, or "slic", superpixels (needs the extra `lime`); the
            patches of a region follow each other in the prior's order.
        side: Side of the squares, in patches; there are as many superpixels as squares.
        objective: "both" is F above, "insertion" is p(S) alone, and "deletion" is 1 - p(V without S) alone.
        budget: Maximum number of forwards per image and class, after the prior; other patches keep the prior's order.
        unit: "token" removes hidden patches from the sequence, "patch" paints them with `fill`; "auto" removes them if
            the model allows it.
        fill: What painted patches show.
    """
    if schedule == "phasewin" and ask.score != "probability":
        raise PatchlightError("schedule='phasewin' compares ratios of probabilities; leave out score, or use 'guided'")
    prior_result = prior_estimate(ask, prior, **prior_settings(prior, samples))
    removes = unit == "token" or (unit == "auto" and ask.vit.can_drop is None)
    calls = 2 if objective == "both" else 1
    sets = None if budget is None else budget // calls
    squares = region_members(ask.vit.grid, side)
    maps, errors, valued = list[Tensor](), list[Tensor](), list[int]()
    for row_ask, patches, error in _rows(ask, prior_result, alone=regions == "slic" or schedule == "phasewin"):
        members = squares
        if regions == "slic":
            members = segment_members(slic_regions(row_ask.images[0], ask.vit, len(squares)), ask.vit)
        value = set_function(row_ask, members, objective, removes, fill)
        by_prior = (patches @ members.double().T / members.sum(1)).argsort(dim=1, descending=True, stable=True)
        ranks = -by_prior.argsort(1).to(ask.images.device, torch.float32)
        if schedule == "phasewin":
            order = phased_order(value, ranks, sets)
        else:
            width, fresh = {"greedy": (len(members), None), "lazy": (candidates, FRESH)}.get(
                schedule, (candidates, None)
            )
            order = guided_order(value, ranks, width, fresh, schedule == "two-ended", sets)
        maps.append(ordered_map(order.regions.cpu(), members, patches))
        errors.append(_left_error(order, patches, error, ask.generator()))
        valued += [calls * order.valued] * len(patches)
    wide = torch.promote_types(ask.vit.dtype, torch.float32)
    shape = (len(ask.images), -1, *ask.vit.grid)
    has_error = (
        prior_result.error is not None and budget is not None and len(squares) == ask.vit.cells and regions == "square"
    )
    return Estimate(
        torch.cat(maps).view(shape).to(ask.images.device, wide),
        torch.cat(errors).view(shape).to(ask.images.device, wide) if has_error else None,
        facts={"forwards": torch.tensor(valued, dtype=torch.float).view(len(ask.images), -1).amax(1)},
    )


def _rows(ask: Ask, prior: Estimate, alone: bool) -> Iterator[tuple[Ask, Tensor, Tensor]]:
    """The prior's map and error [R,N] of all images and classes together, or `alone` of each, with its ask."""
    maps = prior.maps.double().cpu()
    errors = torch.full_like(maps, torch.nan) if prior.error is None else prior.error.double().cpu()
    if not alone:
        yield ask, maps.flatten(0, 1), errors.flatten(0, 1)
        return
    for i, t in itertools.product(range(len(maps)), range(maps.shape[1])):
        image_ask = ask.of(torch.tensor([i]))
        yield replace(image_ask, targets=image_ask.targets.column(t)), maps[i, t][None], errors[i, t][None]


def _left_error(order: Order, prior: Tensor, error: Tensor, generator: torch.Generator) -> Tensor:
    """The error of the ranks [R,N] of patches that were not searched; NaN for the others."""
    left = order.regions[:, order.first : order.last].cpu()
    out = torch.full_like(prior, torch.nan)
    if prior.shape[1] != order.regions.shape[1] or left.shape[1] == 0:
        return out
    return out.scatter_(1, left, rank_error(prior.gather(1, left), error.gather(1, left), generator))
