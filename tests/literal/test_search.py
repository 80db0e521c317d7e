"""`search` against searches written out, and what it promises in games with a known answer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.methods.search import guided_order, ordered_map, region_members
from tests.families import images, shared

SetValue = Callable[[frozenset[int]], float]


def as_function(value: SetValue) -> Callable[[Tensor], Tensor]:
    """A value of Python sets as a function of indicators [R,k,n]."""

    def of_sets(sets: Tensor) -> Tensor:
        rows = [[value(frozenset(one.nonzero()[:, 0].tolist())) for one in row] for row in sets]
        return torch.tensor(rows, dtype=torch.float64)

    return of_sets


def random_game(players: int, seed: int) -> SetValue:
    """A table of random values of every set."""
    table = torch.rand(2**players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda members: float(table[sum(2**i for i in members)])


def greedy(value: SetValue, players: int) -> list[int]:
    order: list[int] = []
    while len(order) < players:
        rest = [i for i in range(players) if i not in order]
        order.append(max(rest, key=lambda i: value(frozenset([*order, i]))))
    return order


def lima(value: SetValue, prior: list[float], pending: int) -> list[int]:
    """Both ends: the best of the `pending` highest by the prior goes first, the worst of the lowest goes last."""
    front: list[int] = []
    back: list[int] = []
    rest = sorted(range(len(prior)), key=lambda i: -prior[i])
    while len(rest) > 1:
        front.append(max(rest[:pending], key=lambda i: value(frozenset([*front, i]))))
        rest.remove(front[-1])
        if len(rest) > pending:
            back.append(min(rest[-pending:], key=lambda i: value(frozenset([*back, i]))))
            rest.remove(back[-1])
    return [*front, *rest, *reversed(back)]


@pytest.mark.parametrize("seed", range(5))
def test_a_width_of_all_regions_is_greedy(seed: int) -> None:
    game, prior = random_game(7, seed), torch.rand(1, 7, dtype=torch.float64)
    order, valued = guided_order(as_function(game), prior, width=7)
    assert order[0].tolist() == greedy(game, 7)
    assert valued == sum(range(2, 8)), "the last region needs no value"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pending", [1, 3, 8])
def test_two_ends(seed: int, pending: int) -> None:
    game, prior = random_game(8, seed), torch.rand(1, 8, generator=torch.Generator().manual_seed(seed)).double()
    order, _ = guided_order(as_function(game), prior, pending, two_ended=True)
    assert order[0].tolist() == lima(game, prior[0].tolist(), pending)


@pytest.mark.parametrize("two_ended", [False, True])
def test_an_additive_game_is_sorted(two_ended: bool) -> None:
    effects = torch.tensor([[0.3, -0.1, 0.7, 0.05, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)
    order, _ = guided_order(lambda sets: (sets * effects[:, None]).sum(-1), effects * 0 - 1, 5, two_ended)
    assert order.tolist() == effects.argsort(descending=True).tolist()


def test_greedy_covers_most_of_what_can_be_covered() -> None:
    """A coverage function is monotone and submodular: each prefix has at least 1 - 1/e of the best set of its size."""
    generator = torch.Generator().manual_seed(0)
    covers = torch.rand(6, 12, generator=generator) < 0.3
    value = as_function(lambda members: float(covers[list(members)].any(0).sum()) if members else 0.0)
    order, _ = guided_order(value, torch.zeros(1, 6).double(), 6)
    for size in range(1, 7):
        best = max(float(covers[list(some)].any(0).sum()) for some in itertools.combinations(range(6), size))
        assert float(covers[order[0, :size]].any(0).sum()) >= (1 - 1 / torch.e) * best


def test_a_budget_leaves_the_rest_to_the_prior() -> None:
    game, prior = random_game(6, 1), torch.tensor([[6.0, 5, 4, 3, 2, 1]]).double()
    order, valued = guided_order(as_function(game), prior, width=2, budget=4)
    full, _ = guided_order(as_function(game), prior, width=2)
    assert valued == 4
    assert order[0, :2].tolist() == full[0, :2].tolist()
    assert order[0, 2:].tolist() == sorted(order[0, 2:].tolist())
    assert guided_order(as_function(game), prior, 2, budget=0)[0].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_regions_are_squares_and_the_prior_orders_inside_them() -> None:
    members = region_members((3, 5), 2)
    assert members.sum(0).tolist() == [1] * 15
    assert members.sum(1).tolist() == [4, 4, 2, 2, 2, 1]
    prior = torch.arange(15.0)[None]
    ranks = ordered_map(torch.tensor([[5, 0, 1, 2, 3, 4]]), members, prior)
    assert sorted(ranks[0].tolist()) == list(range(1, 16))
    assert ranks[0, 14] == 15, "the last region is first in the order"
    assert ranks[0, [0, 1, 5, 6]].tolist() == [11, 12, 13, 14]


@pytest.mark.parametrize("objective", ["both", "insertion", "deletion"])
@pytest.mark.parametrize("unit", ["token", "patch"])
def test_the_method_is_the_search_written_out(objective: str, unit: str) -> None:
    """Patches of a real model, in float64: sets are scored one by one."""
    vit = shared("vit")
    wide = pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess)
    batch, target = images(vit, 2).double(), 1
    settings = {"prior": "genatt", "candidates": 3, "objective": objective, "unit": unit, "budget": 60}
    found = pl.explain(wide, batch, {"search": settings}, target=target)["search"]
    prior = pl.explain(wide, batch, "genatt", target=target).scores.flatten(1)
    for i in range(2):

        def p(members: frozenset[int], i: int = i) -> float:
            keep = torch.tensor(sorted(members))
            with torch.no_grad():
                if unit == "token":
                    tokens = wide.embed(batch[i : i + 1])
                    logits = wide.readout(wide.run(tokens, keep=keep[None]))
                else:
                    mask = torch.zeros(wide.grid[0] * wide.grid[1]).double()
                    mask[keep] = 1
                    side = batch.shape[-1] // wide.grid[1]
                    pixels = mask.view(wide.grid).repeat_interleave(side, 0).repeat_interleave(side, 1)
                    logits = wide.readout(wide.run(wide.embed(batch[i : i + 1] * pixels)))
            return float(logits.softmax(1)[0, target])

        def value(members: frozenset[int], p: SetValue = p) -> float:
            others = frozenset(range(16)) - members
            shown, hidden = p(members), p(others) if others else 0.0
            return {"both": shown - hidden, "insertion": shown, "deletion": -hidden}[objective]

        sets = 30 if objective == "both" else 60
        order, _ = guided_order(as_function(value), prior[i : i + 1], 3, budget=sets)
        assert found.scores[i].flatten().argsort(descending=True).tolist() == order[0].tolist()


def test_classes_are_searched_by_themselves() -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    settings = {"search": {"prior": "genatt", "candidates": 2, "budget": 40}}
    both = pl.explain(vit, batch, settings, target=[[0, 1], [2, 3]])["search"]
    single = pl.explain(vit, batch, settings, target=[1, 3])["search"]
    assert torch.equal(both.scores[:, 1], single.scores)


def test_bad_priors_are_refused() -> None:
    vit = shared("vit")
    with pytest.raises(pl.PatchlightError, match="cannot be its prior"):
        pl.explain(vit, images(vit, 1), {"search": {"prior": "search"}})
    with pytest.raises(pl.PatchlightError, match="none"):
        pl.explain(vit, images(vit, 1), {"search": {"prior": "none"}})
