"""`search` against searches written out, and what it promises in games with a known answer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.methods.orders import guided_order, phased_order
from patchlight.methods.search import ordered_map, rank_error, region_members, segment_members
from tests.families import images, shared

SetValue = Callable[[frozenset[int]], float]


def as_function(value: SetValue) -> Callable[[Tensor], Tensor]:
    """A value of Python sets as a function of indices [R,k,m]."""

    def of_sets(sets: Tensor) -> Tensor:
        rows = [[value(frozenset(one.tolist())) for one in row] for row in sets]
        return torch.tensor(rows, dtype=torch.float64)

    return of_sets


def additive(effects: Tensor) -> Callable[[Tensor], Tensor]:
    """Games [R,n] whose sets are worth the sum of their players."""
    return lambda sets: effects[:, None].expand(-1, sets.shape[1], -1).gather(2, sets).sum(-1)


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
    order, valued, *_ = guided_order(as_function(game), prior, width=7)
    assert order[0].tolist() == greedy(game, 7)
    assert valued == sum(range(2, 8)), "the last region needs no value"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("pending", [1, 3, 8])
def test_two_ends(seed: int, pending: int) -> None:
    game, prior = random_game(8, seed), torch.rand(1, 8, generator=torch.Generator().manual_seed(seed)).double()
    order, *_ = guided_order(as_function(game), prior, pending, two_ended=True)
    assert order[0].tolist() == lima(game, prior[0].tolist(), pending)


@pytest.mark.parametrize("two_ended", [False, True])
def test_an_additive_game_is_sorted(two_ended: bool) -> None:
    effects = torch.tensor([[0.3, -0.1, 0.7, 0.05, 0.2], [0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)
    order, *_ = guided_order(additive(effects), effects * 0 - 1, 5, two_ended=two_ended)
    assert order.tolist() == effects.argsort(descending=True).tolist()


def lazy(value: SetValue, prior: list[float], width: int, fresh: int) -> list[int]:
    """Candidates that were never valued come first, then those that were closest to the best of their step."""
    order: list[int] = []
    stale: dict[int, float] = {}
    rest = sorted(range(len(prior)), key=lambda i: -prior[i])
    while len(rest) > 1:
        count = fresh if order else width
        window = rest[:width]
        some = sorted(window, key=lambda i: -stale.get(i, float("inf")))[:count]
        values = {i: value(frozenset([*order, i])) for i in window if i in some}
        best = max(values, key=lambda i: values[i])
        stale.update({i: v - values[best] for i, v in values.items()})
        order.append(best)
        rest.remove(best)
    return [*order, *rest]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fresh", [1, 3, 5])
def test_the_lazy_search(seed: int, fresh: int) -> None:
    game, prior = random_game(9, seed), torch.rand(1, 9, generator=torch.Generator().manual_seed(seed)).double()
    order, valued, *_ = guided_order(as_function(game), prior, 5, fresh)
    assert order[0].tolist() == lazy(game, prior[0].tolist(), 5, fresh)
    assert valued == 5 + sum(min(fresh, left, 5) for left in range(2, 9))


def phases(value: SetValue, players: int) -> list[int]:
    """PhaseWin as its paper's code describes it, with a window of 30 % of the players."""
    shown: list[int] = []
    rest, parked, width = list(range(players)), list[int](), max(1, round(0.3 * players))

    def worth(i: int) -> float:
        return value(frozenset([*shown, i]))

    while len(rest) > 1:
        first = max(rest, key=worth)
        shown.append(first)
        rest.remove(first)
        values = {i: worth(i) for i in rest}
        top = max(values.values())
        parked += [i for i in rest if values[i] < 0.05 * top]
        rest = [i for i in rest if i not in parked]
        pool = sorted((i for i in rest if values[i] >= 0.6 * top), key=lambda i: -values[i])
        history: list[float] = []
        while pool:
            now = {i: worth(i) for i in pool[:width]}
            best = max(now.values())
            ratios = [a / b for a, b in itertools.pairwise([*history, best])]
            steep = len(history) > 1 and ratios[-1] - ratios[-2] > 0.02
            if steep and best < 0.98 * history[-1]:
                break
            limit = max(0.6 * top, best if steep else 0.99 * best)
            accepted = sorted((i for i in now if now[i] >= limit), key=lambda i: -now[i])
            shown += accepted
            pool = [i for i in pool if i not in accepted]
            rest = [i for i in rest if i not in accepted]
            history.append(best)
            if steep or not accepted:
                break
    last = rest + parked
    return shown + (sorted(last, key=lambda i: -worth(i)) if len(last) > 1 else last)


@pytest.mark.parametrize("seed", range(8))
def test_phases(seed: int) -> None:
    game = random_game(10, seed)
    order, valued, *_ = phased_order(as_function(game), -torch.arange(10.0)[None])
    assert order[0].tolist() == phases(game, 10)
    budget = valued // 2
    part = phased_order(as_function(game), -torch.arange(10.0)[None], budget)
    assert part.valued <= budget
    assert part.regions[0, : part.first].tolist() == order[0, : part.first].tolist()
    assert part.regions[0, part.first :].tolist() == sorted(part.regions[0, part.first :].tolist())


def test_phases_sort_an_additive_game() -> None:
    effects = torch.rand(1, 12, generator=torch.Generator().manual_seed(0))
    order = phased_order(additive(effects), torch.zeros(1, 12)).regions
    assert order.tolist() == effects.argsort(descending=True).tolist()


def test_the_error_of_a_rank() -> None:
    """Of equal values each rank is as likely as any other; values far apart keep theirs."""
    players = 50
    equal = rank_error(torch.zeros(1, players), torch.ones(1, players), torch.Generator().manual_seed(0))
    assert float(equal.mean()) == pytest.approx(((players**2 - 1) / 12) ** 0.5, rel=0.02)
    apart = rank_error(torch.arange(3.0)[None], torch.full((1, 3), 0.01), torch.Generator().manual_seed(0))
    assert apart.tolist() == [[0, 0, 0]]


def test_segments_have_the_patches_that_they_cover_most() -> None:
    vit = shared("vit")
    labels = torch.zeros(vit.geometry.size, dtype=torch.long)
    labels[:, labels.shape[1] * 3 // 8 :] = 1  # the second of four columns is split in the middle
    labels[0, 0] = 2
    members = segment_members(labels, vit)
    assert members.shape == (2, 16), "a segment that covers no patch is left out"
    assert members.sum(0).tolist() == [1] * 16
    assert members[1].view(4, 4)[:, 2:].all()
    assert not members[1].view(4, 4)[:, 0].any()


@pytest.mark.parametrize("settings", [{"regions": "slic", "side": 2}, {"schedule": "phasewin"}, {"side": 3}])
def test_images_and_classes_are_searched_by_themselves(settings: dict[str, object]) -> None:
    vit = shared("vit")
    batch = images(vit, 2)
    several = {"prior": "genatt", "candidates": 2, "budget": 60, **settings}
    both = pl.explain(vit, batch, {"search": several}, target=[[0, 1], [2, 3]])["search"]
    assert [sorted(one.flatten().tolist()) for one in both.scores.flatten(0, 1)] == [list(range(1, 17))] * 4
    single = pl.explain(vit, batch[1:], {"search": several}, target=3)["search"]
    assert torch.equal(both.scores[1:, 1], single.scores)


def test_patches_that_the_budget_leaves_have_an_error() -> None:
    vit = shared("vit")
    batch = images(vit, 1)
    settings = {"prior": "posterior", "samples": 24, "candidates": 2, "schedule": "two-ended", "budget": 24}
    found = pl.explain(vit, batch, {"search": settings}, target=1)["search"]
    assert found.error is not None
    left = found.error.isfinite()
    assert found.facts["forwards"] == (24.0,)
    assert int(left.sum()) == 16 - 6, "three steps at both ends"
    prior = pl.explain(vit, batch, {"posterior": {"samples": 24}}, target=1)["posterior"]
    order = prior.scores[left].argsort(descending=True)
    assert order.tolist() == found.scores[left].argsort(descending=True).tolist()
    assert pl.explain(vit, batch, {"search": {**settings, "budget": None}}, target=1)["search"].error is None


def test_greedy_covers_most_of_what_can_be_covered() -> None:
    """A coverage function is monotone and submodular: each prefix has at least 1 - 1/e of the best set of its size."""
    generator = torch.Generator().manual_seed(0)
    covers = torch.rand(6, 12, generator=generator) < 0.3
    value = as_function(lambda members: float(covers[list(members)].any(0).sum()) if members else 0.0)
    order, *_ = guided_order(value, torch.zeros(1, 6).double(), 6)
    for size in range(1, 7):
        best = max(float(covers[list(some)].any(0).sum()) for some in itertools.combinations(range(6), size))
        assert float(covers[order[0, :size]].any(0).sum()) >= (1 - 1 / torch.e) * best


def test_a_budget_leaves_the_rest_to_the_prior() -> None:
    game, prior = random_game(6, 1), torch.tensor([[6.0, 5, 4, 3, 2, 1]]).double()
    order, valued, *_ = guided_order(as_function(game), prior, width=2, budget=4)
    full, *_ = guided_order(as_function(game), prior, width=2)
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
            return {"both": shown + 1 - hidden, "insertion": shown, "deletion": 1 - hidden}[objective]

        sets = 30 if objective == "both" else 60
        order, *_ = guided_order(as_function(value), prior[i : i + 1], 3, budget=sets)
        assert found.scores[i].flatten().argsort(descending=True).tolist() == order[0].tolist()


def test_bad_priors_are_refused() -> None:
    vit = shared("vit")
    with pytest.raises(pl.PatchlightError, match="cannot be its prior"):
        pl.explain(vit, images(vit, 1), {"search": {"prior": "search"}})
    with pytest.raises(pl.PatchlightError, match="none"):
        pl.explain(vit, images(vit, 1), {"search": {"prior": "none"}})
