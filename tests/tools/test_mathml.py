"""LaTeX to MathML: what stands where, and that nothing unknown is passed over."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.docs.mathml import mathml


def elements(latex: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(mathml(latex, block=True)).iter())


def text(latex: str) -> str:
    """What is drawn, from left to right."""
    root = ElementTree.fromstring(mathml(latex))
    return "".join(root.itertext())


def test_limits_stand_below_and_indices_beside() -> None:
    assert [e.tag for e in elements(r"\sum_{i=1}^n a_i")][3:4] == ["munderover"]
    tags = [e.tag for e in elements(r"\operatorname*{argmax}_k f_k^2 \int_0^1")]
    assert tags.count("munder") == 1
    assert tags.count("msubsup") == 2
    assert "munderover" not in tags


def test_signs_are_told_from_operators() -> None:
    forms = [(e.text, e.get("form")) for e in elements("a - (-b) = -c") if e.text == "−"]
    assert forms == [("−", "infix"), ("−", "prefix"), ("−", "prefix")]


def test_fences_are_as_high_as_what_they_hold_where_they_say_so() -> None:
    plain = [e.get("stretchy") for e in elements(r"\lVert x \rVert (y)") if e.tag == "mo"]
    assert plain == ["false"] * 4
    high = [e.get("stretchy") for e in elements(r"\left\lVert \frac{a}{b} \right\rVert_2") if e.tag == "mo"]
    assert high == ["true"] * 2


def test_words_and_cases() -> None:
    assert text(r"\text{for } x < 1") == "for\u00a0x<1"
    assert text(r"\operatorname{ReLU}(\hat{g} \odot \bar{A})") == "ReLU(g^⊙A‾)"
    cases = [e.tag for e in elements(r"\begin{cases} a & b \\ c & d \end{cases}")]
    assert (cases.count("mtr"), cases.count("mtd")) == (2, 4)


def test_the_latex_goes_with_the_formula() -> None:
    math = ElementTree.fromstring(mathml(r"a < \mu", block=True))
    assert math.get("alttext") == r"a < \mu"
    assert [e.text for e in math.iter("annotation")] == [r"a < \mu"]


@pytest.mark.parametrize(
    "latex",
    [r"\unknown", "a_b_c", r"\frac{a}", "{a", "a}", r"\left( a", r"\begin{cases} a", "é", r"\left\mu a \right)"],
)
def test_what_is_not_known_is_an_error(latex: str) -> None:
    with pytest.raises(ValueError, match=r"in the formula .*; tools/docs/mathml.py says what it knows"):
        mathml(latex)
