"""What makes the documentation: staging, words, tables, links, and that nothing that is registered is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

import patchlight as pl
from patchlight.core.registry import settings_of, split_docstring
from patchlight.methods.base import GROUPS, METHODS
from patchlight.metrics.base import METRICS
from tools.docs import manual, reference, tables
from tools.docs.links import broken
from tools.docs.staging import DOCS, ROOT, expanded, relinked, sources, stage, staged_at
from tools.docs.words import as_blocks, as_markdown, as_rst, table


def test_links_are_turned_to_where_pages_are_staged() -> None:
    text = "[a](../CONTRIBUTING.md#a-method) [b](results/README.md) [c](https://x.org/d.md) [d](methods.md#names)"
    told = "[a](contributing.md#a-method) [b](results/index.md) [c](https://x.org/d.md) [d](methods.md#names)"
    assert relinked(text, DOCS / "benchmark.md") == told
    assert relinked("[s](../../benchmarks/results/quick.md)", DOCS / "results" / "posterior.md") == (
        "[s](../benchmarks/quick.md)"
    )
    assert relinked("```\n[a](../CONTRIBUTING.md)\n```\n", DOCS / "benchmark.md").count("../CONTRIBUTING.md") == 1


def test_a_link_out_of_the_documentation_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"benchmark.md links to ../pyproject.toml"):
        relinked("[a](../pyproject.toml)", DOCS / "benchmark.md")


def test_every_source_has_a_place_of_its_own() -> None:
    places = [staged_at(source) for source in sources()]
    assert None not in places
    assert len(set(places)) == len(places)


def test_examples_of_contributing_become_cells() -> None:
    cell = expanded("```{contributing} rule\n```")
    assert cell.startswith("```{code-cell} python3\nimport patchlight as pl")
    assert "frozen-attention" in cell


def test_staged_notebooks_have_a_kernel(tmp_path: Path) -> None:
    stage(tmp_path / "source")
    for page in (tmp_path / "source").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert ("{code-cell}" in text) == text.startswith("---\njupytext:"), page
        assert "```{contributing}" not in text, page


def test_words_are_not_markup() -> None:
    assert as_markdown("R <- R + E_l * `A_l`") == r"R \<- R + E\_l \* `A_l`"
    assert as_rst(["|map| of `A_l`", ">>> f(a_b)", "1_0", "", "x_"]) == [
        r"\|map\| of ``A_l``",
        ">>> f(a_b)",
        "1_0",
        "",
        r"x\_",
    ]
    assert table(("a", "b"), [("1", 2)]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_args_become_the_words_of_settings() -> None:
    def example() -> None:
        """A line.

            f(x) = x_1 +
                x_2

        Words
        of `x_1`.

        Args:
            first: What it is,
                and more: this.
            other: Another.
        """

    assert as_blocks(example) == ["A line.", "```text\nf(x) = x_1 +\n    x_2\n```", "Words of `x_1`."]
    assert split_docstring(example)[1] == {"first": "What it is, and more: this.", "other": "Another."}


def test_the_page_of_tokentm_says_what_it_is() -> None:
    """It is called a reading, and each setting and preset is explained."""
    method = METHODS["tokentm"]
    page = reference.method_page(method, {"tokentm": {}})
    assert "the main paper was not available" in page
    assert "two re-implementations that disagree" in page
    words = {name: setting.text for name, setting in settings_of(method.function).items()}
    assert all(as_markdown(line) in page for line in words.values())
    assert all(f"`{preset}`" in page.partition("## Settings")[0] for preset in method.presets)


def test_rows_of_measured_tables_are_found() -> None:
    assert tables.method_of("**`tis`**") == "tis"
    assert tables.method_of("`posterior 1024`") == "posterior"
    assert tables.method_of("decompx.skipplus") == "decompx"
    assert tables.method_of("Friedman p") == ""
    found = tables.measured("tokentm")
    assert {"compare-faithfulness", "compare-localisation"} <= {one.page for one in found}
    assert all(len(row) == len(one.head) for one in found for row in one.rows)


def test_every_method_and_metric_has_its_papers() -> None:
    known = reference.references()
    ours = {"posterior", "random", "rawatt"}
    assert set(known["methods"]) == set(METHODS) - ours
    assert set(known["metrics"]) == set(METRICS)
    for keys in (*known["methods"].values(), *known["metrics"].values()):
        for key in keys:
            paper = known["papers"][key]
            assert {"type", "author", "title", "year"} <= set(paper), key
            assert paper["year"] in key, key
    assert "@inproceedings{petsiuk2018rise,\n  author = {Petsiuk" in reference.cited("methods", METHODS["rise"])


def test_every_method_has_a_heading_and_every_public_name_a_place() -> None:
    assert {method.group for method in METHODS.values()} == set(GROUPS) - {"other"}
    shown = {name.partition(".")[0] for names in manual.PUBLIC.values() for name in names}
    missing = set(pl.__all__) - shown - set(manual.WARNINGS) - set(manual.CONSTANTS)
    assert not missing, f"tools/docs/manual.py does not show {sorted(missing)}"


def test_manual_pages_list_everything() -> None:
    line = manual.command_line()
    assert "## patchlight bench run" in line
    assert "`--method`" in line
    assert "`crop_pct`" in manual.recipe_format()
    errors = manual.error_page()
    assert "no … is called '…'; …" in errors.replace("\\", "")
    assert (ROOT / "docs" / "index.md").exists()


def test_broken_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="top">x</h1><a href="b.html#there">b</a><a href="https://x.org">x</a>')
    (tmp_path / "b.html").write_text('<h1 id="there">y</h1><a href="a.html#top">a</a><img src="gradcam++.jpg">')
    (tmp_path / "gradcam++.jpg").write_bytes(b"")
    assert list(broken(tmp_path)) == []
    (tmp_path / "c.html").write_text('<a href="a.html#gone">a</a><a href="d.html">d</a><a href="#here">c</a>')
    assert list(broken(tmp_path)) == [
        "c.html links to a.html#gone, and a.html has no such place",
        "c.html links to d.html, which is not there",
        "c.html links to #here, and c.html has no such place",
    ]
