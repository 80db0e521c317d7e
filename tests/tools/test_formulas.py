"""The formulas of docs/formulas.toml: one for all that is registered, and each is MathML that a browser can draw."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from patchlight.methods.base import METHODS
from patchlight.metrics.base import METRICS
from tools.docs import formulas, reference

CHILDREN = {"msub": 2, "msup": 2, "munder": 2, "mover": 2, "mfrac": 2, "msubsup": 3, "munderover": 3}
NAMES = [(kind, name) for kind, entries in (("methods", METHODS), ("metrics", METRICS)) for name in entries]


def entries() -> Iterator[tuple[str, dict[str, object]]]:
    known = formulas.known()
    for kind in ("methods", "metrics"):
        for name, entry in known[kind].items():
            yield f"{kind} {name}", entry


def test_all_that_is_registered_has_formulas_and_nothing_else_has() -> None:
    known = formulas.known()
    for kind, registered in (("methods", METHODS), ("metrics", METRICS)):
        missing, unknown = set(registered) - set(known[kind]), set(known[kind]) - set(registered)
        assert not missing, f"docs/formulas.toml says nothing of the {kind} {sorted(missing)}; give a formula, or none"
        assert not unknown, f"docs/formulas.toml has {sorted(unknown)}, which are no {kind}"


def test_an_entry_is_a_few_formulas_with_their_symbols_or_says_why_there_is_none() -> None:
    for name, entry in entries():
        if "none" in entry:
            assert set(entry) == {"none"}, name
            continue
        assert set(entry) == {"latex", "where"}, name
        assert isinstance(entry["latex"], list), name
        assert 1 <= len(entry["latex"]) <= 3, name
        assert str(entry["where"]).endswith("."), name


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_every_formula_is_mathml(kind: str, name: str) -> None:
    html = formulas.block(kind, name).removeprefix("```{raw} html\n").removesuffix("\n```")
    for element in ElementTree.fromstring(f"<div>{html}</div>").iter():
        assert len(element) == CHILDREN.get(element.tag, len(element)), (name, element.tag)
        assert element.tag in ("mi", "mn", "mo", "mtext", "annotation") or "\\" not in (element.text or ""), name


def test_symbols_of_all_pages_are_reported() -> None:
    told = formulas.symbols()
    assert told.startswith("## Symbols\n")
    assert told.count("<tr>") == len(formulas.known()["symbols"])
    assert "## Symbols" in reference.methods_index()


def test_a_page_begins_with_its_summary_and_its_formula() -> None:
    page = reference.metric_page(METRICS["srg"])
    summary, formula, words = (page.index(part) for part in ("Symmetric relevance gain", "<math", "MIF removes"))
    assert summary < formula < words
    assert "<math" not in reference.method_page(METHODS["random"], {"random": {}})


def test_a_formula_goes_with_its_latex_and_an_unknown_command_is_an_error() -> None:
    math = ElementTree.fromstring(formulas.mathml(r"\sum_{i=1}^n a_i < \mu", block=True))
    assert math.get("alttext") == r"\sum_{i=1}^n a_i < \mu"
    assert [e.text for e in math.iter("annotation")] == [r"\sum_{i=1}^n a_i < \mu"]
    assert len(list(math.iter("munderover"))) == 1
    assert "∑" in math.itertext()
    assert "<munder>" in formulas.mathml(r"\operatorname*{argmax}_k f_k", block=True)
    with pytest.raises(ValueError, match="unknown command"):
        formulas.mathml(r"\unknown")
