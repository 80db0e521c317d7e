"""The table of timm's names: it covers them all, says what load says, and is what the models are."""

from __future__ import annotations

import pytest
import timm

from patchlight.anatomy.load import list_models
from tools.models import FIELDS, Row, as_csv, as_markdown, from_csv, probed, read, sized, table, without_weights

ROWS = table()
SAMPLE = list({row.module: row for row in reversed(ROWS) if row.opens in ("plain", "staged")}.values())
"""One name of every module."""
BUNDLED = {name for name in list_models() if name.startswith("pocket")}


def test_the_table_covers_every_name_of_timm() -> None:
    assert sorted(row.name for row in ROWS) == sorted(timm.list_models())


def test_names_that_open_are_those_listed() -> None:
    assert {row.name for row in ROWS if row.opens in ("plain", "staged", "unwalked")} | BUNDLED == {*list_models()}
    assert not [row.name for row in ROWS if row.opens == "failed"]


def test_what_is_refused_says_why() -> None:
    assert all(bool(row.reason) == (row.opens == "refused") for row in ROWS)


def test_the_page_is_made_of_the_table() -> None:
    from tools.models import DOCS

    assert (DOCS / "models.md").read_text(encoding="utf-8") == as_markdown(ROWS)


def test_a_row_survives_the_file() -> None:
    row = Row("pit", "PoolingVisionTransformer", "pit_b_224", "staged", grid="16x16", reason='a "quoted", reason')
    assert from_csv(as_csv([row])) == [row]
    assert set(FIELDS) == set(Row.__dataclass_fields__)


@pytest.mark.slow
@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_a_name_is_what_the_table_says(row: Row) -> None:
    found = sized(Row(row.module, row.kind, row.name, ""), read(row.name, without_weights(row.name)))
    for field in ("image", "grid", "prefix", "pooling", "blocks"):
        assert getattr(found, field) == getattr(row, field), field
    shown = probed(row.seen_on)
    assert shown == {"tokens": row.tokens, "attention": row.attention, "opens": row.opens}
