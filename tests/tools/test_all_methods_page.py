"""The page of all methods is made of the other pages of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.all_methods_page import MADE, OPTIMISES, POCKET, collect, page, rank

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_the_table_follows_from_the_other_pages() -> None:
    _, lines = page(*collect(RESULTS))
    text = (RESULTS / "all-methods.md").read_text(encoding="utf-8")
    assert text.partition(MADE + "\n\n")[2] == "\n".join(lines)


def test_scores_go_from_random_maps_to_tis() -> None:
    values = {("random", "Δ mean "): -0.4, ("tis", "Δ mean "): 0.0, ("mine", "Δ mean "): 0.2, ("mine", "Δ blur"): 9.0}
    values |= {("random", "Δ blur "): -0.2, ("tis", "Δ blur "): 0.0, ("mine", "Δ blur "): -0.1}
    assert rank(values, POCKET) == pytest.approx({"tis": 100, "mine": 100, "random": 0})
    assert set(OPTIMISES) <= {method for method, _ in collect(RESULTS)[0]}
