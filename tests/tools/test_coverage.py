"""The table of what opens: it covers the libraries, and its rows of transformers are what the models are."""

from __future__ import annotations

import pytest

from patchlight.anatomy import hf_backbones
from tests.tiny_models import MODELS, UNBUILT, image_classifiers, tiny
from tools.coverage import DOCS, Row, as_csv, as_markdown, of_timm, of_transformers, table

ROWS = table()


def of(library: str) -> list[Row]:
    return [row for row in ROWS if row.library == library]


def test_the_files_are_made_of_the_same_rows() -> None:
    assert (DOCS / "coverage.md").read_text(encoding="utf-8") == as_markdown(ROWS)
    assert (DOCS / "coverage.csv").read_text(encoding="utf-8") == as_csv(ROWS)


def test_a_row_opens_or_says_why_not() -> None:
    for row in ROWS:
        assert row.opens in ("blocks", "stages", "feature map", "refused"), row
        assert bool(row.grid) == (row.opens != "refused"), row
        assert bool(row.reason) == (row.removal != "drop"), row


def test_every_classifier_of_transformers_has_a_row() -> None:
    small = [type(tiny(name)).__name__ for name, row in MODELS.items() if row.library == "transformers"]
    classes = dict.fromkeys([*image_classifiers(), *small, *hf_backbones.supported()])
    assert [row.model for row in of("transformers")] == [*classes]
    assert {row.model for row in of("transformers") if row.reason.startswith("not built")} == {*UNBUILT}


def test_rows_of_timm_are_those_of_its_own_table() -> None:
    assert of("timm") == of_timm()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::patchlight.AssumedPreprocess")
def test_rows_of_transformers_are_what_the_models_are() -> None:
    assert of("transformers") == of_transformers()
