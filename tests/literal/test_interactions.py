"""`interactions` against definitions summed over all coalitions, and in games with a known answer."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import patchlight as pl
from patchlight.methods.interactions import Index, Interactions, all_coalitions, interaction_values
from tests.close import close
from tests.families import images, shared

Game = Callable[[Tensor], Tensor]
EXACT: tuple[Index, ...] = ("fbii", "fsii", "bii", "sii", "k-sii", "stii")


def table_game(players: int, seed: int) -> Game:
    table = torch.rand(2**players, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda z: table[(z.long() << torch.arange(players)).sum(1)]


def two_additive(players: int, seed: int) -> tuple[Game, Tensor]:
    """A game of effects and pairs, and their matrix."""
    drawn = torch.randn(players, players, generator=torch.Generator().manual_seed(seed)).double()
    truth = torch.triu(drawn, 1) + torch.triu(drawn, 1).T + drawn.diag().diag()

    def value(z: Tensor) -> Tensor:
        z = z.double()
        pairs = torch.einsum("vi,ij,vj->v", z, torch.triu(drawn, 1), z)
        return 0.7 + z @ drawn.diag() + pairs

    return value, truth


def exact(game: Game, players: int, index: Index) -> Tensor:
    values, error, _ = interaction_values(game, players, index, 2**players, torch.Generator())
    assert error is None
    return values


def difference(game: Game, players: int, i: int, j: int, others: tuple[int, ...]) -> float:
    """v(T + ij) - v(T + i) - v(T + j) + v(T)."""
    z = torch.zeros(4, players, dtype=torch.bool)
    z[:, list(others)] = True
    z[0, [i, j]] = z[1, i] = z[2, j] = True
    both, one, other, none = game(z).tolist()
    return both - one - other + none  # type: ignore[no-any-return]


def summed(game: Game, n: int, weight: Callable[[int], float]) -> Tensor:
    """The sum of weight(|T|) times the difference of each pair over all T without it."""
    found = torch.zeros(n, n, dtype=torch.float64)
    for i, j in itertools.combinations(range(n), 2):
        rest = [k for k in range(n) if k not in (i, j)]
        sets = itertools.chain.from_iterable(itertools.combinations(rest, t) for t in range(n - 1))
        found[i, j] = found[j, i] = sum(weight(len(t)) * difference(game, n, i, j, t) for t in sets)
    return found


@pytest.mark.parametrize("index", EXACT)
def test_a_game_of_pairs_is_recovered(index: Index) -> None:
    game, truth = two_additive(6, 0)
    found = exact(game, 6, index)
    if index in ("bii", "sii"):  # their singles are Banzhaf and Shapley values, which contain shares of the pairs
        share = truth - truth.diag().diag()
        truth = truth + share.sum(1).diag() / 2
    close(found, truth, 1e-8)


@pytest.mark.parametrize("index", ["fbii", "fsii"])
def test_sampled_coalitions_recover_it_too(index: Index) -> None:
    game, truth = two_additive(8, 1)
    values, error, r2 = interaction_values(game, 8, index, 120, torch.Generator().manual_seed(0))
    close(values, truth, 1e-6)
    assert error is not None
    assert float(error.max()) < 1e-6
    assert r2[1] == pytest.approx(1)
    assert r2[0] < 0.99


def test_indices_are_their_definitions() -> None:
    n, game = 5, table_game(5, 2)
    apart = ~torch.eye(n, dtype=torch.bool)
    definitions: dict[Index, Callable[[int], float]] = {
        "sii": lambda t: math.factorial(n - t - 2) * math.factorial(t) / math.factorial(n - 1),
        "bii": lambda t: 2.0 ** -(n - 2),
        "stii": lambda t: 2 / n / math.comb(n - 1, t),
    }
    for index, weight in definitions.items():
        close(exact(game, n, index)[apart], summed(game, n, weight)[apart], 1e-10)
    close(exact(game, n, "fbii")[apart], exact(game, n, "bii")[apart], 1e-7)
    close(exact(game, n, "k-sii")[apart], exact(game, n, "sii")[apart], 1e-12)


@pytest.mark.parametrize("index", ["stii", "k-sii", "fsii"])
def test_efficient_indices_share_the_whole_score(index: Index) -> None:
    game = table_game(5, 3)
    found = exact(game, 5, index)
    ends = game(all_coalitions(5)[[0, -1]])
    total = found.diagonal().sum() + torch.triu(found, 1).sum()
    assert float(total) == pytest.approx(float(ends[1] - ends[0]))


def test_three_that_count_only_together() -> None:
    def game(z: Tensor) -> Tensor:
        return z.all(1).double()

    expected = {"sii": 1 / 2, "bii": 1 / 2, "stii": 1 / 3, "fbii": 1 / 2, "k-sii": 1 / 2}
    for index, value in expected.items():
        assert float(exact(game, 3, index)[0, 1]) == pytest.approx(value)  # type: ignore[arg-type]
    assert exact(game, 3, "k-sii").diagonal().tolist() == pytest.approx([-1 / 6] * 3)


@pytest.mark.parametrize("index", EXACT)
def test_two_of_which_one_is_enough(index: Index) -> None:
    def game(z: Tensor) -> Tensor:
        return z[:, :2].any(1).double()  # the third player changes nothing

    found = exact(game, 3, index)
    assert float(found[0, 1]) == pytest.approx(-1, abs=1e-7)
    assert found[2].abs().max() < 1e-7
    if index in ("fbii", "stii", "k-sii", "fsii"):
        assert found.diagonal()[:2].tolist() == pytest.approx([1, 1], abs=1e-7)


def test_archipelago_looks_at_both_ends() -> None:
    game, truth = two_additive(6, 4)
    pairs = truth - truth.diag().diag()
    close(exact(game, 6, "archipelago") - exact(game, 6, "archipelago").diag().diag(), pairs, 1e-10)
    game = table_game(5, 5)
    found = exact(game, 5, "archipelago")
    ends = difference(game, 5, 1, 3, ()) + difference(game, 5, 1, 3, (0, 2, 4))
    assert float(found[1, 3]) == pytest.approx(ends / 2)


def test_errors_cover_what_sampling_changes() -> None:
    """Of many estimates, the standard error is about their spread."""
    game = table_game(6, 6)
    found = [interaction_values(game, 6, "fbii", 48, torch.Generator().manual_seed(s)) for s in range(40)]
    spread = torch.stack([values for values, *_ in found]).std(0).mean()
    stated = torch.stack([error for _, error, _ in found if error is not None]).mean()
    assert 0.5 < float(stated / spread) < 2


@pytest.mark.parametrize("unit", ["token", "patch"])
def test_a_model_is_scored_with_only_the_regions(unit: str) -> None:
    """Four squares of a real model, all 16 coalitions, scored one by one."""
    vit = shared("vit")
    vit = pl.wrap(copy.deepcopy(vit.model).double(), preprocess=vit.preprocess)
    batch = images(vit, 1)
    found = pl.interactions(vit, batch, target=2, side=2, samples=16, index="sii", unit=unit)  # type: ignore[arg-type]
    square = torch.arange(4).div(2, rounding_mode="floor")
    region = (2 * square[:, None] + square).flatten()

    def game(z: Tensor) -> Tensor:
        logits = []
        with torch.no_grad():
            for row in z:
                keep = row[region]
                if unit == "token":
                    out = vit.readout(vit.run(vit.embed(batch), keep=keep.nonzero()[:, 0][None]))
                else:
                    side = batch.shape[-1] // 4
                    pixels = keep.view(4, 4).repeat_interleave(side, 0).repeat_interleave(side, 1)
                    out = vit.readout(vit.run(vit.embed(batch * pixels)))
                logits.append(float(out[0, 2]))
        return torch.tensor(logits, dtype=torch.float64)

    close(found.values, exact(game, 4, "sii"), 1e-8)
    assert found.error is None
    assert found.label == vit.label(2)
    assert float(found.map.sum()) == pytest.approx(
        float(found.values.diagonal().sum() + torch.triu(found.values, 1).sum())
    )


def test_models_that_pool_patches_paint_them() -> None:
    vit = shared("reg4-gap")
    assert pl.interactions(vit, images(vit, 1), side=2, samples=16).error is None
    with pytest.raises(pl.Unsupported, match="use unit='patch'"):
        pl.interactions(vit, images(vit, 1), side=2, unit="token")


def test_what_cannot_be_estimated_is_refused() -> None:
    vit = shared("vit")
    for settings, words in (
        ({"samples": 50}, "too few for the 137 effects"),
        ({"index": "stii"}, "needs all 65,536 coalitions"),
        ({"unit": "frame"}, "setting unit='frame' of 'interactions' is not valid"),
        ({"chunks": 4}, "'interactions' has no setting 'chunks'; did you mean 'chunk'?"),
        ({"seed": -1}, "seed -1 is not possible"),
    ):
        with pytest.raises(pl.PatchlightError, match=words):
            pl.interactions(vit, images(vit, 1), **settings)  # type: ignore[arg-type]
    with pytest.raises(pl.PatchlightError, match="one image"):
        pl.interactions(vit, images(vit, 2))


def test_pairs_are_listed_and_drawn() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    values = torch.tensor([[1.0, 3, 0.1], [3, 0, -2], [0.1, -2, 0.5]]).double()
    error = torch.full((3, 3), 0.5).double()
    members = torch.eye(4)[:3].bool()
    members[2, 3] = True
    found = Interactions(values, error, (0.5, 0.75), members, (2, 2), "fbii", "cat")
    assert [(pair.first, pair.second, pair.value) for pair in found.top()] == [
        ((0.5, 0.5), (0.5, 1.5), 3.0),
        ((0.5, 1.5), (1.5, 1.0), -2.0),
    ]
    assert len(found.top(significant=False)) == 3
    close(found.map, torch.tensor([[1 + 1.55, 0.5], [-0.225, -0.225]]).double(), 1e-6)
    assert "with pairs 75 %" in str(found)
    axes = found.plot()
    assert len(axes.patches) == 2
    assert axes.patches[0].get_linewidth() > axes.patches[1].get_linewidth()
    assert len(found.matrix().images) == 1
    plt.close("all")
