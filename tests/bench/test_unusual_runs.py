"""Runs with odd names, labels and recipes, and tables of too few images."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from patchlight.bench.html import as_html
from patchlight.bench.local import RunOptions, run
from patchlight.bench.recipe import parse
from patchlight.bench.store import Store
from patchlight.bench.tables import as_csv, as_latex, as_markdown, read_tables
from tests.bench.small import pictures, recipe, text
from tests.helpers import command


def photos(folder: Path, count: int = 2) -> Path:
    return pictures(folder / "photos", count)


def test_two_images_have_no_best_method(tmp_path: Path) -> None:
    run(recipe(photos(tmp_path)), tmp_path / "run")
    found = read_tables(tmp_path / "run")
    said = "intervals, ranks and a best method need at least 6 images; some cells of Pocket have only 2"
    table = as_markdown(found)
    assert said in table
    assert "**" not in table
    assert "0.5" in table
    assert not re.search(r"\d \[", table), "no interval behind a number"
    assert r"\textbf" not in as_latex(found)
    assert r"$\pm$" not in as_latex(found).split("\n", 1)[1]
    rows = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert {(r["low"], r["high"], r["mark"], r["rank"]) for r in rows} == {("", "", "", "")}
    page = as_html(found)
    assert said in page
    assert 'class="best"' not in page
    assert "Friedman p" not in page


def test_names_that_are_not_utf8_do_not_stop_a_benchmark(tmp_path: Path) -> None:
    images = photos(tmp_path)
    os.rename(images / "1.png", os.fsencode(images) + b"/b\xff.png")
    Path(os.fsdecode(os.fsencode(images) + b"/c\xfe.png")).write_bytes(b"no picture")
    (tmp_path / "r.toml").write_text(text(images), encoding="utf-8")
    out = str(tmp_path / "run")
    command("bench", "run", str(tmp_path / "r.toml"), "--out", out, code=3)
    found = Store(out).results()
    assert found.images == {"Pocket": ("0.png", "b\\xff.png", "c\\xfe.png")}
    column = found.columns["Pocket", "GenAtt", "Del"]
    assert column.values.isfinite().tolist() == [True, True, False]
    assert "c\\xfe.png' is not a readable image" in column.errors[2].as_py()
    command("bench", "report", out, "--html", str(tmp_path / "r.html"))
    command("bench", "run", str(tmp_path / "r.toml"), "--out", out, "--json", code=3)


def cut(keys: str) -> tuple[str, str]:
    return 'Pocket = "pocket"', f'Pocket = {{name = "pocket", preprocess = {{{keys}}}}}'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch_size = 2", f"notes = {'[' * 5000}{']' * 5000}", ("nested too deeply",)),
        (*cut("mean = [nan, 0.5, 0.5]"), ("line 6", "mean", "finite number")),
        (*cut("std = [0.0, 0.5, 0.5]"), ("line 6", "std", "greater than 0")),
        (*cut("size = [100, 100]"), ("[1, 3, 100, 100]", "[32, 32]", "of the size it takes")),
        (*cut("size = [0, 32]"), ("line 6", "size")),
        ("[methods]", "images = true\n\n[methods]", ("line 12", "data.images", "True")),
        ("batch_size = 2", f"seed = {2**70}", ("line 3", "seed")),
        ("[0.5, nan]", '["a", "b"]', ("give 2 numbers",)),
        ('kind = "folder"', 'kind = "folder"\noptions = {labels = 3}', ("labels=3",)),
    ],
)
def test_recipes_that_are_refused(old: str, new: str, words: tuple[str, ...], tmp_path: Path) -> None:
    whole = text(photos(tmp_path))
    assert old in whole
    (tmp_path / "r.toml").write_text(whole.replace(old, new), encoding="utf-8")
    command("bench", "run", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run"), code=2, says=words)


class Page(HTMLParser):
    """The tags and the text that a browser reads in a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_odd_labels_leave_a_report_whole(tmp_path: Path) -> None:
    odd = ["<!--<script>", "</script><blink>", "a & b &lt;", "=cmd|'/c calc'!A0"]
    whole = text(photos(tmp_path, 3)).replace("GenAtt = [0.5, nan]", "")
    for name, label in zip(("GenAtt", '"Rollout (max)"', "Rollout", "Random"), odd, strict=True):
        whole = whole.replace(f"{name} = ", f"{json.dumps(label)} = ")
    run(parse(whole), tmp_path / "run", RunOptions(text=whole))
    found = read_tables(tmp_path / "run")
    html = as_html(found)
    page = Page(html)
    assert "blink" not in page.tags
    assert html.count("<script") == html.count("</script") == page.tags.count("script")
    assert all(label in page.text for label in odd)
    assert "<script" not in as_markdown(found)


def test_cells_of_a_csv_are_no_formulas(tmp_path: Path) -> None:
    whole = text(photos(tmp_path)).replace("GenAtt = [0.5, nan]", "")
    for name, label in (("GenAtt", "=1+1"), ("Rollout", "@x"), ("Random", "-2")):
        whole = whole.replace(f"\n{name} = ", f'\n"{label}" = ')
    run(parse(whole), tmp_path / "run")
    rows = list(csv.DictReader(io.StringIO(as_csv(read_tables(tmp_path / "run")))))
    assert [r["method"] for r in rows[::2]] == ["'=1+1", "Rollout (max)", "'@x", "'-2"]
    assert all(0 <= float(r["mean"]) <= 1 for r in rows)
    shutil.copy(tmp_path / "photos" / "0.png", tmp_path / "photos" / "=HYPERLINK(1).png")
    table = tmp_path / "v.csv"
    about = ("--method", "grad", "--metric", "completeness-error,ins-del", "--set", "ins-del.steps=2")
    command("evaluate", "--images", str(tmp_path / "photos"), *about, "--csv", str(table))
    cells = list(csv.reader(table.open()))
    assert {r[0] for r in cells[1:]} == {"0.png", "1.png", "'=HYPERLINK(1).png"}
    assert all(math.isfinite(float(r[3])) for r in cells[1:]), "numbers stay numbers"
