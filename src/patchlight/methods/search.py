"""`search`: patches in an order that shows the class early and hides it early, found step by step from a prior map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from patchlight.anatomy.opened import Anatomy
from patchlight.core.registry import Settings
from patchlight.evidence.ablation import Count, PixelMasks
from patchlight.evidence.fills import Fill, fill_images
from patchlight.methods.base import Ask, Estimate, ablates
from patchlight.methods.masking import owners, score_kept
from patchlight.methods.posterior import prior_map
from patchlight.methods.requests import refusal, resolve

Objective = Literal["both", "insertion", "deletion"]
SetFunction = Callable[[Tensor], Tensor]
"""From sets of regions [R,k,n] to their values [R,k]; row r is an image with a class."""


def guided_order(
    value: SetFunction,
    prior: Tensor,
    width: int,
    two_ended: bool = False,
    budget: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> tuple[Tensor, int]:
    """Regions in the order of a greedy search, and how many sets were valued for each row.

    Each step values the shown regions together with each of the `width` remaining regions that the prior [R,n] ranks
    highest, and shows the best one. Equal values, and regions that are left when the budget is spent, follow the prior.

    Args:
        value: The set function.
        prior: Values of the regions [R,n].
        width: Candidates of a step; n of them make the search plain greedy.
        two_ended: After each step, also place one region at the other end of the order: of the `width` lowest by the
            prior, the one that is worth least together with those already placed there (Chen et al., LiMA, 2025).
        budget: Most sets to value for each row; None: no limit.
        stop: Whether to end before the next step, as if the budget were spent.
    """
    remaining = prior.argsort(dim=1, descending=True, stable=True)
    shown = torch.zeros_like(prior, dtype=torch.bool)
    last = torch.zeros_like(shown)
    front, back, valued = list[Tensor](), list[Tensor](), 0

    def place(candidates: Tensor, among: Tensor, sign: int) -> Tensor:
        """The best (sign 1) or worst (sign -1) candidate [R,1], which joins the regions it was valued with."""
        nonlocal valued, remaining
        sets = among[:, None].repeat(1, candidates.shape[1], 1).scatter_(2, candidates[..., None], True)
        best = candidates.gather(1, (sign * value(sets).to(prior.device)).argmax(1, keepdim=True))
        among.scatter_(1, best, True)
        remaining = remaining[remaining != best].view(len(prior), -1)
        valued += candidates.shape[1]
        return best

    while remaining.shape[1] > 1 and (budget is None or valued + min(width, remaining.shape[1]) <= budget):
        if stop is not None and stop():
            break
        front.append(place(remaining[:, :width], shown, 1))
        if two_ended and remaining.shape[1] > width and (budget is None or valued + width <= budget):
            back.append(place(remaining[:, -width:].flip(1), last, -1))
    return torch.cat([*front, remaining, *reversed(back)], 1), valued


def region_members(grid: tuple[int, ...], side: int) -> Tensor:
    """Which patches [n,N] belong to each square (cube) of `side` patches; those at the border may be smaller."""
    of = torch.zeros((), dtype=torch.long)
    for places in (torch.arange(length) // side for length in grid):
        of = of[..., None] * (int(places[-1]) + 1) + places
    of = of.flatten()
    return of == torch.arange(int(of[-1]) + 1)[:, None]


def ordered_map(order: Tensor, members: Tensor, prior: Tensor) -> Tensor:
    """A map [R,N] whose values fall along an order of regions [R,n]; inside a region the prior [R,N] decides."""
    position = order.argsort(1)  # of each region
    region = members.to(torch.uint8).argmax(0)  # of each patch
    inside = prior.argsort(dim=1, descending=True, stable=True).argsort(1)
    places = (position[:, region] * prior.shape[1] + inside).argsort(1).argsort(1)
    return (prior.shape[1] - places).to(prior)


def _set_function(ask: Ask, members: Tensor, objective: Objective, removes: bool, fill: Fill) -> SetFunction:
    """The values [R,k] of sets of regions [R,k,n], R = B T: the score of each row's own class."""
    count, classes = len(ask.images), ask.targets.index.shape[1]
    filling = None if removes else fill_images(fill, ask.images, ask.vit, ask.seed)

    def score(sets: Tensor) -> Tensor:
        kept = (sets.to(members.device).float() @ members.float() > 0).view(count, -1, members.shape[1])  # [B,T k,N]
        if filling is None:
            scores = score_kept(ask, kept)
        else:
            masks = kept.reshape(-1, *ask.vit.grid)
            scores = ask.score_variants(PixelMasks(owners(ask, kept.shape[1]), masks, filling))
        return scores.view(count, classes, -1, classes).diagonal(dim1=1, dim2=3).mT.flatten(0, 1)

    def value(sets: Tensor) -> Tensor:
        if objective == "insertion":
            return score(sets)
        if objective == "deletion":
            return -score(~sets)
        shown, hidden = score(torch.cat([sets, ~sets], 1)).chunk(2, 1)
        return shown - hidden

    return value


def refuse_prior(settings: Settings, vit: Anatomy) -> str | None:
    """Why the method `prior` cannot guide a search on a model."""
    if settings["prior"].split(".")[0] in ("search", "mda"):
        return "'search' and 'mda' cannot be its prior; give another method, such as 'posterior'"
    reason = refusal(resolve(settings["prior"]).suited(vit), vit)
    return None if reason is None else f"its prior '{settings['prior']}' does not work here: {reason}"


def _refuses(settings: Settings, vit: Anatomy) -> str | None:
    if settings["unit"] == "token" and vit.can_drop is not None:
        return f"{vit.can_drop}; unit='patch' works"
    return refuse_prior(settings, vit)


def prior_dependence(settings: Settings) -> object:
    """What the prior's map depends on besides its settings."""
    request = resolve(settings["prior"])
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
)
def search(
    ask: Ask,
    prior: str = "posterior",
    candidates: Count = 8,
    side: Count = 1,
    objective: Objective = "both",
    two_ended: bool = False,
    budget: Annotated[int, Field(ge=0)] | None = None,
    unit: Literal["auto", "token", "patch"] = "auto",
    fill: Fill = "zero",
) -> Estimate:
    """Order of the patches found by a greedy search that a prior map guides.

    The search maximises what insertion and deletion curves measure, so compare it on other metrics as well.

    .. math:: v_k = \\arg\\max_{v \\in C_k} F(S_{k-1} \\cup v), \\qquad F(S) = p(S) - p(V \\setminus S)

    C_k are the remaining patches that the prior ranks highest, and p is the score of the class with only those patches.
    The map holds ranks: the patch that is shown first has the value N, the last one has 1. If each step compares all
    patches, this is the greedy search of SMDL-Attribution with this objective.

    Args:
        prior: The method whose map chooses the candidates.
        candidates: Patches that each step compares.
        side: Side of the squares of patches that are ordered as one; inside a square the prior's order holds.
        objective: "both" is F above, "insertion" is p(S) alone, and "deletion" is -p(V without S) alone.
        two_ended: Also fill the order from its end, which takes half as many steps (LiMA).
        budget: Most sets to score for each image and class, after the prior; the rest follows the prior's order.
        unit: "token" removes hidden patches from the sequence, "patch" paints them with `fill`; "auto" removes them if
            the model allows it.
        fill: What painted patches show.
    """
    maps = prior_map(ask, prior)
    assert maps is not None  # prior="none" is refused: no method has that name
    patches = maps.flatten(0, 1).double().cpu()
    members = region_members(ask.vit.grid, side)
    regions = patches @ members.double().T / members.sum(1)
    removes = unit == "token" or (unit == "auto" and ask.vit.can_drop is None)
    value = _set_function(ask, members, objective, removes, fill)
    sets = None if budget is None else budget // (2 if objective == "both" else 1)
    order, valued = guided_order(value, regions, candidates, two_ended, sets)
    ranks = ordered_map(order, members, patches).view(len(maps), -1, *ask.vit.grid)
    used = valued * (2 if objective == "both" else 1)
    wide = torch.promote_types(ask.vit.dtype, torch.float32)
    return Estimate(ranks.to(ask.images.device, wide), facts={"sets": torch.full((len(maps),), float(used))})
