"""Sheets: lines that fit, rows that do not overlap, intervals as a plain bootstrap has them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchlight.core.drawing.pictures import Row, Tile, in_bands, inches, wrap_lines
from patchlight.core.errors import PatchlightError
from patchlight.report.figures.numbers import numbers_of, write_numbers
from patchlight.report.figures.sheet import COLUMN, PAGE, blank, line, mean_interval, pictures, style
from tests.report.pages import check_apart


@given(st.text("ab ∘.-/W", max_size=40), st.floats(0.3, 3))
def test_wrapped_lines_fit_and_lose_nothing(words: str, width: float) -> None:
    lines = wrap_lines(words, width, 7.0)
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")
    assert all(inches(line, 7.0) <= width or len(line) == 1 for line in lines)


def test_names_are_broken_where_they_have_a_joint() -> None:
    assert wrap_lines("DecompX∘SkipPLUS", 0.6, 7.0) == ["DecompX∘", "SkipPLUS"]
    assert wrap_lines("SmoothGrad", 0.5, 7.0) == ["Smooth", "Grad"]
    assert wrap_lines("a sentence about EVA-L/14", 0.9, 7.0, " ") == ["a sentence about", "EVA-L/14"]


def test_intervals_are_those_of_a_plain_bootstrap() -> None:
    values = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, low, high = mean_interval(values)
    rng = np.random.default_rng(1)
    means = [values.numpy()[rng.integers(0, 40, 40)].mean(0) for _ in range(20_000)]
    assert torch.allclose(mean, values.mean(0))
    np.testing.assert_allclose(low, np.quantile(means, 0.025, axis=0), atol=0.06)
    np.testing.assert_allclose(high, np.quantile(means, 0.975, axis=0), atol=0.06)
    assert bool(mean_interval(values[:5])[1].isnan().all()), "five images are too few for one"


@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (3, 2), (9, 2), (14, 1)])
def test_pictures_and_words_do_not_overlap(columns: int, rows: int) -> None:
    picture = Image.new("RGB", (20, 20))
    cells = [Tile(picture, f"DecompX∘SkipPLUS {c}", "p = 10 %") for c in range(columns)]
    fig = pictures("A note. " * 20, [Row(cells, "with a label") for _ in range(rows)], scales=(False, True))
    assert COLUMN <= fig.get_size_inches()[0] <= PAGE + 1e-9
    check_apart(fig, 2.0)  # dots, of 300 an inch


def test_axes_keep_off_the_note() -> None:
    fig = blank("A long note about what was drawn here. " * 6, 1.5, COLUMN)
    axes = fig.subplots()
    axes.set_xlabel("below")
    fig.canvas.draw()
    top = max(text.get_window_extent().y1 for text in fig.texts)
    assert axes.get_tightbbox().y0 >= top - 1


def test_bands_are_about_as_long() -> None:
    bands = in_bands(range(10), 7)
    assert [len(band) for band in bands] == [5, 5]
    assert [item for band in bands for item in band] == list(range(10))


def test_no_two_lines_look_alike() -> None:
    looks = [tuple(style(i)[key] for key in ("color", "linestyle")) for i in range(32)]
    assert len(set(looks)) == 32


def test_a_figure_keeps_the_numbers_it_shows(tmp_path: Path) -> None:
    """Lines with their intervals, and numbers below pictures, with the words that the axes have in the end."""
    fig = blank("a note", 1.5, COLUMN)
    axes = fig.subplots()
    values = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    line(axes, [1.0, 2.0], values, "a", 0)
    line(axes, [0, 1], values[:3], "=b", 1, ["first", "second"])
    axes.set_title("panel")
    axes.set_ylabel("some\nquantity")
    axes.set_xlabel("place")
    mean, low, high = mean_interval(values)
    found = numbers_of(fig)
    assert [(one.panel, one.series, one.axis, one.x, one.quantity, one.images) for one in found] == [
        ("panel", "a", "place", "1", "some quantity", 8),
        ("panel", "a", "place", "2", "some quantity", 8),
        ("panel", "=b", "place", "first", "some quantity", 3),
        ("panel", "=b", "place", "second", "some quantity", 3),
    ]
    assert [one.value for one in found[:2]] == mean.tolist()
    assert [(one.low, one.high) for one in found[:2]] == list(zip(low.tolist(), high.tolist(), strict=True))
    rows = list(csv.DictReader(write_numbers(fig, tmp_path / "n.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in rows] == [one.value for one in found]
    assert (rows[2]["series"], rows[2]["low"]) == ("'=b", ""), "no formula of a spreadsheet; too few images"
    told = json.loads(write_numbers(fig, tmp_path / "n.json").read_text())
    assert told[2]["low"] is None
    assert told[0]["high"] == found[0].high
    with pytest.raises(PatchlightError, match=r"a \.csv or \.json file"):
        write_numbers(fig, tmp_path / "n.xlsx")


def test_panels_that_share_an_axis_share_its_words() -> None:
    fig = blank("a note", 1.5)
    left, right = fig.subplots(1, 2, sharey=True)
    left.set_ylabel("AUC")
    line(right, [1.0], torch.ones(2, 1), "a", 0)
    assert [one.quantity for one in numbers_of(fig)] == ["AUC"]


def test_numbers_below_pictures_are_kept() -> None:
    picture = Image.new("RGB", (20, 20))
    rows = [Row([Tile(picture, "dog"), None, Tile(picture, "genatt", "0.5", {"Del": 0.5})])]
    (number,) = numbers_of(pictures("a note", rows))
    assert (number.panel, number.series, number.quantity, number.value) == ("dog", "genatt", "Del", 0.5)
