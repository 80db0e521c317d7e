"""Charts: words stay words, equal data give equal bytes, and nothing is fetched."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from patchlight.core.drawing.charts import PALETTE, Band, Dot, Line, dot_chart, line_chart, line_style, rank_chart
from tests.report.pages import Page

ODD = ["<b>$x_1$", "_hidden", "a & b", "日本\udce4\n"]


def lines() -> str:
    drawn = [Line(name, [0, 0.5, 1], [1, 0.2 * i, float("nan")], *line_style(i)) for i, name in enumerate(ODD)]
    return line_chart(drawn, x="share", percent=True, legend=True, bands=[Band([0, 1], [0, 0], [1, 1])], words="a <b>")


def dots() -> str:
    drawn = [Dot(name, -0.1 * i, PALETTE[i], -0.2, 0.3, f"{name}: {i}") for i, name in enumerate(ODD)]
    return dot_chart(drawn, x="score", zero=True, legend={PALETTE[0]: "best"})


def ranks() -> str:
    means = {name: 1.5 * i + 1 for i, name in enumerate(ODD)}
    return rank_chart(means, [ODD[:2], ODD[2:]], 1.6, dict(zip(ODD, PALETTE, strict=False)), "ranks")


@pytest.mark.parametrize("chart", [lines, dots, ranks])
def test_a_chart_is_whole_and_the_same_again(chart: object) -> None:
    assert callable(chart)
    svg = chart()
    page = Page(svg)
    assert not {"b", "style", "script", "metadata", "image"} & set(page.tags)
    words = " ".join(page.words)
    for name in ("<b>$x_1$", "_hidden", "a & b", "日本\\udce4"):
        assert name in words
    assert "url(" not in svg
    assert all((attributes.get("xlink:href") or "#").startswith("#") for _, attributes in page.elements)
    assert set(re.findall(r"var\(--\w+, #\w{6}\)", svg)) >= {f"var(--m0, {PALETTE[0]})"}
    with ThreadPoolExecutor(2) as pool:
        assert [one.result() for one in [pool.submit(chart) for _ in range(2)]] == [svg, svg]


def test_ticks_are_round_and_marks_have_titles() -> None:
    svg = dots()
    assert [f"<title>{i}" for i in range(4) if f": {i}</title>" not in svg] == []
    assert {"−0.2", "0", "0.2"} <= {word.replace("-", "−") for word in Page(svg).words}
    times = Page(dot_chart([Dot("a", 0.003, PALETTE[0]), Dot("b", 1.2, PALETTE[1])], log=True)).words
    assert {"0.01", "0.1", "1"} <= set(times)
    assert {"0 %", "50 %", "100 %"} <= set(Page(lines()).words)


def test_lines_beyond_the_palette_are_dashed() -> None:
    assert len({line_style(i) for i in range(36)}) == 36
