"""Sheets: lines that fit, rows that do not overlap, intervals as a plain bootstrap has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchlight.figures.sheet import COLUMN, PAGE, Cell, Row, in_bands, mean_interval, pictures, sheet, style, wrapped
from patchlight.viz.figures import inches


@given(st.text("ab ∘.-/W", max_size=40), st.floats(0.3, 3))
def test_wrapped_lines_fit_and_lose_nothing(words: str, width: float) -> None:
    lines = wrapped(words, width)
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")
    assert all(inches(line, 7.0) <= width or len(line) == 1 for line in lines)


def test_names_are_broken_where_they_have_a_joint() -> None:
    assert wrapped("DecompX∘SkipPLUS", 0.6) == ["DecompX∘", "SkipPLUS"]
    assert wrapped("SmoothGrad", 0.5) == ["Smooth", "Grad"]
    assert wrapped("a sentence about EVA-L/14", 0.9, behind=" ") == ["a sentence about", "EVA-L/14"]


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
    cells = [Cell(picture, f"DecompX∘SkipPLUS {c}", "p = 10 %") for c in range(columns)]
    fig = pictures("A note. " * 20, [Row(cells, "with a label") for _ in range(rows)], scales=(False, True))
    width, height = fig.get_size_inches()
    assert COLUMN <= width <= PAGE + 1e-9
    fig.canvas.draw()
    boxes = [axes.get_window_extent() for axes in fig.axes] + [text.get_window_extent() for text in fig.texts]
    slack = 2.0  # dots, of 300 an inch
    for i, a in enumerate(boxes):
        assert min(a.x0, a.y0, 300 * width - a.x1, 300 * height - a.y1) >= -slack, "inside the sheet"
        for b in boxes[:i]:
            apart = a.x1 <= b.x0 + slack or b.x1 <= a.x0 + slack or a.y1 <= b.y0 + slack or b.y1 <= a.y0 + slack
            assert apart, (i, a, b)


def test_axes_keep_off_the_note() -> None:
    fig = sheet("A long note about what was drawn here. " * 6, 1.5, COLUMN)
    axes = fig.subplots()
    axes.set_xlabel("below")
    fig.canvas.draw()
    top = max(text.get_window_extent().y1 for text in fig.texts)
    assert axes.get_tightbbox().y0 >= top - 1


def test_bands_are_about_as_long() -> None:
    cells = [Cell(Image.new("RGB", (2, 2)), str(i)) for i in range(10)]
    rows = in_bands(cells, 7)
    assert [len(row.cells) for row in rows] == [5, 5]
    assert [cell.title for row in rows for cell in row.cells if cell is not None] == [str(i) for i in range(10)]


def test_no_two_lines_look_alike() -> None:
    looks = [tuple(style(i)[key] for key in ("color", "linestyle")) for i in range(32)]
    assert len(set(looks)) == 32
