"""Sizes of the coalitions of a training."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from patchlight.trained.shapley.settings import Coalitions
from patchlight.trained.shapley.train import draw_pairs, draw_uniform

PLAYERS, COUNT = 7, 40_000


def kernel(k: int) -> float:
    """The probability of size k in the Shapley kernel."""
    return 1 / (k * (PLAYERS - k)) / sum(1 / (j * (PLAYERS - j)) for j in range(1, PLAYERS))


def binomial(k: int, chance: float) -> float:
    return math.comb(PLAYERS, k) * chance**k * (1 - chance) ** (PLAYERS - k)


def expected(kind: Coalitions) -> list[float]:
    """The probability of every size, of a coalition or its complement."""
    if kind == "kernel":
        return [0.0, *(kernel(k) for k in range(1, PLAYERS)), 0.0]
    drawn = range(1, PLAYERS) if kind == "binomial" else range(PLAYERS - 1)
    shares = {k: kernel(k if kind == "binomial" else k + 1) for k in drawn}
    sizes = [sum(share * binomial(n, 1 - k / PLAYERS) for k, share in shares.items()) for n in range(PLAYERS + 1)]
    return [(a + b) / 2 for a, b in zip(sizes, reversed(sizes), strict=True)]


@pytest.mark.parametrize("kind", ["kernel", "binomial", "code"])
def test_sizes_are_those_of_the_formula(kind: Coalitions) -> None:
    z = draw_pairs(COUNT // 4, 4, PLAYERS, kind, torch.Generator().manual_seed(0))
    assert z.shape == (COUNT // 4, 4, PLAYERS)
    assert bool((z[:, ::2] ^ z[:, 1::2]).all()), "every second one is the complement"
    found = torch.bincount(z.flatten(0, 1).sum(1), minlength=PLAYERS + 1) / COUNT
    assert found.tolist() == pytest.approx(expected(kind), abs=0.015)
    assert z.flatten(0, 1).double().mean(0).tolist() == pytest.approx([0.5] * PLAYERS)


def test_off_by_one_the_code_has_more_full_and_empty_coalitions() -> None:
    shares = {kind: expected(kind)[0] for kind in ("kernel", "binomial", "code")}  # type: ignore[arg-type]
    assert shares["kernel"] == 0
    assert shares["code"] > 1.5 * shares["binomial"] > 0


def test_coalitions_of_one_size_are_alike_likely() -> None:
    z = draw_pairs(COUNT, 2, 5, "kernel", torch.Generator().manual_seed(1)).flatten(0, 1)
    pairs = z[z.sum(1) == 2]
    seen = [float((pairs[:, list(two)].all(1)).double().mean()) for two in itertools.combinations(range(5), 2)]
    assert seen == pytest.approx([0.1] * 10, abs=0.012)


def test_masks_of_the_surrogate_have_every_size_alike() -> None:
    """The mean of a binomial over u ~ U(0, 1) is uniform: 1 / (d + 1) each."""
    z = draw_uniform(COUNT, PLAYERS, torch.Generator().manual_seed(0))
    assert z.shape == (COUNT, 1, PLAYERS)
    found = torch.bincount(z.sum(2).flatten(), minlength=PLAYERS + 1) / COUNT
    assert found.tolist() == pytest.approx([1 / (PLAYERS + 1)] * (PLAYERS + 1), abs=0.012)
