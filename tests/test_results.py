"""The index of results: one row per table and figure of the five papers, and one per recipe and figure of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from patchlight.core.recipes import KINDS, bundled_recipes
from patchlight.report.figures import FIGURES

FOLDER = Path(__file__).parents[1] / "docs" / "results"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAPERS = {
    "VISION DIFFMASK": {"Table": 1, "Figure": 6},
    "ViT-CX": {"Table": 2, "Figure": 6},
    "TIS": {"Table": 4, "Figure": 4},
    "SkipPLUS": {"Figure": 27},
    "TokenTM": {"Figure": 1},
}
"""How many numbered tables and figures each paper has, as far as its text is available."""
VERDICTS = ("yes", "no", "in part", "not measured", "illustration", "ours")
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")] for line in INDEX.splitlines() if line.startswith("| ")
]
ROWS = [row for row in ROWS if row[0] != "---" and row[1] != "recipe or figure"]


def numbered(cell: str) -> set[tuple[str, int]]:
    """Tables and figures named in a cell: "Figure 3", "Figures 13 to 27"."""
    spans = re.findall(r"(Table|Figure)s? (\d+)(?: (?:to|and) (\d+))?", cell)
    return {(kind, n) for kind, first, last in spans for n in range(int(first), int(last or first) + 1)}


def test_a_row_has_a_subject_names_data_a_verdict_and_a_page() -> None:
    for row in ROWS:
        assert len(row) == 5, row
        assert row[3].removeprefix("**").startswith(VERDICTS), row


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_and_figure_of_the_papers_has_a_row(paper: str) -> None:
    named = set[tuple[str, int]]().union(*(numbered(row[0]) for row in ROWS if row[0].startswith(paper)))
    assert named >= {(kind, n) for kind, count in PAPERS[paper].items() for n in range(1, count + 1)}


def test_every_recipe_and_figure_has_a_row() -> None:
    ours = {*FIGURES, *(name for kind in KINDS for name in bundled_recipes(kind))}
    assert {name for row in ROWS for name in re.findall(r"`([\w-]+)`", row[1])} == ours


def test_every_page_is_linked() -> None:
    linked = {target for row in ROWS for target in re.findall(r"\]\(([\w-]+\.md)", row[4])}
    assert linked == {page.name for page in FOLDER.glob("*.md")} - {"README.md"}
